"""The fingerprint of a run, compared on resume, and the key of the cache of results on dense models."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import torch
from filelock import FileLock
from pydantic import TypeAdapter
from torch import Tensor

from sparsellm import __version__
from sparsellm.checkpoints.documents import CONFIG_FILE
from sparsellm.checkpoints.files import card_terms
from sparsellm.checkpoints.loading import Checkpoint, InMemoryModel
from sparsellm.pipeline.events import Note, Observer
from sparsellm.pipeline.journal import JOURNAL, OF_RECIPE, Journal
from sparsellm.pipeline.output_folder import ANEW, LOG
from sparsellm.pipeline.recipe import RunRecipe
from sparsellm.pipeline.recipe_fields import RunFields, fields_with
from sparsellm.runtime import collectives, devices
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


class DenseCache:
    """A folder of journals, one for each dense model and set of sequences.

    A process that needs a result waits while another computes it. The lock is released when its process ends, in any way. In a
    distributed run only the main process uses the folder, and all processes call every method.

    Args:
        observer: Receives a note if a journal is damaged and its results are computed again.
    """

    def __init__(self, folder: Path, observer: Observer = lambda _: None) -> None:
        self.folder, self._observer = folder, observer
        self._in_memory: dict[Any, Any] = {}

    @contextmanager
    def open(self, known: Mapping[str, Any]) -> Iterator[Journal]:
        """Open the journal of a cache key, and lock it against other processes."""
        digest = hashlib.blake2b(json.dumps(dict(known), sort_keys=True).encode(), digest_size=12).hexdigest()
        folder = self.folder / digest
        if not collectives.is_main():
            yield Journal(folder).share()
            return
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / "lock"):
            journal = (Journal.resume if (folder / JOURNAL).exists() else Journal.begin)(folder, known)
            if journal.damage:
                self._observer(Note(journal.damage))
            yield journal.share()

    def value(self, known: Mapping[str, Any], name: str, find: Callable[[], Any], *, kind: Any = Any) -> Any:
        """Return the cached value of that name and type, computed by `find` if missing."""
        adapter: TypeAdapter[Any] = TypeAdapter(kind)
        with self.open(known) as journal:
            if journal.fact(name) is None:
                journal.store_fact(name, adapter.dump_python(find(), mode="json"))
            return adapter.validate_python(journal.fact(name))

    def in_memory(self, key: Hashable, find: Callable[[], Value]) -> Value:
        """Return the value of that key from this process's memory, computed by `find` if missing."""
        if key not in self._in_memory:
            self._in_memory[key] = find()
        value: Value = self._in_memory[key]
        return value


def cache_key(
    source: Checkpoint, windows: Tensor, *, dtype: torch.dtype, environment: Mapping[str, str], batch: int | None = None
) -> dict[str, Any]:
    """Everything that determines a result of a dense model to the last bit.

    Args:
        source: The dense model, known by the digests of its files.
        windows: Token ids, (sequences, length).
        environment: Versions of packages, and the machine.
        batch: Sequences per batch; None if the result does not depend on it.
    """
    key = model_fingerprint(source) | {"tokens": token_digest(windows), "dtype": str(dtype), "batch": batch}
    return key | {f"environment.{name}": value for name, value in environment.items()}
