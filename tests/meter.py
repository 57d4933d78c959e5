"""The bytes that tensors hold, counted while code runs, and the memory of the process."""

from __future__ import annotations

import re
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Meter(TorchDispatchMode):
    """Within its context, counts the bytes that tensors hold, by device type.

    Tensors count from the operation that first makes or reads them until nothing refers to them.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live: Counter[str] = Counter()
        self.peak: Counter[str] = Counter()
        self._known: dict[int, weakref.ref[Any]] = {}

    def restart(self) -> None:
        """Forget the peaks so far, not what is still held."""
        self.peak = Counter(self.live)

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors that are there already."""
        for tensor in tensors:
            self._hold(tensor)

    def __torch_dispatch__(
        self, function: Any, types: Any, arguments: tuple[Any, ...] = (), keywords: Mapping[str, Any] | None = None
    ) -> Any:
        keywords = keywords or {}
        self.hold(tensors_in((arguments, keywords)))
        result = function(*arguments, **keywords)
        self.hold(tensors_in(result))
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
        self.peak[device] = max(self.peak[device], self.live[device])


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in nested tuples, lists and dictionaries."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def start_peak() -> int:
    """Let the peak of the process's memory, VmHWM, begin anew; return what is held, in bytes. Linux only."""
    Path("/proc/self/clear_refs").write_text("5")
    return status_of("VmRSS")


def status_of(name: str) -> int:
    """Return an entry of the process's status, in bytes."""
    match = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="utf-8"))
    assert match is not None
    return int(match[1]) * 1024
