"""Memory that must not be read."""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor


def before_guard_page(tensor: Tensor) -> Tensor:
    """A copy whose last byte is followed by a page that must not be read."""
    size = tensor.numel() * tensor.element_size()
    pages = -(-size // mmap.PAGESIZE) + 1
    memory = mmap.mmap(-1, pages * mmap.PAGESIZE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    end = start + (pages - 1) * mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mprotect(ctypes.c_void_p(end), mmap.PAGESIZE, 0) == 0
    offset = (pages - 1) * mmap.PAGESIZE - size
    copy = torch.frombuffer(memory, dtype=tensor.dtype, count=max(tensor.numel(), 1), offset=offset) if size else tensor
    copy.copy_(tensor.flatten())
    return copy.view(tensor.shape)
