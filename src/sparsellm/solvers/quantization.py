r"""Rounding of weights to integers of a few bits with a scale for each group of columns of a row.

A weight is :math:`w = s q` with an integer :math:`|q| \le 2^{b-1} - 1`, so that zero is exact. Groups are along the columns of
the dense weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from sparsellm.errors import InvalidSetting

Bits = Literal[3, 4, 8]
"""Widths of an integer that can be stored."""

GROUP_UNIT = 64
"""Columns of a mask word; a group is a multiple of them, so that no word has two scales."""

SCALE_BITS = 16
"""Bits of a scale (bfloat16)."""

CLIPS = tuple(1 - step / 40 for step in range(24))
"""Fractions of a group's largest weight that are tried as its largest representable number."""

MAX_BUDGET = 2**22
"""Weights that are rounded at a time, which bounds temporary memory."""


@dataclass(frozen=True)
class Quantized:
    """A weight as integers and scales.

    Attributes:
        integers: (out, in) int8, of absolute value up to 2^(bits - 1) - 1. A kept weight may be 0.
        scales: (out, groups) bfloat16, at least 0.
        bits: Bits of an integer.
        group_size: Columns of a group; the last group of a row may have fewer. 0 for one group a row.
    """

    integers: Tensor
    scales: Tensor
    bits: int
    group_size: int

    def to_dense(self) -> Tensor:
        """The weight, (out, in) float32."""
        return self.integers.float() * expand_groups(self.scales.float(), self.group_size, self.integers.shape[1])


def check_format(bits: int, group_size: int) -> None:
    """Raise InvalidSetting for a number of bits or a group size that cannot be stored."""
    if bits not in get_args(Bits):
        raise InvalidSetting(f"Values can have 3, 4 or 8 bits, got {bits}.")
    if group_size < 0 or group_size % GROUP_UNIT:
        raise InvalidSetting(f"`group_size` must be a multiple of {GROUP_UNIT} columns, or 0 for whole rows, got {group_size}.")


def default_group_size(bits: int, density: float) -> int:
    """Columns of a group by default: whole rows for 8 bits, else about 64 kept weights, rounded to a power of two.

    Args:
        density: The fraction of weights that are kept, in (0, 1].
    """
    if bits == 8:
        return 0
    natural = GROUP_UNIT / max(density, 1 / 1024)
    return 1 << max(6, round(float(torch.tensor(natural).log2())))


def bits_per_weight(density: float, bits: int, group_size: int, columns: int) -> float:
    """Bits that a weight takes in the stored form, mask and scales included.

    The mask, none if all weights are kept, takes a bit a weight, or less where groups of four are removed together: removed
    weights are taken to be at random positions.

    Args:
        density: The fraction of weights that are kept, in (0, 1].
        bits: Bits of a value.
        group_size: Columns of a group, 0 for whole rows.
        columns: Columns of the weight.
    """
    mask = 0.0 if density == 1 else min(1.0, 0.25 + 1 - (1 - density) ** 4)
    return mask + density * bits + SCALE_BITS * group_count(columns, group_size) / columns


def group_count(columns: int, group_size: int) -> int:
    """Number of groups of a row."""
    return -(-columns // group_size) if group_size else 1


def expand_groups(values: Tensor, group_size: int, columns: int) -> Tensor:
    """Repeat a value of each group, (out, groups), for each of its columns: (out, in)."""
    if group_size == 0 or values.shape[1] == 1:
        return values[:, :1].expand(-1, columns)
    return values.repeat_interleave(group_size, 1)[:, :columns]


def round_to_nearest(
    weight: Tensor, bits: int, group_size: int, *, mask: Tensor | None = None, importance: Tensor | None = None
) -> Quantized:
    """Round to the nearest integer multiples of the scale that has the smallest squared error of those tried.

    Args:
        weight: (out, in).
        bits: 3, 4 or 8.
        group_size: Columns of a group, a multiple of 64; 0 for whole rows.
        mask: (out, in) bool, True where a weight is kept; others become 0. None if the weight is zero there.
        importance: (in,), weights of the squared errors, such as the Gram diagonal; None for equal ones.
    """
    check_format(bits, group_size)
    kept = weight.float() if mask is None else weight.float() * mask
    columns = kept.shape[1]
    size = group_size or columns
    padded = torch.nn.functional.pad(kept, (0, -columns % size)).unflatten(1, (-1, size))
    weights = None if importance is None else torch.nn.functional.pad(importance.float(), (0, -columns % size)).view(-1, size)
    rows = max(1, MAX_BUDGET // padded[0].numel())
    scales = torch.cat([_search_scales(part, bits, weights) for part in padded.split(rows)])
    integers = to_integers(padded, scales.unsqueeze(2), bits).flatten(1)[:, :columns]
    return Quantized(integers.to(torch.int8), scales.bfloat16(), bits, group_size)


def to_integers(weight: Tensor, scales: Tensor, bits: int) -> Tensor:
    """The integers nearest to weight / scale, in the weight's dtype; 0 where the scale is 0."""
    largest = 2 ** (bits - 1) - 1
    inverse = torch.where(scales > 0, scales, torch.inf).reciprocal()
    return (weight * inverse).round_().clamp_(-largest, largest)


def _search_scales(groups: Tensor, bits: int, importance: Tensor | None) -> Tensor:
    """The best scale of each group, (rows, groups), as float32 numbers that bfloat16 holds."""
    top = groups.abs().amax(2) / (2 ** (bits - 1) - 1)
    best, least = top, torch.full_like(top, torch.inf)
    for clip in CLIPS:
        scale = (top * clip).bfloat16().float()
        errors = (to_integers(groups, scale.unsqueeze(2), bits).mul_(scale.unsqueeze(2)) - groups).square_()
        error = (errors if importance is None else errors * importance).sum(2)
        best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
    return best


def round_compensated(target: Tensor, gram: Tensor, mask: Tensor, *, bits: int, group_size: int) -> Quantized:
    r"""Find integers and scales on a support that minimise :math:`\mathrm{tr}\,(Q - T) G (Q - T)^\top`.

    Args:
        target: T, (out, in).
        gram: G, (in, in), positive semi-definite.
        mask: (out, in) bool, the support: True where a weight is kept.
        bits: 3, 4 or 8.
        group_size: Columns of a group, a multiple of 64; 0 for whole rows.
    """
    return round_to_nearest(target, bits, group_size, mask=mask, importance=gram.diagonal())
