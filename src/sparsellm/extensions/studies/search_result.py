"""The points of a search, and the section of a report that has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import TypeAdapter

from sparsellm.evaluation.differences import Difference
from sparsellm.extensions.studies.measures import Table
from sparsellm.extensions.studies.searched import SEARCHED
from sparsellm.outputs.report import Report
from sparsellm.outputs.sections import Section
from sparsellm.runtime.memory import human_bytes


@dataclass(frozen=True)
class Point:
    """One value of the setting that a search varies.

    Attributes:
        over: The setting, "sparsity" or "bits".
        effort: Effort of the method sparsellm, or the name of another method.
        met: Whether the target is met.
        undecided: Whether the measurement is within its error of the target, so that `met` may be wrong.
        increase: Its largest relative increase over the texts; None if none was measured.
        increase_error: Paired standard error of that increase; None if it is unknown.
        size: Bytes of the packed weights; None unless the target is a size.
    """

    over: str
    value: float
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
    def label(self) -> str:
        """The value in a sentence, as "50%" or "3 bits a weight"."""
        return SEARCHED[self.over].label(self.value)

    @property
    def answer(self) -> str:
        """Whether the target is met, for a table: "yes", "no" or "undecided"."""
        return "undecided" if self.undecided else "yes" if self.met else "no"

    @property
    def increase_text(self) -> str:
        """The increase with its error."""
        return Difference(self.increase or 0.0, self.increase_error).short

    def describe(self) -> str:
        """What was measured at the value."""
        figures = [f"an accuracy of {value:.3g} on {task}" for task, value in self.accuracy.items()]
        figures = figures or [f"a perplexity increase of {self.increase_text.removeprefix('+')}"]
        return f"{', '.join(figures)} at {self.label}"


def search_table(points: Sequence[Point]) -> Table:
    """A line for each value that a search tried."""
    first = points[0]
    head = [first.over, "effort", *(f"perplexity on {text}" for text in first.perplexity)]
    head += [*(f"{task}, %" for task in first.accuracy), *["increase"] * (first.increase is not None)]
    rows = []
    for x in points:
        row = [SEARCHED[x.over].cell(x.value), x.effort, *(f"{x.perplexity[text]:,.2f}" for text in first.perplexity)]
        row += [f"{100 * x.accuracy[task]:.2f}" for task in first.accuracy]
        row += [x.increase_text] if first.increase is not None else []
        row += [human_bytes(x.size or 0)] if first.size is not None else []
        rows.append([*row, x.answer, f"{x.seconds:.1f}"])
    return [*head, *["size"] * (first.size is not None), "met", "seconds"], rows


@dataclass(frozen=True)
class SearchResult(Section):
    """The target of a search, in words, and the values that it tried."""

    target: str
    points: tuple[Point, ...]

    @classmethod
    def from_dict(cls, data: Any) -> SearchResult:
        """Read plain data. Raises pydantic's ValidationError."""
        return SEARCH_RESULT.validate_python(data)

    @classmethod
    def of(cls, report: Report) -> SearchResult | None:
        """The search in a report; None if there is none."""
        section = report.sections.get(SEARCH)
        return section if isinstance(section, cls) else None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return asdict(self)


SEARCH = "search"
"""Name of the section."""

SEARCH_RESULT = TypeAdapter(SearchResult)
