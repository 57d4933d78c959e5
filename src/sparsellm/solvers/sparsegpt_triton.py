"""SparseGPT's loop over a block's columns as one Triton kernel, for NVIDIA GPUs; without Triton there is the plain loop."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from sparsellm.runtime import devices
from sparsellm.solvers.patterns import NM, Pattern, Unstructured

try:  # comes with torch's CUDA wheels, and with no other
    import triton
    import triton.language as tl
except ImportError:
    triton = None

MAX_COLUMNS = 128
"""Columns that a program keeps in its registers; wider blocks take the plain loop."""

MAX_GROUP = 31
"""Of N:M: a group's mask is the bits of one integer."""

ROWS_PER_PROGRAM = 4
"""Rows of the weight for each program, which is one warp: no sum over columns waits for another. With 8 the compiler no longer
finds registers enough for N:M (ptxas, compute capability 8.0 and 9.0); not timed."""

MIN_CAPABILITY = (7, 0)
"""The oldest GPUs that Triton compiles for."""

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _kernel(  # type: ignore[no-untyped-def]
        columns,
        factor,
        keep,
        count,
        outputs,
        GROUP: tl.constexpr,  # noqa: N803
        ZEROS: tl.constexpr,  # noqa: N803
        COLUMNS: tl.constexpr,  # noqa: N803
        LANES: tl.constexpr,  # noqa: N803
    ):
        """Some rows of the weight through all columns of the block: what `sweep` says, for one program's lanes."""
        lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
        index = tl.arange(0, COLUMNS)
        inside = (index < count)[:, None] & (lane < outputs)[None, :]
        tile = tl.load(columns + index[:, None] * outputs + lane[None, :], mask=inside, other=0.0)
        diagonal = tl.load(factor + index * (count + 1), mask=index < count, other=1.0)
        bits = tl.zeros((LANES,), dtype=tl.int32)  # which of the present group stay, the first in the lowest
        for j in range(count):
            here = (index == j)[:, None]
            column = tl.sum(tl.where(here, tile, 0.0), 0)
            if GROUP == 0:
                stays = tl.load(keep + j * outputs + lane, mask=lane < outputs, other=1).to(tl.int32)
            else:
                if j % GROUP == 0:  # the group is decided on the weights as they now are
                    ratio = tl.div_rn(tile, tl.broadcast_to(diagonal[:, None], (COLUMNS, LANES)))
                    score = ratio * ratio
                    rank = tl.zeros((COLUMNS, LANES), dtype=tl.int32)
                    for other in range(GROUP):  # how many of the group come before, as in NM.keep
                        rival = tl.sum(tl.where((index == j + other)[:, None], score, 0.0), 0)[None, :]
                        earlier = (rival == score) & (index > j + other)[:, None]
                        rank += ((rival < score) | earlier).to(tl.int32)
                    place = tl.where((index >= j) & (index < j + GROUP), index - j, 0)[:, None]
                    chosen = (index >= j)[:, None] & (index < j + GROUP)[:, None] & (rank >= ZEROS)
                    bits = tl.sum(tl.where(chosen, 1 << place, 0), 0)
                stays = (bits >> (j % GROUP)) & 1
            removed = tl.where(stays != 0, 0.0, column)
            pivot = tl.load(factor + j * (count + 1))
            error = tl.div_rn(removed, tl.broadcast_to(pivot, (LANES,)))
            later = tl.load(factor + j * count + index, mask=(index > j) & (index < count), other=0.0)
            tile -= later[:, None] * error[None, :]
            tile = tl.where(here, tile - removed[None, :], tile)
        tl.store(columns + index[:, None] * outputs + lane[None, :], tile, mask=inside)


def prune_columns(columns: Tensor, factor: Tensor, keep: Tensor | None, pattern: Pattern) -> None:
    """As SparseGPT's plain loop, by the kernel: prune (columns, out) in place.

    columns: contiguous, at most MOST_COLUMNS of them, float32. factor: (columns, columns), upper triangular. keep: the block's
    mask, or None where `pattern` (N:M) decides each group as it is reached.
    """
    count, outputs = columns.shape
    group, zeros = (pattern.group, pattern.zeros) if keep is None and isinstance(pattern, NM) else (0, 0)
    with devices.selected(columns.device):
        _kernel[(triton.cdiv(outputs, ROWS_PER_PROGRAM),)](
            columns,
            factor.contiguous(),  # it may be a part of a larger one
            columns if keep is None else keep.contiguous().view(torch.uint8),
            count,
            outputs,
            GROUP=group,
            ZEROS=zeros,
            COLUMNS=max(16, triton.next_power_of_2(count)),
            LANES=ROWS_PER_PROGRAM,
            num_warps=1,
        )


def is_supported(columns: Tensor, pattern: Pattern) -> bool:
    """Whether `sweep` can take a block of columns (columns, out): their number, their dtype, the pattern, and the device."""
    fits = len(columns) <= MAX_COLUMNS and (pattern.column_span or 0) <= MAX_GROUP and columns.dtype == torch.float32
    return fits and is_available(columns.device)


def compiler_version() -> str:
    """What the kernel is compiled by, with its version."""
    return f"triton {triton.__version__}"


@cache
def is_available(device: torch.device) -> bool:
    """Whether the kernel is for a device and runs there: found out once. It takes a C compiler besides Triton itself."""
    if triton is None or not devices.is_nvidia(device):
        return False
    return devices.capability(device) >= MIN_CAPABILITY and passes_self_test(device)


def passes_self_test(device: torch.device) -> bool:
    """Whether the kernel gives the right answer to the smallest of questions on a device."""
    columns, factor = torch.ones(2, 1, device=device), torch.tensor([[2.0, 1.0], [0.0, 1.0]], device=device)
    keep = torch.tensor([[False], [True]], device=device)
    try:
        prune_columns(columns, factor, keep, Unstructured(0.5))
    except Exception:  # whatever a compiler or a driver may raise: the plain loop gives the same answer
        return False
    return columns.tolist() == [[0.0], [0.5]]
