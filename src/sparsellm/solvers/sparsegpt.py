"""SparseGPT: columns left to right, each column's error spread over the columns still to come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from sparsellm.errors import InvalidSetting
from sparsellm.solvers import sparsegpt_triton
from sparsellm.solvers.linalg import add_curvature_diagonal, add_diagonal_, inverse_factor, invert_triangular, upper_factor
from sparsellm.solvers.patterns import Pattern, keep_largest
from sparsellm.solvers.problem import MIN_CURVATURE, LayerProblem
from sparsellm.solvers.statistics import Gram, TokenCount

PANEL = 16
"""Columns whose errors are spread one by one, over each other; beyond them all together, by a product."""


@dataclass(frozen=True)
class SparseGPT:
    r"""Remove the weights that cost least, and let the columns to their right make good.

    With $U$ upper triangular, $G^{-1} = U^\top U$, column by column:

    $$\text{score}_{ij} = w_{ij}^2 / U_{jj}^2, \qquad
      w_{i,k} \leftarrow w_{i,k} - \frac{w_{ij} - \hat w_{ij}}{U_{jj}} U_{jk} \quad (k > j)$$

    Follows Frantar & Alistarh, SparseGPT: massive language models can be accurately pruned in one-shot (ICML 2023),
    Algorithm 1.
    Departs from its code: an unstructured block loses exactly its share (the code removes one weight too many per block), and
    one factorisation serves instead of three, $G = R R^\top$ with $R = U^{-1}$. Of $U$ only diagonal blocks are made: a block B
    takes in what the columns A before it lost when its turn comes, $w_B \leftarrow w_B - (\hat w_A - w_A) R_{AB} R_{BB}^{-1}$.
    With a curvature the scores of row i are multiplied by $1 / [S^{-1}]_{ii}$: what is left of $S_{ii}$ once the other rows
    make good.

    damping: added to the Gram's diagonal, as a share of its mean. block: columns whose unstructured mask is chosen at once.
    Cost: one Cholesky of (in, in), and out · in² / 2 multiply-adds. A block's columns are one kernel on
    NVIDIA GPUs (`column_loop`), a loop elsewhere.
    """

    damping: float = 0.01
    block: int = 128

    needs: ClassVar[type[TokenCount]] = Gram

    def __post_init__(self) -> None:
        if not self.damping >= 0 or self.block < 1:
            raise InvalidSetting(f"SparseGPT needs damping >= 0 and block >= 1, got {self.damping} and {self.block}.")

    def solve(self, problem: LayerProblem, pattern: Pattern) -> Tensor:
        return self._pruned(problem, pattern)

    def solve_async(self, problem: LayerProblem, pattern: Pattern) -> tuple[Tensor, Tensor]:
        failures: list[Tensor] = []
        weight = self._pruned(problem, pattern, failures)
        return weight, ~torch.stack(failures).any()

    def _pruned(self, problem: LayerProblem, pattern: Pattern, failures: list[Tensor] | None = None) -> Tensor:
        """The answer. failures: as for `cholesky`."""
        dead = problem.rms == 0
        # Columns are rows here: the loop then reads and writes contiguous memory.
        columns = problem.weight.T.masked_fill(dead.unsqueeze(1), 0).contiguous()
        moved = torch.empty_like(columns)  # what was taken from each weight so far
        factor = upper_factor(add_diagonal_(problem.gram, self.damping), self.damping, failures)
        height = self._row_factor(problem, failures)
        inputs, outputs = columns.shape
        # A group of N:M must not straddle two blocks.
        block = (
            self.block
            if pattern.column_span is None
            else max(pattern.column_span, self.block // pattern.column_span * pattern.column_span)
        )
        for start in range(0, inputs, block):
            end = min(start + block, inputs)
            here, dense = columns[start:end], columns[start:end].clone()
            pruned_mask = None if problem.pruned_mask is None else problem.pruned_mask.T[start:end]
            diagonal_block = invert_triangular(factor[start:end, start:end])
            here -= diagonal_block.T @ (factor[:start, start:end].T @ moved[:start])
            keep = None
            if pattern.column_span is None:
                # Cumulative rounding: the blocks' counts add up to the layer's exact count.
                removed = pattern.count_removed(outputs * end) - pattern.count_removed(outputs * start)
                keep = _keep_with_pruned(
                    pruned_mask, _scores(here, diagonal_block) * height, partial(keep_largest, removed=removed)
                )
            if pruned_mask is None and sparsegpt_triton.is_supported(here, pattern):
                sparsegpt_triton.prune_columns(here, diagonal_block, keep, pattern)
            else:
                _sweep(here, diagonal_block, keep, pattern, pruned_mask)
            torch.sub(here, dense, out=moved[start:end])
        return columns.T.contiguous()

    def _row_factor(self, problem: LayerProblem, failures: list[Tensor] | None = None) -> Tensor | float:
        """(out,): the factor on each row's scores; it only matters where rows compete, in an unstructured pattern."""
        if problem.curvature is None:
            return 1.0
        factor = inverse_factor(
            add_curvature_diagonal(problem.curvature, max(self.damping, MIN_CURVATURE)), self.damping, failures
        )
        return factor.square().sum(0).reciprocal()


