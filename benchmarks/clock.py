"""A clock for where a run's time goes, phase by phase, for `python benchmarks/speed.py phases`."""

from __future__ import annotations

import importlib
import pkgutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from operations import PRODUCT, tensors_in, work_of
from torch.utils._python_dispatch import TorchDispatchMode

import sparsellm

MOMENTS = (
    "solvers.statistics:Gram.update",
    "solvers.statistics:CrossMoment.update",
    "solvers.statistics:InputRMS.update",
    "solvers.regression:TargetRegression.update",
    "solvers.regression:PairedStatistics.update",
)
"""Sums over tokens."""

PHASES: dict[str, tuple[str, ...]] = {
    "forward": ("models.blocks:Block.__call__", "activations.output_cache:OutputCache.mark_final"),
    "moments": MOMENTS,
    "factorisation": (
        "solvers.linalg:cholesky",
        "solvers.linalg:upper_factor",
        "solvers.linalg:invert_triangular_",
        "solvers.admm:_shifted_by_eigenvectors",
    ),
    "regression": ("solvers.problem:LayerProblem.from_targets",),
    "column loop": ("solvers.sparsegpt:SparseGPT.solve",),
    "ADMM": ("solvers.alps:ALPS._search", "solvers.fast_admm:FastADMM._search"),
    "refit": ("solvers.linalg:conjugate_gradient_refit",),
    "errors": (
        "solvers.problem:LayerProblem.error",
        "solvers.regression:Regression.error",
        "methods.feedforward_problem:FeedForwardProblem.error",
    ),
    "auxiliary updates": (
        "methods.auxiliary_signals:AuxiliarySignals.refit",
        "methods.auxiliary_signals:AuxiliarySignals.error",
    ),
    "gate": ("models.gate_update:solve_gate",),
    "Gauss-Newton": ("methods.feedforward_problem:FeedForwardProblem.gauss_newton_step",),
    "writer's sums": (
        "methods.feedforward_problem:FeedForwardProblem.regression",
        "methods.feedforward_problem:FeedForwardProblem.curvatures",
    ),
    "layers' sensitivities": ("activations.sensitivity:layer_sensitivities",),
    "refinement": ("recovery.masked_training:refine_block",),
    "files": (
        "runtime.offload:DiskList.__getitem__",
        "runtime.offload:DiskList._write",
        "pruning.journal:Journal.keep",
        "checkpoints.block_loader:DiskWeights.read",
    ),
}
"""What each phase's time is spent in; what a phase calls that belongs to another counts there."""


class Phases(TorchDispatchMode):
    """Within its context, seconds by phase; with `operations` also what each does.

    Counting takes time of its own, which is left out: what it is told by the clock, and `cost`, seconds of each operation for
    being passed on at all.
    """

    def __init__(self, operations: bool, cost: float | None = None) -> None:
        super().__init__()
        self._cost = counting_cost() if operations and cost is None else cost or 0.0
        self.seconds: dict[str, float] = defaultdict(float)
        self.products: dict[str, float] = defaultdict(float)  # seconds in matrix products
        self.operations: dict[str, float] = defaultdict(float)
        self.bytes: dict[str, float] = defaultdict(float)
        self._stack, self._since, self._counts = ["other"], time.perf_counter(), operations

    def enter(self, name: str) -> None:
        """What comes belongs to this phase."""
        self._settle()
        self._stack.append(name)

    def leave(self) -> None:
        """What comes belongs to the phase before."""
        self._settle()
        self._stack.pop()

    def telling(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        """A function that says when it is entered and left."""

        @wraps(function)
        def told(*arguments: Any, **keywords: Any) -> Any:
            self.enter(phase)
            try:
                return function(*arguments, **keywords)
            finally:
                self.leave()

        return told

    def stage(self, name: str) -> None:
        """A run's stage begins: what is in no phase belongs to it."""
        self._settle()
        self._stack[0] = name if name != "pruning" else "other"

    def restart(self) -> None:
        """Forget the seconds so far."""
        self._settle()
        self.seconds.clear()

    def _settle(self) -> None:
        now = time.perf_counter()
        self.seconds[self._stack[-1]] += now - self._since
        self._since = now

    def __torch_dispatch__(self, function: Any, types: Any, arguments: tuple = (), keywords: Mapping | None = None) -> Any:
        keywords = keywords or {}
        if not self._counts:
            return function(*arguments, **keywords)
        started = time.perf_counter()
        result = function(*arguments, **keywords)
        spent, phase = time.perf_counter() - started, self._stack[-1]
        inputs, outputs = tensors_in((arguments, keywords)), tensors_in(result)
        kind, amount = work_of(function.overloadpacket.__name__, inputs, outputs)
        if kind == PRODUCT:
            self.products[phase] += spent
            self.operations[phase] += amount
        self.bytes[phase] += sum(tensor.numel() * tensor.element_size() for tensor in (*inputs, *outputs))
        self._since += time.perf_counter() - started - spent + self._cost
        return result


def counting_cost(operations: int = 2000) -> float:
    """Seconds by which an operation is longer for being passed on by `Phases`: of many that do nothing, the best try."""
    number = torch.zeros(1)

    def act() -> float:
        started = time.perf_counter()
        for _ in range(operations):
            number.view(1)
        return time.perf_counter() - started

    def counted() -> float:
        phases = Phases(operations=True, cost=0.0)
        with phases:
            phases.restart()
            act()
            phases._settle()
        return phases.seconds["other"]

    plain, passed = (min(some() for _ in range(5)) for some in (act, counted))
    return max(0.0, passed - plain) / operations


@contextmanager
def watched(
    telling: Callable[[Callable[..., Any], str], Callable[..., Any]], phases: Mapping[str, Sequence[str]]
) -> Iterator[None]:
    """Within the context every function of the phases, "module:name", is another one, wherever it was imported.

    telling: makes that one from the function and the phase's name.
    """
    modules = [
        importlib.import_module(found.name)
        for found in pkgutil.walk_packages(sparsellm.__path__, "sparsellm.")
        if found.name != "sparsellm.__main__"
    ]
    undo: list[tuple[Any, str, Any]] = []
    try:
        for phase, places in phases.items():
            for place in places:
                module, path = place.split(":")
                owner: Any = importlib.import_module(f"sparsellm.{module}")
                *outer, name = path.split(".")
                for part in outer:
                    owner = getattr(owner, part)
                plain = owner.__dict__[name]
                method = isinstance(plain, classmethod)
                told = telling(plain.__func__ if method else plain, phase)
                for each in [owner] if outer else [some for some in modules if some.__dict__.get(name) is plain]:
                    undo.append((each, name, plain))
                    setattr(each, name, classmethod(told) if method else told)
        yield
    finally:
        for each, name, plain in reversed(undo):
            setattr(each, name, plain)
