"""ALPS: the mask by ADMM, the weights by conjugate gradients on it. As its authors run it, and more thoroughly."""

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

PENALTY_START = 0.1
"""The first rho, for a Gram scaled to a unit diagonal; the paper's value."""

CHECK_EVERY = 3
"""Iterations between two looks at how much the kept set moves; the paper's value."""

MIN_ITERATIONS = 30
"""No stop for a small change before this many; the paper's value."""

MIN_PENALTY = 1e-4
"""Below this rho the search no longer starts over: a mask that did not move by then will not."""

SETTLED = 3e-4
"""The share of the kept set that may still change when the search stops; the paper's value."""


@dataclass(frozen=True)
class ALPS:
    r"""Search mask and weights together by ADMM, then fit the weights on the mask found.

    On the problem scaled to a unit diagonal (damped $G$, and $S$ if there is one), with a penalty $\rho$ that rises as the mask
    settles:

    $$S W G + \rho W = S W^\star G - V + \rho D, \quad \hat W = \theta W + (1 - \theta) D, \quad
      D \leftarrow \text{project}(\hat W + V/\rho), \quad V \leftarrow V + \rho (\hat W - D)$$

    Follows Meng et al., ALPS: improved optimization for highly sparse one-shot pruning (NeurIPS 2024), Algorithm 1 and its
    schedule of penalties. Departs from its code: one Cholesky per penalty, where the weights are, in place of an
    eigendecomposition in float64; dead inputs get zero weights. Departs from the paper: with a full curvature $S$ the first
    step is solved exactly, in the eigenvectors of $S$ and $G$; over-relaxation $\theta$ and the pace of the penalty
    (`thorough`).

    damping: added to the Gram's diagonal (and the curvature's), as a share of its mean. iterations: of ADMM, at most.
    refit_steps: of conjugate gradients on the final mask. pace: the power to which the paper's growth of the penalty is raised;
    below 1 the mask has longer to settle. relaxation: theta, in (0, 2); the paper's 1.
    Cost: a factorisation of (in, in) for every third iteration, and a product of (out, in) by (in, in) for each. With a full
    curvature: two eigendecompositions in all, and two such products and two of (out, out) by (out, in) for each iteration.
    """

    damping: float = 0.01
    iterations: int = 300
    refit_steps: int = 10
    penalty_growth: float = 1.0
    relaxation: float = 1.0

    needs: ClassVar[type[TokenCount]] = Gram

    def __post_init__(self) -> None:
        if not self.damping >= 0 or self.iterations < 1 or self.refit_steps < 0:
            raise InvalidSetting(
                f"ALPS needs damping >= 0, iterations >= 1 and refit_steps >= 0, "
                f"got {self.damping}, {self.iterations} and {self.refit_steps}."
            )
        if not 0 < self.penalty_growth <= 1 or not 0 < self.relaxation < 2:
            raise InvalidSetting(
                f"ALPS needs pace in (0, 1] and relaxation in (0, 2), got {self.penalty_growth} and {self.relaxation}."
            )

    @classmethod
    def accurate(cls) -> ALPS:
        """Half the pace, over-relaxed, and twice the refit: 3-4 % less error for 1.6 times the time (docs/methods/alps.md)."""
        return cls(refit_steps=20, penalty_growth=0.5, relaxation=1.6)

    def cost(self, curved: bool) -> SolverCost:
        """What a solve takes: the search mostly ends after `MIN_ITERATIONS`, and later where the penalty rises slower."""
        steps = min(self.iterations, MIN_ITERATIONS / self.penalty_growth**0.85)
        return admm_cost(steps, self.refit_steps, steps / CHECK_EVERY, curved)

    def solve(self, problem: LayerProblem, pattern: Pattern) -> Tensor:
        scaled, kept = NormalizedProblem.of(problem, self.damping), partial(problem.keep, pattern)
        chosen = self._search(scaled, kept)
        keep = kept(chosen.abs())
        return scaled.refit(chosen * keep, keep, self.refit_steps)

    def _search(self, scaled: NormalizedProblem, kept: Keep) -> Tensor:
        """The final ADMM iterate, (out, in): its largest entries are the mask, and the start of the refit."""
        target, gram, curvature = scaled.target, scaled.gram, scaled.curvature
        aim = target @ gram if curvature is None else curvature @ target @ gram
        shifted = scaled.shifted_solver()
        penalty = PENALTY_START
        solve = shifted(penalty)
        dual = torch.zeros_like(target)
        keep = kept(target.abs())
        sparse = target * keep
        seen = keep  # the kept set at the last look
        moved_before = False
        weight = target
        for iteration in range(1, self.iterations + 1):
            weight = solve(aim - dual + penalty * sparse)
            relaxed = weight if self.relaxation == 1 else torch.lerp(sparse, weight, self.relaxation)
            sparse = relaxed + dual / penalty
            keep = kept(sparse.abs())
            sparse *= keep
            dual += penalty * (relaxed - sparse)
            if iteration % CHECK_EVERY:
                continue
            change = float((keep ^ seen).sum()) / max(float(keep.sum()), 1.0)
            seen = keep
            if (iteration >= MIN_ITERATIONS and change < SETTLED) or (change == 0 and moved_before):
                break
            moved_before = moved_before or change > 0.005 or penalty < MIN_PENALTY
            growth = _penalty_factor(change, moved_before)
            if growth < 1:  # the penalty froze the mask before it could move: start over, gentler
                dual, sparse = torch.zeros_like(target), target
            else:
                growth **= self.penalty_growth
            penalty = min(penalty * growth, 1e6)
            solve = shifted(penalty)
        return weight


def _penalty_factor(change: float, moved_before: bool) -> float:
    """The factor on the penalty after a look at which `change` of the kept set was new; the paper's values."""
    if change > 0.1:
        return 1.3
    if change > 0.005:
        return 1.2
    return 1.1 if moved_before else 0.2
