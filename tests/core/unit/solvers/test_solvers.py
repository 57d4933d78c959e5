"""Every solver, on every kind of pattern, shape and dtype, against what must hold of any answer."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from sparsellm.errors import InvalidSetting
from sparsellm.solvers import LayerSolver, Magnitude, Wanda
from sparsellm.solvers.alps import ALPS
from sparsellm.solvers.fast_admm import FastADMM
from sparsellm.solvers.patterns import NM, Pattern, parse_pattern
from sparsellm.solvers.problem import LayerProblem
from sparsellm.solvers.sparsegpt import SparseGPT
from sparsellm.solvers.statistics import Gram, InputRMS, TokenCount
from tests.pairwise import pairwise

SOLVERS: list[LayerSolver] = [Magnitude(), Wanda(), SparseGPT(), FastADMM(), ALPS()]
PATTERNS = ["0%", "1%", "50%", "70%", "90%", "2:4", "3:4", "4:8"]
SHAPES = [(1, 40), (5, 12), (7, 13), (17, 136), (24, 256)]

DTYPES = [torch.float32, torch.float64]


def divides(text: str, shape: tuple[int, int]) -> bool:
    """Whether a pattern can be had of a layer of a shape."""
    return ":" not in text or shape[1] % int(text[-1]) == 0


every_solver = pytest.mark.parametrize("solver", SOLVERS, ids=lambda solver: type(solver).__name__)
every_case = pytest.mark.parametrize(
    ("text", "shape", "solver", "dtype"),
    pairwise(PATTERNS, SHAPES, SOLVERS, DTYPES, allowed=lambda text, shape, *_: divides(text, shape)),
    ids=lambda value: type(value).__name__ if isinstance(value, LayerSolver) else str(value),
)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float64"])


@cache
def signals(shape: tuple[int, int], seed: int, dead: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """A weight (out, in) and correlated inputs (tokens, in) of different sizes, in float64; `dead` inputs are zero."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator, dtype=torch.float64)
    x = torch.randn(4 * shape[1], shape[1], generator=generator, dtype=torch.float64)
    x = x + x @ torch.randn(shape[1], shape[1], generator=generator, dtype=torch.float64) / shape[1] ** 0.5
    x = x * torch.exp(0.5 * torch.randn(shape[1], generator=generator, dtype=torch.float64))
    x[:, list(dead)] = 0
    return weight, x


def problem_of(
    shape: tuple[int, int], dtype: torch.dtype = torch.float64, seed: int = 0, dead: tuple[int, ...] = (), scale: float = 1.0
) -> LayerProblem:
    """A layer problem with a Gram."""
    weight, x = signals(shape, seed, dead)
    gram = Gram(shape[1], dtype=dtype)
    gram.update((scale * x).to(dtype))
    return LayerProblem(weight.to(dtype, copy=True), gram)


@cache
def solved(solver: LayerSolver, pattern: Pattern, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """A solver's answer to `problem_of`, shared by the tests that only look at it."""
    return solver.solve(problem_of(shape, dtype), pattern)


def error(weight: Tensor, problem: LayerProblem, gram: Tensor | None = None) -> float:
    """tr ΔGΔᵀ / tr WGWᵀ in float64, by another formula than the source's."""
    gram = problem.inputs.matrix.double() if gram is None else gram  # type: ignore[attr-defined]
    change, target = weight.double() - problem.weight.double(), problem.weight.double()
    lost = torch.einsum("ij,jk,ik->", change, gram, change)
    return float(lost / torch.einsum("ij,jk,ik->", target, gram, target))


def least_squares(problem: LayerProblem, keep: Tensor, gram: Tensor) -> Tensor:
    """The exact answer on a mask, row by row in float64."""
    products = problem.weight.double() @ gram
    answer = torch.zeros_like(products)
    for row, support in enumerate(keep):
        if bool(support.any()):
            answer[row, support] = torch.linalg.solve(gram[support][:, support], products[row, support])
    return answer


@every_case
def test_never_better_than_least_squares(text: str, shape: tuple[int, int], solver: LayerSolver, dtype: torch.dtype) -> None:
    """No answer beats the exact least squares on its own mask, and problem.error agrees with the direct formula."""
    problem = problem_of(shape, dtype)
    answer = solved(solver, parse_pattern(text), shape, dtype)
    lost = error(answer, problem)
    best = least_squares(problem, answer != 0, problem.inputs.matrix.double())  # type: ignore[attr-defined]
    assert lost >= error(best, problem) * (1 - 1e-9) - 1e-14
    assert problem.error(answer) == pytest.approx(lost, rel=1e-3 if dtype == torch.float32 else 1e-9, abs=1e-10)


@pytest.mark.parametrize(("text", "solver", "dtype"), pairwise(["1%", "50%", "90%", "2:4", "4:8"], SOLVERS, DTYPES), ids=str)
def test_dead_inputs(text: str, solver: LayerSolver, dtype: torch.dtype) -> None:
    """Nothing is NaN; who sees the inputs removes the dead ones' weights first; the rest is as without them."""
    dead = (0, 9, 10, 39)
    pattern = parse_pattern(text)
    problem = problem_of((8, 40), dtype, dead=dead)
    answer = solver.solve(problem, pattern)
    assert bool(answer.isfinite().all())
    zeros = answer == 0
    assert int(zeros.sum()) >= pattern.count_removed(answer.shape)
    enough = isinstance(pattern, NM) or pattern.count_removed([40]) >= len(dead)
    if solver.needs is Gram or (solver.needs is InputRMS and enough):
        assert bool(zeros[:, list(dead)].all())
    if enough:
        assert int(zeros.sum()) == pattern.count_removed(answer.shape)


@every_solver
@pytest.mark.parametrize("text", ["0%", "50%", "2:4"])
def test_no_live_input_at_all(solver: LayerSolver, text: str) -> None:
    """With every input dead there is an answer, finite, and its relative error is 0, not NaN."""
    problem = problem_of((4, 8), torch.float32, dead=tuple(range(8)))
    answer = solver.solve(problem, parse_pattern(text))
    assert bool(answer.isfinite().all())
    assert problem.error(answer) == 0


@pytest.mark.parametrize("text", ["50%", "2:4"])
def test_criteria_by_their_definitions(text: str) -> None:
    """Magnitude keeps the layer's largest |W|, Wanda each row's largest |W| times the input's size; values unchanged."""
    pattern, (weight, x) = parse_pattern(text), signals((8, 40), 0, ())
    magnitude, wanda = (solver.solve(problem_of((8, 40)), pattern) for solver in (Magnitude(), Wanda()))
    assert torch.equal(magnitude, weight * pattern.keep(weight.abs()))
    assert torch.equal(wanda, weight * pattern.keep(weight.abs() * x.norm(dim=0), per_row=True))


@every_solver
def test_less_knowledge_than_needed_is_refused(solver: LayerSolver) -> None:
    """A solver given exactly what it `needs` works; one given less raises InvalidSetting."""
    weight, x = signals((4, 12), 0, ())
    for kind in (TokenCount, InputRMS, Gram):
        moments = kind(12)
        moments.update(x.float())
        problem = LayerProblem(weight.float(), moments)
        if kind.rank >= solver.needs.rank:
            solver.solve(problem, parse_pattern("50%"))
        else:
            with pytest.raises(InvalidSetting, match=kind.__name__):
                solver.solve(problem, parse_pattern("50%"))
