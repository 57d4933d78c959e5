"""What solvers that split the problem in two share: the units it is solved in, and the half without a pattern."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsellm.runtime.costs import SolverCost
from sparsellm.solvers.linalg import (
    add_curvature_diagonal,
    add_diagonal_,
    cholesky,
    conjugate_gradient_refit,
    dead_inputs,
    eigh,
)
from sparsellm.solvers.problem import MIN_CURVATURE, LayerProblem

Keep = Callable[[Tensor], Tensor]
"""The mask that scores of (out, in) decide."""

Shifted = Callable[[Tensor], Tensor]
"""Maps a right-hand side (out, in) to the W with S W G + rho W = that side, for one rho."""


@dataclass(frozen=True)
class NormalizedProblem:
    """A layer problem in the units in which its damped Gram, and its curvature if there is one, have a unit diagonal.

    target: W⋆, (out, in); dead inputs have no weights. gram: (in, in). curvature: (out, out), or None where outputs count
    alike. scale: (in,) or (out, in), what a weight was multiplied by. damping: what was added to both diagonals.
    """

    target: Tensor
    gram: Tensor
    curvature: Tensor | None
    scale: Tensor
    damping: float

    @classmethod
    def of(cls, problem: LayerProblem, damping: float) -> NormalizedProblem:
        gram = problem.gram
        dead = dead_inputs(gram)
        gram, scale = _unit_diagonal(add_diagonal_(gram, damping))
        curvature = problem.curvature
        if curvature is not None:
            curvature, height = _unit_diagonal(add_curvature_diagonal(curvature, max(damping, MIN_CURVATURE)))
            scale = height.unsqueeze(1) * scale
        return cls(problem.weight.masked_fill(dead, 0) * scale, gram, curvature, scale, damping)

    def shifted_solver(self) -> Callable[[float], Shifted]:
        """For a rho, how S W G + rho W = side is solved."""
        if self.curvature is None:
            return _shifted_by_cholesky(self.gram, self.damping)
        return _shifted_by_eigenvectors(self.curvature, self.gram)

    def refit(self, weight: Tensor, keep: Tensor, steps: int) -> Tensor:
        """The weight, zero outside `keep`, after some steps of conjugate gradients on it, in the units of the layer."""
        return conjugate_gradient_refit(weight, self.target, self.gram, keep, steps, curvature=self.curvature) / self.scale


def admm_cost(steps: float, refit_steps: int, penalties: float, curved: bool) -> SolverCost:
    """What a search of so many steps, with so many penalties, and a fit take; counted, as is how much they hold.

    A penalty takes a Cholesky factor and its inverse; with a curvature there are eigenvectors instead, and each step takes two
    products with each matrix.
    """
    passes = 42 * steps + 10 * refit_steps
    if curved:
        return SolverCost(9.2, 3.0, 2 * steps + refit_steps + 2, 0, 1, passes)
    square = 3.7 if penalties > 1 else 1.4  # the inverse before is there while the next is made
    return SolverCost(9.2, square, steps + refit_steps + 2, 3 * penalties, 0, passes)


def _unit_diagonal(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """A positive definite matrix scaled to a unit diagonal, and the square roots of the diagonal that it had."""
    scale = matrix.diagonal().sqrt()
    return matrix / scale.outer(scale), scale


def _shifted_by_cholesky(gram: Tensor, damping: float) -> Callable[[float], Shifted]:
    """W (G + rho I) = rhs. By an inverse, not a solve: it is used several times, and the shift conditions it well."""

    def at(penalty: float) -> Shifted:
        shifted = gram.clone()
        shifted.diagonal().add_(penalty)
        inverse = torch.cholesky_inverse(cholesky(shifted, damping))
        return lambda side: side @ inverse

    return at


def _shifted_by_eigenvectors(curvature: Tensor, gram: Tensor) -> Callable[[float], Shifted]:
    """S W G + rho W = rhs, where both matrices are diagonal; one decomposition of each serves every penalty."""
    heights, left = eigh(curvature)
    widths, right = eigh(gram)
    products = heights.clamp(min=0).outer(widths.clamp(min=0))

    def at(penalty: float) -> Shifted:
        return lambda side: left @ ((left.T @ side @ right) / (products + penalty)) @ right.T

    return at
