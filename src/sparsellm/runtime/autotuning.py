"""Measures which of two implementations is faster on this machine, and remembers it."""

from __future__ import annotations

import math
import platform
import re
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import count
from pathlib import Path
from typing import Protocol

import torch

SECONDS = 0.25
"""Time of a measurement, after its first rounds."""

ROUNDS = 4
"""Least number of rounds of a measurement, besides the first one; two, where a round is so slow that two of them take twice
`SECONDS`."""

STEADY = 1.1
"""Largest quotient of the shortest times in two halves of a measurement that is kept. It is about 1.02 on an idle machine, and
1.3 to 2 with as many other programs at work as there are processors."""

_known: dict[tuple[str, int, str], float] = {}
_adopted: dict[str, float] = {}
_unsteady: set[str] = set()


Computation = Callable[[], object]
"""A function that computes something and waits for the result."""


class Store(Protocol):
    """Where results are kept for other processes."""

    def locked(self) -> AbstractContextManager[None]:
        """Wait for another process that measures: two at a time would measure each other."""

    def read(self, machine: str) -> Mapping[str, float]:
        """Return the results of a machine by name."""

    def write(self, machine: str, speedups: Mapping[str, float]) -> None:
        """Add results of a machine."""


store: Store | None = None
"""The store in use; None to measure in each process."""


def speedup(name: str, make: Callable[[], tuple[Computation, Computation]], machine: str | None = None) -> float:
    """Measure how many times as fast a computation is as the usual one.

    The first call on a machine takes about a quarter of a second. Later ones, also of other processes, read the result from the
    store, so that one machine always decides alike. A result that was measured while other programs were at work holds for this
    process only.

    Args:
        name: Name of the comparison, for the cache and for messages.
        make: Returns the usual computation, and another one of the same or nearly the same.
        machine: Name of the device, if it is another one than the CPU.

    Returns:
        The shortest time of the usual computation by that of the other one.
    """
    if machine is None and (adopted := _adopted.get(name)) is not None:
        return adopted
    key = machine or processor(), torch.get_num_threads(), name
    if (value := _known.get(key)) is not None:
        return value
    where = _machine(*key[:2])
    with store.locked() if store else nullcontext():
        value = store.read(where).get(name) if store else None
        if value is None:
            with torch.no_grad(), torch.autocast("cpu", enabled=False), torch.device("cpu"):
                value, is_steady = measure_speedup(*make())
            if not is_steady:
                _unsteady.add(name)
            elif store:
                store.write(where, {name: value})
    _known[key] = value
    return value


def keep() -> None:
    """Store also what this process measured on the CPU while other programs were at work, so that it holds from now on."""
    if store:
        store.write(_machine(processor(), torch.get_num_threads()), known())
    _unsteady.clear()


def _machine(device: str, threads: int) -> str:
    """All that a speedup depends on, besides its name."""
    return f"{device}, torch {torch.__version__}, {threads} threads"


def adopt(speedups: Mapping[str, float]) -> None:
    """Take the results of another process, or of the run that is resumed, by name, in place of this machine's on the CPU.

    Those that were adopted before are forgotten.
    """
    _adopted.clear()
    _adopted.update(speedups)


def known() -> dict[str, float]:
    """Return the speedups on the CPU that this process has measured or read, by name."""
    here = processor(), torch.get_num_threads()
    return {name: value for (*key, name), value in _known.items() if tuple(key) == here}


def unsteady() -> list[str]:
    """Return the names of comparisons that this process measured while other programs were at work."""
    return sorted(_unsteady)


def forget() -> None:
    """Forget what this process knows, as a new process does."""
    _known.clear()
    _adopted.clear()
    _unsteady.clear()


def measure_speedup(usual: Computation, other: Computation) -> tuple[float, bool]:
    """Measure `speedup`, and whether other programs left the result alone.

    The computations take turns. The shortest times count, since other programs only ever add to them; if those of every second
    round are much longer than those of the rest, none may be free of other programs.
    """
    shortest = {(is_other, half): math.inf for is_other in (False, True) for half in (0, 1)}
    begin = 0.0
    for number in count():
        begin = time.perf_counter() if number == 1 else begin
        for is_other, function in ((False, usual), (True, other)):
            started = time.perf_counter()
            function()
            if number:  # the first one of a process is slow
                key = is_other, number % 2
                shortest[key] = min(shortest[key], time.perf_counter() - started)
        elapsed = time.perf_counter() - begin
        if elapsed > SECONDS and (number >= ROUNDS or (elapsed > 2 * SECONDS and number > 1)):
            break
    best = [min(shortest[is_other, 0], shortest[is_other, 1]) for is_other in (False, True)]
    worst = [max(shortest[is_other, 0], shortest[is_other, 1]) for is_other in (False, True)]
    return best[0] / best[1], all(longer <= STEADY * shorter for longer, shorter in zip(worst, best, strict=True))


@cache
def processor() -> str:
    """Name of the processor, with the instructions that torch uses."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        found = None
    name = found[1] if found else platform.processor() or platform.machine()
    return f"{name} ({torch.backends.cpu.get_cpu_capability()})"
