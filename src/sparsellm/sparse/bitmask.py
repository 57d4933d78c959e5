"""A sparse matrix as a bitmask and its kept values, which the kernels read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

GROUP = 64
"""Columns whose mask bits a kernel reads at once. A row's mask is padded with zero bits to a multiple of them."""

PADDING = 64
"""Zeros after the last value: a kernel reads values in vectors, and the last one may reach past the end."""

_POWERS = (1, 2, 4, 8, 16, 32, 64, 128)
_POPCOUNT = torch.tensor([number.bit_count() for number in range(256)], dtype=torch.uint8)


@dataclass(frozen=True)
class Bitmask:
    """An (out, in) matrix without its zeros.

    Attributes:
        shape: (out, in).
        mask: (out, 8 · ceil(in / 64)) uint8: bit c % 8 of byte c // 8 of a row is set if column c is kept.
        values: (kept + PADDING,) float32, float16 or bfloat16: the kept values row by row, then zeros.
        row_starts: (out + 1,) int64: position of each row's first value, then the number of kept values.
    """

    shape: tuple[int, int]
    mask: Tensor
    values: Tensor
    row_starts: Tensor

    @classmethod
    def from_dense(cls, weight: Tensor) -> Bitmask:
        """Encode an (out, in) weight. Weights whose bits are all zero are left out, so that -0.0 and NaN are kept."""
        keep = bits_of(weight) != 0
        return cls.from_parts(pack_bits(keep), weight[keep], weight.shape[1])

    @classmethod
    def from_parts(cls, mask: Tensor, values: Tensor, columns: int) -> Bitmask:
        """Build a matrix from its mask, as in `mask`, and its kept values without padding."""
        counts = count_bits(mask)
        row_starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        padded = torch.cat([values, values.new_zeros(PADDING)])
        return cls((mask.shape[0], columns), mask, padded, row_starts)

    @property
    def kept(self) -> int:
        """Number of kept values."""
        return len(self.values) - PADDING

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.numel() * part.element_size() for part in (self.mask, self.values, self.row_starts))

    def to_dense(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Decode rows `start` to `stop`, bit by bit as they were: (stop - start, in)."""
        stop = self.shape[0] if stop is None else stop
        keep = unpack_bits(self.mask[start:stop], self.shape[1])
        first, last = self.row_starts[[start, stop]].tolist()
        values = bits_of(self.values)  # torch writes a lone number as a scalar, which changes the bits of NaN
        dense = values.new_zeros(keep.shape)
        dense[keep] = values[first:last]
        return dense.view(self.values.dtype)


def bits_of(weight: Tensor) -> Tensor:
    """Return the bits of each number as an integer, in the same memory if the weight is contiguous."""
    return weight.contiguous().view(torch.int32 if weight.element_size() == 4 else torch.int16)


def pack_bits(keep: Tensor) -> Tensor:
    """Pack a boolean (out, in) matrix into (out, 8 · ceil(in / 64)) bytes, the lowest bit first."""
    rows, columns = keep.shape
    padded = keep.new_zeros(rows, -(-columns // GROUP) * GROUP)
    padded[:, :columns] = keep
    powers = torch.tensor(_POWERS, dtype=torch.uint8, device=keep.device)
    return (padded.view(rows, -1, 8).to(torch.uint8) * powers).sum(-1, dtype=torch.uint8)


def unpack_bits(mask: Tensor, columns: int) -> Tensor:
    """Unpack what `pack_bits` packed into a boolean (out, in) matrix."""
    powers = torch.tensor(_POWERS, dtype=torch.uint8, device=mask.device)
    return ((mask[:, :, None] & powers) != 0).flatten(1)[:, :columns]


def count_bits(mask: Tensor) -> Tensor:
    """Count the set bits of each row of a mask: (out,) int64."""
    if mask.is_cpu:
        words = mask.numpy()
        words = words.view(np.uint64) if words.flags.c_contiguous and words.shape[1] % 8 == 0 else words
        return torch.from_numpy(np.bitwise_count(words).sum(1, dtype=np.int64))
    return _POPCOUNT.to(mask.device)[mask.long()].sum(1, dtype=torch.int64)
