"""What `sparsellm plan` says against what runs then take: docs/results.md.

    python benchmarks/planning.py measure               # a dozen runs on models of random weights, half an hour on two cores
    python benchmarks/planning.py tables

Each run is planned in a process of its own, then done in another whose peak of resident memory the system tells.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from results import MEASURED, markdown_table, processor
from streaming import make, peak

FILE = MEASURED / "planning.json"

CELLS: tuple[tuple[int, int, int, int, tuple[str, ...]], ...] = (
    (3, 512, 16, 512, ("--method", "wanda")),
    (3, 512, 64, 512, ("--method", "alps")),
    (3, 512, 16, 512, ("--method", "sparsellm")),
    (3, 512, 16, 512, ("--method", "sparsellm", "--offload")),
    (3, 512, 16, 512, ("--method", "sparsellm", "--as-published")),
    (6, 1024, 16, 512, ("--method", "sparsegpt")),
    (6, 1024, 16, 512, ("--method", "sparsegpt", "--offload")),
    (6, 1024, 16, 512, ("--method", "alps", "--sparsity", "2:4")),
    (6, 1024, 256, 512, ("--method", "wanda", "--offload", "--max-memory", "600MB")),
    (12, 1024, 4, 512, ("--method", "magnitude", "--evaluate", "demo")),
    (4, 2048, 16, 512, ("--method", "sparsegpt", "--offload")),
)
"""Blocks, width, windows, tokens a window, and the words of the run."""


def measure() -> None:
    """Fill the file of figures, cell by cell."""
    for blocks, width, windows, length, words in CELLS:
        key = f"{blocks} | {width} | {windows} | {' '.join(words)}"
        known = json.loads(FILE.read_text()) if FILE.exists() else {}
        if key in known:
            continue
        with tempfile.TemporaryDirectory() as folder:
            make(Path(folder) / "model", blocks, width)
            base = [f"{folder}/model", f"{folder}/out", "--calibration", "demo", "--samples", str(windows)]
            base += ["--sequence-length", str(length), *words, *(() if "--sparsity" in words else ("--sparsity", "70%"))]
            tool = [sys.executable, "-m", "sparsellm"]
            told = json.loads(subprocess.run([*tool, "plan", *base, "--json"], capture_output=True, check=True).stdout)
            taken, seconds = peak([*tool, "prune", *base])
            report = json.loads(Path(folder, "out", "sparsellm.json").read_text())
        stages = {stage["name"] for stage in told["stages"]}
        spent = sum(s for name, s in report["seconds"].items() if name in stages or name.startswith("measuring"))
        cell = {name: told["peak"][f"{name}_bytes"] for name in ("data", "libraries", "resident")}
        cell |= {"taken": taken, "told_seconds": round(told["seconds"], 1), "seconds": round(spent, 1)}
        known[key] = cell | {"process_seconds": round(seconds, 1)}
        known["machine"] = f"{processor()}, torch {torch.__version__}"
        FILE.write_text(json.dumps(known, indent=1) + "\n")
        print(key, known[key], file=sys.stderr, flush=True)


def tables() -> list[str]:
    """The range of planned over taken in a sentence, then every run."""
    cells = json.loads(FILE.read_text())
    machine, rows = cells.pop("machine"), []
    sizes = {key: cell["resident"] / cell["taken"] for key, cell in cells.items()}
    times = {key: cell["told_seconds"] / cell["seconds"] for key, cell in cells.items() if cell["seconds"] >= 1}
    for key, cell in cells.items():
        *shape, words = key.split(" | ")
        planned = (f"{cell[name] / 1e9:.2f} GB" for name in ("data", "resident", "taken"))
        rows.append([f"`{words}`", *shape, *planned, f"{sizes[key]:.2f}", f"{times[key]:.2f}" if key in times else ""])
    told = f"Planned memory is {min(sizes.values()):.2f} to {max(sizes.values()):.2f} times the memory that the process takes, "
    told += f"planned time {min(times.values()):.2f} to {max(times.values()):.2f} times the time. {machine}:"
    head = ["run", "blocks", "width", "samples", "tensors, planned", "process, planned", "process, taken", "ratio"]
    return [told, "", *markdown_table([*head, "time, ratio"], rows)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("measure")
    commands.add_parser("tables")
    if parser.parse_args().command == "tables":
        print("\n".join(tables()))
    else:
        measure()


if __name__ == "__main__":
    main()
