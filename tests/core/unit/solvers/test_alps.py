"""ALPS on a mask and over all masks, against exact least squares."""

from __future__ import annotations

import itertools

import pytest
import torch

from sparsellm.solvers.alps import ALPS
from sparsellm.solvers.linalg import add_diagonal
from sparsellm.solvers.patterns import NM, parse_pattern
from sparsellm.solvers.problem import LayerProblem
from tests.core.unit.solvers.test_solvers import PATTERNS, SHAPES, SOLVERS, divides, error, least_squares, problem_of
from tests.pairwise import pairwise


@pytest.mark.parametrize(
    ("text", "shape", "settings"),
    pairwise(PATTERNS, SHAPES, [(0.01, 10, 1.01), (1e-6, 200, 1.05)], allowed=lambda text, shape, _: divides(text, shape)),
    ids=str,
)
def test_alps_solves_its_mask(text: str, shape: tuple[int, int], settings: tuple[float, int, float]) -> None:
    """By default within 1 % of the best on its mask for the damped problem; hardly damped, 5 % for the problem itself."""
    problem, (damping, steps, factor) = problem_of(shape), settings
    answer = ALPS(damping=damping, refit_steps=steps).solve(problem, parse_pattern(text))
    gram = add_diagonal(problem.gram, damping) if factor == 1.01 else problem.gram
    best = error(least_squares(problem, answer != 0, gram), problem, gram)
    assert error(answer, problem, gram) <= factor * best + 1e-12


def smallest_error(problem: LayerProblem, pattern: NM) -> float:
    """The optimum over all N:M masks with exact values: rows are independent, every mask of a row is tried."""
    gram, width = problem.gram, problem.weight.shape[1]
    group = list(itertools.combinations(range(pattern.group), pattern.group - pattern.zeros))
    starts = torch.arange(0, width, pattern.group)[:, None]
    supports = torch.stack([(starts + torch.tensor(c)).flatten() for c in itertools.product(group, repeat=len(starts))])
    blocks = gram[supports[:, :, None], supports[:, None, :]]
    lost = 0.0
    for row in problem.weight:
        products = (row @ gram)[supports]
        gained = (torch.linalg.solve(blocks, products) * products).sum(1)
        lost += float(row @ gram @ row - gained.max())
    return lost / float(torch.einsum("ij,jk,ik->", problem.weight, gram, problem.weight))


@pytest.mark.parametrize(("text", "shape"), [("2:4", (4, 12)), ("3:4", (4, 12)), ("1:2", (4, 12)), ("4:8", (4, 16))])
def test_small_cases_against_every_mask(text: str, shape: tuple[int, int]) -> None:
    """No solver beats the best of all masks; ALPS loses at most twice that on any draw, and 1.3 times on average."""
    pattern = parse_pattern(text)
    assert isinstance(pattern, NM)
    ratios = []
    for seed in range(10):
        problem = problem_of(shape, seed=seed)
        best = smallest_error(problem, pattern)
        for solver in SOLVERS:
            assert error(solver.solve(problem, pattern), problem) >= best * (1 - 1e-9)
        ratios.append(error(ALPS().solve(problem, pattern), problem) / best)
    assert max(ratios) <= 2
    assert sum(ratios) / len(ratios) <= 1.3
