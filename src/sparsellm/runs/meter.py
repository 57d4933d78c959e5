"""What a computation takes: the bytes that its tensors hold at the peak, by device, and the operations that it does."""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from sparsellm.runtime import devices

PRODUCT, FACTOR, SPECTRUM, PASS = "products", "factorisations", "eigenvectors", "passes"
"""Kinds of work: matrix products, and triangular factors and solves, in floating-point operations; eigenvectors in theirs; and
everything else, which goes through memory once, in bytes."""

Work = dict[str, float]
"""How much was done of each kind of work."""


EIGEN = 9
"""Operations of eigenvalues and vectors of a symmetric (n, n) matrix, in n³: the textbooks' count."""

SUMS_OVER: dict[str, Callable[[list[Tensor]], int]] = {
    **dict.fromkeys(("mm", "addmm", "bmm", "baddbmm"), lambda inputs: inputs[-1].shape[-2]),
    **dict.fromkeys(("mv", "addmv", "dot"), lambda inputs: inputs[-1].shape[0]),
    "addr": lambda _: 1,
}
"""Products, and how many terms each of their numbers is a sum of."""

VIEWS = frozenset(
    ("detach", "view", "_unsafe_view", "alias", "t", "transpose", "permute", "expand", "slice", "select", "split", "as_strided")
) | frozenset(("unsqueeze", "squeeze", "diagonal", "chunk", "unbind", "empty", "empty_like", "empty_strided"))
"""Operations that move nothing."""


class Meter(TorchDispatchMode):
    """Within its context, counts what every tensor operation does and holds.

    Tensors count from the operation that first makes or reads them until nothing refers to them. Not seen: what a library takes
    for itself while it works, but for eigenvectors, whose workspace is as large as two of their matrices.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live: Counter[str] = Counter()
        self.peak: dict[str, int] = {}
        self.work: Work = {}
        self._known: dict[int, weakref.ref[Any]] = {}

    def restart(self) -> None:
        """Forget the peaks and the operations so far, not what is still held."""
        self.peak, self.work = dict(self.live), {}

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that are there already."""
        for tensor in tensors:
            self._hold(tensor)

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), keywords: Mapping[str, Any] | None = None
    ) -> Any:
        keywords = keywords or {}
        inputs = _tensors((arguments, keywords))
        self.hold(inputs)
        result = function(*arguments, **keywords)
        outputs = _tensors(result)
        self.hold(outputs)
        kind, amount = _work(function.overloadpacket.__name__, inputs, outputs)
        self.work[kind] = self.work.get(kind, 0.0) + amount
        if kind == SPECTRUM:
            device = inputs[0].device.type
            workspace = 2 * inputs[0].numel() * inputs[0].element_size()
            self.peak[device] = max(self.peak.get(device, 0), self.live[device] + workspace)
        return result

    def _hold(self, tensor: Tensor) -> None:
        """Count a tensor's memory, once for all that share it, until it is freed."""
        if tensor.device.type == "meta":
            return
        storage = tensor.untyped_storage()
        number, size, device = storage._cdata, storage.nbytes(), tensor.device.type
        if number in self._known:
            return

        def free(_: object) -> None:
            del self._known[number]
            self.live[device] -= size

        self._known[number] = weakref.ref(storage, free)
        self.live[device] += size
        self.peak[device] = max(self.peak.get(device, 0), self.live[device])


def rates(device: torch.device, seconds: float = 0.5) -> dict[str, float]:
    """What this machine does in a second of each kind of work, measured for about so many seconds each."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    wide, square, long = draw(1536, 1536), draw(768, 768), draw(2**24)
    definite = square @ square.T + 768 * torch.eye(768, device=device)
    trials: dict[str, tuple[Callable[[], object], float]] = {
        PRODUCT: (lambda: wide @ wide, 2 * 1536**3),
        FACTOR: (lambda: torch.linalg.cholesky_ex(definite), 768**3 / 3),
        SPECTRUM: (lambda: torch.linalg.eigh(definite), EIGEN * 768**3),
        PASS: (lambda: long * 2.0, 2 * 4 * 2**24),
    }
    return {kind: amount / _seconds(act, device, seconds) for kind, (act, amount) in trials.items()}


def _seconds(act: Callable[[], object], device: torch.device, limit: float) -> float:
    """How long one call takes, the best of several."""

    def once() -> float:
        started = time.perf_counter()
        act()
        devices.synchronize(device)
        return time.perf_counter() - started

    first = once()
    again = max(1, min(20, int(limit / max(first, 1e-6))))
    return min(once() for _ in range(again))


def _work(name: str, inputs: list[Tensor], outputs: list[Tensor]) -> tuple[str, float]:
    """The kind of an operation, and how much of it."""
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


def _tensors(value: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists and dictionaries."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = tuple(value.values())
    return [tensor for item in value for tensor in _tensors(item)] if isinstance(value, (tuple, list)) else []
