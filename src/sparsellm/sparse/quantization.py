"""A sparse matrix of few bits: a bitmask, the integers of its kept weights, and a scale for each group of columns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsellm.errors import InvalidSetting
from sparsellm.solvers.integers import IntegerFormat
from sparsellm.solvers.quantization import Quantized, expand_groups
from sparsellm.sparse.bitmask import GROUP, PADDING, count_bits, pack_bits, unpack_bits


@dataclass(frozen=True)
class QuantizedBitmask:
    r"""An (out, in) matrix :math:`w = s\,q` without its removed weights, which kernels read.

    A kept weight whose integer is 0 is stored. With 4 and 3 bits, two integers share a byte as numbers of 4 bits in two's
    complement, the lower half first, and the integers of each 64 columns begin with a byte of their own.

    Attributes:
        shape: (out, in).
        mask: (out, 8 · ceil(in / 64)) uint8, as in `Bitmask`.
        values: (bytes + PADDING,) the integers of the kept weights row by row, then zeros: int8 for 8 bits, otherwise uint8.
        row_starts: (out + 1,) int64: position in `values` of each row's first byte, then the number of bytes.
        scales: (out, groups) bfloat16.
        format: The format of the integers.
    """

    shape: tuple[int, int]
    mask: Tensor
    values: Tensor
    row_starts: Tensor
    scales: Tensor
    format: IntegerFormat

    @classmethod
    def from_quantized(cls, weight: Quantized, keep: Tensor | None = None) -> QuantizedBitmask:
        """Encode integers and scales.

        Args:
            weight: The (out, in) weight, whose integers are 0 where it is removed.
            keep: (out, in) bool, True where a weight is kept; by default, all are.

        Raises:
            InvalidSetting: The format or the shape of the scales are impossible.
        """
        integers = weight.integers
        keep = torch.ones_like(integers, dtype=torch.bool) if keep is None else keep
        return cls.from_parts(pack_bits(keep), integers[keep], weight.scales, columns=integers.shape[1], format=weight.format)

    @classmethod
    def from_parts(
        cls, mask: Tensor, integers: Tensor, scales: Tensor, *, columns: int, format: IntegerFormat
    ) -> QuantizedBitmask:
        """Build a matrix from its mask, as in `mask`, and the int8 integers of its kept weights, row by row."""
        shape, groups = (mask.shape[0], columns), format.checked().groups(columns)
        if scales.shape != (shape[0], groups):
            raise InvalidSetting(
                f"A matrix of {shape} in groups of {format.group_size} has {groups} scales a row, got {tuple(scales.shape)}."
            )
        counts = count_bits(mask) if format.bits == 8 else count_bytes(mask)
        row_starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        if format.bits == 8:
            values = torch.cat([integers, integers.new_zeros(PADDING)])
        else:
            halves = torch.zeros(2 * int(row_starts[-1]), dtype=torch.uint8, device=mask.device)
            halves.masked_scatter_(_occupied(mask), integers.view(torch.uint8) & 15)
            values = torch.cat([halves[::2] | halves[1::2] << 4, halves.new_zeros(PADDING)])
        return cls(shape, mask, values, row_starts, scales, format)

    @property
    def kept(self) -> int:
        """Number of kept weights."""
        return int(count_bits(self.mask).sum())

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        parts = (self.mask, self.values, self.row_starts, self.scales)
        return sum(part.numel() * part.element_size() for part in parts)

    def integers(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Return the integers of the kept weights of rows `start` to `stop`, row by row: (kept,) int8."""
        stop = self.shape[0] if stop is None else stop
        first, last = self.row_starts[[start, stop]].tolist()
        values = self.values[first:last]
        if self.format.bits == 8:
            return values
        halves = torch.stack([values & 15, values >> 4], dim=1).flatten()
        signed = (halves ^ 8).view(torch.int8) - 8
        return signed[_occupied(self.mask[start:stop])]

    def to_integers(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Decode the integers of rows `start` to `stop`: (stop - start, in) int8, 0 where a weight is removed."""
        stop = self.shape[0] if stop is None else stop
        keep = unpack_bits(self.mask[start:stop], self.shape[1])
        return torch.zeros(keep.shape, dtype=torch.int8, device=keep.device).masked_scatter_(keep, self.integers(start, stop))

    def to_dense(self, start: int = 0, stop: int | None = None, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """Decode rows `start` to `stop` and round the products of scales and integers to a dtype: (stop - start, in)."""
        scales = expand_groups(self.scales[start:stop].float(), self.format.group_size, self.shape[1])
        return self.to_integers(start, stop).float().mul_(scales).add_(0.0).to(dtype)


def count_bytes(mask: Tensor) -> Tensor:
    """Count the bytes that the kept numbers of each row take with two in a byte, from a new byte in each 64 columns: (out,)."""
    words = mask.view(-1, GROUP // 8)
    return ((count_bits(words) + 1) // 2).view(len(mask), mask.shape[1] * 8 // GROUP).sum(1)


def _occupied(mask: Tensor) -> Tensor:
    """Return which halves of the bytes hold a number, and not the padding of 64 columns with an odd number of them."""
    counts = count_bits(mask.view(-1, GROUP // 8))
    ends = ((counts + 1) // 2 * 2).cumsum(0)
    occupied = torch.ones(int(ends[-1]) if len(ends) else 0, dtype=torch.bool, device=mask.device)
    occupied[ends[counts % 2 == 1] - 1] = False
    return occupied
