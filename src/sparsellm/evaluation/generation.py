"""What a model writes: the likeliest continuation of a prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sparsellm.checkpoints.loaded_model import LoadedModel
from sparsellm.checkpoints.loading import compute_dtype, context_length
from sparsellm.models.contexts import compute_dtype_context, eval_mode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENS = 48
"""Of a continuation: some lines of text."""

NOT_IN_MEMORY = "(not written: the model is read block by block)"


@torch.no_grad()
def generate_text(loaded: LoadedModel, tokenizer: PreTrainedTokenizerBase, prompt: str) -> str:
    """The text by which the model goes on, each token the likeliest: the same every time.

    Each token reads all those before it anew, as many as the model was made for: slow, but the same for every family.
    A model that is not in memory writes nothing, and the text says so.
    """
    if loaded.offloaded:
        return NOT_IN_MEMORY
    model = loaded.model
    longest = context_length(model.config)
    tokens = tokenizer(prompt, return_tensors="pt")["input_ids"].to(model.device)
    start = tokens.shape[1]
    with eval_mode(model), compute_dtype_context(model, compute_dtype(model)):
        for _ in range(TOKENS):
            scores = model(input_ids=tokens[:, -longest:], use_cache=False).logits[0, -1]
            tokens = torch.cat([tokens, scores.argmax().view(1, 1)], dim=1)
            if int(tokens[0, -1]) == tokenizer.eos_token_id:
                break
    return str(tokenizer.decode(tokens[0, start:], skip_special_tokens=True))
