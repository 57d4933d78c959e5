"""`sparsellm.testing`: ours keep every promise, and what breaks one is found by the check of that name."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsellm.errors import InvalidSetting
from sparsellm.methods.algorithm1 import Algorithm1
from sparsellm.methods.layerwise import LayerWise
from sparsellm.methods.sparsellm import SparseLLM, TrueSequential
from sparsellm.models.blocks import Block
from sparsellm.solvers import Magnitude, Wanda
from sparsellm.solvers.alps import ALPS
from sparsellm.solvers.fast_admm import FastADMM
from sparsellm.solvers.patterns import NM, Pattern, Unstructured
from sparsellm.solvers.sparsegpt import SparseGPT
from sparsellm.testing import (
    Check,
    FailedCheck,
    check_method,
    check_pattern,
    check_solver,
    checks_of,
    parametrize_with_checks,
)
from sparsellm.testing.method_checks import check_two_processes
from tests.wrong_solvers import WRONG, Right

SOLVERS = [Magnitude(), Wanda(), SparseGPT(), FastADMM(), ALPS(), ALPS.accurate(), Right()]
SPARSITIES = [Unstructured(share) for share in (0.0, 0.125, 0.7, 0.9)]
PATTERNS = [*SPARSITIES, NM(2, 4), NM(3, 4), NM(3, 8), NM(15, 16)]
METHODS = [LayerWise(SparseGPT()), TrueSequential(Wanda()), Algorithm1(epochs=2), SparseLLM(), LayerWise(Right())]


@parametrize_with_checks([*SOLVERS, *PATTERNS])
def test_solvers_and_patterns_keep_their_promises(subject: Any, check: Check) -> None:
    check(subject)


@pytest.mark.parametrize("method", METHODS, ids=lambda x: type(x).__name__)
def test_methods_keep_their_promises(method: Any) -> None:
    """Except for two processes, whose start takes longer than all else."""
    for check in (x for x in checks_of(method) if x.function is not check_two_processes):
        check(method)


@pytest.mark.parametrize("method", [pytest.param(x, marks=pytest.mark.long) for x in METHODS[:-1]] + METHODS[-1:])
def test_two_processes_prune_as_one(method: Any) -> None:
    Check(check_two_processes)(method)


@pytest.mark.parametrize(("kind", "name"), WRONG.items(), ids=lambda x: getattr(x, "__name__", None))
def test_a_wrong_solver_is_found(kind: type[Right], name: str) -> None:
    """By the check of what is wrong, the first that fails; its message names the class and the promise."""
    (promise,) = [check.promise for check in checks_of(kind()) if check.name == name]
    with pytest.raises(FailedCheck) as caught:
        check_solver(kind())
    assert str(caught.value).startswith(f"{name} of {kind.__name__}: {promise} ")


class PlainClass:
    needs = Wanda.needs
    solve = Wanda.solve


@dataclass(frozen=True)
class WithSetting(Right):
    setting: Any = None


@dataclass(frozen=True)
class ReadsMore(Right):
    needs = Magnitude.needs


@pytest.mark.parametrize(
    ("solver", "name", "word"),
    [
        (PlainClass(), "check_settings", "frozen"),
        (WithSetting(setting=torch.float32), "check_settings", "setting"),
        (WithSetting(setting=(1, 2)), "check_settings", "setting"),
        (ReadsMore(), "check_needs", "TokenCount"),
    ],
)
def test_a_wrong_class_of_solver_is_found(solver: Any, name: str, word: str) -> None:
    with pytest.raises(FailedCheck, match=rf"{name} .*{word}"):
        check_solver(solver)


@dataclass(frozen=True)
class Careless(LayerWise):
    """A method that does something else too.

    Attributes:
        fault: What it does.
        blocks: The number of blocks so far.
    """

    solver: Any = field(default_factory=Magnitude)
    fault: str = ""
    blocks: list[int] = field(default_factory=list, init=False, compare=False)

    def prune(self, block: Block, inputs: Any, plan: Any) -> Iterator[Any]:
        results = list(super().prune(block, inputs, plan))
        self.blocks.append(1)
        name = results[0].name.removeprefix(f"{block.name}.")
        weight = block.layer(name).weight
        if self.fault == "unreported":
            results.pop()
        if self.fault == "other":
            block.write("self_attn.q_proj", 2 * block.layer("self_attn.q_proj").weight)
        if self.fault == "chance":
            block.write(name, weight * (1 + torch.rand(())))
        if self.fault == "memory":
            block.write(name, weight * (2 if len(self.blocks) % 2 else 3))
        if self.fault == "processes":
            block.write(name, weight * (1 + int(os.environ.get("RANK", "7"))))
        yield from results


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("unreported", "check_planned_layers"),
        ("other", "check_other_layers"),
        ("chance", "check_same_each_run"),
        ("memory", "check_resumed_run"),
    ],
)
def test_a_wrong_method_is_found(fault: str, name: str) -> None:
    with pytest.raises(FailedCheck, match=name):
        check_method(Careless(fault=fault))


@dataclass(frozen=True)
class Halves(Pattern):
    """Half of each row, the first or the last weights.

    Attributes:
        fault: What it does wrong.
    """

    fault: str = ""

    @classmethod
    def parse(cls, text: str) -> Pattern | None:
        return cls(text.removeprefix("halves")) if text.startswith("halves") else None

    def __str__(self) -> str:
        return "halves" if self.fault == "text" else f"halves{self.fault}"

    @property
    def sparsity(self) -> float:
        return 0.75 if self.fault == "sparsity" else 0.5

    @property
    def column_span(self) -> int | None:
        return 2 if self.fault == "span" else None

    def check(self, shape: tuple[int, int]) -> None:
        if shape[1] % 2:
            raise InvalidSetting("odd")

    def count_removed(self, shape: Sequence[int]) -> int:
        return math.prod(shape) // (4 if self.fault == "count" else 2)

    def holds(self, weight: Tensor) -> bool:
        return self.fault == "holds" or bool(((weight == 0).sum(1) >= weight.shape[1] // 2).all())

    def keep(self, score: Tensor, *, per_row: bool = False) -> Tensor:
        if self.fault == "scores":
            score.mul_(2)
        least = score.abs() if self.fault == "negative" else score
        rank = least.argsort(dim=1, stable=True).argsort(dim=1)
        if self.fault == "rows" and per_row:
            return (torch.arange(score.numel()) >= score.numel() // 2).view(score.shape)
        return rank >= score.shape[1] // 2


def test_a_right_pattern_is_found_right() -> None:
    check_pattern(Halves())


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("text", "check_written_form"),
        ("count", "check_removed_count"),
        ("sparsity", "check_removed_count"),
        ("holds", "check_holds"),
        ("scores", "check_unchanged_scores"),
        ("negative", "check_pruned_masks"),
        ("rows", "check_rows"),
        ("span", "check_column_span"),
    ],
)
def test_a_wrong_pattern_is_found(fault: str, name: str) -> None:
    with pytest.raises(FailedCheck, match=name):
        check_pattern(Halves(fault))


def test_checks_leave_random_generators_and_threads_alone() -> None:
    states = torch.get_rng_state(), torch.get_num_threads()
    check_solver(Magnitude())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert torch.get_num_threads() == states[1]


@pytest.mark.parametrize("subject", [3, Right, object()])
def test_other_objects_are_refused(subject: object) -> None:
    with pytest.raises(InvalidSetting):
        checks_of(subject)
