"""The report of a run: its results, layer by layer, written to and read from JSON."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AliasPath, Field, PlainValidator, TypeAdapter, ValidationError

from sparsellm.checkpoints.files import REPORT, Origin
from sparsellm.checkpoints.remarks import remark
from sparsellm.errors import BadCheckpoint, MissingPackage, plural, printable
from sparsellm.evaluation.differences import Difference
from sparsellm.evaluation.results import Accuracy, Perplexity, Summarized, change_of, plus_minus
from sparsellm.extension import find
from sparsellm.methods import (
    BLOCK_RESULT,
    NOTABLE,
    WHOLE_MODEL,
    BlockMethod,
    BlockResult,
    LayerResult,
    Totals,
    TrainingResult,
)
from sparsellm.models.coverage import Coverage
from sparsellm.outputs import card
from sparsellm.outputs.folder import folder_path
from sparsellm.outputs.sections import Section, read_sections
from sparsellm.outputs.sizes import WeightSizes, layer_bytes, packed_bytes
from sparsellm.recipes.fields import SAVED
from sparsellm.recipes.file import explain
from sparsellm.recipes.own_method import saved_kind
from sparsellm.recipes.path_names import PathNames
from sparsellm.recipes.recipe import Recipe, RunRecipe
from sparsellm.solvers.patterns import UnknownPattern
from sparsellm.solvers.statistics import TokenCount
from sparsellm.texts.json_files import FORMAT, read_record

if TYPE_CHECKING:
    from pandas import DataFrame

NOT_PRUNED = "not pruned by sparsellm"
"""The state of a model that was packed or exported and that no run has pruned: its report has no blocks."""

When = Literal["dense", "pruned"]

Perplexities = dict[str, dict[When, Perplexity]]
Accuracies = dict[str, dict[When, Accuracy]]
"""Measurements before and after pruning, by text or task."""


def _read_recipe(value: Any) -> RunRecipe:
    """Read the recipe in a report."""
    if isinstance(value, RunRecipe):
        return value
    if not isinstance(value, Mapping):
        raise ValueError("it is not a mapping")
    fields = dict(value)
    command = fields.pop("command", None)
    kind = saved_kind(fields) if command == Recipe.command else find("recipes", str(command), RunRecipe)
    if kind is None:
        raise ValueError(f"no installed package brings the command {command!r} that it is for")
    packages = fields.pop("packages", {})
    missing = {name: x for name, x in packages.items() if name not in kind.model_fields} if isinstance(packages, dict) else {}
    for package in dict.fromkeys(map(str, missing.values())):
        names = ", ".join(name for name, x in missing.items() if str(x) == package)
        text = (
            f"fields of {printable(package, 80)}, which is not installed, are left out of the recipe: {printable(names, 200)}"
        )
        remark(text, ("recipe", names))
    try:
        recipe: RunRecipe = kind.model_validate({k: x for k, x in fields.items() if k not in missing}, context=SAVED)
    except ValidationError as error:
        raise ValueError(explain(error.errors()[0], kind.model_fields)) from None
    if isinstance(recipe, Recipe) and isinstance(recipe.pattern, UnknownPattern):
        text = printable(str(recipe.pattern), 80)
        if not (isinstance(packages, dict) and packages.get("sparsity")):
            raise ValueError(f"{text!r} is no pattern, and no package that brings it is named")
        remark(f"no installed package brings the pattern {text}: where its zeros are is not checked", ("pattern", text))
    return recipe


SavedRecipe = Annotated[RunRecipe, PlainValidator(_read_recipe)]
"""A recipe that is read from a report."""


@dataclass(frozen=True)
class Digests:
    """Digests of an output's files and tensors, by name, and of its report."""

    files: dict[str, str]
    tensors: dict[str, dict[str, Any]]
    report: str


@dataclass(frozen=True)
class PrunedReport:
    """The part of the pruned checkpoint's report that the report of a recovery repeats.

    Attributes:
        digest: Digest of that report.
    """

    recipe: SavedRecipe
    perplexity: Perplexities = field(default_factory=dict)
    tasks: Accuracies = field(default_factory=dict)
    pruned: PrunedReport | None = None
    digest: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        own = {"recipe": self.recipe.to_dict(), "pruned": self.pruned and self.pruned.to_dict()}
        return {name: x for name, x in (asdict(replace(self, pruned=None)) | own).items() if name != "pruned" or x}


