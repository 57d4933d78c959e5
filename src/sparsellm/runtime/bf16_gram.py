"""Sums of x xᵀ over bfloat16 inputs on a CPU, by a kernel with float32 products; torch's have bfloat16 results."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsellm.runtime import devices

LIBRARY = Path(__file__).with_name("_bf16_gram.so")

VERSION = 1

MAX_TOKENS = 2048
"""Tokens copied for the kernel at a time, unless a unit has more; the float64 sums are read and written once for them."""


def supports(inputs: Tensor) -> bool:
    """Whether the kernel is compiled, the processor has AVX-512 BF16, and the inputs are bfloat16 on the CPU."""
    return inputs.dtype == torch.bfloat16 and inputs.device.type == "cpu" and load_library() is not None


def add_gram(inputs: Tensor, panels: Iterable[tuple[int, Tensor]], unit: int | None) -> None:
    """Add x xᵀ over all tokens to the upper triangle of a symmetric matrix.

    Up to 128 tokens of a unit are summed in float32, and these sums in float64, so the result depends neither on the number of
    threads nor on the units of a batch. Subnormal inputs count as zero.

    Args:
        inputs: (tokens, in) bfloat16.
        panels: First row and float64 sums of each panel of rows, (rows, in - first), which start at the diagonal. Entries below
            the diagonal are not changed.
        unit: Tokens that are summed apart from all others; None for all.
    """
    library = load_library()
    assert library is not None
    (count, columns), rows = inputs.shape, _row_addresses(panels)
    unit = unit or max(count, 1)
    for part in inputs.split(max(MAX_TOKENS // unit, 1) * unit):
        x, blocks = part.contiguous(), -(-columns // library.sparsellm_width())
        # A unit of odd length is filled up by one token.
        pairs = -(-unit // 2) * (len(x) // unit) + -(-(len(x) % unit) // 2)
        packed = torch.empty(blocks * library.sparsellm_width() * pairs, dtype=torch.int32)
        threads = max(1, min(torch.get_num_threads(), blocks))

        def pack(first: int, x: Tensor = x, packed: Tensor = packed, step: int = threads) -> None:
            library.sparsellm_bf16_pack(x.data_ptr(), len(x), columns, unit, first, step, packed.data_ptr())

        def add(first: int, tokens: int = len(x), packed: Tensor = packed, step: int = threads) -> None:
            library.sparsellm_bf16_add_gram(packed.data_ptr(), tokens, columns, unit, first, step, rows.data_ptr())

        for function in (pack, add):
            devices.map_threads(function, range(threads))


def _row_addresses(panels: Iterable[tuple[int, Tensor]]) -> Tensor:
    """(in,) int64: where column 0 of each row would be."""
    addresses = []
    for first, sums in panels:
        height, width = sums.shape
        addresses.append(sums.data_ptr() + sums.element_size() * (torch.arange(height) * width - first))
    return torch.cat(addresses)


@cache
def load_library() -> Any:
    """The compiled library beside this file; None if it is missing, of another version, or not for this processor."""
    library = devices.load_library(LIBRARY, VERSION)
    if library is None or not library.sparsellm_supported():
        return None
    count, pointer = ctypes.c_int64, ctypes.c_void_p
    for function in (library.sparsellm_bf16_pack, library.sparsellm_bf16_add_gram):
        function.argtypes = [pointer, count, count, count, count, count, pointer]
        function.restype = None
    return library
