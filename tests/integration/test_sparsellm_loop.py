"""SparseLLM's loop over a feed-forward part: no epoch and no round can hurt, and what it says of itself is so."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from sparsellm.blocks import blocks_of
from sparsellm.linalg import damped
from sparsellm.methods import EpochResult, LayerResult
from sparsellm.methods.part import Part, Weights
from sparsellm.methods.sparsellm import SparseLLM
from sparsellm.moments import Gram, NoInputs
from sparsellm.patterns import Pattern, parse_pattern
from sparsellm.problem import LayerProblem
from sparsellm.regression import Regression
from sparsellm.sensitivity import output_sensitivities
from sparsellm.sequential import Step
from sparsellm.solvers.sparsegpt import SparseGPT
from tests.integration.test_sparsellm_method import (
    Recorder,
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

KINDS = ("solve", "alternate", "newton")


@dataclass(frozen=True)
class Spoiled:
    """SparseGPT for so many answers; all later ones are worse and have another mask, which shows where it is not taken back."""

    good: int
    calls: list[int] = field(default_factory=list)

    needs: ClassVar[type[NoInputs]] = Gram

    def solve(self, problem: LayerProblem, pattern: Pattern) -> Tensor:
        self.calls.append(1)
        weight = SparseGPT().solve(problem, pattern)
        return weight if len(self.calls) <= self.good else problem.weight * (weight != 0).flip(1)


def epochs_of(steps: list[Step], block: int = 0) -> list[EpochResult]:
    """The loop's results for one block."""
    return [step for step in steps if isinstance(step, EpochResult) and step.block.endswith(f".{block}")]


@pytest.mark.parametrize("singly", [False, True])
@pytest.mark.parametrize("settings", [{}, {"horizon": "feedforward"}, {"residual": False}], ids=str)
@two_families
def test_the_loop_only_goes_down(family: str, settings: dict[str, Any], singly: bool) -> None:
    """Kept steps' errors fall, a rejected one ends its loop, the last is the written part's own; the zeros are as asked.

    Epochs go by all tokens, rounds by the last sixteenth of them, 15 of 240, however they are batched.
    """
    method = SparseLLM(SparseGPT(), epochs=3, newton=2, **settings)
    model, steps = prune(family, method, singly)
    dense, pruned, blocks = signals(tiny(family)), signals(model), blocks_of(tiny(family))
    metrics = output_sensitivities(tiny(family), batches())
    for block in blocks:
        kinds = [[epoch for epoch in epochs_of(steps, block.index) if epoch.step == kind] for kind in KINDS]
        assert [epoch for some in kinds for epoch in some] == epochs_of(steps, block.index)
        for mine, first, most in zip(kinds, (1, 2, 1), (1, 2, 2), strict=True):
            assert [epoch.epoch for epoch in mine] == list(range(first, first + len(mine)))
            assert all(epoch.accepted for epoch in mine[:-1])
            assert 1 <= len(mine) <= most
            assert len(mine) == most or not mine[-1].accepted
        for group in ([*kinds[0], *kinds[1]], kinds[2]):
            errors = [epoch.feed_forward_error for epoch in group if epoch.accepted]
            assert all(later < earlier for earlier, later in pairwise(errors))
        last = [epoch for epoch in epochs_of(steps, block.index) if epoch.accepted][-1]
        target = aim(family, block, writers(block)[1], dense, pruned, method)
        lost = target - pruned[block.full_name(writers(block)[1])][1]
        lost = lost[-15:] if last.step == "newton" else lost
        metric = torch.eye(32) if method.horizon == "feedforward" else damped(metrics[block.index], 1e-3)
        powers = [float(torch.einsum("ti,ij,tj->", each, metric.double(), each)) / len(each) for each in (lost, target)]
        assert last.feed_forward_error == pytest.approx(powers[0] / powers[1], rel=1e-4)
    assert family == "opt" or any(isinstance(step, EpochResult) and step.step == "newton" and step.accepted for step in steps)
    for step in steps:
        if isinstance(step, LayerResult):
            weight = model.get_submodule(step.name).weight
            assert int((weight == 0).sum()) == step.zeros == parse_pattern("60%").removed(weight.numel())


