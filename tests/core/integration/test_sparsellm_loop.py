"""SparseLLM's rounds over a feed-forward part: none can hurt, and what they say of themselves is so."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch

from sparsellm.activations.sensitivity import output_fisher
from sparsellm.methods import EpochResult, LayerResult, Step, block_solver
from sparsellm.methods.block_solver import BlockSolver
from sparsellm.methods.feedforward_problem import FeedForwardProblem, PartWeights
from sparsellm.methods.gauss_newton import gauss_newton_changes
from sparsellm.methods.sparsellm import SparseLLM
from sparsellm.models.blocks import blocks_of
from sparsellm.solvers import Magnitude
from sparsellm.solvers.linalg import add_diagonal
from sparsellm.solvers.patterns import parse_pattern
from sparsellm.solvers.sparsegpt import SparseGPT
from tests.core.integration.test_sparsellm_method import (
    aim,
    batches,
    changed,
    prune,
    signals,
    state,
    tiny,
    two_families,
    writers,
)

KINDS = ("solve", "newton")


def epochs_of(steps: list[Step], block: int = 0) -> list[EpochResult]:
    """The loop's results for one block."""
    return [step for step in steps if isinstance(step, EpochResult) and step.block.endswith(f".{block}")]


@pytest.mark.parametrize("singly", [False, True])
@two_families
def test_the_loop_only_goes_down(family: str, singly: bool) -> None:
    """Kept steps' errors fall, a rejected one ends them, the last is the written part's own; the zeros are as asked.

    All are judged by the last sixteenth of the tokens, 15 of 240, however they are batched.
    """
    model, steps = prune(family, SparseLLM(SparseGPT(), rounds=2), singly)
    dense, pruned, blocks = signals(tiny(family)), signals(model), blocks_of(tiny(family))
    metrics = output_fisher(tiny(family), batches())
    for block in blocks:
        kinds = [[epoch for epoch in epochs_of(steps, block.index) if epoch.step == kind] for kind in KINDS]
        assert [epoch for some in kinds for epoch in some] == epochs_of(steps, block.index)
        for mine, most in zip(kinds, (1, 2), strict=True):
            assert [epoch.epoch for epoch in mine] == list(range(1, 1 + len(mine)))
            assert all(epoch.accepted for epoch in mine[:-1])
            assert 1 <= len(mine) <= most
            assert len(mine) == most or not mine[-1].accepted
        errors = [epoch.feed_forward_error for kind in kinds for epoch in kind if epoch.accepted]
        assert all(later < earlier for earlier, later in pairwise(errors))
        last = [epoch for epoch in epochs_of(steps, block.index) if epoch.accepted][-1]
        target = aim(family, block, writers(block)[1], dense, pruned)
        lost = target - pruned[block.full_name(writers(block)[1])][1]
        metric = add_diagonal(metrics[block.index], 1e-3)
        held_out, power = (
            float(torch.einsum("ti,ij,tj->", x, metric.double(), x)) / len(x) for x in (lost[-15:], target[-15:])
        )
        # The last refit is to all tokens: those held out are fitted better than when they judged the last round.
        assert last.step == "solve" or held_out / power < last.feed_forward_error
    assert family == "opt" or any(isinstance(step, EpochResult) and step.step == "newton" and step.accepted for step in steps)
    for step in steps:
        if isinstance(step, LayerResult):
            weight = model.get_submodule(step.name).weight
            assert int((weight == 0).sum()) == step.zeros == parse_pattern("60%").count_removed(weight.shape)


