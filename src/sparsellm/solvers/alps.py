"""ALPS: the mask by ADMM, the weights by conjugate gradients, with the paper's settings or slower and more accurate ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from sparsellm.errors import InvalidSetting
from sparsellm.runtime.products import matmul
from sparsellm.solvers.admm import Keep, NormalizedProblem
from sparsellm.solvers.fast_admm import FastADMM
from sparsellm.solvers.patterns import Pattern
from sparsellm.solvers.problem import LayerProblem, SolveMemory
from sparsellm.solvers.statistics import Gram, TokenCount

PENALTY_START = 0.1
"""Initial rho, for a Gram matrix with a unit diagonal; the paper's value."""

CHECK_EVERY = 3
"""Iterations between two checks of how much the mask changes; the paper's value."""

MIN_ITERATIONS = 30
"""Iterations before a small change of the mask may end the search; the paper's value."""

MIN_PENALTY = 1e-4
"""Smallest rho at which a search with an unchanged mask is restarted."""

SETTLED = 3e-4
"""The search ends when a smaller fraction of the kept weights changes between two checks; the paper's value."""


@dataclass(frozen=True)
class ALPS:
    r"""Search mask and weights together by ADMM, then fit the weights on the mask found.

    On the problem scaled to a unit diagonal (damped $G$, and $S$ if there is one), with a penalty $\rho$ that rises as the mask
    converges:

    $$S W G + \rho W = S W^\star G - V + \rho D, \quad \hat W = \theta W + (1 - \theta) D, \quad
      D \leftarrow \text{project}(\hat W + V/\rho), \quad V \leftarrow V + \rho (\hat W - D)$$

    Follows Meng et al., ALPS: improved optimization for highly sparse one-shot pruning (NeurIPS 2024), Algorithm 1 and its
    schedule of penalties. Differences from the authors' code: one Cholesky factorization per penalty on the weights' device
    instead of an eigendecomposition in float64; dead inputs get zero weights. Differences from the paper: with a full curvature
    $S$ the first step is solved exactly, in the eigenvectors of $S$ and $G$; over-relaxation $\theta$ and the exponent
    `penalty_growth` (see `accurate`).

    Cost: one (in, in) factorization every third iteration, and one product of (out, in) by (in, in) per iteration. With a full
    curvature: two eigendecompositions in total, and two such products and two of (out, out) by (out, in) per iteration.

    Attributes:
        damping: Fraction of the mean added to the Gram diagonal (and to the curvature's).
        iterations: Maximum number of ADMM iterations.
        refit_steps: Conjugate gradient steps on the final mask.
        penalty_growth: Exponent in (0, 1] on the paper's growth factor of the penalty; below 1 the penalty rises more slowly.
        relaxation: Over-relaxation theta, in (0, 2); 1 in the paper.
        with_curvature: Solver of problems with a full curvature, called with this solver's damping; None for this one.
    """

    damping: float = 0.01
    iterations: int = 300
    refit_steps: int = 10
    penalty_growth: float = 1.0
    relaxation: float = 1.0
    with_curvature: FastADMM | None = None

    needs: ClassVar[type[TokenCount]] = Gram

    def __post_init__(self) -> None:
        is_pace = 0 < self.penalty_growth <= 1 and 0 < self.relaxation < 2
        if not (self.damping >= 0 and self.iterations >= 1 and self.refit_steps >= 0 and is_pace):
            raise InvalidSetting(
                "ALPS needs damping >= 0, iterations >= 1, refit_steps >= 0, penalty_growth in (0, 1] and relaxation in "
                f"(0, 2), got {self}."
            )

    @classmethod
    def accurate(cls) -> ALPS:
        """Return slower settings with a smaller error (docs/methods/alps-accurate.md).

        With a full curvature they are those of a `FastADMM` with growing penalties.
        """
        curved = FastADMM(refit_steps=5, growth=1.06)
        return cls(refit_steps=20, penalty_growth=0.5, relaxation=1.6, with_curvature=curved)

    def solve(self, problem: LayerProblem, pattern: Pattern) -> Tensor:
        if problem.curvature is not None and self.with_curvature is not None:
            return replace(self.with_curvature, damping=self.damping).solve(problem, pattern)
        normalized, mask_of = NormalizedProblem.of(problem, self.damping), partial(problem.keep, pattern)
        weight = self._search(normalized, mask_of)
        keep = mask_of(weight.abs())
        return normalized.refit(weight * keep, keep, self.refit_steps)

    def in_float32(self) -> ALPS:
        """The same without products in bfloat16."""
        return replace(self, with_curvature=self.with_curvature.in_float32()) if self.with_curvature else self

    def solve_memory(self, curved: bool) -> SolveMemory:
        factors = 3.7 if self.iterations > CHECK_EVERY else 1.4  # a new penalty's inverse is made beside the one before
        return SolveMemory(9.2, 2.5 if curved else factors)

    def _search(self, normalized: NormalizedProblem, mask_of: Keep) -> Tensor:
        """Return the final ADMM iterate W, (out, in), whose largest entries are the mask and the start of the refit."""
        target, gram, curvature = normalized.target, normalized.gram, normalized.curvature
        rhs = matmul(target if curvature is None else matmul(curvature, target), gram)
        shifted = normalized.shifted_solver()
        penalty = PENALTY_START
        solve = shifted(penalty)
        dual = torch.zeros_like(target)
        keep = mask_of(target.abs())
        sparse = target * keep
        previous_keep = keep
        has_moved = False
        weight = target
        for iteration in range(1, self.iterations + 1):
            weight = solve(rhs - dual + penalty * sparse)
            relaxed = weight if self.relaxation == 1 else torch.lerp(sparse, weight, self.relaxation)
            sparse = relaxed + dual / penalty
            keep = mask_of(sparse.abs())
            sparse *= keep
            dual += penalty * (relaxed - sparse)
            if iteration % CHECK_EVERY:
                continue
            change = int((keep ^ previous_keep).count_nonzero()) / max(int(keep.count_nonzero()), 1)
            previous_keep = keep
            if (iteration >= MIN_ITERATIONS and change < SETTLED) or (change == 0 and has_moved):
                break
            has_moved = has_moved or change > 0.005 or penalty < MIN_PENALTY
            growth = _penalty_factor(change, has_moved)
            if growth < 1:  # the mask has not changed yet: restart with a smaller penalty
                dual, sparse = torch.zeros_like(target), target
            else:
                growth **= self.penalty_growth
            penalty = min(penalty * growth, 1e6)
            solve = shifted(penalty)
        return weight


def _penalty_factor(change: float, has_moved: bool) -> float:
    """Return the paper's factor on the penalty after a check at which the fraction `change` of the mask is new."""
    if change > 0.1:
        return 1.3
    if change > 0.005:
        return 1.2
    return 1.1 if has_moved else 0.2
