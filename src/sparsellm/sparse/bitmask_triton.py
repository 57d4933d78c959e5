"""y = W x from a bitmask matrix as one Triton kernel, for NVIDIA GPUs and few tokens."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import linear, pad

from sparsellm.runtime import devices
from sparsellm.solvers.sparsegpt import MIN_CAPABILITY
from sparsellm.sparse.bitmask import Bitmask, unpack_bits

try:  # installed with torch's CUDA wheels only
    import triton
    import triton.language as tl
except ImportError:
    triton = None

MAX_TOKENS = 8
"""Most tokens of the kernel. For more, the weight is decoded and torch multiplies."""

SEGMENT = 256
"""Columns that a program reads at once. Where a segment's values begin is stored, 4 bytes for each, so that a program needs no
count of the bits before it; within a segment it counts them itself."""

ROWS_PER_PROGRAM = 4
"""Rows of the weight per program. Not tuned: nothing was timed on a GPU."""

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _kernel(  # type: ignore[no-untyped-def]
        x,
        words,
        values,
        row_starts,
        segment_starts,
        y,
        outputs,
        columns,
        words_per_row,
        segments,
        tokens,
        TOKENS: tl.constexpr,  # noqa: N803
        ROWS: tl.constexpr,  # noqa: N803
        COLUMNS: tl.constexpr,  # noqa: N803
    ):
        """Compute `ROWS` outputs of all tokens, `COLUMNS` columns at a time; see `matmul`."""
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        token = tl.arange(0, TOKENS)
        inside = row < outputs
        first = tl.load(row_starts + row, mask=inside, other=0)  # int64: a matrix may have more than 2³¹ values
        word_of_row = row.to(tl.int64) * words_per_row
        total = tl.zeros((TOKENS, ROWS), dtype=tl.float32)
        for segment in range(segments):
            column = segment * COLUMNS + tl.arange(0, COLUMNS)
            valid = inside[:, None] & (column < columns)[None, :]
            word = tl.load(words + word_of_row[:, None] + (column // 32)[None, :], mask=valid, other=0)
            bit = (word >> (column % 32)[None, :]) & 1
            start = first + tl.load(segment_starts + row * segments + segment, mask=inside, other=0)
            position = start[:, None] + tl.cumsum(bit, 1) - bit
            weight = tl.load(values + position, mask=valid & (bit != 0), other=0.0).to(tl.float32)
            present = (token < tokens)[:, None] & (column < columns)[None, :]
            inputs = tl.load(x + token[:, None] * columns + column[None, :], mask=present, other=0.0).to(tl.float32)
            # A removed weight is not multiplied: 0 times an infinite input would be NaN.
            products = tl.where((bit != 0)[None, :, :], weight[None, :, :] * inputs[:, None, :], 0.0)
            total += tl.sum(products, 2)
        stored = (token < tokens)[:, None] & inside[None, :]
        tl.store(y + token[:, None] * outputs + row[None, :], total.to(y.dtype.element_ty), mask=stored)


def segment_starts(weight: Bitmask) -> Tensor:
    """Count the values before each segment of a row: (out, ceil(in / SEGMENT)) int32."""
    rows, columns = weight.shape
    segments = -(-columns // SEGMENT)
    keep = pad(unpack_bits(weight.mask, columns), (0, segments * SEGMENT - columns))
    counts = keep.view(rows, segments, SEGMENT).sum(-1, dtype=torch.int32)
    return counts.cumsum(1, dtype=torch.int32) - counts


def matmul(x: Tensor, weight: Bitmask, starts: Tensor) -> Tensor:
    """Multiply tokens by a weight, with sums in float32.

    Args:
        x: (tokens, in) float32, float16 or bfloat16, on the device of the weight.
        weight: (out, in).
        starts: (out, segments) int32, the weight's `segment_starts`.

    Returns:
        (tokens, out), in the dtype of `x`.
    """
    if len(x) > MAX_TOKENS:
        return linear(x, weight.to_dense().to(x.dtype))
    outputs, columns = weight.shape
    words = weight.mask.view(torch.int32)
    y = x.new_empty(len(x), outputs)
    with devices.selected(x.device):
        _kernel[(triton.cdiv(outputs, ROWS_PER_PROGRAM),)](
            x.contiguous(),
            words,
            weight.values,
            weight.row_starts,
            starts,
            y,
            outputs,
            columns,
            words.shape[1],
            starts.shape[1],
            len(x),
            TOKENS=triton.next_power_of_2(len(x)),
            ROWS=ROWS_PER_PROGRAM,
            COLUMNS=SEGMENT,
        )
    return y


@cache
def is_available(device: torch.device) -> bool:
    """Whether the kernel runs on a device, checked once. Besides Triton it needs a C compiler."""
    if triton is None or not devices.is_nvidia(device):
        return False
    return devices.capability(device) >= MIN_CAPABILITY and passes_self_test(device)


def passes_self_test(device: torch.device) -> bool:
    """Whether the kernel compiles and gives the right result on a device, for a weight of two rows."""
    weight = Bitmask.from_dense(torch.tensor([[0.0, 2.0, 3.0], [4.0, 0.0, 0.0]], device=device))
    try:
        y = matmul(torch.tensor([[1.0, 10.0, 100.0]], device=device), weight, segment_starts(weight))
    except Exception:  # a compiler or driver may raise anything; the dense product gives the same result
        return False
    return y.tolist() == [[320.0, 4.0]]
