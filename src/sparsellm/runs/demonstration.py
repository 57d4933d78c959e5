"""`sparsellm demo`: prune a bundled model by every method and compare the results."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from sparsellm.checkpoints.files import DEMO
from sparsellm.checkpoints.loading import open_checkpoint
from sparsellm.data.samples import test_windows
from sparsellm.data.texts import read_text
from sparsellm.evaluation.perplexity import measured
from sparsellm.runs.events import MEASURING, PRUNING, Observer, Stage
from sparsellm.runs.recipe_fields import METHODS
from sparsellm.runs.recipe_file import read_recipe
from sparsellm.runs.run import run

SPARSITY = "80%"
"""A sparsity at which the methods differ on the bundled models; docs/results.md has others."""

SAMPLES = 32
"""Calibration sequences: a quarter of the default, to keep the comparison short."""


@dataclass(frozen=True)
class Row:
    """One row of the comparison.

    Attributes:
        method: Name of the method, or "dense".
        perplexity: Perplexity on the test text.
        standard_error: Standard error of the perplexity, if known.
        sparsity: Fraction of zeros in the pruned layers.
        seconds: Pruning time, without loading and evaluation.
    """

    method: str
    perplexity: float
    standard_error: float | None
    sparsity: float
    seconds: float


def demonstrate(family: str, output: str | Path | None, observe: Observer) -> list[Row]:
    """Prune a bundled model by every method and evaluate each result on held-out text.

    Args:
        family: "opt" or "llama".
        output: Folder to which the model pruned by SparseLLM is written and verified; None writes nothing.
        observe: Called with each event.

    Returns:
        One row per method, the dense model first.
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
