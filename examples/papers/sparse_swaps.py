r"""SparseSwaps: a mask is improved by exchanging a kept weight for a removed one, the best pair of each row at a time.

Zimmer, Roux, Wagner, Hendrych and Pokutta, *SparseSwaps: Tractable LLM Pruning Mask Refinement at Scale*, 2025,
arXiv 2512.10922.

Weights keep their values, so the error of a row w depends on what is removed only: with the removed part r and the Gram matrix
G of the inputs it is rᵀ G r. Exchanging a kept weight u for a removed one p changes r by w_u e_u - w_p e_p, and the error by

    2 w_u c_u + w_u² G_uu - 2 w_p c_p + w_p² G_pp - 2 w_u w_p G_up,    c = G r,

so that the best pair is found exactly, without a pass over the inputs. Every row exchanges its best pair until none lowers its
error, or until it has made `swaps` exchanges. With N:M the two weights are of one group. The error never grows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from sparsellm import Gram, LayerProblem, LayerSolver, Pattern, TokenCount, Wanda
from sparsellm.errors import InvalidSetting

ENTRIES = 1 << 18
"""Pairs of weights that are compared at once, which bounds the memory."""

LEAST_GAIN = 1e-6
"""Least decrease of a row's error, as a fraction of it, for which weights are exchanged: more than rounding adds."""


@dataclass(frozen=True)
class SparseSwaps:
    """Exchanges of kept and removed weights, the best of each row at a time (Zimmer et al., 2025). Values do not change.

    Attributes:
        solver: Chooses the first mask.
        swaps: Most exchanges in a row.
    """

    solver: LayerSolver = field(default_factory=Wanda)
    swaps: int = 100

    needs: ClassVar[type[TokenCount]] = Gram

    def __post_init__(self) -> None:
        if self.swaps < 0:
            raise InvalidSetting(f"`swaps` of sparse-swaps must be at least 0, got {self.swaps}.")

    def solve(self, problem: LayerProblem, pattern: Pattern) -> Tensor:
        if not (pattern.is_shareable or pattern.n_m):
            raise InvalidSetting(
                f"sparse-swaps exchanges weights of a row or group, which {pattern} may not let. Use 50% or 2:4."
            )
        weight, gram = problem.weight, problem.gram
        keep = self.solver.solve(problem, pattern) != 0
        fixed = torch.zeros_like(keep) if problem.pruned_mask is None else problem.pruned_mask
        span = pattern.column_span or weight.shape[1]
        rows = max(1, ENTRIES // (weight.shape[1] * span))
        parts = zip(weight.split(rows), keep.split(rows), fixed.split(rows), strict=True)
        return weight * torch.cat([self._exchange(w, k, f, gram, span) for w, k, f in parts])

    def _exchange(self, weight: Tensor, keep: Tensor, fixed: Tensor, gram: Tensor, span: int) -> Tensor:
        """The mask of some rows after their exchanges.

        Args:
            weight: (rows, in).
            keep: The first mask, (rows, in).
            fixed: True for weights that stay removed, (rows, in).
            gram: G, (in, in).
            span: Columns of a group, within which weights are exchanged.
        """
        count, columns = weight.shape
        keep = keep.clone()
        groups = torch.arange(columns, device=weight.device).view(-1, span)
        squares = gram[groups.unsqueeze(2), groups.unsqueeze(1)]  # G within each group, (groups, span, span)
        grouped = weight.view(count, -1, span)
        pairs = -2 * grouped.unsqueeze(3) * grouped.unsqueeze(2) * squares  # -2 w_u w_p G_up, (rows, groups, span, span)
        own = weight.square() * gram.diagonal()
        lost = weight * ~keep
        slope = lost @ gram  # c
        error = (lost * slope).sum(1)
        sums = torch.empty_like(pairs)
        for _ in range(self.swaps):
            removing = (2 * weight * slope + own).masked_fill(~keep, torch.inf).view(grouped.shape)
            adding = (own - 2 * weight * slope).masked_fill(keep | fixed, torch.inf)
            torch.add(pairs, removing.unsqueeze(2), out=sums)  # u is the last index
            change, added = (sums.amin(3).flatten(1) + adding).min(1)
            gains = change < -LEAST_GAIN * error
            if not bool(gains.any()):
                break
            row, added = gains.nonzero().squeeze(1), added[gains]
            removed = sums.flatten(1, 2)[row, added].argmin(1) + added // span * span
            keep[row, removed], keep[row, added] = False, True
            slope[row] += weight[row, removed, None] * gram[removed] - weight[row, added, None] * gram[added]
            error[row] += change[gains]
        return keep
