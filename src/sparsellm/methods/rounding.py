"""Rounding of a layer's final weights to integers of a few bits, whose scales the block keeps."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from sparsellm.models.blocks import Block
from sparsellm.runtime import collectives
from sparsellm.solvers.problem import LayerProblem
from sparsellm.solvers.quantization import Quantized, round_compensated, round_to_nearest
from sparsellm.solvers.statistics import Gram, InputRMS


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

    def rounded_layer(self, block: Block, name: str, weight: Tensor, problem: LayerProblem) -> Tensor:
        """Round a layer's final weight, (out, in), keep its scales in the block, and return the rounded weight, float32."""
        quantized = self.round(weight, problem)
        block.scales[name] = quantized.scales
        return quantized.to_dense()

    def broadcast_scales(self, block: Block, name: str, owner: int) -> None:
        """Send the scales of a layer from the process that rounded it to all."""
        if collectives.world() > 1:
            layer = block.layer(name)
            groups = -(-layer.in_features // (self.group_size or layer.in_features))
            scales = block.scales.get(name)
            empty = layer.weight.new_empty(layer.out_features, groups)
            scales = empty if scales is None else scales.to(empty.dtype)  # not every backend sends bfloat16
            block.scales[name] = collectives.broadcast(owner, scales.contiguous()).bfloat16()
