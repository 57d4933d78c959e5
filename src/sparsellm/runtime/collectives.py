"""Communication between the processes of a run: rank, world size and collective operations.

Every process holds the whole model and a shard of the batches. Results are summed or broadcast, so that all processes end with
the same weights. With a single process, every collective is a no-op.
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
from sparsellm.runtime.devices import is_out_of_memory

T = TypeVar("T")

BUCKET = 2**24
"""Bytes of one all-reduce: smaller tensors are concatenated up to this size, larger ones are sent on their own."""


def world() -> int:
    """Return the number of processes of the run; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return the rank of this process, from 0."""
    return dist.get_rank() if world() > 1 else 0


def is_main() -> bool:
    """Return whether this process is rank 0, which writes files and prints."""
    return rank() == 0


def shard(items: Sequence[T]) -> list[T]:
    """Return items `rank, rank + world, …` of a sequence that all processes hold, so that any prefix is split evenly too."""
    return list(items[rank() :: world()])


def all_gather(local: Sequence[Any]) -> list[Any]:
    """Gather the results of each process for its `shard`, in the order of the unsharded sequence.

    Args:
        local: JSON-serializable results, one per item of this process's shard.
    """
    lists = all_gather_object(list(local))
    return [lists[number % len(lists)][number // len(lists)] for number in range(sum(map(len, lists)))]


def balance_costs(costs: Sequence[float]) -> list[int]:
    """Assign each task to a rank: the most expensive task first, each to the rank with the lowest total cost."""
    loads, owners = [0.0] * world(), [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda task: -costs[task]):
        owners[number] = loads.index(min(loads))
        loads[owners[number]] += costs[number]
    return owners


class AllReduce:
    """An asynchronous in-place sum of tensors over all processes, started on construction."""

    def __init__(self, *tensors: Tensor) -> None:
        self._sent: list[tuple[dist.Work, Tensor, list[Tensor]]] = []
        if world() == 1:
            return
        buckets: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
        for tensor in tensors:
            if tensor.is_contiguous() and tensor.nbytes >= BUCKET:
                self._send([tensor])
                continue
            bucket = buckets.setdefault((tensor.dtype, tensor.device), [])
            bucket.append(tensor)
            if sum(part.nbytes for part in bucket) >= BUCKET:
                self._send(buckets.pop((tensor.dtype, tensor.device)))
        for bucket in buckets.values():
            self._send(bucket)

    def _send(self, parts: list[Tensor]) -> None:
        """Start to sum tensors: a contiguous one in place, others concatenated."""
        global _bytes_sent  # noqa: PLW0603  (a meter)
        in_place = len(parts) == 1 and parts[0].is_contiguous()
        flat = parts[0] if in_place else torch.cat([part.reshape(-1) for part in parts])
        _bytes_sent += flat.nbytes
        self._sent.append((dist.all_reduce(flat, async_op=True), flat, [] if in_place else parts))

    def wait(self) -> None:
        """Wait until the tensors hold the sums."""
        for work, flat, parts in self._sent:
            _wait(work)
            for part, total in zip(parts, flat.split([part.numel() for part in parts]) if parts else (), strict=True):
                part.copy_(total.view(part.shape))
        self._sent = []


def all_reduce_(*tensors: Tensor) -> None:
    """Sum each tensor over all processes, in place."""
    AllReduce(*tensors).wait()


def all_reduce_count(count: int, device: torch.device) -> int:
    """Sum an integer over all processes, communicated as a tensor on `device`."""
    if world() == 1:
        return count
    tensor = torch.tensor(count, device=device)
    all_reduce_(tensor)
    return int(tensor)


def broadcast(owner: int, tensor: Tensor) -> Tensor:
    """Return the tensor of rank `owner` on all processes; the tensors of the others are not modified.

    Args:
        owner: Rank whose tensor is returned.
        tensor: A tensor of the same shape, dtype and device type on all processes.
    """
    if world() == 1:
        return tensor
    global _bytes_sent  # noqa: PLW0603  (a meter)
    sent = tensor.contiguous() if rank() == owner else torch.empty_like(tensor, memory_format=torch.contiguous_format)
    _bytes_sent += sent.nbytes
    _wait(dist.broadcast(sent, owner, async_op=True))
    return tensor if rank() == owner else sent


def broadcast_object(value: Any, owner: int = 0) -> Any:
    """Return the JSON-serializable value of rank `owner` on all processes, tuples as lists. Also acts as a barrier."""
    if world() == 1:
        return value
    return json.loads(broadcast_bytes(json.dumps(value).encode() if rank() == owner else b"", owner))


def broadcast_bytes(data: bytes, owner: int = 0) -> bytes:
    """Return the bytes of rank `owner` on all processes; `data` is ignored on the other ranks."""
    if world() == 1:
        return data
    # On the CPU, unless the user's process group is NCCL only.
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    size = broadcast(owner, torch.tensor(len(data), device=device))
    flat = torch.zeros(int(size), dtype=torch.uint8, device=device)
    if rank() == owner and data:
        flat.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    return broadcast(owner, flat).cpu().numpy().tobytes()


def all_gather_object(value: Any) -> list[Any]:
    """Return the JSON-serializable values of all processes, in the order of ranks."""
    return [broadcast_object(value, owner) for owner in range(world())]


def on_main(function: Callable[[], T]) -> T | None:
    """Call a function on rank 0 while the other processes wait; return its result there and None on the others."""
    result = function() if is_main() else None
    broadcast_object(None)
    return result


def bytes_sent() -> int:
    """Return the bytes of tensors that this process has passed to collectives; a ring transfers about twice as many."""
    return _bytes_sent


_bytes_sent = 0

lost: Callable[[str], LostProcess] | None = None
"""Makes the error of a collective that failed, from its reason; None for a process group of the caller's own."""


def _wait(work: dist.Work) -> None:
    """Wait for a collective. Raises LostProcess if a process that it needs has ended."""
    if lost is None:
        work.wait()
        return
    pause = 2e-5
    try:
        while not work.is_completed():  # `work.wait` would keep signals waiting too
            time.sleep(pause)
            pause = min(2 * pause, 2e-3)
        work.wait()
    except RuntimeError as error:
        if isinstance(error, LostProcess) or is_out_of_memory(error):
            raise
        raise lost(f"Communication between the processes failed ({str(error).partition(chr(10))[0]})") from error
