"""The effect of rounding: masks and perplexity of one model, pruned with other batch sizes, threads and processes.

    python benchmarks/rounding.py measure MODEL TEXT    # minutes; MODEL is stories260K-llama, TEXT a file to measure on
    python benchmarks/rounding.py table

Each method prunes the model to 50 %, each time in a process of its own. The masks are compared with those of batch size 1, one
thread and one process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import tempfile
from pathlib import Path

from measuring import MEASURED, arguments, markdown_table, program, read_figures, record
from safetensors.torch import load_file
from torch import Tensor

FILE = MEASURED / "rounding.json"

METHODS = ("wanda", "sparsegpt", "fast-admm", "alps", "sparsellm")

CHANGES: dict[str, dict[str, int]] = {
    "batch 3": {"batch_size": 3},
    "batch 4": {"batch_size": 4},
    "batch 8": {"batch_size": 8},
    "2 threads": {"threads": 2},
    "2 processes": {"processes": 2},
}


def prune(
    model: str, text: str, method: str, *, batch_size: int = 1, threads: int = 1, processes: int = 1
) -> tuple[dict[str, Tensor], float]:
    """The mask of every pruned layer, and the perplexity."""
    with tempfile.TemporaryDirectory() as folder:
        run = arguments("prune", model, f"{folder}/out", method=method, sparsity="50%", calibration="demo", samples=16)
        run += ["--sequence-length", "256", "--batch-size", str(batch_size), "--evaluate", text, "--evaluate-limit", "32"]
        environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
        subprocess.run([*program(processes=processes), *run], check=True, capture_output=True, env=environment)
        report = json.loads(Path(folder, "out", "sparsellm.json").read_text(encoding="utf-8"))
        weights = {
            name: tensor for file in Path(folder, "out").glob("*.safetensors") for name, tensor in load_file(file).items()
        }
    layers = [layer["name"] for block in report["blocks"] for layer in block["layers"]]
    perplexity = next(iter(report["perplexity"].values()))["pruned"]["value"]
    return {name: weights[f"{name}.weight"] != 0 for name in layers}, float(perplexity)


def measure(model: str, text: str) -> None:
    """Measure every method."""
    for method in METHODS:
        expected, perplexity = prune(model, text, method)
        changes = {}
        for name, change in CHANGES.items():
            masks, other = prune(model, text, method, **change)
            shares = [float((masks[layer] != mask).float().mean()) for layer, mask in expected.items()]
            changes[name] = {"most": max(shares), "mean": sum(shares) / len(shares), "perplexity": other}
        record(FILE, method, {"perplexity": perplexity, "changes": changes})


def table() -> list[str]:
    """What was measured, as Markdown."""
    known = read_figures(FILE)
    rows = []
    for method in (some for some in METHODS if some in known):
        for name, cell in known[method]["changes"].items():
            shares = ("none" if cell[key] == 0 else f"{100 * cell[key]:.2f} %" for key in ("most", "mean"))
            rows.append([method, f"{known[method]['perplexity']:.3f}", name, *shares, f"{cell['perplexity']:.3f}"])
    head = ["method", "perplexity", "changed", "masks that differ: worst layer", "mean of the layers", "perplexity"]
    return markdown_table(head, rows, left=(0, 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("model")
    measuring.add_argument("text")
    commands.add_parser("table")
    options = parser.parse_args()
    if options.command == "measure":
        measure(options.model, options.text)
    else:
        print("\n".join(table()))


if __name__ == "__main__":
    main()
