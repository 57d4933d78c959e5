"""The hybrid pattern: what a text means, how many rows stay dense and which, and every solver's masks by brute force."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor

from sparsellm.errors import InvalidSetting
from sparsellm.extensions.hybrid.pattern import HybridRows
from sparsellm.methods.layerwise import solve
from sparsellm.solvers import LayerSolver, Magnitude, Wanda
from sparsellm.solvers.alps import ALPS
from sparsellm.solvers.fast_admm import FastADMM
from sparsellm.solvers.patterns import NM, Pattern, parse_pattern
from sparsellm.solvers.problem import LayerProblem
from sparsellm.solvers.sparsegpt import SparseGPT
from sparsellm.solvers.statistics import Gram

SOLVERS: list[LayerSolver] = [Magnitude(), Wanda(), SparseGPT(), FastADMM(), ALPS(), ALPS.accurate()]
every_solver = pytest.mark.parametrize("solver", SOLVERS, ids=lambda solver: type(solver).__name__)
curved_or_not = pytest.mark.parametrize("curved", [False, True], ids=["plain", "curvature"])

PARSED: list[tuple[str, Pattern]] = [
    ("2:4@75%", HybridRows(NM(2, 4), 0.75)),
    (" 2 : 4 @ 75 % ", HybridRows(NM(2, 4), 0.75)),
    ("2:4@0.75", HybridRows(NM(2, 4), 0.75)),
    ("2:4@.5", HybridRows(NM(2, 4), 0.5)),
    ("3:4@12.5%", HybridRows(NM(3, 4), 0.125)),
    ("4:8@99.9%", HybridRows(NM(4, 8), 0.999)),
    ("2:4@100%", NM(2, 4)),
    ("2:4@1", NM(2, 4)),
]
REFUSED = [
    "2:4@0%",
    "2:4@0",
    "2:4@120%",
    "2:4@",
    "2:4@75",
    "2:4@-5%",
    "2:4@nan",
    "2:4@half",
    "2:4@50%@50%",
    "4:2@50%",
    "@50%",
    "50%@50%",
]


@pytest.mark.parametrize(("text", "pattern"), PARSED)
def test_texts_mean_their_pattern(text: str, pattern: Pattern) -> None:
    parsed = parse_pattern(text)
    assert (type(parsed), str(parsed)) == (type(pattern), str(pattern))
    assert parsed.sparsity == pytest.approx(pattern.sparsity, abs=1e-15)
    assert parse_pattern(str(parsed)) == parsed


@pytest.mark.parametrize("text", REFUSED)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(InvalidSetting, match=r"sparsity|N:M"):
        parse_pattern(text)


def test_what_it_says_of_itself() -> None:
    pattern = parse_pattern("2:4@75%")
    assert pattern.describe() == "2:4@75% (2 of every 4 removed in 75 % of the rows, 37.5 %)"
    assert (pattern.sparsity, pattern.n_m, pattern.is_shareable) == (0.375, None, False)
    with pytest.raises(InvalidSetting, match="divisible by 4, got 6"):
        pattern.check((64, 6))


@pytest.mark.parametrize(
    ("rows", "share", "size", "dense"),
    [
        (4096, 0.75, 64, 1024),
        (4096, 0.7, 64, 19 * 64),
        (688, 0.25, 64, 512),
        (256, 0.5, 64, 128),
        (192, 0.25, 48, 144),
        (130, 0.25, 32, 96),
        (10, 0.5, 2, 4),
        (3, 0.5, 1, 2),
        (1, 0.75, 1, 0),
        (1, 0.25, 1, 1),
        (64, 0.999, 16, 0),
    ],
)
def test_so_many_rows_stay_dense(rows: int, share: float, size: int, dense: int) -> None:
    """Whole blocks of 64 rows, or of a quarter of fewer rows, as many as come nearest; the count is exact."""
    pattern, score = HybridRows(NM(2, 4), share), torch.rand(rows, 8, generator=torch.Generator().manual_seed(rows))
    assert pattern.count_removed((rows, 8)) == (rows - dense) * 4
    keep = pattern.keep(score)
    whole = keep.all(1)
    assert int((~keep).sum()) == pattern.count_removed(score.shape)
    assert int(whole.sum()) == dense
    blocks = whole[: rows // size * size].view(-1, size)
    assert torch.equal(blocks.all(1), blocks.any(1))
    assert not whole[rows // size * size :].any()
    assert torch.equal(keep[~whole], NM(2, 4).keep(score)[~whole])
    assert pattern.holds(score * keep)


def test_what_holds() -> None:
    """As many pruned blocks as the share asks for, wherever they are, and the rows after the last whole block."""
    pattern, weight = HybridRows(NM(2, 4), 0.5), torch.ones(10, 8)  # blocks of 2 rows, of which 3 are pruned
    weight[[0, 1, 4, 5, 8, 9], ::2] = 0
    assert pattern.holds(weight)
    assert HybridRows(NM(2, 4), 0.2).holds(weight)
    assert not HybridRows(NM(2, 4), 0.75).holds(weight)
    weight[9, 0] = 1
    assert not pattern.holds(weight)
    weight[:] = 0
    assert pattern.holds(weight)
    assert not pattern.holds(weight[:, :6])
    rest = torch.zeros(9, 8)  # four blocks, and a row
    rest[8, :3] = 1
    assert not HybridRows(NM(2, 4), 0.5).holds(rest)


@cache
def problem_of(curved: bool, kept_zeros: bool = False) -> LayerProblem:
    """A problem of 10 rows of different sizes, in pairs, and 8 correlated inputs."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(64, 8, generator=generator) @ torch.randn(8, 8, generator=generator)
    sizes = torch.tensor([1.0, 3.0, 0.5, 2.0, 5.0]).repeat_interleave(2).unsqueeze(1)
    weight = torch.randn(10, 8, generator=generator) * sizes
    gram = Gram(8)
    gram.update(x)
    mask = None
    if kept_zeros:
        mask = torch.rand(weight.shape, generator=generator) < 0.25
        weight = weight.masked_fill(mask, 0)
    root = torch.randn(10, 20, generator=generator) * torch.linspace(0.5, 1.5, 10).unsqueeze(1)
    return LayerProblem(weight, gram, curvature=root @ root.T if curved else None, pruned_mask=mask)


