"""y = W x from compressed sparse rows, by Triton kernels for NVIDIA GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import linear

from sparsellm.extensions.packed.formats.bitmask import VALUES_PADDING, Bitmask, unpack_bits
from sparsellm.runtime import devices

try:  # installed with torch's CUDA wheels only
    import triton
    import triton.language as tl
except ImportError:
    triton = None

MAX_CSR_TOKENS = 16
"""Most tokens of the kernel. For more, the weight is decoded and torch multiplies, which takes longer
than the kernel for 16 tokens on an NVIDIA H100."""

GROUP = 8
"""Positions among the kept values that are read at once. Those that belong to one row share a first column; their own columns
are stored relative to it, in one byte each up to 255."""

ENCODED_AT_ONCE = 1 << 24
"""Elements of the mask whose columns are computed at once, with about 60 bytes for each kept one."""

GROUPS, WARPS = 64, 2
"""Groups that a program reads at once, and its warps: the fastest of eight pairs on an NVIDIA H100."""

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _extent(row_starts, row, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
        """The positions of a row's first value and after its last one, and of the aligned groups around them."""
        first, end = tl.load(row_starts + row), tl.load(row_starts + row + 1)  # int64: there may be more than 2³¹ values
        aligned = first // GROUP * GROUP
        return first, end, aligned, (end - aligned).to(tl.int32)

    @triton.jit  # type: ignore[untyped-decorator]
    def _product_kernel(  # type: ignore[no-untyped-def]
        x,
        y,
        outputs,
        tokens,
        values,
        row_starts,
        group_starts,
        first_columns,
        offsets,
        TOKENS: tl.constexpr,  # noqa: N803
        GROUP: tl.constexpr,  # noqa: N803
        GROUPS: tl.constexpr,  # noqa: N803
    ):
        """Compute one output of all tokens; `x` is (in, TOKENS)."""
        row = tl.program_id(0)
        token = tl.arange(0, TOKENS)
        first, end, aligned, length = _extent(row_starts, row, GROUP)
        group_start = tl.load(group_starts + row)
        total = tl.zeros((GROUPS, TOKENS), dtype=tl.float32)
        for start in range(0, length, GROUPS * GROUP):
            number = start // GROUP + tl.arange(0, GROUPS)
            inside = number * GROUP < length
            place = aligned + number[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
            # These masks are those of whole groups, so that each group is one wide load. Some of it may be of another row.
            weight = tl.load(values + place, mask=inside[:, None], other=0.0)
            column = tl.load(offsets + place, mask=inside[:, None], other=0).to(tl.int32)
            column += tl.load(first_columns + group_start + number, mask=inside, other=0).to(tl.int32)[:, None]
            # What is not the row's is not multiplied, nor are removed weights: 0 times infinity is NaN.
            valid = (place >= first) & (place < end)
            inputs = tl.load(x + column[:, :, None] * TOKENS + token[None, None, :], mask=valid[:, :, None], other=0.0)
            weight = tl.where(valid, weight.to(tl.float32), 0.0)
            total += tl.sum(weight[:, :, None] * inputs.to(tl.float32), 1)
        tl.store(y + token * outputs + row, tl.sum(total, 0).to(y.dtype.element_ty), mask=token < tokens)

    @triton.jit  # type: ignore[untyped-decorator]
    def _dense_kernel(  # type: ignore[no-untyped-def]
        dense,
        columns,
        values,
        row_starts,
        group_starts,
        first_columns,
        offsets,
        GROUP: tl.constexpr,  # noqa: N803
        GROUPS: tl.constexpr,  # noqa: N803
    ):
        """Write the values of one row into a matrix of zeros, neighbors by neighboring threads."""
        row = tl.program_id(0)
        first, end, _, _ = _extent(row_starts, row, GROUP)
        group_start = tl.load(group_starts + row) - first // GROUP
        for start in range(0, (end - first).to(tl.int32), GROUPS * GROUP):
            place = first + start + tl.arange(0, GROUPS * GROUP)
            column = tl.load(first_columns + group_start + place // GROUP, mask=place < end, other=0).to(tl.int32)
            column += tl.load(offsets + place, mask=place < end, other=0).to(tl.int32)
            weight = tl.load(values + place, mask=place < end, other=0.0)
            tl.store(dense + row.to(tl.int64) * columns + column, weight, mask=place < end)


@dataclass(frozen=True)
class CompressedRows:
    """An (out, in) matrix in compressed sparse rows whose columns take about one byte each.

    Attributes:
        shape: (out, in).
        values: (kept + VALUES_PADDING,), those of the `Bitmask`, in the same memory.
        row_starts: (out + 1,) int64: position of each row's first value, then the number of kept values.
        group_starts: (out,) int32: number of groups before each row. A group of a row is those of its values whose positions
            have the same quotient by `GROUP`.
        first_columns: (groups,) of an integer dtype: column of each group's first value.
        offsets: (kept + VALUES_PADDING,) of an integer dtype, uint8 if it is wide enough: column of each value less its
            group's first.
    """

    shape: tuple[int, int]
    values: Tensor
    row_starts: Tensor
    group_starts: Tensor
    first_columns: Tensor
    offsets: Tensor

    @classmethod
    def from_bitmask(cls, weight: Bitmask) -> CompressedRows:
        """Encode a matrix on the device of its parts."""
        columns, starts = weight.shape[1], weight.row_starts
        groups = ((starts[1:] + GROUP - 1) // GROUP - starts[:-1] // GROUP).where(starts[1:] > starts[:-1], 0)
        group_starts = (groups.cumsum(0) - groups).to(torch.int32)
        rows_at_once = max(1, ENCODED_AT_ONCE // max(1, columns))
        parts = [
            _relative_columns(unpack_bits(mask, columns), first, some)
            for mask, first, some in zip(*(x.split(rows_at_once) for x in (weight.mask, starts[:-1], groups)), strict=True)
        ]
        first_columns, offsets = (torch.cat(x) for x in zip(*parts, strict=True))
        padded = torch.cat([offsets, offsets.new_zeros(VALUES_PADDING)])
        return cls(
            weight.shape,
            weight.values,
            weight.row_starts,
            group_starts,
            first_columns.to(_narrowest(columns)),
            padded.to(_narrowest(int(padded.max()))),
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all parts."""
        return sum(part.numel() * part.element_size() for part in self.parts)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        """The tensors, as the kernels take them."""
        return self.values, self.row_starts, self.group_starts, self.first_columns, self.offsets

    def to_dense(self) -> Tensor:
        """Decode the matrix, bit by bit as it was: (out, in)."""
        dense = self.values.new_zeros(self.shape)
        with devices.selected(dense.device):
            _dense_kernel[(self.shape[0],)](dense, self.shape[1], *self.parts, GROUP=GROUP, GROUPS=GROUPS, num_warps=WARPS)
        return dense


def _narrowest(largest: int) -> torch.dtype:
    """The narrowest dtype that holds 0 to a largest number."""
    return next(dtype for dtype in (torch.uint8, torch.int16, torch.int32) if largest <= torch.iinfo(dtype).max)


def _relative_columns(keep: Tensor, starts: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Of some rows of a mask, the first column of each group, and the column of each value less it: int32 both.

    Args:
        keep: (rows, in) bool.
        starts: (rows,) position of each row's first value.
        groups: (rows,) groups of each row.
    """
    row, column = keep.nonzero().unbind(1)
    position = torch.arange(len(row), device=row.device) + starts[0]
    first = starts[row]
    first_columns = column[(position % GROUP == 0) | (position == first)]
    group = (groups.cumsum(0) - groups)[row] + position // GROUP - first // GROUP
    return first_columns.to(torch.int32), (column - first_columns[group]).to(torch.int32)


def csr_matmul(x: Tensor, weight: CompressedRows) -> Tensor:
    """Multiply tokens by a weight, with sums in float32.

    Args:
        x: (tokens, in) float32, float16 or bfloat16, in the dtype and on the device of the weight.
        weight: (out, in).

    Returns:
        (tokens, out), in the dtype of `x`.
    """
    tokens, (outputs, columns) = len(x), weight.shape
    if tokens > MAX_CSR_TOKENS:
        return linear(x, weight.to_dense())
    padded = x.new_zeros(columns, triton.next_power_of_2(tokens))
    padded[:, :tokens] = x.T
    y = x.new_empty(tokens, outputs)
    with devices.selected(x.device):
        _product_kernel[(outputs,)](
            padded, y, outputs, tokens, *weight.parts, TOKENS=padded.shape[1], GROUP=GROUP, GROUPS=GROUPS, num_warps=WARPS
        )
    return y


@cache
def is_available(device: torch.device) -> bool:
    """Whether the kernels run on a device, checked once."""
    return triton is not None and devices.runs_triton(device, passes_self_test)


def passes_self_test(device: torch.device) -> bool:
    """Whether the kernels compile and give the right results on a device, for a weight of two rows."""
    dense = torch.tensor([[0.0, 2.0, 3.0], [4.0, 0.0, 0.0]], device=device)
    weight = CompressedRows.from_bitmask(Bitmask.from_dense(dense))
    try:
        y = csr_matmul(torch.tensor([[1.0, 10.0, 100.0]], device=device), weight)
        decoded = weight.to_dense()
    except Exception:  # a compiler or driver may raise anything; the dense product gives the same result
        return False
    return y.tolist() == [[320.0, 4.0]] and torch.equal(decoded, dense)