@two_families
def test_rounds_do_not_see_what_is_held_back(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 240 tokens 225 give the writer's solve and a round; the other 15 judge it, and the last refit is to all."""
    seen: dict[str, list[int]] = {}

    def counting(name: str) -> None:
        plain = getattr(FeedForwardProblem, name)

        def counted(self: FeedForwardProblem, *arguments: Any) -> Any:
            seen.setdefault(name, []).append(sum(map(len, self.inputs)))
            return plain(self, *arguments)

        monkeypatch.setattr(FeedForwardProblem, name, counted)

    def counted_changes(problem: FeedForwardProblem, *arguments: Any) -> Iterator[PartWeights]:
        seen.setdefault("changes", []).append(sum(map(len, problem.inputs)))
        return gauss_newton_changes(problem, *arguments)

    monkeypatch.setattr(block_solver, "gauss_newton_changes", counted_changes)
    for name in ("regression", "error"):
        counting(name)
    prune(family, SparseLLM(SparseGPT(), rounds=1), singly=True, chosen=frozenset({0}))
    assert seen["changes"] == [225]
    assert set(seen["regression"][:-1]) == {225}
    assert seen["regression"][-1] == 240
    assert set(seen["error"]) == {15}


def test_changes_end_before_the_error_rises(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the held-out tokens: of two changes the second, with a larger error than the first, is not taken."""

    def with_changes(*lengths: float) -> dict[str, torch.Tensor]:
        def changes(*arguments: Any) -> Iterator[PartWeights]:
            change = next(gauss_newton_changes(*arguments))
            for length in lengths:
                yield {name: (length * x, None if bias is None else length * bias) for name, (x, bias) in change.items()}

        monkeypatch.setattr(block_solver, "gauss_newton_changes", changes)
        return state(prune("llama", SparseLLM(SparseGPT(), rounds=1), singly=True, chosen=frozenset({0}))[0])

    start, one, two = with_changes(), with_changes(1.0), with_changes(1.0, 0.9)
    assert not all(torch.equal(one[name], tensor) for name, tensor in start.items())
    assert all(torch.equal(two[name], tensor) for name, tensor in one.items())


def test_a_round_that_is_worse_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told as not accepted, and ends the rounds."""

    def with_round(factor: float) -> tuple[dict[str, torch.Tensor], list[EpochResult]]:
        def worse(solver: BlockSolver, *arguments: Any) -> tuple[PartWeights, float]:
            weights = solver._weights(arguments[2])
            return {name: (factor * weight, bias) for name, (weight, bias) in weights.items()}, 1.01 * arguments[3]

        monkeypatch.setattr(BlockSolver, "_newton_round", worse)
        model, steps = prune("llama", SparseLLM(SparseGPT(), rounds=3), singly=True, chosen=frozenset({0}))
        return state(model), [epoch for epoch in epochs_of(steps) if epoch.step == "newton"]

    (kept, told), (other, _) = with_round(1.0), with_round(0.5)
    assert [(epoch.epoch, epoch.accepted) for epoch in told] == [(1, False)]
    assert all(torch.equal(other[name], tensor) for name, tensor in kept.items())


@two_families
def test_rounds_hold_the_mask(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gauss-Newton moves readers, writer and their biases in the block, and nothing else; every zero stays, and none comes."""
    solved: dict[str, torch.Tensor] = {}
    plain = BlockSolver._gauss_newton

    def recording(
        self: BlockSolver, problem: FeedForwardProblem, names: tuple[str, ...], energy: float
    ) -> Iterator[EpochResult]:
        solved.update({name: weight for name, (weight, _) in self._weights(names).items()})
        yield from plain(self, problem, names, energy)

    monkeypatch.setattr(BlockSolver, "_gauss_newton", recording)
    (start, _), (model, _) = (prune(family, SparseLLM(Magnitude(), rounds=n), chosen=frozenset({0})) for n in (0, 2))
    block = blocks_of(model)[0]
    part = block.architecture.feed_forward
    assert part is not None
    names = {
        name for name in state(model) if name.startswith(tuple(f"{block.name}.{x}." for x in (*part.in_proj, part.out_proj)))
    }
    assert changed(model, start) == names
    assert set(solved) == {*part.in_proj, part.out_proj}
    for name, weight in solved.items():
        assert torch.equal(block.layer(name).weight == 0, weight == 0)
        assert not torch.equal(block.layer(name).weight, weight)


@two_families
def test_a_change_that_cannot_help_is_not_made(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change far too long ends the rounds before a refit: the readers keep every bit, the writer sees all tokens."""

    def far_off(problem: FeedForwardProblem, *arguments: Any) -> Iterator[PartWeights]:
        for change in gauss_newton_changes(problem, *arguments):
            yield {name: (1e4 * weight, None if bias is None else 1e4 * bias) for name, (weight, bias) in change.items()}

    regressions: list[int] = []
    regression = FeedForwardProblem.regression
    monkeypatch.setattr(
        FeedForwardProblem, "regression", lambda self, weights: regressions.append(self._tokens) or regression(self, weights)
    )
    start, _ = prune(family, SparseLLM(SparseGPT(), rounds=0), chosen=frozenset({0}))
    assert regressions == [240]
    regressions.clear()
    monkeypatch.setattr(block_solver, "gauss_newton_changes", far_off)
    model, steps = prune(family, SparseLLM(SparseGPT(), rounds=3), chosen=frozenset({0}))
    rounds = [epoch for epoch in epochs_of(steps) if epoch.step == "newton"]
    assert [epoch.accepted for epoch in rounds] == [False]
    assert regressions == [225, 240]
    out_proj = blocks_of(model)[0].architecture.feed_forward.out_proj  # type: ignore[union-attr]
    assert {name.rsplit(".", 1)[0] for name in changed(model, start)} == {blocks_of(model)[0].full_name(out_proj)}
