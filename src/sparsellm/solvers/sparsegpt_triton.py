"""SparseGPT's loop over the columns of a block as one Triton kernel, for NVIDIA GPUs; `sparsegpt` has the plain loop."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from sparsellm.runtime import devices
from sparsellm.solvers.patterns import NM, Pattern, Unstructured

try:  # installed with torch's CUDA wheels only
    import triton
    import triton.language as tl
except ImportError:
    triton = None

MAX_COLUMNS = 128
"""Largest block that fits in the registers of a program; wider blocks use the plain loop."""

MAX_GROUP = 31
"""Largest M of N:M: the mask of a group is stored in the bits of an int32."""

ROWS_PER_PROGRAM = 4
"""Rows of the weight per program. A program is one warp, so that sums over columns need no synchronisation between warps.

With 8 rows the compiler runs out of registers for N:M (ptxas, compute capability 8.0 and 9.0); not timed.
"""

MIN_CAPABILITY = (7, 0)
"""Lowest compute capability that Triton supports."""

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
        """Prune `LANES` rows of the weight through all columns of the block; see `prune_columns`."""
        lane = tl.program_id(0) * LANES + tl.arange(0, LANES)
        index = tl.arange(0, COLUMNS)
        inside = (index < count)[:, None] & (lane < outputs)[None, :]
        tile = tl.load(columns + index[:, None] * outputs + lane[None, :], mask=inside, other=0.0)
        diagonal = tl.load(factor + index * (count + 1), mask=index < count, other=1.0)
        bits = tl.zeros((LANES,), dtype=tl.int32)  # mask of the current group, first column in the lowest bit
        for j in range(count):
            is_current = (index == j)[:, None]
            column = tl.sum(tl.where(is_current, tile, 0.0), 0)
            if GROUP == 0:
                kept = tl.load(keep + j * outputs + lane, mask=lane < outputs, other=1).to(tl.int32)
            else:
                if j % GROUP == 0:  # choose the mask of the group from its updated weights
                    ratio = tl.div_rn(tile, tl.broadcast_to(diagonal[:, None], (COLUMNS, LANES)))
                    score = ratio * ratio
                    rank = tl.zeros((COLUMNS, LANES), dtype=tl.int32)
                    for other in range(GROUP):  # the rank within the group, as in NM.keep
                        compared = tl.sum(tl.where((index == j + other)[:, None], score, 0.0), 0)[None, :]
                        earlier = (compared == score) & (index > j + other)[:, None]
                        rank += ((compared < score) | earlier).to(tl.int32)
                    position = tl.where((index >= j) & (index < j + GROUP), index - j, 0)[:, None]
                    in_mask = (index >= j)[:, None] & (index < j + GROUP)[:, None] & (rank >= ZEROS)
                    bits = tl.sum(tl.where(in_mask, 1 << position, 0), 0)
                kept = (bits >> (j % GROUP)) & 1
            removed = tl.where(kept != 0, 0.0, column)
            pivot = tl.load(factor + j * (count + 1))
            error = tl.div_rn(removed, tl.broadcast_to(pivot, (LANES,)))
            later = tl.load(factor + j * count + index, mask=(index > j) & (index < count), other=0.0)
            tile -= later[:, None] * error[None, :]
            tile = tl.where(is_current, tile - removed[None, :], tile)
        tl.store(columns + index[:, None] * outputs + lane[None, :], tile, mask=inside)


def prune_columns(columns: Tensor, factor: Tensor, keep: Tensor | None, *, pattern: Pattern) -> None:
    """Prune a block of columns in place, like the plain loop `sparsegpt._sweep`.

    Args:
        columns: (columns, out) float32, contiguous, at most `MAX_COLUMNS` columns.
        factor: (columns, columns), upper triangular.
        keep: (columns, out) bool, or None to choose the mask of each N:M group when it is reached, from its updated weights.
        pattern: The pattern, read if `keep` is None.
    """
    count, outputs = columns.shape
    group, zeros = (pattern.group, pattern.zeros) if keep is None and isinstance(pattern, NM) else (0, 0)
    with devices.selected(columns.device):
        _kernel[(triton.cdiv(outputs, ROWS_PER_PROGRAM),)](
            columns,
            factor.contiguous(),  # may be a view into a larger matrix
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
    """Whether `prune_columns` supports a block of columns, (columns, out): its size, dtype and device, and the pattern."""
    is_valid = len(columns) <= MAX_COLUMNS and (pattern.column_span or 0) <= MAX_GROUP and columns.dtype == torch.float32
    return is_valid and is_available(columns.device)


def compiler_version() -> str:
    """Name and version of the compiler of the kernel."""
    return f"triton {triton.__version__}"


@cache
def is_available(device: torch.device) -> bool:
    """Whether the kernel runs on a device, checked once. Besides Triton it needs a C compiler."""
    if triton is None or not devices.is_nvidia(device):
        return False
    return devices.capability(device) >= MIN_CAPABILITY and passes_self_test(device)


def passes_self_test(device: torch.device) -> bool:
    """Whether the kernel compiles and gives the right result on a device, for a weight of two columns."""
    columns, factor = torch.ones(2, 1, device=device), torch.tensor([[2.0, 1.0], [0.0, 1.0]], device=device)
    keep = torch.tensor([[False], [True]], device=device)
    try:
        prune_columns(columns, factor, keep, pattern=Unstructured(0.5))
    except Exception:  # a compiler or driver may raise anything; the plain loop gives the same result
        return False
    return columns.tolist() == [[0.0], [0.5]]
