"""ALPS: the mask by ADMM, the weights by conjugate gradients on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from sparsellm.errors import InvalidSetting
from sparsellm.linalg import cholesky, damped, dead_inputs, refit
from sparsellm.moments import Gram, NoInputs
from sparsellm.patterns import Pattern
from sparsellm.problem import LayerProblem

PENALTY_START = 0.1
"""The first rho, for a Gram scaled to a unit diagonal; the paper's value."""

CHECK_EVERY = 3
"""Iterations between two looks at how much the kept set moves; the paper's value."""

FEWEST_ITERATIONS = 30
"""No stop for a small change before this many; the paper's value."""

LEAST_PENALTY = 1e-4
"""Below this rho the search no longer starts over: a mask that did not move by then will not."""

SETTLED = 3e-4
"""The share of the kept set that may still change when the search stops; the paper's value."""


@dataclass(frozen=True)
class ALPS:
    r"""Search mask and weights together by ADMM, then fit the weights on the mask found.

    On the problem scaled to a unit diagonal (damped $G$), with penalty $\rho$ rising as the mask settles:

    $$W \leftarrow (W^\star G - V + \rho D)(G + \rho I)^{-1}, \quad D \leftarrow \text{project}(W + V/\rho), \quad
      V \leftarrow V + \rho (W - D)$$

    Follows Meng et al., ALPS: improved optimization for highly sparse one-shot pruning (NeurIPS 2024), Algorithm 1 and its
    schedule of penalties. Departs from its code: one Cholesky per penalty, where the weights are, in place of an
    eigendecomposition in float64; dead inputs get zero weights.

    damping: added to the Gram's diagonal, as a share of its mean. iterations: of ADMM, at most. refit_steps: of conjugate
    gradients on the final mask.
    Cost: a factorisation of (in, in) for every third iteration, and a product of (out, in) by (in, in) for each.
    """

    damping: float = 0.01
    iterations: int = 300
    refit_steps: int = 10

    needs: ClassVar[type[NoInputs]] = Gram

    def __post_init__(self) -> None:
        if not self.damping >= 0 or self.iterations < 1 or self.refit_steps < 0:
            raise InvalidSetting(
                f"ALPS needs damping >= 0, iterations >= 1 and refit_steps >= 0, "
                f"got {self.damping}, {self.iterations} and {self.refit_steps}."
            )

    def solve(self, problem: LayerProblem, pattern: Pattern) -> Tensor:
        raw = problem.gram
        dead = dead_inputs(raw)
        gram = damped(raw, self.damping)
        scale = gram.diagonal().sqrt()
        gram /= scale.outer(scale)
        target = problem.weight.masked_fill(dead, 0) * scale
        chosen = self._search(target, gram, pattern)
        keep = pattern.keep(chosen.abs())
        weight = refit(chosen * keep, target, gram, keep, self.refit_steps)
        return weight / scale

    def _search(self, target: Tensor, gram: Tensor, pattern: Pattern) -> Tensor:
        """The final ADMM iterate, (out, in): its largest entries are the mask, and the start of the refit."""
        aim = target @ gram
        penalty = PENALTY_START
        inverse = _shifted_inverse(gram, penalty, self.damping)
        dual = torch.zeros_like(target)
        keep = pattern.keep(target.abs())
        sparse = target * keep
        seen = keep  # the kept set at the last look
        moved_before = False
        weight = target
        for iteration in range(1, self.iterations + 1):
            weight = (aim - dual + penalty * sparse) @ inverse
            sparse = weight + dual / penalty
            keep = pattern.keep(sparse.abs())
            sparse *= keep
            dual += penalty * (weight - sparse)
            if iteration % CHECK_EVERY:
                continue
            change = float((keep ^ seen).sum()) / max(float(keep.sum()), 1.0)
            seen = keep
            if (iteration >= FEWEST_ITERATIONS and change < SETTLED) or (change == 0 and moved_before):
                break
            moved_before = moved_before or change > 0.005 or penalty < LEAST_PENALTY
            growth = _growth(change, moved_before)
            if growth < 1:  # the penalty froze the mask before it could move: start over, gentler
                dual, sparse = torch.zeros_like(target), target
            penalty = min(penalty * growth, 1e6)
            inverse = _shifted_inverse(gram, penalty, self.damping)
        return weight


def _growth(change: float, moved_before: bool) -> float:
    """The factor on the penalty after a look at which `change` of the kept set was new; the paper's values."""
    if change > 0.1:
        return 1.3
    if change > 0.005:
        return 1.2
    return 1.1 if moved_before else 0.2


def _shifted_inverse(gram: Tensor, shift: float, damping: float) -> Tensor:
    """(G + shift I)⁻¹, (in, in). An inverse, not a solve: it is used several times, and the shift conditions it well."""
    shifted = gram.clone()
    shifted.diagonal().add_(shift)
    return torch.cholesky_inverse(cholesky(shifted, damping))
