"""Where the time goes, and the race against llm-compressor: docs/results.md.

    python benchmarks/speed.py phases --shape opt-125m --blocks 3
    python benchmarks/speed.py phases --shape PATH/wt2-llama
    python benchmarks/speed.py scaling
    python benchmarks/speed.py race --peer PEER/bin/python --script race_llmcompressor.py --text TEXT
    python benchmarks/speed.py memory
    python benchmarks/speed.py tables

Models have the named shapes and random weights, which time does not care about. For `race`, PEER is an environment of its own
with `pip install torch==2.13.0 llmcompressor==0.14.0.1`; every program gets the same model, windows and threads, each in turn,
and what it says of its own pruning counts, not the loading or writing.
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
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from clock import PHASES, Phases, watched
from results import processor
from speed_tables import FILE, LENGTH, PEER, best_peer, tables
from transformers import AutoConfig

from sparsellm.cli.allocator import manage_memory
from sparsellm.data.demo import model_path
from sparsellm.runs.costs import rates
from sparsellm.runs.events import Stage, combine_observers
from sparsellm.runs.recipe_file import read_recipe
from sparsellm.runs.run import run
from sparsellm.runs.workspace import work_directory
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
}
"""Of facebook/opt-125m and JackFram/llama-160m, which have twelve blocks each."""

OURS = {"method": "sparsellm"}
LAYER_BY_LAYER = OURS | {"scope": "none", "solver": "alps"}

METHODS: dict[str, dict[str, Any]] = {
    "SparseGPT": {"method": "sparsegpt"},
    "SparseGPT, read block by block": {"method": "sparsegpt", "offload": True},
    "SparseGPT, true-sequential": {"method": "sparsegpt", "true_sequential": True},
    "SparseGPT, true-sequential, read block by block, --max-memory 1GB": {
        "method": "sparsegpt",
        "true_sequential": True,
        "offload": True,
        "max_memory": "1GB",
    },
    "Swift": {"method": "fast-admm"},
    "Swift, true-sequential": {"method": "fast-admm", "true_sequential": True},
    "ALPS": {"method": "alps"},
    "SparseLLM as published, 4 epochs": {"method": "sparsellm", "as_published": True},
    "default": OURS,
    "default, without Gauss-Newton, fast-admm inside": OURS | {"gauss_newton_steps": 0, "solver": "fast-admm"},
    "default, without Gauss-Newton, ALPS inside": OURS | {"gauss_newton_steps": 0, "solver": "alps"},
    "default, scope none, ALPS inside": LAYER_BY_LAYER,
    "default, scope none, fast-admm inside": LAYER_BY_LAYER | {"solver": "fast-admm"},
    "default, scope none, fast-admm inside, uniform": LAYER_BY_LAYER | {"solver": "fast-admm", "allocation": "uniform"},
    "default, scope none, SparseGPT inside": LAYER_BY_LAYER | {"solver": "sparsegpt"},
}
"""Those behind the default are cheaper forms of it, with their names in `excess.py`."""

SPARSITY = "70%"

SCALED_WIDTH = 512
"""Of the model whose tokens, blocks and epochs grow."""

AXES: dict[str, list[dict[str, Any]]] = {
    "tokens": [{"windows": n} for n in (64, 128, 256)],
    "blocks": [{"blocks": n} for n in (4, 8, 16)],
    "width": [{"width": n} for n in (256, 512, 1024)],
    "epochs": [{"epochs": n} for n in (2, 4, 8)],
}
"""What grows, and to what: doubled twice."""


def make(folder: Path, shape: str, blocks: int, width: int | None = None) -> Path:
    """A model of that shape with random weights, and the demo's tokenizer. width: another than the shape's."""
    from transformers import LlamaConfig, LlamaForCausalLM, OPTConfig, OPTForCausalLM

    sizes = dict(SHAPES[shape])
    family = sizes.pop("family")
    if width is not None:
        wide = "ffn_dim" if family == "opt" else "intermediate_size"
        sizes |= {"hidden_size": width, wide: 4 * width, "num_attention_heads": width // 64}
    shared = sizes | {"num_hidden_layers": blocks, "max_position_embeddings": 2048}
    torch.manual_seed(0)
    if family == "opt":
        model: Any = OPTForCausalLM(OPTConfig(**shared, word_embed_proj_dim=sizes["hidden_size"]))
    else:
        model = LlamaForCausalLM(LlamaConfig(**shared))
    model.save_pretrained(folder)
    for file in model_path("opt").glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def timed(model: Path, settings: Mapping[str, Any], windows: int, operations: bool = False) -> dict[str, Any]:
    """One run in this process: seconds and what was done by phase. windows: of 512 tokens, or as many more that are shorter."""
    length = min(LENGTH, AutoConfig.from_pretrained(model).max_position_embeddings)
    samples = windows * LENGTH // length
    recipe = read_recipe(
        {
            "model": str(model),
            "sparsity": SPARSITY,
            "calibration": "demo",
            "samples": samples,
            "sequence_length": length,
            **settings,
        }
    )
    phases = Phases(operations)

    def observe(event: Any) -> None:
        if isinstance(event, Stage):
            phases.stage(event.name)

    with tempfile.TemporaryDirectory() as folder, work_directory(f"{folder}/out", resume=False, restart=False) as work:
        with watched(phases.telling, PHASES), phases if operations else torch.no_grad():
            phases.restart()  # the imports are no part of it
            done = run(recipe, combine_observers(manage_memory, observe), work=work)
        phases.enter("end")
        done.save_pretrained(f"{folder}/out")
    left_out = {"opening", "reading texts", "loading", "end"}
    seconds = {name: spent for name, spent in phases.seconds.items() if name not in left_out}
    return {
        "seconds": seconds,
        "total": sum(seconds.values()),
        "products": {name: spent for name, spent in phases.products.items() if name not in left_out},
        "operations": dict(phases.operations),
        "bytes": dict(phases.bytes),
        "memory": peak_memory(),
        "blocks": len(done.report.blocks),
    }


def phases(shape: str, blocks: int, windows: int, methods: list[str]) -> None:
    """Fill the table of phases: each method in a process of its own, once plain and once counted."""
    for name in methods:
        with tempfile.TemporaryDirectory() as folder:
            model = make(Path(folder) / "model", shape, blocks) if shape in SHAPES else Path(shape)
            cell: dict[str, Any] = {}
            for counted in (False, True):
                words = [sys.executable, __file__, "one", str(model), name, str(windows), *(["--counted"] if counted else [])]
                cell["counted" if counted else "plain"] = json.loads(
                    subprocess.run(words, stdout=subprocess.PIPE, check=True).stdout
                )
            cell["rate"] = float(rates(torch.device("cpu"), 2.0)[0])
        deep = blocks if shape in SHAPES else AutoConfig.from_pretrained(shape).num_hidden_layers
        _keep("phases", f"{Path(shape).name} | {deep} | {windows} | {name}", cell)


def scaling(methods: list[str], times: int, axes: Sequence[str]) -> None:
    """Fill the table of exponents: seconds against windows, blocks, width and epochs, each doubled twice, all points in turn so
    many times. axes: which of them.

    Of blocks four at least: the last one's outputs are not made, and of two that is a quarter of the passes.
    """
    for name in methods:
        for axis in axes:
            if axis == "epochs" and "published" not in name:
                continue
            seconds: dict[int, list[float]] = defaultdict(list)
            for point in times * AXES[axis]:
                with tempfile.TemporaryDirectory() as folder:
                    model = make(Path(folder) / "model", "opt-125m", point.get("blocks", 2), point.get("width", SCALED_WIDTH))
                    words = [sys.executable, __file__, "one", str(model), name, str(point.get("windows", 16))]
                    words += ["--epochs", str(point["epochs"])] if "epochs" in point else []
                    found = json.loads(subprocess.run(words, stdout=subprocess.PIPE, check=True).stdout)
                seconds[next(iter(point.values()))].append(found["total"])
            for value, some in seconds.items():
                _keep("scaling", f"{name} | {axis} | {value}", some)


def memory(shape: str, blocks: int, windows: int, methods: list[str]) -> None:
    """Fill in what a race's methods hold at most: the command as a user runs it, without a clock in it."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        # A process of its own: what this one held would count as its children's peak.
        making = get_context("spawn").Process(target=make, args=(model, shape, blocks))
        making.start()
        making.join()
        for name in methods:
            settings = METHODS[name] | {
                "sparsity": SPARSITY,
                "calibration": "demo",
                "samples": windows,
                "sequence_length": LENGTH,
            }
            Path(folder, "recipe.yaml").write_text(json.dumps({"model": str(model), **settings}))
            words = [sys.executable, "-m", "sparsellm", "prune", "--config", f"{folder}/recipe.yaml", "--overwrite"]
            _, status, used = os.wait4(
                subprocess.Popen([*words, str(model), f"{folder}/out"], stdout=subprocess.DEVNULL).pid, 0
            )
            if status:
                raise SystemExit(f"{name} failed.")
            _keep("memory", f"{shape} | {blocks} | {windows} | {name}", used.ru_maxrss * 1024)