def _scores(columns: Tensor, factor: Tensor) -> Tensor:
    """(columns, out): what the removal of each weight costs, given the columns to its left."""
    return (columns / factor.diagonal().unsqueeze(1)).square()


def _keep_with_pruned(pruned_mask: Tensor | None, score: Tensor, kept: Callable[[Tensor], Tensor]) -> Tensor:
    """What is kept by a score, where what is gone counts first among the removed and never stays."""
    return kept(score) if pruned_mask is None else kept(score.masked_fill(pruned_mask, -1)) & ~pruned_mask


def _sweep(columns: Tensor, factor: Tensor, keep: Tensor | None, pattern: Pattern, pruned_mask: Tensor | None = None) -> None:
    """Prune a block of columns (columns, out) in place.

    keep: the block's mask, or None where `pattern` (N:M) decides each group as it is reached, on the weights as they then are.
    gone: what is removed already, (columns, out).
    """
    errors = torch.empty_like(columns)
    step = (
        PANEL if pattern.column_span is None else max(pattern.column_span, PANEL // pattern.column_span * pattern.column_span)
    )
    for start in range(0, len(columns), step):
        panel, rest = slice(start, start + step), slice(start + step, None)
        mask, lost = (None if some is None else some[panel] for some in (keep, pruned_mask))
        _sweep_panel(columns[panel], factor[panel, panel], mask, pattern, lost, errors[panel])
        columns[rest].addmm_(factor[panel, rest].T, errors[panel], alpha=-1)


def _sweep_panel(
    columns: Tensor, factor: Tensor, keep: Tensor | None, pattern: Pattern, pruned_mask: Tensor | None, errors: Tensor
) -> None:
    """As `_sweep`, for few enough columns that each one's error goes to all the others at once. errors: is written."""
    span = pattern.column_span or len(columns)  # a mask at hand is one decision
    for start in range(0, len(columns), span):
        group = slice(start, start + span)
        here = columns[group]
        if keep is None:
            score, lost = _scores(here, factor[group, group]), None if pruned_mask is None else pruned_mask[group]
            stays = _keep_with_pruned(lost, score, lambda some: pattern.keep(some.T).T)
        else:
            stays = keep
        shares = (~stays).to(columns.dtype) / factor[group, group].diagonal().unsqueeze(1)
        for j, share in enumerate(shares, start):
            torch.mul(columns[j], share, out=errors[j])
            columns[j + 1 :].addr_(factor[j, j + 1 :], errors[j], alpha=-1)
        here.masked_fill_(~stays, 0)
