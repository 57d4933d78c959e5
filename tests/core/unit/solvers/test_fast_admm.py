"""Swift against ADMM written out in double precision, and against what it stands between: SparseGPT and ALPS."""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import geometric_mean

import pytest
import torch
from torch import Tensor

from sparsellm.runtime import devices
from sparsellm.solvers.alps import ALPS
from sparsellm.solvers.fast_admm import FastADMM
from sparsellm.solvers.linalg import conjugate_gradient_refit
from sparsellm.solvers.patterns import parse_pattern
from sparsellm.solvers.problem import LayerProblem
from sparsellm.solvers.sparsegpt import SparseGPT
from sparsellm.solvers.statistics import Gram
from tests.core.unit.solvers.test_solvers import problem_of
from tests.pairwise import pairwise


def definite(size: int, seed: int) -> Tensor:
    """A positive definite matrix with a unit diagonal, of correlated signals."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3 * size, size, generator=generator).double()
    x += x @ torch.randn(size, size, generator=generator).double() / size**0.5
    moment = x.T @ x
    scale = moment.diagonal().rsqrt()
    return moment * scale.outer(scale)


@pytest.mark.parametrize(
    ("text", "form", "relaxation"), pairwise(["60%", "2:4"], ["plain", "curvature", "growing penalty"], [1.0, 1.6])
)
def test_is_admm_with_its_penalties(text: str, form: str, relaxation: float) -> None:
    """The textbook's iteration, V and all, each step's system solved as one of (out in, out in)."""
    full, growing = form != "plain", form == "growing penalty"
    out, width, penalty, pattern = 6, 8, 0.6, parse_pattern(text)
    generator = torch.Generator().manual_seed(5)
    target = torch.randn(out, width, generator=generator).double()
    gram, curvature = definite(width, 1), definite(out, 2) if full else torch.eye(out).double()
    inputs = Gram(width, dtype=torch.float64)
    inputs.update(torch.linalg.cholesky(gram).T * width**0.5)  # whose mean of x xᵀ is the Gram
    problem = LayerProblem(target, inputs, curvature if full else None)

    if full:  # lifted by a millionth, where nothing is damped
        curvature = (curvature + 1e-6 * torch.eye(out).double()) / (1 + 1e-6)
    hessian = torch.kron(curvature, gram)
    mean = float(torch.linalg.eigvalsh(hessian).log().mean().exp())
    growth, rho = (1.3, penalty * mean) if growing else (1.0, penalty)
    steps = 1 + math.ceil(math.log(2 / mean**0.5, growth)) if growing else 4  # the last penalty is the first one past the end
    sparse = target * pattern.keep(target.abs())
    dual = rho * (target - sparse)
    for step in range(steps):
        rho *= growth if step else 1
        side = curvature @ target @ gram - dual + rho * sparse
        weight = torch.linalg.solve(hessian + rho * torch.eye(out * width).double(), side.flatten()).view(out, width)
        relaxed = relaxation * weight + (1 - relaxation) * sparse
        keep = pattern.keep((relaxed + dual / rho).abs())
        sparse = (relaxed + dual / rho) * keep
        dual = dual + rho * (relaxed - sparse)
    expected = conjugate_gradient_refit(sparse, target, gram, keep=keep, steps=2, curvature=curvature if full else None)

    solver = FastADMM(damping=0, steps=4, refit_steps=2, penalty=penalty, relaxation=relaxation, growth=growth)
    torch.testing.assert_close(solver.solve(problem, pattern), expected, rtol=1e-9, atol=1e-9)


def signals(size: int, seed: int) -> Tensor:
    """(tokens, size) float32, of correlated features: the geometric mean of its Gram's eigenvalues is half of their mean."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(3 * size, size, generator=generator)
    return x + x @ torch.randn(size, size, generator=generator) * (0.5 / size**0.5)


def wide_problem(seed: int, outputs: int = 160, inputs: int = 192) -> LayerProblem:
    """A float32 problem with a full curvature, large enough for products in bfloat16."""
    gram, errors = Gram(inputs), signals(outputs, seed + 200)
    gram.update(signals(inputs, seed))
    weight = torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(seed + 100))
    return LayerProblem(weight, gram, errors.T @ errors / len(errors))


@pytest.mark.parametrize("curved", [False, True])
def test_bfloat16_costs_no_accuracy(curved: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the device multiplies bfloat16 faster, other bits and the same error to 2 %; elsewhere the bits of float32."""
    pattern, exact = parse_pattern("80%"), ALPS.accurate().with_curvature if curved else FastADMM()
    assert exact is not None
    ratios = []
    for seed in range(4):
        problem = wide_problem(seed)
        problem = problem if curved else replace(problem, curvature=None)
        expected = replace(exact, low_precision=False).solve(problem, pattern)
        monkeypatch.setattr(devices, "multiplies_bfloat16", lambda _: False)
        assert torch.equal(exact.solve(problem, pattern), expected)
        monkeypatch.setattr(devices, "multiplies_bfloat16", lambda _: True)
        answer = exact.solve(problem, pattern)
        assert not torch.equal(answer, expected)
        assert torch.equal(exact.solve(problem, pattern), answer)
        assert int((answer == 0).sum()) == pattern.count_removed(answer.shape)
        ratios.append(problem.error(answer) / problem.error(expected))
    assert max(ratios) < 1.02
    assert geometric_mean(ratios) < 1.01


@pytest.mark.parametrize("text", ["70%", "90%", "2:4"])
def test_growing_penalties_come_near_the_schedule_of_alps(text: str) -> None:
    """A third of the steps of ALPS's schedule, at most 3 % more error; six steps with a constant penalty leave more."""
    pattern, found = parse_pattern(text), []
    thorough = ALPS.accurate()
    assert thorough.with_curvature is not None
    for seed in range(3):
        problem = wide_problem(seed)
        slow, grown, constant = (
            problem.error(solver.solve(problem, pattern))
            for solver in (replace(thorough, with_curvature=None), thorough, replace(thorough.with_curvature, growth=1.0))
        )
        found.append((grown / slow, constant / slow))
    grown, constant = (geometric_mean(some) for some in zip(*found, strict=True))
    assert grown < 1.03
    assert grown < constant


def test_accurate_passes_its_damping_on() -> None:
    """A larger damping, as after a failed factorization, is that of the solver of problems with a curvature too."""
    problem, pattern, settings = wide_problem(0, 12, 24), parse_pattern("50%"), ALPS.accurate()
    assert settings.with_curvature is not None
    expected = replace(settings.with_curvature, damping=0.3).solve(problem, pattern)
    assert torch.equal(replace(settings, damping=0.3).solve(problem, pattern), expected)
    without = replace(problem, curvature=None)
    assert torch.equal(settings.solve(without, pattern), replace(settings, with_curvature=None).solve(without, pattern))


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
