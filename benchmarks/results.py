"""Every method on small trained models, at six patterns, with one seed: docs/results.md and dev/RESULTS.md.

    python benchmarks/results.py measure demo:opt demo:llama        # the bundled models; a killed run continues
    python benchmarks/results.py measure PATH/stories260K-llama --stories PATH/tinystories_2316.json
    python benchmarks/render.py                                     # the pages, from what was measured

Measured figures are kept in benchmarks/measured/, one file for a model. With --stories, the first 1,800 stories of the list
calibrate and the rest measure.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from sparsellm.checkpoints.loading import open_checkpoint
from sparsellm.cli.display import plus_minus
from sparsellm.data.samples import test_windows
from sparsellm.data.texts import read_text
from sparsellm.evaluation.perplexity import measured
from sparsellm.runs.recipe_file import read_recipe
from sparsellm.runs.run import run

ROOT = Path(__file__).parents[1]
MEASURED = ROOT / "benchmarks" / "measured"
PATTERNS = ("50%", "60%", "70%", "80%", "2:4", "3:4")
METHODS = {
    "magnitude": {"method": "magnitude"},
    "Wanda": {"method": "wanda"},
    "SparseGPT": {"method": "sparsegpt"},
    "ALPS": {"method": "alps"},
    "Algorithm 1, SparseGPT inside": {"method": "sparsellm", "as_published": True},
    "Algorithm 1, ALPS inside": {"method": "sparsellm", "as_published": True, "solver": "alps"},
}
SAMPLES, LENGTH, STORIES = 64, 256, 1800


def measure_model(model: str, stories: Path | None) -> None:
    """Fill the model's file of figures, cell by cell."""
    name = Path(model.replace("demo:", "demo-")).name
    file = MEASURED / f"{name}.json"
    data = json.loads(file.read_text()) if file.exists() else {"model": name, "cells": {}}
    with tempfile.TemporaryDirectory() as folder:
        calibration, test = "demo", "demo"
        if stories is not None:
            told = json.loads(stories.read_text(encoding="utf-8"))
            calibration, test = str(Path(folder) / "calibrate.json"), str(Path(folder) / "measure.json")
            Path(calibration).write_text(json.dumps(told[:STORIES]), encoding="utf-8")
            Path(test).write_text(json.dumps(told[STORIES:]), encoding="utf-8")
        data["machine"] = f"{processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
        source = open_checkpoint(model)
        tests = test_windows(read_text(test, "test"), source.tokenizer(), LENGTH)
        data["dense"] = _measured(source.load(), tests)
        settings = {"model": model, "calibration": calibration, "samples": SAMPLES, "sequence_length": LENGTH}
        for label, words in METHODS.items():
            for pattern in PATTERNS:
                key = f"{label} | {pattern}"
                if key in data["cells"]:
                    continue
                result = run(read_recipe({**settings, **words, "sparsity": pattern}))
                found = _measured(result.model, tests)
                seconds = round(result.report.seconds["pruning"], 2)
                data["cells"][key] = found | {"sparsity": result.report.sparsity, "seconds": seconds}
                print(f"{name:20} {key:50} {found['perplexity']:10.2f} {seconds:8.1f} s", file=sys.stderr)
                MEASURED.mkdir(exist_ok=True)
                file.write_text(json.dumps(data, indent=1) + "\n")


def _measured(model: torch.nn.Module, tests: torch.Tensor) -> dict:
    """A model's perplexity on the test windows."""
    found = measured(model, tests)
    return {
        "perplexity": found.value,
        "standard_error": found.standard_error,
        "windows": found.windows,
        "length": found.length,
    }


def processor() -> str:
    """The processor's name, as far as the system tells."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """The lines of a Markdown table. left: numbers of the columns that are aligned to the left."""
    rule = "".join("---|" if number in left else "---:|" for number in range(len(head)))
    return [f"| {' | '.join(head)} |", f"|{rule}", *(f"| {' | '.join(row)} |" for row in rows)]


def of_models() -> list[dict[str, Any]]:
    """What was measured of each model, by every method with one seed."""
    files = (json.loads(file.read_text()) for file in sorted(MEASURED.glob("*.json")))
    return [data for data in files if "cells" in data and "dense" in data]


def perplexity_tables() -> list[str]:
    """A table for each model: perplexity by method and pattern, the best of each column in bold."""
    lines: list[str] = []
    for data in of_models():
        best = {p: min(data["cells"][f"{m} | {p}"]["perplexity"] for m in METHODS) for p in PATTERNS}
        rows = []
        for label in METHODS:
            cells = {pattern: data["cells"][f"{label} | {pattern}"] for pattern in PATTERNS}
            values = {p: plus_minus(cell["perplexity"], cell["standard_error"]) for p, cell in cells.items()}
            rows.append([label, *(f"**{v}**" if cells[p]["perplexity"] == best[p] else v for p, v in values.items())])
        dense = plus_minus(data["dense"]["perplexity"], data["dense"]["standard_error"])
        windows = f"{data['dense']['windows']} windows of {data['dense']['length']} tokens"
        head = [f"### {data['model']}, one seed", "", f"Dense: {dense}, over {windows}.", ""]
        lines += [*head, *markdown_table(["", *PATTERNS], rows), ""]
    return lines


def summary_table(patterns: Sequence[str] = ("50%", "80%")) -> list[str]:
    """Perplexity by method at two patterns, all models side by side."""
    files = of_models()
    head = ["", *(f"{data['model']}, {pattern}" for data in files for pattern in patterns)]
    dense = [plus_minus(data["dense"]["perplexity"], data["dense"]["standard_error"]) for data in files for _ in patterns]
    rows = [["dense", *dense]]
    for label in METHODS:
        cells = (data["cells"][f"{label} | {pattern}"] for data in files for pattern in patterns)
        rows.append([label, *(plus_minus(cell["perplexity"], cell["standard_error"]) for cell in cells)])
    return markdown_table(head, rows)


def seconds_table() -> list[str]:
    """Seconds of pruning at 70 %, by method and model."""
    files = of_models()
    rows = ([m, *(f"{data['cells'][f'{m} | 70%']['seconds']:.1f}" for data in files)] for m in METHODS)
    return markdown_table(["", *(data["model"] for data in files)], rows)


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
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("models", nargs="+")
    measuring.add_argument("--stories", type=Path)
    words = parser.parse_args()
    for model in words.models:
        measure_model(model, words.stories)


if __name__ == "__main__":
    main()
