"""FastADMM: a few ADMM steps with a constant penalty and a single factorization, or more with a growing penalty."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from sparsellm.errors import InvalidSetting
from sparsellm.runtime import devices
from sparsellm.solvers.admm import Keep, NormalizedProblem
from sparsellm.solvers.patterns import Pattern
from sparsellm.solvers.problem import LayerProblem, SolveMemory
from sparsellm.solvers.statistics import Gram, TokenCount


@dataclass(frozen=True)
class FastADMM:
    r"""A few ADMM steps with a constant penalty, which reach most of the accuracy of a full search, or more with a growing one.

    On the problem scaled to a unit diagonal, as in `sparsellm.ALPS`, with $U = V/\rho$ and a constant $\rho$:

    $$W \leftarrow W^\star + \rho \, A^{-1}(D - U - W^\star), \quad T \leftarrow \theta W + (1 - \theta) D + U, \quad
      D \leftarrow \text{project}(T), \quad U \leftarrow T - D$$

    where $A$ maps $W$ to $S W G + \rho W$. One factorization serves all steps, and $W^\star G$ is never computed. The first
    projection is of $T = W^\star$; conjugate gradients on the last mask, starting at the last $D$, give the result.

    With `growth` above 1 and a full curvature, $\rho$ is multiplied by it, and $U$ divided by it, at every step, from
    $\rho_1 m$ to $2 \rho_1 \sqrt m$: $\rho_1$ is `penalty`, $m$ the geometric mean of the eigenvalues of $W \mapsto S W G$.

    Cost: one (in, in) factorization, and `steps` + `refit_steps` + 1 products of (out, in) by (in, in). With a full curvature:
    two eigendecompositions, two such products and two of (out, out) by (out, in) per step, and one of each per refit step.

    Attributes:
        damping: Fraction of the mean added to the Gram diagonal (and to the curvature's).
        steps: Number of ADMM steps.
        refit_steps: Conjugate gradient steps on the final mask.
        penalty: rho, for a Gram matrix with a unit diagonal.
        relaxation: Over-relaxation theta, in (0, 2).
        growth: Factor on rho at every step with a full curvature, whose eigenvectors serve every rho. If it is above 1, the
            number of steps follows from it, in place of `steps`: with 1.06 it is 19 for m = 0.5 and 25 for m = 0.25.
        low_precision: Whether the steps multiply in bfloat16 where the device has units for it. The residual that the final fit
            begins with is always in the precision of the weights.
    """

    damping: float = 0.01
    steps: int = 6
    refit_steps: int = 3
    penalty: float = 0.6
    relaxation: float = 1.6
    growth: float = 1.0
    low_precision: bool = True

    needs: ClassVar[type[TokenCount]] = Gram

    def __post_init__(self) -> None:
        is_pace = 0 < self.penalty < float("inf") and 0 < self.relaxation < 2 and 1 <= self.growth < float("inf")
        if not (self.damping >= 0 and self.steps >= 1 and self.refit_steps >= 0 and is_pace):
            raise InvalidSetting(
                "FastADMM needs damping >= 0, steps >= 1, refit_steps >= 0, a finite penalty > 0, relaxation in (0, 2) and a "
                f"finite growth >= 1, got {self}."
            )

    def count_steps(self, geometric_mean: float | None) -> int:
        """Number of ADMM steps, given the geometric mean m of the eigenvalues, or None without a full curvature."""
        if geometric_mean is None or self.growth == 1:
            return self.steps
        return 1 + math.ceil(math.log(2 / geometric_mean**0.5) / math.log(self.growth))

    def solve(self, problem: LayerProblem, pattern: Pattern) -> Tensor:
        normalized = NormalizedProblem.of(problem, self.damping)
        sparse, keep = self._search(normalized, partial(problem.keep, pattern))
        if normalized.curvature is not None:  # the search has overwritten it
            del normalized
            normalized = NormalizedProblem.of(problem, self.damping)
        return normalized.refit(sparse, keep, self.refit_steps, self.low_precision)

    def in_float32(self) -> FastADMM:
        """The same without products in bfloat16."""
        return replace(self, low_precision=False)

    def solve_memory(self, curved: bool) -> SolveMemory:
        return SolveMemory(9.2, 2.5 if curved else 1.4)

    def _search(self, normalized: NormalizedProblem, mask_of: Keep) -> tuple[Tensor, Tensor]:
        """Return the last projected iterate D and its mask, both (out, in). S and G are overwritten if there is a curvature."""
        target, penalty, steps = normalized.target, self.penalty, self.steps
        rhs = torch.empty_like(target, dtype=normalized.product_dtype(self.low_precision))
        if normalized.curvature is None:
            shifted = normalized.shifted_solver(self.low_precision)
        else:
            system = normalized.eigensystem(self.low_precision, overwrite=True)
            shifted = system.shifted
            if self.growth > 1:
                penalty, steps = penalty * system.geometric_mean, self.count_steps(system.geometric_mean)
        solve = shifted(penalty)
        unprojected, scores = target.clone(), torch.empty_like(target)  # T; D is T on the mask, and U is T elsewhere
        for step in range(steps):
            keep, growth = mask_of(torch.abs(unprojected, out=scores)), 1.0
            if step and self.growth > 1 and normalized.curvature is not None:
                penalty, growth = penalty * self.growth, self.growth
                solve = shifted(penalty)
            for rows, kept, optimum, right in devices.row_chunks(unprojected, keep, target, rhs):
                if growth > 1:
                    rows.copy_(torch.where(kept, rows, rows / growth))
                right.copy_((rows * kept).mul_(2).sub_(rows).sub_(optimum))  # D - U - W*
            change = solve(rhs)
            for rows, kept, optimum, moved in devices.row_chunks(unprojected, keep, target, change):
                weight = moved.to(rows.dtype).mul(penalty).add_(optimum)
                rows.add_(weight.sub_(rows * kept), alpha=self.relaxation)
        keep = mask_of(torch.abs(unprojected, out=scores))
        return unprojected.mul_(keep), keep
