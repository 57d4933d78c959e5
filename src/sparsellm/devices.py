"""What differs between devices: where work is queued, numbers are read seldom, and together."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor


def queued(device: torch.device) -> bool:
    """Whether work on a device is queued: a number read from it makes the processor wait for all that was asked before."""
    return device.type != "cpu"


def widest(device: torch.device) -> torch.dtype:
    """The most precise floating dtype of a device: float64, but for Apple's GPUs."""
    return torch.float32 if device.type == "mps" else torch.float64


def precise(numbers: Tensor) -> Tensor:
    """The numbers in float64: where they are, or on the processor where their device has no float64."""
    return numbers.to("cpu" if widest(numbers.device) is torch.float32 else numbers.device, torch.float64)


def mixed_products(device: torch.device) -> bool:
    """Whether a device multiplies 16-bit matrices and writes what it added up in float32: NVIDIA's GPUs."""
    return device.type == "cuda" and torch.version.hip is None


def read(numbers: Sequence[Tensor]) -> list[float]:
    """The values of tensors of one number each, on one device, with one wait for it."""
    if not numbers:
        return []
    wide = widest(numbers[0].device)
    if wide is torch.float32:  # in which large counts are not exact
        return [float(number) for number in numbers]
    values: list[float] = torch.stack([number.to(wide) for number in numbers]).cpu().tolist()
    return values


class Clock:
    """Seconds between marks, of the device's own work where it has events; nothing waits for them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[torch.cuda.Event | float] = []
        self.mark()

    def mark(self) -> None:
        """What was asked of the device so far belongs to the mark's left."""
        if self._device.type != "cuda":
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._marks.append(event)

    def seconds(self) -> list[float]:
        """From each mark to the next. Only once a number was read that was asked for after the last."""
        return [
            1e-3 * start.elapsed_time(end) if isinstance(start, torch.cuda.Event) else end - start  # type: ignore[arg-type,operator]
            for start, end in zip(self._marks, self._marks[1:], strict=False)
        ]
