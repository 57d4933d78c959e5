"""A sparse matrix as a bitmask and its kept values, floating-point numbers or scales times integers, which the kernels read."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparsellm.errors import InvalidSetting, dtype_name
from sparsellm.extensions.integers.formats import MASK_WORD, IntegerFormat
from sparsellm.extensions.integers.quantization import Quantized, dequantized

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes of floating-point values."""

VALUES_PADDING = 64
"""Zeros after the last value: a kernel reads values in vectors, and the last one may reach past the end."""

_POWERS = (1, 2, 4, 8, 16, 32, 64, 128)
_POPCOUNT = torch.tensor([number.bit_count() for number in range(256)], dtype=torch.uint8)


@dataclass(frozen=True)
class Bitmask:
    r"""An (out, in) matrix without its removed weights: of floating-point values, or :math:`w = s\,q` of scales and integers.

    A kept weight whose integer is 0 is stored. With 4 and 3 bits, two integers share a byte as numbers of 4 bits in two's
    complement, the lower half first, and the integers of each 64 columns begin with a byte of their own.

    Attributes:
        shape: (out, in).
        mask: (out, 8 · ceil(in / 64)) uint8: bit c % 8 of byte c // 8 of a row is set if column c is kept; then zero bits.
        values: (elements + VALUES_PADDING,) the kept values row by row, then zeros: float32, float16 or bfloat16; of integers
            int8 for 8 bits, otherwise uint8.
        row_starts: (out + 1,) int64: position in `values` of each row's first element, then the number of elements.
        scales: (out, groups) bfloat16; None of floating-point values.
        format: The format of the integers; None of floating-point values.
    """

    shape: tuple[int, int]
    mask: Tensor
    values: Tensor
    row_starts: Tensor
    scales: Tensor | None = None
    format: IntegerFormat | None = None

    @classmethod
    def from_dense(cls, weight: Tensor) -> Bitmask:
        """Encode an (out, in) weight. Weights whose bits are all zero are left out, so that -0.0 and NaN are kept."""
        keep = bits_of(weight) != 0
        return cls.from_parts(pack_bits(keep), weight[keep], weight.shape[1])

    @classmethod
    def from_quantized(cls, weight: Quantized, keep: Tensor | None = None) -> Bitmask:
        """Encode integers and scales.

        Args:
            weight: The (out, in) weight, whose integers are 0 where it is removed.
            keep: (out, in) bool, True where a weight is kept; by default, all are.
        """
        integers = weight.integers
        keep = torch.ones_like(integers, dtype=torch.bool) if keep is None else keep
        return cls.from_parts(pack_bits(keep), integers[keep], integers.shape[1], scales=weight.scales, format=weight.format)

    @classmethod
    def from_parts(
        cls,
        mask: Tensor,
        values: Tensor,
        columns: int,
        *,
        scales: Tensor | None = None,
        format: IntegerFormat | None = None,
    ) -> Bitmask:
        """Build a matrix from its mask, as in `mask`, and its kept values, row by row: floating-point ones or int8 integers."""
        shape, row_starts = (mask.shape[0], columns), starts_of_rows(mask, format)
        if format is not None and format.bits < 8:
            halves = torch.zeros(2 * int(row_starts[-1]), dtype=torch.uint8, device=mask.device)
            halves.masked_scatter_(_occupied(mask), values.view(torch.uint8) & 15)
            values = halves[::2] | halves[1::2] << 4
        return cls(shape, mask, torch.cat([values, values.new_zeros(VALUES_PADDING)]), row_starts, scales, format)

    @property
    def kept(self) -> int:
        """Number of kept weights."""
        return int(count_bits(self.mask).sum())

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        parts = (self.mask, self.values, self.row_starts, self.scales)
        return sum(part.nbytes for part in parts if part is not None)

    def check(self) -> None:
        """Check that kernels can read the parts, and that these agree. Reads the mask once.

        Raises:
            InvalidSetting: A part has another dtype, shape or device than kernels read, or they would read values that are
                another row's, or behind the last one.
        """
        rows, columns = self.shape
        kinds: tuple[torch.dtype, ...] = DTYPES if self.format is None else (integer_dtype(self.format),)
        needed: dict[str, tuple[Tensor, tuple[torch.dtype, ...], tuple[int, ...]]] = {
            "mask": (self.mask, (torch.uint8,), (rows, -(-columns // MASK_WORD) * MASK_WORD // 8)),
            "row_starts": (self.row_starts, (torch.int64,), (rows + 1,)),
            "values": (self.values, kinds, (self.values.numel(),)),
        }
        if self.scales is not None and self.format is not None:
            needed["scales"] = self.scales, (torch.bfloat16,), (rows, self.format.groups(columns))
        for name, (part, dtypes, shape) in needed.items():
            fits = part.shape == shape and part.dtype in dtypes and part.device == self.mask.device
            if not (fits and part.is_contiguous() and is_aligned(part)):
                dtype = " or ".join(map(dtype_name, dtypes))
                raise InvalidSetting(
                    f"`{name}` of a packed matrix is {dtype_name(part.dtype)} of shape {tuple(part.shape)} on {part.device}; "
                    f"contiguous and aligned {dtype} of shape {shape} on {self.mask.device} is needed."
                )
        starts = starts_of_rows(self.mask, self.format)
        behind = self.mask[:, -(-columns // 8) :].any() or (columns % 8 and (self.mask[:, columns // 8] >> columns % 8).any())
        if behind or not torch.equal(self.row_starts, starts) or len(self.values) != starts[-1] + VALUES_PADDING:
            raise InvalidSetting(
                "`mask`, `row_starts` and `values` of a packed matrix contradict each other. Load the weight again."
            )

    def kept_values(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Return the kept values of rows `start` to `stop`, row by row, (kept,): floating-point ones, or int8 integers."""
        stop = self.shape[0] if stop is None else stop
        first, last = self.row_starts[[start, stop]].tolist()
        values = self.values[first:last]
        if values.dtype is not torch.uint8:
            return values
        halves = torch.stack([values & 15, values >> 4], dim=1).flatten()
        signed = (halves ^ 8).view(torch.int8) - 8
        return signed[_occupied(self.mask[start:stop])]

    def to_integers(self, start: int = 0, stop: int | None = None) -> Tensor:
        """Decode the integers of rows `start` to `stop`: (stop - start, in) int8, 0 where a weight is removed."""
        stop = self.shape[0] if stop is None else stop
        keep = unpack_bits(self.mask[start:stop], self.shape[1])
        return torch.zeros(keep.shape, dtype=torch.int8, device=keep.device).masked_scatter_(
            keep, self.kept_values(start, stop)
        )

    def to_dense(self, start: int = 0, stop: int | None = None, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """Decode rows `start` to `stop`: (stop - start, in).

        Floating-point values have their own dtype and bits; products of scales and integers are rounded to `dtype`.
        """
        stop = self.shape[0] if stop is None else stop
        if self.format is not None and self.scales is not None:
            return dequantized(self.to_integers(start, stop), self.scales[start:stop], self.format.group_size).to(dtype)
        keep = unpack_bits(self.mask[start:stop], self.shape[1])
        values = bits_of(self.kept_values(start, stop))  # torch writes a lone number as a scalar, which changes the bits of NaN
        dense = values.new_zeros(keep.shape)
        dense[keep] = values
        return dense.view(self.values.dtype)


def is_aligned(tensor: Tensor) -> bool:
    """Whether a tensor begins at a multiple of the size of its numbers, as processors and compilers may rely on."""
    return tensor.data_ptr() % tensor.itemsize == 0


def bits_of(weight: Tensor) -> Tensor:
    """Return the bits of each number as an integer, in the same memory if the weight is contiguous."""
    return weight.contiguous().view(torch.int32 if weight.element_size() == 4 else torch.int16)


def pack_bits(keep: Tensor) -> Tensor:
    """Pack a boolean (out, in) matrix into (out, 8 · ceil(in / 64)) bytes, the lowest bit first."""
    rows, columns = keep.shape
    padded = keep.new_zeros(rows, -(-columns // MASK_WORD) * MASK_WORD)
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


def integer_dtype(format: IntegerFormat) -> torch.dtype:
    """Dtype of the bytes that hold integers."""
    return torch.int8 if format.bits == 8 else torch.uint8


def starts_of_rows(mask: Tensor, format: IntegerFormat | None) -> Tensor:
    """Positions of the first values of rows, then the number of values, that a mask calls for: (out + 1,) int64."""
    if format is None or format.bits == 8:
        counts = count_bits(mask)
    else:  # two in a byte, from a new byte in each 64 columns
        words = count_bits(mask.view(-1, MASK_WORD // 8))
        counts = ((words + 1) // 2).view(len(mask), mask.shape[1] * 8 // MASK_WORD).sum(1)
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)])


def _occupied(mask: Tensor) -> Tensor:
    """Return which halves of the bytes hold a number, and not the padding of 64 columns with an odd number of them."""
    counts = count_bits(mask.view(-1, MASK_WORD // 8))
    ends = ((counts + 1) // 2 * 2).cumsum(0)
    occupied = torch.ones(int(ends[-1]) if len(ends) else 0, dtype=torch.bool, device=mask.device)
    occupied[ends[counts % 2 == 1] - 1] = False
    return occupied
