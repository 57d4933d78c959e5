"""A solver: one matrix, its inputs and a pattern in, a pruned matrix out."""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

import sparsellm


@dataclass(frozen=True)
class RIA:
    """Relative importance and activations (Zhang et al., ICLR 2024), without channel permutation.

    Attributes:
        power: Exponent of the norms of the inputs.
    """

    power: float = 0.5

    needs: ClassVar[type[sparsellm.TokenCount]] = sparsellm.InputRMS

    def solve(self, problem: sparsellm.LayerProblem, pattern: sparsellm.Pattern) -> Tensor:
        """Remove the weights of least |W| / row sum + |W| / column sum, times the norms of their inputs."""
        size = problem.weight.abs()
        smallest = size.new_tensor(1e-30)  # a row or column of zeros has no sum to divide by
        importance = size / size.sum(0).maximum(smallest) + size / size.sum(1, keepdim=True).maximum(smallest)
        return problem.weight * problem.keep(pattern, importance * problem.rms**self.power)
