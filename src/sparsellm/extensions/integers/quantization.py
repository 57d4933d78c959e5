r"""Rounding of weights to integers of a few bits with a scale for each group of columns of a row.

A weight is :math:`w = s q` with an integer :math:`q` within `IntegerFormat.limits`, so that zero is exact. The scale may be
negative, so that the one integer without an opposite serves the larger side. Groups are along the columns of the dense weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sparsellm.extensions.integers.formats import MASK_WORD, IntegerFormat
from sparsellm.models.blocks import Block
from sparsellm.runtime import collectives
from sparsellm.runtime.products import matmul
from sparsellm.solvers.linalg import add_diagonal, check_pivot, conjugate_gradient_refit, inverse_factor_
from sparsellm.solvers.problem import LayerProblem
from sparsellm.solvers.statistics import Gram, InputRMS

CLIPS = tuple(1 - step / 40 for step in range(24))
"""Fractions of a group's largest weight that are tried as its largest representable number."""

DAMPING = 0.01
"""Added to the diagonal of the Gram matrix, relative to its mean, as the solvers do."""

SWEEPS = 8
"""Passes of coordinate descent; more lower the error by less than a hundredth."""

ROUNDING_STEPS = 50
"""Conjugate gradient steps toward the best weights without rounding."""

MAX_BUDGET = 2**22
"""Weights that are rounded at a time, which bounds temporary memory."""


@dataclass(frozen=True)
class Quantized:
    """A weight as integers and scales.

    Attributes:
        integers: (out, in) int8, in the range of the format. A kept weight may be 0.
        scales: (out, groups) bfloat16.
        format: Their format.
    """

    integers: Tensor
    scales: Tensor
    format: IntegerFormat

    def to_dense(self) -> Tensor:
        """The weight, (out, in) float32, without -0.0."""
        return dequantized(self.integers, self.scales, self.format.group_size)


@dataclass(frozen=True)
class Scales:
    """The scales of a stored weight each of whose numbers is a scale times an integer.

    Attributes:
        scales: (out, groups) bfloat16.
        format: The format of the integers.
        transposed: Whether the weight is stored as (in, out), as in GPT-2.
    """

    scales: Tensor
    format: IntegerFormat
    transposed: bool = False

    def quantized(self, weight: Tensor) -> Quantized | None:
        """The integers of a weight, (out, in), that is the scales times integers, rounded to its dtype; None if it is not."""
        if self.scales.shape != (len(weight), self.format.groups(weight.shape[1])):
            return None
        factors = expand_groups(self.scales.float(), self.format.group_size, weight.shape[1])
        integers = to_integers(weight.float(), factors, self.format.limits(0))
        if not torch.equal((integers * factors).to(weight.dtype), weight):
            return None
        return Quantized(integers.to(torch.int8), self.scales, self.format)


def expand_groups(values: Tensor, group_size: int, columns: int) -> Tensor:
    """Repeat a value of each group, (out, groups), for each of its columns: (out, in)."""
    if group_size == 0 or values.shape[1] == 1:
        return values[:, :1].expand(-1, columns)
    return values.repeat_interleave(group_size, 1)[:, :columns]


def dequantized(integers: Tensor, scales: Tensor, group_size: int) -> Tensor:
    """Return integers, (out, in), times the scales of their groups, (out, groups): (out, in) float32, without -0.0."""
    return integers.float().mul_(expand_groups(scales.float(), group_size, integers.shape[1])).add_(0.0)


