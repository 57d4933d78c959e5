"""Settings of the memory allocator. The command line applies them to its process; the library itself does not."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path

from sparsellm.observers.events import OPENING, Begun, Event, Stage

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""glibc's parameter numbers for `mallopt`."""

LARGEST_IN_HEAP = 32 * 2**20
"""Bytes from which glibc maps each allocation separately: the largest value that it accepts."""

LARGEST_KEPT = 2**20
"""The same threshold where freed memory is returned: a layer's tensors are larger, a run's other objects smaller."""


def manage_memory(event: Event) -> None:
    """Observer that prepares the process for each run; if memory is tight, freed memory is returned at once."""
    if isinstance(event, Stage) and event.name == OPENING:
        keep_pages()
        reset_peak()
    elif isinstance(event, Begun) and event.tight:
        return_pages()


def keep_pages() -> None:
    """Make repeated allocation cheap: use pages of 2 MiB (Linux), and keep freed memory in the process (glibc).

    A pass through a block allocates and frees the same tens of megabytes for every batch; by default the system maps and zeroes
    them each time, in pages of 4 KiB. Torch reads the environment variable once, at its first tensor. Variables set by the user
    are not overridden.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    _set_thresholds(LARGEST_IN_HEAP, 2**31 - 1)


def return_pages() -> None:
    """Return freed memory to the system at once, until `keep_pages` is called (glibc).

    Otherwise unused memory in the heap can be as large as all data. Returning it at once takes about 20 % more processor time.
    """
    _set_thresholds(LARGEST_KEPT, LARGEST_KEPT)


def reset_peak() -> None:
    """Reset `peak_memory` to the present resident memory, if the system supports it (Linux)."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def _set_thresholds(mapped: int, trimmed: int) -> None:
    """Set glibc's bytes for separate mapping and for trimming, unless the user has set them."""
    if "MALLOC_TRIM_THRESHOLD_" in os.environ or "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    mallopt(MMAP_THRESHOLD, mapped)
    mallopt(TRIM_THRESHOLD, trimmed)
