"""Results on dense models that runs share, and the sensitivities of the loss to each block's outputs among them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, overload

import torch
from filelock import FileLock
from pydantic import TypeAdapter
from torch import Tensor

from sparsellm.activations.sensitivity import iterate_output_fisher
from sparsellm.checkpoints.loading import Checkpoint
from sparsellm.models.blocks import blocks_of
from sparsellm.models.loaded_model import LoadedModel
from sparsellm.observers.events import SENSITIVITIES, Advance, Note, Observer, run_stage
from sparsellm.outputs.fingerprint import model_fingerprint
from sparsellm.outputs.journal import JOURNAL, Journal
from sparsellm.outputs.report import Report
from sparsellm.runtime import collectives
from sparsellm.texts.padding import token_digest

Value = TypeVar("Value")


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


def estimate_fisher(
    loaded: LoadedModel, batches: Sequence[Tensor], *, report: Report, observer: Observer, cache: Journal | None
) -> Sequence[Tensor]:
    """The sensitivities by block, as `output_fisher`, from the cache or computed and stored there."""
    with run_stage(SENSITIVITIES, report, observer, unit="block") as advance:
        return _cached_fisher(loaded, batches, cache, advance)


class JournalTensors(Sequence[Tensor]):
    """Numbered tensors of a journal, read on access."""

    def __init__(self, journal: Journal, name: str, count: int) -> None:
        self._journal, self._name, self._count = journal, name, count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | Sequence[Tensor]:
        if isinstance(index, slice):
            raise TypeError("The tensors are read one by one: slices are not supported.")
        number = range(self._count)[index]
        tensors = self._journal.tensors(f"{self._name}-{number}")
        if tensors is None:
            raise KeyError(f"{self._name} {number} is not in the journal.")
        return tensors["x"]


def _cached_fisher(loaded: LoadedModel, batches: Sequence[Tensor], cache: Journal | None, advance: Advance) -> Sequence[Tensor]:
    """The sensitivities by block, from the cache; computed and stored there unless all are present."""
    name, count = "sensitivity", len(blocks_of(loaded.model))
    computed: dict[int, Tensor] = {}
    if cache is None or any(cache.fact(f"{name}-{number}") is None for number in range(count)):
        for number, sensitivity in iterate_output_fisher(loaded, batches):
            if cache is None:
                computed[number] = sensitivity
            else:
                cache.store_tensors(f"{name}-{number}", {"x": sensitivity})
            advance(count - number, count)
    return JournalTensors(cache, name, count) if cache else [computed[number] for number in range(count)]
