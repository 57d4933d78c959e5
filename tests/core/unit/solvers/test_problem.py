"""Errors by what is known of the inputs, and targets as a layer problem, against dense float64 algebra."""

from __future__ import annotations

import pytest
import torch

from sparsellm.solvers.problem import LayerProblem
from sparsellm.solvers.statistics import CrossMoment, Gram, InputRMS, TokenCount
from tests.core.unit.solvers.test_solvers import error, every_dtype, problem_of, signals


def test_error_by_what_is_known() -> None:
    """With norms the inputs count as uncorrelated, without as white; the target itself has none, zero has all of it."""
    weight, x = signals((4, 12), 0, ())
    pruned = weight * (weight.abs() > 0.5)
    norms, nothing = InputRMS(12), TokenCount(12)
    norms.update(x)
    change = pruned - weight
    sizes = x.square().mean(0)
    by_norms = float((change.square() * sizes).sum() / (weight.square() * sizes).sum())
    assert LayerProblem(weight, norms).error(pruned) == pytest.approx(by_norms, rel=1e-5)
    white = float(change.square().sum() / weight.square().sum())
    assert LayerProblem(weight, nothing).error(pruned) == pytest.approx(white, rel=1e-12)
    for inputs in (norms, nothing, problem_of((4, 12)).inputs):
        problem = LayerProblem(weight, inputs)
        assert problem.error(weight) == 0
        assert problem.error(torch.zeros_like(weight)) == pytest.approx(1)


@every_dtype
@pytest.mark.parametrize("ridge", [0.0, 1e-3, 0.5])
def test_toward_is_ridge_regression(ridge: float, dtype: torch.dtype) -> None:
    """The target weight is (C + λ W0)(G + λ I)⁻¹ as a dense float64 solve gives it; dead inputs keep the prior."""
    prior, x = signals((6, 30), 0, (4, 17))
    y = x @ torch.randn(30, 6, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    gram, cross = Gram(30, dtype=dtype), CrossMoment(6, 30)
    gram.update(x.to(dtype))
    cross.update(y, x)
    problem = LayerProblem.from_targets(cross.matrix, gram, prior.to(dtype), ridge=ridge)
    live = [j for j in range(30) if j not in (4, 17)]
    exact, products = x.T @ x / len(x), y.T @ x / len(x)
    shifted = exact + ridge * exact.diagonal().mean() * torch.eye(30, dtype=torch.float64)
    aim = products + ridge * exact.diagonal().mean() * prior
    wanted = torch.linalg.solve(shifted[live][:, live], aim[:, live].T).T
    torch.testing.assert_close(problem.weight[:, live].double(), wanted, rtol=2e-3, atol=2e-4)
    assert torch.equal(problem.weight[:, [4, 17]], prior[:, [4, 17]].to(dtype))
    assert problem.weight.dtype == dtype


@every_dtype
@pytest.mark.parametrize("ridge", [0.0, 1e-3])
def test_toward_the_prior_itself(ridge: float, dtype: torch.dtype) -> None:
    """Where y = W0 x the target is W0: to the bit from C = W0 G, to rounding from streamed products."""
    problem = problem_of((6, 30), dtype)
    prior, gram = problem.weight, problem.inputs
    assert isinstance(gram, Gram)
    assert torch.equal(LayerProblem.from_targets(prior @ gram.matrix, gram, prior, ridge=ridge).weight, prior)
    _, x = signals((6, 30), 0, ())
    cross = CrossMoment(6, 30)
    cross.update(x.to(dtype) @ prior.T, x.to(dtype))
    streamed = LayerProblem.from_targets(cross.matrix, gram, prior, ridge=ridge).weight
    assert 0 < error(streamed, problem) < 1e-9  # of the output's energy; Cross sums in float32
    if ridge:
        torch.testing.assert_close(streamed, prior, rtol=1e-2, atol=1e-3)
