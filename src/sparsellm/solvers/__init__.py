"""Solvers: each finds the pruned weight of one `LayerProblem`. Those that only score share a file."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparsellm.solvers.problem import LayerSolver as LayerSolver
    from sparsellm.solvers.problem import NonBlockingSolver as NonBlockingSolver
    from sparsellm.solvers.scores import Magnitude as Magnitude
    from sparsellm.solvers.scores import Wanda as Wanda

__all__ = ["LayerSolver", "Magnitude", "NonBlockingSolver", "Wanda"]


def __getattr__(name: str) -> Any:
    """Import a solver on first access, so that `solvers.patterns` can be imported without torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = "problem" if name.endswith("Solver") else "scores"
    return getattr(import_module(f"sparsellm.solvers.{module}"), name)
