"""What several processes gain: forward passes and moments by one process and by more, one thread each; and what a block costs.

python benchmarks/processes.py measure     # OPT-125M's shape; by turns, three times
python benchmarks/processes.py costs       # arithmetic for a 70B Llama
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import torch
from results import MEASURED, markdown_table, processor
from transformers import AutoModelForCausalLM, OPTConfig

from sparsellm.activations.walk import walk
from sparsellm.methods.layerwise import collect_statistics
from sparsellm.models.blocks import blocks_of
from sparsellm.recovery.masked_training import split_batches
from sparsellm.runtime import collectives, watchdog
from sparsellm.solvers.statistics import Gram

FILE = MEASURED / "processes.json"
BLOCKS, WINDOWS, LENGTH, BATCH = 3, 32, 512, 4
RUNS = 3


def work() -> None:
    """One process's part: the walk with every layer's Gram, summed over the processes; the first tells the seconds."""
    with watchdog.init_process_group(os.environ) as leads:
        torch.manual_seed(0)
        config = OPTConfig(hidden_size=768, ffn_dim=3072, num_attention_heads=12, num_hidden_layers=BLOCKS, dropout=0.0)
        model = AutoModelForCausalLM.from_config(config).eval()
        windows = torch.randint(config.vocab_size, (WINDOWS, LENGTH), generator=torch.Generator().manual_seed(1))
        for block, inputs in walk(
            model, split_batches(windows[: collectives.world()], 1), stop=1
        ):  # the first pass is no measure
            collect_statistics(block, inputs, dict.fromkeys(block.layers, Gram))
        sent = collectives.bytes_sent()
        collectives.broadcast_object(None)
        started = time.perf_counter()
        for block, inputs in walk(model, split_batches(windows, BATCH)):
            for moments in collect_statistics(block, inputs, dict.fromkeys(block.layers, Gram)).values():
                assert isinstance(moments, Gram)
                moments.mean.sum()  # waits for the sums
        collectives.broadcast_object(None)
        if leads:
            told = {
                "seconds": time.perf_counter() - started,
                "bytes": (collectives.bytes_sent() - sent) / len(blocks_of(model)),
            }
            print(json.dumps(told))


def measure(counts: list[int]) -> None:
    """Each number of processes in its turn."""
    found: dict[str, list[dict[str, float]]] = {str(count): [] for count in counts}
    for _ in range(RUNS):
        for count in counts:
            words = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--standalone",
                "--nproc-per-node",
                str(count),
                __file__,
                "work",
            ]
            ran = subprocess.run(words, env=os.environ | {"OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=True)
            found[str(count)].append(json.loads(ran.stdout))
            print(count, ran.stdout.strip(), file=sys.stderr)
    machine = f"{processor()}, one thread a process, torch {torch.__version__}"
    FILE.write_text(json.dumps({"machine": machine, "runs": found}, indent=1) + "\n")


def table() -> list[str]:
    """The measured gain, as lines of Markdown."""
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
"""Assumed, not measured: operations a second in 16-bit products and in float32 factorisations, bytes a second between GPUs."""


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
    words = parser.parse_args()
    if words.command == "measure":
        measure(words.processes)
    elif words.command == "work":
        work()
    else:
        print("\n".join(table() if words.command == "table" else costs()))


if __name__ == "__main__":
    main()
