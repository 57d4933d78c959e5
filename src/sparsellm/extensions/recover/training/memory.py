"""Memory that training takes, in closed form."""

from __future__ import annotations

from collections.abc import Sequence

from sparsellm.extensions.recover.training.trained_weights import Train, trained_names
from sparsellm.models.blocks import Block

COPIES = 7
"""float32 copies of the trained tensors: the weights, Adam's two moments, the best state so far, the gradient of a batch,
and the float64 sum of all batches' gradients, which counts as two."""

ROUNDED_BYTES = 5
"""Additional bytes of a weight that is integers times scales: its integer, and float32 beside what is trained."""

LORA_COPIES = 3
"""float32 copies of weights with low-rank factors: the weights, what they were, and the gradient of a batch."""


def trained_bytes(
    blocks: Sequence[Block], together: bool, *, train: Train = "full", rank: int = 0, rounded: bool = False
) -> int:
    """Bytes for the training of the largest block, or of all blocks at once if `together`.

    Args:
        rounded: Whether weights are integers times scales.
    """
    sizes = [_trained_bytes(block, train, rank, rounded) for block in blocks]
    return sum(sizes) if together else max(sizes, default=0)


def _trained_bytes(block: Block, train: Train, rank: int, rounded: bool) -> int:
    """Bytes for the training of a block; its other parameters, which are cast to float32, are counted too."""
    total = sum(tensor.numel() for tensor in block.module.parameters())
    trained = trained_numbers(block, train, rank)
    if train == "full":
        return (4 * COPIES + ROUNDED_BYTES * rounded) * total
    return 4 * (LORA_COPIES * total + COPIES * trained)


def trained_numbers(block: Block, train: Train, rank: int) -> int:
    """Count the numbers that training changes in a block: its parameters, or the factors of rank `rank`."""
    parameters = dict(block.module.named_parameters())
    trained = [parameters[name] for name in trained_names(block, list(block.layers), train)]
    if train != "lora":
        return sum(tensor.numel() for tensor in trained)
    return sum(
        (tensor.numel() // (tensor.shape[-1] * tensor.shape[-2])) * min(rank, *tensor.shape[-2:]) * sum(tensor.shape[-2:])
        for tensor in trained
    )


def outside_bytes(trained: int, head: int) -> int:
    """Bytes for training parameters outside of the blocks: what they were too, and a copy of the dense model's head.

    Args:
        trained: The numbers that are trained.
        head: The numbers of the output head.
    """
    return 4 * ((COPIES + 1) * trained + head)


def predictions_bytes(*, tokens: int, width: int, batch_tokens: int, vocabulary: int, depth: int) -> int:
    """Additional bytes for distillation: the dense model's last states, three tensors of logits, and the blocks' inputs."""
    return 4 * (tokens * width + 3 * batch_tokens * vocabulary + batch_tokens * width * depth)
