"""What a run depends on, as data that can be compared: recipe, contents of the model's files, calibration tokens, machine."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsellm._version import __version__
from sparsellm.checkpoints.files import card_terms
from sparsellm.checkpoints.loading import Checkpoint, InMemoryModel
from sparsellm.runs.recipe import RunRecipe
from sparsellm.runs.registry import ALLOCATIONS
from sparsellm.runtime import devices
from sparsellm.solvers import sparsegpt_triton

NOT_DECISIVE = ("max_memory", "offload", "evaluate", "evaluate_limit", "prompt", "task", "task_data", "task_limit")
"""Fields of a recipe that may differ when a run goes on: they do not change the weights."""

SETTINGS = (".json", ".txt", ".jinja", ".model", ".tiktoken")
"""How names of files end that hold a configuration, a tokenizer or a chat template."""

PACKAGES = ("torch", "transformers", "safetensors", "tokenizers", "numpy")
"""Whose versions may change a result."""

READERS = 8
"""The most files that are digested at the same time: a disk that is faster than one processor is not kept waiting."""


def environment(device: torch.device) -> dict[str, str]:
    """The versions and the machine that a result may depend on."""
    found = {"sparsellm": __version__} | {package: version(package) for package in PACKAGES}
    if sparsegpt_triton.is_available(device):
        found["column loop"] = sparsegpt_triton.compiler_version()
    return found | {
        "python": platform.python_version(),
        "system": platform.system(),
        "device": f"{device} ({devices.name_of(device)})",
        "threads": str(torch.get_num_threads()),
    }


def fingerprint(
    recipe: RunRecipe, source: Checkpoint | InMemoryModel, windows: Tensor, environment: Mapping[str, str]
) -> dict[str, Any]:
    """What must be the same for a run to go on: recipe, model, calibration tokens, and the versions and machine.

    Of every file that the recipe names, and of every file of the model that comes into the output or decides tokens, the
    contents count: not its time, nor where it is. How many processes and threads there are may differ: sums then round
    otherwise, which the run notes.
    """
    decisive = {f"recipe.{name}": value for name, value in recipe.model_dump(mode="json").items() if name not in NOT_DECISIVE}
    if recipe.sharing not in ALLOCATIONS:
        decisive["contents of `allocation`"] = contents(Path(recipe.sharing))
    if isinstance(source, Checkpoint):
        decisive |= model_fingerprint(source)
    decisive["calibration tokens"] = token_digest(windows)
    return decisive | {f"environment.{name}": value for name, value in environment.items() if name != "threads"}


def model_fingerprint(source: Checkpoint) -> dict[str, Any]:
    """What tells a model from others: the contents of its files, the terms in its card, and its form as its user describes it.

    Every byte of the weights is read, once for each process.
    """
    folder = source.folder
    settings = [file for file in (*folder.iterdir(), *folder.glob("*/*.jinja")) if file.suffix in SETTINGS and file.is_file()]
    files = sorted({*source.files(), *settings, *source.extra_files()})
    with ThreadPoolExecutor(min(READERS, os.cpu_count() or 1)) as pool:
        found: dict[str, Any] = {
            f"file {file.relative_to(folder)}": message for file, message in zip(files, pool.map(contents, files), strict=True)
        }
    found["terms in README.md"] = card_terms(folder)
    if source.architecture is not None:
        found["contents of `architecture`"] = repr(source.architecture)
    return found


def contents(file: Path) -> str:
    """A file's size and a digest of all that it holds, in words. Read again in this process only where the file has changed."""
    stat = file.stat()
    return f"{stat.st_size:,} bytes, SHA-256 {_digest(file, stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns)}"


@lru_cache(maxsize=4096)
def _digest(file: Path, *_: int) -> str:
    """The digest of a file, by what the system says of it: the time of its last change cannot be set by programs."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()[:32]


def token_digest(windows: Tensor) -> str:
    """A digest of token numbers."""
    return hashlib.blake2b(windows.numpy().tobytes(), digest_size=16).hexdigest()
