"""The results of a run, layer by layer, as JSON."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Literal

from pydantic import TypeAdapter

from sparsellm.checkpoints.files import Origin
from sparsellm.data.json_files import strict_json
from sparsellm.errors import plural
from sparsellm.evaluation.differences import Difference
from sparsellm.evaluation.measurements import Accuracy, LayerCosts, Perplexity, Summarized, plus_minus
from sparsellm.methods import BLOCK_RESULT, BlockResult, LayerResult, TrainingResult
from sparsellm.models.coverage import Coverage
from sparsellm.runs import card
from sparsellm.runs.recipe import Recipe, RunRecipe
from sparsellm.runs.recipe_fields import recipe_yaml
from sparsellm.runs.records import layer_frame
from sparsellm.runs.recovery_recipe import RecoveryRecipe
from sparsellm.runs.training_outcome import changed_nothing, describe_outcome, read_gradual, trainings
from sparsellm.runs.zeros_before import note_after, note_surplus
from sparsellm.solvers.statistics import TokenCount

if TYPE_CHECKING:
    from pandas import DataFrame

When = Literal["dense", "pruned"]
WHEN: tuple[When, ...] = ("dense", "pruned")

PERPLEXITY = TypeAdapter(Perplexity)
"""Reads a perplexity from a report."""

OPTIONAL = ("pruned", "search", "gradual", "changed_outside", "dtype_changed", "inputs")
"""Fields that are in the JSON only where they hold something."""


@dataclass(repr=False)
class Report(Summarized):
    """The results of a run, filled in as the run proceeds.

    Attributes:
        recipe: The recipe of the run.
        environment: Versions of packages, and the machine.
        resolved: Values that were used where the recipe leaves them open.
        calibration: How the calibration sequences were drawn.
        blocks: Results by block, in order.
        changed_outside: Names of the parameters outside of the blocks that a recovery changed.
        dtype_changed: Whether tensors have another dtype than in the dense model's files.
        inputs: Digests of the files that the run read, by the name of the model or text in the recipe.
        perplexity: Perplexity before and after, by text.
        tasks: Accuracy before and after, by task.
        samples: Continuations by the dense and the pruned model, by prompt.
        notes: Warnings and remarks for the user.
        seconds: Duration of each stage.
        recovered: Result of training the whole model, if the run did.
        pruned: For a recovery, the report of the pruned checkpoint.
        search: For a search, its target and the sparsities that were tried, as plain data.
        gradual: For a stage of a gradual pruning, the results of all stages so far, as plain data.
        parameters: Number of stored parameters.
        zeros: Number of stored parameters that are zero.
        peak_memory: Peak memory of this process so far, in bytes; the command line resets it before each run.
        origin: The dense model, for the model card.
        coverage: Fraction of the blocks' matrix weights that is pruned.
        layer_costs: What the layers with the largest `predicted_kl` cost; None if that was not measured.
    """

    recipe: RunRecipe
    environment: dict[str, str] = field(default_factory=dict)
    resolved: dict[str, Any] = field(default_factory=dict)
    calibration: str = ""
    blocks: list[BlockResult] = field(default_factory=list)
    changed_outside: tuple[str, ...] = ()
    dtype_changed: bool = False
    inputs: dict[str, dict[str, str]] = field(default_factory=dict)
    perplexity: dict[str, dict[When, Perplexity]] = field(default_factory=dict)
    tasks: dict[str, dict[When, Accuracy]] = field(default_factory=dict)
    samples: dict[str, dict[When, str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    recovered: TrainingResult | None = None
    pruned: dict[str, Any] | None = None
    search: dict[str, Any] | None = None
    gradual: dict[str, Any] | None = None
    parameters: int = 0
    zeros: int = 0
    peak_memory: int = 0
    origin: Origin = field(default_factory=Origin)
    coverage: Coverage | None = None
    layer_costs: LayerCosts | None = None

    @property
    def layers(self) -> list[LayerResult]:
        """Every pruned layer, in order."""
        return [layer for block in self.blocks for layer in block.layers]

    @property
    def changed_parameters(self) -> set[str]:
        """The parameters besides the pruned layers that are not the dense model's."""
        return {name for block in self.blocks for name in block.changed_parameters}.union(self.changed_outside)

    @property
    def sparsity(self) -> float:
        """The fraction of the pruned layers' weights that are zero."""
        count = sum(layer.shape[0] * layer.shape[1] for layer in self.layers)
        return sum(layer.zeros for layer in self.layers) / count if count else 0.0

    @property
    def sparsity_before(self) -> float:
        """The fraction of these weights that were zero before."""
        count = sum(layer.shape[0] * layer.shape[1] for layer in self.layers)
        return sum(layer.zeros_before for layer in self.layers) / count if count else 0.0

    @property
    def recovered_nothing(self) -> bool:
        """Whether this is a recovery of which no step, of any stage, lowered a loss: the weights are as they were pruned."""
        return isinstance(self.recipe, RecoveryRecipe) and changed_nothing(trainings(self))

    def add_before(self, perplexity: Mapping[str, Perplexity]) -> None:
        """Record the perplexity, by text, of the pruned checkpoint that a recovery starts from."""
        if self.pruned is not None:
            recorded = self.pruned.get("perplexity", {})
            measured = {text: {**self.perplexity.get(text, {}), "pruned": value} for text, value in perplexity.items()}
            self.pruned = {**self.pruned, "perplexity": {**recorded, **_results_to_dict(measured)}}

    def before(self, text: str) -> Perplexity | None:
        """The perplexity of the pruned checkpoint that a recovery starts from; None if it was not measured."""
        pair = (self.pruned or {}).get("perplexity", {}).get(text) or {}
        return PERPLEXITY.validate_python(pair["pruned"]) if pair.get("pruned") else None

    def in_order(self, text: str) -> list[Perplexity]:
        """What was measured on a text: before pruning, after it, and, for a recovery, after that."""
        pair = self.perplexity[text]
        return [x for x in (pair.get("dense"), self.before(text), pair.get("pruned")) if x is not None]

    def change(self, text: str) -> Difference | None:
        """The change of a perplexity from the dense model; None if either was not measured."""
        pair = self.perplexity[text]
        return pair["pruned"].against(pair["dense"]) if pair.keys() >= {"dense", "pruned"} else None

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

    def totals(self) -> dict[str, Any]:
        """Layer, parameter and zero counts, and the sparsities and the stored bits a weight that follow."""
        sizes = [(layer.bits_per_weight, layer.shape[0] * layer.shape[1]) for layer in self.layers]
        bits = [each * size for each, size in sizes if each is not None]
        return {
            "pruned_layers": len(self.layers),
            "sparsity_of_pruned_layers": self.sparsity,
            **({"sparsity_before": self.sparsity_before} if self.sparsity_before else {}),
            **({"bits_of_pruned_layers": sum(bits) / sum(size for _, size in sizes)} if 0 < len(bits) == len(sizes) else {}),
            "parameters": self.parameters,
            "zeros": self.zeros,
            "sparsity_of_model": self.zeros / self.parameters if self.parameters else 0.0,
        }

    def summary(self) -> dict[str, str]:
        """What was pruned and how, the sparsity, and the perplexity before and after, each in one line."""
        totals, how = self.totals(), "pruned and " if isinstance(self.recipe, RecoveryRecipe) else "pruned by "
        how = "pruned; " if self.recovered_nothing else how
        bits = f", {totals['bits_of_pruned_layers']:.3f} bits a weight" if "bits_of_pruned_layers" in totals else ""
        measured = (
            f"{' → '.join(map(plus_minus, self.in_order(text)))}{f' ({change})' if (change := self.change(text)) else ''} "
            f"on {PurePath(text).name}"
            for text in self.perplexity
        )
        return {
            "model": f"{PurePath(self.recipe.model).name}, {how}{describe_outcome(self.recipe, self)}",
            "sparsity": f"{100 * self.sparsity:.2f} % of the weights in {totals['pruned_layers']} pruned layers, "
            f"{100 * totals['sparsity_of_model']:.2f} % of the model{bits}",
            "perplexity": "; ".join(measured) or "not measured",
        }

    def to_frame(self) -> DataFrame:
        """The results of each pruned layer as the rows of a pandas DataFrame.

        Returns:
            Columns `name`, `block` (its index), `pattern`, `shape`, `zeros`, `sparsity`, `error`, and the other attributes of
            `LayerResult`, among them `seconds`.

        Raises:
            MissingPackage: pandas is not installed.
        """
        return layer_frame([_block_to_dict(block) for block in self.blocks])

    def warnings(self, damping: float | None) -> Iterator[str]:
        """State what differs from the recipe: fallbacks in blocks, raised damping, surplus zeros.

        Args:
            damping: Damping of the method's solver; None for a solver without it.
        """
        blocks_by_note: dict[str, list[str]] = {}
        for block in self.blocks:
            for note in (block.note, block.refined.note if block.refined else ""):
                if note:
                    blocks_by_note.setdefault(note, []).append(block.name)
        for note, names in blocks_by_note.items():
            in_all = len(names) == len(self.blocks) > 2
            yield from (f"{name}: {note}" for name in ([f"{names[0]} to {names[-1]}"] if in_all else names))
        if isinstance(self.recipe, RecoveryRecipe):
            if unchanged := [x.name for x in self.blocks if x.refined and x.refined.curve and not x.refined.steps]:
                count = f"{len(unchanged)} of {plural(len(self.blocks), 'block')}, {unchanged[0]} first"
                advice = "Use more text, with more `samples`, or more `steps`"
                yield f"no step lowered the held-out loss of {count}: the weights there are unchanged. {advice}"
            return  # recovery chooses no zeros
        if raised := [x for x in self.layers if x.damping is not None and x.damping != damping]:
            highest = max(raised, key=lambda layer: layer.damping or 0)
            yield (
                f"damping was raised from {damping:g} on {len(raised)} layers because a factorisation failed, "
                f"to at most {highest.damping:g} on {highest.name}: use more calibration tokens"
            )
        if few := [x for x in self.layers if x.routed_tokens is not None and x.routed_tokens < x.tokens]:
            least = min(few, key=lambda layer: layer.routed_tokens or 0)
            yield (
                f"{len({x.name.rpartition('.')[0] for x in few})} experts received fewer tokens than their layers have inputs, "
                f"{least.name.rpartition('.')[0]} only {least.routed_tokens:,}: evenly spaced tokens of the layer were added, "
                f"{least.tokens:,} in all"
            )
        if unused := [x.name for x in self.layers if x.tokens == 0 and x.known != TokenCount.__name__]:
            text = f"{len(unused)} layers received no tokens, {unused[0]} first, and were pruned by magnitude"
            yield f"{text}: use more calibration tokens"
        yield from note_after(self.recipe, self)
        if isinstance(self.recipe, Recipe) and self.recipe.rounds:
            return  # kept weights that round to 0 are zeros too
        yield from note_surplus(self.layers)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain data, ready for JSON."""
        return {
            "format": 1,
            "recipe": self.recipe.model_dump(mode="json"),
            "resolved": self.resolved,
            "environment": self.environment,
            "calibration": self.calibration,
            "totals": self.totals(),
            "coverage": self.coverage.to_dict() if self.coverage else None,
            "perplexity": _results_to_dict(self.perplexity),
            "tasks": _results_to_dict(self.tasks),
            "samples": self.samples,
            "notes": self.notes,
            "seconds": self.seconds,
            "peak_memory_bytes": self.peak_memory,
            "recovered": asdict(self.recovered) if self.recovered else None,
            "layer_costs": asdict(self.layer_costs) if self.layer_costs else None,
            **{name: value for name in OPTIONAL if (value := getattr(self, name))},
            "blocks": [_block_to_dict(block) for block in self.blocks],
        }

    def to_json(self) -> str:
        """The report as strict JSON."""
        return strict_json(self.to_dict())

    def to_markdown(self) -> str:
        """The model card. It holds no times or dates, so that equal results give equal bytes."""
        origin, recipe = self.origin, self.recipe
        gradual = read_gradual(self)
        return card.render(
            report=self,
            totals=self.totals(),
            metadata=card.metadata(origin),
            name=PurePath(origin.name or recipe.model).name,
            base=f" from {card.link(origin)}" if origin.name else "",
            changed=len(self.changed_parameters),
            coverage=self.coverage.describe() if self.coverage else "",
            options=", trust_remote_code=True" if recipe.trust_remote_code else "",
            previous=recipe_yaml(self.pruned["recipe"]) if self.pruned else "",
            gradual=gradual,
            described=describe_outcome(recipe, self),
            stages=gradual and gradual.table(),
        )


def _block_to_dict(block: BlockResult) -> dict[str, Any]:
    """A block's result as plain data."""
    data: dict[str, Any] = BLOCK_RESULT.dump_python(block, mode="json")
    for layer, fields in zip(block.layers, data["layers"], strict=True):
        fields["sparsity"] = layer.sparsity
    return data


def _results_to_dict(results: Mapping[str, Mapping[When, Perplexity | Accuracy]]) -> dict[str, dict[str, Any]]:
    """Results by text or task as plain data."""
    return {name: {when: asdict(result) for when, result in pair.items()} for name, pair in results.items()}