def round_to_nearest(
    weight: Tensor, format: IntegerFormat, *, mask: Tensor | None = None, importance: Tensor | None = None
) -> Quantized:
    """Round to the nearest integer multiples of the scale that has the smallest squared error of those tried.

    Args:
        weight: (out, in).
        format: The format of the integers.
        mask: (out, in) bool, True where a weight is kept; others become 0. None if the weight is zero there.
        importance: (in,), weights of the squared errors, such as the Gram diagonal; None for equal ones.
    """
    kept = weight.float() if mask is None else weight.float() * mask
    columns = kept.shape[1]
    size = format.group_size or columns
    padded = torch.nn.functional.pad(kept, (0, -columns % size)).unflatten(1, (-1, size))
    weights = None if importance is None else torch.nn.functional.pad(importance.float(), (0, -columns % size)).view(-1, size)
    rows = max(1, MAX_BUDGET // padded[0].numel())
    limits = format.limits(_density(kept != 0 if mask is None else mask))
    scales = torch.cat([_search_scales(part, limits, weights) for part in padded.split(rows)])
    integers = to_integers(padded, scales.unsqueeze(2), limits).flatten(1)[:, :columns]
    return Quantized(integers.to(torch.int8), scales.bfloat16(), format)


def _density(keep: Tensor) -> float:
    """The fraction of weights that are kept."""
    return int(keep.count_nonzero()) / max(keep.numel(), 1)


def to_integers(weight: Tensor, scales: Tensor, limits: tuple[int, int]) -> Tensor:
    """The integers nearest to weight / scale within limits, in the weight's dtype; 0 where the scale is 0."""
    inverse = torch.where(scales == 0, torch.inf, scales).reciprocal()
    return (weight * inverse).round_().clamp_(*limits)


def _search_scales(groups: Tensor, limits: tuple[int, int], importance: Tensor | None) -> Tensor:
    """The best scale of each group, (rows, groups), as float32 numbers that bfloat16 holds."""
    top = groups.abs().amax(2) / limits[1]
    best: Tensor = top
    least = torch.full_like(top, torch.inf)
    for clip in CLIPS if sum(limits) == 0 else (*CLIPS, *(-clip for clip in CLIPS)):
        scale = (top * clip).bfloat16().float()
        errors = (to_integers(groups, scale.unsqueeze(2), limits).mul_(scale.unsqueeze(2)) - groups).square_()
        error = (errors if importance is None else errors * importance).sum(2)
        best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
    return best


def gptq(weight: Tensor, gram: Tensor, format: IntegerFormat, *, mask: Tensor | None = None) -> Quantized:
    r"""Round column by column, with the error of each passed on to the columns that follow.

    With :math:`U` upper triangular, :math:`G^{-1} = U^\top U`:

    .. math:: w_k \leftarrow w_k - \frac{w_j - \hat w_j}{U_{jj}} U_{jk} \quad (k > j)

    Follows Frantar et al., GPTQ: accurate post-training quantization for generative pre-trained transformers (ICLR 2023),
    Algorithm 1, with the columns of the largest inputs first and a scale for each group of columns, which is searched before,
    with errors weighted by the Gram diagonal. With a mask, removed weights take no part; the formula, whose inverse is of the
    whole Gram matrix, is then a heuristic.

    Args:
        weight: (out, in).
        gram: G, (in, in), positive definite.
        format: The format of the integers.
        mask: (out, in) bool, True where a weight is kept; None for all.

    Raises:
        SingularGram: If the Gram matrix is not positive definite.
    """
    keep = torch.ones_like(weight, dtype=torch.bool) if mask is None else mask
    nearest = round_to_nearest(weight, format, mask=keep, importance=gram.diagonal())
    limits, order = format.limits(_density(keep)), gram.diagonal().argsort(descending=True, stable=True)
    factor, pivot = inverse_factor_(gram[order][:, order])
    check_pivot(pivot, len(gram), 0.0)
    columns, keep = weight.T[order].float(), keep.T[order].float()  # (in, out)
    scales = expand_groups(nearest.scales.float(), format.group_size, len(gram)).T[order]
    integers = torch.empty_like(columns)
    for start in range(0, len(columns), MASK_WORD):
        stop = min(start + MASK_WORD, len(columns))
        panel, errors = columns[start:stop], torch.empty_like(columns[start:stop])
        for j in range(stop - start):
            row, column = factor[start + j, start + j : stop], start + j
            integers[column] = to_integers(panel[j], scales[column], limits) * keep[column]
            errors[j] = (panel[j] * keep[column] - integers[column] * scales[column]) / row[0]
            panel[j:].addr_(row, errors[j], alpha=-1)
        columns[stop:].addmm_(factor[start:stop, stop:].T, errors, alpha=-1)
    integers = integers[order.argsort()].T.to(torch.int8).contiguous()
    return Quantized(integers, nearest.scales, format)


def round_compensated(
    target: Tensor, gram: Tensor, mask: Tensor, *, format: IntegerFormat, start: Tensor | None = None
) -> Quantized:
    r"""Find integers and scales on a support that lower :math:`\mathrm{tr}\,(Q - T) G (Q - T)^\top` in each row.

    Coordinate descent: each integer and each scale in turn becomes its best value given all others, so that every step lowers
    the error and only kept weights compensate. It starts at `gptq` of the weights that are best without rounding.

    Follows Behdin et al., QuantEase: optimization-based quantization for language models (2023), Algorithm 1. Departs from it:
    on a support, with scales that are updated too, and without its relaxed steps.

    Cost: a factorization of (in, in), and `SWEEPS` + 2 products of (out, in) by (in, in); up to `ROUNDING_STEPS` more if the
    start is not the best one.

    Args:
        target: T, (out, in).
        gram: G, (in, in), positive semi-definite; damped by `DAMPING`.
        mask: (out, in) bool, the support: True where a weight is kept.
        format: The format of the integers.
        start: (out, in), weights from which the best ones without rounding are sought; None for the target's.

    Raises:
        SingularGram: If the damped Gram matrix is not positive definite.
    """
    target, gram = target.float(), add_diagonal(gram.float(), DAMPING)
    best = conjugate_gradient_refit(
        (target if start is None else start.float()) * mask, target, gram, keep=mask, steps=ROUNDING_STEPS, tolerance=1e-5
    )
    rounded = gptq(best, gram, format, mask=mask)
    descent = _Descent(rounded, target, gram, mask)
    for _ in range(SWEEPS):
        descent.sweep()
    return Quantized(descent.integers.T.to(torch.int8).contiguous(), descent.scales.T.bfloat16(), format)


class _Descent:
    """Coordinate descent over integers (in, out) and scales (groups, out), with the gradient G (Q - T)ᵀ kept up to date."""

    def __init__(self, start: Quantized, target: Tensor, gram: Tensor, keep: Tensor) -> None:
        self.integers, self.scales = (part.T.to(gram.dtype).contiguous() for part in (start.integers, start.scales))
        self._gram, self._size = gram, start.format.group_size or len(gram)
        self._keep, self._limits = keep.T.to(gram.dtype).contiguous(), start.format.limits(_density(keep))
        self._gradient = matmul(gram, (start.to_dense() - target).T.to(gram.dtype))

    def sweep(self) -> None:
        """Update each scale, then the integers of its group, from left to right."""
        for number in range(len(self.scales)):
            start, stop = number * self._size, min((number + 1) * self._size, len(self._gram))
            self._update_scale(number, start, stop)
            for first in range(start, stop, MASK_WORD):
                self._update_panel(number, first, min(first + MASK_WORD, stop))

    def _update_scale(self, number: int, start: int, stop: int) -> None:
        """Set the scales of a group to their best values, where these, rounded to bfloat16, lower the error."""
        integers, scale = self.integers[start:stop], self.scales[number]
        curvature = (integers * (self._gram[start:stop, start:stop] @ integers)).sum(0)
        slope = (integers * self._gradient[start:stop]).sum(0)
        best = (scale - torch.where(curvature > 0, slope / curvature, 0)).bfloat16().to(scale.dtype)
        change = best - scale
        change *= (best * scale > 0) & (change * (change * curvature + 2 * slope) < 0)
        self.scales[number] = scale + change
        self._gradient += matmul(self._gram[:, start:stop], integers * change)

    def _update_panel(self, number: int, start: int, stop: int) -> None:
        """Set the integers of up to `MASK_WORD` columns, one column after another, to their best values."""
        scale, panel = self.scales[number], slice(start, stop)
        gram, gradient = self._gram[panel, panel], self._gradient[panel].clone()
        changes = torch.empty_like(self.integers[panel])
        for j, integers in enumerate(self.integers[panel]):
            best = to_integers(integers * scale - gradient[j] / gram[j, j], scale, self._limits) * self._keep[start + j]
            changes[j] = (best - integers) * scale
            integers.copy_(best)
            gradient.addr_(gram[j], changes[j])
        self._gradient += matmul(self._gram[:, panel], changes)


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
