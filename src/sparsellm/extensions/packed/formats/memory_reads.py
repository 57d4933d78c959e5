"""How fast all threads together read memory, which bounds the products of few tokens."""

from __future__ import annotations

import time
from collections.abc import Iterable
from statistics import median

import torch
from torch import Tensor

from sparsellm.extensions.packed.formats.kernel_library import load_kernels
from sparsellm.runtime.memory import available

READ_BYTES = 2**24
"""Bytes that are read for one measurement of the bandwidth: less than a millisecond, in which few programs are interrupted."""

PAGE = 4096
"""Bytes of a page, as in kernels.c: reads are of whole pages."""


def read_seconds(tensors: Iterable[Tensor]) -> float:
    """Seconds that all threads together take to read contiguous tensors once, as fast as memory delivers them."""
    library, threads = load_kernels(), torch.get_num_threads()
    started = time.perf_counter()
    for tensor in tensors:
        if library is None:
            tensor.sum()
        else:
            library.read(library.number, threads, tensor.data_ptr(), tensor.nbytes // PAGE)
    return time.perf_counter() - started


def stream_bandwidth() -> float:
    """Measure how fast all threads together read memory, in bytes per second, in about a tenth of a second."""
    size = max(READ_BYTES, min(2**28, available(torch.device("cpu")) // 4) // READ_BYTES * READ_BYTES)  # larger than caches
    pieces = torch.ones(size // 4).split(READ_BYTES // 4)
    return READ_BYTES / median(read_seconds([piece]) for piece in pieces * 4)
