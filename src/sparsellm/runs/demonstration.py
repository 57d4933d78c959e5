"""`sparsellm demo`: a bundled model pruned by every method, compared."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sparsellm.checkpoints.files import DEMO
from sparsellm.checkpoints.loading import open_checkpoint
from sparsellm.data.samples import test_windows
from sparsellm.data.texts import read_text
from sparsellm.evaluation.perplexity import measured
from sparsellm.runs.events import MEASURING, PRUNING, Observer, Stage
from sparsellm.runs.recipe_file import read_recipe
from sparsellm.runs.registry import METHODS
from sparsellm.runs.run import run

SPARSITY = "80%"
"""Where the methods differ on the bundled models: docs/results.md has the other sparsities."""

SAMPLES = 32
"""Calibration windows: half the usual number, for a comparison that ends soon."""


@dataclass(frozen=True)
class Row:
    """One method's line of the comparison. seconds: of pruning, without loading and measuring."""

    method: str
    perplexity: float
    standard_error: float | None
    sparsity: float
    seconds: float


def demonstrate(family: str, output: str | Path | None, observe: Observer) -> list[Row]:
    """Prune a bundled model by every method and measure each on text that it was not trained on; the dense model's row first.

    family: "opt" or "llama". output: where the last method's model, SparseLLM's, is written and verified.
    """
    name = DEMO + family
    checkpoint = open_checkpoint(name)
    tests = test_windows(read_text("demo", "test"), checkpoint.tokenizer(), checkpoint.length)
    observe(Stage(f"{MEASURING} the dense model"))
    model = checkpoint.load()
    dense = measured(model, tests, "demo")
    rows = [Row("dense", dense.value, dense.standard_error, 0.0, 0.0)]
    for method in reversed(METHODS):
        observe(Stage(f"method {method}"))
        settings = {"model": name, "method": method, "sparsity": SPARSITY, "samples": SAMPLES, "calibration": "demo"}
        result = run(read_recipe(settings), observe)
        observe(Stage(MEASURING))
        pruned = measured(result.model, tests, "demo")
        report = result.report
        rows.append(Row(method, pruned.value, pruned.standard_error, report.sparsity, report.seconds[PRUNING]))
        if method == "sparsellm" and output is not None:
            report.perplexity["demo"] = {"dense": dense, "pruned": pruned}
            result.save_pretrained(output)
    return rows
