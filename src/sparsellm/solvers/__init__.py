"""Solvers: each answers a LayerProblem with a pruned weight. One file per family."""

from __future__ import annotations

from typing import ClassVar, Protocol, runtime_checkable

from torch import Tensor

from sparsellm.solvers.patterns import Pattern
from sparsellm.solvers.problem import LayerProblem
from sparsellm.solvers.statistics import TokenCount


@runtime_checkable
class LayerSolver(Protocol):
    """What it takes to be a solver: a frozen record of plain numbers with these two.

    needs: the class of moments that `solve` reads; the driver builds that very class.
    A field named `damping` is raised, and the value used recorded, where a factorisation fails at the value given.
    """

    needs: ClassVar[type[TokenCount]]

    def solve(self, problem: LayerProblem, pattern: Pattern) -> Tensor:
        """The pruned weight, (out, in), zero wherever `pattern` removes; the problem is not written to."""
        ...


@runtime_checkable
class NonBlockingSolver(LayerSolver, Protocol):
    """A solver that can also answer without a word from the device on how it went."""

    def solve_async(self, problem: LayerProblem, pattern: Pattern) -> tuple[Tensor, Tensor]:
        """As `solve`, with whether it succeeded, (), in place of SingularGram; nothing is waited for."""
        ...
