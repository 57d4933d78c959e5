"""What `sparsellm plan` says against what runs then take: docs/results.md.

    python benchmarks/planning.py measure               # a dozen runs on models of random weights, half an hour
    python benchmarks/planning.py tables

Each run is planned in a process of its own, then done in another whose peak of resident memory the system tells. Both run on
one thread and take the processor's time for the clock's, so that other programs on the machine hardly change the figures.
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
from results import MEASURED, processor
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


PROGRAM = "import time; time.perf_counter = time.process_time; from sparsellm.cli.app import main; main()"
"""The command line with the processor's time for the clock's."""


def measure() -> None:
    """Fill the file of figures, cell by cell."""
    os.environ["OMP_NUM_THREADS"] = "1"
    for blocks, width, windows, length, words in CELLS:
        key = f"{blocks} | {width} | {windows} | {' '.join(words)}"
        known = json.loads(FILE.read_text()) if FILE.exists() else {}
        if key in known:
            continue
        with tempfile.TemporaryDirectory() as folder:
            make(Path(folder) / "model", blocks, width)
            base = [f"{folder}/model", f"{folder}/out", "--calibration", "demo", "--samples", str(windows)]
            base += ["--sequence-length", str(length), *words, *(() if "--sparsity" in words else ("--sparsity", "70%"))]
            tool = [sys.executable, "-c", PROGRAM]
            planned = json.loads(subprocess.run([*tool, "plan", *base, "--json"], capture_output=True, check=True).stdout)
            taken, _ = peak([*tool, "prune", *base])
            report = json.loads(Path(folder, "out", "sparsellm.json").read_text())
        record(key, planned, taken, report["seconds"])


def record(key: str, planned: dict, taken: int, seconds: dict[str, float]) -> None:
    """Add a cell to the file of figures: a plan, the bytes that its run took, and the seconds of the run's stages."""
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    stages = {stage["name"] for stage in planned["stages"]}
    spent = sum(s for name, s in seconds.items() if name in stages or name.startswith("measuring"))
    cell = {name: planned["peak"][f"{name}_bytes"] for name in ("data", "libraries", "resident")}
    known[key] = cell | {"taken": taken, "told_seconds": round(planned["seconds"], 1), "seconds": round(spent, 1)}
    known["machine"] = f"{processor()}, one thread, torch {torch.__version__}"
    FILE.write_text(json.dumps(known, indent=1) + "\n")
    print(key, known[key], file=sys.stderr, flush=True)


def tables() -> list[str]:
    """What was measured, as Markdown."""
    if not FILE.exists():
        return []
    lines = [
        "| blocks | width | windows | run | data, planned | process, planned | process, taken | ratio | time, ratio |",
        "|---:|---:|---:|---|---:|---:|---:|---:|---:|",
    ]
    for key, cell in json.loads(FILE.read_text()).items():
        if key == "machine":
            continue
        blocks, width, windows, words = key.split(" | ")
        sizes = [f"{cell[name] / 1e9:.2f} GB" for name in ("data", "resident", "taken")]
        share = f"{cell['resident'] / cell['taken']:.2f}"
        time = f"{cell['told_seconds'] / cell['seconds']:.2f}" if cell["seconds"] >= 1 else ""
        lines.append(f"| {blocks} | {width} | {windows} | `{words}` | {' | '.join(sizes)} | {share} | {time} |")
    return lines


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
