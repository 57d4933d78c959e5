"""The tables of docs/results.md: every method on small trained models, at six patterns.

    python benchmarks/results.py measure demo:opt demo:llama        # the bundled models; a killed run continues
    python benchmarks/results.py measure PATH/stories260K-llama --stories PATH/tinystories_2316.json
    sparsellm demo --json > benchmarks/measured/demo.json
    python benchmarks/results.py render                             # docs/results.md, and the demo's table in README.md

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

from sparsellm.blocks import computed_in
from sparsellm.calibration import test_windows
from sparsellm.checkpoint import compute_dtype, open_checkpoint
from sparsellm.display import plus_minus
from sparsellm.evaluation import perplexity
from sparsellm.recipe import read_recipe
from sparsellm.run import run
from sparsellm.texts import read_text

ROOT = Path(__file__).parents[1]
MEASURED = ROOT / "benchmarks" / "measured"
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
        data["machine"] = f"{_processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
        source = open_checkpoint(model)
        tests = test_windows(read_text(test, "test"), source.tokenizer(), LENGTH)
        data["dense"] = _measured(source.load(), tests)
        settings = {"model": model, "calibration": calibration, "samples": SAMPLES, "length": LENGTH}
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
    with computed_in(model, compute_dtype(model)):
        found = perplexity(model, tests)
    return {
        "perplexity": found.value,
        "standard_error": found.standard_error,
        "windows": found.windows,
        "length": found.length,
    }


def _processor() -> str:
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


def render() -> None:
    """Write docs/results.md from the measured figures and the words in benchmarks/results.md.in."""
    names = (
        file for file in sorted(MEASURED.glob("*.json")) if file.name != "demo.json" and not file.name.startswith("epochs-")
    )
    files = [json.loads(file.read_text()) for file in names]
    parts = []
    for data in files:
        dense = plus_minus(data["dense"]["perplexity"], data["dense"]["standard_error"])
        windows = f"{data['dense']['windows']} windows of {data['dense']['length']} tokens"
        parts += [f"### {data['model']}", "", f"Dense: {dense}, over {windows}.", "", *table(data), ""]
    template = (ROOT / "benchmarks" / "results.md.in").read_text(encoding="utf-8")
    page = template.replace("{{tables}}\n", "\n".join(parts)).replace("{{seconds}}\n", "\n".join(seconds_table(files)) + "\n")
    page = page.replace("{{epochs}}\n", "\n".join(epochs_tables())).replace("{{machine}}", files[0]["machine"])
    (ROOT / "docs" / "results.md").write_text(page, encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    before, rest = readme.split("<!-- demo table -->\n")
    _, after = rest.split("<!-- end of demo table -->\n")
    middle = "\n".join(demo_table(json.loads((MEASURED / "demo.json").read_text())))
    readme = f"{before}<!-- demo table -->\n{middle}\n<!-- end of demo table -->\n{after}"
    (ROOT / "README.md").write_text(readme, encoding="utf-8")


def demo_table(data: dict) -> list[str]:
    """What `sparsellm demo` found, as a Markdown table."""
    lines = [f"| {data['model']}, {data['sparsity']} removed | perplexity | zeros | seconds |", "|---|---:|---:|---:|"]
    for row in data["rows"]:
        value = plus_minus(row["perplexity"], row["standard_error"])
        lines.append(f"| {row['method']} | {value} | {100 * row['sparsity']:.1f} % | {row['seconds']:.1f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("models", nargs="+")
    measuring.add_argument("--stories", type=Path)
    commands.add_parser("render")
    words = parser.parse_args()
    if words.command == "render":
        render()
        return
    for model in words.models:
        measure_model(model, words.stories)


if __name__ == "__main__":
    main()
