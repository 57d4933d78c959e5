"""What was found out about dense models, kept in a folder, so that runs of several processes find it once."""

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
    """A folder of journals, one for each dense model and each set of windows that it was run on.

    A process that needs what another is just finding waits for it; the lock goes with the process, however that ends.
    say: what takes a note where a journal is damaged and its figures are found again.
    """

    def __init__(self, folder: Path, observer: Observer = lambda _: None) -> None:
        self.folder, self._say = folder, observer

    @contextmanager
    def open(self, known: Mapping[str, Any]) -> Iterator[Journal]:
        """The journal of what was found under the circumstances `known`, which no other process may add to meanwhile."""
        digest = hashlib.blake2b(json.dumps(dict(known), sort_keys=True).encode(), digest_size=12).hexdigest()
        place = self.folder / digest
        place.mkdir(parents=True, exist_ok=True)
        with FileLock(place / "lock"):
            journal = (Journal.resume if (place / JOURNAL).exists() else Journal.begin)(place, known)
            if journal.lost:
                self._say(Note(journal.lost))
            yield journal

    def value(self, known: Mapping[str, Any], name: str, find: Callable[[], Any]) -> Any:
        """Plain data of that name, found if it is not known yet."""
        with self.open(known) as journal:
            if journal.fact(name) is None:
                journal.note(name, find())
            return journal.fact(name)


def cache_key(
    source: Checkpoint, windows: Tensor, dtype: torch.dtype, batch: int | None, environment: Mapping[str, str]
) -> dict[str, Any]:
    """All that a figure of a dense model depends on, to the last bit: model files, windows, dtype, batch, machine."""
    message = model_fingerprint(source) | {"tokens": token_digest(windows), "dtype": str(dtype), "batch": batch}
    return message | {f"environment.{name}": value for name, value in environment.items()}