def race(shape: str, blocks: int, windows: int, times: int, methods: list[str], peer: str, script: str, text: str) -> None:
    """Our methods and the peer's SparseGPT in turn, so many times: seconds of pruning and peak memory of each process.

    The peer runs in batches of 1 and 8; after the first round only the faster one. A race that was broken off goes on.
    """
    threads = str(torch.get_num_threads())
    key = f"{shape} | {blocks} | {windows} | {threads}"
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    rounds: dict[str, list[dict[str, float]]] = known.get("race", {}).get(key, {})

    def wanted(name: str, number: int) -> bool:
        """Whether a run of this round is still to come; of the peer's, after the first round, the faster only."""
        mine = name in methods or number == 1 or name == best_peer(rounds)
        return mine and len(rounds.get(name, [])) < number

    with tempfile.TemporaryDirectory() as folder:
        model = make(Path(folder) / "model", shape, blocks)
        for number in range(1, times + 1):
            for name in (*(f"{PEER}, batch {batch}" for batch in (1, 8)), *methods):
                if not wanted(name, number):
                    continue
                if name.startswith(PEER):
                    batch = name.rsplit(" ", 1)[1]
                    words = [peer, script, "--model", str(model), "--text", text, "--sparsity", "0.7"]
                    words += ["--nsamples", str(windows), "--seqlen", str(LENGTH), "--batch", batch, "--out", f"{folder}/out"]
                    environment = os.environ | {"OMP_NUM_THREADS": threads}
                    done = subprocess.run(words, capture_output=True, text=True, check=True, env=environment).stdout
                    told = json.loads(done[done.index("{\n") :])
                    found = {"seconds": told["seconds"], "memory": told["peak_rss_MB"] * 2**20}
                    shutil.rmtree(f"{folder}/out")
                else:
                    words = [sys.executable, __file__, "one", str(model), name, str(windows)]
                    one = json.loads(subprocess.run(words, stdout=subprocess.PIPE, check=True).stdout)
                    found = {"seconds": one["total"], "memory": one["memory"]}
                rounds.setdefault(name, []).append(found)
                _keep("race", key, rounds)
                print(name, found, file=sys.stderr, flush=True)


