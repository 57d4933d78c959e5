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
from pathlib import Path

import torch
from measuring import MEASURED, read_figures, write_figures

from sparsellm.checkpoints.loading import open_checkpoint
from sparsellm.cli.display import plus_minus
from sparsellm.data.samples import test_windows
from sparsellm.data.texts import read_text
from sparsellm.evaluation.perplexity import measured
from sparsellm.runs.recipe_file import read_recipe
from sparsellm.runs.run import run

PATTERNS = ("50%", "60%", "70%", "80%", "2:4", "3:4")
METHODS = {
    "magnitude": {"method": "magnitude"},
    "Wanda": {"method": "wanda"},
    "SparseGPT": {"method": "sparsegpt"},
    "ALPS": {"method": "alps"},
    "SparseLLM as published, SparseGPT inside": {"method": "sparsellm", "as_published": True},
    "SparseLLM as published, ALPS inside": {"method": "sparsellm", "as_published": True, "solver": "alps"},
}
SAMPLES, LENGTH, STORIES = 64, 256, 1800


def measure_model(model: str, stories: Path | None) -> None:
    """Measure every cell that the model's file of figures lacks."""
    name = Path(model.replace("demo:", "demo-")).name
    file = MEASURED / f"{name}.json"
    data = read_figures(file) or {"model": name, "cells": {}}
    with tempfile.TemporaryDirectory() as folder:
        calibration, test = "demo", "demo"
        if stories is not None:
            texts = json.loads(stories.read_text(encoding="utf-8"))
            calibration, test = f"{folder}/calibrate.json", f"{folder}/measure.json"
            Path(calibration).write_text(json.dumps(texts[:STORIES]), encoding="utf-8")
            Path(test).write_text(json.dumps(texts[STORIES:]), encoding="utf-8")
        source = open_checkpoint(model)
        tests = test_windows(read_text(test, "test"), source.tokenizer(), LENGTH)
        data["dense"] = _perplexity(source.load(), tests)
        settings = {"model": model, "calibration": calibration, "samples": SAMPLES, "sequence_length": LENGTH}
        for label, method in METHODS.items():
            for pattern in PATTERNS:
                key = f"{label} | {pattern}"
                if key in data["cells"]:
                    continue
                result = run(read_recipe({**settings, **method, "sparsity": pattern}))
                seconds = round(result.report.seconds["pruning"], 2)
                cell = {"sparsity": result.report.sparsity, "seconds": seconds}
                data["cells"][key] = _perplexity(result.model, tests) | cell
                print(name, key, data["cells"][key], file=sys.stderr)
                write_figures(file, data)


def _perplexity(model: torch.nn.Module, tests: torch.Tensor) -> dict:
    """A model's perplexity on the test sequences."""
    result = measured(model, tests)
    names = ("standard_error", "windows", "length")
    return {"perplexity": result.value} | {name: getattr(result, name) for name in names}


def table(data: dict) -> list[str]:
    """A model's figures as a Markdown table, the best of each column in bold."""
    head = ["| | " + " | ".join(PATTERNS) + " |", "|---|" + "---:|" * len(PATTERNS)]
    best = {p: min(data["cells"][f"{m} | {p}"]["perplexity"] for m in METHODS) for p in PATTERNS}
    rows = []
    for label in METHODS:
        cells = []
        for pattern in PATTERNS:
            cell = data["cells"][f"{label} | {pattern}"]
            text = plus_minus(cell["perplexity"], cell["standard_error"])
            cells.append(f"**{text}**" if cell["perplexity"] == best[pattern] else text)
        rows.append(f"| {label} | " + " | ".join(cells) + " |")
    return head + rows


def seconds_table(files: list[dict]) -> list[str]:
    """Seconds of pruning at 70 %, by method and model."""
    rows = ["| | " + " | ".join(data["model"] for data in files) + " |", "|---|" + "---:|" * len(files)]
    for label in METHODS:
        cells = " | ".join(f"{data['cells'][f'{label} | 70%']['seconds']:.1f}" for data in files)
        rows.append(f"| {label} | {cells} |")
    return rows


def epochs_tables() -> list[str]:
    """Perplexity by epoch, from the figures of benchmarks/epochs.py."""
    lines = []
    for file in sorted(MEASURED.glob("epochs-*.json")):
        data = json.loads(file.read_text())
        epochs = sorted({row["epochs"] for row in data["rows"]})
        lines += [f"### {data['model']}", "", "| sparsity | variant | " + " | ".join(f"epoch {n}" for n in epochs) + " |"]
        lines.append("|---|---|" + "---:|" * len(epochs))
        cells = {(row["sparsity"], row["variant"], row["epochs"]): row for row in data["rows"]}
        for sparsity, variant in dict.fromkeys((row["sparsity"], row["variant"]) for row in data["rows"]):
            texts = (f"{(cell := cells[sparsity, variant, n])['perplexity']:.2f} ({cell['error']:.3f})" for n in epochs)
            lines.append(f"| {sparsity} | {variant} | " + " | ".join(texts) + " |")
        lines.append("")
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
