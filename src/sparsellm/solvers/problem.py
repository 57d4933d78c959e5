"""The one question that every solver answers."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparsellm.errors import InvalidSetting, NonFinite
from sparsellm.runtime import devices
from sparsellm.solvers.linalg import add_diagonal, cholesky, quadratic_form
from sparsellm.solvers.patterns import Pattern
from sparsellm.solvers.statistics import Gram, InputRMS, TokenCount

MIN_CURVATURE = 1e-6
"""The least curvature of a row, as a share of the mean."""

MIN_ENERGY = torch.finfo(torch.float32).tiny / torch.finfo(torch.float32).eps
"""Below it the products that an energy is summed from lose digits, and then all of them."""

MAX_EXPONENT = 126
"""Of a power of two that float32 holds, with its reciprocal."""


@dataclass(frozen=True)
class LayerProblem:
    r"""Which weights stay, and with what values?

    $$\min_{W \in \text{pattern}} E\lVert W^\star x - W x \rVert_S^2 = \mathrm{tr}\, S (W - W^\star) G (W - W^\star)^\top$$

    weight: (out, in) float32, the target $W^\star$: the dense weight for local pruning (paper eq. 2).
    inputs: what is known of x, at least what the solver `needs`.
    curvature: S, what errors of the outputs cost further down: (out, out), positive semi-definite; None where all count alike.
    gone: (out, in) bool, weights that are removed already and stay so; None where there are none.
    """

    weight: Tensor
    inputs: TokenCount
    curvature: Tensor | None = None
    pruned_mask: Tensor | None = None

    @classmethod
    def from_targets(
        cls, cross: Tensor, inputs: Gram, prior: Tensor, ridge: float, curvature: Tensor | None = None
    ) -> LayerProblem:
        r"""The problem whose outputs should match another signal y, pulled toward a prior weight.

        $W^\star = (C + \lambda W_0)(G + \lambda I)^{-1}$ with $C = E[y x^\top]$ and $\lambda$ = `ridge` × mean diag $G$, by
        Cholesky: $E\lVert y - Wx \rVert^2 = E\lVert y - W^\star x \rVert^2 + \mathrm{tr}\,(W - W^\star) G (W - W^\star)^\top$,
        so pruning toward y is pruning $W^\star$ (Algorithm 1 of the paper, without its pseudo-inverse of the activations).

        cross: (out, in). prior: (out, in), the weight at hand. ridge: at least 0; 1e-3 keeps masks stable against rounding.
        curvature: as it comes.
        """
        gram = inputs.matrix.to(prior.dtype)
        # The prior enters through the defect C - W0 G: where y is W0 x the answer is W0, whatever the rounding of the solve.
        defect = cross.to(prior.dtype) - prior @ gram
        lower = cholesky(add_diagonal(gram, ridge), ridge, "ridge")
        return cls(prior + torch.cholesky_solve(defect.T, lower).T, inputs, curvature)

    def keep(self, pattern: Pattern, score: Tensor, *, per_row: bool = False) -> Tensor:
        """`pattern.keep` of a score, (out, in), at least 0, but what is gone is the first to be removed and never stays."""
        if self.pruned_mask is None:
            return pattern.keep(score, per_row=per_row)
        return pattern.keep(score.masked_fill(self.pruned_mask, -1), per_row=per_row) & ~self.pruned_mask

    @property
    def gram(self) -> Tensor:
        """(in, in), in the weight's dtype, fresh: raises InvalidSetting where the inputs are known less well."""
        if not isinstance(self.inputs, Gram):
            raise InvalidSetting(f"This solver needs a Gram matrix, got {type(self.inputs).__name__}.")
        return self.inputs.matrix.to(self.weight.dtype)

    @property
    def gram_view(self) -> Tensor:
        """As `gram`, for reading only."""
        return self.inputs.view.to(self.weight.dtype) if isinstance(self.inputs, Gram) else self.gram

    @property
    def rms(self) -> Tensor:
        """(in,), in the weight's dtype: raises InvalidSetting where the inputs are unknown."""
        if not isinstance(self.inputs, InputRMS):
            raise InvalidSetting(f"This solver needs input norms, got {type(self.inputs).__name__}.")
        return self.inputs.rms.to(self.weight.dtype)

    @property
    def row_scale(self) -> Tensor | None:
        r"""(out, 1): $\sqrt{S_{ii}}$, by which a row's errors count, where the mean of $S_{ii}$ is 1; None for all alike.

        At least a thousandth: a row that nothing reads still has a best weight.
        """
        if self.curvature is None:
            return None
        diagonal = self.curvature.diagonal()
        mean = diagonal.mean()
        relative = torch.where(mean > 0, diagonal / mean, torch.ones_like(diagonal))
        return relative.clamp(min=MIN_CURVATURE).sqrt().unsqueeze(1)

    def error(self, weight: Tensor) -> float:
        """The output error of `weight` (out, in) relative to the target's output, by all that is known of the inputs.

        With a Gram it is exact; with norms, inputs count as uncorrelated; without, as white. In the metric of the curvature.
        Raises NonFinite where an energy overflows float32. Weights so small that their squares vanish are scaled first, by a
        power of two, which changes no digit.
        """
        lost, had = devices.to_python(self.energies(weight))
        largest = float(self.weight.abs().max()) if 0 <= had < MIN_ENERGY else 0.0
        if largest > 0:
            factor = 2.0 ** min(-math.floor(math.log2(largest)), MAX_EXPONENT)
            lost, had = devices.to_python(replace(self, weight=self.weight * factor).energies(weight * factor))
        return relative_error(lost, had)

    def energies(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """What the output of `weight` (out, in) lacks of the target's, and what the target's has; not waited for."""
        gram = self.gram_view if isinstance(self.inputs, Gram) else None
        return self.energy(weight - self.weight, gram), self.energy(self.weight, gram)

    def energy(self, weight: Tensor, gram: Tensor | None = None) -> Tensor:
        """tr S W G Wᵀ. gram: G, where the caller has it at hand."""
        counted = weight if self.curvature is None else self.curvature @ weight
        if isinstance(self.inputs, Gram):
            return quadratic_form(counted, self.gram if gram is None else gram, weight)
        reached = weight * self.rms.square() if isinstance(self.inputs, InputRMS) else weight
        return (reached * counted).sum()


def relative_error(lost: float, had: float) -> float:
    """A relative error from two energies; nothing is lost of nothing. Raises NonFinite where one of them overflowed."""
    if not is_finite_pair(lost, had):
        raise NonFinite("The energy of the layer's output overflows float32. Look for weights that are far too large.")
    return max(lost, 0.0) / had if had > 0 else 0.0


def is_finite_pair(lost: float, had: float) -> bool:
    """Whether two energies are finite numbers."""
    return math.isfinite(lost) and math.isfinite(had)
