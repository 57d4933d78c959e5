"""Sequences that are whole documents against sequences cut from the joined text: docs/calibration.md.

    python benchmarks/documents.py measure MODEL TEXT      # a trained model of documents, and a .json or .jsonl file of them
    python benchmarks/documents.py table

The model is pruned on the documents but the last 200, by each method with both forms of calibration sequences, and measured on
the last 200 in both forms: each from its start, as the model is used, and joined.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from forms import MAIN, OURS
from measuring import MEASURED, markdown_table, read_figures, record

import sparsellm
from sparsellm.checkpoints.loading import open_checkpoint
from sparsellm.evaluation.perplexity import measure_perplexity
from sparsellm.texts.samples import test_windows
from sparsellm.texts.texts import Text, read_text

FILE = MEASURED / "documents.json"
METHODS: dict[str, dict[str, Any]] = {"SparseGPT": MAIN["SparseGPT"], "ALPS": MAIN["ALPS"], "sparsellm": OURS}
PATTERNS, FORMS, SEEDS = ("50%", "70%", "80%"), ("joined", "whole"), (0, 1, 2)
HELD_OUT = 200
"""Documents that are measured and never calibrated on."""


def main() -> None:
    """Measure, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("table")
    words = commands.add_parser("measure")
    words.add_argument("model", type=Path)
    words.add_argument("text")
    words.add_argument("--samples", type=int, default=128)
    options = parser.parse_args()
    if options.command == "table":
        print("\n".join(table()))
    else:
        measure(options.model, options.text, options.samples)


def measure(model: Path, text: str, samples: int) -> None:
    """Measure every cell that is not in the file."""
    source, documents = open_checkpoint(str(model)), read_text(text, "test").documents
    held_out = Text(documents[-HELD_OUT:], "\n\n", "held out")
    tests = {form: test_windows(held_out, source.tokenizer(), source.length, documents=form).windows for form in FORMS}
    if "dense" not in read_figures(FILE):
        record(FILE, "dense", {form: measure_perplexity(source.load(), windows).value for form, windows in tests.items()})
    for seed, pattern, (label, method), form in product(SEEDS, PATTERNS, METHODS.items(), FORMS):
        key = f"{label} | {pattern} | {form} | {seed}"
        if key in read_figures(FILE):
            continue
        settings = method | {"sparsity": pattern, "documents": form, "seed": seed, "samples": samples}
        calibration = [str(document) for document in documents[:-HELD_OUT]]
        result = sparsellm.prune(str(model), calibration=calibration, **settings)
        record(FILE, key, {name: measure_perplexity(result.model, windows).value for name, windows in tests.items()})


def table() -> list[str]:
    """Perplexity of whole documents by method, after calibration in both forms; the spread is that of the seeds."""
    figures = read_figures(FILE)
    if not figures:
        return ["Not measured yet."]
    rows = [list(_row(figures, label, form)) for label, form in product(METHODS, FORMS)]
    dense = figures["dense"]
    lines = markdown_table(["method", "calibration", *PATTERNS], rows, left=(0, 1))
    return [
        *lines,
        "",
        f"Dense: {dense['whole']:.3f} on whole documents, {dense['joined']:.3f} on joined ones. Machine: {figures['machine']}.",
    ]


def _row(figures: dict[str, Any], label: str, form: str) -> Iterator[str]:
    yield label
    yield form
    for pattern in PATTERNS:
        values = [figures[key]["whole"] for seed in SEEDS if (key := f"{label} | {pattern} | {form} | {seed}") in figures]
        yield _figure(values)


def _figure(values: Sequence[float]) -> str:
    if not values:
        return ""
    spread = f" ± {stdev(values) / math.sqrt(len(values)):.3f}" if len(values) > 1 else ""
    return f"{mean(values):.3f}{spread}"


if __name__ == "__main__":
    sys.exit(main())
