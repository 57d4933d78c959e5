"""The memory that a run takes above its imports, against `--max-memory`: docs/large-models.md.

    python benchmarks/memory_budget.py measure    # half an hour on two cores
    python benchmarks/memory_budget.py table

Models of random bfloat16 weights are pruned by `sparsellm prune --max-memory`, each in a fresh process. The process reports its
resident memory after importing torch and transformers, after importing the model's classes and its tokenizer too, and at the
peak of the run.
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
from pydantic import ByteSize, TypeAdapter
from transformers import OPTConfig, PreTrainedConfig

FILE = MEASURED / "memory-budget.json"

CELLS: tuple[tuple[str, int, str, str], ...] = (
    ("Llama", 8, "1GiB", "sparsegpt"),
    ("Llama", 16, "1GiB", "sparsegpt"),
    ("Llama", 8, "1GiB", "sparsellm"),
    ("OPT", 8, "1GiB", "sparsegpt"),
    ("Llama", 8, "600MB", "sparsegpt"),
    ("Llama", 8, "300MB", "sparsegpt"),
)
"""Family, blocks of width 1,536, budget and method; two blocks of each model are pruned."""

REFUSAL = "error: Pruning needs"

CHILD = """
import json, sys
import torch, transformers
from sparsellm.runtime.memory import current_memory, peak_memory
libraries = current_memory()
from sparsellm.checkpoints.loading import open_checkpoint
from sparsellm.cli.app import app
import sparsellm.outputs.saving, sparsellm.pipeline.run
source = open_checkpoint(sys.argv[2])
source.skeleton(), source.tokenizer()
imports = current_memory()
try:
    app(sys.argv[1:])
except SystemExit as end:
    if end.code:
        sys.exit(end.code)
print(json.dumps({"libraries": libraries, "imports": imports, "peak": peak_memory()}))
"""


def opt_config(blocks: int, width: int) -> PreTrainedConfig:
    """An OPT configuration with the vocabulary of `llama_config`."""
    sizes = {"hidden_size": width, "ffn_dim": 4 * width, "word_embed_proj_dim": width, "num_hidden_layers": blocks}
    return OPTConfig(vocab_size=llama_config(blocks, width).vocab_size, num_attention_heads=width // 64, **sizes)


def prune(folder: Path, config: PreTrainedConfig, memory: str, method: str) -> dict[str, Any]:
    """Prune two blocks of a model: the process's memory in bytes, and whether the model was read block by block."""
    write_random_model(folder / "model", config)
    run = arguments("prune", folder / "model", folder / "out", method=method, sparsity="50%", calibration="demo", samples=8)
    run += ["--sequence-length", "256", "--blocks", "0:2", "--max-memory", memory]
    done = subprocess.run([sys.executable, "-c", CHILD, *run], capture_output=True, text=True, check=True)
    events = (folder / "out" / "sparsellm-log.jsonl").read_text(encoding="utf-8")
    return json.loads(done.stdout.splitlines()[-1]) | {"streamed": "read block by block" in events}


def measure() -> None:
    """Measure every cell that the file of figures lacks."""
    for family, blocks, memory, method in CELLS:
        key = f"{family} | {blocks} | {memory} | --method {method}"
        if key in read_figures(FILE):
            continue
        config = (opt_config if family == "OPT" else llama_config)(blocks, 1536)
        with tempfile.TemporaryDirectory() as folder:
            try:
                cell = prune(Path(folder), config, memory, method)
            except subprocess.CalledProcessError as failure:
                refusals = [line for line in failure.stderr.splitlines() if line.startswith(REFUSAL)]
                if not refusals:
                    raise
                cell = {"refused": refusals[0].removeprefix("error: ")}
        record(FILE, key, cell)


def table() -> list[str]:
    """What was measured, as Markdown."""
    rows = []
    for key, cell in read_figures(FILE).items():
        if key == "machine":
            continue
        form, blocks, memory, words = key.split(" | ")
        shape = [form, blocks, memory, f"`{words}`"]
        if cell.get("refused"):
            rows.append([*shape, f"refused: {cell['refused']}", "", "", "", ""])
            continue
        budget = TypeAdapter(ByteSize).validate_python(memory)
        sizes = (cell["peak"] - cell["imports"], cell["peak"] - cell["libraries"])
        told = (text for size in sizes for text in (f"{size / 1e6:.0f} MB", f"{size / budget:.2f}"))
        rows.append([*shape, "block by block" if cell["streamed"] else "in memory", *told])
    head = ["form", "blocks", "`--max-memory`", "run", "model", "above all imports", "of the budget"]
    return markdown_table([*head, "above torch and transformers", "of the budget"], rows, left=(0, 3, 4))


def main() -> None:
    measure_or_show(__doc__, measure, table)


if __name__ == "__main__":
    main()
