"""All that crosses processes: how many work together, and what they exchange.

Every process has the whole model and a share of the batches, dealt like cards. What they find is summed or handed on, so that
all end with the same weights. Each exchange is a no-op when alone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from sparsellm.errors import LostProcess

Thing = TypeVar("Thing")

BUCKET = 2**24
"""Bytes that are summed in one exchange: what is smaller waits for company, what is larger goes by itself."""


def world() -> int:
    """How many processes work together; 1 when alone."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """The number of this process, from 0."""
    return dist.get_rank() if world() > 1 else 0


def is_main() -> bool:
    """Whether this process is the one that writes and speaks for all."""
    return rank() == 0


def shard(things: Sequence[Thing]) -> list[Thing]:
    """This process's share of things that all of them have: every so-manieth, so that any first few are shared out too."""
    return list(things[rank() :: world()])


def all_gather(local: Sequence[Any]) -> list[Any]:
    """Plain data that each process has for the things dealt to it, for all things in their order."""
    lists = all_gather_object(list(local))
    return [lists[number % len(lists)][number // len(lists)] for number in range(sum(map(len, lists)))]


def balance_costs(costs: Sequence[float]) -> list[int]:
    """Which process does which of several tasks: the dearest first, each to whoever has the least to do."""
    loads, found = [0.0] * world(), [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda task: -costs[task]):
        found[number] = loads.index(min(loads))
        loads[found[number]] += costs[number]
    return found


class AllReduce:
    """A sum of tensors over all processes on its way, in place."""

    def __init__(self, *tensors: Tensor) -> None:
        self._sent: list[tuple[dist.Work, Tensor, list[Tensor]]] = []
        if world() == 1:
            return
        waiting: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in tensors:
            if tensor.is_contiguous() and tensor.nbytes >= BUCKET:
                self._send(tensor, [])
                continue
            some = waiting.setdefault((tensor.dtype, tensor.device), [])
            some.append(tensor)
            if sum(other.nbytes for other in some) >= BUCKET:
                self._send(torch.cat([other.reshape(-1) for other in some]), some)
                waiting[tensor.dtype, tensor.device] = []
        for some in waiting.values():
            if some:
                self._send(torch.cat([other.reshape(-1) for other in some]), some)

    def _send(self, flat: Tensor, parts: list[Tensor]) -> None:
        """Begin to sum a tensor. parts: whose numbers it holds, if not its own."""
        _count(flat)
        self._sent.append((dist.all_reduce(flat, async_op=True), flat, parts))

    def wait(self) -> None:
        """Until the sums stand in the tensors."""
        for work, flat, parts in self._sent:
            _settle(work)
            for part, found in zip(parts, flat.split([part.numel() for part in parts]) if parts else (), strict=True):
                part.copy_(found.view(part.shape))
        self._sent = []


def all_reduce_(*tensors: Tensor) -> None:
    """Sum each tensor over all processes, in place."""
    AllReduce(*tensors).wait()


def all_reduce_count(count: int, device: torch.device) -> int:
    """The sum of a number over all processes; device: where they exchange tensors."""
    if world() == 1:
        return count
    tensor = torch.tensor(count, device=device)
    all_reduce_(tensor)
    return int(tensor)


def broadcast_from(owner: int, *tensors: Tensor) -> None:
    """Fill tensors, which all processes have in the same form, with those of one of them."""
    if world() == 1:
        return
    for tensor in tensors:
        flat = tensor if tensor.is_contiguous() else tensor.contiguous()
        _count(flat)
        _settle(dist.broadcast(flat, owner, async_op=True))
        if flat is not tensor:
            tensor.copy_(flat)


def broadcast(owner: int, tensor: Tensor) -> Tensor:
    """One process's tensor, for all, who have one of the same form; theirs stay as they are."""
    if world() == 1:
        return tensor
    found = tensor if rank() == owner else torch.empty_like(tensor, memory_format=torch.contiguous_format)
    broadcast_from(owner, found)
    return found


def broadcast_object(value: Any, owner: int = 0) -> Any:
    """One process's plain data, for all: what JSON can say, with tuples as lists. Also a place to wait for each other."""
    if world() == 1:
        return value
    return json.loads(broadcast_bytes(json.dumps(value).encode() if rank() == owner else b"", owner))


def broadcast_bytes(data: bytes, owner: int = 0) -> bytes:
    """The bytes that one process has, for all; what the others pass is ignored."""
    if world() == 1:
        return data
    size = torch.tensor(len(data), device=_device())
    broadcast_from(owner, size)
    flat = torch.zeros(int(size), dtype=torch.uint8, device=_device())
    if rank() == owner and data:
        flat.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    broadcast_from(owner, flat)
    return flat.cpu().numpy().tobytes()


def all_gather_object(value: Any) -> list[Any]:
    """Everybody's plain data, by rank."""
    return [broadcast_object(value, owner) for owner in range(world())]


def on_main(do: Callable[[], Thing]) -> Thing | None:
    """What the leader alone does, while the others wait; for the others None."""
    found = do() if is_main() else None
    broadcast_object(None)
    return found


def bytes_sent() -> int:
    """Bytes of tensors that this process has put into exchanges so far; a ring moves each about twice."""
    return _sent


_sent = 0

check: Callable[..., None] | None = None
"""What an exchange that takes long calls, if there is anything: it raises LostProcess where another process is lost. Given why,
where the exchange broke off."""


def _count(tensor: Tensor) -> None:
    global _sent  # noqa: PLW0603  (a meter)
    _sent += tensor.nbytes


def _device() -> torch.device:
    """Where plain data are exchanged: on the processor, unless the user's own group knows GPUs only."""
    return torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")


def _settle(work: dist.Work) -> None:
    """Wait for an exchange. Raises LostProcess where it cannot end."""
    if check is None:
        work.wait()
        return
    pause = 2e-5
    try:
        while not work.is_completed():
            check()
            time.sleep(pause)
            pause = min(2 * pause, 2e-3)
        work.wait()
    except LostProcess:
        raise
    except RuntimeError as error:
        check(f"An exchange between the processes broke off ({str(error).partition(chr(10))[0]})")
        raise
