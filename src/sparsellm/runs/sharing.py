"""A cache on disk of results on dense models, shared by the runs of several processes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from torch import Tensor

from sparsellm.checkpoints.loading import Checkpoint
from sparsellm.pruning.journal import JOURNAL, Journal
from sparsellm.runs.events import Note, Observer
from sparsellm.runs.fingerprint import model_fingerprint, token_digest


class DenseCache:
    """A folder of journals, one for each dense model and set of sequences.

    A process that needs a result waits while another computes it. The lock is released when its process ends, in any way.

    Args:
        folder: Folder of the cache.
        observer: Receives a note if a journal is damaged and its results are computed again.
    """

    def __init__(self, folder: Path, observer: Observer = lambda _: None) -> None:
        self.folder, self._observer = folder, observer

    @contextmanager
    def open(self, known: Mapping[str, Any]) -> Iterator[Journal]:
        """Open the journal of a cache key, and lock it against other processes."""
        digest = hashlib.blake2b(json.dumps(dict(known), sort_keys=True).encode(), digest_size=12).hexdigest()
        folder = self.folder / digest
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / "lock"):
            journal = (Journal.resume if (folder / JOURNAL).exists() else Journal.begin)(folder, known)
            if journal.lost:
                self._observer(Note(journal.lost))
            yield journal

    def value(self, known: Mapping[str, Any], name: str, find: Callable[[], Any]) -> Any:
        """Return the cached plain data of that name, computed by `find` if missing."""
        with self.open(known) as journal:
            if journal.fact(name) is None:
                journal.note(name, find())
            return journal.fact(name)


def cache_key(
    source: Checkpoint, windows: Tensor, dtype: torch.dtype, batch: int | None, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Everything that determines a result of a dense model to the last bit.

    Args:
        source: The dense model, known by the digests of its files.
        windows: Token ids, (sequences, length).
        dtype: Data type of the computation.
        batch: Sequences per batch; None if the result does not depend on it.
        environment: Versions of packages, and the machine.

    Returns:
        Plain data, by name.
    """
    key = model_fingerprint(source) | {"tokens": token_digest(windows), "dtype": str(dtype), "batch": batch}
    return key | {f"environment.{name}": value for name, value in environment.items()}
