"""The memory that a recovery takes above its imports, block by block and of the whole model: docs/recover.md.

    python benchmarks/recover_memory.py measure    # five minutes on two cores
    python benchmarks/recover_memory.py table

Llamas of random bfloat16 weights are pruned by magnitude and recovered by `sparsellm recover`, each in a fresh process. With
`--scope block` the model is read block by block. The process reports its resident memory after importing torch, transformers
and the model's classes, and at the peak of the run.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measuring import (
    MEASURED,
    arguments,
    llama_config,
    markdown_table,
    measure_or_show,
    read_figures,
    record,
    write_random_model,
)
from memory_budget import CHILD

from sparsellm import prune

FILE = MEASURED / "recover-memory.json"
WIDTH = 1024
DEPTHS = 8, 16
RUNS: dict[str, dict[str, Any]] = {
    "--scope block --offload": {"scope": "block", "offload": True},
    "--scope model": {"scope": "model"},
}
SETTINGS = {"calibration": "demo", "samples": 8, "sequence_length": 128, "steps": 3}


def measure() -> None:
    """Measure every cell that the file of figures lacks."""
    for depth in DEPTHS:
        missing = [words for words in RUNS if f"{depth} | {words}" not in read_figures(FILE)]
        if not missing:
            continue
        with tempfile.TemporaryDirectory() as name:
            dense, pruned = Path(name) / "dense", Path(name) / "pruned"
            write_random_model(dense, llama_config(depth, WIDTH))
            prune(dense, "magnitude", "50%").save_pretrained(pruned)
            for number, words in enumerate(missing):
                run = arguments("recover", pruned, Path(name) / str(number), against=str(dense), **SETTINGS, **RUNS[words])
                done = subprocess.run([sys.executable, "-c", CHILD, *run], stdout=subprocess.PIPE, text=True, check=True)
                record(FILE, f"{depth} | {words}", json.loads(done.stdout.splitlines()[-1]))


def table() -> list[str]:
    """What was measured, as Markdown."""
    figures = read_figures(FILE)
    rows = []
    for words in RUNS:
        cells = [figures[f"{depth} | {words}"] for depth in DEPTHS]
        rows.append([f"`{words}`", *(f"{(cell['peak'] - cell['imports']) / 1e6:.0f} MB" for cell in cells)])
    return markdown_table([f"Llama of width {WIDTH:,}", *(f"{depth} blocks" for depth in DEPTHS)], rows)


def main() -> None:
    measure_or_show(__doc__, measure, table)


if __name__ == "__main__":
    main()
