"""Dense GPTQ by its direct formula, compared in `python benchmarks/bits.py`: any number of bits, with or without zero points.

Follows Frantar et al., GPTQ (ICLR 2023): each column is rounded and its error compensated in the columns to its right, by the
Cholesky factor of the inverse Gram matrix. With what its users' tools add since: clips that are searched, and columns in the
order of their inputs' size, with scales of the groups as they are stored (llm-compressor's "static" order).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sparsellm.extensions.integers.formats import SCALE_BITS, IntegerFormat
from sparsellm.extensions.integers.quantization import expand_groups, round_compensated
from sparsellm.solvers.linalg import add_diagonal, cholesky_
from sparsellm.solvers.patterns import Pattern
from sparsellm.solvers.problem import LayerProblem
from sparsellm.solvers.statistics import Gram, InputRMS, TokenCount

CLIPS = tuple(1 - step / 40 for step in range(24))


@dataclass(frozen=True)
class Grid:
    """Integers of `bits` bits, all 2^bits of them, and a scale for each group of `group_size` columns of a row.

    zero_points: whether each group has one, of `bits` bits. Without, integers begin at -2^(bits - 1), as in llm-compressor.
    """

    bits: int
    group_size: int = 64
    zero_points: bool = False

    def bits_per_weight(self, columns: int) -> float:
        """Bits that a weight takes, with its share of scales and zero points."""
        group = SCALE_BITS + (self.bits if self.zero_points else 0)
        return self.bits + group * IntegerFormat(self.bits, self.group_size).groups(columns) / columns

    def fit(self, weight: Tensor, importance: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The scale and the zero point of each weight, (out, in), by the clip with the smallest squared error of each group."""
        columns = weight.shape[1]
        padded = torch.nn.functional.pad(weight, (0, -columns % self.group_size)).unflatten(1, (-1, self.group_size))
        weights = torch.ones(columns, device=weight.device) if importance is None else importance
        weights = torch.nn.functional.pad(weights, (0, -columns % self.group_size)).view(-1, self.group_size)
        best = torch.full(padded.shape[:2], torch.inf, device=weight.device)
        scales, zeros = torch.zeros_like(best), torch.zeros_like(best)
        for clip in CLIPS:
            scale, zero = self._of_range(padded, clip)
            error = ((self.round(padded, scale.unsqueeze(2), zero.unsqueeze(2)) - padded).square() * weights).sum(2)
            better = error < best
            best, scales, zeros = torch.where(better, error, best), scales.where(~better, scale), zeros.where(~better, zero)
        return expand_groups(scales, self.group_size, columns), expand_groups(zeros, self.group_size, columns)

    def _of_range(self, groups: Tensor, clip: float) -> tuple[Tensor, Tensor]:
        """Scale and zero point of groups whose range is clipped to a part."""
        if self.zero_points:
            low, high = groups.amin(2).clamp(max=0) * clip, groups.amax(2).clamp(min=0) * clip
            scale = ((high - low) / (2**self.bits - 1)).bfloat16().float()
            return scale, (-low / scale).round().nan_to_num().clamp(0, 2**self.bits - 1)
        scale = (groups.abs().amax(2) * clip / (2 ** (self.bits - 1) - 1)).bfloat16().float()
        return scale, torch.zeros_like(scale)

    def round(self, weight: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """The nearest weight that has the scale and the zero point."""
        low = 0 if self.zero_points else -(2 ** (self.bits - 1))
        high = low + 2**self.bits - 1
        integers = (weight / scale.where(scale > 0, torch.inf)).round() + zero
        return (integers.clamp(low, high) - zero) * scale


@dataclass(frozen=True)
class Rounded(Pattern):
    """The pattern of a layer that is rounded: any of its weights may become zero, and none needs to."""

    sparsity: float = 0.0

    @classmethod
    def parse(cls, text: str) -> None:
        """No text names it."""

    def count_removed(self, shape: Sequence[int]) -> int:
        return math.prod(shape)

    def holds(self, weight: Tensor) -> bool:
        return True

    def keep(self, score: Tensor, *, per_row: bool = False) -> Tensor:
        return torch.ones_like(score, dtype=torch.bool)


@dataclass(frozen=True)
class RoundToNearest:
    """A solver that rounds."""

    grid: Grid
    needs: ClassVar[type[TokenCount]] = InputRMS  # a layer without inputs is not passed to a solver

    def solve(self, problem: LayerProblem, pattern: Pattern) -> Tensor:
        return self.grid.round(problem.weight, *self.grid.fit(problem.weight))


@dataclass(frozen=True)
class GPTQ:
    """A solver that rounds column by column.

    in_order: whether the columns are rounded from left to right instead of those with the largest inputs first.
    """

    grid: Grid
    damping: float = 0.01
    in_order: bool = False
    needs: ClassVar[type[TokenCount]] = Gram

    def solve(self, problem: LayerProblem, pattern: Pattern) -> Tensor:
        gram = problem.gram
        scale, zero = self.grid.fit(problem.weight, gram.diagonal())
        order = (
            torch.arange(len(gram), device=gram.device)
            if self.in_order
            else gram.diagonal().argsort(descending=True, stable=True)
        )
        lower = cholesky_(add_diagonal(gram[order][:, order], self.damping), self.damping, "damping")
        upper = torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True)
        weight, scale, zero = problem.weight[:, order].clone(), scale[:, order], zero[:, order]
        for start in range(0, len(gram), 128):  # the columns to the right of a block are corrected once a block
            stop = min(start + 128, len(gram))
            errors = torch.zeros(len(weight), stop - start, device=weight.device)
            for column in range(start, stop):
                rounded = self.grid.round(weight[:, column], scale[:, column], zero[:, column])
                errors[:, column - start] = (weight[:, column] - rounded) / upper[column, column]
                weight[:, column:stop] -= errors[:, column - start, None] * upper[column, column:stop]
                weight[:, column] = rounded
            weight[:, stop:] -= errors @ upper[start:stop, stop:]
        return weight[:, order.argsort()]


@dataclass(frozen=True)
class Compensated:
    """A solver that rounds as `prune --values` does, exactly on the support, in a model that is dense or pruned already.

    group_size: Columns of a group; None for the default at the layer's density.
    """

    bits: int
    group_size: int | None = None
    needs: ClassVar[type[TokenCount]] = Gram

    def solve(self, problem: LayerProblem, pattern: Pattern) -> Tensor:
        removed = problem.pruned_mask
        keep = torch.ones_like(problem.weight, dtype=torch.bool) if removed is None else ~removed
        default = IntegerFormat.default(self.bits, float(keep.float().mean()))
        form = default if self.group_size is None else IntegerFormat(self.bits, self.group_size)
        return round_compensated(problem.weight, problem.gram, keep, format=form).to_dense()
