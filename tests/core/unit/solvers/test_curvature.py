"""Layer problems whose outputs do not all count alike, against dense algebra and against every mask."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache
from statistics import geometric_mean

import pytest
import torch
from torch import Tensor

from sparsellm.solvers import LayerSolver, Magnitude, Wanda
from sparsellm.solvers.alps import ALPS
from sparsellm.solvers.fast_admm import FastADMM
from sparsellm.solvers.linalg import add_diagonal, conjugate_gradient_refit
from sparsellm.solvers.patterns import NM, parse_pattern
from sparsellm.solvers.problem import LayerProblem
from sparsellm.solvers.sparsegpt import SparseGPT
from sparsellm.solvers.statistics import Gram, InputRMS, TokenCount
from tests.pairwise import pairwise

every_kind = pytest.mark.parametrize("kind", ["full", "none"])
every_pattern = pytest.mark.parametrize("text", ["50%", "70%", "2:4"])


def draw(*shape: int, seed: int) -> Tensor:
    """Standard normal draws in float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def signal(size: int, seed: int) -> Tensor:
    """(tokens, size): correlated, of different sizes."""
    x = draw(4 * size, size, seed=seed)
    x = x + 0.7 * x.roll(1, 1) + 0.5 * draw(len(x), 1, seed=seed + 1)
    return x * torch.exp(0.7 * draw(size, seed=seed + 2))


def problem_of(shape: tuple[int, int], kind: str = "full", seed: int = 0) -> LayerProblem:
    """A layer problem in float64 with a curvature or without."""
    gram = Gram(shape[1], dtype=torch.float64)
    gram.update(signal(shape[1], 10 * seed))
    errors = signal(shape[0], 10 * seed + 5000)
    curvature = errors.T @ errors / len(errors) if kind == "full" else None
    return LayerProblem(draw(*shape, seed=10 * seed + 9), gram, curvature)


def curvature_of(problem: LayerProblem) -> Tensor:
    """S as an (out, out) matrix."""
    return torch.eye(len(problem.weight)).double() if problem.curvature is None else problem.curvature


def trace(change: Tensor, curvature: Tensor, gram: Tensor) -> float:
    """tr S Δ G Δᵀ."""
    return float(torch.einsum("ab,bj,jk,ak->", curvature, change, gram, change))


def exact(target: Tensor, curvature: Tensor, gram: Tensor, keep: Tensor) -> Tensor:
    """The best weight on a mask: the normal equations (S kron G) w = (S kron G) w⋆ of the kept entries."""
    matrix, kept = torch.kron(curvature, gram), keep.flatten()
    found = torch.zeros(target.numel()).double()
    found[kept] = torch.linalg.solve(matrix[kept][:, kept], (matrix @ target.flatten())[kept])
    return found.view(target.shape)


@cache
def supports(shape: tuple[int, int], text: str) -> Tensor:
    """(masks, kept): the kept entries of every mask that a pattern allows."""
    pattern, count = parse_pattern(text), shape[0] * shape[1]
    if not isinstance(pattern, NM):
        return torch.tensor(list(itertools.combinations(range(count), count - pattern.count_removed(shape))))
    group = list(itertools.combinations(range(pattern.group), pattern.group - pattern.zeros))
    starts = torch.arange(0, count, pattern.group)[:, None]
    return torch.stack([(starts + torch.tensor(some)).flatten() for some in itertools.product(group, repeat=len(starts))])


def optimum(problem: LayerProblem, text: str) -> float:
    """The smallest relative error of all masks with their best weights."""
    shape = (problem.weight.shape[0], problem.weight.shape[1])
    matrix, kept = torch.kron(curvature_of(problem), problem.gram), supports(shape, text)
    products = (matrix @ problem.weight.flatten())[kept]
    gained = (torch.linalg.solve(matrix[kept[:, :, None], kept[:, None, :]], products) * products).sum(1)
    energy = trace(problem.weight, curvature_of(problem), problem.gram)
    return float(energy - gained.max()) / energy


@every_kind
@pytest.mark.parametrize("knowledge", [Gram, InputRMS, TokenCount])
def test_errors_are_traces(knowledge: type[TokenCount], kind: str) -> None:
    """`energy` is tr S W G Wᵀ and `error` that of the change over the target's; G is diagonal or 1 where less is known."""
    shape = (7, 12)
    problem = problem_of(shape, kind)
    x = signal(12, 0)
    moments = knowledge(12)
    moments.update(x)
    gram = {Gram: x.T @ x / len(x), InputRMS: x.square().mean(0).diag(), TokenCount: torch.eye(12).double()}[knowledge]
    single = None if problem.curvature is None else problem.curvature.float()
    known = LayerProblem(problem.weight.float(), moments, single)
    weight, curvature = draw(*shape, seed=1), curvature_of(problem)
    assert float(known.energy(weight.float())) == pytest.approx(trace(weight, curvature, gram), rel=1e-5)
    wanted = trace(weight - problem.weight, curvature, gram) / trace(problem.weight, curvature, gram)
    assert known.error(weight.float()) == pytest.approx(wanted, rel=1e-5)
    assert known.error(known.weight) == 0


