"""The compiled library of CPU kernels."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Any

LIBRARY = Path(__file__).parents[1] / "native" / "_native.so"
"""Compiled by `hatch_build.py` from the C files beside it."""

LIBRARY_VERSION = 6
"""Of the functions' arguments; kernels.c has the same."""


@cache
def load_library() -> Any:
    """Load the library, with the types of its functions' arguments; None if it is missing or of another version."""
    try:
        library = ctypes.CDLL(str(LIBRARY))
        if library.sparsellm_version() != LIBRARY_VERSION:
            return None
        _declare(library)
    except (OSError, AttributeError):
        return None
    return library


def _declare(library: Any) -> None:
    """Declare arguments and results; functions that are not named here take none, and return an integer."""
    number, count, pointer = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
    packed = [number, number, pointer, pointer, number, pointer, pointer, count, count, count, count, number, pointer]
    product = [number, number, pointer, number, count, pointer, pointer, number, pointer, pointer, count, count, count]
    gram = [pointer, count, pointer, count, count, count, count, count, pointer]
    sparse = [pointer, count, count, pointer, pointer, pointer, count, pointer, pointer]
    arguments = {
        "use_openmp": [pointer],
        "matmul": [*product, pointer, pointer],
        "decode": packed,
        "read": [number, number, pointer, count],
        "encode": [pointer, count, count, pointer, pointer, pointer],
        "sparse_matmul": sparse,
        "bf16_pack": [pointer, count, count, count, count, count, pointer],
        "bf16_add_products": gram,
    }
    for name, types in arguments.items():
        function = getattr(library, f"sparsellm_{name}")
        function.argtypes = types
        if name not in ("matmul", "sparse_matmul"):
            function.restype = None
