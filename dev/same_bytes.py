"""Compare what two revisions of this package write: `python dev/same_bytes.py REV`.

Checks REV out beside this tree, runs the recipes below with both, one thread each, and compares the sha256 of every tensor in
every output. Each tree runs its own copy of this script, or this one where it has none, so that a recipe may be spelled in the
words of its revision; recipes are matched by name. Other processors round differently, so no digests are stored.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

TEXT = ("--calibration", "demo", "--samples", "8", "--sequence-length", "64")
MEASURED = ("--evaluate", "demo", "--evaluate-limit", "16")

OPT, LLAMA = "demo:opt", "demo:llama"
EXPERTS, CONV1D, BFLOAT16 = "{models}/experts", "{models}/conv1d", "{models}/bfloat16"
"""Random models that `make_models` writes: a mixture of experts, a GPT-2, and a Llama in bfloat16 whose head is not tied."""


def prune(model: str, *options: str, out: str = "{out}") -> tuple[str, ...]:
    """Words of a `prune` command."""
    return ("prune", model, out, *options, *TEXT)


PRUNED, ROUNDED = "{shared}/pruned", "{shared}/rounded"
"""Outputs of first commands. They are written once, for all recipes that begin with them."""

FIRST = prune(LLAMA, "--method", "wanda", "--sparsity", "70%", out=PRUNED)
INTEGERS = prune(LLAMA, "--method", "sparsegpt", "--sparsity", "70%", "--values", "int4", out=ROUNDED)
RECOVERED = ("{out}", "--against", LLAMA, *TEXT)
RECOVER = ("recover", PRUNED, *RECOVERED)

RECIPES: dict[str, tuple[tuple[str, ...], ...]] = {
    "magnitude 2:4": (prune(OPT, "--method", "magnitude", "--sparsity", "2:4"),),
    "wanda 70 %": (prune(LLAMA, "--method", "wanda", "--sparsity", "70%"),),
    "wanda 50 %, OWL": (prune(OPT, "--method", "wanda", "--sparsity", "50%", "--allocation", "owl"),),
    "SparseGPT 70 %": (prune(OPT, "--method", "sparsegpt", "--sparsity", "70%"),),
    "SparseGPT 2:4, true sequential": (
        prune(LLAMA, "--method", "sparsegpt", "--sparsity", "2:4", "--set", "true_sequential=true"),
    ),
    "SparseGPT 60 %, GPT-2": (prune(CONV1D, "--method", "sparsegpt", "--sparsity", "60%"),),
    "SparseGPT 4:8, experts": (prune(EXPERTS, "--method", "sparsegpt", "--sparsity", "4:8"),),
    "SparseGPT 70 %, with the head": (
        prune(BFLOAT16, "--method", "sparsegpt", "--sparsity", "70%", "--include", "Linear", "--include", "lm_head"),
    ),
    "SparseGPT 50 %, some layers, zeros kept": (
        FIRST,
        prune(
            PRUNED,
            "--method",
            "sparsegpt",
            "--sparsity",
            "80%",
            "--keep-zeros",
            "--exclude",
            "re:.*down_proj",
            "--blocks",
            "0:2",
        ),
    ),
    "SparseGPT, int8": (prune(OPT, "--method", "sparsegpt", "--sparsity", "50%", "--values", "int8"),),
    "ALPS 70 %": (prune(LLAMA, "--method", "alps", "--sparsity", "70%"),),
    "ALPS 2:4, accurate": (prune(OPT, "--method", "alps-accurate", "--sparsity", "2:4"),),
    "ALPS 70 %, int3": (prune(LLAMA, "--method", "alps", "--sparsity", "70%", "--values", "int3"),),
    "fast ADMM 70 %": (prune(LLAMA, "--method", "fast-admm", "--sparsity", "70%"),),
    "SparseLLM 70 %": (prune(OPT, "--sparsity", "70%"),),
    "SparseLLM 2:4": (prune(LLAMA, "--sparsity", "2:4"),),
    "SparseLLM 80 %, fast": (prune(LLAMA, "--sparsity", "80%", "--effort", "fast"),),
    "SparseLLM 70 %, best": (prune(OPT, "--sparsity", "70%", "--effort", "best", "--blocks", "0:1"),),
    "SparseLLM 60 %, experts": (prune(EXPERTS, "--sparsity", "60%", "--effort", "fast"),),
    "SparseLLM 60 %, GPT-2": (prune(CONV1D, "--sparsity", "60%", "--effort", "fast"),),
    "SparseLLM 70 %, bfloat16": (prune(BFLOAT16, "--sparsity", "70%", "--effort", "fast"),),
    "SparseLLM 70 %, int4": (prune(OPT, "--sparsity", "70%", "--values", "int4", "--effort", "fast"),),
    "SparseLLM, 2.5 bits": (prune(LLAMA, "--bits", "2.5", "--effort", "fast"),),
    "SparseLLM, 4.125 bits": (prune(OPT, "--bits", "4.125", "--effort", "fast"),),
    "Algorithm 1 70 %": (prune(OPT, "--method", "algorithm1", "--sparsity", "70%"),),
    "Algorithm 1 60 %, two epochs": (prune(LLAMA, "--method", "algorithm1", "--sparsity", "60%", "--set", "epochs=2"),),
    "SparseLLM 70 %, streamed, killed and resumed": (prune(LLAMA, "--sparsity", "70%", "--offload"),),
    "SparseGPT 60 %, streamed experts, killed and resumed": (
        prune(EXPERTS, "--method", "sparsegpt", "--sparsity", "60%", "--offload"),
    ),
    "SparseGPT 70 %, two processes": (prune(LLAMA, "--method", "sparsegpt", "--sparsity", "70%"),),
    "SparseLLM 60 %, two processes, streamed": (prune(OPT, "--sparsity", "60%", "--effort", "fast", "--offload"),),
    "two sparsities, whole documents": (
        prune(OPT, "--method", "sparsegpt", "--sparsity", "50%,60%", "--documents", "whole", "--bos", "yes"),
    ),
    "recover, blocks": (FIRST, (*RECOVER, "--scope", "block", "--steps", "8")),
    "recover, the whole model": (FIRST, (*RECOVER, "--steps", "12")),
    "recover, LoRA": (FIRST, (*RECOVER, "--train", "lora", "--steps", "12")),
    "recover, integers": (INTEGERS, ("recover", ROUNDED, *RECOVERED, "--steps", "8")),
    "search": (
        (
            "search",
            OPT,
            "{out}",
            "--method",
            "sparsegpt",
            "--max-perplexity-increase",
            "10%",
            "--step",
            "10%",
            *TEXT,
            *MEASURED,
        ),
    ),
    "pack and unpack": (FIRST, ("pack", PRUNED, "{out}"), ("unpack", "{out}", "{out}-unpacked")),
    "pack and unpack, integers": (INTEGERS, ("pack", ROUNDED, "{out}"), ("unpack", "{out}", "{out}-unpacked")),
    "export": (INTEGERS, ("export", ROUNDED, "{out}")),
    "sweep": (("sweep", "{models}/sweep.yaml", "{out}"),),
}
"""By name, the commands of a recipe. "killed" and "two processes" in a name say how its command is run."""

SWEEP = """\
recipe: {calibration: demo, samples: 4, sequence_length: 64, evaluate: [demo], evaluate_limit: 8}
model: demo:opt
keep: true
axes:
  method: [magnitude, sparsegpt]
  sparsity: ["50%", "2:4"]
