"""How the command line lets its process ask the system for memory. The library itself changes nothing of a process."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path

from sparsellm.runs.events import OPENING, Begun, Event, Stage

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""glibc's numbers for `mallopt`."""

LARGEST_IN_HEAP = 32 * 2**20
"""Bytes from which glibc always maps memory anew: the most that it can be told."""

LARGEST_KEPT = 2**20
"""The same where nothing of what is freed is to be kept: tensors of a layer are larger, what else a run makes is smaller."""


def manage_memory(event: Event) -> None:
    """An observer that prepares the process for each run; where memory is tight, freed memory is returned at once."""
    if isinstance(event, Stage) and event.name == OPENING:
        keep_pages()
        reset_peak()
    elif isinstance(event, Begun) and event.tight:
        return_pages()


def keep_pages() -> None:
    """Make memory that is freed and allocated again cheap: by pages of 2 MiB (Linux), and kept in between (glibc).

    A pass through a block allocates and frees the same tens of megabytes for every batch: without this page by page, of 4 KiB,
    and zeroed each time. Torch reads the environment variable once, at its first tensor. Variables that the user has set are
    not overridden.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    _set_thresholds(LARGEST_IN_HEAP, 2**31 - 1)


def return_pages() -> None:
    """From now on, until `keep_pages`, return what is freed to the system at once (glibc).

    The holes that tensors leave in the heap can be as large as all data. A run without them took a fifth more of the
    processor's time.
    """
    _set_thresholds(LARGEST_KEPT, LARGEST_KEPT)


def reset_peak() -> None:
    """Let `peak_memory` begin anew with the present resident memory, where the system can (Linux)."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _set_thresholds(mapped: int, trimmed: int) -> None:
    """Tell glibc from how many bytes memory is mapped by itself, and how many free bytes it keeps, unless the user has."""
    if "MALLOC_TRIM_THRESHOLD_" in os.environ or "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(MMAP_THRESHOLD, mapped)
    mallopt(TRIM_THRESHOLD, trimmed)
