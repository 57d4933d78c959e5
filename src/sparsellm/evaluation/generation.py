"""Greedy text generation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sparsellm.checkpoints.loading import compute_dtype, context_length
from sparsellm.models.contexts import compute_dtype_context, eval_mode
from sparsellm.models.loaded_model import LoadedModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENS = 48
"""Maximum number of generated tokens, a few lines of text."""

NOT_IN_MEMORY = "(not written: the model is read block by block)"


@torch.no_grad()
def generate_text(loaded: LoadedModel, tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
    """Continue a prompt by greedy decoding, up to `TOKENS` tokens or the end-of-sequence token.

    No key-value cache is used, so that every model family works: each token is computed from all previous tokens, up to the
    model's context length.

    Args:
        loaded: The model.
        tokenizer: Its tokenizer.
        prompt: Text to continue.

    Returns:
        The continuation without the prompt, or `NOT_IN_MEMORY` for an offloaded model.
    """
    if loaded.weights.on_disk:
        return NOT_IN_MEMORY
    model = loaded.model
    context = context_length(model.config)
    tokens = tokenizer(prompt, return_tensors="pt")["input_ids"].to(model.device)
    start = tokens.shape[1]
    with eval_mode(model), compute_dtype_context(model, compute_dtype(model)):
        for _ in range(TOKENS):
            logits = model(input_ids=tokens[:, -context:], use_cache=False).logits[0, -1]
            tokens = torch.cat([tokens, logits.argmax().view(1, 1)], dim=1)
            if int(tokens[0, -1]) == tokenizer.eos_token_id:
                break
    return str(tokenizer.decode(tokens[0, start:], skip_special_tokens=True))
