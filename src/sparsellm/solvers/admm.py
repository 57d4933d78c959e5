"""Shared parts of the ADMM solvers: the normalised problem and its linear system."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

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
"""Maps scores (out, in) to the mask of kept weights (out, in)."""

Shifted = Callable[[Tensor], Tensor]
"""Maps a right-hand side R (out, in) to the solution W of S W G + rho W = R, for one rho."""


@dataclass(frozen=True)
class NormalizedProblem:
    """A layer problem scaled so that its damped Gram matrix and its curvature, if any, have a unit diagonal.

    Attributes:
        target: W⋆, (out, in), in the scaled units; zero for dead inputs.
        gram: G, (in, in).
        curvature: S, (out, out), or None for the identity.
        scale: (in,) or (out, in), the factor from a weight of the layer to a weight of this problem.
        damping: Fraction of the mean added to the Gram diagonal, and to the curvature's (at least `MIN_CURVATURE`).
    """

    target: Tensor
    gram: Tensor
    curvature: Tensor | None
    scale: Tensor
    damping: float

    @classmethod
    def of(cls, problem: LayerProblem, damping: float) -> NormalizedProblem:
        """Damp and scale a layer problem."""
        gram = problem.gram
        dead = dead_inputs(gram)
        gram, scale = _unit_diagonal(add_diagonal_(gram, damping))
        curvature = problem.curvature
        if curvature is not None:
            curvature, row_scale = _unit_diagonal(add_curvature_diagonal(curvature, max(damping, MIN_CURVATURE)))
            scale = row_scale.unsqueeze(1) * scale
        return cls(problem.weight.masked_fill(dead, 0) * scale, gram, curvature, scale, damping)

    def shifted_solver(self) -> Callable[[float], Shifted]:
        """A function that maps rho to a solver of S W G + rho W = R."""
        if self.curvature is None:
            return _shifted_by_cholesky(self.gram, self.damping)
        return _shifted_by_eigenvectors(self.curvature, self.gram)

    def refit(self, weight: Tensor, keep: Tensor, steps: int) -> Tensor:
        """Fit a weight on its support by conjugate gradients.

        Args:
            weight: (out, in), the start, in the scaled units; zero outside `keep`.
            keep: (out, in) bool, the support.
            steps: Number of conjugate gradient steps.
        """
        refitted = conjugate_gradient_refit(weight, self.target, self.gram, keep=keep, steps=steps, curvature=self.curvature)
        return refitted / self.scale


def _unit_diagonal(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Scale a positive definite matrix to a unit diagonal; also return the square roots of its previous diagonal."""
    scale = matrix.diagonal().sqrt()
    return matrix / scale.outer(scale), scale


def _shifted_by_cholesky(gram: Tensor, damping: float) -> Callable[[float], Shifted]:
    """Solver of W (G + rho I) = R. It forms the inverse, which is used several times; the shift conditions it well."""

    def with_penalty(penalty: float) -> Shifted:
        shifted = gram.clone()
        shifted.diagonal().add_(penalty)
        inverse = torch.cholesky_inverse(cholesky(shifted, damping))
        return lambda rhs: rhs @ inverse

    return with_penalty


def _shifted_by_eigenvectors(curvature: Tensor, gram: Tensor) -> Callable[[float], Shifted]:
    """Solver of S W G + rho W = R in the eigenvectors of S and G; one decomposition of each serves every penalty."""
    curvature_values, left = eigh(curvature)
    gram_values, right = eigh(gram)
    products = curvature_values.clamp(min=0).outer(gram_values.clamp(min=0))

    def with_penalty(penalty: float) -> Shifted:
        return lambda rhs: left @ ((left.T @ rhs @ right) / (products + penalty)) @ right.T

    return with_penalty
