"""Linear regression of a layer's targets on its inputs, from sums over tokens."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from functools import cached_property

import torch
from torch import Tensor

from sparsellm.runtime import collectives, devices
from sparsellm.runtime.products import matmul
from sparsellm.solvers.linalg import (
    add_diagonal,
    check_pivot,
    dead_inputs,
    dot_float64,
    inner_float64,
    inverse_factor_,
    quadratic_form,
)
from sparsellm.solvers.problem import LayerProblem
from sparsellm.solvers.statistics import CrossMoment, Gram

FLOOR = 1e-3
"""The part of a regression's ridge that does not depend on its tokens, as a fraction of the mean of the Gram diagonal. It makes
masks robust against rounding."""

MIN_RIDGE, MAX_RIDGE = 1e-4, 1e4
"""Limits of the ridge. The smallest is far below `FLOOR`; the largest leaves the prior weight as it is."""

TOLERANCE = 1e-3
"""Fraction within which errors of cross-validation count as equal; the largest of their ridges is used, so that rounding does
not decide."""

DEPENDENT_TOKENS = 3
"""How many tokens of a text count as one in generalized cross-validation, which is for independent observations."""

RESOLUTION = 1e-6
"""Fraction of the targets' power below which what the prior weight leaves of them is rounding."""


class Regression(ABC):
    r"""Minimization of $E\lVert t - W x - b \rVert^2$ for targets t and inputs x, from sums over tokens.

    If the bias is fitted, the best one for a weight is $E[t] - W E[x]$, and the problem of the weight uses the statistics about
    the means. Otherwise b = 0.

    Args:
        inputs: The Gram matrix of x; layers with the same inputs share one.
    """

    def __init__(self, inputs: Gram, affine: bool) -> None:
        self.inputs = inputs
        self.affine = affine

    def problem(self, prior: Tensor, curvature: Tensor | None = None) -> LayerProblem:
        r"""The layer problem of matching the targets, regularized toward a prior weight as the number of tokens demands.

        The target is $W^\star = W_0 + \Delta$ with the prior weight $W_0$ and the `ridge_change` $\Delta$ for the moments
        $C - W_0 G$ of the residuals, from the `moment_ridge` down; the problem's Gram matrix has `oracle_shrinkage`. Ridge and
        shrinkage tend to 0 with many tokens.

        Args:
            prior: $W_0$, (out, in).
            curvature: The curvature of the problem; it does not affect the target.

        Raises:
            SingularGram: If the Gram matrix is not positive definite with the largest ridge.
        """
        gram = self._gram.view.to(prior.dtype)
        residual = self._cross.to(prior.dtype) - matmul(prior, gram)
        scale = torch.where(gram.diagonal() > 0, gram.diagonal(), torch.inf).rsqrt()  # to inputs of variance 1; 0 for dead ones
        matched, more, moments, correlations, squares, trace, features = devices.to_python(  # each reading waits for the device
            [
                inner_float64(self._cross, prior),
                inner_float64(residual, prior),
                _squares(residual * scale),
                _squares((gram * scale).mul_(scale.unsqueeze(1))),
                _squares(gram),
                devices.full_precision(gram.diagonal()).sum(),
                _squares((scale > 0).to(gram.dtype).unsqueeze(0)),
            ]
        )
        power, size = self.power, {"features": round(features), "tokens": max(self.inputs.tokens, 1)}
        left = power - matched - more  # E‖t - W0 x‖²
        target = prior.clone()
        if not left <= RESOLUTION * power:  # NaN goes on, for the run to say so
            ridge = moment_ridge(moments, left, correlations, **size)
            target += ridge_change(residual, gram, left, ridge, **size)
        return LayerProblem(target, self._gram, curvature, shrinkage=oracle_shrinkage(squares, trace, **size))

    def bias(self, weight: Tensor) -> Tensor | None:
        """(out,): the best bias for a weight, (out, in); None if the bias is not fitted."""
        return self._mean.float() - weight @ self.inputs.mean if self.affine else None

    def error(self, weight: Tensor) -> float:
        """E‖t - W x - b‖² of a weight, (out, in), with the best bias."""
        return self.power - 2 * dot_float64(self._cross, weight) + float(quadratic_form(weight, self._gram.view, weight))

    @property
    @abstractmethod
    def power(self) -> float:
        """E‖t‖², about the mean if the bias is fitted."""

    @property
    @abstractmethod
    def _mean(self) -> Tensor:
        """(out,): E[t], in the widest float dtype of the device."""

    @abstractmethod
    def _products(self) -> Tensor:
        """(out, in) float32: E[t xᵀ], about the means if the bias is fitted."""

    @property
    def _gram(self) -> Gram:
        return self.inputs.centered() if self.affine else self.inputs

    @cached_property
    def _cross(self) -> Tensor:
        """`_products` of all tokens, with zeros for constant inputs, whose centered products are only rounding errors."""
        products = self._products()
        return products.masked_fill_(self._gram.rms == 0, 0) if self.affine else products


