"""Device-dependent behavior: streams, memory, precision and reading values back.

The only file that uses torch's device modules: torch.cuda, torch.xpu and out-of-tree backends have the same interface. Values
are read from a device rarely and in batches, because each read waits for it.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, get_device_module

from sparsellm.errors import InvalidSetting, SparseLLMError, first_line
from sparsellm.runtime.products import LEAST_BFLOAT16_SPEEDUP, bf16_solver_speedup, by_columns, matmul

T = TypeVar("T")

TRITON_CAPABILITY = (7, 0)
"""Lowest compute capability that Triton supports."""

CACHED_ENTRIES = 1 << 17
"""Number of float32 entries of which a few temporaries fit in a CPU's second-level cache."""


def accelerator() -> torch.device | None:
    """Return the accelerator type of this machine, if it has dedicated memory; otherwise None."""
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return device if device is not None and has_own_memory(device) else None


def resolve_device(text: str) -> torch.device:
    """Return the device of a name; "auto" is an NVIDIA or AMD GPU if there is one, otherwise the CPU.

    Raises:
        InvalidSetting: The name is not valid, or the device is not available.
    """
    if text == "auto":
        return accelerator() or torch.device("cpu")
    try:
        device = torch.device(text)
        torch.zeros(1, device=device).item()  # read back: the device "meta" has tensors, but no numbers
    except Exception as error:  # each backend of torch has its own errors where it is missing, such as ModuleNotFoundError
        raise InvalidSetting(f"`device` got {text!r}: {first_line(error)}. Write auto, cpu, cuda, cuda:1 or mps.") from None
    return device


def set_device(index: int) -> None:
    """Select the accelerator of an index, modulo their count, for this process; does nothing without an accelerator."""
    device = accelerator()
    if device is not None:
        module = get_device_module(device)
        module.set_device(index % module.device_count())


def has_own_memory(device: torch.device) -> bool:
    """Return whether a device has dedicated memory and copy streams; Apple GPUs share the CPU's memory."""
    return device.type not in ("cpu", "mps", "meta")


def free_bytes(device: torch.device) -> int:
    """Return the free bytes on a device with dedicated memory."""
    return int(get_device_module(device).mem_get_info(device)[0])


def bytes_in_use() -> tuple[int, int] | None:
    """Return the bytes that torch holds on this process's accelerator, and all its bytes; None if it has used none."""
    device = accelerator()
    module = None if device is None else get_device_module(device)
    return (int(module.memory_allocated()), int(module.mem_get_info()[1])) if module and module.is_initialized() else None


def empty_cache(device: torch.device) -> None:
    """Release the device memory that torch's allocator caches."""
    if device.type != "cpu":
        get_device_module(device).empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is an out-of-memory error: Python's, torch's, or one that only its message shows, on the CPU."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and ("can't allocate memory" in str(error) or "not enough memory" in str(error))
    )


def raise_unless_damaged(error: Exception) -> None:
    """Raise an error of reading a file, unless it may be a sign that the file is damaged.

    No such sign is an error of this package, many of which are OSErrors too, one of memory, and one of permission.
    """
    if isinstance(error, (SparseLLMError, PermissionError)) or is_out_of_memory(error):
        raise error


def synchronize(device: torch.device) -> None:
    """Wait until all work queued on a device is done."""
    if queued(device):
        get_device_module(device).synchronize(
            *([device] if has_own_memory(device) else [])
        )  # torch.mps.synchronize takes no device


def name_of(device: torch.device) -> str:
    """Return the device's name, or the CPU architecture."""
    return str(get_device_module(device).get_device_name(device)) if has_own_memory(device) else platform.machine()


def copy_stream(device: torch.device) -> torch.Stream:
    """Return a new stream for copies that run in parallel with other work on the device."""
    stream: torch.Stream = get_device_module(device).Stream(device)
    return stream


def work_stream(device: torch.device) -> torch.Stream:
    """Return the current stream of a device."""
    stream: torch.Stream = get_device_module(device).current_stream(device)
    return stream


def working_in(stream: torch.Stream) -> AbstractContextManager[None]:
    """Context in which work is queued on `stream`."""
    context: AbstractContextManager[None] = get_device_module(stream.device).stream(stream)
    return context


def selected(device: torch.device) -> AbstractContextManager[None]:
    """Context in which kernels are launched on `device`."""
    return get_device_module(device).device(device) if has_own_memory(device) else nullcontext()


