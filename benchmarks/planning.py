"""The estimates of `sparsellm plan` against the runs themselves: docs/results.md.

    python benchmarks/planning.py measure    # runs on models of random weights, half an hour
    python benchmarks/planning.py table

Each run is planned in one process and done in another, of which the system reports the peak resident memory. Both run on one
thread.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from pathlib import Path

from measuring import (
    MEASURED,
    arguments,
    llama_config,
    markdown_table,
    measure_or_show,
    peak,
    program,
    read_figures,
    record,
    write_random_model,
)

FILE = MEASURED / "planning.json"

CELLS: tuple[tuple[int, int, int, str], ...] = (
    (3, 512, 16, "--method wanda"),
    (3, 512, 64, "--method alps"),
    (3, 512, 16, "--method sparsellm"),
    (3, 512, 16, "--method sparsellm --offload"),
    (3, 512, 16, "--method algorithm1"),
    (6, 1024, 16, "--method sparsegpt"),
    (6, 1024, 16, "--method sparsegpt --offload"),
    (6, 1024, 16, "--method alps --sparsity 2:4"),
    (6, 1024, 256, "--method wanda --offload --max-memory 600MB"),
    (12, 1024, 4, "--method magnitude --evaluate demo"),
    (4, 2048, 16, "--method sparsegpt --offload"),
)
"""Blocks, width, calibration sequences of 512 tokens, and further options."""


def measure() -> None:
    """Measure every cell that the file of figures lacks."""
    os.environ["OMP_NUM_THREADS"] = "1"
    for blocks, width, samples, options in CELLS:
        key = f"{blocks} | {width} | {samples} | {options}"
        if key in read_figures(FILE):
            continue
        with tempfile.TemporaryDirectory() as folder:
            write_random_model(Path(folder, "model"), llama_config(blocks, width))
            _, *run = arguments(
                "", f"{folder}/model", f"{folder}/out", calibration="demo", samples=samples, sequence_length=512
            )
            run += [*options.split(), *(() if "--sparsity" in options else ("--sparsity", "70%"))]
            printed = subprocess.run([*program(), "plan", *run, "--json"], capture_output=True, check=True).stdout
            plan = json.loads(printed)
            taken, _ = peak([*program(), "prune", *run])
        planned = {name: plan["peak"][f"{name}_bytes"] for name in ("data", "libraries", "resident")}
        record(FILE, key, planned | {"taken": taken})


def tables() -> list[str]:
    """The range of planned over taken in a sentence, then every run."""
    cells = read_figures(FILE)
    machine, rows = cells.pop("machine"), []
    sizes = {key: cell["resident"] / cell["taken"] for key, cell in cells.items()}
    for key, cell in cells.items():
        *shape, words = key.split(" | ")
        planned = (f"{cell[name] / 1e9:.2f} GB" for name in ("data", "resident", "taken"))
        rows.append([f"`{words}`", *shape, *planned, f"{sizes[key]:.2f}"])
    told = f"Planned memory is {min(sizes.values()):.2f} to {max(sizes.values()):.2f} times the memory that the process takes."
    head = ["run", "blocks", "width", "samples", "tensors, planned", "process, planned", "process, taken", "ratio"]
    return [f"{told} {machine}:", "", *markdown_table(head, rows)]


def main() -> None:
    measure_or_show(__doc__, measure, tables)


if __name__ == "__main__":
    main()
