"""Measurements on this machine, in a file in the user's cache: which of two computations is faster, and by how much."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock

from sparsellm.runtime import autotuning
from sparsellm.texts.json_files import durable
from sparsellm.texts.paths import home

FILE = "speedups.json"
"""Its name in the cache folder of this package."""

WAIT = 60
"""Most seconds to wait for another process that measures."""


class SpeedupFile:
    """A store of speedups by machine and name in a file. Where it cannot be read or written, it is as an empty one."""

    def __init__(self, file: Path) -> None:
        self._file = file

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Wait for another process that measures: two at a time would measure each other. May be entered again."""
        lock = FileLock(self._file.with_suffix(".lock"), timeout=WAIT, is_singleton=True)
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        except (OSError, NotImplementedError):  # also filelock's Timeout
            yield
            return
        try:
            yield
        finally:
            lock.release()

    def read(self, machine: str) -> Mapping[str, float]:
        """Return the speedups of a machine by name."""
        return {name: x for name, x in self._read().get(machine, {}).items() if 0 < x < math.inf}

    def write(self, machine: str, speedups: Mapping[str, float]) -> None:
        """Add speedups of a machine. The file is written as a whole."""
        found = self._read()
        found[machine] = found.get(machine, {}) | {**speedups}
        with suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            durable(self._file, json.dumps(found, indent=1).encode())

    def _read(self) -> dict[str, dict[str, float]]:
        """The content of the file; empty where it is missing or damaged."""
        try:
            data: Mapping[str, Mapping[str, float]] = json.loads(self._file.read_text(encoding="utf-8"))
            return {str(key): {str(name): float(x) for name, x in values.items()} for key, values in data.items()}
        except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError):
            return {}


def use_cache() -> None:
    """Keep what is measured from now on in the user's cache, unless the user has no home folder, as in containers."""
    folder = os.environ.get("XDG_CACHE_HOME") or (None if (own := home()) is None else own / ".cache")
    autotuning.store = None if folder is None else SpeedupFile(Path(folder) / "sparsellm" / FILE)