def test_rows() -> None:
    """The root of what a row counts, 1 on average of the squares, at least a thousandth; alike where nothing counts."""
    problem = problem_of((4, 8), "none")
    assert problem.row_scale is None
    diagonal = torch.tensor([4.0, 0.0, 1.0, 11.0]).double()
    full = diagonal.diag() + 0.01 * (1 - torch.eye(4).double())
    wanted = torch.tensor([1.0, 1e-3, 0.5, 11**0.5 / 2]).double().unsqueeze(1)
    for curvature in (full, 1024 * full):
        rows = replace(problem, curvature=curvature).row_scale
        assert rows is not None
        torch.testing.assert_close(rows, wanted)
    rows = replace(problem, curvature=torch.zeros(4, 4).double()).row_scale
    assert rows is not None
    assert torch.equal(rows, torch.ones(4, 1).double())


@pytest.mark.parametrize("shape", [(1, 10), (6, 9), (9, 14)])
@pytest.mark.parametrize("start", ["zero", "masked", "random"])
def test_refit_in_a_metric(start: str, shape: tuple[int, int]) -> None:
    """The sum's error never rises from step to step and ends at the dense solution; zero outside; arguments untouched."""
    problem, keep = problem_of(shape), draw(*shape, seed=4) > 0
    target, gram, curvature = problem.weight, problem.gram, curvature_of(problem)
    first = {"zero": target * 0, "masked": target * keep, "random": draw(*shape, seed=5) * keep}[start]
    arguments = first, target, gram, keep, curvature
    copies = [tensor.clone() for tensor in arguments]
    best = trace(exact(target, curvature, gram, keep) - target, curvature, gram)
    last = initial = trace(first - target, curvature, gram)
    for steps in (0, 1, 2, 3, 5, 10, 30, 1000):
        weight = conjugate_gradient_refit(first, target, gram, keep=keep, steps=steps, tolerance=1e-10, curvature=curvature)
        assert not bool(weight[~keep].any())
        now = trace(weight - target, curvature, gram)
        assert best * (1 - 1e-9) <= now <= last * (1 + 1e-9)
        last = now
    assert last == pytest.approx(best, rel=1e-6)
    assert initial > 1.2 * best
    torch.testing.assert_close(weight, exact(target, curvature, gram, keep), rtol=1e-4, atol=1e-4)
    assert torch.equal(conjugate_gradient_refit(weight, target, gram, keep=keep, steps=0, curvature=curvature), weight)
    assert all(torch.equal(tensor, copy) for tensor, copy in zip(arguments, copies, strict=True))


def test_refit_in_other_units() -> None:
    """A start at the target stays to the bit; rows and columns in units of other powers of two give the same bits in these."""
    problem = problem_of((6, 9))
    target, gram, curvature, keep = problem.weight, problem.gram, curvature_of(problem), draw(6, 9, seed=4) > 0
    assert torch.equal(conjugate_gradient_refit(target, target, gram, keep=keep | True, steps=9, curvature=curvature), target)
    rows, columns = 2.0 ** torch.arange(-6, 6, 2).double(), 2.0 ** torch.arange(-8, 10, 2).double()
    answer = conjugate_gradient_refit(target * keep, target, gram, keep=keep, steps=4, curvature=curvature)
    target, gram, curvature = target / rows.outer(columns), gram * columns.outer(columns), curvature * rows.outer(rows)
    assert torch.equal(
        conjugate_gradient_refit(target * keep, target, gram, keep=keep, steps=4, curvature=curvature),
        answer / rows.outer(columns),
    )


@every_pattern
@every_kind
def test_criteria(kind: str, text: str) -> None:
    """Wanda's bits do not see S; Magnitude keeps the largest sqrt(S_ii) |W|, values unchanged."""
    problem, pattern = problem_of((12, 24), kind), parse_pattern(text)
    assert torch.equal(Wanda().solve(problem, pattern), Wanda().solve(replace(problem, curvature=None), pattern))
    score = problem.weight.abs() * curvature_of(problem).diagonal().sqrt().unsqueeze(1)
    assert torch.equal(Magnitude().solve(problem, pattern), problem.weight * pattern.keep(score))


@every_kind
@pytest.mark.parametrize("damping", [0.0, 0.01, 0.3])
def test_sparsegpt_by_its_definition(damping: float, kind: str) -> None:
    """Where one block holds all columns: the smallest w² / U_jj² go, times 1 / [S⁻¹]_ii where there is an S."""
    problem, pattern = problem_of((12, 24), kind), parse_pattern("60%")
    upper = torch.linalg.cholesky(torch.linalg.inv(add_diagonal(problem.gram, damping))).T
    height = curvature_of(problem).diagonal()
    if kind == "full":
        height = torch.linalg.inv(add_diagonal(curvature_of(problem), max(damping, 1e-6))).diagonal().reciprocal()
    score = problem.weight.square() / upper.diagonal().square() * height.unsqueeze(1)
    solver = SparseGPT(damping=damping)
    assert torch.equal(solver.solve(problem, pattern) != 0, pattern.keep(score))
    got = torch.as_tensor(solver._factorize(problem).row, dtype=torch.float64).expand(12)
    torch.testing.assert_close(got / got.mean(), height / height.mean(), rtol=1e-6, atol=0)
    groups = parse_pattern("2:4")
    assert torch.equal(solver.solve(problem, groups), solver.solve(replace(problem, curvature=None), groups))


