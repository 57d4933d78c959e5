"""The settings of the default method."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from sparsellm.errors import InvalidSetting
from sparsellm.methods.part import SAMPLED
from sparsellm.solvers import LayerSolver
from sparsellm.solvers.alps import ALPS

Targets = Literal["teacher", "own"]
Curvature = Literal["none", "diagonal", "kronecker"]
Horizon = Literal["feedforward", "model"]
Couple = Literal["none", "feedforward"]


@dataclass(frozen=True)
class Settings:
    """The settings of `sparsellm.methods.sparsellm.SparseLLM`, which says what they mean."""

    solver: LayerSolver = field(default_factory=ALPS.thorough)
    targets: Targets = "teacher"
    residual: bool = True
    epochs: int = 1
    alpha: float = 0.1
    beta: float = 0.1
    curvature: Curvature = "kronecker"
    horizon: Horizon = "model"
    newton: int = 3
    sampled: int = SAMPLED
    couple: Couple = "feedforward"
    ridge: float = 1e-3
    keep_zeros: bool = False

    def __post_init__(self) -> None:
        if self.epochs < 1 or not self.alpha > 0 or not self.beta > 0 or not self.ridge >= 0 or self.newton < 0:
            raise InvalidSetting(
                "SparseLLM needs epochs >= 1, alpha > 0, beta > 0, ridge >= 0 and newton >= 0, "
                f"got {self.epochs}, {self.alpha}, {self.beta}, {self.ridge} and {self.newton}."
            )
