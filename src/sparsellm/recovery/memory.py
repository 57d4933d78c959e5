"""Memory that training takes, in closed form."""

from __future__ import annotations

from collections.abc import Sequence

from sparsellm.models.blocks import Block

COPIES = 7
"""float32 copies of the trained parameters: the weights, Adam's two moments, the best state so far, the gradient of a batch,
and the float64 sum of all batches' gradients, which counts as two."""


def trained_bytes(blocks: Sequence[Block], together: bool) -> int:
    """Bytes for the training of the largest block, or of all blocks at once if `together`."""
    sizes = [sum(tensor.numel() for tensor in block.module.parameters()) for block in blocks]
    return COPIES * 4 * (sum(sizes) if together else max(sizes, default=0))


def predictions_bytes(*, tokens: int, width: int, batch_tokens: int, vocabulary: int, depth: int) -> int:
    """Additional bytes for distillation: the dense model's last states, three tensors of logits, and the blocks' inputs."""
    return 4 * (tokens * width + 3 * batch_tokens * vocabulary + batch_tokens * width * depth)