def moment_ridge(moments: float, left: float, squares: float, *, features: int, tokens: int) -> float:
    r"""Estimate the ridge of a regression of residuals on p inputs of variance 1 from second moments.

    If the true changes of the weights are independent with variance a for each input, summed over outputs, and the noise has
    the power s, then $E\lVert R \rVert^2 = a\,\mathrm{tr} K^2 + s p / n$ and the residuals have the power $a p + s$. The ridge
    with the least expected error is $s / (n a)$ (Hoerl, Kennard and Baldwin, 1975, with moments in place of least squares,
    which need more tokens than inputs).

    Args:
        moments: $\lVert R \rVert^2$, where $R$ are the moments of residuals and inputs.
        left: The power of the residuals.
        squares: tr K², with the correlations K of the inputs.
        features: p, the number of inputs that are not constant.
        tokens: n.

    Returns:
        The ridge, from `MIN_RIDGE` to `MAX_RIDGE`, which stands for moments that are no larger than those of noise.
    """
    surplus, scale = moments - left * features / tokens, squares - features**2 / tokens  # surplus = a * scale
    if not (surplus > 0 and scale > 0):
        return MAX_RIDGE
    variance = surplus / scale
    return min(max((left - variance * features) / (tokens * variance), MIN_RIDGE), MAX_RIDGE)


def ridge_change(residual: Tensor, gram: Tensor, left: float, ridge: float, *, features: int, tokens: int) -> Tensor:
    r"""The change of a weight that a ridge regression of residuals on the inputs gives, with the given ridge or a smaller one.

    The change is $\Delta_\lambda = R\,(A + \lambda\,\mathrm{diag}\,A)^{-1}$ with $A = G + \epsilon d I$, where d is the mean
    of diag G and $\epsilon$ = `FLOOR`. The ridge is divided by 10 as long as that lowers the error of generalized
    cross-validation (Golub, Heath and Wahba, 1979), with n' independent tokens,

    $$\frac{E\lVert r - \Delta_\lambda x \rVert^2 + \epsilon d\,\lVert \Delta_\lambda \rVert^2}{(1 - f_\lambda / n')^2},
    \quad f_\lambda = \mathrm{tr}\, A\,(A + \lambda\,\mathrm{diag}\,A)^{-1}.$$

    A ridge by moments misses changes in directions of little variance; with many tokens they are known, and the error tells.
    With few, or where it is not defined, the given ridge stays. Cost: a factorization and its inverse, and two products of
    (out, in) by (in, in), for each of two to six ridges.

    Args:
        residual: R, (out, in), the moments of residuals r and inputs.
        gram: G, (in, in).
        left: The power of the residuals.
        ridge: The largest ridge; raised if the Gram matrix is singular with it.
        features: The number of inputs that are not constant.
        tokens: The number of tokens, `DEPENDENT_TOKENS` times n'.

    Returns:
        (out, in).

    Raises:
        SingularGram: If the Gram matrix is not positive definite with any ridge up to `MAX_RIDGE`.
    """
    live = ~dead_inputs(gram)

    def fit(ridge: float) -> tuple[float, Tensor, Tensor]:
        """The error of cross-validation, NaN if the factorization failed, the change, and the pivot that failed."""
        pulled = add_diagonal(gram, FLOOR)
        penalty = ridge * pulled.diagonal()
        pulled.diagonal().add_(penalty)
        factor, pivot = inverse_factor_(pulled)
        change = matmul(matmul(residual, factor.T), factor)
        shrunk = (factor.square().sum(0) * penalty * live).sum()
        failed, explained, penalized, fixed = devices.to_python(
            [pivot, inner_float64(change, residual), inner_float64(change, change * penalty), shrunk]
        )
        freedom = (features - fixed) * DEPENDENT_TOKENS / tokens
        if failed:
            return math.nan, change, pivot
        error = max(left - explained - penalized, 0.0) / (1 - freedom) ** 2 if freedom < 1 else math.inf
        return math.inf if math.isnan(error) else error, change, pivot

    error, change, pivot = fit(ridge)
    while math.isnan(error):
        if ridge >= MAX_RIDGE:
            check_pivot(pivot, len(gram), ridge, setting="ridge")
        ridge *= 10
        error, change, pivot = fit(ridge)
    errors = {ridge: error}
    while ridge > MIN_RIDGE:
        ridge /= 10
        error = fit(ridge)[0]
        if not error < min(errors.values()):
            break
        errors[ridge] = error
    chosen = max(ridge for ridge, error in errors.items() if error <= (1 + TOLERANCE) * min(errors.values()))
    return change if chosen == max(errors) else fit(chosen)[1]  # again: the changes of all ridges would take memory


