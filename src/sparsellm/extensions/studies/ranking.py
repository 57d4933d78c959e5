"""The best of several figures of one measure, and which of the others do not differ from it measurably."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from sparsellm.evaluation.differences import NOT_MEASURABLE, Difference
from sparsellm.extensions.studies.measures import Figure

Name = TypeVar("Name", bound=Hashable)

REFERENCE = "reference"
"""The word beside differences where nothing is said to be best."""


@dataclass(frozen=True)
class Ranking(Generic[Name]):
    """Figures of one measure beside the best of them.

    Attributes:
        best: The name of the figure with the highest share, or the lowest value of another measure.
        differences: Those of the other finite figures from it, by their names.
    """

    best: Name
    figure: Figure
    differences: Mapping[Name, Difference | None]

    @property
    def extreme(self) -> str:
        """The kind of the best value: "highest" or "lowest"."""
        return "highest" if self.figure.share else "lowest"

    @property
    def mark(self) -> str:
        """The word for the best beside the differences from it: the extreme if it differs measurably from every other."""
        return self.extreme if len(self.those(measurable=True)) == len(self.differences) else REFERENCE

    def those(self, *, measurable: bool | None) -> list[Name]:
        """The others whose difference from the best is measurable, is not, or has an unknown error (None)."""
        return [name for name, x in self.differences.items() if (x.is_measurable if x else None) is measurable]


def rank_figures(figures: Mapping[Name, Figure]) -> Ranking[Name] | None:
    """Compare figures of one measure; None if none is finite. Of equal ones the first is the best."""
    finite = {name: figure for name, figure in figures.items() if math.isfinite(figure.value)}
    if not finite:
        return None
    best = min(finite, key=lambda name: -finite[name].value if finite[name].share else finite[name].value)
    others = {name: figure.against(finite[best]) for name, figure in finite.items() if name != best}
    return Ranking(best, finite[best], others)


def claim(ranking: Ranking[str]) -> str:
    """The claim about the best of several combinations, as the begin of a clause: "alps is best "."""
    if not ranking.differences:
        return f"{ranking.best} " if ranking.best else ""
    if unsure := ranking.those(measurable=False):
        return f"{ranking.best} is {ranking.extreme}, with {NOT_MEASURABLE} from {', '.join(unsure)}, "
    if ranking.those(measurable=None):
        return f"{ranking.best} is {ranking.extreme}, by a difference of unknown error, "
    return f"{ranking.best} is best "
