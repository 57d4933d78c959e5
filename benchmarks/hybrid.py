"""What 2:4 in some of the rows costs, beside unstructured sparsity and N:M in all rows with as many zeros: docs/hybrid.md.

    python benchmarks/hybrid.py measure demo:opt
    python benchmarks/hybrid.py measure PATH/wt2-llama --calibrate train.txt --test test.txt
    python benchmarks/hybrid.py table

Every cell is written to benchmarks/measured/hybrid.json as soon as it is known, and a killed run continues.
"""

from __future__ import annotations

import argparse
import math
from itertools import product
from pathlib import Path

from measuring import CUT, MEASURED, add_measure, markdown_table, read_figures, record

from sparsellm.checkpoints.loading import open_checkpoint
from sparsellm.evaluation.perplexity import measure_perplexity
from sparsellm.pipeline.prune import prune_run
from sparsellm.recipes.file import read_recipe
from sparsellm.texts.samples import test_windows
from sparsellm.texts.texts import read_text

FILE = MEASURED / "hybrid.json"
SAMPLES, LENGTH, WINDOWS = 16, 256, 60
METHODS = ("sparsegpt", "sparsellm")
FORMS = {
    "2:4 in some rows": ("2:4@25%", "2:4@50%", "2:4@75%", "2:4"),
    "N:M in all rows": ("1:8", "1:4", "3:8", "2:4"),
    "unstructured": ("12.5%", "25%", "37.5%", "50%"),
}
"""By form, the patterns with 12.5, 25, 37.5 and 50 % zeros."""

PATTERNS = tuple(dict.fromkeys(pattern for patterns in FORMS.values() for pattern in patterns))


def measure(words: argparse.Namespace) -> None:
    """Fill the cells of a model: the excess of the log-perplexity, and the fraction of zeros in the pruned layers."""
    name, source = Path(words.model.replace("demo:", "demo-")).name, open_checkpoint(words.model)
    tests = test_windows(read_text(words.test, "test"), source.tokenizer(), LENGTH, limit=WINDOWS, **CUT).windows
    dense = measure_perplexity(source.load(), tests).value
    for seed, method, pattern in product(words.seeds, words.methods, words.patterns):
        key = f"{name} | {method} | {pattern} | {seed}"
        if key not in read_figures(FILE):
            settings = {
                "model": words.model,
                "method": method,
                "sparsity": pattern,
                "calibration": words.calibrate,
                "seed": seed,
            }
            recipe = read_recipe(settings | {"samples": SAMPLES, "sequence_length": LENGTH} | CUT)
            result = prune_run(recipe, lambda event: None)
            excess = math.log(measure_perplexity(result.model, tests).value / dense)
            record(FILE, key, [round(excess, 5), round(result.report.sparsity, 4)])


def table() -> list[str]:
    """The increase of the perplexity by model, method, form and zeros, and the processor."""
    cells, rows = read_figures(FILE), []
    machine = cells.pop("machine")
    for name, method, form in product(dict.fromkeys(key.split(" | ")[0] for key in cells), METHODS, FORMS):
        found = [cells.get(f"{name} | {method} | {pattern} | 0") for pattern in FORMS[form]]
        increases = ["" if cell is None else f"{100 * math.expm1(cell[0]):+.2f} %" for cell in found]
        if any(increases):
            rows.append([name, "the default" if method == "sparsellm" else method, form, *increases])
    head = ["", "", "zeros", "12.5 %", "25 %", "37.5 %", "50 %"]
    return [*markdown_table(head, rows, left=(0, 1, 2)), "", f"{machine}."]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    add_measure(commands, PATTERNS, (0,)).add_argument("--methods", nargs="+", default=METHODS)
    commands.add_parser("table")
    words = parser.parse_args()
    if words.command == "measure":
        measure(words)
    else:
        print("\n".join(table()))


if __name__ == "__main__":
    main()
