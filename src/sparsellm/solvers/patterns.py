"""Sparsity patterns: a fraction of a layer's weights (`Unstructured`), N of every M weights along a row (`NM`), and others'.

Imports torch only where a mask is made, so that settings can be checked without it.

"N:M" is meant as in the SparseGPT and SparseLLM papers: N of every M consecutive weights are REMOVED, so 3:4 is 75 %.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from sparsellm.errors import InvalidSetting
from sparsellm.extension import find, names_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_CACHED_ENTRIES = 1 << 17
"""As in `devices`, whose file imports torch."""

EXAMPLES = "Write 70%, 0.7, 2:4, 3:4 or 4:8."


class Pattern(ABC):
    """Base of sparsity patterns: frozen dataclasses, each of which `parse` reads from its `str`."""

    if TYPE_CHECKING:

        @property
        def sparsity(self) -> float:
            """The fraction of a layer's weights that is removed."""

    @classmethod
    @abstractmethod
    def parse(cls, text: str) -> Pattern | None:
        """The pattern that a text names; None if the text is of another form. Raises InvalidSetting for wrong numbers."""

    @property
    def column_span(self) -> int | None:
        """Number of columns whose mask is chosen together; None for all columns."""
        return None

    @property
    def n_m(self) -> tuple[int, int] | None:
        """(N, M) if N of every M consecutive weights along a row are removed, and nothing else."""
        return None

    @property
    def is_shareable(self) -> bool:
        """Whether an allocation rule may share the removed weights out among layers, as unstructured sparsities."""
        return False

    def describe(self, predicate: str = "removed") -> str:
        """A description for messages and reports, of weights that are `predicate`."""
        return f"{self} {predicate}"

    def check(self, shape: tuple[int, int]) -> None:  # noqa: B027 - most patterns fit every shape
        """Raise InvalidSetting for an (out, in) shape that the pattern does not fit."""

    @abstractmethod
    def count_removed(self, shape: Sequence[int]) -> int:
        """Number of weights removed from a layer of an (out, in) shape."""

    def for_costs(self, costs: Callable[[], Tensor]) -> Pattern:
        """The pattern for one layer problem, with all that its masks share whatever the score; called before every solve.

        Args:
            costs: Gives (out, in), the estimated error from removing each weight alone (`LayerProblem.removal_costs`).
        """
        return self

    @abstractmethod
    def holds(self, weight: Tensor) -> bool:
        """Whether a weight, (out, in), has the zeros that the pattern asks for, and maybe more."""

    def holds_async(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """`holds` and `count_kept` of a weight, as tensors, (); sparsellm's own patterns do not wait for the device."""
        import torch

        return torch.tensor(self.holds(weight), device=weight.device), count_kept(weight)

    @abstractmethod
    def keep(self, score: Tensor, *, per_row: bool = False) -> Tensor:
        """Select the largest scores that the pattern lets. Of equal scores the later position is kept.

        Args:
            score: (out, in), finite.
            per_row: Remove the same number of weights from every row, within one, so that the layer's total is exact.

        Returns:
            (out, in) bool, True where a weight is kept.
        """


@dataclass(frozen=True)
class Unstructured(Pattern):
    """Remove a fraction of a layer's weights, at any positions.

    Attributes:
        sparsity: The fraction removed, in [0, 1). Exactly ``round(sparsity * count)`` weights of a layer are removed.
    """

    sparsity: float

    def __post_init__(self) -> None:
        _check_fraction(self.sparsity, "sparsity", f"{self.sparsity:g}")

    def __str__(self) -> str:
        return f"{100 * self.sparsity:.10g}%"

    def __format__(self, _: str) -> str:
        """Return the text for messages and tables, with fewer digits than that for files."""
        return f"{100 * self.sparsity:.5g}%"

    @classmethod
    def parse(cls, text: str, name: str = "sparsity") -> Unstructured | None:
        """Read a fraction or a percentage. name: the setting that it is, for messages."""
        try:
            number = float(text.removesuffix("%"))
        except ValueError:
            return None
        fraction = number / 100 if text.endswith("%") else number
        _check_fraction(fraction, name, text)
        return cls(fraction)

    @property
    def is_shareable(self) -> bool:
        return True

    def describe(self, predicate: str = "removed") -> str:
        return f"{100 * self.sparsity:.5g} % {predicate}, unstructured"

    def count_removed(self, shape: Sequence[int]) -> int:
        return round(self.sparsity * math.prod(shape))

    def holds(self, weight: Tensor) -> bool:
        return bool(self.holds_async(weight)[0])

    def holds_async(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        kept = count_kept(weight)
        return kept <= weight.numel() - self.count_removed(weight.shape), kept

    def keep(self, score: Tensor, *, per_row: bool = False) -> Tensor:
        """Select the largest scores of the whole layer, or of each row."""
        import torch

        total = self.count_removed(score.shape)
        if not per_row:
            return keep_largest(score, total)
        rows = score.shape[0]
        removed = (torch.arange(rows + 1, device=score.device) * total // rows).diff()  # (out,)
        order = score.argsort(dim=1, stable=True)
        keep = torch.arange(score.shape[1], device=score.device) >= removed.unsqueeze(1)
        return torch.empty_like(keep).scatter_(1, order, keep)


@dataclass(frozen=True)
class NM(Pattern):
    """Remove N of every M consecutive weights along a row.

    Attributes:
        zeros: N, the number of weights removed from a group.
        group: M, the number of weights in a group.
    """

    zeros: int
    group: int

    def __post_init__(self) -> None:
        if not 0 < self.zeros < self.group:
            raise InvalidSetting(
                f"N:M removes N of every M weights and needs 0 < N < M; got {self.zeros}:{self.group}. {EXAMPLES}"
            )

    def __str__(self) -> str:
        return f"{self.zeros}:{self.group}"

    @classmethod
    def parse(cls, text: str) -> NM | None:
        match = re.fullmatch(r"(\d{1,9})\s*:\s*(\d{1,9})", text)
        return cls(int(match[1]), int(match[2])) if match else None

    @property
    def sparsity(self) -> float:
        return self.zeros / self.group

    @property
    def column_span(self) -> int | None:
        return self.group

    @property
    def n_m(self) -> tuple[int, int]:
        return self.zeros, self.group

    def describe(self, predicate: str = "removed") -> str:
        return f"{self} ({self.zeros} of every {self.group} {predicate}, {100 * self.sparsity:.1f} %)"

    def check(self, shape: tuple[int, int]) -> None:
        """Raise InvalidSetting if `group` does not divide the number of inputs of an (out, in) shape."""
        if shape[1] % self.group:
            raise InvalidSetting(
                f"{self} needs a number of inputs divisible by {self.group}, got {shape[1]}. "
                "Leave the layer out with `exclude`, or use an unstructured sparsity."
            )

    def count_removed(self, shape: Sequence[int]) -> int:
        return math.prod(shape) * self.zeros // self.group

    def holds(self, weight: Tensor) -> bool:
        return weight.shape[1] % self.group == 0 and bool(self.holds_async(weight)[0])

    def holds_async(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        import numpy as np
        import torch

        if 8 % self.group == 0 and not _is_queued(weight.device):  # a third of the time of what follows
            counts = _counts_of_bytes(self.zeros, self.group)
            found = [np.take(counts, np.packbits(rows.bool().numpy())) for rows in _parts(weight)]
            holds = all(part.max(initial=0) < _BROKEN for part in found)
            return torch.tensor(holds), torch.tensor(sum(int(part.sum()) for part in found)) if holds else count_kept(weight)
        kept = weight.bool().to(torch.uint8 if self.group < 256 else torch.int32)
        counts = sum((kept[:, other :: self.group] for other in range(1, self.group)), start=kept[:, :: self.group])
        return (counts <= self.group - self.zeros).all(), count_kept(weight)

    def keep(self, score: Tensor, *, per_row: bool = False) -> Tensor:
        """Select the largest scores of each group. `per_row` has no effect, because a group lies within a row."""
        import torch

        self.check((score.shape[0], score.shape[1]))
        groups = score.unflatten(1, (-1, self.group))
        position = torch.arange(self.group, device=score.device)
        rank = torch.zeros_like(groups, dtype=torch.int16)
        for other in range(self.group):  # the rank within a group by pairwise comparison, without sorting
            compared = groups[..., other : other + 1]
            rank += (compared < groups) | ((compared == groups) & (other < position))
        return (rank >= self.zeros).flatten(1)


def keep_unpruned(pruned_mask: Tensor | None, score: Tensor, select: Callable[[Tensor], Tensor]) -> Tensor:
    """The mask that `select` makes of the scores, with the weights of `pruned_mask` removed first and never kept.

    Args:
        pruned_mask: bool of the shape of `score`, True for weights that are already removed; None if there are none.
        score: Scores, finite, at least 0.
        select: Maps scores to a mask, True where a weight is kept.
    """
    return select(score) if pruned_mask is None else select(score.masked_fill(pruned_mask, -1)) & ~pruned_mask


def count_kept(weight: Tensor) -> Tensor:
    """The number of entries that are not zero, as a tensor, (), without waiting for the device."""
    import numpy as np
    import torch

    if _is_queued(weight.device):
        return weight.count_nonzero()
    parts = _parts(torch.atleast_1d(weight))  # on a CPU torch's own count takes ten times as long
    return torch.tensor(sum(np.count_nonzero(part.bool().numpy()) for part in parts))


def _parts(weight: Tensor) -> Sequence[Tensor]:
    """A few rows of a tensor at a time, so that temporaries stay in a CPU's cache."""
    parts: Sequence[Tensor] = weight.split(max(_CACHED_ENTRIES * len(weight) // max(weight.numel(), 1), 1))
    return parts


_BROKEN = 16
"""More than the kept weights of a byte."""


@cache
def _counts_of_bytes(zeros: int, group: int) -> Any:
    """For each byte, whose bits are the weights that are kept, how many are; `_BROKEN` if a group in it keeps too many."""
    import numpy as np

    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).reshape(256, -1, group)
    kept = bits.sum(-1)
    return np.where((kept <= group - zeros).all(-1), kept.sum(-1), _BROKEN).astype(np.uint8)


def keep_largest(score: Tensor, removed: int) -> Tensor:
    """The mask, True for all but the `removed` smallest scores; of equal scores the earlier positions are removed.

    Args:
        score: Scores of any shape, finite.
        removed: Number of False entries in the mask.
    """
    import torch

    if removed <= 0:
        return torch.ones_like(score, dtype=torch.bool)
    flat = score.flatten()
    if _is_queued(flat.device):  # a threshold would need a synchronization
        return torch.ones_like(flat, dtype=torch.bool).index_fill_(0, flat.argsort(stable=True)[:removed], False).view_as(score)
    threshold = _kth_smallest(flat, removed)
    keep = flat > threshold
    kept_ties = flat.numel() - removed - int(keep.count_nonzero())  # number of scores equal to the threshold that are kept
    if kept_ties:
        ties = (flat == threshold).nonzero().squeeze(1)
        keep[ties[-kept_ties:]] = True
    return keep.view(score.shape)


def _is_queued(device: torch.device) -> bool:
    """As `devices.queued`, whose file imports torch."""
    return device.type != "cpu"


def _kth_smallest(flat: Tensor, k: int) -> float | Tensor:
    """The k-th smallest entry, k from 1. NumPy's partition is several times faster than `kthvalue`."""
    import numpy as np
    import torch

    if flat.dtype in (torch.float32, torch.float64):
        return float(np.partition(flat.detach().numpy(), k - 1)[k - 1])
    return flat.kthvalue(k).values


@dataclass(frozen=True)
class UnknownPattern(Pattern):
    """A pattern in a file, whose package is not installed: its text is kept, and no weight is compared with it."""

    text: str

    @classmethod
    def parse(cls, text: str) -> None:
        """No text is of this form."""

    def __str__(self) -> str:
        return self.text

    @property
    def sparsity(self) -> float:
        return 0.0

    def count_removed(self, shape: Sequence[int]) -> int:
        return 0

    def holds(self, weight: Tensor) -> bool:
        return True

    def keep(self, score: Tensor, *, per_row: bool = False) -> Tensor:
        raise InvalidSetting(f"No installed package brings the pattern {self.text}.")


def parse_pattern(text: str | float, name: str = "sparsity") -> Pattern:
    """Parse a sparsity pattern.

    Args:
        text: "70%", "0.7" or 0.7 for an unstructured fraction removed, "2:4" for N:M.
        name: The setting that it is, for messages.

    Raises:
        InvalidSetting: If the text is no pattern, or its numbers are out of range.
    """
    stripped = str(text).strip()
    if (pattern := _parse(stripped, name)) is None:
        raise InvalidSetting(f"`{name}` must be a fraction, a percentage or N:M, got {stripped!r}. {EXAMPLES}")
    return pattern


def stored_pattern(text: str) -> Pattern:
    """Parse the text of a pattern in a file, maybe of a package that is not installed. Raises as `parse_pattern` otherwise."""
    return _parse(text, "sparsity") or UnknownPattern(text)


def _parse(text: str, name: str) -> Pattern | None:
    """The pattern of a text; None if it is of no known form."""
    pattern: Pattern | None = NM.parse(text)
    if pattern is None:
        pattern = Unstructured.parse(text, name)
    for kind in names_of("patterns"):  # which are imported for texts of other forms only
        if pattern is None:
            pattern = find("patterns", kind, Pattern).parse(text)
    return pattern


def _check_fraction(fraction: float, name: str, written: str) -> None:
    """Raise InvalidSetting unless a setting, as it is written, is a fraction in [0, 1)."""
    if not 0 <= fraction < 1:  # also refuses NaN
        percent = f"For {fraction:g} % write {fraction / 100:g} or {fraction:g}%."
        hint = percent if 1 < fraction < 100 and "%" not in written else EXAMPLES
        raise InvalidSetting(f"`{name}` must be in [0, 1), got {written}. {hint}")
