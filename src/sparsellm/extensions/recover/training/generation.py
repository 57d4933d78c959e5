"""Sequences that the dense model generates, to train the pruned model on, and the cache of their keys and values."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparsellm.models.contexts import compute_dtype_context, eval_mode
from sparsellm.runtime import collectives, devices
from sparsellm.runtime.products import fast_linear_layers
from sparsellm.texts.padding import sequence_lengths

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.cache_utils import Cache, DynamicLayer

PROMPT_SHARE = 0.125
"""Length of the prompt of a generated sequence, as a fraction of the sequence length."""

AT_A_TIME = 64
"""Number of sequences that are generated in parallel."""


@torch.no_grad()
def generate_samples(
    model: PreTrainedModel,
    windows: Tensor,
    count: int,
    *,
    seed: int = 0,
    compute: torch.dtype | None = None,
    progress: Callable[[float, int], None] | None = None,
) -> Tensor:
    """Generate additional training sequences with the dense model.

    Each sequence starts with a prompt, an eighth of a calibration sequence from a random position, and is continued by sampling
    from the model's predictions at temperature 1 (LLM-QAT, Liu et al., 2023, generates all of its data this way). With few
    calibration sequences alone, training overfits. Where all calibration sequences begin with the same token, as with BOS, so
    does each prompt.

    Cost: a forward pass per token of a sequence, `AT_A_TIME` sequences in parallel.

    Args:
        windows: Calibration sequences, (samples, seq), of token ids, `PADDING` after the end of shorter ones.
        seed: Seed of the prompts and of the sampling.
        compute: Dtype in which the model computes; None for its own.
        progress: Called after each token with the number of generated sequences, of which those at work count in part, and
            their total.

    Returns:
        Token ids, (count, seq).
    """
    if count == 0:
        return windows[:0]
    samples, length = windows.shape
    lengths = sequence_lengths(windows)
    prompt_length = min(max(1, int(PROMPT_SHARE * length)), int(lengths.min()))
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(samples, (count, 1), generator=generator)
    starts = torch.randint(length - prompt_length + 1, (count, 1), generator=generator)
    starts %= lengths[rows] - prompt_length + 1  # within the sequence, where it is shorter than the others
    prompts = windows[rows, starts + torch.arange(prompt_length)]
    if samples > 1 and bool((windows[:, 0] == windows[0, 0]).all()):
        prompts[:, 0] = windows[0, 0]
    token_generator = torch.Generator(device=model.device)
    local: list[list[list[int]]] = []  # this process's batches of sequences
    batches = list(enumerate(prompts.split(AT_A_TIME)))
    with eval_mode(model), compute_dtype_context(model, compute), fast_linear_layers():
        for number, prompt in collectives.shard(batches):
            token_generator.manual_seed(seed * len(batches) + number)
            pieces, past = [prompt.to(model.device)], None
            while sum(piece.shape[1] for piece in pieces) < length:  # unlike `generate`, continues after an end-of-text token
                output = model(input_ids=pieces[-1], past_key_values=past, use_cache=True)
                if past is None:
                    preallocate(output.past_key_values, length)
                past = output.past_key_values
                pieces.append(_draw_tokens(output.logits[:, -1], token_generator))
                if progress is not None:
                    done = (len(pieces) - 1) / (length - prompt_length)
                    progress(number * AT_A_TIME + done * len(prompt), count)
            local.append(torch.cat(pieces, 1).tolist())
    return torch.tensor([sequence for batch in collectives.all_gather(local) for sequence in batch])


def _draw_tokens(logits: Tensor, generator: torch.Generator) -> Tensor:
    """A token of each row's distribution, (batch, 1). `torch.multinomial` draws a number for each entry of the vocabulary."""
    cumulative = logits.float().softmax(-1).cumsum(-1, dtype=devices.widest_float(logits.device))
    drawn = torch.rand(len(logits), 1, generator=generator, device=logits.device) * cumulative[:, -1:]
    return torch.searchsorted(cumulative, drawn, right=True).clamp_(max=logits.shape[-1] - 1)


@cache
def preallocated_layer() -> type[DynamicLayer]:
    """The class of layers in memory for a number of tokens, defined on first use: transformers takes seconds to import."""
    from transformers.cache_utils import DynamicLayer

    class PreallocatedLayer(DynamicLayer):  # type: ignore[misc]
        """The keys and values of a layer, in memory for `length` tokens; `DynamicLayer` copies all for each new token."""

        def __init__(self, layer: DynamicLayer, length: int) -> None:
            super().__init__()
            self.lazy_initialization(layer.keys, layer.values)
            self._memory = [x.new_empty((*x.shape[:-2], length, x.shape[-1])) for x in (layer.keys, layer.values)]
            self.update(layer.keys, layer.values)

        def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            """Add keys and values, (batch, heads, seq, head); return those of all tokens so far."""
            start = self.get_seq_length()
            end = start + key_states.shape[-2]
            for memory, states in zip(self._memory, (key_states, value_states), strict=True):
                memory[..., start:end, :] = states
            self.keys, self.values = (memory[..., :end, :] for memory in self._memory)
            return self.keys, self.values

    return PreallocatedLayer


def preallocate(cache: Cache, length: int) -> None:
    """Give the layers of a cache that grow with each token memory for `length` tokens, in place; other kinds are left."""
    from transformers.cache_utils import DynamicLayer

    layers = getattr(cache, "layers", [])
    for number, layer in enumerate(layers):
        if type(layer) is DynamicLayer and layer.is_initialized:
            layers[number] = preallocated_layer()(layer, length)
