"""Rounding of a layer's final weights to integers of a few bits, whose scales the block keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from sparsellm.extensions.integers.formats import IntegerFormat
from sparsellm.extensions.integers.quantization import Quantized, round_compensated, round_to_nearest
from sparsellm.models.blocks import Block
from sparsellm.runtime import collectives
from sparsellm.solvers.problem import LayerProblem
from sparsellm.solvers.statistics import Gram, InputRMS


@dataclass(frozen=True, repr=False)
class IntegerValues:
    """The integer formats that the kept weights of each layer are rounded to.

    Attributes:
        format: The format of all layers but those in `by_layer`; None if these are all.
        by_layer: Formats by the layer's full name.
    """

    format: IntegerFormat | None = None
    by_layer: Mapping[str, IntegerFormat] = field(default_factory=dict)

    def __repr__(self) -> str:
        """The fields of the format, as the reports of all versions show them."""
        fields = vars(self.format) if self.format else {"by_layer": self.by_layer}
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in fields.items())})"

    def of(self, full_name: str) -> IntegerFormat:
        """The format of a layer."""
        return self.format or self.by_layer[full_name]

    def fields_of(self, full_name: str, weight: Tensor) -> dict[str, Any]:
        """The entries on its format in the result of a rounded layer, as `IntegerFormat.fields_of`."""
        return self.of(full_name).fields_of(weight)

    def project(self, block: Block, name: str, weight: Tensor, problem: LayerProblem) -> Tensor:
        """Round a layer's final weight, (out, in), keep its scales in the block, and return the rounded weight, float32."""
        quantized = round_layer(weight, problem, self.of(block.full_name(name)))
        block.scales[name] = quantized.scales
        return quantized.to_dense()

    def broadcast(self, block: Block, name: str, owner: int) -> None:
        """Send the scales of a layer from the process that rounded it to all."""
        if collectives.world() > 1:
            layer = block.layer(name)
            groups = self.of(block.full_name(name)).groups(layer.in_features)
            scales = block.scales.get(name)
            empty = layer.weight.new_empty(layer.out_features, groups)
            scales = empty if scales is None else scales.to(empty.dtype)  # not every backend sends bfloat16
            block.scales[name] = collectives.broadcast(owner, scales.contiguous()).bfloat16()


def round_layer(weight: Tensor, problem: LayerProblem, format: IntegerFormat) -> Quantized:
    """Round a weight, (out, in), on its support, with the smallest output error that the problem's statistics tell of.

    With a Gram matrix errors are compensated, without one each weight is rounded to the nearest number. With a curvature,
    which couples the rows, the target is the solved weight, where the coupled error is least; else it is the problem's.
    """
    keep, inputs = weight != 0, problem.inputs
    if isinstance(inputs, Gram) and inputs.tokens:
        target = problem.weight if problem.curvature is None else weight
        return round_compensated(target, problem.gram, keep, format=format, start=weight)
    importance = inputs.rms.square() if isinstance(inputs, InputRMS) and inputs.tokens else None
    return round_to_nearest(weight, format, mask=keep, importance=importance)
