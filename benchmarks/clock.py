"""Times the phases of a run and counts their operations, for `python benchmarks/speed.py phases` and `benchmarks/gpu.py`."""

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
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import sparsellm

LIBRARIES = ("._native",)
"""Ends of the names of compiled libraries, which Python cannot import."""

MOMENTS = (
    "solvers.statistics:Gram.update",
    "solvers.statistics:CrossMoment.update",
    "solvers.statistics:InputRMS.update",
    "solvers.regression:TargetRegression.update",
    "solvers.regression:PairedStatistics.update",
)
"""Statistics of layer inputs."""

PHASES: dict[str, tuple[str, ...]] = {
    "forward": ("models.blocks:Block.__call__", "activations.output_cache:OutputCache.mark_final"),
    "moments": MOMENTS,
    "factorization": (
        "solvers.linalg:cholesky_",
        "solvers.linalg:upper_factor_",
        "solvers.linalg:invert_triangular_",
        "solvers.admm:Eigensystem.of",
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
    "gate": ("methods.gate_update:solve_gate",),
    "Gauss-Newton": (
        "methods.gauss_newton:_gradient",
        "methods.gauss_newton:_curvature_product",
    ),
    "output projection's statistics": (
        "methods.feedforward_problem:FeedForwardProblem.regression",
        "methods.feedforward_problem:FeedForwardProblem.curvatures",
    ),
    "sensitivities of the layers": ("activations.sensitivity:layer_curvatures",),
    "refinement": ("training.block_training:refine_block",),
    "files": (
        "runtime.offload:DiskList.__getitem__",
        "runtime.offload:DiskList._write",
        "pipeline.journal:Journal.store_block",
        "checkpoints.block_loader:DiskWeights.read",
    ),
}
"""The functions of each phase. A call from one phase into a function of another counts for the other."""


class Phases(TorchDispatchMode):
    """The time of each phase and, as a context manager with `count`, the work of each.

    The time that counting itself takes is left out.

    Args:
        count: Whether to count operations.
        device: The device to wait for at every change of the phase.
        rates: Operations per second of products by dtype, and bytes per second under `PASS`; needed for `least`.
        overhead: Seconds that the dispatch of an operation adds; measured by default.

    Attributes:
        seconds: By phase, its time.
        products: By phase, the time of matrix products.
        operations: By phase, the floating-point operations of matrix products.
        bytes: By phase, the bytes of all inputs and outputs.
        least: By phase, the time that its operations take at `rates`.
    """

    def __init__(
        self,
        count: bool = False,
        *,
        device: torch.device | str = "cpu",
        rates: Mapping[Any, float] | None = None,
        overhead: float | None = None,
    ) -> None:
        super().__init__()
        self.device = torch.device(device)
        self._count, self._rates = count, rates
        self._overhead = dispatch_overhead() if count and overhead is None else overhead or 0.0
        self.seconds, self.products, self.operations, self.bytes, self.least = (
            defaultdict[str, float](float) for _ in range(5)
        )
        self._stack, self._since = ["other"], now(self.device)

    def enter(self, phase: str) -> None:
        """Begin a phase within the present one."""
        self.settle()
        self._stack.append(phase)

    def leave(self) -> None:
        """End the present phase."""
        self.settle()
        self._stack.pop()

    def wrap(self, function: Callable[..., Any], phase: str) -> Callable[..., Any]:
        """The function as a phase."""

        @wraps(function)
        def wrapped(*arguments: Any, **keywords: Any) -> Any:
            self.enter(phase)
            try:
                return function(*arguments, **keywords)
            finally:
                if self._rates and function.__name__ == "prune_columns":  # a kernel is not dispatched: read and write once
                    self.least[phase] += 2 * arguments[0].nbytes / self._rates[PASS]
                self.leave()

        return wrapped

    def stage(self, name: str) -> None:
        """Begin a stage of a run, to which all time outside the phases belongs."""
        self.settle()
        self._stack[0] = name if name != "pruning" else "other"

    def restart(self) -> None:
        """Discard the times so far."""
        self.settle()
        self.seconds.clear()

    def settle(self) -> None:
        """Add the time since the last change to the present phase."""
        moment = now(self.device)
        self.seconds[self._stack[-1]] += moment - self._since
        self._since = moment

    def __torch_dispatch__(self, function: Any, types: Any, arguments: tuple = (), keywords: Mapping | None = None) -> Any:
        keywords = keywords or {}
        if not self._count:
            return function(*arguments, **keywords)
        started = time.perf_counter()
        result = function(*arguments, **keywords)
        spent, phase = time.perf_counter() - started, self._stack[-1]
        inputs, outputs = tensors_in((arguments, keywords)), tensors_in(result)
        kind, amount = work_of(function.overloadpacket.__name__, inputs, outputs)
        moved = sum(tensor.numel() * tensor.element_size() for tensor in (*inputs, *outputs))
        self.bytes[phase] += moved
        if kind == PRODUCT:
            self.products[phase] += spent
            self.operations[phase] += amount
        if self._rates and amount:
            rate = self._rates.get(inputs[0].dtype if inputs else torch.float32, self._rates[torch.float32])
            self.least[phase] += max(0.0 if kind == PASS else amount / rate, moved / self._rates[PASS])
        self._since += time.perf_counter() - started - spent + self._overhead
        return result


def now(device: torch.device) -> float:
    """The time at which the device has nothing left to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def best(call: Callable[[], object], device: torch.device, times: int = 5) -> float:
    """Seconds of a call, the shortest of several after a first one that is not timed."""
    call()
    seconds = []
    for _ in range(times):
        started = now(device)
        call()
        seconds.append(now(device) - started)
    return min(seconds)


def dispatch_overhead(operations: int = 2000) -> float:
    """Seconds that the dispatch by `Phases` adds to an operation: the shortest of several measurements without work."""
    number, cpu = torch.zeros(1), torch.device("cpu")

    def view_often() -> None:
        for _ in range(operations):
            number.view(1)

    plain = best(view_often, cpu)
    phases = Phases(count=True, overhead=0.0)
    counted = []
    with phases:
        for _ in range(5):
            phases.restart()
            view_often()
            phases.settle()
            counted.append(phases.seconds["other"])
    return max(0.0, min(counted) - plain) / operations


@contextmanager
def instrumented(
    wrap: Callable[[Callable[..., Any], str], Callable[..., Any]], phases: Mapping[str, Sequence[str]]
) -> Iterator[None]:
    """Within the context, replace every function of the phases, wherever it was imported.

    Args:
        wrap: Makes the replacement from the function and the name of the phase.
        phases: By phase, the functions as "module:name".
    """
    modules = [
        importlib.import_module(module.name)
        for module in pkgutil.walk_packages(sparsellm.__path__, "sparsellm.")
        if module.name != "sparsellm.__main__" and not module.name.endswith(LIBRARIES)
    ]
    originals: list[tuple[Any, str, Any]] = []
    try:
        for phase, places in phases.items():
            for place in places:
                module, path = place.split(":")
                owner: Any = importlib.import_module(f"sparsellm.{module}")
                *outer, name = path.split(".")
                for part in outer:
                    owner = getattr(owner, part)
                original = owner.__dict__[name]
                is_method = isinstance(original, classmethod)
                wrapped = wrap(original.__func__ if is_method else original, phase)
                for holder in [owner] if outer else [x for x in modules if x.__dict__.get(name) is original]:
                    originals.append((holder, name, original))
                    setattr(holder, name, classmethod(wrapped) if is_method else wrapped)
        yield
    finally:
        for holder, name, original in reversed(originals):
            setattr(holder, name, original)


PRODUCT, FACTOR, SPECTRUM, PASS = "products", "factorizations", "eigenvectors", "passes"
"""Kinds of work. The first three are counted in floating-point operations, passes over memory in bytes."""

EIGEN = 9
"""Operations of an eigendecomposition of a symmetric (n, n) matrix, as a multiple of n³, from textbooks."""

SUMS_OVER: dict[str, Callable[[list[Tensor]], int]] = {
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm"), lambda inputs: inputs[-1].shape[-2]),
    **dict.fromkeys(("mv", "addmv", "dot"), lambda inputs: inputs[-1].shape[0]),
    "_linear_pointwise": lambda inputs: inputs[0].shape[-1],  # of oneDNN
    "addr": lambda _: 1,
}
"""By product, a function of its inputs that gives the number of terms of each output."""

VIEWS = frozenset(
    ("detach", "view", "_unsafe_view", "alias", "t", "transpose", "permute", "expand", "slice", "select", "split", "as_strided")
) | frozenset(("unsqueeze", "squeeze", "diagonal", "chunk", "unbind", "empty", "empty_like", "empty_strided"))
"""Operations that read and write no memory."""


def work_of(name: str, inputs: list[Tensor], outputs: list[Tensor]) -> tuple[str, float]:
    """The kind of an operation, and its amount in the unit of the kind."""
    name = name.rstrip("_")
    kind, amount = PASS, 0.0
    if name in SUMS_OVER:
        kind, amount = PRODUCT, 2.0 * outputs[0].numel() * SUMS_OVER[name](inputs)
    elif "scaled_dot_product" in name:
        scores = inputs[0].numel() // inputs[0].shape[-1] * inputs[1].shape[-2]
        kind, amount = PRODUCT, (10.0 if "backward" in name else 4.0) * scores * inputs[0].shape[-1]
    elif name == "linalg_cholesky_ex":
        kind, amount = FACTOR, inputs[0].numel() * inputs[0].shape[-1] / 3
    elif name in ("linalg_solve_triangular", "cholesky_solve"):
        side = min(tensor.shape[-1] for tensor in inputs if tensor.shape[-1] == tensor.shape[-2])
        kind, amount = FACTOR, (2.0 if name == "cholesky_solve" else 1.0) * outputs[0].numel() * side
    elif name == "_linalg_eigh":
        kind, amount = SPECTRUM, EIGEN * float(inputs[0].shape[-1]) ** 3
    elif name not in VIEWS:
        amount = float(sum(tensor.numel() * tensor.element_size() for tensor in (*inputs, *outputs)))
    return kind, amount


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists and dictionaries."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
