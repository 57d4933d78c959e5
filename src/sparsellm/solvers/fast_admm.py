"""Swift: what a few steps of ADMM with one penalty find, for one factorisation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from sparsellm.errors import InvalidSetting
from sparsellm.runtime.costs import SolverCost
from sparsellm.solvers.admm import Keep, NormalizedProblem, admm_cost
from sparsellm.solvers.patterns import Pattern
from sparsellm.solvers.problem import LayerProblem
from sparsellm.solvers.statistics import Gram, TokenCount


@dataclass(frozen=True)
class FastADMM:
    r"""The first steps of ADMM, which find most of what all of them find, at a penalty that stays.

    On the problem scaled to a unit diagonal, as `sparsellm.ALPS` has it, with $U = V/\rho$ and a $\rho$ that neither rises nor
    falls:

    $$W \leftarrow W^\star + \rho \, A^{-1}(D - U - W^\star), \quad T \leftarrow \theta W + (1 - \theta) D + U, \quad
      D \leftarrow \text{project}(T), \quad U \leftarrow T - D$$

    where $A$ maps $W$ to $S W G + \rho W$: one factorisation serves all steps, and $W^\star G$ is never made. It begins at
    $T = W^\star$ and ends with conjugate gradients on the last mask, from the last $D$.

    steps: of ADMM. refit_steps: of conjugate gradients on the final mask. penalty: rho, where the Gram's diagonal is 1.
    relaxation: theta, in (0, 2). damping: added to the Gram's diagonal (and the curvature's), as a share of its mean.
    Cost: one factorisation of (in, in), and `steps` + `refit_steps` + 1 products of (out, in) by (in, in). With a full
    curvature: two eigendecompositions, and for each step two such products and two of (out, out) by (out, in), for each step of
    the fit one of either.
    """

    damping: float = 0.01
    steps: int = 6
    refit_steps: int = 3
    penalty: float = 0.6
    relaxation: float = 1.6

    needs: ClassVar[type[TokenCount]] = Gram

    def __post_init__(self) -> None:
        if not self.damping >= 0 or self.steps < 1 or self.refit_steps < 0:
            raise InvalidSetting(
                f"Swift needs damping >= 0, steps >= 1 and refit_steps >= 0, "
                f"got {self.damping}, {self.steps} and {self.refit_steps}."
            )
        if not 0 < self.penalty < float("inf") or not 0 < self.relaxation < 2:
            raise InvalidSetting(
                f"Swift needs a finite penalty > 0 and relaxation in (0, 2), got {self.penalty} and {self.relaxation}."
            )

    def cost(self, curved: bool) -> SolverCost:
        """What a solve takes."""
        return admm_cost(self.steps, self.refit_steps, 1, curved)

    def solve(self, problem: LayerProblem, pattern: Pattern) -> Tensor:
        scaled = NormalizedProblem.of(problem, self.damping)
        sparse, keep = self._search(scaled, partial(problem.keep, pattern))
        return scaled.refit(sparse, keep, self.refit_steps)

    def _search(self, scaled: NormalizedProblem, kept: Keep) -> tuple[Tensor, Tensor]:
        """The last D and its mask, both (out, in)."""
        solve, target = scaled.shifted_solver()(self.penalty), scaled.target
        moved = target
        for _ in range(self.steps):
            keep = kept(moved.abs())
            sparse = moved * keep
            dual = moved - sparse
            weight = solve(sparse - dual - target).mul_(self.penalty).add_(target)
            moved = torch.lerp(sparse, weight, self.relaxation).add_(dual)
        keep = kept(moved.abs())
        return moved * keep, keep
