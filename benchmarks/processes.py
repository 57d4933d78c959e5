"""The gain from several processes: forward passes and statistics by one process and by more, one thread each.

python benchmarks/processes.py measure     # OPT-125M's shape; in turn, three times
python benchmarks/processes.py costs       # the cost of a block of a 70B Llama, counted
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

import torch
from measuring import MEASURED, markdown_table, processor, program
from torch import Tensor
from transformers import AutoModelForCausalLM, OPTConfig, PreTrainedModel

from sparsellm.activations.walk import walk
from sparsellm.methods.layerwise import collect_statistics
from sparsellm.models.blocks import blocks_of
from sparsellm.runtime import collectives, process_group
from sparsellm.solvers.statistics import Gram
from sparsellm.texts.padding import split_batches

FILE = MEASURED / "processes.json"
BLOCKS, WINDOWS, LENGTH, BATCH = 3, 32, 512, 4
RUNS = 3


def work() -> None:
    """One process: walk through the blocks with the Gram matrix of every layer; the main process prints the seconds."""
    with process_group.init_process_group(os.environ) as is_main:
        torch.manual_seed(0)
        config = OPTConfig(hidden_size=768, ffn_dim=3072, num_attention_heads=12, num_hidden_layers=BLOCKS, dropout=0.0)
        model = AutoModelForCausalLM.from_config(config).eval()
        windows = torch.randint(config.vocab_size, (WINDOWS, LENGTH), generator=torch.Generator().manual_seed(1))
        collect(model, split_batches(windows[: collectives.world()], 1), stop=1)  # the first pass is slower
        sent = collectives.bytes_sent()
        collectives.broadcast_object(None)
        started = time.perf_counter()
        collect(model, split_batches(windows, BATCH))
        collectives.broadcast_object(None)
        if is_main:
            exchanged = (collectives.bytes_sent() - sent) / len(blocks_of(model))
            print(json.dumps({"seconds": time.perf_counter() - started, "bytes": exchanged}))


def collect(model: PreTrainedModel, batches: Sequence[Tensor], stop: int | None = None) -> None:
    """Collect the Gram matrix of every layer, and wait for the sums over processes."""
    for block, inputs in walk(model, batches, stop=stop):
        for gram in collect_statistics(block, inputs, dict.fromkeys(block.layers, Gram)).values():
            assert isinstance(gram, Gram)
            gram.mean.sum()


def measure(counts: list[int]) -> None:
    """Measure each number of processes, in turn."""
    runs: dict[str, list[dict[str, float]]] = {str(count): [] for count in counts}
    for _ in range(RUNS):
        for count in counts:
            command = [*program(__file__, count), "work"]
            done = subprocess.run(
                command, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=True
            )
            runs[str(count)].append(json.loads(done.stdout))
            print(count, done.stdout.strip(), file=sys.stderr)
    machine = f"{processor()}, one thread a process, torch {torch.__version__}"
    FILE.write_text(json.dumps({"machine": machine, "runs": runs}, indent=1) + "\n")


def table() -> list[str]:
    """The measured gain in Markdown."""
    data = json.loads(FILE.read_text())
    alone = [run["seconds"] for run in data["runs"]["1"]]
    rows = []
    for count, runs in data["runs"].items():
        seconds = [run["seconds"] for run in runs]
        gains = [a / b for a, b in zip(alone, seconds, strict=True)]
        spread = f" ({min(gains):.2f} to {max(gains):.2f})" if count != "1" else ""
        gain = f"{statistics.median(gains):.2f}{spread}"
        rows.append([count, f"{statistics.median(seconds):.1f}", gain, f"{runs[0]['bytes'] / 1e6:,.1f} MB"])
    head = ["processes", "seconds (median of 3)", "speed", "bytes exchanged a block"]
    return [f"{data['machine']}:", "", *markdown_table(head, rows, left=())]


WIDTH, HIDDEN, KEYS, DEPTH, TOKENS, SEQUENCE = 8192, 28672, 1024, 80, 128 * 2048, 2048
RATE, SOLVING, LINK = 400e12, 40e12, {8: 300e9, 64: 40e9}
"""Assumed, not measured: operations a second in 16-bit products and in float32 factorizations, bytes a second between GPUs."""


def costs() -> list[str]:
    """A block of Llama-2-70B by SparseGPT on 128 windows of 2,048 tokens: counted operations and bytes over assumed rates."""
    weights = 2 * WIDTH * WIDTH + 2 * WIDTH * KEYS + 3 * WIDTH * HIDDEN
    forward = 2 * TOKENS * (2 * weights + 2 * SEQUENCE * WIDTH)  # two passes; attention on half of the tokens before
    moments = TOKENS * (3 * WIDTH**2 + HIDDEN**2)
    layers = [(WIDTH, WIDTH), (WIDTH, KEYS), (WIDTH, KEYS), (WIDTH, WIDTH), (WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH)]
    solves = [4 / 3 * reads**3 + reads**2 * writes for reads, writes in layers]
    exchanged = 8 * (3 * WIDTH**2 + HIDDEN**2) * 9 / 16 + 2 * weights
    rows = []
    for count in (1, 8, 64):
        loads = [0.0] * count
        for cost in sorted(solves, reverse=True):
            loads[loads.index(min(loads))] += cost
        parts = [(forward + moments) / count / RATE, max(loads) / SOLVING]
        parts.append(2 * exchanged * (count - 1) / count / LINK[count] if count > 1 else 0.0)
        told = (f"{seconds:.2f} s" for seconds in (*parts, sum(parts)))
        rows.append([str(count), *told, f"{DEPTH * sum(parts) / 60:.1f} min"])
    return markdown_table(["GPUs", "forward and moments", "solves", "exchange", "a block", "80 blocks"], rows, left=())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["measure", "costs", "table", "work"])
    parser.add_argument("--processes", nargs="+", type=int, default=[1, 2])
    options = parser.parse_args()
    if options.command == "measure":
        measure(options.processes)
    elif options.command == "work":
        work()
    else:
        print("\n".join(table() if options.command == "table" else costs()))


if __name__ == "__main__":
    main()
