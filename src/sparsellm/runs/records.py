"""Files that runs and sweeps wrote, as typed records, validated on reading since users may edit them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, TypeAdapter, ValidationError

from sparsellm.data.json_files import read_json
from sparsellm.errors import BadCheckpoint, InvalidSetting, MissingPackage, SparseLLMError, printable
from sparsellm.evaluation.differences import Difference, difference, paired_error
from sparsellm.evaluation.measurements import LayerCosts, plus_minus
from sparsellm.methods import StoredPattern
from sparsellm.runs.output_folder import REPORT as REPORT
from sparsellm.runs.output_folder import WORK as WORK
from sparsellm.runs.output_folder import folder_path
from sparsellm.runs.quantization_file import SCALES_FILE
from sparsellm.runs.result_records import (
    Finite,
    Index,
    Number,
    Record,
    SavedFigure,
    SavedGradual,
    SavedSearch,
    SavedTotals,
    SavedTraining,
)
from sparsellm.runs.speed_record import Bench
from sparsellm.runs.training_outcome import WHOLE_MODEL as WHOLE_MODEL
from sparsellm.runs.training_outcome import changed_nothing, trainings
from sparsellm.runs.zeros_before import counts
from sparsellm.runtime.memory import human_bytes
from sparsellm.solvers.patterns import NM

if TYPE_CHECKING:
    from pandas import DataFrame

TRAINING_STATE = "training"
"""Name under which the journal of a run has the state of its training."""

CARD = "README.md"
"""The model card, which users may edit."""

LOG = "sparsellm-log.jsonl"
"""Name of the log file, in the work folder and in the output."""

ANEW = (CARD, REPORT, SCALES_FILE)
"""Files of a model that everything made from it has in a form of its own."""


class SavedPair(Record):
    """Measurements of the dense and the pruned model."""

    dense: SavedFigure | None = None
    pruned: SavedFigure | None = None

    @property
    def change(self) -> Difference | None:
        """The relative change of a perplexity, as `Perplexity.against`; None if either was not measured."""
        if self.dense is None or self.pruned is None:
            return None
        return difference(self.pruned.value, self.dense.value, paired_error(self.pruned.parts, self.dense.parts))


class SavedLayer(Record):
    """A `LayerResult`."""

    name: str
    pattern: StoredPattern
    zeros: Annotated[int, Field(ge=0)]
    sparsity: Finite
    error: Number
    predicted_kl: Number | None = None
    measured_kl: Number | None = None
    bits: int | None = None
    bits_per_weight: Number | None = None


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
    refined: SavedTraining | None = None


class SavedDigests(Record):
    """Digests of an output's files."""

    files: dict[str, str]
    tensors: dict[str, dict[str, Any]]
    report: str


class SavedPruning(Record):
    """What the report of a recovery repeats of the pruned checkpoint's."""

    perplexity: dict[str, SavedPair] = {}
    tasks: dict[str, SavedPair] = {}


class SavedPacking(Record):
    """Sizes of a packed model, and its speed if `bench` recorded it."""

    form: str
    dense_bytes: Annotated[int, Field(ge=0)]
    packed_bytes: Annotated[int, Field(ge=0)]
    bits: Finite
    bench: Annotated[Bench, BeforeValidator(TypeAdapter(Bench).validate_python)] | None = None

    def describe(self) -> str:
        """The sizes in one sentence, and the speed in another."""
        percent = 100 * self.packed_bytes / max(self.dense_bytes, 1)
        size = f"{human_bytes(self.packed_bytes)}, {percent:.0f} % of {human_bytes(self.dense_bytes)}"
        text = f"Packed ({printable(self.form, 20)} form): {size}; {self.bits:.2f} bits a weight of the packed matrices."
        if self.bench is None:
            return text
        return f"{text} Decoding on {printable(self.bench.machine)}: {'. '.join(self.bench.describe())}."