def is_nvidia(device: torch.device) -> bool:
    """Return whether a device is an NVIDIA GPU; torch calls AMD GPUs "cuda" too."""
    return device.type == "cuda" and torch.version.hip is None


def runs_triton(device: torch.device, passes: Callable[[torch.device], bool]) -> bool:
    """Whether a device can run Triton's kernels, and a test of some passes there. They need a C compiler, too."""
    return is_nvidia(device) and capability(device) >= TRITON_CAPABILITY and passes(device)


def capability(device: torch.device) -> tuple[int, int]:
    """Return the compute capability (major, minor) of an NVIDIA GPU."""
    version: tuple[int, int] = get_device_module(device).get_device_capability(device)
    return version


def multiplies_bfloat16(device: torch.device) -> bool:
    """Return whether a device multiplies bfloat16 matrices faster than float32 ones: measured on a CPU, known of GPUs."""
    if device.type == "cpu":
        return bf16_solver_speedup() >= LEAST_BFLOAT16_SPEEDUP
    return is_nvidia(device) and capability(device) >= (8, 0)


def queued(device: torch.device) -> bool:
    """Return whether a device runs asynchronously, so that reading a value waits for all work queued before."""
    return device.type != "cpu"


def widest_float(device: torch.device) -> torch.dtype:
    """Return the widest floating dtype of a device: float64, or float32 on Apple GPUs."""
    return torch.float32 if device.type == "mps" else torch.float64


def full_precision(numbers: Tensor) -> Tensor:
    """Convert a tensor to float64, on its device or, if that has no float64, on the CPU."""
    return numbers.to("cpu" if widest_float(numbers.device) is torch.float32 else numbers.device, torch.float64)


def as_factor(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast to `dtype` for `product`, in the layout that is fastest for it.

    16-bit numbers, whose products are exact in float32, stay where the device takes them.
    """
    exact = rows.dtype in (torch.bfloat16, torch.float16) and dtype == torch.float32 and is_nvidia(rows.device)
    return rows if exact else by_columns(rows.to(dtype))


def product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """Return leftᵀ right of two factors, accumulated in `dtype`."""
    return matmul(left.T, right) if left.dtype == dtype else torch.mm(left.T, right, out_dtype=dtype)


def row_chunks(*tensors: Tensor, entries: int | None = None) -> Iterator[tuple[Tensor, ...]]:
    """Split matrices of one shape into views of the same rows: a few rows on a CPU, so that temporaries stay in its cache.

    Args:
        entries: Largest number of entries of a view, if it has more than one row. Default: `CACHED_ENTRIES`.
    """
    rows, columns = tensors[0].shape
    size = max(rows if queued(tensors[0].device) else (entries or CACHED_ENTRIES) // max(columns, 1), 1)
    return zip(*(tensor.split(size) for tensor in tensors), strict=True)


def map_threads(function: Callable[[T], Any], parts: Sequence[T]) -> Iterable[Any]:
    """Call a function that releases Python's lock on each part, all at the same time; returns the results in order."""
    return [function(parts[0])] if len(parts) == 1 else list(_threads(os.getpid(), len(parts)).map(function, parts))


@cache
def _threads(process: int, count: int) -> ThreadPoolExecutor:
    """The threads of a process, since a forked one has not those of its parent."""
    return ThreadPoolExecutor(count, "kernels")


def to_python(numbers: Sequence[Tensor]) -> list[float]:
    """Read scalar tensors of one device with a single synchronisation."""
    if not numbers:
        return []
    wide = widest_float(numbers[0].device)
    if wide is torch.float32:  # stacked in float32, large counts would be rounded
        return [float(number) for number in numbers]
    return list(torch.stack([number.to(wide) for number in numbers]).cpu().tolist())


class Clock:
    """Seconds between marks, measured with device events where there are any, without synchronisation."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[Any] = []
        self.mark()

    def mark(self) -> None:
        """Set a mark after the work queued so far."""
        if not has_own_memory(self._device):
            self._marks.append(time.perf_counter())
            return
        event = get_device_module(self._device).Event(enable_timing=True)
        event.record(work_stream(self._device))
        self._marks.append(event)

    def seconds(self) -> list[float]:
        """Seconds from each mark to the next; call it after reading a value that was computed after the last mark."""
        return [
            end - start if isinstance(start, float) else 1e-3 * start.elapsed_time(end)
            for start, end in zip(self._marks, self._marks[1:], strict=False)
        ]
