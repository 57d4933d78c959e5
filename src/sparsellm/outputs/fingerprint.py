"""The fingerprint of a run, compared on resume."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from sparsellm import __version__
from sparsellm.checkpoints.documents import CONFIG_FILE
from sparsellm.checkpoints.files import card_terms
from sparsellm.checkpoints.loading import Checkpoint, InMemoryModel
from sparsellm.outputs.folder import ANEW, LOG
from sparsellm.outputs.journal import OF_RECIPE
from sparsellm.recipes.fields import RunFields, fields_with
from sparsellm.recipes.recipe import RunRecipe
from sparsellm.runtime import devices
from sparsellm.solvers import sparsegpt
from sparsellm.texts.padding import token_digest

Value = TypeVar("Value")

NOT_DECISIVE = fields_with(RunFields, "memory", "measured")
"""Recipe fields that may differ on resume, since they do not change the weights."""

PACKAGES = ("torch", "transformers", "safetensors", "tokenizers", "numpy")
"""Packages whose versions may change a result."""

DIGEST_THREADS = 8
"""Most files to digest in parallel: one thread cannot saturate a fast disk."""


def environment(device: torch.device) -> dict[str, str]:
    """Versions and machine properties that a result may depend on."""
    # Not what importlib.metadata finds, which after a broken update may be another version than the one that is imported.
    result = {"sparsellm": __version__} | {package: str(import_module(package).__version__) for package in PACKAGES}
    if sparsegpt.has_kernel(device):
        result["column loop"] = sparsegpt.kernel_compiler()
    return result | {
        "python": platform.python_version(),
        "system": platform.system(),
        "device": f"{device} ({devices.name_of(device)})",
        "threads": str(torch.get_num_threads()),
    }


def fingerprint(
    recipe: RunRecipe, source: Checkpoint | InMemoryModel, *, windows: Tensor, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Compute what must be unchanged for a run to be resumed.

    Files are compared by name and content, not by modification time. The number of processes and threads may differ: sums
    are then rounded differently, which the run notes.

    Args:
        recipe: The run's settings; the fields in `NOT_DECISIVE` are left out.
        source: The dense model; one in memory has no digests.
        windows: Calibration tokens, (samples, seq).
    """
    settings = recipe.model_dump(mode="json", exclude=set(NOT_DECISIVE))
    decisive = {f"{OF_RECIPE}{name}": value for name, value in settings.items()}
    if recipe.allocation_file:
        decisive["contents of `allocation`"] = contents(Path(recipe.allocation_file))
    if isinstance(source, Checkpoint):
        decisive |= model_fingerprint(source)
    decisive["calibration tokens"] = token_digest(windows)
    return decisive | {f"environment.{name}": value for name, value in environment.items() if name != "threads"}


def model_fingerprint(source: Checkpoint) -> dict[str, Any]:
    """Fingerprint of a model: digests of its files, and the license terms in its card.

    Every byte of the weights is read, once per process.
    """
    folder = source.folder
    documents = [folder / name for name in source.documents((*ANEW, LOG)).copied]
    files = sorted({*source.files(), folder / CONFIG_FILE, *documents})
    with ThreadPoolExecutor(min(DIGEST_THREADS, os.cpu_count() or 1)) as pool:
        result: dict[str, Any] = {
            f"file {file.relative_to(folder)}": digest for file, digest in zip(files, pool.map(contents, files), strict=True)
        }
    result["terms in README.md"] = card_terms(folder)
    return result


def contents(file: Path) -> str:
    """Size and SHA-256 digest of a file as text; cached until the file changes."""
    stat = file.stat()
    return f"{stat.st_size:,} bytes, SHA-256 {_digest(file, stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns)}"


@lru_cache(maxsize=4096)
def _digest(file: Path, *_: int) -> str:
    """SHA-256 digest of a file. The further arguments are the cache key; programs cannot set the change time (ctime)."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()[:32]
