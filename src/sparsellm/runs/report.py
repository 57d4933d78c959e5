"""The results of a run, layer by layer, as JSON and as a model card in Markdown."""

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
from sparsellm.methods import BLOCK_RESULT, BlockResult, LayerResult, TrainingResult
from sparsellm.models.coverage import Coverage
from sparsellm.runs.recipe import RunRecipe

When = Literal["dense", "pruned"]

HUB = "https://huggingface.co"
"""Base address of a card's links to models on the hub."""

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?", re.ASCII)
"""A valid model name on the hub, which rejects cards with any other base model."""


ENTITIES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;"})
"""Characters that HTML interprets, by code, with their escapes."""


@dataclass
class Report:
    """The results of a run, filled in as the run proceeds.

    Attributes:
        recipe: The recipe of the run.
        environment: Versions of packages, and the machine.
        resolved: Values that were used where the recipe leaves them open.
        calibration: How the calibration sequences were drawn.
        blocks: Results by block, in order.
        perplexity: Perplexity before and after, by text.
        tasks: Zero-shot accuracy before and after, by task.
        samples: Continuations by the dense and the pruned model, by prompt.
        notes: Warnings and remarks for the user.
        seconds: Duration of each stage.
        recovered: Result of training the whole model, if the run did.
        pruned: For a recovery, the report of the pruned checkpoint.
        parameters: Number of stored parameters.
        zeros: Number of stored parameters that are zero.
        peak_memory: Peak memory of this process so far, in bytes; the command line resets it before each run.
        origin: The dense model, for the model card.
        coverage: Fraction of the blocks' matrix weights that is pruned.
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
        """State how the tensors that were not pruned differ from the dense model's."""
        changed = sum(len(block.changed_parameters) for block in self.blocks)
        if changed:
            return f"{changed} biases and norms were changed; all other tensors equal the dense model's."
        return "All other tensors equal the dense model's."

    def totals(self) -> dict[str, Any]:
        """Layer, parameter and zero counts, and the sparsities that follow."""
        return {
            "pruned_layers": len(self.layers),
            "sparsity_of_pruned_layers": self.sparsity,
            "parameters": self.parameters,
            "zeros": self.zeros,
            "sparsity_of_model": self.zeros / self.parameters if self.parameters else 0.0,
        }

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
            **({"pruned": self.pruned} if self.pruned else {}),
            "blocks": [_block_to_dict(block) for block in self.blocks],
        }

    def to_json(self) -> str:
        """The report as strict JSON."""
        return strict_json(self.to_dict())

    def _metadata(self) -> ModelCardData:
        """The card's metadata for the hub."""
        vision = self.origin.loader == "AutoModelForImageTextToText"
        return ModelCardData(
            base_model=self.origin.name if HUB_NAME.fullmatch(self.origin.name) else None,
            library_name="transformers",
            pipeline_tag="image-text-to-text" if vision else "text-generation",
            tags=["sparsellm", "pruning", "sparse"],
            **self.origin.terms,
        )

    def _loading(self) -> list[str]:
        """Instructions for loading the model, as lines of the card."""
        options = ", trust_remote_code=True" if self.recipe.trust_remote_code else ""
        loader = self.origin.loader
        return [
            "## How to load it",
            "",
            "Replace FOLDER by the path of this folder, or by the model's name on the hub:",
            "",
            "```python",
            f"from transformers import {loader}, AutoTokenizer",
            "",
            f'model = {loader}.from_pretrained("FOLDER"{options})',
            f'tokenizer = AutoTokenizer.from_pretrained("FOLDER"{options})',
            "```",
            "",
        ]

    def _base(self) -> str:
        """Name the dense model, with a link if it is on the hub."""
        origin = self.origin
        if origin.hub and HUB_NAME.fullmatch(origin.name):
            return f" from [{origin.name}]({HUB}/{origin.name})"
        return f" from {plain(origin.name)}" if origin.name else ""

    def to_markdown(self) -> str:
        """The model card. It holds no times or dates, so that equal results give equal bytes."""
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
            "The zeros are stored as ordinary numbers: the files keep their size, and the model runs as fast as the dense",
            "one, unless the software that runs it makes use of zeros.",
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
            for task, accuracies in self.tasks.items():
                dense, pruned = accuracies.get("dense"), accuracies.get("pruned")
                lines.append(f"| {plain(task)} | {_plus_minus(dense)} | {_plus_minus(pruned)} |")
            lines.append("")
        lines += [line for note in self.notes for line in (f"Note: {plain(note)}", "")]
        lines += self._loading()
        lines += ["## Recipe", "", *fenced(recipe.to_yaml(), "yaml"), ""]
        if self.pruned:
            previous = yaml.safe_dump(self.pruned["recipe"], sort_keys=False, allow_unicode=True)
            lines += ["## Recipe of the pruned checkpoint", "", *fenced(previous, "yaml"), ""]
        lines += ["## Layers", "", "| layer | pattern | zeros | relative output error |", "|---|---|---|---|"]
        lines += [f"| {plain(x.name)} | {x.pattern} | {100 * x.sparsity:.2f} % | {x.error:.3g} |" for x in self.layers]
        return "\n".join(lines) + "\n"


def strict_json(data: Any) -> str:
    """JSON that every parser reads: infinite numbers become the string "inf"."""
    return json.dumps(finite(data), indent=1, allow_nan=False)


def finite(data: Any) -> Any:
    """Copy data with strings in place of infinite numbers and NaN."""
    if isinstance(data, float) and not math.isfinite(data):
        return str(data)
    if isinstance(data, dict):
        return {key: finite(value) for key, value in data.items()}
    return [finite(value) for value in data] if isinstance(data, (list, tuple)) else data


def _block_to_dict(block: BlockResult) -> dict[str, Any]:
    """A block's result as plain data."""
    data: dict[str, Any] = BLOCK_RESULT.dump_python(block, mode="json")
    for layer, fields in zip(block.layers, data["layers"], strict=True):
        fields["sparsity"] = layer.sparsity
    return data


def _results_to_dict(results: Mapping[str, Mapping[When, Perplexity | Accuracy]]) -> dict[str, dict[str, Any]]:
    """Results by text or task as plain data."""
    return {name: {when: asdict(result) for when, result in pair.items()} for name, pair in results.items()}


def _plus_minus(result: Perplexity | Accuracy | None) -> str:
    """Format a result with its standard error."""
    if result is None:
        return "not measured"
    return f"{result.value:.3f}" + (f" ± {result.standard_error:.3f}" if result.standard_error is not None else "")


def plain(text: str) -> str:
    """Escape a text for use within one line or table cell; line breaks become spaces.

    Underscores within words are not escaped, since Markdown does not interpret them.
    """
    line = "".join(character for character in " ".join(text.split()) if character.isprintable())
    line = re.sub(r"([\\`*\[\]|~$#])", r"\\\1", line).translate(ENTITIES)
    return re.sub(r"(?<!\w)_|_(?!\w)", r"\_", line)


def fenced(text: str, language: str = "") -> list[str]:
    """Lines of a code block with this text; the fence is longer than any run of backticks in the text."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return [f"{fence}{language}", *text.rstrip().splitlines(), fence]
