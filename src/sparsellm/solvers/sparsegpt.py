"""SparseGPT: prunes columns from left to right and compensates the error of each column in the columns to its right."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from sparsellm.errors import InvalidSetting
from sparsellm.runtime import devices
from sparsellm.solvers.linalg import (
    add_curvature_diagonal,
    add_diagonal_,
    check_pivot,
    inverse_factor_,
    invert_triangular_,
    upper_factor_,
)
from sparsellm.solvers.patterns import Pattern, Unstructured, keep_largest, keep_unpruned
from sparsellm.solvers.problem import MIN_CURVATURE, LayerProblem
from sparsellm.solvers.statistics import Gram, TokenCount

try:  # installed with torch's CUDA wheels only
    import triton
    import triton.language as tl
except ImportError:
    triton = None

PANEL = 16
"""Columns whose errors are propagated one by one within the panel; columns to its right are updated by one matrix product."""

MAX_COLUMNS = 128
"""Largest block that fits in the registers of a program; wider blocks use the plain loop."""

MAX_GROUP = 31
"""Largest M of N:M: the mask of a group is stored in the bits of an int32."""

ROWS_PER_PROGRAM = 4
"""Rows of the weight per program. A program is one warp, so that sums over columns need no synchronisation between warps.

With 8 rows the compiler runs out of registers for N:M (ptxas, compute capability 8.0 and 9.0); not timed.
"""


@dataclass(frozen=True)
class SparseGPT:
    r"""Prune the weights with the smallest error increase, and update the weights to their right to compensate.

    With $U$ upper triangular, $G^{-1} = U^\top U$, column by column:

    $$\text{score}_{ij} = w_{ij}^2 / U_{jj}^2, \qquad
      w_{i,k} \leftarrow w_{i,k} - \frac{w_{ij} - \hat w_{ij}}{U_{jj}} U_{jk} \quad (k > j)$$

    Follows Frantar & Alistarh, SparseGPT: massive language models can be accurately pruned in one-shot (ICML 2023),
    Algorithm 1. Differences from the authors' code: an unstructured block loses exactly its fraction (the code removes one
    weight too many per block), and one factorization, $G = R R^\top$ with $R = U^{-1}$, replaces three. Only the diagonal
    blocks of $U$ are computed: before a block B is pruned, it is updated for the changes of the columns A to its left,
    $w_B \leftarrow w_B - (\hat w_A - w_A) R_{AB} R_{BB}^{-1}$. With a curvature, the scores of row i are multiplied by
    $1 / [S^{-1}]_{ii}$, the part of $S_{ii}$ that the other rows cannot compensate.

    Cost: one (in, in) Cholesky factorization and out · in² / 2 multiply-adds. The columns of a block are pruned by one kernel
    on NVIDIA GPUs (`prune_columns`), and by a loop elsewhere.

    Attributes:
        damping: Fraction of the mean added to the Gram diagonal (and to the curvature's).
        block: Number of columns whose unstructured mask is chosen at once.
    """

    damping: float = 0.01
    block: int = 128

    needs: ClassVar[type[TokenCount]] = Gram

    def __post_init__(self) -> None:
        if not self.damping >= 0 or self.block < 1:
            raise InvalidSetting(f"SparseGPT needs damping >= 0 and block >= 1, got {self.damping} and {self.block}.")

    def solve(self, problem: LayerProblem, pattern: Pattern) -> Tensor:
        factors = self._factorize(problem)
        for pivot, size in factors.pivots:
            check_pivot(pivot, size, self.damping)
        columns = self._prune(problem, pattern, factors)
        del factors  # before the result is copied
        return columns.T.contiguous()

    def solve_async(self, problem: LayerProblem, pattern: Pattern) -> tuple[Tensor, Tensor]:
        factors = self._factorize(problem)
        succeeded = torch.stack([pivot for pivot, _ in factors.pivots]) == 0
        return self._prune(problem, pattern, factors).T.contiguous(), succeeded.all()

    def _factorize(self, problem: LayerProblem) -> _Factors:
        """Factorize the damped Gram matrix, and the damped curvature if there is one, without a device synchronisation."""
        factor, pivot = upper_factor_(add_diagonal_(problem.gram, self.damping))
        if problem.curvature is None:
            return _Factors(factor, 1.0, ((pivot, len(factor)),))
        inverse, curvature_pivot = inverse_factor_(add_curvature_diagonal(problem.curvature, max(self.damping, MIN_CURVATURE)))
        pivots = (pivot, len(factor)), (curvature_pivot, len(inverse))
        return _Factors(factor, inverse.square().sum(0).reciprocal(), pivots)

    def _prune(self, problem: LayerProblem, pattern: Pattern, factors: _Factors) -> Tensor:
        """The pruned weight's columns, (in, out)."""
        columns = problem.weight.T.masked_fill((problem.rms == 0).unsqueeze(1), 0).contiguous()  # (in, out)
        changes = torch.empty_like(columns)  # pruned minus dense, for the columns done
        factor, (inputs, outputs) = factors.gram, columns.shape
        block = _multiple_of_span(self.block, pattern)
        for start in range(0, inputs, block):
            end = min(start + block, inputs)
            block_columns, dense = columns[start:end], columns[start:end].clone()
            pruned_mask = None if problem.pruned_mask is None else problem.pruned_mask.T[start:end]
            block_factor = invert_triangular_(factor[start:end, start:end].clone())
            block_columns -= block_factor.T @ (factor[:start, start:end].T @ changes[:start])
            keep = None
            if pattern.column_span is None:
                # Cumulative rounding: the blocks' counts add up to the layer's exact count.
                removed = pattern.count_removed((outputs, end)) - pattern.count_removed((outputs, start))
                score = _scores(block_columns, block_factor) * factors.row
                keep = keep_unpruned(pruned_mask, score, partial(keep_largest, removed=removed))
            if pruned_mask is None and kernel_supports(block_columns, pattern):
                prune_columns(block_columns, block_factor, keep, pattern=pattern)
            else:
                _sweep(block_columns, block_factor, keep, pattern=pattern, pruned_mask=pruned_mask)
            torch.sub(block_columns, dense, out=changes[start:end])
        return columns


class _Factors(NamedTuple):
    """Factors of a layer problem.

    Attributes:
        gram: R, (in, in), upper triangular.
        row: (out,), factor on the scores of each row; affects unstructured patterns only, which compare rows.
        pivots: The pivot at which each factorization failed, as `cholesky_ex_` gives it, and the size of its matrix.
    """

    gram: Tensor
    row: Tensor | float
    pivots: tuple[tuple[Tensor, int], ...]


def _multiple_of_span(columns: int, pattern: Pattern) -> int:
    """The largest multiple of the pattern's column span up to `columns`, at least one span: no N:M group is split."""
    span = pattern.column_span or 1
    return max(span, columns // span * span)


def _scores(columns: Tensor, factor: Tensor) -> Tensor:
    """(columns, out): error increase from removing each weight, with the columns to its left fixed."""
    return (columns / factor.diagonal().unsqueeze(1)).square()


def _sweep(
    columns: Tensor, factor: Tensor, keep: Tensor | None, *, pattern: Pattern, pruned_mask: Tensor | None = None
) -> None:
    """Prune a block of columns in place.

    Args:
        columns: (columns, out).
        factor: The diagonal block of U, (columns, columns).
        keep: (columns, out) bool, or None to choose the mask of each N:M group when it is reached, from its updated weights.
        pattern: The pattern, read if `keep` is None.
        pruned_mask: (columns, out) bool, weights already removed.
    """
    step = _multiple_of_span(PANEL, pattern)
    for start in range(0, len(columns), step):
        panel, rest = slice(start, start + step), slice(start + step, None)
        panel_keep, panel_pruned = (None if mask is None else mask[panel] for mask in (keep, pruned_mask))
        errors = _sweep_panel(columns[panel], factor[panel, panel], panel_keep, pattern=pattern, pruned_mask=panel_pruned)
        columns[rest].addmm_(factor[panel, rest].T, errors, alpha=-1)


def _sweep_panel(
    columns: Tensor, factor: Tensor, keep: Tensor | None, *, pattern: Pattern, pruned_mask: Tensor | None
) -> Tensor:
    """`_sweep` for one panel, where each column updates all later ones at once; returns the scaled errors, (columns, out)."""
    errors = torch.empty_like(columns)
    span = pattern.column_span or len(columns)
    for start in range(0, len(columns), span):
        group = slice(start, start + span)
        if keep is None:
            group_pruned = None if pruned_mask is None else pruned_mask[group]
            score = _scores(columns[group], factor[group, group])
            group_keep = keep_unpruned(group_pruned, score, lambda scores: pattern.keep(scores.T).T)
        else:
            group_keep = keep
        error_scales = (~group_keep).to(columns.dtype) / factor[group, group].diagonal().unsqueeze(1)
        for j, error_scale in enumerate(error_scales, start):
            torch.mul(columns[j], error_scale, out=errors[j])
            columns[j + 1 :].addr_(factor[j, j + 1 :], errors[j], alpha=-1)
        columns[group].masked_fill_(~group_keep, 0)
    return errors


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
    """Prune a block of columns in place, like the plain loop `_sweep`.

    Args:
        columns: (columns, out) float32, contiguous, at most `MAX_COLUMNS` columns.
        factor: (columns, columns), upper triangular.
        keep: (columns, out) bool, or None to choose the mask of each N:M group when it is reached, from its updated weights.
        pattern: The pattern, read if `keep` is None.
    """
    count, outputs = columns.shape
    zeros, group = pattern.n_m or (0, 0) if keep is None else (0, 0)
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


def kernel_supports(columns: Tensor, pattern: Pattern) -> bool:
    """Whether `prune_columns` supports a block of columns, (columns, out): its size, dtype and device, and the pattern."""
    has_mask = pattern.column_span is None or (pattern.n_m is not None and pattern.column_span <= MAX_GROUP)
    return has_mask and len(columns) <= MAX_COLUMNS and columns.dtype == torch.float32 and has_kernel(columns.device)


def kernel_compiler() -> str:
    """Name and version of the compiler of the kernel."""
    return f"triton {triton.__version__}"


@cache
def has_kernel(device: torch.device) -> bool:
    """Whether the kernel runs on a device, checked once."""
    return triton is not None and devices.runs_triton(device, kernel_passes_self_test)


def kernel_passes_self_test(device: torch.device) -> bool:
    """Whether the kernel compiles and gives the right result on a device, for a weight of two columns."""
    columns, factor = torch.ones(2, 1, device=device), torch.tensor([[2.0, 1.0], [0.0, 1.0]], device=device)
    keep = torch.tensor([[False], [True]], device=device)
    try:
        prune_columns(columns, factor, keep, pattern=Unstructured(0.5))
    except Exception:  # a compiler or driver may raise anything; the plain loop gives the same result
        return False
    return columns.tolist() == [[0.0], [0.5]]
