"""What rounding changes: masks and perplexity of one model, pruned with other batches, threads and processes.

    python benchmarks/rounding.py measure MODEL TEXT        # minutes; MODEL is stories260K-llama, TEXT a file to measure on
    python benchmarks/rounding.py table

Each method prunes one model to 50 %, each time in a process of its own; its masks are compared with those of one window at a
time, one thread and one process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from results import MEASURED, markdown_table, processor
from safetensors.torch import load_file
from torch import Tensor

FILE = MEASURED / "rounding.json"

METHODS = ("wanda", "sparsegpt", "fast-admm", "alps", "sparsellm")

CHANGES: dict[str, tuple[int, int, int]] = {
    "batch 3": (3, 1, 1),
    "batch 4": (4, 1, 1),
    "batch 8": (8, 1, 1),
    "2 threads": (1, 2, 1),
    "2 processes": (1, 1, 2),
}
"""By name: windows at a time, threads, processes."""


def pruned(model: str, text: str, method: str, batch: int, threads: int, processes: int) -> tuple[dict[str, Tensor], float]:
    """The masks of every pruned layer, and the perplexity."""
    with tempfile.TemporaryDirectory() as folder:
        launcher = [sys.executable, "-m"]
        if processes > 1:
            launcher += ["torch.distributed.run", f"--nproc-per-node={processes}", "--standalone", "-m"]
        words = ["prune", model, f"{folder}/out", "--method", method, "--sparsity", "50%", "--calibration", "demo"]
        words += [
            "--samples",
            "16",
            "--sequence-length",
            "256",
            "--batch-size",
            str(batch),
            "--evaluate",
            text,
            "--evaluate-limit",
            "32",
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        subprocess.run([*launcher, "sparsellm", *words], check=True, capture_output=True, env=environment)
        report = json.loads(Path(folder, "out", "sparsellm.json").read_text(encoding="utf-8"))
        weights: dict[str, Tensor] = {}
        for file in Path(folder, "out").glob("*.safetensors"):
            weights |= load_file(file)
    layers = [layer["name"] for block in report["blocks"] for layer in block["layers"]]
    perplexity = next(iter(report["perplexity"].values()))["pruned"]["value"]
    return {name: weights[f"{name}.weight"] != 0 for name in layers}, float(perplexity)


def measure(model: str, text: str, methods: list[str]) -> None:
    """Fill the file of figures, method by method."""
    for method in methods:
        known = json.loads(FILE.read_text()) if FILE.exists() else {}
        base, perplexity = pruned(model, text, method, 1, 1, 1)
        cells = {}
        for name, change in CHANGES.items():
            masks, other = pruned(model, text, method, *change)
            shares = [float((masks[layer] != mask).float().mean()) for layer, mask in base.items()]
            cells[name] = {"most": max(shares), "mean": sum(shares) / len(shares), "perplexity": other}
            print(method, name, cells[name], file=sys.stderr, flush=True)
        known[method] = {"perplexity": perplexity, "changes": cells}
        known["machine"] = f"{processor()}, torch {torch.__version__}"
        known["model"] = Path(model).name
        FILE.write_text(json.dumps(known, indent=1) + "\n")


def table() -> list[str]:
    """What was measured, as Markdown."""
    known = json.loads(FILE.read_text())
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
    measuring.add_argument("--methods", nargs="+", default=list(METHODS))
    commands.add_parser("table")
    words = parser.parse_args()
    if words.command == "measure":
        measure(words.model, words.text, words.methods)
    else:
        print("\n".join(table()))


if __name__ == "__main__":
    main()