@pytest.mark.parametrize(
    ("kind", "text", "solver"),
    pairwise(["full", "none"], ["50%", "70%", "2:4"], [Magnitude(), Wanda(), SparseGPT(), FastADMM(), ALPS()]),
    ids=str,
)
def test_counts_and_bits(kind: str, text: str, solver: LayerSolver) -> None:
    """Exact patterns, finite, the same bits again and for S in other units, and an untouched problem, in float32 too."""
    problem, pattern = problem_of((12, 24), kind), parse_pattern(text)
    curvature = problem.curvature
    for dtype in (torch.float64, torch.float32):
        each = replace(problem, weight=problem.weight.to(dtype, copy=True))
        each = replace(each, curvature=None if curvature is None else curvature.to(dtype, copy=True))
        answer = solver.solve(each, pattern)
        assert answer.dtype == dtype
        assert bool(answer.isfinite().all())
        assert int((answer == 0).sum()) == pattern.count_removed(answer.shape)
        if isinstance(pattern, NM):
            assert bool(((answer.reshape(-1, pattern.group) == 0).sum(1) == pattern.zeros).all())
        other = replace(each, curvature=None if each.curvature is None else 2.0**20 * each.curvature)
        assert torch.equal(solver.solve(other, pattern), answer)
        assert torch.equal(each.weight, problem.weight.to(dtype))
        assert each.curvature is None or torch.equal(curvature_of(each), curvature_of(problem).to(dtype))


@pytest.mark.parametrize(
    ("kind", "text", "shape", "solver"),
    pairwise(["full", "none"], ["50%", "70%", "2:4"], [(6, 12), (16, 24), (24, 16)], [ALPS(), ALPS.accurate()]),
    ids=str,
)
def test_alps_solves_its_mask(kind: str, text: str, shape: tuple[int, int], solver: ALPS) -> None:
    """On its mask its error (damped) is within 1 % of the least."""
    problem, pattern = problem_of(shape, kind, seed=2), parse_pattern(text)
    answer = solver.solve(problem, pattern)
    gram, curvature = add_diagonal(problem.gram, solver.damping), curvature_of(problem)
    curvature = add_diagonal(curvature, solver.damping) if kind == "full" else curvature
    best = exact(problem.weight, curvature, gram, answer != 0)
    least, found = (trace(weight - problem.weight, curvature, gram) for weight in (best, answer))
    assert least * (1 - 1e-9) <= found <= 1.01 * least


@pytest.mark.parametrize(
    ("shape", "text", "blind"),
    [
        ((3, 4), "50%", 2.0),
        pytest.param((2, 6), "50%", 4.0, marks=pytest.mark.long),
        pytest.param((3, 4), "2:4", 1.2, marks=pytest.mark.long),
        ((2, 8), "2:4", 4.0),
    ],
)
def test_small_cases_against_every_mask(shape: tuple[int, int], text: str, blind: float) -> None:
    """No solver beats the best of all masks; ALPS typically (60 draws, geometric mean) loses 1.32 to 1.53 times that.

    Without S it loses `blind` times more than with it.
    """
    pattern, ratios, unseen = parse_pattern(text), list[float](), list[float]()
    for seed in range(60):
        problem = problem_of(shape, seed=seed)
        best = optimum(problem, text)
        for known, found in ((problem, ratios), (replace(problem, curvature=None), unseen)):
            found.append(problem.error(ALPS().solve(known, pattern)) / best)
        for solver in (SparseGPT(), Magnitude()):
            assert problem.error(solver.solve(problem, pattern)) >= best * (1 - 1e-9)
    assert min(*ratios, *unseen) >= 1 - 1e-9
    assert geometric_mean(ratios) <= 1.6
    assert geometric_mean(unseen) >= blind * geometric_mean(ratios)


@pytest.mark.parametrize("solver", [SparseGPT(), FastADMM(), ALPS()], ids=lambda solver: type(solver).__name__)
def test_rows_that_cost_nothing_go_first(solver: LayerSolver) -> None:
    """Where half of the outputs cost nothing, a pattern of 50 % takes (most of) their weights; S is damped by 1 %."""
    problem, pattern = problem_of((16, 24), "none"), parse_pattern("50%")
    diagonal = torch.cat([torch.ones(8), torch.zeros(8)]).double()
    known = replace(problem, curvature=diagonal.diag())
    answer = solver.solve(known, pattern)
    assert known.error(answer) < 1e-3
    assert float((answer[8:] != 0).float().mean()) < 0.25
