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
from sparsellm.solvers.problem import SolveMemory

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

    def solve_memory(self, curved: bool) -> SolveMemory:
        return SolveMemory(2.6, 4.0)  # G, and G within the groups; the pairs of a row, and their sums

    def _exchange(self, weight: Tensor, keep: Tensor, fixed: Tensor, gram: Tensor, span: int) -> Tensor:
        """The mask of some rows after their exchanges.

        What is held of pairs is -2 w_u w_p G_up, (rows, groups, removed, kept). Where groups keep different numbers of weights,
        places that have none cost infinity.

        Args:
            weight: (rows, in).
            keep: The first mask, (rows, in).
            fixed: True for weights that stay removed, (rows, in).
            gram: G, (in, in).
            span: Columns of a group, within which weights are exchanged.
        """
        keep = keep.clone()
        grouped = keep.view(len(keep), -1, span)
        counts = grouped.sum(2)
        first = torch.arange(0, weight.shape[1], span, device=weight.device).view(-1, 1)
        columns = (~grouped).to(torch.uint8).argsort(dim=2, stable=True) + first  # those of kept weights come first
        kept, removed = columns[..., : int(counts.max())].contiguous(), columns[..., int(counts.min()) :].contiguous()

        def at(values: Tensor, places: Tensor) -> Tensor:
            """The values, (rows, in), at some columns, (rows, groups, count)."""
            return values.gather(1, places.flatten(1)).view(places.shape)

        infinite = torch.full_like(weight, torch.inf)
        no_weight = at(infinite.masked_fill(keep, 0), kept), at(infinite.masked_fill(~(keep | fixed), 0), removed)
        pairs = -2 * at(weight, removed).unsqueeze(3) * at(weight, kept).unsqueeze(2)
        pairs *= gram[removed.unsqueeze(3), kept.unsqueeze(2)]
        own, sums = weight.square() * gram.diagonal(), torch.empty_like(pairs)
        lost = weight * ~keep
        slope = lost @ gram  # c
        error = (lost * slope).sum(1)
        for _ in range(self.swaps):
            removing = at(own + 2 * weight * slope, kept) + no_weight[0]
            adding = at(own - 2 * weight * slope, removed) + no_weight[1]
            torch.add(pairs, removing.unsqueeze(2), out=sums)
            change, place = (sums.amin(3) + adding).flatten(1).min(1)
            gains = change < -LEAST_GAIN * error
            if not bool(gains.any()):
                break
            row, group, p = gains.nonzero().squeeze(1), place[gains] // removed.shape[2], place[gains] % removed.shape[2]
            u = sums[row, group, p].argmin(1)
            out, back = kept[row, group, u], removed[row, group, p]
            keep[row, out], keep[row, back] = False, True
            kept[row, group, u], removed[row, group, p] = back, out
            slope[row] += weight[row, out, None] * gram[out] - weight[row, back, None] * gram[back]
            error[row] += change[gains]
            pick, ours, theirs = row.unsqueeze(1), kept[row, group], removed[row, group]
            pairs[row, group, p] = -2 * weight[row, out, None] * weight[pick, ours] * gram[out.unsqueeze(1), ours]
            pairs[row, group, :, u] = -2 * weight[row, back, None] * weight[pick, theirs] * gram[back.unsqueeze(1), theirs]
        return keep