"""


def main() -> int:
    """Compare, or with `--write FOLDER` run every recipe and print the digests; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("revision", nargs="?", default="HEAD", help="the git revision to compare this tree with")
    parser.add_argument("--only", default="", help="run the recipes whose name holds this text")
    parser.add_argument("--write", type=Path, help="write into this folder and print digests as JSON")
    arguments = parser.parse_args()
    if arguments.write:
        print(json.dumps(write(arguments.write, arguments.only)))
        return 0
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / "other"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", other, arguments.revision], cwd=ROOT, check=True)
        try:
            subprocess.run([sys.executable, other / "hatch_build.py"], stdout=subprocess.DEVNULL, check=True)
            with ThreadPoolExecutor(2) as pool:
                runs = [
                    pool.submit(digests, tree, Path(folder) / name, arguments.only)
                    for tree, name in ((ROOT, "a"), (other, "b"))
                ]
            here, there = (run.result() for run in runs)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", other], cwd=ROOT, check=True)
    status = compare(here, there, arguments.revision)
    print(f"{len(here)} recipes in {time.perf_counter() - started:.0f} s")
    return status


def digests(tree: Path, folder: Path, only: str) -> dict[str, dict[str, str]]:
    """By recipe and tensor, the sha256 of what a tree's own copy of this script writes."""
    own = tree / "dev" / "same_bytes.py"
    words = [sys.executable, own if own.exists() else __file__, "--write", folder, "--only", only]
    done = subprocess.run(words, env=environment(tree), stdout=subprocess.PIPE, text=True, check=True)
    digests: dict[str, dict[str, str]] = json.loads(done.stdout.splitlines()[-1])
    return digests