@dataclass(repr=False)
class Report(Summarized):
    """The results of a run, filled in as the run proceeds, or read from the file that an output has.

    Attributes:
        recipe: The recipe of the run.
        environment: Versions of packages, and the machine.
        resolved: Values that were used where the recipe leaves them open.
        calibration: How the calibration sequences were drawn.
        blocks: Results by block, in order.
        changed_outside: Names of the parameters outside of the blocks that a recovery changed.
        dtype_changed: Whether tensors have another dtype than in the dense model's files.
        initial_sparsity: The fraction of the weights of the linear layers in the blocks that were zero before the run; 0 where
            that is below `NOTABLE`, or the model was read block by block.
        inputs: Digests of the files that the run read, by the name of the model or text in the recipe.
        perplexity: Perplexity before and after, by text.
        tasks: Accuracy before and after, by task.
        notes: Warnings and remarks for the user.
        seconds: Duration of each stage.
        recovered: Result of training the whole model, if the run did.
        pruned: For a recovery, entries of the report of the pruned checkpoint.
        parameters: Number of stored parameters.
        zeros: Number of stored parameters that are zero.
        weight_bytes: Their bytes as the run writes them; 0 if it is not known.
        peak_memory_bytes: Peak host memory of this process at the end of the run; the command line resets it before each run.
        origin: The dense model, for the model card; not in the file.
        coverage: Fraction of the blocks' matrix weights that is pruned.
        files: Names of the output's files, once it is written.
        digests: Their digests.
        sections: What extensions bring, by its name in the file.
    """

    recipe: SavedRecipe
    environment: dict[str, str] = field(default_factory=dict)
    resolved: dict[str, Any] = field(default_factory=dict)
    calibration: str = ""
    blocks: list[BlockResult] = field(default_factory=list)
    changed_outside: tuple[str, ...] = ()
    dtype_changed: bool = False
    initial_sparsity: float = 0.0
    inputs: dict[str, dict[str, str]] = field(default_factory=dict)
    perplexity: Perplexities = field(default_factory=dict)
    tasks: Accuracies = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    recovered: TrainingResult | None = None
    pruned: PrunedReport | None = None
    parameters: Annotated[int, Field(validation_alias=AliasPath("totals", "parameters"))] = 0
    zeros: Annotated[int, Field(validation_alias=AliasPath("totals", "zeros"))] = 0
    weight_bytes: Annotated[int, Field(validation_alias=AliasPath("totals", "weight_bytes"))] = 0
    peak_memory_bytes: int = 0
    origin: Annotated[Origin, Field(exclude=True)] = field(default_factory=Origin)
    coverage: Coverage | None = None
    files: tuple[str, ...] = ()
    digests: Digests | None = None
    sections: Annotated[dict[str, Section], PlainValidator(lambda _: {})] = field(default_factory=dict)

    @property
    def result(self) -> str:
        """The word for the model after the run."""
        return self.recipe.result

    @property
    def start(self) -> str:
        """The state of the model before the run, for tables: dense, or with how many zeros."""
        share = max(self.initial_sparsity, self.totals.sparsity_before)
        return "dense" if share < NOTABLE else f"initial ({100 * share:.2f} % zeros)"

    @property
    def layers(self) -> list[LayerResult]:
        """Every pruned layer, in order."""
        return [layer for block in self.blocks for layer in block.layers]

    @property
    def changed_parameters(self) -> set[str]:
        """The parameters besides the pruned layers that are not the dense model's."""
        return {name for block in self.blocks for name in block.changed_parameters}.union(self.changed_outside)

    @property
    def totals(self) -> Totals:
        """Numbers of layers, parameters and zeros, and the sparsities and the stored bits a weight that follow."""
        sizes = [(layer.bits_per_weight, layer.shape[0] * layer.shape[1]) for layer in self.layers]
        bits = [each * size for each, size in sizes if each is not None]
        count = sum(size for _, size in sizes)
        return Totals(
            pruned_layers=len(self.layers),
            sparsity_of_pruned_layers=sum(layer.zeros for layer in self.layers) / count if count else 0.0,
            sparsity_before=sum(layer.zeros_before for layer in self.layers) / count if count else 0.0,
            bits_of_pruned_layers=sum(bits) / count if 0 < len(bits) == len(sizes) else None,
            parameters=self.parameters,
            zeros=self.zeros,
            weight_bytes=self.weight_bytes,
            packed_bytes=packed_bytes(self.layers, self.weight_bytes, self.dtype),
        )

    @property
    def dtype(self) -> str:
        """Name of the model's dtype; empty if it is not known."""
        return str(self.resolved.get("dtype", "")).removeprefix("torch.")

    @property
    def sizes(self) -> WeightSizes | None:
        """The bytes of the weights, as written and packed; None if they are not known."""
        totals, packed = self.totals, next((x for s in self.sections.values() if (x := s.weight_bytes) is not None), None)
        if not self.weight_bytes:
            return None
        size = totals.packed_bytes if packed is None else packed
        return WeightSizes(self.weight_bytes, size, measured=packed is not None, bits=totals.bits_of_pruned_layers)

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
        return str(patterns.pop()) if len(patterns) == 1 and all(x.n_m for x in patterns) else ""

    @property
    def is_recovery(self) -> bool:
        """Whether the run trained a pruned model."""
        return self.recipe.trains

    @property
    def recovered_nothing(self) -> bool:
        """Whether this is a recovery of which no step lowered a loss: the weights are as they were pruned."""
        return self.is_recovery and bool(self.trainings) and not any(x.steps for x in self.trainings.values())

    @property
    def trainings(self) -> dict[str, TrainingResult]:
        """The trainings, of the whole model or of blocks, by their names."""
        found = {WHOLE_MODEL: self.recovered} | {f"block {block.index}": block.refined for block in self.blocks}
        return {name: training for name, training in found.items() if training is not None}

    def before(self, text: str) -> Perplexity | None:
        """The perplexity of the pruned checkpoint that a recovery starts from; None if it was not measured."""
        return self.pruned.perplexity.get(text, {}).get("pruned") if self.pruned else None

    def in_order(self, text: str) -> list[Perplexity]:
        """The perplexities on a text: before pruning, after it, and, for a recovery, after that."""
        pair = self.perplexity[text]
        return [x for x in (pair.get("dense"), self.before(text), pair.get("pruned")) if x is not None]

    def change(self, text: str) -> Difference | None:
        """The change of a perplexity from the dense model; None if either was not measured."""
        return change_of(self.perplexity[text])

    def change_by_recovery(self, text: str) -> Difference | None:
        """The change of a perplexity by a recovery, from the pruned checkpoint; None if either was not measured."""
        before, after = self.before(text), self.perplexity[text].get("pruned")
        return after.against(before) if before and after else None

    def add_changes(self, names: Collection[str]) -> None:
        """Record parameters that are not the dense model's and hold no pruned layer, with their blocks or outside of these."""
        others = {*self.changed_outside, *names}
        for number, block in enumerate(self.blocks):
            local = {name for name in others if name.startswith(f"{block.name}.")}
            others -= local
            self.blocks[number] = replace(block, changed_parameters=tuple(sorted({*block.changed_parameters, *local})))
        self.changed_outside = tuple(sorted(others))

    def describe(self) -> str:
        """Describe the run in one line, as its recipe does with its results."""
        return self.recipe.describe_run(self.totals, self.trainings)

    def summary(self) -> dict[str, str]:
        """The model and how it was pruned, the sparsity, the perplexity before and after, and the bytes, each in one line."""
        totals, how = self.totals, "pruned and " if self.is_recovery else "pruned by "
        how = "pruned; " if self.recovered_nothing else how
        measured = (
            f"{' → '.join(map(plus_minus, self.in_order(text)))}{f' ({change})' if (change := self.change(text)) else ''} "
            f"on {PurePath(text).name}"
            for text in self.perplexity
        )
        return {
            "model": f"{PurePath(self.recipe.model).name}, {how + self.describe() if self.blocks else NOT_PRUNED}",
            "sparsity": f"{100 * self.sparsity:.2f} % of the weights in {totals.pruned_layers} pruned layers, "
            f"{100 * totals.sparsity_of_model:.2f} % of the model",
            "perplexity": "; ".join(measured) or "not measured",
            "size": str(self.sizes or "not known"),
        }

    def to_frame(self) -> DataFrame:
        """The results of each pruned layer as the rows of a pandas DataFrame.

        Returns:
            Columns `name`, `block` (its index), `pattern`, `shape`, `zeros`, `sparsity`, `error`, `weight_bytes` (as written),
            `packed_bytes` (as `Totals`), and the other attributes of `LayerResult` that have a value in some row, among them
            `seconds`.

        Raises:
            MissingPackage: pandas is not installed.
        """
        try:
            from pandas import DataFrame
        except ImportError:
            raise MissingPackage("Data frames need pandas, which is not installed: pip install 'sparsellm[frame]'.") from None
        first = ("name", "block", "pattern", "shape", "zeros", "sparsity", "error", "weight_bytes", "packed_bytes")
        blocks = [_block_to_dict(block) for block in self.blocks]
        rows = [
            layer | {"block": block["index"], "shape": tuple(layer["shape"])} for block in blocks for layer in block["layers"]
        ]
        for row, layer in zip(rows, self.layers, strict=True):
            row["weight_bytes"], row["packed_bytes"] = layer_bytes(layer, self.dtype)
        return DataFrame([{name: row[name] for name in first} | row for row in rows]).dropna(axis="columns", how="all")

    def pruning_warnings(self, damping: float | None) -> Iterator[str]:
        """State what differs from the recipe: fallbacks in blocks, raised damping, surplus zeros.

        Args:
            damping: Damping of the method's solver; None for a solver without it.
        """
        yield from self.block_notes()
        if raised := [x for x in self.layers if x.damping is not None and x.damping != damping]:
            highest = max(raised, key=lambda layer: layer.damping or 0)
            yield (
                f"damping was raised from {damping:g} on {plural(len(raised), 'layer')} because a factorization failed, "
                f"to at most {highest.damping:g} on {highest.name}: use more calibration tokens"
            )
        if few := [x for x in self.layers if x.routed_tokens is not None and x.routed_tokens < x.tokens]:
            least = min(few, key=lambda layer: layer.routed_tokens or 0)
            yield (
                f"{plural(len({x.name.rpartition('.')[0] for x in few}), 'expert')} got fewer tokens than their layers have "
                f"inputs, {least.name.rpartition('.')[0]} only {least.routed_tokens:,}: evenly spaced tokens of the layer were "
                f"added, {least.tokens:,} in all"
            )
        if unused := [x.name for x in self.layers if x.tokens == 0 and x.known != TokenCount.__name__]:
            text = f"{plural(len(unused), 'layer')} without a token, {unused[0]} first: pruned by magnitude"
            yield f"{text}. Use more calibration tokens"
        zeros, recipe = self.totals.before_and_after, self.recipe
        if zeros and (advice := zeros_advice(recipe, self.totals.sparsity_before)):
            yield f"of the weights in the pruned layers {zeros}. {advice}"
        if isinstance(recipe, Recipe) and recipe.projecting:
            return  # kept weights that round to 0 are zeros too
        more = [x for x in self.layers if x.zeros > max(x.zeros_before, x.pattern.count_removed(x.shape))]
        if more:
            yield (
                f"more zeros than requested in {plural(len(more), 'layer')}, {more[0].name} first "
                f"({100 * more[0].sparsity:.2f} %): inputs are always zero, "
                "some dense weights were zero already, or small weights round to zero in the model's dtype"
            )

    def note_before(self, recipe: RunRecipe) -> str:
        """The note before another run on the model of this one, which has zeros already; empty if there is no need."""
        totals = self.totals
        advice = zeros_advice(recipe, totals.sparsity_of_pruned_layers)
        if totals.sparsity_of_pruned_layers < NOTABLE or not advice:
            return ""
        share, layers = f"{100 * totals.sparsity_of_pruned_layers:.2f} %", plural(totals.pruned_layers, "layer")
        return f"{recipe.model} is pruned already: {share} of the weights in {layers} are zero. {advice}"

    def block_notes(self) -> Iterator[str]:
        """The remarks on blocks, one for all blocks that share it."""
        blocks_by_note: dict[str, list[str]] = {}
        for block in self.blocks:
            for note in (block.note, block.refined.note if block.refined else ""):
                if note:
                    blocks_by_note.setdefault(note, []).append(block.name)
        for note, names in blocks_by_note.items():
            in_all = len(names) == len(self.blocks) > 2
            yield from (f"{name}: {note}" for name in ([f"{names[0]} to {names[-1]}"] if in_all else names))

    def named(self, names: PathNames) -> Report:
        """Copy the report with names in place of the paths of its recipe, as it is written to an output."""
        return replace(
            self,
            recipe=names.recipe(self.recipe),
            inputs=names.keys(self.inputs),
            perplexity=names.keys(self.perplexity),
            tasks=names.keys(self.tasks),
            pruned=self.pruned and replace(self.pruned, perplexity=names.keys(self.pruned.perplexity)),
        )

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, ready for JSON."""
        optional = {
            "pruned": self.pruned and self.pruned.to_dict(),
            "changed_outside": self.changed_outside,
            "dtype_changed": self.dtype_changed,
            "initial_sparsity": self.initial_sparsity,
            "inputs": self.inputs,
        }
        of_output = {
            "files": self.files,
            "digests": self.digests and asdict(self.digests),
        }
        return {
            "format": FORMAT,
            "recipe": self.recipe.to_dict(),
            "resolved": self.resolved,
            "environment": self.environment,
            "calibration": self.calibration,
            "totals": self.totals.to_dict(),
            "coverage": self.coverage and self.coverage.to_dict(),
            "perplexity": _results_to_dict(self.perplexity),
            "tasks": _results_to_dict(self.tasks),
            "notes": self.notes,
            "seconds": self.seconds,
            "peak_memory_bytes": self.peak_memory_bytes,
            "recovered": self.recovered and asdict(self.recovered),
            **{name: value for name, value in optional.items() if value},
            "blocks": [_block_to_dict(block) for block in self.blocks],
            **{name: value for name, value in of_output.items() if value},
            **{name: section.to_dict() for name, section in self.sections.items()},
        }

    @classmethod
    def from_dict(cls, data: Any) -> Report:
        """Read a report from plain data, as `to_dict` gives it. Raises pydantic's ValidationError for any other."""
        report = REPORT_TYPE.validate_python(data)
        report.sections = read_sections(data, ENTRIES)
        recipes = [report.recipe, *([report.pruned.recipe] if report.pruned else [])]
        named = {x.pattern for x in recipes if isinstance(x, Recipe)}  # of which those of missing packages are refused or noted
        if wrong := next((x for x in report.layers if isinstance(x.pattern, UnknownPattern) and x.pattern not in named), None):
            raise ValueError(f"{wrong.name} has the pattern {printable(str(wrong.pattern), 80)!r}, which is none")
        return report

    def to_markdown(self) -> str:
        """The model card. It holds no times or dates, so that equal results give equal bytes."""
        origin, recipe = self.origin, self.recipe
        return card.template().render(
            report=self,
            totals=self.totals,
            metadata=card.metadata(origin),
            name=PurePath(origin.name or recipe.model).name,
            base=f" from {card.link(origin)}" if origin.name else "",
            changed=len(self.changed_parameters),
            coverage=self.coverage.describe() if self.coverage else "",
            options=", trust_remote_code=True" if recipe.trust_remote_code else "",
            previous=self.pruned.recipe.to_yaml() if self.pruned else "",
            described=self.describe(),
        )


