"""The settings of the default method."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from sparsellm.errors import InvalidSetting
from sparsellm.methods.feedforward_problem import SAMPLED
from sparsellm.solvers import LayerSolver
from sparsellm.solvers.alps import ALPS

Couple = Literal["none", "feedforward"]


@dataclass(frozen=True)
class Settings:
    """The settings of `sparsellm.methods.sparsellm.SparseLLM`, documented there."""

    solver: LayerSolver = field(default_factory=ALPS.accurate)
    gauss_newton_steps: int = 3
    sampled: int = SAMPLED
    scope: Couple = "feedforward"
    ridge: float = 1e-3
    keep_zeros: bool = False

    def __post_init__(self) -> None:
        if not self.ridge >= 0 or self.gauss_newton_steps < 0:
            raise InvalidSetting(
                f"SparseLLM needs ridge >= 0 and gauss_newton_steps >= 0, got {self.ridge} and {self.gauss_newton_steps}."
            )