def environment(tree: Path) -> dict[str, str]:
    """Environment variables with which Python imports the tree's package and computes on one thread."""
    return os.environ | {"PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def compare(here: dict[str, dict[str, str]], there: dict[str, dict[str, str]], revision: str) -> int:
    """Print a line for each recipe; 1 where a tensor differs, or a recipe of the other revision is missing here."""
    status = 0
    for name in sorted(here.keys() | there.keys()):
        first, second = here.get(name, {}), there.get(name, {})
        differing = sorted(tensor for tensor in first.keys() | second.keys() if first.get(tensor) != second.get(tensor))
        if first and not second:
            print(f"{name}: new")
            continue
        if differing:
            status = 1
        state = f"{len(differing)} of {len(first)} tensors differ, {differing[0]} first" if differing else "same bytes"
        print(f"{name}: {state if first else 'missing'}")
    print(f"compared with {revision}: {'different' if status else 'the same'}")
    return status


def write(folder: Path, only: str) -> dict[str, dict[str, str]]:
    """Run every recipe in the folder; by recipe and tensor, the sha256."""
    folder.mkdir(parents=True, exist_ok=True)
    make_models(folder / "models")
    found: dict[str, dict[str, str]] = {}
    for number, (name, commands) in enumerate((name, commands) for name, commands in RECIPES.items() if only in name):
        own = folder / str(number)
        own.mkdir()
        names = {"out": own / "out", "models": folder / "models", "shared": folder}
        started = time.perf_counter()
        for words in ([word.format(**names) for word in words] for words in commands):
            output = Path(words[2])
            if not output.exists():
                run(name, words, output)
        found[name] = tensor_digests(own)
        if not found[name]:
            raise RuntimeError(f"{name}: no tensors in {own}")
        print(f"{name}: {time.perf_counter() - started:.1f} s", file=sys.stderr)
    return found


def run(name: str, words: list[str], output: Path) -> None:
    """Run a command of a recipe in the way that the recipe's name says."""
    words = ["-m", "sparsellm", *words]
    if "two processes" in name:
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words]
    if "killed" in name:
        kill_after_a_block([sys.executable, *words], output)
        words.append("--resume")
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{name}: status {done.returncode}\n{done.stderr}")


def kill_after_a_block(words: Sequence[str], output: Path) -> None:
    """Start a run and kill it once its first block is finished."""
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not list(output.glob(".sparsellm/block-*.safetensors")):
        if process.poll() is not None:
            raise RuntimeError(f"The run ended with status {process.returncode} before it could be killed.")
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()


def make_models(folder: Path) -> None:
    """Write the random models, which are the same for every revision, and the file of the sweep."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from sparsellm.texts.demo import model_path

    tokenizer = AutoTokenizer.from_pretrained(model_path("llama"))
    size = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 16}
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "experts": ("qwen3_moe", size | experts),
        "conv1d": ("gpt2", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128}),
        "bfloat16": ("llama", size | {"tie_word_embeddings": False}),
    }
    for name, (kind, settings) in kinds.items():
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, vocab_size=len(tokenizer), max_position_embeddings=128, **settings)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():  # the usual initialization makes every token as likely as another
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(4)
        model.to(torch.bfloat16 if name == "bfloat16" else torch.float32).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    (folder / "sweep.yaml").write_text(SWEEP, encoding="utf-8")


def tensor_digests(folder: Path) -> dict[str, str]:
    """By file and name, the sha256 of every tensor's bytes in a folder, with its dtype and shape."""
    import torch
    from safetensors import safe_open

    found: dict[str, str] = {}
    for file in sorted(folder.rglob("*.safetensors")):
        with safe_open(file, framework="pt") as stream:
            for name in stream.keys():  # noqa: SIM118  (a file, not a dict)
                tensor = stream.get_tensor(name).contiguous()
                digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
                digest.update(tensor.flatten().view(dtype=torch.uint8).numpy().tobytes())
                found[f"{file.relative_to(folder)} {name}"] = digest.hexdigest()
    return found


if __name__ == "__main__":
    sys.exit(main())
