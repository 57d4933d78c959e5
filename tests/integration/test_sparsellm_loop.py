"""SparseLLM's rounds over a feed-forward part: none can hurt, and what they say of themselves is so."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from sparsellm.activations.sensitivity import output_sensitivities
from sparsellm.methods import EpochResult, LayerResult
from sparsellm.methods.feedforward_problem import FeedForwardProblem, Weights
from sparsellm.methods.sparsellm import SparseLLM
from sparsellm.models.blocks import blocks_of
from sparsellm.pruning.sequential import Step
from sparsellm.solvers.linalg import add_diagonal
from sparsellm.solvers.patterns import parse_pattern
from sparsellm.solvers.sparsegpt import SparseGPT
from tests.integration.test_sparsellm_method import aim, batches, changed, prune, signals, state, tiny, two_families, writers

KINDS = ("solve", "newton")


def epochs_of(steps: list[Step], block: int = 0) -> list[EpochResult]:
    """The loop's results for one block."""
    return [step for step in steps if isinstance(step, EpochResult) and step.block.endswith(f".{block}")]


@pytest.mark.parametrize("singly", [False, True])
@two_families
def test_the_loop_only_goes_down(family: str, singly: bool) -> None:
    """Kept rounds' errors fall, a rejected one ends them, the last is the written part's own; the zeros are as asked.

    The first solve is judged by all tokens, rounds by the last sixteenth of them, 15 of 240, however they are batched.
    """
    model, steps = prune(family, SparseLLM(SparseGPT(), gauss_newton_steps=2), singly)
    dense, pruned, blocks = signals(tiny(family)), signals(model), blocks_of(tiny(family))
    metrics = output_sensitivities(tiny(family), batches())
    for block in blocks:
        kinds = [[epoch for epoch in epochs_of(steps, block.index) if epoch.step == kind] for kind in KINDS]
        assert [epoch for some in kinds for epoch in some] == epochs_of(steps, block.index)
        for mine, most in zip(kinds, (1, 2), strict=True):
            assert [epoch.epoch for epoch in mine] == list(range(1, 1 + len(mine)))
            assert all(epoch.accepted for epoch in mine[:-1])
            assert 1 <= len(mine) <= most
            assert len(mine) == most or not mine[-1].accepted
        errors = [epoch.feed_forward_error for epoch in kinds[1] if epoch.accepted]
        assert all(later < earlier for earlier, later in pairwise(errors))
        last = [epoch for epoch in epochs_of(steps, block.index) if epoch.accepted][-1]
        target = aim(family, block, writers(block)[1], dense, pruned)
        lost = target - pruned[block.full_name(writers(block)[1])][1]
        lost = lost[-15:] if last.step == "newton" else lost
        metric = add_diagonal(metrics[block.index], 1e-3)
        powers = [float(torch.einsum("ti,ij,tj->", each, metric.double(), each)) / len(each) for each in (lost, target)]
        assert last.feed_forward_error == pytest.approx(powers[0] / powers[1], rel=1e-4)
    assert family == "opt" or any(isinstance(step, EpochResult) and step.step == "newton" and step.accepted for step in steps)
    for step in steps:
        if isinstance(step, LayerResult):
            weight = model.get_submodule(step.name).weight
            assert int((weight == 0).sum()) == step.zeros == parse_pattern("60%").count_removed(weight.numel())


@two_families
def test_rounds_do_not_see_what_is_held_back(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 240 tokens 225 give a round's step and the writer's refit, and the other 15 judge it."""
    seen: dict[str, list[int]] = {}

    def counting(name: str) -> None:
        plain = getattr(FeedForwardProblem, name)

        def counted(self: FeedForwardProblem, *arguments: Any) -> Any:
            seen.setdefault(name, []).append(sum(map(len, self.inputs)))
            return plain(self, *arguments)

        monkeypatch.setattr(FeedForwardProblem, name, counted)

    for name in ("newton", "regression", "error"):
        counting(name)
    prune(family, SparseLLM(SparseGPT(), gauss_newton_steps=1), singly=True, chosen=frozenset({0}))
    assert seen["newton"] == [225]
    assert seen["regression"][:2] == [240, 225]
    assert set(seen["regression"][1:]) == {225}
    assert set(seen["error"][1:]) == {15}


@two_families
def test_rounds_hold_the_mask(family: str) -> None:
    """Gauss-Newton moves readers, writer and their biases in the block, and nothing else; every zero stays, and none comes."""
    (start, _), (model, _) = (
        prune(family, SparseLLM(SparseGPT(), gauss_newton_steps=n), chosen=frozenset({0})) for n in (0, 2)
    )
    block = blocks_of(model)[0]
    part = block.architecture.feed_forward
    assert part is not None
    names = {
        name for name in state(model) if name.startswith(tuple(f"{block.name}.{x}." for x in (*part.in_proj, part.out_proj)))
    }
    assert changed(model, start) == names
    for name in names:
        assert torch.equal(state(model)[name] == 0, state(start)[name] == 0)


@pytest.mark.parametrize(("factor", "accepted"), [(1024.0, False), (8.0, True)])
@two_families
def test_a_step_too_long_is_halved(family: str, factor: float, accepted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step far too long is shortened until the error falls; one that cannot help leaves every bit as it was."""
    plain = FeedForwardProblem.gauss_newton_step

    def far_off(self: FeedForwardProblem, *arguments: Any) -> Weights:
        steps = plain(self, *arguments)
        return {name: (factor * weight, None if bias is None else factor * bias) for name, (weight, bias) in steps.items()}

    start, _ = prune(family, SparseLLM(SparseGPT(), gauss_newton_steps=0), chosen=frozenset({0}))
    monkeypatch.setattr(FeedForwardProblem, "gauss_newton_step", far_off)
    model, steps = prune(family, SparseLLM(SparseGPT(), gauss_newton_steps=3), chosen=frozenset({0}))
    rounds = [epoch for epoch in epochs_of(steps) if epoch.step == "newton"]
    assert rounds[0].accepted == accepted
    assert accepted or (len(rounds) == 1 and not changed(model, start))
