"""Rounding of a layer's final weights to integers of a few bits, whose scales the block keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsellm.models.blocks import Block
from sparsellm.runtime import collectives, devices
from sparsellm.solvers.problem import LayerProblem
from sparsellm.solvers.quantization import (
    SCALE_BITS,
    Quantized,
    expand_groups,
    group_count,
    integer_range,
    round_compensated,
    round_to_nearest,
    to_integers,
)
from sparsellm.solvers.statistics import Gram, InputRMS


@dataclass(frozen=True)
class Scales:
    """How a weight is quantized: each number is a scale times an integer.

    Attributes:
        scales: (out, groups) bfloat16.
        bits: Bits of an integer.
        group_size: Columns that share a scale; 0 for whole rows.
        transposed: Whether the weight is stored as (in, out), as in GPT-2.
    """

    scales: Tensor
    bits: int
    group_size: int
    transposed: bool = False

    def quantized(self, weight: Tensor) -> Quantized | None:
        """The integers of a weight, (out, in), that is the scales times integers, rounded to its dtype; None if it is not."""
        factors = expand_groups(self.scales.float(), self.group_size, weight.shape[1])
        integers = to_integers(weight.float(), factors, integer_range(self.bits, 0))
        if not torch.equal((integers * factors).to(weight.dtype), weight):
            return None
        return Quantized(integers.to(torch.int8), self.scales, self.bits, self.group_size)


@dataclass(frozen=True)
class IntegerValues:
    """What the kept weights are rounded to.

    Attributes:
        bits: 3, 4 or 8.
        group_size: Columns of a group, a multiple of 64; 0 for whole rows.
    """

    bits: int
    group_size: int

    def round(self, weight: Tensor, problem: LayerProblem) -> Quantized:
        """Round a weight, (out, in), on its support, with the smallest output error that the problem's statistics tell of.

        With a Gram matrix errors are compensated, without one each weight is rounded to the nearest number. With a curvature,
        which couples the rows, the target is the solved weight, where the coupled error is least; else it is the problem's.
        """
        keep, inputs = weight != 0, problem.inputs
        if isinstance(inputs, Gram) and inputs.tokens:
            target = problem.weight if problem.curvature is None else weight
            return round_compensated(target, problem.gram, keep, bits=self.bits, group_size=self.group_size, start=weight)
        importance = inputs.rms.square() if isinstance(inputs, InputRMS) and inputs.tokens else None
        return round_to_nearest(weight, self.bits, self.group_size, mask=keep, importance=importance)

    def of(self, full_name: str) -> IntegerValues:
        """The values of a layer: these."""
        return self

    def bits_per_weight(self, weight: Tensor) -> float:
        """Bits that a weight of a rounded layer, (out, in), takes once it is packed: integers, mask and scales."""
        keep = weight.flatten() != 0
        groups = torch.nn.functional.pad(keep, (0, -len(keep) % 8)).view(-1, 4).any(1)
        kept, used = (int(x) for x in devices.to_python([keep.count_nonzero(), groups.count_nonzero()]))
        mask = min(-(-len(keep) // 8), -(-len(groups) // 8) + -(-used // 2))
        integers = min(self._bytes_of(len(keep)), self._bytes_of(kept) + mask)  # without a mask zeros are integers too
        scales = len(weight) * group_count(weight.shape[1], self.group_size) * SCALE_BITS
        return (8 * integers + scales) / len(keep)

    def _bytes_of(self, count: int) -> int:
        """Bytes of integers: those of 3 bits are planes of single bits."""
        return 3 * -(-count // 8) if self.bits == 3 else -(-count * self.bits // 8)

    def rounded_layer(self, block: Block, name: str, weight: Tensor, problem: LayerProblem) -> Tensor:
        """Round a layer's final weight, (out, in), keep its scales in the block, and return the rounded weight, float32."""
        quantized = self.round(weight, problem)
        block.scales[name] = quantized.scales
        return quantized.to_dense()

    def broadcast_scales(self, block: Block, name: str, owner: int) -> None:
        """Send the scales of a layer from the process that rounded it to all."""
        if collectives.world() > 1:
            layer = block.layer(name)
            groups = group_count(layer.in_features, self.group_size)
            scales = block.scales.get(name)
            empty = layer.weight.new_empty(layer.out_features, groups)
            scales = empty if scales is None else scales.to(empty.dtype)  # not every backend sends bfloat16
            block.scales[name] = collectives.broadcast(owner, scales.contiguous()).bfloat16()


@dataclass(frozen=True)
class LayerValues:
    """What the kept weights of each layer are rounded to.

    Attributes:
        by_layer: The values by the layer's full name.
    """

    by_layer: Mapping[str, IntegerValues]

    def of(self, full_name: str) -> IntegerValues:
        """The values of a layer."""
        return self.by_layer[full_name]

    def rounded_layer(self, block: Block, name: str, weight: Tensor, problem: LayerProblem) -> Tensor:
        """As `IntegerValues.rounded_layer`, with the values of the layer."""
        return self.of(block.full_name(name)).rounded_layer(block, name, weight, problem)

    def broadcast_scales(self, block: Block, name: str, owner: int) -> None:
        """As `IntegerValues.broadcast_scales`, with the values of the layer."""
        self.of(block.full_name(name)).broadcast_scales(block, name, owner)


Values = IntegerValues | LayerValues
"""What the kept weights are rounded to: all alike, or each layer's on their own."""
