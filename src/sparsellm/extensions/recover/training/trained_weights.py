r"""The tensors that gradient steps train, with fixed masks: the parameters, or low-rank factors of a change to them.

And the memory that their training takes, in closed form.

The factors follow Zimmer et al., PERP: Rethinking the Prune-Retrain Paradigm in the Era of LLMs (2023), which retrains pruned
models by LoRA (Hu et al., 2022) with the mask inside the product.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from sparsellm.methods import Plan
from sparsellm.models.blocks import Block

Train = Literal["full", "lora"]
"""Which parameters of the pruned blocks are trained: all, or low-rank changes of the pruned layers."""

TRAINING_WIDTH = 256
"""Width of the models on which the learning rates were chosen."""


COPIES = 7
"""float32 copies of the trained tensors: the weights, Adam's two moments, the best state so far, the gradient of a batch,
and the float64 sum of all batches' gradients, which counts as two."""

ROUNDED_BYTES = 5
"""Additional bytes of a weight that is integers times scales: its integer, and float32 beside what is trained."""

LORA_COPIES = 3
"""float32 copies of weights with low-rank factors: the weights, what they were, and the gradient of a batch."""


class TrainedWeights(Protocol):
    """The tensors that the optimizer changes, and how they set the model's parameters."""

    @property
    def trained(self) -> Mapping[str, nn.Parameter]:
        """The trained tensors by name."""
        ...

    def gradients(self, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Turn gradients for the parameters into gradients for the trained tensors; None for those without one."""
        ...

    def apply(self) -> None:
        """Set the parameters from the trained tensors; pruned weights become zero."""
        ...


class MaskedParameters:
    """The parameters themselves; entries that are False in their mask stay zero."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], keep: Mapping[str, Tensor]) -> None:
        self.trained, self._keep = parameters, keep

    def gradients(self, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """The gradients as they are."""
        return gradients

    @torch.no_grad()
    def apply(self) -> None:
        """Set the pruned weights to zero, not to -0.0 as a product would."""
        for name, mask in self._keep.items():
            self.trained[name].masked_fill_(~mask, 0)


class MaskedLoRA:
    r"""$W = M \odot (W_0 + B A)$ with fixed mask M and weight $W_0$; B, (out, rank), and A, (rank, in), are trained.

    A starts as in LoRA (uniform within $\pm 1/\sqrt{\mathrm{in}}$), B as zero. LoRA's scale s is 1: with Adam it only changes
    the learning rate. Weights that stand in one tensor, such as those of experts, have factors of their own.

    Memory: beside the parameters a copy of each, $W_0$, and their gradients, but not the optimizer's moments.

    Args:
        parameters: The weights by name, each (…, out, in).
        keep: Masks by name, of the parameters' shapes.
        rank: Rank of B A, at most the smaller side of each weight.
        seed: Seed of A.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], keep: Mapping[str, Tensor], *, rank: int, seed: int) -> None:
        self._parameters, self._keep = parameters, keep
        self._initial = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        generator = torch.Generator().manual_seed(seed)
        self.trained: dict[str, nn.Parameter] = {}
        for name, parameter in parameters.items():
            *stacked, outputs, inputs = parameter.shape
            size = min(rank, outputs, inputs)
            uniform = 2 * torch.rand(*stacked, size, inputs, generator=generator) - 1
            self.trained[f"{name}.A"] = nn.Parameter((uniform / math.sqrt(inputs)).to(parameter))
            self.trained[f"{name}.B"] = nn.Parameter(parameter.new_zeros(*stacked, outputs, size))

    @torch.no_grad()
    def gradients(self, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        r"""Of $G = M \odot \partial_W L$: $\partial_A L = B^\top G$ and $\partial_B L = G A^\top$."""
        result: list[Tensor | None] = []
        for name, gradient in zip(self._parameters, gradients, strict=True):
            if gradient is None:
                result += [None, None]
                continue
            masked = gradient.masked_fill(~self._keep[name], 0) if name in self._keep else gradient
            result += [self.trained[f"{name}.B"].mT @ masked, masked @ self.trained[f"{name}.A"].mT]
        return result

    @torch.no_grad()
    def apply(self) -> None:
        """Write the masked sums into the parameters."""
        for name, parameter in self._parameters.items():
            weight = self._initial[name] + self.trained[f"{name}.B"] @ self.trained[f"{name}.A"]
            parameter.copy_(weight.masked_fill_(~self._keep[name], 0) if name in self._keep else weight)


def trained_names(block: Block, layers: Sequence[str], train: Train, targets: Iterable[str] | None = None) -> list[str]:
    """Names, within a block, of the parameters that are trained; those of layers that were not pruned never are.

    Args:
        layers: The pruned layers, by name within the block.
        targets: Full names of the layers that get low-rank changes; None for all pruned ones.
    """
    fixed = block.parameters_of(set(block.layers) - set(layers))
    names = [name for name, _ in block.module.named_parameters() if name not in fixed]
    if train == "lora":
        chosen = {block.parameter(name) for name in layers if targets is None or block.full_name(name) in targets}
        return [name for name in names if name in chosen]
    return names


def pruned_blocks(blocks: Iterable[Block], plan: Plan) -> list[Block]:
    """The blocks that have a layer in the plan."""
    return [block for block in blocks if any(block.full_name(name) in plan for name in block.layers)]


def trained_bytes(block: Block, *, train: Train = "full", rank: int = 0, rounded: bool = False) -> int:
    """Bytes for the training of a block; its other parameters, which are cast to float32, are counted too.

    Args:
        rounded: Whether weights are integers times scales.
    """
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
