"""SparseGPT against a direct loop that inverts the remaining Gram anew at every column."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparsellm.solvers.linalg import add_diagonal
from sparsellm.solvers.patterns import NM, Pattern, Unstructured, parse_pattern
from sparsellm.solvers.problem import LayerProblem
from sparsellm.solvers.sparsegpt import SparseGPT
from sparsellm.solvers.statistics import Gram
from tests.pairwise import pairwise


def problem_of(shape: tuple[int, int], dtype: torch.dtype = torch.float64, dead: tuple[int, ...] = ()) -> LayerProblem:
    """A layer with strongly correlated inputs of different sizes."""
    generator = torch.Generator().manual_seed(shape[0] * 1000 + shape[1])
    weight = torch.randn(shape, generator=generator, dtype=torch.float64)
    x = torch.randn(3 * shape[1], shape[1], generator=generator, dtype=torch.float64)
    x = (x + 0.8 * x.roll(1, dims=1) + 0.5 * x.roll(7, dims=1)) * torch.linspace(0.2, 2, shape[1], dtype=torch.float64)
    x[:, list(dead)] = 0
    gram = Gram(shape[1], dtype=dtype)
    gram.update(x.to(dtype))
    return LayerProblem(weight.to(dtype), gram)


def smallest(values: Tensor, count: int) -> Tensor:
    """True on the `count` smallest of a flat tensor, by a stable sort."""
    gone = torch.zeros_like(values, dtype=torch.bool)
    gone[values.argsort(stable=True)[:count]] = True
    return gone


def direct(problem: LayerProblem, pattern: Pattern, block: int, damping: float) -> Tensor:
    """Optimal brain surgeon column by column, in float64.

    At column j the inverse of the Gram of the columns j, j+1, ... is computed anew. A weight's cost is w² / inverse[j, j];
    its removal moves the later ones by w · inverse[0, :] / inverse[0, 0]. Masks: N:M per group as it is reached,
    unstructured per block of columns, as large as makes the running total exact.
    """
    gram = problem.inputs.matrix.double()  # type: ignore[attr-defined]
    dead = gram.diagonal() == 0
    gram = add_diagonal(gram, damping)
    weight = problem.weight.double().clone()
    weight[:, dead] = 0
    rows, columns = weight.shape
    inverses = [torch.linalg.inv(gram[j:, j:]) for j in range(columns)]
    pivots = torch.stack([inverse[0, 0] for inverse in inverses])
    gone = torch.zeros_like(weight, dtype=torch.bool)
    for j in range(columns):
        if isinstance(pattern, NM) and j % pattern.group == 0:
            group = slice(j, j + pattern.group)
            for row in range(rows):
                gone[row, group] = smallest(weight[row, group].square() / pivots[group], pattern.zeros)
        if isinstance(pattern, Unstructured) and j % block == 0:
            end = min(j + block, columns)
            count = round(pattern.sparsity * (rows * end)) - round(pattern.sparsity * (rows * j))
            # Column by column, as the solver stores a block; only ties could tell the difference.
            cost = (weight[:, j:end].square() / pivots[j:end]).T
            gone[:, j:end] = smallest(cost.flatten(), count).view_as(cost).T
        error = weight[:, j] * gone[:, j]
        weight[:, j:] -= error[:, None] * inverses[j][0] / inverses[j][0, 0]
        weight[gone[:, j], j] = 0
    return weight


@pytest.mark.parametrize(
    ("text", "damping", "block"), pairwise(["1:2", "2:4", "3:4", "4:8", "3:5", "2:6"], [0.01, 0.1], [4, 16, 128])
)
def test_nm_equals_the_direct_loop(text: str, damping: float, block: int) -> None:
    """N:M: the same masks and values to 1e-5, also where the group does not divide the block or exceeds it."""
    pattern = parse_pattern(text)
    assert isinstance(pattern, NM)
    for shape in ((9, 15 * pattern.group), (1, pattern.group)):
        problem = problem_of(shape)
        wanted = direct(problem, pattern, block, damping)
        got = SparseGPT(damping=damping, block=block).solve(problem, pattern)
        assert torch.equal(got == 0, wanted == 0)
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "text", "block"),
    pairwise([(1, 40), (9, 61), (24, 130)], ["0%", "1%", "50%", "70%", "90%"], [1, 4, 16, 128]),
    ids=str,
)
def test_unstructured_equals_the_direct_loop(shape: tuple[int, int], text: str, block: int) -> None:
    """Unstructured, with the same rule for a block's mask: the same masks and values to 1e-5."""
    pattern, problem = parse_pattern(text), problem_of(shape)
    wanted = direct(problem, pattern, block, 0.01)
    got = SparseGPT(block=block).solve(problem, pattern)
    assert torch.equal(got == 0, wanted == 0)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("text", ["50%", "2:4"])
def test_dead_inputs_equal_the_direct_loop(text: str) -> None:
    """Dead inputs at a block's start, middle and end change nothing of the agreement."""
    pattern, problem = parse_pattern(text), problem_of((8, 48), dead=(0, 17, 47))
    wanted = direct(problem, pattern, 16, 0.01)
    got = SparseGPT(block=16).solve(problem, pattern)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    assert not bool(got[:, [0, 17, 47]].any())


@pytest.mark.parametrize("text", ["50%", "3:4"])
def test_float32_agrees_with_the_reference(text: str) -> None:
    """In float32 the answer costs what the float64 reference's costs, to 1e-3, and nearly every mask entry is the same."""
    pattern, problem = parse_pattern(text), problem_of((24, 64), torch.float32)
    wanted = direct(problem, pattern, 128, 0.01)
    got = SparseGPT().solve(problem, pattern)
    assert float(((got == 0) != (wanted == 0)).float().mean()) < 0.005
    assert problem.error(got) == pytest.approx(problem.error(wanted.float()), rel=1e-3)


def test_blocks_do_not_change_nm_answers() -> None:
    """For N:M the block size is only a matter of speed."""
    problem, pattern = problem_of((9, 96)), parse_pattern("2:4")
    one = SparseGPT(block=4).solve(problem, pattern)
    for block in (1, 7, 32, 96, 1000):
        torch.testing.assert_close(SparseGPT(block=block).solve(problem, pattern), one, rtol=1e-9, atol=1e-9)