class SavedReport(Record):
    """A `Report` as `sparsellm.json` holds it."""

    recipe: dict[str, Any]
    environment: dict[str, Any]
    calibration: str
    totals: SavedTotals
    perplexity: dict[str, SavedPair]
    tasks: dict[str, SavedPair] = {}
    samples: dict[str, dict[str, str]] = {}
    search: SavedSearch | None = None
    gradual: SavedGradual | None = None
    notes: list[str]
    seconds: dict[str, Finite]
    peak_memory_bytes: Finite
    blocks: list[SavedBlock]
    changed_outside: list[str] = []
    dtype_changed: bool = False
    inputs: dict[str, dict[str, str]] = {}
    recovered: SavedTraining | None = None
    pruned: SavedPruning | None = None
    files: list[str] = []
    digests: SavedDigests | None = None
    packing: SavedPacking | None = None
    layer_costs: Annotated[LayerCosts, BeforeValidator(TypeAdapter(LayerCosts).validate_python)] | None = None

    @property
    def layers(self) -> list[SavedLayer]:
        """Every pruned layer, in order."""
        return [layer for block in self.blocks for layer in block.layers]

    @property
    def sparsity(self) -> float:
        """The fraction of the pruned layers' weights that are zero."""
        return self.totals.sparsity_of_pruned_layers

    @property
    def sparsity_before(self) -> float:
        """The fraction of these weights that were zero before."""
        return self.totals.sparsity_before

    @property
    def n_m(self) -> str:
        """The N:M pattern of all pruned layers, as "2:4", also of a recovery; empty if they have none in common."""
        patterns = {layer.pattern for layer in self.layers}
        return str(patterns.pop()) if len(patterns) == 1 and all(isinstance(x, NM) for x in patterns) else ""

    def __repr__(self) -> str:
        totals = self.totals
        zeros = f"{100 * totals.sparsity_of_pruned_layers:.2f} % zeros in {totals.pruned_layers} pruned layers"
        return f"<{type(self).__name__} of {printable(str(self.recipe.get('model')), 80)}: {zeros}>"

    def __str__(self) -> str:
        """The model, the method, the zeros and the perplexities, as a report prints; pydantic would print every layer."""
        totals, recipe = self.totals, self.recipe
        size = f"{recipe['bits']} bits a weight" if recipe.get("bits") else recipe.get("sparsity")
        recovered = "pruned; nothing was recovered" if changed_nothing(trainings(self)) else "pruned and recovered"
        pruned = "; ".join(filter(None, (f"pruned by {recipe.get('method', 'sparsellm')}, {size}", counts(self))))
        how = recovered if "pruned" in recipe else pruned
        zeros = f"{100 * totals.sparsity_of_pruned_layers:.2f} % of the weights in {totals.pruned_layers} pruned layers"
        texts = []
        for text, pair in self.perplexity.items():
            before = self.pruned.perplexity.get(text) if self.pruned else None
            figures = (pair.dense, before.pruned if before else None, pair.pruned)
            change = pair.change
            values = " → ".join(plus_minus(x) for x in figures if x) + (f" ({change})" if change else "")
            texts.append(f"{values} on {PurePath(text).name}")
        lines = {
            "model": f"{PurePath(str(recipe.get('model'))).name}, {how}",
            "sparsity": f"{zeros}, {100 * totals.sparsity_of_model:.2f} % of the model",
            "perplexity": "; ".join(texts) or "not measured",
        }
        return printable("\n".join(f"{name}: {value}" for name, value in lines.items()))

    def to_frame(self) -> DataFrame:
        """The results of each pruned layer as the rows of a pandas DataFrame, as `Report.to_frame` does."""
        return layer_frame([block.model_dump(mode="json") for block in self.blocks])

    @property
    def changed_parameters(self) -> set[str]:
        """The parameters besides the pruned layers that the run changed."""
        return {name for block in self.blocks for name in block.changed_parameters}.union(self.changed_outside)


def layer_frame(blocks: Sequence[Mapping[str, Any]]) -> DataFrame:
    """A row for each layer of these blocks, given as `BlockResult` is in JSON. Raises MissingPackage without pandas."""
    try:
        from pandas import DataFrame
    except ImportError:
        raise MissingPackage("Data frames need pandas, which is not installed: pip install 'sparsellm[frame]'.") from None
    first = ("name", "block", "pattern", "shape", "zeros", "sparsity", "error")
    rows = [layer | {"block": block["index"]} for block in blocks for layer in block["layers"]]
    for row in rows:
        row["shape"] = tuple(row["shape"]) if "shape" in row else None
    return DataFrame([{name: row[name] for name in first} | row for row in rows])


class FinishedCell(Record):
    """A finished cell of a sweep."""

    report: SavedReport


class FailedCell(Record):
    """A failed cell of a sweep."""

    error: str


AnyModel = TypeVar("AnyModel", bound=BaseModel)


def read_record(
    file: Path, model: type[AnyModel], what: str, *, refusal: type[SparseLLMError] = InvalidSetting
) -> tuple[AnyModel, dict[str, Any]]:
    """Read and validate a JSON file.

    Args:
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


def load_report(run: str | Path) -> SavedReport:
    """Read the report of a run.

    Args:
        run: Folder that `prune` or `recover` wrote, or its sparsellm.json.

    Returns:
        The report as the file holds it, with the attributes of `Report` that it has.

    Raises:
        BadCheckpoint: The report is missing or damaged.
    """
    file = folder_path(run)
    return read_record(file / REPORT if file.is_dir() else file, SavedReport, "report of a run", refusal=BadCheckpoint)[0]
