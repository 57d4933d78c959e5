"""Available memory, and memory use of this process."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path

import psutil
import torch
from pydantic import ByteSize

from sparsellm.errors import TooLarge
from sparsellm.runtime import devices


def available(device: torch.device) -> int:
    """Return the bytes that can be allocated on a device."""
    return devices.free_bytes(device) if devices.has_own_memory(device) else int(psutil.virtual_memory().available)


def check_fits(needed: int, device: torch.device, *, stage: str, advice: str) -> None:
    """Check that a stage fits into a device's available memory.

    Args:
        device: Where it allocates them.
        stage: Its name, the subject of the error message.
        advice: Sentence that says what to do, at the end of the message.

    Raises:
        TooLarge: If more is needed than available; the message gives both numbers.
    """
    free = available(device)
    if needed > free:
        raise TooLarge(f"{stage} needs {needed:,} bytes of memory on {device}, and {free:,} are free. {advice}")


def human_bytes(count: float) -> str:
    """Format a number of bytes with a binary unit, such as 5.2 GiB."""
    return ByteSize(count).human_readable(separator=" ")


def current_memory() -> int:
    """Return the resident memory of this process, in bytes."""
    return int(psutil.Process().memory_info().rss)


def memory_in_use() -> tuple[int, int]:
    """Return the bytes that this process holds, and those of the machine: of the accelerator, if this process uses one."""
    return devices.bytes_in_use() or (current_memory(), int(psutil.virtual_memory().total))


def release_free_memory() -> None:
    """Return freed memory to the operating system (`malloc_trim`); does nothing without glibc.

    glibc allocates tensors of up to 32 MiB on its heap, which fragmentation enlarges with every block.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return
    trim(0)


def peak_memory() -> int:
    """Return the peak resident memory of this process, in bytes."""
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    try:  # psutil gives no peak on Linux, and getrusage's starts at the memory of the parent process
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])
    except (OSError, StopIteration):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def cache_bytes(processors: Path = Path("/sys/devices/system/cpu")) -> int | None:
    """Size of the last-level caches of the processors that this process may use, all together; None where Linux has no figure.

    Args:
        processors: The folder in which Linux describes the processors.
    """
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    sizes: dict[int, dict[str, int]] = {}  # by level, and by the processors that share the cache
    try:
        for index in (index for cpu in usable for index in sorted((processors / f"cpu{cpu}" / "cache").glob("index*"))):
            level, kind, size, shared = (
                (index / name).read_text(encoding="ascii").strip() for name in ("level", "type", "size", "shared_cpu_list")
            )
            if kind != "Instruction":
                sizes.setdefault(int(level), {})[shared] = int(size[:-1]) * {"K": 2**10, "M": 2**20, "G": 2**30}[size[-1]]
    except (OSError, ValueError, KeyError, IndexError):
        return None
    return sum(sizes[max(sizes)].values()) if sizes else None