def choices(share: float) -> list[Tensor]:
    """Every way to leave so many of the five blocks dense, as `dense_rows`."""
    dense = round((1 - share) * 5)
    every = [torch.tensor([number in some for number in range(5)]) for some in itertools.combinations(range(5), dense)]
    return [blocks.repeat_interleave(2).unsqueeze(1) for blocks in every]


@every_solver
@curved_or_not
@pytest.mark.parametrize("share", [0.2, 0.4, 0.6, 0.8])
def test_no_other_rows_would_cost_less(solver: LayerSolver, curved: bool, share: float) -> None:
    """The count is exact, the dense rows are whole blocks, and the solver's own error is the least of all choices."""
    problem, pattern = problem_of(curved), HybridRows(NM(2, 4), share)
    weight, _ = solve(solver, problem, pattern, name="layer")
    assert int((weight == 0).sum()) == pattern.count_removed(weight.shape)
    assert pattern.holds(weight)
    every = [solver.solve(problem, replace(pattern, dense_rows=rows)) for rows in choices(share)]
    found = [bool(torch.equal(weight, other)) for other in every]
    assert sum(found) == 1
    if not isinstance(solver, (Magnitude, Wanda)):  # which do not see how inputs correlate
        errors = [problem.error(other) for other in every]
        assert errors[found.index(True)] == min(errors)


@pytest.mark.parametrize("solver", [Magnitude(), Wanda()], ids=["Magnitude", "Wanda"])
@pytest.mark.parametrize("share", [0.2, 0.6])
def test_masks_by_brute_force(solver: LayerSolver, share: float) -> None:
    """Of all masks of the pattern, that which removes least, with the sizes that the solver compares."""
    problem, groups = problem_of(False), [torch.tensor(some) for some in itertools.combinations(range(4), 2)]
    factor = torch.ones(8) if isinstance(solver, Magnitude) else problem.rms
    chosen = HybridRows(NM(2, 4), share).for_costs(problem.removal_costs)
    assert chosen.dense_rows is not None
    least = torch.stack([(problem.weight * factor).square().view(10, 2, 4)[..., group].sum(-1) for group in groups]).min(0)
    keep = problem.keep(chosen, problem.weight.abs() * factor)
    for row in range(10):
        for half in range(2):
            removed = set((~keep[row].view(2, 4)[half]).nonzero().flatten().tolist())
            assert removed == (set() if chosen.dense_rows[row] else set(groups[int(least.indices[row, half])].tolist()))
    costs = [
        problem.removal_costs().masked_fill(NM(2, 4).keep(problem.removal_costs()) | rows, 0).sum() for rows in choices(share)
    ]
    assert torch.equal(chosen.dense_rows, choices(share)[int(torch.stack(costs).argmin())])


@pytest.mark.parametrize("solver", [Magnitude(), Wanda(), SparseGPT(), FastADMM()], ids=lambda solver: type(solver).__name__)
def test_rows_are_those_of_the_plain_pattern_or_dense(solver: LayerSolver) -> None:
    """Without a curvature rows do not touch each other: the pruned ones are as under 2:4, the others as they were."""
    problem = problem_of(False)
    weight, _ = solve(solver, problem, HybridRows(NM(2, 4), 0.6), name="layer")
    whole = (weight != 0).all(1)
    assert int(whole.sum()) == 4
    torch.testing.assert_close(weight[whole], problem.weight[whole])
    torch.testing.assert_close(weight[~whole], solver.solve(problem, NM(2, 4))[~whole])


@every_solver
@curved_or_not
def test_zeros_that_stay(solver: LayerSolver, curved: bool) -> None:
    """Weights that are already removed stay so in dense rows too, and count where N:M removes."""
    problem, pattern = problem_of(curved, kept_zeros=True), HybridRows(NM(2, 4), 0.6)
    assert problem.pruned_mask is not None
    weight, _ = solve(solver, problem, pattern, name="layer")
    assert not weight[problem.pruned_mask].any()
    assert pattern.holds(weight)
    assert int((weight == 0).sum()) < int((solver.solve(problem, NM(2, 4)) == 0).sum())


@curved_or_not
def test_a_solve_without_waiting_is_the_same(curved: bool) -> None:
    problem, pattern = problem_of(curved), HybridRows(NM(2, 4), 0.6)
    weight, success = SparseGPT().solve_async(problem, pattern.for_costs(problem.removal_costs))
    assert bool(success)
    assert torch.equal(weight, solve(SparseGPT(), problem, pattern, name="layer")[0])


def test_rows_are_chosen_once() -> None:
    """Whatever is asked for later: the masks of one layer share them."""
    chosen = HybridRows(NM(2, 4), 0.6).for_costs(problem_of(False).removal_costs)
    assert chosen.for_costs(lambda: torch.zeros(10, 8)) is chosen
    assert chosen == HybridRows(NM(2, 4), 0.6)
    assert (str(chosen), chosen.column_span) == ("2:4@60%", 4)
