"""y = W x from compressed sparse rows, by Triton kernels for NVIDIA GPUs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import linear

from sparsellm.runtime import devices
from sparsellm.solvers.sparsegpt import MIN_CAPABILITY
from sparsellm.sparse.bitmask import PADDING, Bitmask, unpack_bits

try:  # installed with torch's CUDA wheels only
    import triton
    import triton.language as tl
except ImportError:
    triton = None

MAX_TOKENS = 8
"""Most tokens of the kernel. For more, the weight is decoded and torch multiplies."""

GROUP = 8
"""Kept values of a row that share a first column. Their own columns are stored relative to it, in one byte each up to 255."""

ENCODED_AT_ONCE = 1 << 24
"""Elements of the mask whose columns are computed at once, with up to 50 bytes for each kept one."""

BLOCK, WARPS = 512, 2
"""Values that a program reads at once, and its warps."""

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _load(values, row_starts, group_starts, first_columns, offsets, row, start, GROUP: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
        """Load values `start` to `start + BLOCK` of a row, their columns, and which of them the row has."""
        first = tl.load(row_starts + row)  # int64: a matrix may have more than 2³¹ values
        number = start + tl.arange(0, BLOCK)
        valid = number < (tl.load(row_starts + row + 1) - first).to(tl.int32)
        group = tl.load(group_starts + row) + number // GROUP
        column = tl.load(first_columns + group, mask=valid, other=0).to(tl.int32)
        column += tl.load(offsets + first + number, mask=valid, other=0).to(tl.int32)
        return tl.load(values + first + number, mask=valid, other=0.0), column, valid

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
        BLOCK: tl.constexpr,  # noqa: N803
    ):
        """Compute one output of all tokens; `x` is (in, TOKENS)."""
        row = tl.program_id(0)
        token = tl.arange(0, TOKENS)
        kept = (tl.load(row_starts + row + 1) - tl.load(row_starts + row)).to(tl.int32)
        total = tl.zeros((BLOCK, TOKENS), dtype=tl.float32)
        for start in range(0, kept, BLOCK):
            weight, column, valid = _load(values, row_starts, group_starts, first_columns, offsets, row, start, GROUP, BLOCK)
            inputs = tl.load(x + column[:, None] * TOKENS + token[None, :], mask=valid[:, None], other=0.0)
            total += weight.to(tl.float32)[:, None] * inputs.to(tl.float32)
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
        BLOCK: tl.constexpr,  # noqa: N803
    ):
        """Write the values of one row into a matrix of zeros."""
        row = tl.program_id(0)
        kept = (tl.load(row_starts + row + 1) - tl.load(row_starts + row)).to(tl.int32)
        for start in range(0, kept, BLOCK):
            weight, column, valid = _load(values, row_starts, group_starts, first_columns, offsets, row, start, GROUP, BLOCK)
            tl.store(dense + row.to(tl.int64) * columns + column, weight, mask=valid)


@dataclass(frozen=True)
class CompressedRows:
    """An (out, in) matrix in compressed sparse rows whose columns take about one byte each.

    Attributes:
        shape: (out, in).
        values: (kept + PADDING,), those of the `Bitmask`, in the same memory.
        row_starts: (out + 1,) int64: position of each row's first value, then the number of kept values.
        group_starts: (out,) int32: number of groups before each row. A group is `GROUP` values of a row; its last one may have
            fewer.
        first_columns: (groups,) int16 or int32: column of each group's first value.
        offsets: (kept + PADDING,) uint8 or int32: column of each value less that of its group's first.
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
        columns, counts = weight.shape[1], weight.row_starts.diff()
        groups = (counts + GROUP - 1) // GROUP
        group_starts = (groups.cumsum(0) - groups).to(torch.int32)
        rows_at_once = max(1, ENCODED_AT_ONCE // max(1, columns))
        parts = [
            _relative_columns(unpack_bits(mask, columns), kept, some)
            for mask, kept, some in zip(*(x.split(rows_at_once) for x in (weight.mask, counts, groups)), strict=True)
        ]
        first_columns, offsets = (torch.cat(x) for x in zip(*parts, strict=True))
        padded = torch.cat([offsets, offsets.new_zeros(PADDING)])
        short = torch.int16 if columns <= torch.iinfo(torch.int16).max else torch.int32
        return cls(
            weight.shape,
            weight.values,
            weight.row_starts,
            group_starts,
            first_columns.to(short),
            padded.to(torch.uint8 if int(padded.max()) <= torch.iinfo(torch.uint8).max else torch.int32),
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
            _dense_kernel[(self.shape[0],)](dense, self.shape[1], *self.parts, GROUP=GROUP, BLOCK=BLOCK, num_warps=WARPS)
        return dense


def _relative_columns(keep: Tensor, counts: Tensor, groups: Tensor) -> tuple[Tensor, Tensor]:
    """Of some rows of a mask, the first column of each group, and the column of each value less it: int32 both.

    Args:
        keep: (rows, in) bool.
        counts: (rows,) kept values of each row.
        groups: (rows,) groups of each row.
    """
    column = keep.nonzero()[:, 1].to(torch.int32)
    number = torch.arange(len(column), device=column.device)
    number -= (counts.cumsum(0) - counts).repeat_interleave(counts)  # within the row
    first_columns = column[number % GROUP == 0]
    group = number.div_(GROUP, rounding_mode="floor").add_((groups.cumsum(0) - groups).repeat_interleave(counts))
    return first_columns, column - first_columns[group]


def matmul(x: Tensor, weight: CompressedRows) -> Tensor:
    """Multiply tokens by a weight, with sums in float32.

    Args:
        x: (tokens, in) float32, float16 or bfloat16, in the dtype and on the device of the weight.
        weight: (out, in).

    Returns:
        (tokens, out), in the dtype of `x`.
    """
    tokens, (outputs, columns) = len(x), weight.shape
    if tokens > MAX_TOKENS:
        return linear(x, weight.to_dense())
    padded = x.new_zeros(columns, triton.next_power_of_2(tokens))
    padded[:, :tokens] = x.T
    y = x.new_empty(tokens, outputs)
    with devices.selected(x.device):
        _product_kernel[(outputs,)](
            padded, y, outputs, tokens, *weight.parts, TOKENS=padded.shape[1], GROUP=GROUP, BLOCK=BLOCK, num_warps=WARPS
        )
    return y


@cache
def is_available(device: torch.device) -> bool:
    """Whether the kernels run on a device, checked once. Besides Triton they need a C compiler."""
    if triton is None or not devices.is_nvidia(device):
        return False
    return devices.capability(device) >= MIN_CAPABILITY and passes_self_test(device)


def passes_self_test(device: torch.device) -> bool:
    """Whether the kernels compile and give the right results on a device, for a weight of two rows."""
    dense = torch.tensor([[0.0, 2.0, 3.0], [4.0, 0.0, 0.0]], device=device)
    weight = CompressedRows.from_bitmask(Bitmask.from_dense(dense))
    try:
        y = matmul(torch.tensor([[1.0, 10.0, 100.0]], device=device), weight)
        decoded = weight.to_dense()
    except Exception:  # a compiler or driver may raise anything; the dense product gives the same result
        return False
    return y.tolist() == [[320.0, 4.0]] and torch.equal(decoded, dense)
