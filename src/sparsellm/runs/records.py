"""Typed records of the files that runs and sweeps write, validated on reading, since users may edit them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError

from sparsellm.data.json_files import read_json
from sparsellm.errors import BadCheckpoint, InvalidSetting, SparseLLMError, printable
from sparsellm.solvers.patterns import parse_pattern


def _parse_number(value: Any) -> Any:
    """Convert the strings that `report.strict_json` writes for infinity and NaN; reject integers that exceed 64 bits."""
    if value in ("inf", "-inf", "nan"):
        return float(value)
    if isinstance(value, int) and abs(value) >= 2**63:
        raise ValueError("the integer is too large")
    return value


def _check_pattern(text: str) -> str:
    """Return the text of a pattern; raise an error if it cannot be parsed."""
    parse_pattern(text)
    return text


Number = Annotated[float, BeforeValidator(_parse_number)]
Finite = Annotated[Number, Field(allow_inf_nan=False)]
Index = Annotated[int, Field(ge=0, lt=2**31)]


class Record(BaseModel, strict=True, extra="allow"):
    """Base of all records. They declare only the fields that are read; files may have more."""


class SavedFigure(Record):
    """A perplexity or an accuracy."""

    value: Number
    standard_error: Finite | None


class SavedPair(Record):
    """Measurements of the dense and the pruned model."""

    dense: SavedFigure | None = None
    pruned: SavedFigure | None = None


class SavedLayer(Record):
    """A `LayerResult`."""

    name: str
    pattern: Annotated[str, AfterValidator(_check_pattern)]
    zeros: Annotated[int, Field(ge=0)]
    sparsity: Finite
    error: Number


class SavedStep(Record):
    """An `EpochResult`."""

    step: str
    epoch: Index
    feed_forward_error: Number
    accepted: bool
    after_weights: Number | None


class SavedBlock(Record):
    """A `BlockResult`."""

    index: Index
    name: str
    layers: list[SavedLayer]
    epochs: list[SavedStep]
    seconds: Finite
    changed_parameters: list[str] = []


class SavedDigests(Record):
    """Digests of an output's files."""

    files: dict[str, str]
    tensors: dict[str, dict[str, Any]]
    report: str


class SavedTotals(Record):
    """Totals of a run."""

    pruned_layers: int
    sparsity_of_pruned_layers: Finite
    sparsity_of_model: Finite


class SavedReport(Record):
    """A `Report` as `sparsellm.json` holds it."""

    recipe: dict[str, Any]
    environment: dict[str, Any]
    calibration: str
    totals: SavedTotals
    perplexity: dict[str, SavedPair]
    tasks: dict[str, SavedPair] = {}
    samples: dict[str, dict[str, str]] = {}
    notes: list[str]
    seconds: dict[str, Finite]
    peak_memory_bytes: Finite
    blocks: list[SavedBlock]
    files: list[str] = []
    digests: SavedDigests | None = None


class FinishedCell(Record):
    """A finished cell of a sweep."""

    report: SavedReport


class FailedCell(Record):
    """A failed cell of a sweep."""

    error: str


AnyModel = TypeVar("AnyModel", bound=BaseModel)


def read_record(
    file: Path, model: type[AnyModel], what: str, refusal: type[SparseLLMError] = InvalidSetting
) -> tuple[AnyModel, dict[str, Any]]:
    """Read and validate a JSON file.

    Args:
        file: The file.
        model: The record class that its content must match.
        what: Name of that record in error messages.
        refusal: Exception class for a file that cannot be read.

    Returns:
        The record, and the content of the file as plain data.

    Raises:
        refusal: The file is unreadable or invalid; the message has the first invalid field.
    """
    content: dict[str, Any] = read_json(file, refusal)
    try:
        return model.model_validate(content), content
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "top level"
        got = printable(repr(first["input"]), 80)
        raise refusal(f"{file} is damaged: it is not a {what} ({where}: {first['msg']}, got {got}).") from None


def read_saved_report(file: Path) -> SavedReport:
    """Read a run's report as a record. Raises BadCheckpoint if it is damaged."""
    return read_record(file, SavedReport, "report of a run", BadCheckpoint)[0]


def saved_report(file: Path) -> dict[str, Any]:
    """Read a run's report as plain data, unchanged, as its digest requires. Raises BadCheckpoint if it is damaged."""
    return read_record(file, SavedReport, "report of a run", BadCheckpoint)[1]
