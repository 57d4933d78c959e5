"""The memory that a run takes on models of random weights that are read block by block: docs/results.md.

    python benchmarks/streaming.py measure --blocks 12 24 --windows 8 64     # width 1,024: small enough for an afternoon
    python benchmarks/streaming.py measure --width 2048 --blocks 60 --windows 16    # more than 6 GB in bfloat16, an hour
    python benchmarks/streaming.py compare                  # a model that fits, in memory and streamed, in turn, three times
    python benchmarks/streaming.py tables

A model of each size is made in a temporary folder, pruned by SparseGPT with `--max-memory`, and evaluated on the beginning of
the demo's text, each in a process of its own whose peak of resident memory the system tells.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from results import MEASURED, markdown_table, processor
from safetensors.torch import save_file
from transformers import AutoTokenizer, LlamaConfig

from sparsellm.checkpoints.loading import open_checkpoint
from sparsellm.data.texts import read_text

FILE, COST = MEASURED / "streaming.json", MEASURED / "streaming-cost.json"
VOCABULARY_OF = "demo:llama"
LENGTH = 512
CHARACTERS = 30_000
"""Of the text to evaluate on: some dozen windows."""


def make(folder: Path, blocks: int, width: int) -> int:
    """A Llama form of random bfloat16 weights, one file for each block, and a tokenizer; its bytes."""
    source = open_checkpoint(VOCABULARY_OF)
    hidden = width * 11 // 4 // 64 * 64
    config = LlamaConfig(
        vocab_size=source.config.vocab_size,
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=blocks,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )
    folder.mkdir(parents=True)
    config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.folder).save_pretrained(folder)
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).to(torch.bfloat16)

    placed: dict[str, str] = {}
    total = 0

    def write(file: str, tensors: dict[str, torch.Tensor]) -> None:
        nonlocal total
        save_file(tensors, folder / file, metadata={"format": "pt"})
        placed.update(dict.fromkeys(tensors, file))
        total += sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())

    ones = torch.ones(width, dtype=torch.bfloat16)
    write("ends.safetensors", {"model.embed_tokens.weight": draw(config.vocab_size, width), "model.norm.weight": ones})
    for index in range(blocks):
        path = f"model.layers.{index}"
        tensors = {f"{path}.self_attn.{name}_proj.weight": draw(width, width) for name in "qkvo"}
        tensors |= {f"{path}.mlp.{name}_proj.weight": draw(hidden, width) for name in ("gate", "up")}
        tensors[f"{path}.mlp.down_proj.weight"] = draw(width, hidden)
        tensors |= {f"{path}.{name}_layernorm.weight": ones.clone() for name in ("input", "post_attention")}
        write(f"block-{index:03}.safetensors", tensors)
    index_file = folder / "model.safetensors.index.json"
    index_file.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": placed}))
    return total


def peak(words: list[str]) -> tuple[int, float]:
    """Run a command; the peak of its resident memory in bytes, and its seconds."""
    started = time.perf_counter()
    program = (
        "import resource, subprocess, sys; done = subprocess.run(sys.argv[1:]); "
        "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss); sys.exit(done.returncode)"
    )
    done = subprocess.run([sys.executable, "-c", program, *words], stdout=subprocess.PIPE, text=True, check=True)
    unit = 1 if sys.platform == "darwin" else 1024
    return int(done.stdout.splitlines()[-1]) * unit, time.perf_counter() - started


def measure(blocks: int, windows: int, width: int, memory: str) -> None:
    """One cell: the peaks of pruning and of evaluating a model of that size."""
    key = f"{blocks} | {windows} | {width} | {memory}"
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    if key in known:
        return
    with tempfile.TemporaryDirectory() as folder:
        size = make(Path(folder) / "model", blocks, width)
        command = [sys.executable, "-m", "sparsellm"]
        words = ["--calibration", "demo", "--sequence-length", str(LENGTH), "--samples", str(windows), "--max-memory", memory]
        pruned, seconds = peak(
            [*command, "prune", f"{folder}/model", f"{folder}/out", "--method", "sparsegpt", "--sparsity", "70%", *words]
        )
        text = Path(folder) / "text.txt"
        text.write_text(read_text("demo", "test").stream[:CHARACTERS], encoding="utf-8")
        evaluated, more = peak(
            [
                *command,
                "evaluate",
                f"{folder}/out",
                "--text",
                str(text),
                "--sequence-length",
                str(LENGTH),
                "--max-memory",
                memory,
            ]
        )
    cell = {"bytes": size, "prune": pruned, "prune_seconds": round(seconds, 1)}
    known[key] = cell | {"evaluate": evaluated, "evaluate_seconds": round(more, 1)}
    known["machine"] = f"{processor()}, torch {torch.__version__}"
    FILE.write_text(json.dumps(known, indent=1) + "\n")
    print(key, known[key], file=sys.stderr)


def compare(blocks: int, width: int, windows: int, times: int) -> None:
    """Seconds of pruning one model in memory and streamed, in turn, as the reports tell them."""
    found: dict[str, list[float]] = {"--no-offload": [], "--offload": []}
    with tempfile.TemporaryDirectory() as folder:
        size = make(Path(folder) / "model", blocks, width)
        for number in range(times):
            for words, spent in found.items():
                out = Path(folder) / f"out{words}{number}"
                command = [
                    sys.executable,
                    "-m",
                    "sparsellm",
                    "prune",
                    f"{folder}/model",
                    str(out),
                    "--method",
                    "sparsegpt",
                    words,
                ]
                more = [
                    "--sparsity",
                    "70%",
                    "--calibration",
                    "demo",
                    "--sequence-length",
                    str(LENGTH),
                    "--samples",
                    str(windows),
                ]
                subprocess.run([*command, *more], check=True, capture_output=True)
                seconds = json.loads((out / "sparsellm.json").read_text())["seconds"]
                spent.append(round(seconds["pruning"] + seconds["loading"], 2))
                print(words, spent[-1], file=sys.stderr, flush=True)
    machine = f"{processor()}, torch {torch.__version__}"
    told = {"blocks": blocks, "width": width, "windows": windows, "bytes": size, "seconds": found, "machine": machine}
    COST.write_text(json.dumps(told, indent=1) + "\n")


def tables() -> list[str]:
    """The peaks of memory, and what loading block by block costs in time."""
    cells = json.loads(FILE.read_text())
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
    comparing = commands.add_parser("compare")
    comparing.add_argument("--blocks", type=int, default=8)
    comparing.add_argument("--width", type=int, default=1024)
    comparing.add_argument("--windows", type=int, default=8)
    comparing.add_argument("--times", type=int, default=3)
    commands.add_parser("tables")
    words = parser.parse_args()
    if words.command == "compare":
        compare(words.blocks, words.width, words.windows, words.times)
        return
    if words.command == "tables":
        print("\n".join(tables()))
        return
    for blocks in words.blocks:
        for windows in words.windows:
            measure(blocks, windows, words.width, words.memory)


if __name__ == "__main__":
    main()
