"""What differs between devices: queues, memory, precision, and torch's modules for them. Numbers are read seldom, and together.

No other file names such a module: torch.cuda has the same names as torch.xpu and as a backend registered from outside of torch.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def _module(device: torch.device) -> Any:
    """Torch's module for a device's type: torch.cuda for NVIDIA's and AMD's GPUs."""
    return torch.get_device_module(device)


def accelerator() -> torch.device | None:
    """This machine's kind of accelerator that has memory of its own; None where there is none."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return device if device is not None and has_own_memory(device) else None


def set_device(number: int) -> None:
    """Have this process use one of the machine's accelerators, where there are any. number: counted around them."""
    device = accelerator()
    if device is not None:
        _module(device).set_device(number % _module(device).device_count())


def has_own_memory(device: torch.device) -> bool:
    """Whether a device has memory of its own, and streams to copy to and from it; Apple's GPUs share the processor's."""
    return device.type not in ("cpu", "mps", "meta")


def free_bytes(device: torch.device) -> int:
    """Bytes that can still be had on a device with memory of its own."""
    free: int = _module(device).mem_get_info(device)[0]
    return free


def peak_bytes() -> int | None:
    """The most bytes that torch held at once on this process's accelerator; None where it used none."""
    device = accelerator()
    if device is None or not _module(device).is_initialized():
        return None
    peak: int = _module(device).max_memory_allocated()
    return peak


def empty_cache(device: torch.device) -> None:
    """Return to a device the memory that torch keeps for tensors to come."""
    if device.type != "cpu":
        _module(device).empty_cache()


def synchronize(device: torch.device) -> None:
    """Wait until all work that was asked of a device is done."""
    if queued(device):
        _module(device).synchronize(*([device] if has_own_memory(device) else []))  # torch.mps's takes none


def name_of(device: torch.device) -> str:
    """What a device calls itself, or the processor's architecture."""
    name: str = _module(device).get_device_name(device) if has_own_memory(device) else platform.machine()
    return name


def copy_stream(device: torch.device) -> torch.Stream:
    """A stream of a device for copies beside its other work."""
    stream: torch.Stream = _module(device).Stream(device)
    return stream


def work_stream(device: torch.device) -> torch.Stream:
    """The stream that a device works in at present."""
    stream: torch.Stream = _module(device).current_stream(device)
    return stream


def working_in(stream: torch.Stream) -> AbstractContextManager[None]:
    """Within the context, what is asked of a device goes into another stream."""
    context: AbstractContextManager[None] = _module(stream.device).stream(stream)
    return context


def selected(device: torch.device) -> AbstractContextManager[None]:
    """Within the context a device is the one that kernels are started on."""
    return _module(device).device(device) if has_own_memory(device) else nullcontext()


def is_nvidia(device: torch.device) -> bool:
    """Whether a device is one of NVIDIA's GPUs; torch gives AMD's the same name."""
    return device.type == "cuda" and torch.version.hip is None


def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of one of NVIDIA's GPUs."""
    found: tuple[int, int] = _module(device).get_device_capability(device)
    return found


def queued(device: torch.device) -> bool:
    """Whether work on a device is queued: a number read from it makes the processor wait for all that was asked before."""
    return device.type != "cpu"


def widest_float(device: torch.device) -> torch.dtype:
    """The most precise floating dtype of a device: float64, but for Apple's GPUs."""
    return torch.float32 if device.type == "mps" else torch.float64


def full_precision(numbers: Tensor) -> Tensor:
    """The numbers in float64: where they are, or on the processor where their device has no float64."""
    return numbers.to("cpu" if widest_float(numbers.device) is torch.float32 else numbers.device, torch.float64)


def mixed_products(device: torch.device) -> bool:
    """Whether a device multiplies 16-bit matrices and writes what it added up in float32: NVIDIA's GPUs."""
    return is_nvidia(device)


def to_python(numbers: Sequence[Tensor]) -> list[float]:
    """The values of tensors of one number each, on one device, with one wait for it."""
    if not numbers:
        return []
    wide = widest_float(numbers[0].device)
    if wide is torch.float32:  # in which large counts are not exact
        return [float(number) for number in numbers]
    values: list[float] = torch.stack([number.to(wide) for number in numbers]).cpu().tolist()
    return values


class Clock:
    """Seconds between marks, of the device's own work where it has events; nothing waits for them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []
        self.mark()

    def mark(self) -> None:
        """What was asked of the device so far belongs to the mark's left."""
        if not has_own_memory(self._device):
            self._marks.append(time.perf_counter())
            return
        event = _module(self._device).Event(enable_timing=True)
        event.record(work_stream(self._device))
        self._marks.append(event)

    def seconds(self) -> list[float]:
        """From each mark to the next. Only once a number was read that was asked for after the last."""
        return [
            end - start if isinstance(start, float) else 1e-3 * start.elapsed_time(end)
            for start, end in zip(self._marks, self._marks[1:], strict=False)
        ]
