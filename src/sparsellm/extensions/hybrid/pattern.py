"""`HybridRows`: N:M in some blocks of a matrix's rows, dense in the others.

Imports torch only where a mask is made, as `sparsellm.solvers.patterns`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from sparsellm.errors import InvalidSetting
from sparsellm.solvers.patterns import NM, Pattern, keep_largest

if TYPE_CHECKING:
    from torch import Tensor

BLOCK = 64
"""Rows of a block: a multiple of the tile heights of the 2:4 products of cuSPARSELt and CUTLASS."""

FEW_BLOCKS = 4
"""A matrix with fewer rows than so many blocks has so many blocks all the same, of fewer rows."""


@dataclass(frozen=True)
class HybridRows(Pattern):
    r"""Remove N of every M consecutive weights in a share of the rows, and nothing in the other rows.

    Follows the idea of Lee et al., SpenseGPT (2026): two products, a sparse and a dense one, by the libraries that GPUs have.

    A matrix is cut into blocks of `BLOCK` rows from the first row on, or of ``rows // FEW_BLOCKS`` (at least 1) if it has fewer
    than ``FEW_BLOCKS * BLOCK`` rows. Whole blocks stay dense: those that would cost most if they were pruned, as many as come
    nearest to the share. Rows after the last whole block are pruned.

    Attributes:
        groups: The N:M pattern of the pruned rows.
        share: The fraction of the rows that are pruned, in (0, 1).
        dense_rows: (out, 1) bool, True for the rows that stay dense in one layer; None while they are not chosen.
    """

    groups: NM
    share: float
    dense_rows: Tensor | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        return f"{self.groups}@{100 * self.share:.10g}%"

    @classmethod
    def parse(cls, text: str) -> Pattern | None:
        """Read "2:4@75%" or "2:4@0.75". All rows, "2:4@100%", are the plain N:M."""
        head, at, tail = (part.strip() for part in text.partition("@"))
        groups = NM.parse(head) if at else None
        if groups is None:
            return None
        digits = re.fullmatch(r"(\d*\.?\d+)\s*(%?)", tail)
        share = float(digits[1]) / (100 if digits[2] else 1) if digits else math.nan
        if not 0 < share <= 1:  # also refuses NaN
            raise InvalidSetting(
                f"`sparsity` got {text!r}: the share of the rows that are {groups} must be above 0 % and at most 100 %. "
                f"Write {groups}@75% or {groups}@0.75."
            )
        return groups if share == 1 else cls(groups, share)

    @property
    def sparsity(self) -> float:
        """The fraction removed if the blocks give exactly the share of the rows."""
        return self.share * self.groups.sparsity

    @property
    def column_span(self) -> int | None:
        return self.groups.column_span if self.dense_rows is not None else None

    def describe(self, predicate: str = "removed") -> str:
        what = f"{self.groups.zeros} of every {self.groups.group} {predicate} in {100 * self.share:.5g} % of the rows"
        return f"{self} ({what}, {100 * self.sparsity:.1f} %)"

    def check(self, shape: tuple[int, int]) -> None:
        """Raise InvalidSetting if M does not divide the number of inputs of an (out, in) shape."""
        self.groups.check(shape)

    def count_removed(self, shape: Sequence[int]) -> int:
        rows, columns = shape
        size, _, dense = self._blocks(rows)
        return self.groups.count_removed((rows - size * dense, columns))

    def for_costs(self, costs: Callable[[], Tensor]) -> HybridRows:
        """Choose the rows that stay dense, unless they are chosen."""
        if self.dense_rows is not None:
            return self
        import torch

        cost = costs()
        cost.masked_fill_(self.groups.keep(cost), 0)  # what stays costs nothing
        size, count, dense = self._blocks(len(cost))
        blocks = keep_largest(cost[: size * count].reshape(count, -1).sum(1), count - dense)
        rows = cost.new_zeros(len(cost), dtype=torch.bool)
        rows[: size * count] = blocks.repeat_interleave(size)
        return replace(self, dense_rows=rows.unsqueeze(1))

    def holds(self, weight: Tensor) -> bool:
        """Whether enough blocks, and the rows after the last whole one, are N:M."""
        rows, columns = weight.shape
        size, count, dense = self._blocks(rows)
        if columns % self.groups.group or not self.groups.holds(weight[size * count :]):
            return False
        return sum(self.groups.holds(block) for block in weight[: size * count].split(size)) >= count - dense

    def keep(self, score: Tensor, *, per_row: bool = False) -> Tensor:
        """Select the largest scores of each group in the rows that are pruned; without chosen rows, by the squared scores."""
        chosen = self.for_costs(lambda: score.clamp(min=0).square())
        assert chosen.dense_rows is not None
        return self.groups.keep(score) | chosen.dense_rows

    def _blocks(self, rows: int) -> tuple[int, int, int]:
        """Of a matrix of so many rows: the rows of a block, the number of whole blocks, and that of dense ones."""
        size = min(BLOCK, max(1, rows // FEW_BLOCKS))
        count = rows // size
        return size, count, min(round((1 - self.share) * rows / size), count)
