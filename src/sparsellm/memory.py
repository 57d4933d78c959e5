"""How much memory there is, and how much the gradient stages take: told before they start."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from sparsellm import devices
from sparsellm.blocks import Block
from sparsellm.errors import InvalidSetting, TooLarge

COPIES = 7
"""float32 copies of what is trained: the weights, Adam's two moments, the best state so far, a batch's gradient, and, as two,
the sum of all batches' in float64."""


def available(device: torch.device) -> int | None:
    """Bytes that can still be had on a device; None where the system does not tell."""
    if devices.has_own_memory(device):
        return devices.free_bytes(device)
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("MemAvailable"))) * 1024
    except (OSError, StopIteration, ValueError):
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None


def trained_bytes(blocks: Sequence[Block], together: bool) -> int:
    """What gradient steps hold: over the largest block, or over all of them together."""
    sizes = [sum(tensor.numel() for tensor in block.module.parameters()) for block in blocks]
    return COPIES * 4 * (sum(sizes) if together else max(sizes, default=0))


def predictions_bytes(tokens: int, width: int, batch_tokens: int, vocabulary: int, depth: int) -> int:
    """What the model's stage holds besides: the dense model's last states, a batch's logits three times, the blocks' inputs."""
    return 4 * (tokens * width + 3 * batch_tokens * vocabulary + batch_tokens * width * depth)


def check_fits(needed: int, device: torch.device, what: str, instead: str) -> None:
    """Raise TooLarge, with both numbers, when more is needed than can be had. instead: what to do about it."""
    had = available(device)
    if had is not None and needed > had:
        raise TooLarge(f"{what} needs {needed:,} bytes of memory on {device}, and {had:,} are free. {instead}")


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device has no memory left; a processor's says so only in words."""
    return isinstance(error, torch.OutOfMemoryError) or (
        isinstance(error, RuntimeError) and ("can't allocate memory" in str(error) or "not enough memory" in str(error))
    )


def human_bytes(count: float) -> str:
    """Bytes as people say them."""
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while count >= 1024 and len(units) > 1:
        count, units = count / 1024, units[1:]
    return f"{count:.0f} {units[0]}" if units[0] == "B" or count >= 100 else f"{count:.1f} {units[0]}"


def held_now() -> int:
    """The memory that this process holds, in bytes; its peak so far where the system tells no more."""
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError, AttributeError):
        return peak_memory()


def give_back() -> None:
    """Return memory that was freed to the system, where the C library (glibc) would keep it in pieces; nothing elsewhere.

    Tensors up to 32 MiB come from its heap, which holes make larger with every block.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return
    trim(0)


def forget_peak() -> None:
    """Let `peak_memory` begin anew with what is held now, where the system can (Linux)."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak_memory() -> int:
    """The most memory that this process has held so far, in bytes; 0 where the system does not tell."""
    try:  # Linux's getrusage would begin with what the program held that started this one
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM:")).split()[1])
    except (OSError, StopIteration):
        pass
    try:
        import resource  # not on Windows
    except ImportError:
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def parse_bytes(text: str) -> int:
    """The bytes that a text means: 16GiB, 500MB, 1.5 GiB. Raises InvalidSetting."""
    units = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
    units |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
    word = text.strip().upper().replace(" ", "")
    unit = next((name for name in sorted(units, key=len, reverse=True) if word.endswith(name)), "")
    try:
        found = float(word.removesuffix(unit)) * units[unit]
        if not 0 < found < 2**63:
            raise ValueError
        return int(found)
    except (ValueError, KeyError):
        raise InvalidSetting(f"`memory` must be a size such as 16GiB or 500MB, got {text!r}.") from None
