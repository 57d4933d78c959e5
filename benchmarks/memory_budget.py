"""The memory that a run takes above its imports, against `--max-memory`: docs/large-models.md.

    python benchmarks/memory_budget.py measure              # half an hour on two cores
    python benchmarks/memory_budget.py table

Models of random bfloat16 weights are pruned by `sparsellm prune --max-memory` in a fresh process each. The process tells what
is resident once torch and transformers are imported, what is resident once the model's classes and its tokenizer are imported
besides, and the peak of the whole run.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from pydantic import ByteSize, TypeAdapter
from results import MEASURED, markdown_table, processor
from streaming import make
from transformers import AutoTokenizer, OPTConfig, OPTForCausalLM

from sparsellm.checkpoints.loading import open_checkpoint

FILE = MEASURED / "memory-budget.json"

CELLS: tuple[tuple[str, int, str, tuple[str, ...]], ...] = (
    ("Llama", 8, "1GiB", ("--method", "sparsegpt")),
    ("Llama", 16, "1GiB", ("--method", "sparsegpt")),
    ("Llama", 8, "1GiB", ("--method", "sparsellm")),
    ("OPT", 8, "1GiB", ("--method", "sparsegpt")),
    ("Llama", 8, "600MB", ("--method", "sparsegpt")),
    ("Llama", 8, "300MB", ("--method", "sparsegpt")),
)
"""The form, blocks of width 1,536, the budget, and the words of the run; two blocks are pruned of each."""

REFUSAL = "error: Pruning needs"

CHILD = """
import json, sys
import torch, transformers
from sparsellm.runtime.memory import current_memory, peak_memory
libraries = current_memory()
from sparsellm.checkpoints.loading import open_checkpoint
from sparsellm.cli.app import app
import sparsellm.runs.export, sparsellm.runs.run
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


def taken(words: Sequence[str]) -> dict[str, int]:
    """Run `sparsellm` with these words; what its process held after either kind of imports, and at its peak, in bytes."""
    ran = subprocess.run([sys.executable, "-c", CHILD, *words], capture_output=True, text=True, check=True)
    found: dict[str, int] = json.loads(ran.stdout.splitlines()[-1])
    return found


def make_opt(folder: Path, blocks: int, width: int) -> None:
    """An OPT form of random bfloat16 weights, and a tokenizer."""
    source = open_checkpoint("demo:opt")
    sizes = {"hidden_size": width, "ffn_dim": 4 * width, "word_embed_proj_dim": width, "num_hidden_layers": blocks}
    config = OPTConfig(vocab_size=source.config.vocab_size, num_attention_heads=width // 64, **sizes)
    OPTForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.folder).save_pretrained(folder)


def prune(
    folder: Path, blocks: int, width: int, memory: str, words: Sequence[str], form: str = "Llama"
) -> tuple[dict[str, int], bool]:
    """Prune two blocks of such a model: what was taken, and whether the model was read block by block."""
    if not (folder / "model").exists():
        (make_opt if form == "OPT" else make)(folder / "model", blocks, width)
    base = ["prune", str(folder / "model"), str(folder / "out"), "--sparsity", "50%", "--calibration", "demo"]
    base += ["--samples", "8", "--sequence-length", "256", "--blocks", "0:2", "--max-memory", memory, "--overwrite"]
    found = taken([*base, *words])
    events = (folder / "out" / "sparsellm-log.jsonl").read_text(encoding="utf-8")
    return found, "read block by block" in events


def measure() -> None:
    """Fill the file of figures, cell by cell."""
    for form, blocks, memory, words in CELLS:
        known = json.loads(FILE.read_text()) if FILE.exists() else {}
        key = f"{form} | {blocks} | {memory} | {' '.join(words)}"
        if key in known:
            continue
        with tempfile.TemporaryDirectory() as folder:
            try:
                found, streamed = prune(Path(folder), blocks, 1536, memory, words, form)
                cell = {**found, "streamed": streamed}
            except subprocess.CalledProcessError as failure:
                refusals = [line for line in failure.stderr.splitlines() if line.startswith(REFUSAL)]
                if not refusals:
                    raise
                cell = {"refused": refusals[0].removeprefix("error: ")}
        known[key] = cell
        known["machine"] = f"{processor()}, torch {torch.__version__}, {torch.get_num_threads()} threads"
        FILE.write_text(json.dumps(known, indent=1) + "\n")
        print(key, cell, file=sys.stderr, flush=True)


def table() -> list[str]:
    """What was measured, as Markdown."""
    rows = []
    for key, cell in json.loads(FILE.read_text()).items():
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("measure", "table"))
    if parser.parse_args().command == "measure":
        measure()
    else:
        print("\n".join(table()))


if __name__ == "__main__":
    main()
