"""Solvers: each finds the pruned weight of one `LayerProblem`. One file per family."""

from __future__ import annotations

from typing import ClassVar, Protocol, runtime_checkable

from torch import Tensor

from sparsellm.solvers.patterns import Pattern
from sparsellm.solvers.problem import LayerProblem
from sparsellm.solvers.statistics import TokenCount


@runtime_checkable
class LayerSolver(Protocol):
    """Interface of a solver: a frozen dataclass of plain numbers with these two members.

    If a solver has a field `damping` and a factorisation fails, the driver retries with larger values and reports the one used.

    Attributes:
        needs: The class of input statistics that `solve` reads; the driver accumulates exactly this class.
    """

    needs: ClassVar[type[TokenCount]]

    def solve(self, problem: LayerProblem, pattern: Pattern) -> Tensor:
        """Compute the pruned weight without modifying `problem`.

        Returns:
            The weight, (out, in), zero wherever `pattern` removes.

        Raises:
            SingularGram: If a factorisation fails.
        """
        ...


@runtime_checkable
class NonBlockingSolver(LayerSolver, Protocol):
    """A solver that can also run without a device synchronisation."""

    def solve_async(self, problem: LayerProblem, pattern: Pattern) -> tuple[Tensor, Tensor]:
        """Like `solve`, but return success as a tensor instead of raising `SingularGram`.

        Returns:
            The weight, (out, in), and a bool tensor, (), True if every factorisation succeeded.
        """
        ...
