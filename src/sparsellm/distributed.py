"""All that crosses processes. Each is a no-op when alone."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def world() -> int:
    """How many processes work together; 1 when alone."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def sum_(*tensors: Tensor) -> None:
    """Sum each tensor over all processes, in place."""
    if world() > 1:
        for tensor in tensors:
            dist.all_reduce(tensor)


def total(count: int, device: torch.device) -> int:
    """The sum of a number over all processes; device: where they exchange tensors."""
    if world() == 1:
        return count
    tensor = torch.tensor(count, device=device)
    sum_(tensor)
    return int(tensor)
