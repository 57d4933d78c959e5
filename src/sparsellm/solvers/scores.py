"""The interface of solvers, and the two that only select weights and keep the values of those with the largest scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

from torch import Tensor

from sparsellm.solvers.patterns import Pattern
from sparsellm.solvers.problem import LayerProblem
from sparsellm.solvers.statistics import InputRMS, TokenCount


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
            The weight, (out, in), zero where `pattern` removes and in `problem.pruned_mask`; masks of `problem.keep` do both.

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


@dataclass(frozen=True)
class Magnitude:
    r"""Keep the layer's weights with the largest $|W_{ij}|$, the papers' baseline. Needs no calibration data.

    With a curvature, the largest $\sqrt{S_{ii}} |W_{ij}|$.
    """

    needs: ClassVar[type[TokenCount]] = TokenCount

    def solve(self, problem: LayerProblem, pattern: Pattern) -> Tensor:
        score = problem.weight.abs()
        return problem.weight * problem.keep(pattern, score if problem.row_scale is None else score * problem.row_scale)


@dataclass(frozen=True)
class Wanda:
    r"""Keep the weights with the largest $|W_{ij}| \, \lVert x_j \rVert$ in each row.

    Follows Sun et al., A simple and effective pruning approach for large language models (ICLR 2024), eq. 1.
    A curvature has no effect, because scores are compared within a row only.
    """

    needs: ClassVar[type[TokenCount]] = InputRMS

    def solve(self, problem: LayerProblem, pattern: Pattern) -> Tensor:
        score = problem.weight.abs() * problem.rms
        return problem.weight * problem.keep(pattern, score, per_row=True)
