"""Records of what runs measured and trained, as parts of their reports."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field, TypeAdapter

from sparsellm.errors import plural
from sparsellm.evaluation.differences import Parts
from sparsellm.evaluation.measurements import plus_minus

WHEN = ("pruned", "recovered")
"""When a stage of a gradual pruning is measured."""


def _parse_number(value: Any) -> Any:
    """Convert the strings that `report.strict_json` writes for infinity and NaN; reject integers that exceed 64 bits."""
    if value in ("inf", "-inf", "nan"):
        return float(value)
    if isinstance(value, int) and abs(value) >= 2**63:
        raise ValueError("the integer is too large")
    return value


Number = Annotated[float, BeforeValidator(_parse_number)]
Finite = Annotated[Number, Field(allow_inf_nan=False)]
Index = Annotated[int, Field(ge=0, lt=2**31)]


class Record(BaseModel, strict=True, extra="allow"):
    """Base of all records. They declare only the fields that are read; files may have more."""


SavedParts = Annotated[Parts | None, BeforeValidator(TypeAdapter(Parts | None).validate_python)]


class SavedFigure(Record):
    """A perplexity, with the sequences that it was measured on, or an accuracy."""

    value: Number
    standard_error: Finite | None
    metric: str = "acc"  # of an accuracy
    windows: int | None = None
    length: int | None = None
    tokens: int | None = None
    parts: SavedParts = None


class SavedValidation(Record):
    """A `CurvePoint`."""

    step: Index
    training: Number | None = None
    held_out: Number


class SavedTraining(Record):
    """A `TrainingResult`."""

    before: Number
    after: Number
    steps: Index
    note: str = ""
    curve: list[SavedValidation] = []


class SavedTotals(Record):
    """Totals of a run."""

    pruned_layers: int
    sparsity_of_pruned_layers: Finite
    sparsity_before: Finite = 0.0
    sparsity_of_model: Finite
    bits_of_pruned_layers: Number | None = None
    parameters: int | None = None


class SavedPoint(Record):
    """A `Point` of a search."""

    sparsity: Finite
    effort: str
    met: bool
    perplexity: dict[str, Number] = {}
    accuracy: dict[str, Finite] = {}
    size: int | None = None
    undecided: bool = False


class SavedSearch(Record):
    """The target of a search, and the sparsities that it tried."""

    target: str
    points: list[SavedPoint]


class SavedStage(Record):
    """A stage of a gradual pruning: its sparsity, the perplexity before and after its recovery, and its trainings by name."""

    sparsity: str
    perplexity: dict[str, dict[str, SavedFigure]] = {}
    training: dict[str, SavedTraining] = {}
    seconds: Finite = 0.0


class SavedGradual(Record):
    """The stages of a gradual pruning so far, from one sparsity to another."""

    pruned: str
    start: Annotated[str, Field(alias="from")]
    to: str
    stages: list[SavedStage]

    @property
    def seconds(self) -> float:
        """Time of all stages."""
        return sum(stage.seconds for stage in self.stages)

    def describe(self) -> str:
        """Describe after which prunings the model was trained, in part of a sentence."""
        count = len(self.stages)
        stages = "one stage" if count == 1 else f"each of {plural(count, 'stage')}"
        return f"after {stages} of pruning from {self.start} to {self.stages[-1].sparsity}"

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Head and lines of a table of the perplexities of each stage, by text; no lines if none was measured."""
        lines = [
            [stage.sparsity, text, *(plus_minus(pair.get(when)) for when in WHEN)]
            for stage in self.stages
            for text, pair in stage.perplexity.items()
        ]
        return ["stage", "text", "pruned perplexity", "recovered perplexity"], lines
