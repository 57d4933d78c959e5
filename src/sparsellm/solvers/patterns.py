"""Which weights of a layer may stay: any share of them (`Unstructured`), or some of every few along a row (`NM`).

"N:M" reads as in the SparseGPT and SparseLLM papers: N of every M consecutive weights are REMOVED, so 3:4 is 75 %.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparsellm.errors import InvalidSetting
from sparsellm.runtime import devices

EXAMPLES = "Write 70%, 0.7, 2:4, 3:4 or 4:8."


@dataclass(frozen=True)
class Unstructured:
    """A share of a layer's weights is removed, wherever they stand.

    sparsity: the fraction removed, in [0, 1). Exactly ``round(sparsity * count)`` weights of a layer go.
    """

    sparsity: float

    def __post_init__(self) -> None:
        if not 0 <= self.sparsity < 1:  # also refuses NaN
            percent = f"For {self.sparsity:g} % write {self.sparsity / 100:g} or {self.sparsity:g}%."
            hint = percent if 1 < self.sparsity < 100 else EXAMPLES
            raise InvalidSetting(f"`sparsity` must be in [0, 1), got {self.sparsity:g}. {hint}")

    def __str__(self) -> str:
        return f"{100 * self.sparsity:.10g}%"

    @property
    def column_span(self) -> int | None:
        """How many columns are decided together: None, for all of them."""
        return None

    def describe(self) -> str:
        """The pattern in words."""
        return f"{100 * self.sparsity:.10g} % removed, unstructured"

    def check(self, shape: tuple[int, int]) -> None:
        """Raise InvalidSetting when a layer of this (out, in) shape cannot have the pattern; any can."""

    def count_removed(self, count: int) -> int:
        """How many of `count` weights go."""
        return round(self.sparsity * count)

    def keep(self, score: Tensor, *, per_row: bool = False) -> Tensor:
        """True where a weight stays: the largest scores of the whole layer, or of each row.

        score: (out, in), finite. Of equal scores the later position stays.
        per_row: every row loses the same number, give or take one so that the layer's total is exact.
        """
        total = self.count_removed(score.numel())
        if not per_row:
            return keep_largest(score, total)
        rows = score.shape[0]
        ends = torch.arange(rows + 1, device=score.device) * total // rows
        order = score.argsort(dim=1, stable=True)
        stays = torch.arange(score.shape[1], device=score.device) >= ends.diff().unsqueeze(1)
        return torch.empty_like(stays).scatter_(1, order, stays)


@dataclass(frozen=True)
class NM:
    """`zeros` of every `group` consecutive weights along a row are removed."""

    zeros: int
    group: int

    def __post_init__(self) -> None:
        if not 0 < self.zeros < self.group:
            raise InvalidSetting(
                f"In N:M, N weights of every M are removed, so 0 < N < M; got {self.zeros}:{self.group}. {EXAMPLES}"
            )

    def __str__(self) -> str:
        return f"{self.zeros}:{self.group}"

    @property
    def sparsity(self) -> float:
        """The fraction removed."""
        return self.zeros / self.group

    @property
    def column_span(self) -> int | None:
        """How many columns are decided together: one group."""
        return self.group

    def describe(self) -> str:
        """The pattern in words."""
        return f"{self} ({self.zeros} of every {self.group} removed, {100 * self.sparsity:.1f} %)"

    def check(self, shape: tuple[int, int]) -> None:
        """Raise InvalidSetting when the inputs of a layer of this (out, in) shape do not divide into groups."""
        if shape[1] % self.group:
            raise InvalidSetting(
                f"{self} needs a number of inputs that {self.group} divides, got {shape[1]}. "
                "Leave the layer out with --exclude, or use an unstructured sparsity."
            )

    def count_removed(self, count: int) -> int:
        """How many of `count` weights go."""
        return count * self.zeros // self.group

    def keep(self, score: Tensor, *, per_row: bool = False) -> Tensor:
        """True where a weight stays: the largest scores of each group. Of equal scores the later position stays.

        score: (out, in), finite; `group` divides in. per_row: no difference, a group lies within a row.
        """
        self.check((score.shape[0], score.shape[1]))
        groups = score.unflatten(1, (-1, self.group))
        position = torch.arange(self.group, device=score.device)
        rank = torch.zeros_like(groups, dtype=torch.int16)
        for other in range(self.group):  # the rank within a group, without sorting: how many come before
            rival = groups[..., other : other + 1]
            rank += (rival < groups) | ((rival == groups) & (other < position))
        return (rank >= self.zeros).flatten(1)


Pattern = Unstructured | NM


def keep_largest(score: Tensor, removed: int) -> Tensor:
    """True on all of `score` (any shape, finite) but the `removed` smallest; of equals the earlier positions go."""
    if removed <= 0:
        return torch.ones_like(score, dtype=torch.bool)
    flat = score.flatten()
    if devices.queued(flat.device):  # a threshold and its ties would be waited for
        return (
            torch.ones_like(flat, dtype=torch.bool).index_fill_(0, flat.argsort(stable=True)[:removed], False).view(score.shape)
        )
    threshold = _kth_smallest(flat, removed)
    keep = flat > threshold
    spare = flat.numel() - removed - int(keep.sum())  # of those equal to the threshold, how many stay
    if spare:
        ties = (flat == threshold).nonzero().squeeze(1)
        keep[ties[-spare:]] = True
    return keep.view(score.shape)


def _kth_smallest(flat: Tensor, k: int) -> float | Tensor:
    """The k-th smallest entry, k from 1; by numpy, whose partition is several times faster than kthvalue."""
    if flat.dtype in (torch.float32, torch.float64):
        return float(np.partition(flat.detach().numpy(), k - 1)[k - 1])
    return flat.kthvalue(k).values


def parse_pattern(text: str | float) -> Pattern:
    """The pattern that a text means: "70%", "0.7", "2:4". A number is a fraction removed."""
    word = str(text).strip()
    if match := re.fullmatch(r"(\d+)\s*:\s*(\d+)", word):
        return NM(int(match[1]), int(match[2]))
    try:
        number = float(word.removesuffix("%"))
    except ValueError:
        raise InvalidSetting(f"`sparsity` is a share or N:M, got {word!r}. {EXAMPLES}") from None
    if not math.isfinite(number) or (word.endswith("%") and not 0 <= number < 100):
        raise InvalidSetting(f"`sparsity` must be in [0, 1), got {word!r}. {EXAMPLES}")
    return Unstructured(number / 100 if word.endswith("%") else number)
