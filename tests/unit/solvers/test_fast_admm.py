"""Swift against ADMM written out in double precision, and against what it stands between: SparseGPT and ALPS."""

from __future__ import annotations

from dataclasses import replace
from statistics import geometric_mean

import pytest
import torch
from torch import Tensor

from sparsellm.errors import InvalidSetting
from sparsellm.solvers.alps import ALPS
from sparsellm.solvers.fast_admm import FastADMM
from sparsellm.solvers.linalg import conjugate_gradient_refit
from sparsellm.solvers.patterns import parse_pattern
from sparsellm.solvers.problem import LayerProblem
from sparsellm.solvers.sparsegpt import SparseGPT
from sparsellm.solvers.statistics import Gram
from tests.unit.solvers.test_solvers import problem_of


def definite(size: int, seed: int) -> Tensor:
    """A positive definite matrix with a unit diagonal, of correlated signals."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3 * size, size, generator=generator).double()
    x += x @ torch.randn(size, size, generator=generator).double() / size**0.5
    moment = x.T @ x
    scale = moment.diagonal().rsqrt()
    return moment * scale.outer(scale)


@pytest.mark.parametrize("text", ["60%", "2:4"])
@pytest.mark.parametrize("full", [False, True], ids=["plain", "curvature"])
@pytest.mark.parametrize("relaxation", [1.0, 1.6])
def test_is_admm_with_one_penalty(text: str, full: bool, relaxation: float) -> None:
    """The textbook's iteration, V and all, each step's system solved as one of (out in, out in)."""
    out, width, penalty, pattern = 6, 8, 0.6, parse_pattern(text)
    generator = torch.Generator().manual_seed(5)
    target = torch.randn(out, width, generator=generator).double()
    gram, curvature = definite(width, 1), definite(out, 2) if full else torch.eye(out).double()
    inputs = Gram(width, dtype=torch.float64)
    inputs.update(torch.linalg.cholesky(gram).T * width**0.5)  # whose mean of x xᵀ is the Gram
    problem = LayerProblem(target, inputs, curvature if full else None)

    sparse = target * pattern.keep(target.abs())
    dual = penalty * (target - sparse)
    system = torch.kron(curvature, gram) + penalty * torch.eye(out * width).double()
    for _ in range(4):
        side = curvature @ target @ gram - dual + penalty * sparse
        weight = torch.linalg.solve(system, side.flatten()).view(out, width)
        relaxed = relaxation * weight + (1 - relaxation) * sparse
        keep = pattern.keep((relaxed + dual / penalty).abs())
        sparse = (relaxed + dual / penalty) * keep
        dual = dual + penalty * (relaxed - sparse)
    expected = conjugate_gradient_refit(sparse, target, gram, keep=keep, steps=2, curvature=curvature if full else None)

    # A full curvature is lifted by a millionth at least, where nothing is damped.
    answer = FastADMM(damping=0, steps=4, refit_steps=2, penalty=penalty, relaxation=relaxation).solve(problem, pattern)
    torch.testing.assert_close(answer, expected, rtol=1e-4 if full else 1e-9, atol=1e-5 if full else 1e-9)


@pytest.mark.parametrize("text", ["50%", "70%", "80%", "90%", "2:4", "3:4", "4:8"])
def test_stands_near_alps_and_far_from_sparsegpt(text: str) -> None:
    """Of the error above the dense layer's, geometric mean of eight draws: nearer to ALPS's than to SparseGPT's."""
    pattern, found = parse_pattern(text), []
    for seed in range(8):
        problem = problem_of((32, 64), seed=seed)
        swift, alps, sparsegpt = (problem.error(solver.solve(problem, pattern)) for solver in (FastADMM(), ALPS(), SparseGPT()))
        found.append((swift / alps, sparsegpt / alps))
    near, far = (geometric_mean(some) for some in zip(*found, strict=True))
    assert near < far
    assert near - 1 < 0.5 * (far - 1)


def test_more_steps_and_longer_fits_help() -> None:
    """Twice the steps, and a longer fit, lower the error in the mean; a fit alone never raises it."""
    pattern, pairs = parse_pattern("80%"), []
    for seed in range(8):
        problem = problem_of((32, 64), seed=seed)
        short, fitted, long = (
            problem.error(solver.solve(problem, pattern))
            for solver in (FastADMM(refit_steps=0), FastADMM(), FastADMM(steps=12))
        )
        assert fitted <= short
        pairs.append(long / fitted)
    assert geometric_mean(pairs) < 1


@pytest.mark.parametrize(
    ("change", "told"),
    [({"damping": -1.0}, "damping >= 0"), ({"steps": 0}, "steps >= 1"), ({"refit_steps": -1}, "refit_steps >= 0")]
    + [({"penalty": bad}, "penalty > 0") for bad in (0.0, -1.0, float("nan"), float("inf"))]
    + [({"relaxation": bad}, r"relaxation in \(0, 2\)") for bad in (0.0, 2.0, float("nan"))],
)  # fmt: skip
def test_settings_refused(change: dict[str, float], told: str) -> None:
    """What cannot be raises at once and names the limits."""
    with pytest.raises(InvalidSetting, match=told):
        replace(FastADMM(), **change)  # type: ignore[arg-type]
