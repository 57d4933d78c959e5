"""The settings of the default method."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from sparsellm.errors import InvalidSetting
from sparsellm.methods.part import SAMPLED
from sparsellm.refinement import Descent
from sparsellm.solvers import LayerSolver
from sparsellm.solvers.alps import ALPS

Window = Literal["none", "feedforward", "block"]

NO_REFINEMENT = Descent(0, 3e-4)
"""No gradient steps over a block: after a Gauss-Newton round they gain next to nothing (docs/results.md). The rate is for those
who ask for steps: short ones, since what comes before is near its optimum."""


@dataclass(frozen=True)
class Settings:
    """The settings of `sparsellm.methods.sparsellm.SparseLLM`, which says what they mean."""

    solver: LayerSolver = field(default_factory=ALPS.thorough)
    newton: int = 3
    sampled: int = SAMPLED
    refine: Descent = NO_REFINEMENT
    couple: Window = "feedforward"
    ridge: float = 1e-3
    keep_zeros: bool = False

    def __post_init__(self) -> None:
        if not self.ridge >= 0 or self.newton < 0:
            raise InvalidSetting(f"SparseLLM needs ridge >= 0 and newton >= 0, got {self.ridge} and {self.newton}.")
