"""The time of each phase, and the race against llm-compressor: docs/results.md.

    python benchmarks/speed.py phases --shape opt-125m --blocks 3
    python benchmarks/speed.py phases --shape PATH/wt2-llama
    python benchmarks/speed.py scaling
    python benchmarks/speed.py race --peer PEER/bin/python --script race_llmcompressor.py --text TEXT
    python benchmarks/speed.py race --shape tinyllama-1.1b --blocks 1 --windows 16    # without the peer
    python benchmarks/speed.py memory
    python benchmarks/speed.py tables

Models have the named shapes and random weights. For `race`, PEER is a separate environment with
`pip install torch==2.13.0 llmcompressor==0.14.0.1`. Every program gets the same model, windows and threads, in turn. The
seconds are those that it reports for pruning, without loading and writing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from clock import PHASES, Phases, best, instrumented
from measuring import arguments, peak, program, read_figures, record, write_random_model
from speed_tables import FILE, LENGTH, PEER, best_peer, tables
from transformers import AutoConfig

from sparsellm.cli.allocator import manage_memory
from sparsellm.observers.events import Stage, combine_observers
from sparsellm.outputs.journal import work_directory
from sparsellm.pipeline.prune import prune_run
from sparsellm.recipes.file import read_recipe
from sparsellm.runtime.memory import peak_memory

SHAPES: dict[str, dict[str, Any]] = {
    "opt-125m": {"family": "opt", "hidden_size": 768, "ffn_dim": 3072, "num_attention_heads": 12, "vocab_size": 50272},
    "llama-160m": {
        "family": "llama",
        "hidden_size": 768,
        "intermediate_size": 3072,
        "num_attention_heads": 12,
        "vocab_size": 32000,
    },
    "llama-3.2-1b": {
        "family": "llama",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
        "dtype": torch.bfloat16,
    },
    "tinyllama-1.1b": {
        "family": "llama",
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "vocab_size": 32000,
        "dtype": torch.bfloat16,
    },
}
"""The shapes of facebook/opt-125m and JackFram/llama-160m (twelve blocks each), Llama-3.2-1B (16) and TinyLlama-1.1B (22)."""

OURS = {"method": "sparsellm"}


def layer_by_layer(solver: str) -> dict[str, Any]:
    """The recipe of the default with each layer pruned alone by a solver."""
    return OURS | {"settings": {"scope": "none", "solver": solver}}


METHODS: dict[str, dict[str, Any]] = {
    "SparseGPT": {"method": "sparsegpt"},
    "SparseGPT, products in bfloat16": {"method": "sparsegpt", "compute_dtype": "bfloat16"},
    "SparseGPT, read block by block": {"method": "sparsegpt", "offload": True},
    "SparseGPT, read block by block, products in bfloat16": {
        "method": "sparsegpt",
        "offload": True,
        "compute_dtype": "bfloat16",
    },
    "SparseGPT, true-sequential": {"method": "sparsegpt", "settings": {"true_sequential": True}},
    "SparseGPT, true-sequential, read block by block, --max-memory 1GB": {
        "method": "sparsegpt",
        "settings": {"true_sequential": True},
        "offload": True,
        "max_memory": "1GB",
    },
    "fast-admm": {"method": "fast-admm"},
    "fast-admm, true-sequential": {"method": "fast-admm", "settings": {"true_sequential": True}},
    "ALPS": {"method": "alps"},
    "Algorithm 1": {"method": "algorithm1"},
    "Algorithm 1, products in bfloat16": {"method": "algorithm1", "compute_dtype": "bfloat16"},
    "default": OURS,
    "default, without Gauss-Newton, fast-admm inside": OURS | {"settings": {"rounds": 0, "solver": "fast-admm"}},
    "default, without Gauss-Newton, ALPS inside": OURS | {"settings": {"rounds": 0, "solver": "alps"}},
    "default, scope none, ALPS inside": layer_by_layer("alps"),
    "default, scope none, fast-admm inside": layer_by_layer("fast-admm"),
    "default, scope none, fast-admm inside, products in bfloat16": layer_by_layer("fast-admm") | {"compute_dtype": "bfloat16"},
    "default, scope none, fast-admm inside, uniform": layer_by_layer("fast-admm") | {"allocation": "uniform"},
    "default, scope none, SparseGPT inside": layer_by_layer("sparsegpt"),
}
"""Those after the default are cheaper variants of it, named as in `excess.py`."""

SCALED_WIDTH = 512
"""Width of the model where tokens, blocks or epochs vary."""

AXES: dict[str, list[dict[str, Any]]] = {
    "tokens": [{"windows": n} for n in (64, 128, 256)],
    "blocks": [{"blocks": n} for n in (4, 8, 16)],
    "width": [{"width": n, "blocks": 1} for n in (256, 512, 1024, 2048)],
    "epochs": [{"epochs": n} for n in (2, 4, 8)],
}
"""By axis, its points."""


def make(folder: Path, shape: str, blocks: int, *, width: int | None = None) -> Path:
    """Write a model of a shape, or of another width, with random weights; returns its folder."""
    sizes = dict(SHAPES[shape])
    family, dtype = sizes.pop("family"), sizes.pop("dtype", torch.float32)
    if width is not None:
        wide = "ffn_dim" if family == "opt" else "intermediate_size"
        sizes |= {"hidden_size": width, wide: 4 * width, "num_attention_heads": width // 64}
    if family == "opt":
        sizes["word_embed_proj_dim"] = sizes["hidden_size"]
    sizes |= {"num_hidden_layers": blocks, "max_position_embeddings": 2048}
    write_random_model(folder, AutoConfig.for_model(family, **sizes), dtype)
    return folder


def settings_of(method: Mapping[str, Any], windows: int, length: int = LENGTH) -> dict[str, Any]:
    """The settings of a run of `METHODS` on so many windows."""
    return {"sparsity": "70%", "calibration": "demo", "samples": windows, "sequence_length": length, **method}


def run_one(model: Path, settings: Mapping[str, Any], windows: int, *, count: bool = False) -> dict[str, Any]:
    """Run once in this process.

    Args:
        model: Folder of the model.
        settings: An entry of `METHODS`.
        windows: Calibration windows of 512 tokens, or as many more for a model with a shorter context.
        count: Whether to count operations, too.

    Returns:
        Seconds and work by phase, and the peak memory.
    """
    length = min(LENGTH, AutoConfig.from_pretrained(model).max_position_embeddings)
    recipe = read_recipe({"model": str(model), **settings_of(settings, windows * LENGTH // length, length)})
    phases = Phases(count=count)

    def observe(event: Any) -> None:
        if isinstance(event, Stage):
            phases.stage(event.name)

    with tempfile.TemporaryDirectory() as folder, work_directory(f"{folder}/out", resume=False, restart=False) as work:
        with instrumented(phases.wrap, PHASES), phases if count else torch.no_grad():
            phases.restart()  # after the imports
            result = prune_run(recipe, combine_observers(manage_memory, observe), work=work)
        phases.enter("end")
        result.save_pretrained(f"{folder}/out")
    left_out = {"opening", "reading texts", "loading", "end"}
    seconds = {name: spent for name, spent in phases.seconds.items() if name not in left_out}
    return {
        "seconds": seconds,
        "total": sum(seconds.values()),
        "products": {name: spent for name, spent in phases.products.items() if name not in left_out},
        "operations": dict(phases.operations),
        "bytes": dict(phases.bytes),
        "memory": peak_memory(),
        "blocks": len(result.report.blocks),
    }


def run_apart(model: Path, name: str, windows: int, *options: str) -> dict[str, Any]:
    """`run_one` in a process of its own."""
    command = [sys.executable, __file__, "one", str(model), name, str(windows), *options]
    figures: dict[str, Any] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    return figures


def measure_phases(shape: str, blocks: int, windows: int, *, methods: list[str]) -> None:
    """Measure the phases of each method, once plain and once with operations counted."""
    square = torch.randn(1024, 1024)
    for name in methods:
        with tempfile.TemporaryDirectory() as folder:
            model = make(Path(folder, "model"), shape, blocks) if shape in SHAPES else Path(shape)
            cell = {"plain": run_apart(model, name, windows), "counted": run_apart(model, name, windows, "--counted")}
            cell["rate"] = 2 * 1024**3 / best(partial(torch.mm, square, square), torch.device("cpu"))
        depth = blocks if shape in SHAPES else AutoConfig.from_pretrained(shape).num_hidden_layers
        _record("phases", f"{Path(shape).name} | {depth} | {windows} | {name}", cell)


def measure_scaling(methods: list[str], times: int, axes: Sequence[str]) -> None:
    """Measure the seconds of each method along `axes`, all points in turn, several times.

    The number of blocks starts at four: the outputs of the last block are not computed, which of two blocks would be a quarter
    of the passes.
    """
    for name in methods:
        for axis in axes:
            if axis == "epochs" and "published" not in name:
                continue
            seconds: dict[int, list[float]] = defaultdict(list)
            for point in times * AXES[axis]:
                with tempfile.TemporaryDirectory() as folder:
                    width = point.get("width", SCALED_WIDTH)
                    model = make(Path(folder, "model"), "opt-125m", point.get("blocks", 2), width=width)
                    options = ["--epochs", str(point["epochs"])] if "epochs" in point else []
                    figures = run_apart(model, name, point.get("windows", 16), *options)
                seconds[next(iter(point.values()))].append(figures["total"])
            for value, measured in seconds.items():
                _record("scaling", f"{name} | {axis} | {value}", measured)


def measure_memory(shape: str, blocks: int, windows: int, *, methods: list[str]) -> None:
    """Measure the peak memory of the command that a user runs, without timing its phases."""
    with tempfile.TemporaryDirectory() as folder:
        model = make(Path(folder, "model"), shape, blocks)
        for name in methods:
            recipe = Path(folder, "recipe.yaml")
            recipe.write_text(json.dumps({"model": str(model), **settings_of(METHODS[name], windows)}))
            command = [*program(), *arguments("prune", f"{folder}/out", config=recipe, overwrite=True)]
            _record("memory", f"{shape} | {blocks} | {windows} | {name}", peak(command)[0])


def race(shape: str, blocks: int, windows: int, *, times: int, methods: list[str], peer: str, script: str, text: str) -> None:
    """Measure our methods, and the peer's SparseGPT if there is one, in turn: seconds of pruning and the process's peak memory.

    The peer runs with batch sizes 1 and 8; after the first round only with the faster one. An interrupted race is continued.
    """
    threads = str(torch.get_num_threads())
    key = f"{shape} | {blocks} | {windows} | {threads}"
    rounds: dict[str, list[dict[str, float]]] = read_figures(FILE).get("race", {}).get(key, {})
    with tempfile.TemporaryDirectory() as folder:
        model = make(Path(folder, "model"), shape, blocks)
        for number in range(1, times + 1):
            peers = [f"{PEER}, batch {batch}" for batch in (1, 8)] if peer else []
            for name in (*peers, *methods):
                is_slower_peer = name not in methods and number > 1 and name != best_peer(rounds)
                if is_slower_peer or len(rounds.get(name, [])) >= number:
                    continue
                if name.startswith(PEER):
                    command = [
                        peer,
                        script,
                        "--model",
                        str(model),
                        "--text",
                        text,
                        "--sparsity",
                        "0.7",
                        "--out",
                        f"{folder}/out",
                    ]
                    command += ["--nsamples", str(windows), "--seqlen", str(LENGTH), "--batch", name.rsplit(" ", 1)[1]]
                    environment = os.environ | {"OMP_NUM_THREADS": threads}
                    output = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
                    result = json.loads(output[output.index("{\n") :])
                    figures = {"seconds": result["seconds"], "memory": result["peak_rss_MB"] * 2**20}
                    shutil.rmtree(f"{folder}/out")
                else:
                    result = run_apart(model, name, windows)
                    figures = {"seconds": result["total"], "memory": result["memory"]}
                rounds.setdefault(name, []).append(figures)
                _record("race", key, rounds)


def _record(table: str, key: str, figure: Any) -> None:
    """Add one figure to a table of the file."""
    record(FILE, table, read_figures(FILE).get(table, {}) | {key: figure})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    functions = {"phases": measure_phases, "scaling": measure_scaling, "memory": measure_memory, "race": race}
    for command in functions:
        options = commands.add_parser(command)
        if command != "scaling":
            options.add_argument("--shape", default="opt-125m")
            options.add_argument("--blocks", type=int, default=3 if command == "phases" else 12)
            options.add_argument("--windows", type=int, default=32)
        options.add_argument("--methods", nargs="+", default=list(METHODS))
        if command == "scaling":
            options.add_argument("--axes", nargs="+", default=list(AXES), choices=list(AXES))
        if command in ("scaling", "race"):
            options.add_argument("--times", type=int, default=3)
    for option in ("--peer", "--script", "--text"):
        options.add_argument(option, default="")
    one = commands.add_parser("one", help="one run, printed as JSON")
    one.add_argument("model", type=Path)
    one.add_argument("method", choices=list(METHODS))
    one.add_argument("windows", type=int)
    one.add_argument("--epochs", type=int)
    one.add_argument("--counted", action="store_true")
    commands.add_parser("tables")
    settings = vars(parser.parse_args())
    command = settings.pop("command")
    if command == "tables":
        print("\n".join(tables()))
    elif command == "one":
        epochs = {} if settings["epochs"] is None else {"settings": {"epochs": settings["epochs"]}}
        method = METHODS[settings["method"]] | epochs
        print(json.dumps(run_one(settings["model"], method, settings["windows"], count=settings["counted"])))
    else:
        functions[command](**settings)


if __name__ == "__main__":
    main()
