"""The kernels for packed matrices, and the instruction set that they use."""

from __future__ import annotations

import ctypes
import warnings
from functools import cache
from typing import Any

import torch

from sparsellm.errors import InvalidSetting
from sparsellm.runtime import native

INSTRUCTION_SETS = ("portable", "neon", "neon_dotprod", "avx2", "avx512", "avx512_bf16")
"""In ascending order of preference; numbered as in kernels.c. avx512 needs VBMI, VBMI2 and VNNI; neon_dotprod is NEON
with the dot products of bytes that Armv8.2 may have, and Armv8.4 has."""

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3, torch.uint8: 4}
"""Types of values, numbered as in kernels.c; uint8 holds two numbers of 4 bits."""

MISSING = (
    "The kernels for packed models are not compiled, so these run slower than dense ones. "
    "Install a C compiler (gcc or clang), then sparsellm again; sparsellm info prints the command."
)


class Library:
    """The compiled functions, and the number of the instruction set in use."""

    def __init__(self, library: Any) -> None:
        present = library.sparsellm_instruction_sets()
        self.names = [name for number, name in enumerate(INSTRUCTION_SETS) if present >> number & 1]
        self.number = INSTRUCTION_SETS.index(self.names[-1])
        library.sparsellm_use_openmp(openmp_start())
        self.matmul, self.decode, self.read = library.sparsellm_matmul, library.sparsellm_decode, library.sparsellm_read


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


def instruction_set() -> str | None:
    """Return the name of the instruction set in use; None without the compiled library."""
    library = load_kernels()
    return None if library is None else INSTRUCTION_SETS[library.number]


def instruction_sets() -> list[str]:
    """Return the names of the instruction sets that this processor and the library have, the preferred one last."""
    library = load_kernels()
    return [] if library is None else list(library.names)


def set_instruction_set(name: str | None) -> None:
    """Use another instruction set than the preferred one, for comparisons and tests.

    Args:
        name: One of `instruction_sets()`; None for the preferred one.

    Raises:
        InvalidSetting: This processor or the library does not have it.
    """
    library = load_kernels()
    names = instruction_sets()
    if library is None or name not in (None, *names):
        raise InvalidSetting(f"instruction set got {name!r}; this machine has {', '.join(names) or 'no compiled kernels'}.")
    library.number = INSTRUCTION_SETS.index(name or names[-1])


@cache
def warn_missing() -> None:
    """Warn once that the kernels are missing."""
    warnings.warn(MISSING, RuntimeWarning, stacklevel=3)
