"""FastADMM: a few ADMM steps with a constant penalty and a single factorisation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from sparsellm.errors import InvalidSetting
from sparsellm.solvers.admm import Keep, NormalizedProblem
from sparsellm.solvers.patterns import Pattern
from sparsellm.solvers.problem import LayerProblem
from sparsellm.solvers.statistics import Gram, TokenCount


@dataclass(frozen=True)
class FastADMM:
    r"""A few ADMM steps with a constant penalty, which reach most of the accuracy of a full search.

    On the problem scaled to a unit diagonal, as in `sparsellm.ALPS`, with $U = V/\rho$ and a constant $\rho$:

    $$W \leftarrow W^\star + \rho \, A^{-1}(D - U - W^\star), \quad T \leftarrow \theta W + (1 - \theta) D + U, \quad
      D \leftarrow \text{project}(T), \quad U \leftarrow T - D$$

    where $A$ maps $W$ to $S W G + \rho W$. One factorisation serves all steps, and $W^\star G$ is never computed. The first
    projection is of $T = W^\star$; conjugate gradients on the last mask, starting at the last $D$, give the result.

    Cost: one (in, in) factorisation, and `steps` + `refit_steps` + 1 products of (out, in) by (in, in). With a full curvature:
    two eigendecompositions, two such products and two of (out, out) by (out, in) per step, and one of each per refit step.

    Attributes:
        damping: Fraction of the mean added to the Gram diagonal (and to the curvature's).
        steps: Number of ADMM steps.
        refit_steps: Conjugate gradient steps on the final mask.
        penalty: rho, for a Gram matrix with a unit diagonal.
        relaxation: Over-relaxation theta, in (0, 2).
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
                f"FastADMM needs damping >= 0, steps >= 1 and refit_steps >= 0, "
                f"got {self.damping}, {self.steps} and {self.refit_steps}."
            )
        if not 0 < self.penalty < float("inf") or not 0 < self.relaxation < 2:
            raise InvalidSetting(
                f"FastADMM needs a finite penalty > 0 and relaxation in (0, 2), got {self.penalty} and {self.relaxation}."
            )

    def solve(self, problem: LayerProblem, pattern: Pattern) -> Tensor:
        normalized = NormalizedProblem.of(problem, self.damping)
        sparse, keep = self._search(normalized, partial(problem.keep, pattern))
        return normalized.refit(sparse, keep, self.refit_steps)

    def _search(self, normalized: NormalizedProblem, mask_of: Keep) -> tuple[Tensor, Tensor]:
        """Return the last projected iterate D and its mask, both (out, in)."""
        solve, target = normalized.shifted_solver()(self.penalty), normalized.target
        unprojected = target  # T
        for _ in range(self.steps):
            keep = mask_of(unprojected.abs())
            sparse = unprojected * keep
            dual = unprojected - sparse
            weight = solve(sparse - dual - target).mul_(self.penalty).add_(target)
            unprojected = torch.lerp(sparse, weight, self.relaxation).add_(dual)
        keep = mask_of(unprojected.abs())
        return unprojected * keep, keep
