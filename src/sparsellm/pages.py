"""How this process asks the system for memory: by the environment, which torch reads, and by the C library."""

from __future__ import annotations

import ctypes
import os

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
"""glibc's numbers for `mallopt`."""

LARGEST_IN_HEAP = 32 * 2**20
"""Bytes from which glibc always maps memory anew: the most that it can be told."""

LARGEST_KEPT = 2**20
"""The same where nothing of what is freed is to be kept: tensors of a layer are larger, what else a run makes is smaller."""


def keep_pages() -> None:
    """Let memory that is freed and taken again cost little: by pages of 2 MiB (Linux), and not given back in between (glibc).

    A pass through a block takes and frees the same tens of megabytes for every batch: without this page by page, of 4 KiB, and
    zeroed each time. Torch asks once about large pages, at its first tensor; later this does nothing, nor harm. What a user has
    set stays.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    _tell(LARGEST_IN_HEAP, 2**31 - 1)


def return_pages() -> None:
    """From now on, until `keep_pages`, return what is freed to the system at once (glibc).

    The holes that tensors leave in the heap can be as large as all data. A run without them took a fifth more of the
    processor's time.
    """
    _tell(LARGEST_KEPT, LARGEST_KEPT)


def _tell(mapped: int, trimmed: int) -> None:
    """Tell glibc from how many bytes memory is mapped by itself, and how many free ones are kept; what a user has set stays."""
    if "MALLOC_TRIM_THRESHOLD_" in os.environ or "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return
    try:
        tell = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return
    tell(MMAP_THRESHOLD, mapped)
    tell(TRIM_THRESHOLD, trimmed)
