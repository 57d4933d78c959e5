"""`sparsellm demo`: prune a bundled model by every method and compare the results."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from sparsellm.checkpoints.files import DEMO
from sparsellm.errors import plural
from sparsellm.evaluation.differences import Difference
from sparsellm.extensions.packed.packing import pack
from sparsellm.extensions.packed.record import CEILING, PACKED, TORCH, Bench
from sparsellm.extensions.packed.speed import measure_bench
from sparsellm.observers.events import NextRun, Observer
from sparsellm.pipeline.several import RunSet
from sparsellm.recipes.fields import METHODS
from sparsellm.recipes.file import read_recipe
from sparsellm.recipes.recipe import Recipe
from sparsellm.runtime.memory import human_bytes

SPARSITY = "80%"
"""A sparsity at which the methods differ on the bundled models; docs/results.md has others."""

SAMPLES = 32
"""Calibration sequences: a quarter of the default, to keep the comparison short."""

DEMO_TOKENS = 16
"""Tokens decoded in each measurement of the packed model's speed."""


@dataclass(frozen=True)
class DemoRow:
    """One row of the comparison.

    Attributes:
        standard_error: Standard error of the perplexity, if known.
        sparsity: Fraction of zeros in the pruned layers.
        seconds: Pruning time, without loading and evaluation.
        change: The change of the perplexity from the dense model, with its paired error; None for that model.
    """

    method: str
    perplexity: float
    standard_error: float | None
    sparsity: float
    seconds: float
    change: Difference | None = None


def demonstrate(family: str, output: str | Path | None, observe: Observer) -> list[DemoRow]:
    """Prune a bundled model by every method and evaluate each result on held-out text.

    Args:
        family: "opt" or "llama".
        output: Folder to which the model pruned by SparseLLM is written and verified; None writes nothing.
        observe: Called with each event.

    Returns:
        One row per method, the dense model first.
    """
    settings = {"model": DEMO + family, "sparsity": SPARSITY, "samples": SAMPLES, "calibration": "demo", "evaluate": "demo"}
    recipes = {method: read_recipe(settings | {"method": method}) for method in reversed(METHODS)}
    rows: list[DemoRow] = []
    with TemporaryDirectory() as folder:
        runs = RunSet(observe, Path(folder))
        for number, (method, recipe) in enumerate(recipes.items(), 1):
            observe(NextRun(number, len(recipes), method))
            result = runs.run(recipe)
            report = result.report
            dense, pruned = (report.perplexity["demo"][when] for when in ("dense", "pruned"))
            rows = rows or [DemoRow("dense", dense.value, dense.standard_error, 0.0, 0.0)]
            seconds, change = report.seconds[Recipe.stage], pruned.against(dense)
            rows.append(DemoRow(method, pruned.value, pruned.standard_error, report.sparsity, seconds, change))
            if method == "sparsellm" and output is not None:
                runs.save(result, output, overwrite=False)
    return rows


def measure_packed(output: str | Path) -> Bench:
    """Pack a pruned model in a temporary folder, and measure how fast it decodes one sequence."""
    with TemporaryDirectory() as folder:
        packed = Path(folder) / "packed"
        pack(output, packed)
        measured_speed = measure_bench(packed, None, batches=(1,), threads=(torch.get_num_threads(),), tokens=DEMO_TOKENS)
    return replace(measured_speed, model=str(output))


def packed_lines(bench: Bench) -> list[str]:
    """The size and speed of the packed model, and the dense model's."""
    packed, dense = (next(x for x in bench.speeds if x.form == form) for form in (PACKED, TORCH))
    sizes = human_bytes(bench.disk_bytes), human_bytes(bench.memory_bytes[TORCH])
    ratios = f"{bench.ratio(packed, TORCH):.2f} × torch, {bench.ratio(packed, CEILING):.2f} of memory's speed"
    return [
        f"Packed it takes {sizes[0]}, dense {sizes[1]}. On {plural(packed.threads, 'thread')} it decodes",
        f"{packed.decode:.0f} tokens a second packed, {dense.decode:.0f} dense ({ratios}).",
        *(["A model that fits in a processor cache cannot show what packing saves."] if bench.caution else []),
        "Python takes most of that time. docs/deploying.md has models of more than 1 GB.",
    ]
