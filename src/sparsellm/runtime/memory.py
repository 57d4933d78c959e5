"""How much memory there is, and how much this process has."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import psutil
import torch
from pydantic import ByteSize

from sparsellm.errors import TooLarge
from sparsellm.runtime import devices


def available(device: torch.device) -> int:
    """Bytes that can still be allocated on a device."""
    return devices.free_bytes(device) if devices.has_own_memory(device) else int(psutil.virtual_memory().available)


def check_fits(needed: int, device: torch.device, what: str, instead: str) -> None:
    """Raise TooLarge, with both numbers, when more is needed than can be had. instead: what to do about it."""
    free = available(device)
    if needed > free:
        raise TooLarge(f"{what} needs {needed:,} bytes of memory on {device}, and {free:,} are free. {instead}")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device has no memory left; a processor's says so only in words."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and ("can't allocate memory" in str(error) or "not enough memory" in str(error))
    )


def human_bytes(count: float) -> str:
    """A number of bytes with the unit that leaves few digits, such as 5.2 GiB."""
    return ByteSize(count).human_readable(separator=" ")


def current_memory() -> int:
    """The resident memory of this process, in bytes."""
    return int(psutil.Process().memory_info().rss)


def release_free_memory() -> None:
    """Return memory that was freed to the system, where the C library (glibc) would keep it in pieces; nothing elsewhere.

    Tensors up to 32 MiB come from its heap, which holes make larger with every block.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return
    trim(0)


def peak_memory() -> int:
    """The most resident memory that this process has had so far, in bytes."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    try:  # psutil has no peak on Linux, and that of getrusage begins with the memory of the program that started this one
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])
    except (OSError, StopIteration):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
