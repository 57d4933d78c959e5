"""Training of weights that are integers times scales, so that they stay so after each step."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from sparsellm.errors import BadCheckpoint, NonFinite
from sparsellm.extensions.integers.quantization import Quantized, Scales, expand_groups
from sparsellm.extensions.recover.training.trained_weights import TRAINING_WIDTH, MaskedParameters
from sparsellm.models.blocks import Block

LEAST_SCALE = 1 / 16
"""Smallest fraction of its first value that a scale may fall to: it keeps its sign, and integers stay readable."""

UNIT = 12.0
"""Integers that a trained value of 1 stands for, for models of width `TRAINING_WIDTH` or less: with a learning rate of 0.002,
Adam moves a value by 0.024 integers a step. Measured on three models at 2.3 bits a weight: 16 gives about the same loss on
held-out text, 4 and 8 give larger ones."""


@dataclass(frozen=True)
class RoundedLayer:
    """A layer whose weight is scales times integers.

    Attributes:
        block: Its block.
        name: Its name within the block.
        quantized: Its integers and scales, which training sets.
    """

    block: Block
    name: str
    quantized: Quantized

    @property
    def full_name(self) -> str:
        """Its path in the model."""
        return self.block.full_name(self.name)

    @property
    def parameter(self) -> str:
        """Full name of the parameter that holds its weight."""
        return self.block.full_name(self.block.parameter(self.name))

    @property
    def unit(self) -> float:
        """Integers that a trained value of 1 stands for.

        The learning rate falls with the width of the model, and weights, with them scales, with its root (Yang et al., Tensor
        Programs V, 2022): a step in integers falls with the root, too.
        """
        width: int = self.block.layer(self.block.architecture.groups[0][0]).in_features
        return UNIT * math.sqrt(max(1.0, width / TRAINING_WIDTH))


def rounded_layers(block: Block, scales: Mapping[str, Scales], trained: Collection[str]) -> Iterator[RoundedLayer]:
    """Yield the layers of a block that have scales.

    Args:
        scales: By full name of a layer, its scales.
        trained: Full names of the trained parameters; layers in other ones are left out.

    Raises:
        BadCheckpoint: A weight is not its scales times integers.
    """
    for name, layer in block.layers.items():
        full_name = block.full_name(name)
        if full_name not in scales or block.full_name(block.parameter(name)) not in trained:
            continue
        weight = layer.weight.detach().to(block.dtypes[block.parameter(name)])
        found = scales[full_name]
        quantized = Scales(found.scales.to(weight.device, copy=True), found.format).quantized(weight)
        if quantized is None:
            raise BadCheckpoint(f"{full_name} is not its scales times integers. Get a sound copy of the checkpoint.")
        yield RoundedLayer(block, name, quantized)


class QuantizedParameters:
    r"""$W = t s_0 \odot q(V)$ with the first scales $s_0$. V, at first the integers, and t, at first 1, are trained.

    q is the nearest integer of the format, and for a kept weight the nearest other than 0, so that the mask and the stored bits
    stay. t is a number for each group of columns. Each step rounds the scales $t s_0$ to bfloat16 and W to its storage dtype:
    losses are those of what is written. Gradients pass as if nothing was rounded (Bengio et al., Estimating or Propagating
    Gradients Through Stochastic Neurons, 2013). V is stored in units of
    `RoundedLayer.unit`, so that a step is as long for all scales.

    Args:
        parameters: By full name, all parameters that gradient steps change; those without a layer in `layers` are trained.
        keep: Masks of these, by name.
        layers: The rounded layers, which make up their parameters.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], keep: Mapping[str, Tensor], layers: Sequence[RoundedLayer]
    ) -> None:
        self._layers: dict[str, list[RoundedLayer]] = {}
        for layer in layers:
            self._layers.setdefault(layer.parameter, []).append(layer)
        plain = {name: parameter for name, parameter in parameters.items() if name not in self._layers}
        self._plain = MaskedParameters(plain, {name: mask for name, mask in keep.items() if name in plain})
        self._initial = {layer.full_name: layer.quantized.scales.float() for layer in layers}
        self._names = list(parameters)
        self.trained: dict[str, nn.Parameter] = {}
        for name in self._names:
            if name in plain:
                self.trained[name] = plain[name]
            for layer in self._layers.get(name, ()):
                self.trained[f"{layer.full_name}.scales"] = nn.Parameter(torch.ones_like(self._initial[layer.full_name]))
                self.trained[f"{layer.full_name}.weight"] = nn.Parameter(layer.quantized.integers / layer.unit)

    @torch.no_grad()
    def gradients(self, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        r"""Of $G = \partial_W L$: $\partial_t L = s_0 \sum q \odot G$ over a group's columns, $\partial_V L = t s_0 G$."""
        result: list[Tensor | None] = []
        for name, gradient in zip(self._names, gradients, strict=True):
            if name not in self._layers:
                result.append(gradient)
            for layer in self._layers.get(name, ()):
                result += [None, None] if gradient is None else self._gradients(layer, gradient)
        return result

    def _gradients(self, layer: RoundedLayer, gradient: Tensor) -> list[Tensor | None]:
        """The gradients for t, (out, groups), and V, (out, in), of a layer, from that for the parameter that holds it."""
        integers, group_size = layer.quantized.integers, layer.quantized.format.group_size
        local = layer.block.linear_view(layer.name, gradient)
        columns = local.shape[1]
        size = min(group_size or columns, columns)
        sums: Tensor = pad(local * integers, (0, -columns % size)).unflatten(1, (-1, size)).sum(2)
        scales = expand_groups(layer.quantized.scales, group_size, columns)
        local.mul_(scales).mul_(layer.unit).masked_fill_(integers == 0, 0)  # in place, since it is as large as the weights
        return [sums * self._initial[layer.full_name], local]

    @torch.no_grad()
    def apply(self) -> None:
        """Write the scaled integers into the parameters, and set those of the layers."""
        self._plain.apply()
        for layer in (layer for layers in self._layers.values() for layer in layers):
            quantized = layer.quantized
            factors = self.trained[f"{layer.full_name}.scales"].clamp_(min=LEAST_SCALE)
            quantized.scales.copy_(factors * self._initial[layer.full_name])
            quantized.integers.copy_(nearest_kept(self.trained[f"{layer.full_name}.weight"] * layer.unit, quantized))
            layer.block.assign(layer.name, layer.block.rounded_to_storage(layer.name, quantized.to_dense()))


def nearest_kept(values: Tensor, present: Quantized) -> Tensor:
    """The integers that are nearest to values, (out, in); they are 0 where the present ones are, and only there."""
    keep = present.integers != 0
    integers = values.round().clamp(*present.format.limits(float(keep.float().mean())))
    smallest = torch.where(values < 0, -1.0, 1.0)
    return torch.where(integers == 0, smallest, integers).masked_fill_(~keep, 0)


def store_scales(scales: Mapping[str, Scales], layers: Sequence[RoundedLayer]) -> None:
    """Copy the trained scales of layers into those by full name.

    Raises:
        NonFinite: The storage dtype cannot hold the scaled integers of a layer so that they can be read again.
    """
    for layer in layers:
        stored = scales[layer.full_name]
        stored.scales.copy_(layer.quantized.scales)
        dtype = layer.block.dtypes[layer.block.parameter(layer.name)]
        weight = layer.block.layer(layer.name).weight.detach().to(dtype)
        read = Scales(layer.quantized.scales, stored.format).quantized(weight)
        if read is None or not torch.equal(read.integers, layer.quantized.integers):
            raise NonFinite(f"The scales of {layer.full_name} became too small for {dtype}. Prune the model in bfloat16.")