def zeros_advice(recipe: RunRecipe, before: float) -> str:
    """How to keep the zeros that a model has, or to get more; empty if the recipe does, or its method cannot."""
    more = f"a sparsity of more than {100 * before:.2f} % to remove more"
    if not isinstance(recipe, Recipe) or isinstance(getattr(recipe, "given", None), BlockMethod):
        return ""  # a method of one's own decides itself
    if not recipe.keep_zeros:
        return f"Pass `keep_zeros=True` to keep these zeros, and {more}"
    return "" if recipe.sparsity is None or recipe.pattern.sparsity > before else f"Pass {more}"


def _block_to_dict(block: BlockResult) -> dict[str, Any]:
    """A block's result as plain data."""
    data: dict[str, Any] = BLOCK_RESULT.dump_python(block, mode="json")
    for layer, entry in zip(block.layers, data["layers"], strict=True):
        entry["sparsity"] = layer.sparsity
    return data


def _results_to_dict(results: Mapping[str, Mapping[When, Perplexity | Accuracy]]) -> dict[str, dict[str, Any]]:
    """Results by text or task as plain data."""
    return {name: {when: asdict(result) for when, result in pair.items()} for name, pair in results.items()}


REPORT_TYPE = TypeAdapter(Report)

ENTRIES = {"format", "totals", *(x.name for x in fields(Report))}
"""Names of the entries of the file that are no sections."""


def read_report(file: Path) -> tuple[Report, dict[str, Any]]:
    """Read a report, and the same as plain data. Raises BadCheckpoint if the file is missing or damaged."""
    return read_record(file, Report.from_dict, "report of a run", refusal=BadCheckpoint)


def load_report(run: str | Path) -> Report:
    """Read the report of a run.

    Args:
        run: Folder that `prune` or `recover` wrote, or its sparsellm.json.

    Raises:
        BadCheckpoint: The report is missing or damaged.
    """
    file = folder_path(run)
    return read_report(file / REPORT if file.is_dir() else file)[0]
