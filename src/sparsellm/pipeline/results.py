"""Parts of a report: totals, and the points of a search."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from sparsellm.evaluation.differences import Difference
from sparsellm.solvers.patterns import Unstructured


@dataclass(frozen=True)
class Totals:
    """Totals of a run.

    Attributes:
        sparsity_of_pruned_layers: The fraction of the pruned layers' weights that are zero.
        sparsity_before: The fraction of these weights that were zero before.
        bits_of_pruned_layers: Bits that a weight of these layers takes once it is packed; None unless all of them are rounded.
        parameters: Number of stored parameters.
        zeros: Number of stored parameters that are zero.
    """

    pruned_layers: int
    sparsity_of_pruned_layers: float
    sparsity_before: float
    bits_of_pruned_layers: float | None
    parameters: int
    zeros: int

    @property
    def sparsity_of_model(self) -> float:
        """The fraction of the stored parameters that are zero."""
        return self.zeros / self.parameters if self.parameters else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain data, without what there is none of."""
        optional = ("sparsity_before", "bits_of_pruned_layers")
        data = {name: value for name, value in asdict(self).items() if value or name not in optional}
        return data | {"sparsity_of_model": self.sparsity_of_model}


@dataclass(frozen=True)
class Point:
    """One sparsity of a search.

    Attributes:
        effort: Effort of the method sparsellm, or the name of another method.
        met: Whether the target is met.
        undecided: Whether that cannot be told, because the measurement is within its error of the target.
        increase: Its largest relative increase over the texts; None if none was measured.
        increase_error: Paired standard error of that increase; None if it is unknown.
        size: Bytes of the packed weights; None unless the target is a size.
    """

    sparsity: float
    effort: str
    met: bool
    perplexity: Mapping[str, float]
    increase: float | None
    accuracy: Mapping[str, float]
    size: int | None
    seconds: float
    undecided: bool = False
    increase_error: float | None = None

    @property
    def answer(self) -> str:
        """Whether the target is met, for a table: "yes", "no" or "undecided"."""
        return "undecided" if self.undecided else "yes" if self.met else "no"

    @property
    def increase_text(self) -> str:
        """The increase with its error."""
        return Difference(self.increase or 0.0, self.increase_error).short

    def describe(self) -> str:
        """The sparsity with what was measured of it."""
        figures = [f"an accuracy of {value:.3g} on {task}" for task, value in self.accuracy.items()]
        figures = figures or [f"a perplexity increase of {self.increase_text.removeprefix('+')}"]
        return f"{Unstructured(self.sparsity)} has {', '.join(figures)}"


@dataclass(frozen=True)
class SearchResult:
    """The target of a search, in words, and the sparsities that it tried."""

    target: str
    points: tuple[Point, ...]
