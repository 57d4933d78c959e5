"""Two papers of 2025 and 2026, as packages of others, beside the default and `--effort best`: examples/papers/README.md.

    python benchmarks/papers.py measure demo:opt
    python benchmarks/papers.py measure PATH/wt2-llama --calibrate train.txt --test test.txt --patterns 90% --seeds 0
    python benchmarks/papers.py table

ELSA takes as many steps as fit the seconds of `--effort best` on the model, which are measured first: seconds of the processor,
so that other programs do not count. Perplexities are on up to 200 test sequences of 256 tokens. Every cell is written to
benchmarks/measured/papers.json as soon as it is known, and a killed run continues.
"""

from __future__ import annotations

import argparse
import sys
import time
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from measuring import CUT, MEASURED, ROOT, add_measure, markdown_table, read_figures, record

from sparsellm.checkpoints.loading import open_checkpoint
from sparsellm.evaluation.perplexity import measure_perplexity
from sparsellm.pipeline.prune import prune_run
from sparsellm.recipes.file import read_recipe
from sparsellm.recipes.own_method import method_fields
from sparsellm.texts.samples import test_windows
from sparsellm.texts.texts import read_text

FILE = MEASURED / "papers.json"
LENGTH, WINDOWS, SEEDS = 256, 200, (0, 1)
PATTERNS = ("50%", "80%", "90%")
READ = {"samples": 128, "sequence_length": LENGTH} | CUT
TEXT_OF_ELSA = {"samples": 2048}
"""ELSA reads text where the training of `best` reads what the dense model generates; more sequences take it no more time."""

TUNED: dict[str, Any] = {"rate": 2e-3, "penalty": 0.02, "interval": 32, "sequences": 4}
"""Chosen on demo:opt at 90 %, with 400 steps."""

TRIED = (8, 40)
"""Steps of the two runs that tell what a step of ELSA takes."""

METHODS: dict[str, dict[str, Any]] = {
    "wanda": {"method": "wanda"},
    "sparse-swaps": {},
    "sparsegpt": {"method": "sparsegpt"},
    "alps": {"method": "alps"},
    "sparsellm": {},
    "best": {"effort": "best", "compute_dtype": "bfloat16"},
    "elsa": {"compute_dtype": "bfloat16"} | TEXT_OF_ELSA,
}
LAYERWISE, WHOLE = ("wanda", "sparse-swaps", "sparsegpt", "alps", "sparsellm"), ("sparsellm", "best", "elsa")


def name_of(model: str) -> str:
    """The name of a model in the file."""
    return Path(model.replace("demo:", "demo-")).name


def measure(words: argparse.Namespace) -> None:
    """Fill the cells of a model."""
    sys.path.insert(0, str(ROOT / "examples" / "papers"))
    from elsa import ELSA
    from sparse_swaps import SparseSwaps

    torch.set_num_threads(1)
    name, source = name_of(words.model), open_checkpoint(words.model)
    tests = test_windows(read_text(words.test, "test"), source.tokenizer(), LENGTH, limit=WINDOWS, **CUT).windows
    data = {"model": words.model, "calibration": words.calibrate, **READ}

    def run(method: str, pattern: str, seed: int, steps: int = 0) -> tuple[Any, float]:
        """The pruned model, and the seconds of the processor from the recipe to it."""
        own = {"sparse-swaps": SparseSwaps(), "elsa": ELSA(steps=max(steps, 1), **TUNED)}.get(method)
        kind, chosen = method_fields(own or METHODS[method].get("method", "sparsellm"), {})
        started = time.process_time()
        fields = {**data, **METHODS[method], **chosen, "sparsity": pattern, "seed": seed}
        result = prune_run(read_recipe(fields, kind=kind), lambda event: None)
        return result.model, time.process_time() - started

    def steps_for(pattern: str) -> int:
        """The steps of ELSA that take the seconds of `best`."""
        figures = read_figures(FILE)
        if (key := f"{name} | seconds of {TRIED} steps") not in figures:
            record(FILE, key, [round(run("elsa", "90%", 0, steps)[1], 2) for steps in TRIED])
            figures = read_figures(FILE)
        first, second = figures[key]
        known = {key: x for key, x in figures.items() if key.startswith(f"{name} | best | ")}
        seconds = mean(x["seconds"] for x in [x for key, x in known.items() if f" {pattern} " in key] or known.values())
        return round(TRIED[0] + (seconds - first) * (TRIED[1] - TRIED[0]) / (second - first))

    for seed, pattern in product(words.seeds, words.patterns):
        for method in (x for x in (LAYERWISE if pattern == "50%" else WHOLE) if x in words.methods):
            key = f"{name} | {method} | {pattern} | {seed}"
            if key in (figures := read_figures(FILE)):
                continue
            if (dense := f"{name} | dense") not in figures:
                record(FILE, dense, round(measure_perplexity(source.load(), tests).value, 3))
            steps = {"steps": steps_for(pattern)} if method == "elsa" else {}
            model, seconds = run(method, pattern, seed, **steps)
            record(
                FILE, key, {"perplexity": round(measure_perplexity(model, tests).value, 3), "seconds": round(seconds), **steps}
            )


def with_deviation(values: list[float], digits: int) -> str:
    """The mean, with the standard deviation over several seeds; empty without values."""
    if not values:
        return ""
    return f"{mean(values):.{digits}f}" + (f" ± {stdev(values):.{digits}f}" if len(values) > 1 else "")


def table() -> list[str]:
    """Perplexities and seconds by model and pattern, mean and standard deviation over seeds."""
    figures, lines = read_figures(FILE), []
    models = [key.split(" | ")[0] for key in figures if key.endswith(" | dense")]
    for methods, patterns in ((LAYERWISE, PATTERNS[:1]), (WHOLE, PATTERNS[1:])):
        rows = []
        for model, pattern in product(models, patterns):
            cells = [
                [x for key, x in figures.items() if key.startswith(f"{model} | {method} | {pattern} | ")] for method in methods
            ]
            if any(cells):
                shown = [with_deviation([x["perplexity"] for x in found], 2) for found in cells]
                took = [f"{mean(x['seconds'] for x in found):.0f} s" if found else "" for found in cells]
                row = [f"{value} ({seconds})" if value else "" for value, seconds in zip(shown, took, strict=True)]
                rows.append([f"{model}, {pattern}", f"{figures[f'{model} | dense']:.2f}", *row])
        lines += [*markdown_table(["perplexity (seconds)", "dense", *methods], rows), ""]
    return lines[:-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    add_measure(commands, PATTERNS, SEEDS).add_argument("--methods", nargs="+", default=[*METHODS])
    commands.add_parser("table")
    words = parser.parse_args()
    if words.command == "measure":
        measure(words)
    else:
        print("\n".join(table()))


if __name__ == "__main__":
    main()
