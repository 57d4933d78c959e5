"""What every solver's answer does when rows change places or inputs and weights change units."""

from __future__ import annotations

import pytest
import torch

from sparsellm.solvers import LayerSolver
from sparsellm.solvers.patterns import parse_pattern
from sparsellm.solvers.problem import LayerProblem
from tests.core.unit.solvers.test_solvers import DTYPES, PATTERNS, SOLVERS, every_solver, problem_of
from tests.pairwise import pairwise


@every_solver
@pytest.mark.parametrize("text", PATTERNS)
def test_rows_in_another_order(solver: LayerSolver, text: str) -> None:
    """Permuting the rows permutes the answer (every count divides by the rows, as Wanda's remainder goes by place)."""
    pattern = parse_pattern(text)
    problem = problem_of((10, 200))
    order = torch.randperm(10, generator=torch.Generator().manual_seed(3))
    moved = LayerProblem(problem.weight[order], problem.inputs)
    torch.testing.assert_close(solver.solve(moved, pattern), solver.solve(problem, pattern)[order], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("text", "solver", "dtype"), pairwise(PATTERNS, SOLVERS, DTYPES), ids=str)
def test_scaled_inputs_change_nothing(text: str, solver: LayerSolver, dtype: torch.dtype) -> None:
    """Inputs scaled by a power of two give the same bits; by another number, the same to rounding (in float64)."""
    pattern = parse_pattern(text)
    answer = solver.solve(problem_of((16, 48), dtype), pattern)
    for scale in (2.0**-12, 1024.0):
        assert torch.equal(solver.solve(problem_of((16, 48), dtype, scale=scale), pattern), answer)
    if dtype == torch.float64:
        other = solver.solve(problem_of((16, 48), dtype, scale=3.7), pattern)
        torch.testing.assert_close(other, answer, rtol=1e-6, atol=1e-6)


@every_solver
@pytest.mark.parametrize("text", ["60%", "2:4"])
def test_scaled_weights_scale_the_answer(solver: LayerSolver, text: str) -> None:
    """The problem is linear in the weight: 8 W gives 8 times the answer, bit for bit."""
    problem, pattern = problem_of((16, 48)), parse_pattern(text)
    scaled = LayerProblem(8 * problem.weight, problem.inputs)
    assert torch.equal(solver.solve(scaled, pattern), 8 * solver.solve(problem, pattern))
