"""How much memory gradient steps take, known before they start."""

from __future__ import annotations

from collections.abc import Sequence

from sparsellm.models.blocks import Block

COPIES = 7
"""float32 copies of what is trained: the weights, Adam's two moments, the best state so far, a batch's gradient, and, as two,
the sum of all batches' in float64."""


def trained_bytes(blocks: Sequence[Block], together: bool) -> int:
    """What gradient steps hold: over the largest block, or over all of them together."""
    sizes = [sum(tensor.numel() for tensor in block.module.parameters()) for block in blocks]
    return COPIES * 4 * (sum(sizes) if together else max(sizes, default=0))


def predictions_bytes(tokens: int, width: int, batch_tokens: int, vocabulary: int, depth: int) -> int:
    """What the model's stage holds besides: the dense model's last states, a batch's logits three times, the blocks' inputs."""
    return 4 * (tokens * width + 3 * batch_tokens * vocabulary + batch_tokens * width * depth)
