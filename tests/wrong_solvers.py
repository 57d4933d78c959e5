"""Solvers that break one promise each, for the tests of what finds them."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

import sparsellm


@dataclass(frozen=True)
class Right:
    """Wanda with the inputs' size to a power."""

    power: float = 0.5
    needs: ClassVar[type[sparsellm.TokenCount]] = sparsellm.InputRMS

    def mask(self, problem: sparsellm.LayerProblem, pattern: sparsellm.Pattern) -> Tensor:
        return problem.keep(pattern, problem.weight.abs() * problem.rms**self.power)

    def solve(self, problem: sparsellm.LayerProblem, pattern: sparsellm.Pattern) -> Tensor:
        return problem.weight * self.mask(problem, pattern)


class RemovesNothing(Right):
    def solve(self, problem: sparsellm.LayerProblem, pattern: sparsellm.Pattern) -> Tensor:
        return problem.weight.clone()


class RemovesTooMuch(Right):
    def solve(self, problem: sparsellm.LayerProblem, pattern: sparsellm.Pattern) -> Tensor:
        return super().solve(problem, pattern) * self.mask(problem, sparsellm.Unstructured(0.95))


class BreaksGroups(Right):
    """It removes as many weights as N:M, anywhere."""

    def mask(self, problem: sparsellm.LayerProblem, pattern: sparsellm.Pattern) -> Tensor:
        return super().mask(problem, sparsellm.Unstructured(pattern.sparsity))


class ChangesProblem(Right):
    def solve(self, problem: sparsellm.LayerProblem, pattern: sparsellm.Pattern) -> Tensor:
        return problem.weight.mul_(self.mask(problem, pattern))


class WrongShape(Right):
    def solve(self, problem: sparsellm.LayerProblem, pattern: sparsellm.Pattern) -> Tensor:
        return super().solve(problem, pattern).T


class WrongDtype(Right):
    def solve(self, problem: sparsellm.LayerProblem, pattern: sparsellm.Pattern) -> Tensor:
        return super().solve(problem, pattern).double()


class NotFinite(Right):
    """It divides by the inputs' size, which may be zero."""

    def solve(self, problem: sparsellm.LayerProblem, pattern: sparsellm.Pattern) -> Tensor:
        return super().solve(problem, pattern) * problem.rms / problem.rms


class RefillsZeros(Right):
    """It knows nothing of the zeros that stay, and moves all weights."""

    def solve(self, problem: sparsellm.LayerProblem, pattern: sparsellm.Pattern) -> Tensor:
        return (problem.weight + 0.01) * pattern.keep(problem.weight.abs())


@dataclass(frozen=True)
class RemembersLayers(Right):
    """Every second layer is pruned by magnitude."""

    solved: list[int] = field(default_factory=list, init=False, compare=False, repr=False)

    def solve(self, problem: sparsellm.LayerProblem, pattern: sparsellm.Pattern) -> Tensor:
        self.solved.append(1)
        return problem.weight * problem.keep(pattern, problem.weight.abs() * problem.rms ** (len(self.solved) % 2))


class Random(Right):
    def mask(self, problem: sparsellm.LayerProblem, pattern: sparsellm.Pattern) -> Tensor:
        return problem.keep(pattern, problem.weight.abs() + torch.rand_like(problem.weight))


class AsksForProcesses(Right):
    def solve(self, problem: sparsellm.LayerProblem, pattern: sparsellm.Pattern) -> Tensor:
        return super().solve(problem, pattern) * (1 - 0.01 * int(os.environ.get("WORLD_SIZE", "0")))


class FillsDeadInputs(Right):
    """It scales kept weights by how much larger an input is than the smallest one, which may be zero."""

    def solve(self, problem: sparsellm.LayerProblem, pattern: sparsellm.Pattern) -> Tensor:
        dead = (problem.rms == 0).expand_as(problem.weight)
        return super().solve(problem, pattern).masked_fill(dead & self.mask(problem, pattern), 7.0)


WRONG: dict[type[Right], str] = {
    RemovesNothing: "check_count",
    RemovesTooMuch: "check_count",
    BreaksGroups: "check_groups",
    ChangesProblem: "check_unchanged_problem",
    WrongShape: "check_shape",
    WrongDtype: "check_dtype",
    NotFinite: "check_finite",
    RefillsZeros: "check_kept_zeros",
    RemembersLayers: "check_layer_order",
    Random: "check_determinism",
    AsksForProcesses: "check_processes",
    FillsDeadInputs: "check_dead_inputs",
}
"""The name of the check that finds each."""
