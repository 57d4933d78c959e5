"""Perplexity of every method on small trained models, at six patterns: docs/results.md.

    python benchmarks/results.py measure demo:opt demo:llama        # the bundled models; a killed run continues
    python benchmarks/results.py measure PATH/stories260K-llama --stories PATH/tinystories_2316.json
    python benchmarks/render.py                                     # the pages, from the figures

Measured figures are kept in benchmarks/measured/, one file for a model. With --stories, the first 1,800 stories of the list
calibrate and the rest measure.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from measuring import CUT, MEASURED, markdown_table, read_figures, write_figures

from sparsellm.checkpoints.loading import open_checkpoint
from sparsellm.evaluation.perplexity import measure_perplexity
from sparsellm.observers.display import with_standard_error
from sparsellm.pipeline.prune import prune_run
from sparsellm.recipes.file import read_recipe
from sparsellm.texts.samples import test_windows
from sparsellm.texts.texts import read_text

PATTERNS = ("50%", "60%", "70%", "80%", "2:4", "3:4")
METHODS = {
    "magnitude": {"method": "magnitude"},
    "Wanda": {"method": "wanda"},
    "SparseGPT": {"method": "sparsegpt"},
    "ALPS": {"method": "alps"},
    "Algorithm 1, SparseGPT inside": {"method": "algorithm1"},
    "Algorithm 1, ALPS inside": {"method": "algorithm1", "settings": {"solver": "alps"}},
}
SAMPLES, LENGTH, STORIES = 64, 256, 1800


def split_stories(stories: str | Path, folder: str | Path) -> tuple[str, str]:
    """Write the stories that calibrate and those that measure to files of a folder; returns both."""
    texts = json.loads(Path(stories).read_text(encoding="utf-8"))
    calibrate, test = Path(folder, "calibrate.json"), Path(folder, "measure.json")
    calibrate.write_text(json.dumps(texts[:STORIES]), encoding="utf-8")
    test.write_text(json.dumps(texts[STORIES:]), encoding="utf-8")
    return str(calibrate), str(test)


def measure_model(model: str, stories: Path | None) -> None:
    """Measure every cell that the model's file of figures lacks."""
    name = Path(model.replace("demo:", "demo-")).name
    file = MEASURED / f"{name}.json"
    data = read_figures(file) or {"model": name, "cells": {}}
    with tempfile.TemporaryDirectory() as folder:
        calibration, test = "demo", "demo"
        if stories is not None:
            calibration, test = split_stories(stories, folder)
        source = open_checkpoint(model)
        tests = test_windows(read_text(test, "test"), source.tokenizer(), LENGTH, **CUT).windows
        data["dense"] = _perplexity(source.load(), tests)
        settings = {"model": model, "calibration": calibration, "samples": SAMPLES, "sequence_length": LENGTH} | CUT
        for label, method in METHODS.items():
            for pattern in PATTERNS:
                key = f"{label} | {pattern}"
                if key in data["cells"]:
                    continue
                result = prune_run(read_recipe({**settings, **method, "sparsity": pattern}))
                seconds = round(result.report.seconds["pruning"], 2)
                cell = {"sparsity": result.report.sparsity, "seconds": seconds}
                data["cells"][key] = _perplexity(result.model, tests) | cell
                print(name, key, data["cells"][key], file=sys.stderr)
                write_figures(file, data)


def _perplexity(model: torch.nn.Module, tests: torch.Tensor) -> dict:
    """A model's perplexity on the test sequences."""
    result = measure_perplexity(model, tests)
    names = ("standard_error", "windows", "length")
    return {"perplexity": result.value} | {name: getattr(result, name) for name in names}


def of_models() -> list[dict[str, Any]]:
    """What was measured of each model, by every method with one seed."""
    files = (json.loads(file.read_text()) for file in sorted(MEASURED.glob("*.json")))
    return [data for data in files if "cells" in data and "dense" in data]


def summary_table(patterns: Sequence[str] = ("50%", "80%")) -> list[str]:
    """Perplexity by method at two patterns, all models side by side."""
    files = of_models()
    head = ["", *(f"{data['model']}, {pattern}" for data in files for pattern in patterns)]
    measured = [data["dense"] for data in files for _ in patterns]
    dense = [with_standard_error(x["perplexity"], x["standard_error"]) for x in measured]
    rows = [["dense", *dense]]
    for label in METHODS:
        cells = (data["cells"][f"{label} | {pattern}"] for data in files for pattern in patterns)
        rows.append([label, *(with_standard_error(cell["perplexity"], cell["standard_error"]) for cell in cells)])
    return markdown_table(head, rows)


def epochs_tables() -> list[str]:
    """Perplexity by epoch, from what benchmarks/epochs.py measured."""
    lines: list[str] = []
    for file in sorted(MEASURED.glob("epochs-*.json")):
        data = json.loads(file.read_text())
        epochs = sorted({row["epochs"] for row in data["rows"]})
        texts = {
            (row["sparsity"], row["variant"], row["epochs"]): f"{row['perplexity']:.2f} ({row['error']:.3f})"
            for row in data["rows"]
        }
        rows = (
            [sparsity, variant, *(texts[sparsity, variant, n] for n in epochs)]
            for sparsity, variant in dict.fromkeys((row["sparsity"], row["variant"]) for row in data["rows"])
        )
        head = ["sparsity", "variant", *(f"epoch {n}" for n in epochs)]
        lines += [f"### {data['model']}, epoch by epoch", "", *markdown_table(head, rows, left=(0, 1)), ""]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["measure"])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--stories", type=Path)
    options = parser.parse_args()
    for model in options.models:
        measure_model(model, options.stories)


if __name__ == "__main__":
    main()
