"""Compare the tensors that two revisions of this package write: `python dev/same_bytes.py REV`.

Checks REV out beside this tree, prunes the two bundled models by the recipes below with both, one thread each, and compares the
sha256 of every tensor. Each tree runs its own copy of this script (or this one, where it has none), so that a recipe may be
spelled in the words of its revision; recipes are matched by name. Other processors round differently, so no digests are stored.
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
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

CALIBRATION = ("--calibration", "demo", "--samples", "8", "--sequence-length", "64", "--device", "cpu")
"""What every recipe calibrates on."""

RECIPES: dict[str, tuple[str, ...]] = {
    "magnitude 2:4": ("demo:opt", "--method", "magnitude", "--sparsity", "2:4"),
    "wanda 70 %": ("demo:llama", "--method", "wanda", "--sparsity", "70%"),
    "SparseGPT 70 %": ("demo:opt", "--method", "sparsegpt", "--sparsity", "70%"),
    "SparseGPT 2:4, true sequential": ("demo:llama", "--method", "sparsegpt", "--sparsity", "2:4", "--true-sequential"),
    "ALPS 70 %": ("demo:llama", "--method", "alps", "--sparsity", "70%"),
    "ALPS 2:4, accurate": ("demo:opt", "--method", "alps-accurate", "--sparsity", "2:4"),
    "fast ADMM 70 %": ("demo:llama", "--method", "fast-admm", "--sparsity", "70%"),
    "SparseLLM 70 %": ("demo:opt", "--sparsity", "70%"),
    "SparseLLM 2:4": ("demo:llama", "--sparsity", "2:4"),
    "Algorithm 1 70 %": ("demo:opt", "--as-published", "--sparsity", "70%"),
    "SparseLLM 70 %, streamed, killed and resumed": ("demo:llama", "--sparsity", "70%", "--offload"),
    "SparseGPT 70 %, two processes": ("demo:llama", "--method", "sparsegpt", "--sparsity", "70%"),
}
"""By name, the model and options of a run. "killed" and "two processes" in a name say how it is run."""


def main() -> int:
    """Compare, or with `--write FOLDER` prune by every recipe and print the digests; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("revision", nargs="?", default="HEAD", help="the git revision to compare this tree with")
    parser.add_argument("--only", default="", help="run the recipes whose name holds this text")
    parser.add_argument("--write", type=Path, help="prune into this folder and print digests as JSON")
    arguments = parser.parse_args()
    if arguments.write:
        print(json.dumps(write(arguments.write, arguments.only)))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / "other"
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", other, arguments.revision], cwd=ROOT, check=True)
        try:
            here, there = (digests(tree, Path(folder) / name, arguments.only) for tree, name in ((ROOT, "a"), (other, "b")))
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", other], cwd=ROOT, check=True)
    return compare(here, there, arguments.revision)


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
    """Print a line for each recipe; 1 where a tensor differs or a recipe is missing on either side."""
    status = 0
    for name in sorted(here.keys() | there.keys()):
        first, second = here.get(name, {}), there.get(name, {})
        differing = sorted(tensor for tensor in first.keys() | second.keys() if first.get(tensor) != second.get(tensor))
        if differing or not first:
            status = 1
        state = f"{len(differing)} of {len(first)} tensors differ, {differing[0]} first" if differing else "same bytes"
        print(f"{name}: {state if first and second else 'missing on one side'}")
    print(f"compared with {revision}: {'different' if status else 'the same'}")
    return status


def write(folder: Path, only: str) -> dict[str, dict[str, str]]:
    """Prune by every recipe into the folder; by recipe and tensor, the sha256."""
    found: dict[str, dict[str, str]] = {}
    for number, (name, words) in enumerate((name, words) for name, words in RECIPES.items() if only in name):
        output = folder / str(number)
        started = time.perf_counter()
        prune = ["-m", "sparsellm", "prune", words[0], str(output), *words[1:], *CALIBRATION]
        if "two processes" in name:
            prune = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *prune]
        if "killed" in name:
            kill_after_a_block([sys.executable, *prune], output)
            prune.append("--resume")
        done = subprocess.run([sys.executable, *prune], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{name}: status {done.returncode}\n{done.stderr}")
        found[name] = tensor_digests(output)
        print(f"{name}: {time.perf_counter() - started:.1f} s", file=sys.stderr)
    return found


def kill_after_a_block(words: Sequence[str], output: Path) -> None:
    """Start a run and kill it once its first block is finished."""
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not list(output.glob(".sparsellm/block-*.safetensors")):
        if process.poll() is not None:
            raise RuntimeError(f"The run ended with status {process.returncode} before it could be killed.")
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()


def tensor_digests(folder: Path) -> dict[str, str]:
    """By name, the sha256 of every tensor's bytes, with its dtype and shape."""
    import torch
    from safetensors import safe_open

    found: dict[str, str] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as stream:
            for name in stream.keys():  # noqa: SIM118  (a file, not a dict)
                tensor = stream.get_tensor(name).contiguous()
                digest = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
                digest.update(tensor.flatten().view(dtype=torch.uint8).numpy().tobytes())
                found[name] = digest.hexdigest()
    return found


if __name__ == "__main__":
    sys.exit(main())
