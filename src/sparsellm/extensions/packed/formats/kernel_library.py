"""The compiled library: the kernels for packed matrices, their instruction sets, and how fast it reads memory."""

from __future__ import annotations

import ctypes
import time
import warnings
from collections.abc import Iterable
from functools import cache
from statistics import median
from typing import Any

import torch
from torch import Tensor

from sparsellm.runtime import native
from sparsellm.runtime.memory import available

INSTRUCTION_SETS = ("portable", "neon", "neon_dotprod", "avx2", "avx512", "avx512_bf16")
"""In ascending order of preference; numbered as in kernels.c. avx512 needs VBMI, VBMI2 and VNNI; neon_dotprod is NEON
with the dot products of bytes that Armv8.2 may have, and Armv8.4 has."""

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3, torch.uint8: 4}
"""Types of values, numbered as in kernels.c; uint8 holds two numbers of 4 bits."""

MISSING = (
    "The kernels for packed models are not compiled, so these run slower than dense ones. "
    "Install a C compiler (gcc or clang), then sparsellm again; sparsellm info prints the command."
)


READ_BYTES = 2**24
"""Bytes that are read for one measurement of the bandwidth: less than a millisecond, in which few programs are interrupted."""

PAGE = 4096
"""Bytes of a page, as in kernels.c: reads are of whole pages."""


class Library:
    """The compiled functions.

    Attributes:
        names: Names of the instruction sets that the processor and the library have.
        number: Number of the one in use: the preferred one until another is chosen.
        is_chosen: Whether one was chosen.
    """

    def __init__(self, library: Any) -> None:
        present = library.sparsellm_instruction_sets()
        self.names = [name for number, name in enumerate(INSTRUCTION_SETS) if present >> number & 1]
        self.number, self.is_chosen = INSTRUCTION_SETS.index(self.names[-1]), False
        library.sparsellm_use_openmp(openmp_start())
        self.matmul, self.decode, self.read = library.sparsellm_matmul, library.sparsellm_decode, library.sparsellm_read

    def use(self, name: str) -> None:
        """Choose an instruction set, one of `names`."""
        self.number, self.is_chosen = INSTRUCTION_SETS.index(name), True


def openmp_start() -> ctypes.c_void_p | None:
    """The function that starts the threads of torch's OpenMP library; None if torch has another one, or none."""
    try:
        return ctypes.cast(ctypes.CDLL(torch._C.__file__).GOMP_parallel, ctypes.c_void_p)
    except (OSError, AttributeError):
        return None


@cache
def load_kernels() -> Library | None:
    """The kernels; None if they are not compiled."""
    library = native.load_library()
    return None if library is None else Library(library)


@cache
def warn_missing() -> None:
    """Warn once that the kernels are missing."""
    warnings.warn(MISSING, RuntimeWarning, stacklevel=3)


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
