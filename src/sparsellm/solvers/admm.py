"""Shared parts of the ADMM solvers: the normalised problem and its linear system."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from sparsellm.runtime import devices
from sparsellm.runtime.products import matmul
from sparsellm.solvers.linalg import (
    add_curvature_diagonal,
    add_diagonal_,
    cholesky_,
    conjugate_gradient_refit,
    dead_inputs,
    eigh,
)
from sparsellm.solvers.problem import MIN_CURVATURE, LayerProblem

Keep = Callable[[Tensor], Tensor]
"""Maps scores (out, in) to the mask of kept weights (out, in)."""

Shifted = Callable[[Tensor], Tensor]
"""Maps a right-hand side R (out, in) to the solution W of S W G + rho W = R, of the same dtype, for one rho."""

LEAST_BFLOAT16 = 128
"""Smallest number of inputs and of outputs with bfloat16 products; for smaller layers the conversions take as long."""


@dataclass(frozen=True)
class NormalizedProblem:
    """A layer problem scaled so that its damped Gram matrix and its curvature, if any, have a unit diagonal.

    Attributes:
        target: W⋆, (out, in), in the scaled units; zero for dead inputs.
        gram: G, (in, in).
        curvature: S, (out, out), or None for the identity.
        scale: (in,), the factor from a weight of the layer to a weight of this problem, by input.
        row_scale: (out, 1), the factor by output; None for 1.
        damping: Fraction of the mean added to the Gram diagonal, and to the curvature's (at least `MIN_CURVATURE`).
    """

    target: Tensor
    gram: Tensor
    curvature: Tensor | None
    scale: Tensor
    row_scale: Tensor | None
    damping: float

    @classmethod
    def of(cls, problem: LayerProblem, damping: float) -> NormalizedProblem:
        """Damp and scale a layer problem."""
        gram = problem.gram
        dead = dead_inputs(gram)
        gram, scale = _unit_diagonal(add_diagonal_(gram, damping))
        target = problem.weight.masked_fill(dead, 0).mul_(scale)
        if problem.curvature is None:
            return cls(target, gram, None, scale, None, damping)
        curvature, row_scale = _unit_diagonal(add_curvature_diagonal(problem.curvature, max(damping, MIN_CURVATURE)))
        row_scale = row_scale.unsqueeze(1)
        return cls(target.mul_(row_scale), gram, curvature, scale, row_scale, damping)

    def shifted_solver(self, low_precision: bool = False) -> Callable[[float], Shifted]:
        """A function that maps rho to a solver of S W G + rho W = R."""
        if self.curvature is None:
            return _shifted_by_cholesky(self.gram, self.damping, self.product_dtype(low_precision))
        return self.eigensystem(low_precision).shifted

    def eigensystem(self, low_precision: bool = False, *, overwrite: bool = False) -> Eigensystem:
        """Decompose S and G; with `overwrite` in their memory."""
        assert self.curvature is not None
        return Eigensystem.of(self.curvature, self.gram, self.product_dtype(low_precision), overwrite=overwrite)

    def product_dtype(self, low_precision: bool) -> torch.dtype:
        """Dtype of a solver's products; `low_precision` allows bfloat16 where the device multiplies that faster."""
        low_precision &= self.target.dtype == torch.float32 and min(self.target.shape) >= LEAST_BFLOAT16
        return torch.bfloat16 if low_precision and devices.multiplies_bfloat16(self.target.device) else self.target.dtype

    def refit(self, weight: Tensor, keep: Tensor, steps: int, low_precision: bool = False) -> Tensor:
        """Fit a weight on its support by conjugate gradients.

        Args:
            weight: (out, in), the start, in the scaled units; zero outside `keep`.
            keep: (out, in) bool, the support.
            steps: Number of conjugate gradient steps.
            low_precision: Whether the steps may multiply in bfloat16.
        """
        fit = partial(conjugate_gradient_refit, curvature=self.curvature, products=self.product_dtype(low_precision))
        refitted = fit(weight, self.target, self.gram, keep=keep, steps=steps)
        refitted /= self.scale
        return refitted if self.row_scale is None else refitted.div_(self.row_scale)


@dataclass(frozen=True)
class Eigensystem:
    """The map from W to S W G by the eigenvectors of S and G, which serve every penalty.

    Attributes:
        values: (out, in), its eigenvalues: the products of those of S and G, at least 0.
        left: (out, out), eigenvectors of S as columns, in the dtype of the products.
        right: (in, in), eigenvectors of G as columns.
    """

    values: Tensor
    left: Tensor
    right: Tensor

    @classmethod
    def of(cls, curvature: Tensor, gram: Tensor, dtype: torch.dtype | None = None, *, overwrite: bool = False) -> Eigensystem:
        """Decompose S and G.

        Args:
            curvature: S, (out, out).
            gram: G, (in, in).
            dtype: Dtype of the products with eigenvectors; by default that of the matrices. In bfloat16 the relative error of a
                solution is about 1 %.
            overwrite: Whether the decompositions take the memory of S and G.
        """
        dtype = dtype or gram.dtype
        (curvature_values, left), (gram_values, right) = (eigh(x, overwrite=overwrite) for x in (curvature, gram))
        return cls(curvature_values.clamp(min=0).outer(gram_values.clamp(min=0)), left.to(dtype), right.to(dtype))

    @property
    def geometric_mean(self) -> float:
        """The geometric mean of the eigenvalues, each at least `MIN_CURVATURE`; at most 1 for unit diagonals."""
        return float(self.values.clamp(min=MIN_CURVATURE).log().mean().exp())

    def shifted(self, penalty: float) -> Shifted:
        """Solver of S W G + rho W = R for one rho."""
        dtype = self.left.dtype

        def solve(rhs: Tensor) -> Tensor:
            rotated = matmul(matmul(self.left.T, rhs.to(dtype)), self.right)
            for part, values in devices.row_chunks(rotated, self.values):
                part.copy_(part / (values + penalty))
            return matmul(matmul(self.left, rotated), self.right.T).to(rhs.dtype)

        return solve


def _unit_diagonal(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Scale a positive definite matrix to a unit diagonal; also return the square roots of its previous diagonal."""
    scale = matrix.diagonal().sqrt()
    return matrix / scale.outer(scale), scale


def _shifted_by_cholesky(gram: Tensor, damping: float, dtype: torch.dtype) -> Callable[[float], Shifted]:
    """Solver of W (G + rho I) = R. It forms the inverse, which is used several times; the shift conditions it well.

    Args:
        dtype: Dtype of the products with the inverse.
    """

    def with_penalty(penalty: float) -> Shifted:
        shifted = gram.clone()
        shifted.diagonal().add_(penalty)
        inverse = torch.cholesky_inverse(cholesky_(shifted, damping)).to(dtype)
        return lambda rhs: matmul(rhs.to(dtype), inverse).to(rhs.dtype)

    return with_penalty