def _squares(matrix: Tensor) -> Tensor:
    """The sum of the squares of all entries, in float64, ()."""
    return inner_float64(matrix, matrix)


def oracle_shrinkage(squares: float, trace: float, *, features: int, tokens: int) -> float:
    r"""The oracle approximating shrinkage of a Gram matrix toward a multiple of the identity (Chen et al., 2010, eq. 23,
    without its terms in 2/p).

    Args:
        squares: tr G².
        trace: tr G.
        features: The number p of inputs that are not constant.
        tokens: The number of tokens that the Gram matrix was computed from.

    Returns:
        $\rho$ in [0, 1]: the shrunk matrix is $(1 - \rho) G + \rho \, \mathrm{tr}(G) / p \, I$.
    """
    surplus = squares - trace**2 / max(features, 1)
    return min(1.0, (squares + trace**2) / ((tokens + 1) * surplus)) if surplus > 0 else 0.0


class TargetRegression(Regression):
    """A regression whose targets are accumulated batch by batch.

    Args:
        inputs: The Gram matrix of x; layers with the same inputs share one.
    """

    def __init__(self, inputs: Gram, outputs: int, affine: bool) -> None:
        super().__init__(inputs, affine)
        device = inputs.mean.device
        self._cross_moment = CrossMoment(outputs, inputs.features, device, unit=inputs.unit)
        self._target_sum = torch.zeros(outputs, dtype=devices.widest_float(device), device=device)
        self._target_squares = torch.zeros((), dtype=devices.widest_float(device), device=device)

    def update(self, targets: Tensor, inputs: Tensor) -> None:
        """Add a batch of targets (tokens, out) and inputs (tokens, in). Does not update the shared Gram matrix.

        If the inputs are bfloat16, the targets are rounded to it, as were the outputs of the dense layer.
        """
        if inputs.dtype == torch.bfloat16:
            targets = targets.bfloat16()
        self._cross_moment.update(targets, inputs)
        for rows in targets.float().split(self.inputs.unit or max(len(targets), 1)):
            self._target_sum += rows.sum(0)
            self._target_squares += rows.square().sum()

    def reduce(self) -> None:
        """Sum over all processes. Does not reduce the shared Gram matrix."""
        self._cross_moment.reduce()
        collectives.all_reduce_(self._target_sum, self._target_squares)

    @property
    def power(self) -> float:
        power = float(self._target_squares) / max(self.inputs.tokens, 1)
        return power - float(devices.full_precision(self._mean).square().sum()) if self.affine else power

    @property
    def _mean(self) -> Tensor:
        return self._target_sum / max(self.inputs.tokens, 1)

    def _products(self) -> Tensor:
        return self._cross_moment.centered_matrix(self._mean, self.inputs.center) if self.affine else self._cross_moment.matrix


class PairedStatistics:
    """Statistics of paired inputs of a layer: x of the pruned model and z of the dense model, (tokens, in) each.

    Sufficient for targets that are linear functions of z, which are then not computed themselves.

    Cost: two more (in, in) matrices, and one and a half (in, in) matrix-vector products per token.

    Attributes:
        inputs: The Gram matrix of x.
        others: The Gram matrix of z.
        cross: E[z xᵀ].
    """

    def __init__(self, inputs: Gram) -> None:
        device = inputs.mean.device
        self.inputs, self.others = inputs, Gram(inputs.features, device, inputs.unit)
        self.cross = CrossMoment(inputs.features, inputs.features, device, unit=inputs.unit)

    def update(self, inputs: Tensor, others: Tensor) -> None:
        """Add a batch of x and z, (tokens, in) each. Does not update the Gram matrix of x."""
        self.others.update(others)
        self.cross.update(others, inputs)

    def reduce(self) -> None:
        """Sum over all processes. Does not reduce the Gram matrix of x."""
        self.others.reduce()
        self.cross.reduce()


class LinearTargetRegression(Regression):
    r"""A regression on targets $t = A z + a$ of paired inputs z: $E[t x^\top] = A\,E[z x^\top] + a\,E[x]^\top$.

    Args:
        weight: A, (out, in).
        bias: a, (out,); the bias is then fitted. None for a layer without one.
    """

    def __init__(self, paired: PairedStatistics, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(paired.inputs, bias is not None)
        self._paired, self._weight, self._bias = paired, weight, bias

    @cached_property
    def power(self) -> float:
        others = self._paired.others.centered() if self.affine else self._paired.others
        return float(quadratic_form(self._weight, others.view, self._weight))

    @property
    def _mean(self) -> Tensor:
        center = self._paired.others.center
        mean = self._weight.to(center.dtype) @ center
        return mean if self._bias is None else mean + self._bias

    def _products(self) -> Tensor:
        means = (self._paired.others.center, self.inputs.center) if self.affine else (None, None)
        return matmul(self._weight, self._paired.cross.centered_matrix(*means))
