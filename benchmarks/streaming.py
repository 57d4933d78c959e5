"""The memory of a run that reads its model block by block: docs/results.md.

    python benchmarks/streaming.py measure --blocks 12 24 --windows 8 64     # width 1,024: small enough for an afternoon
    python benchmarks/streaming.py measure --width 2048 --blocks 60 --windows 16    # more than 6 GB in bfloat16, an hour
    python benchmarks/streaming.py compare                  # a model that fits, in memory and streamed, in turn, three times
    python benchmarks/streaming.py tables

A model of random weights is pruned by SparseGPT with `--max-memory`, and evaluated on the beginning of the bundled text,
each in a process of its own, of which the system reports the peak resident memory.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from measuring import (
    MEASURED,
    arguments,
    llama_config,
    markdown_table,
    peak,
    program,
    read_figures,
    record,
    write_figures,
    write_random_model,
)

from sparsellm.texts.texts import read_text

FILE, COST = MEASURED / "streaming.json", MEASURED / "streaming-cost.json"
CHARACTERS = 30_000
"""Of the text to evaluate on: some dozen sequences."""


def prune_command(folder: str, out: str, windows: int, **options: Any) -> list[str]:
    """The command that prunes `model` in a folder by SparseGPT to 70 %."""
    settings = {"method": "sparsegpt", "sparsity": "70%", "calibration": "demo", "sequence_length": 512, "samples": windows}
    return [*program(), *arguments("prune", f"{folder}/model", f"{folder}/{out}", **settings, **options)]


def measure(blocks: int, windows: int, width: int, *, memory: str) -> None:
    """Measure the peaks of pruning and of evaluating one model."""
    key = f"{blocks} | {windows} | {width} | {memory}"
    if key in read_figures(FILE):
        return
    with tempfile.TemporaryDirectory() as folder:
        size = write_random_model(Path(folder, "model"), llama_config(blocks, width))
        pruned, prune_seconds = peak(prune_command(folder, "out", windows, max_memory=memory))
        text = Path(folder, "text.txt")
        text.write_text(read_text("demo", "test").stream[:CHARACTERS], encoding="utf-8")
        command = arguments("evaluate", f"{folder}/out", text=text, sequence_length=512, max_memory=memory)
        evaluated, evaluate_seconds = peak([*program(), *command])
    cell = {"bytes": size, "prune": pruned, "prune_seconds": round(prune_seconds, 1)}
    record(FILE, key, cell | {"evaluate": evaluated, "evaluate_seconds": round(evaluate_seconds, 1)})


def compare(blocks: int, width: int, windows: int, *, times: int) -> None:
    """Measure the seconds of pruning one model in memory and streamed, in turn, as its reports have them."""
    seconds: dict[str, list[float]] = {"--no-offload": [], "--offload": []}
    with tempfile.TemporaryDirectory() as folder:
        size = write_random_model(Path(folder, "model"), llama_config(blocks, width))
        for number in range(times):
            for option, measured in seconds.items():
                command = prune_command(folder, f"out{option}{number}", windows, offload=option == "--offload")
                subprocess.run(command, check=True, capture_output=True)
                report = json.loads(Path(folder, f"out{option}{number}", "sparsellm.json").read_text())
                measured.append(round(report["seconds"]["pruning"] + report["seconds"]["loading"], 2))
    write_figures(COST, {"blocks": blocks, "width": width, "windows": windows, "bytes": size, "seconds": seconds})


def tables() -> list[str]:
    """The peaks of memory, and what loading block by block costs in time."""
    cells = read_figures(FILE)
    machine, rows = cells.pop("machine"), []
    for key, cell in cells.items():
        blocks, windows, width, memory = key.split(" | ")
        size, *peaks = [f"{cell[name] / 1e9:.2f} GB" for name in ("bytes", "prune", "evaluate")]
        seconds = f"{cell['prune_seconds']:.0f} + {cell['evaluate_seconds']:.0f}"
        rows.append([blocks, width, size, windows, memory, *peaks, seconds])
    head = ["blocks", "width", "model", "samples", "`--max-memory`", "peak, pruning", "peak, evaluating", "seconds"]
    lines = [f"{machine}:", "", *markdown_table(head, rows, left=()), ""]
    told = json.loads(COST.read_text())
    inside, streamed = told["seconds"]["--no-offload"], told["seconds"]["--offload"]
    ratios = [two / one for one, two in zip(inside, streamed, strict=True)]
    form = f"{told['bytes'] / 1e9:.2f} GB ({told['blocks']} blocks of width {told['width']}, {told['windows']} samples)"
    return [
        *lines,
        f"A model of {form} takes SparseGPT {median(inside):.1f} s in memory and {median(streamed):.1f} s block by block, the "
        f"median of {len(ratios)} rounds; the ratios are {', '.join(f'{ratio:.3f}' for ratio in ratios)}.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring = commands.add_parser("measure")
    measuring.add_argument("--blocks", nargs="+", type=int, default=[12, 24])
    measuring.add_argument("--windows", nargs="+", type=int, default=[8, 64])
    measuring.add_argument("--width", type=int, default=1024)
    measuring.add_argument("--memory", default="1GB")
    commands.add_parser("compare")
    commands.add_parser("tables")
    words = parser.parse_args()
    if words.command == "compare":
        compare(8, 1024, 8, times=3)
        return
    if words.command == "tables":
        print("\n".join(tables()))
        return
    for blocks in words.blocks:
        for windows in words.windows:
            measure(blocks, windows, words.width, memory=words.memory)


if __name__ == "__main__":
    main()
