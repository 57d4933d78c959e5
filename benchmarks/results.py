"""The tables of docs/results.md: every method on small trained models, at six patterns.

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
from pathlib import Path

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


def table(data: dict) -> list[str]:
    """A model's figures as a Markdown table, the best of each column in bold."""
    head = ["| | " + " | ".join(PATTERNS) + " |", "|---|" + "---:|" * len(PATTERNS)]
    best = {p: min(data["cells"][f"{m} | {p}"]["perplexity"] for m in METHODS) for p in PATTERNS}
    rows = []
    for label in METHODS:
        cells = []
        for pattern in PATTERNS:
            cell = data["cells"][f"{label} | {pattern}"]
            words = plus_minus(cell["perplexity"], cell["standard_error"])
            cells.append(f"**{words}**" if cell["perplexity"] == best[pattern] else words)
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
    """Perplexity by epoch, from what benchmarks/epochs.py measured."""
    lines = []
    for file in sorted(MEASURED.glob("epochs-*.json")):
        data = json.loads(file.read_text())
        epochs = sorted({row["epochs"] for row in data["rows"]})
        lines += [f"### {data['model']}", "", "| sparsity | variant | " + " | ".join(f"epoch {n}" for n in epochs) + " |"]
        lines.append("|---|---|" + "---:|" * len(epochs))
        found = {(row["sparsity"], row["variant"], row["epochs"]): row for row in data["rows"]}
        for sparsity, variant in dict.fromkeys((row["sparsity"], row["variant"]) for row in data["rows"]):
            cells = (found[sparsity, variant, n] for n in epochs)
            texts = (f"{cell['perplexity']:.2f} ({cell['error']:.3f})" for cell in cells)
            lines.append(f"| {sparsity} | {variant} | " + " | ".join(texts) + " |")
        lines.append("")
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