def _keep(table: str, key: str, value: Any) -> None:
    """Write one figure to the file."""
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    known.setdefault(table, {})[key] = value
    known["machine"] = f"{processor()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    FILE.write_text(json.dumps(known, indent=1) + "\n")
    print(table, key, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for command in ("phases", "scaling", "memory", "race"):
        one = commands.add_parser(command)
        if command != "scaling":
            one.add_argument("--shape", default="opt-125m")
            one.add_argument("--blocks", type=int, default=3 if command == "phases" else 12)
            one.add_argument("--windows", type=int, default=32)
        one.add_argument("--methods", nargs="+", default=list(METHODS))
        if command == "scaling":
            one.add_argument("--axes", nargs="+", default=list(AXES), choices=list(AXES))
        if command in ("scaling", "race"):
            one.add_argument("--times", type=int, default=3)
    for word in ("--peer", "--script", "--text"):
        one.add_argument(word, required=True)
    one = commands.add_parser("one", help="a single run, told as JSON")
    one.add_argument("model")
    one.add_argument("method")
    one.add_argument("windows", type=int)
    one.add_argument("--epochs", type=int)
    one.add_argument("--counted", action="store_true")
    commands.add_parser("tables")
    words = parser.parse_args()
    if words.command == "tables":
        print("\n".join(tables()))
    elif words.command == "one":
        more = {} if words.epochs is None else {"epochs": words.epochs}
        print(json.dumps(timed(Path(words.model), METHODS[words.method] | more, words.windows, words.counted)))
    else:
        given = {name: value for name, value in vars(words).items() if name != "command"}
        {"phases": phases, "scaling": scaling, "memory": memory, "race": race}[words.command](**given)


if __name__ == "__main__":
    main()
