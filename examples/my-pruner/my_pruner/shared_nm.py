"""A pattern: which sets of weights may be removed together."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparsellm import NM, Pattern
from sparsellm.errors import InvalidSetting

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class SharedNM(Pattern):
    """Remove N of every M consecutive weights of a row, the same ones in each of several consecutive rows: "2:4x8".

    Attributes:
        nm: The pattern within a row.
        rows: Number of consecutive rows with the same zeros.
    """

    nm: NM
    rows: int

    def __str__(self) -> str:
        return f"{self.nm}x{self.rows}"

    @classmethod
    def parse(cls, text: str) -> SharedNM | None:
        """The pattern that a text such as "2:4x8" names; None for a text of another form."""
        match = re.fullmatch(r"(\d+):(\d+)x([1-9]\d*)", text)
        return cls(NM(int(match[1]), int(match[2])), int(match[3])) if match else None

    @property
    def sparsity(self) -> float:
        return self.nm.sparsity

    @property
    def column_span(self) -> int:
        return self.nm.group

    def check(self, shape: tuple[int, int]) -> None:
        """Raise an error for an (out, in) shape that is not divided by rows and groups."""
        self.nm.check(shape)
        if shape[0] % self.rows:
            raise InvalidSetting(f"{self} needs a number of outputs divisible by {self.rows}, got {shape[0]}.")

    def count_removed(self, shape: Sequence[int]) -> int:
        return self.nm.count_removed(shape)

    def holds(self, weight: Tensor) -> bool:
        """Whether each group of rows has at least the zeros of the pattern in common."""
        if weight.shape[0] % self.rows:
            return False
        return self.nm.holds(weight.unflatten(0, (-1, self.rows)).abs().amax(1))

    def keep(self, score: Tensor, *, per_row: bool = False) -> Tensor:
        """Select the largest scores, summed over the rows of each group."""
        return self.nm.keep(score.unflatten(0, (-1, self.rows)).sum(1)).repeat_interleave(self.rows, 0)