@two_families
def test_rounds_do_not_see_what_is_held_back(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 240 tokens 225 give a round's step and the writer's refit, and the other 15 judge it."""
    seen: dict[str, list[int]] = {}

    def counting(name: str) -> None:
        plain = getattr(Part, name)

        def counted(self: Part, *arguments: Any) -> Any:
            seen.setdefault(name, []).append(sum(map(len, self.inputs)))
            return plain(self, *arguments)

        monkeypatch.setattr(Part, name, counted)

    for name in ("newton", "regression", "error"):
        counting(name)
    prune(family, SparseLLM(SparseGPT(), newton=1), singly=True, chosen=frozenset({0}))
    assert seen["newton"] == [225]
    assert seen["regression"][:2] == [240, 225]
    assert set(seen["regression"][1:]) == {225}
    assert set(seen["error"][1:]) == {15}


@two_families
def test_rounds_hold_the_mask(family: str) -> None:
    """Gauss-Newton moves readers, writer and their biases in the block, and nothing else; every zero stays, and none comes."""
    (start, _), (model, _) = (prune(family, SparseLLM(SparseGPT(), newton=n), chosen=frozenset({0})) for n in (0, 2))
    block = blocks_of(model)[0]
    part = block.architecture.feed_forward
    assert part is not None
    names = {
        name for name in state(model) if name.startswith(tuple(f"{block.name}.{x}." for x in (*part.readers, part.writer)))
    }
    assert changed(model, start) == names
    for name in names:
        assert torch.equal(state(model)[name] == 0, state(start)[name] == 0)


@pytest.mark.parametrize("newton", [0, 1])
@two_families
def test_a_worse_epoch_is_taken_back(family: str, newton: int) -> None:
    """Weights, biases, masks and results are those from before, bit for bit, and the rounds after it start from there."""
    layers: dict[str, Any] = {"chosen": frozenset({0}), "only": ["fc?"] if family == "opt" else ["mlp.*"]}
    count = 2 if family == "opt" else 3
    one, wanted = prune(family, SparseLLM(Spoiled(count), epochs=1, newton=newton), **layers)
    other, steps = prune(family, SparseLLM(Spoiled(count), epochs=4, newton=newton), **layers)
    assert not changed(one, other)
    kinds = [(epoch.step, epoch.epoch, epoch.accepted) for epoch in epochs_of(steps)]
    assert kinds == [("solve", 1, True), ("alternate", 2, False), *[("newton", 1, True)] * newton]
    assert epochs_of(steps)[2:] == epochs_of(wanted)[1:]
    results = [[replace(x, seconds=0) for x in each if isinstance(x, LayerResult)] for each in (steps, wanted)]
    assert results[0] == results[1]


@pytest.mark.parametrize(("factor", "accepted"), [(1024.0, False), (8.0, True)])
@two_families
def test_a_step_too_long_is_halved(family: str, factor: float, accepted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step far too long is shortened until the error falls; one that cannot help leaves every bit as it was."""
    plain = Part.newton

    def far_off(self: Part, *arguments: Any) -> Weights:
        steps = plain(self, *arguments)
        return {name: (factor * weight, None if bias is None else factor * bias) for name, (weight, bias) in steps.items()}

    start, _ = prune(family, SparseLLM(SparseGPT(), newton=0), chosen=frozenset({0}))
    monkeypatch.setattr(Part, "newton", far_off)
    model, steps = prune(family, SparseLLM(SparseGPT(), newton=3), chosen=frozenset({0}))
    rounds = [epoch for epoch in epochs_of(steps) if epoch.step == "newton"]
    assert rounds[0].accepted == accepted
    assert accepted or (len(rounds) == 1 and not changed(model, start))


@two_families
def test_epochs_start_from_what_is_there(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The alternation has the ratio beta / alpha, and each of its problems begins at the present answer; the first has none."""
    plain, ratios = Part.aims, list[float]()

    def aims(self: Part, weights: Weights, ratio: float) -> dict[str, Regression]:
        ratios.append(ratio)
        return plain(self, weights, ratio)

    monkeypatch.setattr(Part, "aims", aims)
    method = SparseLLM(Recorder(), alpha=0.4, beta=0.1, epochs=2, newton=0)
    model, _ = prune(family, method, chosen=frozenset({0}))
    assert ratios == [0.25]
    part = blocks_of(model)[0].architecture.feed_forward
    assert part is not None
    assert isinstance(method.solver, Recorder)
    count = len(part.readers) + 1
    first, second = method.solver.seen[:-count], method.solver.seen[-count:]
    assert all(problem.start is None for problem, _ in first)
    for (problem, _), (_, before) in zip(second, first[-count:], strict=True):
        assert problem.start is not None
        assert torch.equal(problem.start, before)


def test_results_name_their_epoch() -> None:
    """A layer's result names the epoch whose weights it holds."""
    _, steps = prune("llama", SparseLLM(SparseGPT(), horizon="feedforward", epochs=2, newton=0), chosen=frozenset({0}))
    assert epochs_of(steps)[-1].accepted
    epochs = {step.name.split(".")[-1]: step.epoch for step in steps if isinstance(step, LayerResult)}
    assert epochs["o_proj"] == 1
    assert epochs["gate_proj"] == epochs["up_proj"] == epochs["down_proj"] == 2
