"""The solvers that only select weights, and keep the values of those with the largest scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sparsellm.solvers.patterns import Pattern
from sparsellm.solvers.problem import LayerProblem, SolveMemory
from sparsellm.solvers.statistics import InputRMS, TokenCount


@dataclass(frozen=True)
class Magnitude:
    r"""Keep the layer's weights with the largest $|W_{ij}|$, the papers' baseline. Needs no calibration data.

    With a curvature, the largest $\sqrt{S_{ii}} |W_{ij}|$.
    """

    needs: ClassVar[type[TokenCount]] = TokenCount

    def solve(self, problem: LayerProblem, pattern: Pattern) -> Tensor:
        score = problem.weight.abs()
        return problem.weight * problem.keep(pattern, score if problem.row_scale is None else score * problem.row_scale)

    def solve_memory(self, curved: bool) -> SolveMemory:
        return SolveMemory(2.3, 0)


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

    def solve_memory(self, curved: bool) -> SolveMemory:
        return SolveMemory(4, 0)
