"""`LayerProblem`, the optimization problem that every solver solves, and the interface of solvers."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from sparsellm.errors import InvalidSetting, NonFinite
from sparsellm.runtime import devices
from sparsellm.runtime.products import matmul
from sparsellm.solvers.linalg import add_diagonal, cholesky_, quadratic_form
from sparsellm.solvers.patterns import Pattern, keep_unpruned
from sparsellm.solvers.statistics import Gram, InputRMS, TokenCount

MIN_CURVATURE = 1e-6
"""Smallest curvature of a row, as a fraction of the mean curvature."""

MIN_ENERGY = torch.finfo(torch.float32).tiny / torch.finfo(torch.float32).eps
"""Energies below this value are inaccurate, because the float32 products that they sum are subnormal or zero."""

MAX_EXPONENT = 126
"""Largest exponent for which a power of two and its reciprocal are normal float32 numbers."""


@dataclass(frozen=True)
class LayerProblem:
    r"""The pruning problem of one linear layer.

    $$\min_{W \in \text{pattern}} E\lVert W^\star x - W x \rVert_S^2 = \mathrm{tr}\, S (W - W^\star) G (W - W^\star)^\top$$

    Attributes:
        weight: $W^\star$, (out, in) float32, the target: the dense weight for local pruning (paper eq. 2).
        inputs: Statistics of the inputs x, of the class that the solver `needs` or one of higher rank.
        curvature: $S$, (out, out), positive semi-definite: the effect of output errors on the model's predictions. None for
            the identity.
        pruned_mask: (out, in) bool, True for weights that are already removed and stay zero; None if there are none.
        shrinkage: Fraction in [0, 1] by which `gram` moves $G$ toward a multiple of the identity, since few tokens spread its
            eigenvalues.
    """

    weight: Tensor
    inputs: TokenCount
    curvature: Tensor | None = None
    pruned_mask: Tensor | None = None
    shrinkage: float = 0.0

    @classmethod
    def from_targets(
        cls, cross: Tensor, inputs: Gram, prior: Tensor, *, ridge: float, curvature: Tensor | None = None
    ) -> LayerProblem:
        r"""The problem of matching another signal y, regularized toward a prior weight $W_0$.

        $W^\star = (C + \lambda W_0)(G + \lambda I)^{-1}$ with $C = E[y x^\top]$ and $\lambda$ = `ridge` × mean diag $G$, by
        Cholesky: $E\lVert y - Wx \rVert^2 = E\lVert y - W^\star x \rVert^2 + \mathrm{tr}\,(W - W^\star) G (W - W^\star)^\top$,
        so matching y is equivalent to pruning $W^\star$ (Algorithm 1 of the paper, without its pseudo-inverse of the
        activations).

        Args:
            cross: $C$, (out, in).
            inputs: Statistics of x, with $G$, (in, in).
            prior: $W_0$, (out, in).
            ridge: At least 0, as a fraction of the mean of the Gram diagonal; 1e-3 makes masks robust against rounding.
            curvature: The curvature of the problem; it does not affect the target.

        Raises:
            SingularGram: If the damped Gram matrix is not positive definite.
        """
        gram = inputs.view.to(prior.dtype)
        # Solving for the correction W* - W0 returns exactly W0 if y = W0 x, whatever the rounding of the solve.
        residual = cross.to(prior.dtype) - matmul(prior, gram)
        lower = cholesky_(add_diagonal(gram, ridge), ridge, "ridge")
        return cls(prior + torch.cholesky_solve(residual.T, lower).T, inputs, curvature)

    def keep(self, pattern: Pattern, score: Tensor, *, per_row: bool = False) -> Tensor:
        """`pattern.keep` that removes the weights of `pruned_mask` first and never keeps them.

        Args:
            score: (out, in), finite, at least 0.
            per_row: See `Unstructured.keep`.
        """
        return keep_unpruned(self.pruned_mask, score, partial(pattern.keep, per_row=per_row))

    def removal_costs(self) -> Tensor:
        """(out, in): the error from removing each weight alone, with the inputs and the outputs taken as uncorrelated."""
        costs = self.weight.square()
        if isinstance(self.inputs, InputRMS):
            costs *= self.rms.square()
        if self.row_scale is not None:
            costs *= self.row_scale.square()
        return costs if self.pruned_mask is None else costs.masked_fill_(self.pruned_mask, 0)

    @property
    def gram(self) -> Tensor:
        """G with its shrinkage, (in, in), in the weight's dtype, a copy. Raises InvalidSetting if there is no `Gram`."""
        if not isinstance(self.inputs, Gram):
            raise InvalidSetting(f"This solver needs a Gram matrix, got {type(self.inputs).__name__}.")
        matrix = self.inputs.matrix.to(self.weight.dtype)
        if self.shrinkage:
            diagonal = matrix.diagonal()
            alive = diagonal > 0  # constant inputs stay at 0
            mean = diagonal.sum() / alive.sum().clamp(min=1)
            matrix.mul_(1 - self.shrinkage)
            diagonal += self.shrinkage * mean * alive
        return matrix

    @property
    def rms(self) -> Tensor:
        """(in,), in the weight's dtype: RMS of the inputs. Raises InvalidSetting if the statistics are only a `TokenCount`."""
        if not isinstance(self.inputs, InputRMS):
            raise InvalidSetting(f"This solver needs the RMS of the inputs, got {type(self.inputs).__name__}.")
        return self.inputs.rms.to(self.weight.dtype)

    @property
    def row_scale(self) -> Tensor | None:
        r"""(out, 1): $\sqrt{S_{ii}}$ relative to a mean of 1, the weight of a row's errors; None without a curvature.

        At least $10^{-3}$, so that a row without effect on the predictions still has a solution.
        """
        if self.curvature is None:
            return None
        diagonal = self.curvature.diagonal()
        mean = diagonal.mean()
        relative = torch.where(mean > 0, diagonal / mean, torch.ones_like(diagonal))
        return relative.clamp(min=MIN_CURVATURE).sqrt().unsqueeze(1)

    def error(self, weight: Tensor) -> float:
        """The output error of `weight`, (out, in), relative to the target's output, in the metric of the curvature.

        Exact for a `Gram`. An `InputRMS` takes the inputs as uncorrelated, a `TokenCount` as white. If the squares underflow,
        the weights are first multiplied by a power of two, which is exact.

        Raises:
            NonFinite: If an energy overflows float32.
        """
        error, power = devices.to_python(self.energies(weight))
        largest = float(self.weight.abs().max()) if 0 <= power < MIN_ENERGY else 0.0
        if largest > 0:
            factor = 2.0 ** min(-math.floor(math.log2(largest)), MAX_EXPONENT)
            error, power = devices.to_python(replace(self, weight=self.weight * factor).energies(weight * factor))
        return relative_error(error, power)

    def energies(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The energies of the output error of `weight`, (out, in), and of the target's output, as tensors, ()."""
        gram = self.inputs.view.to(self.weight.dtype) if isinstance(self.inputs, Gram) else None
        return self.energy(weight - self.weight, gram), self.energy(self.weight, gram)

    def energy(self, weight: Tensor, gram: Tensor | None = None) -> Tensor:
        """The energy tr S W G Wᵀ of the output of a weight, as a tensor, ().

        Args:
            weight: W, (out, in).
            gram: G, (in, in), to avoid a copy; by default that of the problem.
        """
        left = weight if self.curvature is None else matmul(self.curvature, weight)  # S W
        if isinstance(self.inputs, Gram):
            return quadratic_form(left, self.gram if gram is None else gram, weight)
        right = weight * self.rms.square() if isinstance(self.inputs, InputRMS) else weight  # W diag(G)
        return (right * left).sum()


def relative_error(error: float, power: float) -> float:
    """The relative error from two energies; 0 if the target's energy is 0.

    Raises:
        NonFinite: If an energy is not finite.
    """
    if not is_finite_pair(error, power):
        raise NonFinite("The energy of the layer's output overflows float32. Look for weights that are far too large.")
    return max(error, 0.0) / power if power > 0 else 0.0


def is_finite_pair(error: float, power: float) -> bool:
    """Whether two energies are finite numbers."""
    return math.isfinite(error) and math.isfinite(power)


class SolveMemory(NamedTuple):
    """float32 matrices that a solve holds at its peak, beside its problem; counted (`test_planning.py`)."""

    matrices: float  # (out, in)
    squares: float  # (in, in); with a curvature, as many (out, out) too


USUAL_MEMORY = SolveMemory(2.6, 1.0)
"""The memory of a solve by SparseGPT."""


def solve_bytes(solver: object, layers: Iterable[tuple[int, int]], *, curved: bool = False) -> float:
    """Bytes of a solver's largest solve, with its weight and without Gram matrix and curvature.

    Args:
        layers: (out, in) of each.
        curved: Whether the problems have a curvature.
    """
    needed: SolveMemory = getattr(solver, "solve_memory", lambda _: USUAL_MEMORY)(curved)
    return max(4 * ((1 + needed.matrices) * o * i + needed.squares * (i**2 + curved * o**2)) for o, i in layers)


@runtime_checkable
class LayerSolver(Protocol):
    """Interface of a solver: a frozen dataclass of plain numbers with these two members.

    If a solver has a field `damping` and a factorization fails, `methods.layerwise.solve` retries with larger values and
    reports the one used. A solver may also have a method `solve_memory`, which takes whether there is a curvature and returns a
    `SolveMemory`; without it, as SparseGPT, it is taken to hold `USUAL_MEMORY`.

    Attributes:
        needs: The class of input statistics that `solve` reads; exactly this class is accumulated.
    """

    needs: ClassVar[type[TokenCount]]

    def solve(self, problem: LayerProblem, pattern: Pattern) -> Tensor:
        """Compute the pruned weight without modifying `problem`.

        Returns:
            The weight, (out, in), zero where `pattern` removes and in `problem.pruned_mask`; masks of `problem.keep` do both.

        Raises:
            SingularGram: If a factorization fails.
        """
        ...


@runtime_checkable
class NonBlockingSolver(LayerSolver, Protocol):
    """A solver that can also run without a device synchronisation."""

    def solve_async(self, problem: LayerProblem, pattern: Pattern) -> tuple[Tensor, Tensor]:
        """Like `solve`, but return success as a tensor instead of raising `SingularGram`.

        Returns:
            The weight, (out, in), and a bool tensor, (), True if every factorization succeeded.
        """
        ...
