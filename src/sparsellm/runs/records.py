"""Files that runs and sweeps wrote, as typed records, validated on reading since users may edit them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError

from sparsellm.checkpoints.digests import file_digest, report_digest
from sparsellm.data.json_files import is_path, read_json
from sparsellm.errors import BadCheckpoint, InvalidSetting, SparseLLMError, printable
from sparsellm.solvers.patterns import Pattern, parse_pattern

REPORT = "sparsellm.json"
"""Name of the report file beside the weights."""

WORK = ".sparsellm"
"""Name of the work folder in an unfinished output; a finished output has none."""

CARD = "README.md"
"""The model card, which users may edit."""

Layers = Mapping[str, tuple[int, Pattern]]
"""Number of zeros and pattern of each pruned layer, by its full name."""


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


def finished_report(output: str | Path) -> tuple[Path, Mapping[str, Any]]:
    """Path and report of a finished output.

    Raises:
        InvalidSetting: The folder is not an output, or is unfinished.
        BadCheckpoint: The report is damaged, or files are missing.
    """
    path = Path(output).expanduser()
    if (path / WORK).exists():
        raise InvalidSetting(f"{output} is unfinished. Finish it first: run the same `sparsellm prune` with --resume.")
    report = read_report(path)
    missing = sorted(name for name in report["files"] if not (path / name).is_file())
    if missing:
        raise BadCheckpoint(f"{output} lacks {len(missing)} of the files that the run wrote, {missing[0]} first.")
    return path, report


def read_report(folder: Path) -> Mapping[str, Any]:
    """Read the report in a folder. Raises InvalidSetting if there is none, BadCheckpoint if it is damaged."""
    file = folder / REPORT
    if not file.is_file():
        reason = f"was not written by sparsellm: it has no {REPORT}" if folder.is_dir() else "is not a folder"
        raise InvalidSetting(f"{folder} {reason}. Name a folder that `sparsellm prune` wrote.")
    report = saved_report(file)
    if not report.get("digests") or "files" not in report:
        raise BadCheckpoint(f"{file} holds no digests, so {folder} cannot be verified. Prune the model again.")
    foreign = [name for name in report["files"] if not _is_within(folder, name)]
    if foreign:
        raise BadCheckpoint(f"{file} lists {foreign[0]}, which is not in the folder or is a link out of it.")
    return report


def _is_within(folder: Path, name: str) -> bool:
    """Whether a file is in a folder, or is a link into the `blobs` of the hub's cache."""
    if not is_path(name):
        return False
    file, root = (folder / name).resolve(), folder.resolve()
    return file.is_relative_to(root) or file.is_relative_to(root.parent.parent / "blobs")


def changed_files(folder: Path, report: Mapping[str, Any]) -> list[str]:
    """Files of a finished output, including its report, that exist and differ from what the run wrote."""
    recorded = report["digests"]["files"]
    present = [name for name in report["files"] if name != REPORT and (folder / name).is_file()]
    changed = [name for name in present if file_digest(folder / name) != recorded.get(name)]
    return changed + [REPORT] * (report_digest(report) != report["digests"]["report"])


def foreign_file(folder: Path, kept: Collection[str]) -> str:
    """Name the first of the `kept` files that is not exactly as a run wrote it, with the reason; empty if all are."""
    if not kept:
        return ""
    try:
        report = read_report(folder)
    except InvalidSetting:
        return f"{min(kept)}, which sparsellm did not write"
    except BadCheckpoint:
        return f"{REPORT}, which is damaged"
    if foreign := sorted(set(kept) - set(report["files"])):
        return f"{foreign[0]}, which sparsellm did not write"
    changed = changed_files(folder, report)
    return f"{changed[0]}, which was changed since" if changed else ""


def pruned_layers(report: Mapping[str, Any]) -> Layers:
    """Pruned layers with their zeros and patterns, as recorded in a report."""
    return {x["name"]: (x["zeros"], parse_pattern(x["pattern"])) for block in report["blocks"] for x in block["layers"]}


def moved_tensors(report: Mapping[str, Any]) -> set[str]:
    """Tensors besides the pruned layers that the run changed, as recorded in a report."""
    return {name for block in report["blocks"] for name in block.get("changed_parameters", ())}
