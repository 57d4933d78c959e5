"""What a run did, layer by layer, as data: JSON for programs, Markdown for the model card."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import PurePath
from typing import Any, Literal

import yaml
from huggingface_hub import ModelCardData

from sparsellm.checkpoints.files import Origin
from sparsellm.evaluation.measurements import Accuracy, Perplexity
from sparsellm.methods import BlockResult, LayerResult, TrainingResult
from sparsellm.models.coverage import Coverage
from sparsellm.runs.markdown import fenced, plain
from sparsellm.runs.recipe import RunRecipe

When = Literal["dense", "pruned"]

HUB = "https://huggingface.co"
"""Where a card's links to a hub name lead."""

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
"""What may be a model's name on the hub; a card that names another as its base is refused there."""


@dataclass
class Report:
    """Everything known of a run. Filled as the run goes on.

    resolved: what was really run where the recipe leaves it open. recovered: what gradient steps over the whole model did, if
    there were any. pruned: of a recovery, what the report of the pruned checkpoint says.
    calibration: how the windows were drawn. perplexity: by text, before and after. tasks: by name, before and after.
    samples: by prompt, how the models go on. notes: what a reader should know. seconds: by phase.
    peak_memory: of this process so far, in bytes; the command line resets it for each run. origin: for the card. coverage: how
    much of the blocks' matrix weights is pruned.
    """

    recipe: RunRecipe
    environment: dict[str, str]
    resolved: dict[str, Any] = field(default_factory=dict)
    calibration: str = ""
    blocks: list[BlockResult] = field(default_factory=list)
    perplexity: dict[str, dict[When, Perplexity]] = field(default_factory=dict)
    tasks: dict[str, dict[When, Accuracy]] = field(default_factory=dict)
    samples: dict[str, dict[When, str]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    recovered: TrainingResult | None = None
    pruned: dict[str, Any] | None = None
    parameters: int = 0
    zeros: int = 0
    peak_memory: int = 0
    origin: Origin = field(default_factory=Origin)
    coverage: Coverage | None = None

    @property
    def layers(self) -> list[LayerResult]:
        """Every pruned layer, in order."""
        return [layer for block in self.blocks for layer in block.layers]

    @property
    def sparsity(self) -> float:
        """The fraction of the pruned layers' weights that are zero."""
        count = sum(layer.shape[0] * layer.shape[1] for layer in self.layers)
        return sum(layer.zeros for layer in self.layers) / count if count else 0.0

    def _rest(self) -> str:
        """What became of the tensors that were not pruned."""
        moved = sum(len(block.changed_parameters) for block in self.blocks)
        return (
            f"{moved} biases and norms moved; all else is as in the dense model."
            if moved
            else "All else is as in the dense model."
        )

    def totals(self) -> dict[str, Any]:
        """The run in a few figures."""
        return {
            "pruned_layers": len(self.layers),
            "sparsity_of_pruned_layers": self.sparsity,
            "parameters": self.parameters,
            "zeros": self.zeros,
            "sparsity_of_model": self.zeros / self.parameters if self.parameters else 0.0,
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            "format": 1,
            "recipe": self.recipe.model_dump(mode="json"),
            "resolved": self.resolved,
            "environment": self.environment,
            "calibration": self.calibration,
            "totals": self.totals(),
            "coverage": self.coverage.to_dict() if self.coverage else None,
            "perplexity": _measured(self.perplexity),
            "tasks": _measured(self.tasks),
            "samples": self.samples,
            "notes": self.notes,
            "seconds": self.seconds,
            "peak_memory_bytes": self.peak_memory,
            "recovered": asdict(self.recovered) if self.recovered else None,
            **({"pruned": self.pruned} if self.pruned else {}),
            "blocks": [_block(block) for block in self.blocks],
        }

    def to_json(self) -> str:
        """The report as strict JSON."""
        return strict_json(self.to_dict())

    def _metadata(self) -> ModelCardData:
        """What the hub reads of the card."""
        sees = self.origin.loader == "AutoModelForImageTextToText"
        return ModelCardData(
            base_model=self.origin.name if HUB_NAME.fullmatch(self.origin.name) else None,
            library_name="transformers",
            pipeline_tag="image-text-to-text" if sees else "text-generation",
            tags=["sparsellm", "pruning", "sparse"],
            **self.origin.terms,
        )

    def _loading(self) -> list[str]:
        """How to load the model, as lines of the card."""
        more = ", trust_remote_code=True" if self.recipe.trust_remote_code else ""
        loader = self.origin.loader
        return [
            "## How to load it",
            "",
            "By its folder, or by its name on the hub:",
            "",
            "```python",
            f"from transformers import {loader}, AutoTokenizer",
            "",
            f'model = {loader}.from_pretrained("FOLDER"{more})',
            f'tokenizer = AutoTokenizer.from_pretrained("FOLDER"{more})',
            "```",
            "",
        ]

    def _base(self) -> str:
        """What the model was made from, as the card names it; linked where that is a name on the hub."""
        origin = self.origin
        if origin.hub and HUB_NAME.fullmatch(origin.name):
            return f" from [{origin.name}]({HUB}/{origin.name})"
        return f" from {plain(origin.name)}" if origin.name else ""

    def to_markdown(self) -> str:
        """The model card: the same bytes for the same result, so no times and no dates."""
        recipe = self.recipe
        lines = [
            "---",
            self._metadata().to_yaml(),
            "---",
            "",
            f"# {plain(PurePath(recipe.model).name)}, pruned",
            "",
            f"Pruned{self._base()} with sparsellm {self.environment['sparsellm']}: {plain(recipe.describe())}.",
            f"{len(self.layers)} linear layers hold {100 * self.sparsity:.2f} % zeros; of all {self.parameters:,} parameters",
            f"{100 * self.zeros / max(self.parameters, 1):.2f} % are zero. {self._rest()}",
            "",
            "The zeros are stored as ordinary numbers: files keep their size, and speed is that of the dense model unless",
            "what runs the model makes use of zeros.",
            "",
            f"Calibration: {plain(self.calibration) or 'none'}.",
            "",
        ]
        if self.coverage and (message := self.coverage.describe()):
            lines += [message, ""]
        if self.perplexity:
            lines += ["| text | dense perplexity | pruned perplexity |", "|---|---|---|"]
            for text, values in self.perplexity.items():
                lines.append(f"| {plain(text)} | {_plus_minus(values.get('dense'))} | {_plus_minus(values.get('pruned'))} |")
            lines.append("")
        if self.tasks:
            lines += ["| zero-shot task | dense accuracy | pruned accuracy |", "|---|---|---|"]
            for task, both in self.tasks.items():
                lines.append(f"| {plain(task)} | {_plus_minus(both.get('dense'))} | {_plus_minus(both.get('pruned'))} |")
            lines.append("")
        lines += [line for note in self.notes for line in (f"Note: {plain(note)}", "")]
        lines += self._loading()
        lines += ["## Recipe", "", *fenced(recipe.to_yaml(), "yaml"), ""]
        if self.pruned:
            before = yaml.safe_dump(self.pruned["recipe"], sort_keys=False, allow_unicode=True)
            lines += ["## Recipe of the pruned checkpoint", "", *fenced(before, "yaml"), ""]
        lines += ["## Layers", "", "| layer | pattern | zeros | relative output error |", "|---|---|---|---|"]
        lines += [f"| {plain(x.name)} | {x.pattern} | {100 * x.sparsity:.2f} % | {x.error:.3g} |" for x in self.layers]
        return "\n".join(lines) + "\n"


def strict_json(data: Any) -> str:
    """JSON that every parser reads: an infinite number, which JSON lacks, becomes the word "inf"."""
    return json.dumps(finite(data), indent=1, allow_nan=False)


def finite(data: Any) -> Any:
    """The same data with words for infinite and undefined numbers."""
    if isinstance(data, float) and not math.isfinite(data):
        return str(data)
    if isinstance(data, dict):
        return {key: finite(value) for key, value in data.items()}
    return [finite(value) for value in data] if isinstance(data, (list, tuple)) else data


def _block(block: BlockResult) -> dict[str, Any]:
    """A block as plain data."""
    data = asdict(block)
    for layer, fields in zip(block.layers, data["layers"], strict=True):
        fields["sparsity"] = layer.sparsity
    return data


def _measured(results: Mapping[str, Mapping[When, Perplexity | Accuracy]]) -> dict[str, dict[str, Any]]:
    """Results by text or task as plain data."""
    return {name: {when: asdict(result) for when, result in both.items()} for name, both in results.items()}


def _plus_minus(result: Perplexity | Accuracy | None) -> str:
    """A result with its standard error."""
    if result is None:
        return "not measured"
    return f"{result.value:.3f}" + (f" ± {result.standard_error:.3f}" if result.standard_error is not None else "")
