"""Sums of y xᵀ over bfloat16 tokens on a CPU, by a kernel with float32 products; torch's have bfloat16 results."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from sparsellm.runtime import devices, native

COPIED_TOKENS = 2048
"""Tokens copied for the kernel at a time, unless a unit has more; the float64 sums are read and written once for them."""


def supports(*factors: Tensor) -> bool:
    """Whether the kernel is compiled, the processor has AVX-512 BF16, and all factors are bfloat16 on the CPU."""
    return all(x.dtype == torch.bfloat16 and x.device.type == "cpu" for x in factors) and load_kernel() is not None


def add_gram(inputs: Tensor, panels: Iterable[tuple[int, Tensor]], unit: int | None) -> None:
    """Add x xᵀ over all tokens to the upper triangle of a symmetric matrix; for the rounding see `add_products`.

    Args:
        inputs: (tokens, in) bfloat16.
        panels: First row and float64 sums of each panel of rows, (rows, in - first), which start at the diagonal. Entries below
            the diagonal are not changed.
        unit: Tokens that are summed apart from all others; None for all.
    """
    _add(inputs, inputs, _row_addresses(panels), unit)


def add_products(left: Tensor, right: Tensor, sums: Tensor, unit: int | None) -> None:
    """Add y xᵀ over all tokens to a matrix.

    Up to 128 tokens of a unit are summed in float32, and these sums in float64, so the result depends neither on the number of
    threads nor on the units of a batch. Subnormal numbers count as zero.

    Args:
        left: y, (tokens, out) bfloat16.
        right: x, (tokens, in) bfloat16.
        sums: (out, in) float64, contiguous.
        unit: Tokens that are summed apart from all others; None for all.
    """
    _add(left, right, sums.data_ptr() + sums.element_size() * sums.shape[1] * torch.arange(len(sums)), unit)


def _add(left: Tensor, right: Tensor, rows: Tensor, unit: int | None) -> None:
    """Add y xᵀ to the rows at addresses (out,) int64; of a product with itself, only entries from the diagonal on."""
    unit = unit or max(len(left), 1)
    size = max(COPIED_TOKENS // unit, 1) * unit
    for y, x in zip(left.split(size), right.split(size), strict=True):
        packed = _Packed.of(x, unit)
        _add_packed(packed if left is right else _Packed.of(y, unit), packed, rows)


def _add_packed(left: _Packed, right: _Packed, rows: Tensor) -> None:
    """As `_add`, for the same tokens of both factors."""
    library = load_kernel()
    threads = max(1, min(torch.get_num_threads(), -(-len(rows) // library.sparsellm_width())))

    def add(first: int) -> None:
        library.sparsellm_bf16_add_products(
            left.numbers.data_ptr(),
            left.columns,
            right.numbers.data_ptr(),
            right.columns,
            right.tokens,
            right.unit,
            first,
            threads,
            rows.data_ptr(),
        )

    devices.map_threads(add, range(threads))


@dataclass(frozen=True)
class _Packed:
    """A copy of tokens, (tokens, columns), in the order in which the kernel reads it."""

    numbers: Tensor
    tokens: int
    columns: int
    unit: int

    @classmethod
    def of(cls, inputs: Tensor, unit: int) -> _Packed:
        """Copy tokens, of which `unit` are summed apart from all others."""
        library = load_kernel()
        x, (tokens, columns) = inputs.contiguous(), inputs.shape
        blocks = -(-columns // library.sparsellm_width())
        # A unit of odd length is filled up by one token.
        pairs = -(-unit // 2) * (tokens // unit) + -(-(tokens % unit) // 2)
        numbers = torch.empty(blocks * library.sparsellm_width() * pairs, dtype=torch.int32)
        threads = max(1, min(torch.get_num_threads(), blocks))

        def pack(first: int) -> None:
            library.sparsellm_bf16_pack(x.data_ptr(), tokens, columns, unit, first, threads, numbers.data_ptr())

        devices.map_threads(pack, range(threads))
        return cls(numbers, tokens, columns, unit)


def _row_addresses(panels: Iterable[tuple[int, Tensor]]) -> Tensor:
    """(in,) int64: where column 0 of each row would be."""
    addresses = []
    for first, sums in panels:
        height, width = sums.shape
        addresses.append(sums.data_ptr() + sums.element_size() * (torch.arange(height) * width - first))
    return torch.cat(addresses)


@cache
def load_kernel() -> Any:
    """The compiled library; None if it is missing, or if the processor has no AVX-512 BF16."""
    library = native.load_library()
    return library if library is not None and library.sparsellm_bf16_supported() else None
