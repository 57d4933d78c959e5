"""The process group of a launched run, whose processes all end when one does.

Used by the command line only; Python callers create and destroy the process group themselves.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from sparsellm.errors import LostProcess
from sparsellm.runtime import collectives, devices

MEETING = timedelta(minutes=10)
"""Time limit for all processes to connect at the start."""

TIMEOUT = timedelta(hours=12)
"""Time limit of a collective, longer than a process solves while others wait for it. It ends a run whose network is cut."""

LISTENING = 5.0
"""Seconds that a process waits for the others to say why they end."""

LEAVING = 20.0
"""Seconds that rank 0 waits until the others have read why it ends. At the start of a run they may still import libraries."""

FAILED = "failed"
"""The state of a process that ended by an error of its own, in messages."""

ENDED = "ended"
"""The state of a process that ends because another one did."""

LAUNCHER = "The launcher ended this process, as it does when another one failed"
"""Reason for a process that got the signal SIGTERM."""

UNREACHABLE = "died or cannot be reached: it was killed, is out of memory, or its network is down"
"""Reason for a process that said nothing."""


class Members:
    """The processes of a run, which say in the store of the process group why they end.

    Args:
        store: Store of the process group, served by rank 0 or by the launcher.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._store.set_timeout(timedelta(seconds=LISTENING))
        self._locations: list[str] = collectives.all_gather_object(f"(pid {os.getpid()} on {socket.gethostname()})")
        self._said: dict[int, str] = {}
        self._lost: dict[int, str] = {}

    def close(self, error: BaseException) -> None:
        """Say why this process ends, end the collectives that the others wait in, and give them time to read the reason."""
        if isinstance(error, SystemExit) and not error.code:
            return
        number, own = collectives.rank(), not isinstance(error, LostProcess)
        with suppress(RuntimeError):
            if own:
                self._store.set(_key(number), f"{FAILED}: {type(error).__name__}: {error}".partition("\n")[0])
                self._store.set(_left(number), "")
            dist.destroy_process_group()  # closes its connections, so that collectives with this process fail
            deadline, others = time.monotonic() + LEAVING, [_left(rank) for rank in range(1, len(self._locations))]
            while own and number == 0 and time.monotonic() < deadline and not self._store.check(others):
                time.sleep(0.05)  # it may serve the store, and torch prints warnings where others read one that has ended

    def lost(self, reason: str) -> LostProcess:
        """The error of a process that cannot go on because others have ended.

        Args:
            reason: What happened here, which is said if nothing is known of the others.
        """
        number, count, is_told = collectives.rank(), len(self._locations), reason == LAUNCHER
        with suppress(RuntimeError):
            self._store.set(_key(number), f"{FAILED}: {LAUNCHER}" if is_told else ENDED)
        seconds = 1.0 if is_told else LISTENING
        # With a cut network the store does not answer, and its time limit does not hold: the thread then ends with the process.
        listening = threading.Thread(target=self._listen, args=(number, seconds), daemon=True)
        listening.start()
        listening.join(seconds + 1)
        failed = {rank: text for rank, text in self._said.items() if text.startswith(FAILED)}
        causes = {rank: text for rank, text in failed.items() if not text.endswith(LAUNCHER)}
        silent = {rank: UNREACHABLE for rank in range(count) if rank != number and rank not in self._said}
        self._lost = causes if is_told else causes or failed or silent
        lost = [
            f"Process {rank} of {count} {self._locations[rank]} {self._lost[rank].rstrip('.')}" for rank in sorted(self._lost)
        ]
        return LostProcess(
            f"{'; or: '.join(lost) or reason}. All processes of this run end. Start it again with `resume=True` to go on."
        )

    def prints(self, number: int) -> bool:
        """Whether a process prints the error that ends it: all with a lower rank are lost, and rank 0 prints none itself."""
        return all(rank in self._lost for rank in range(number)) and not self._lost.get(0, "").startswith(FAILED)

    def _listen(self, number: int, seconds: float) -> None:
        """Read what the others say until one has failed or all have ended, for at most so many seconds; then read no more."""
        others = [rank for rank in range(len(self._locations)) if rank != number]
        deadline, known = time.monotonic() + seconds, False
        with suppress(RuntimeError):  # the store has ended, with the process that served it
            while time.monotonic() < deadline and not known:
                found = [rank for rank in others if rank not in self._said and self._store.check([_key(rank)])]
                self._said |= {rank: self._store.get(_key(rank)).decode() for rank in found}
                known = len(self._said) == len(others) or any(text.startswith(FAILED) for text in self._said.values())
                time.sleep(0 if known else 0.05)
            self._store.set(_left(number), "")


def _key(rank: int) -> str:
    """The key of the store under which a process says why it ends."""
    return f"sparsellm/{rank}"


def _left(rank: int) -> str:
    """The key that a process sets when it reads the store no more."""
    return f"{_key(rank)}/left"


def independent_process(environment: Mapping[str, str]) -> tuple[int, int]:
    """Return rank and world size of a launched process that works on its own, after selecting a GPU of its own, if any.

    Args:
        environment: The launcher's variables, as for `init_process_group`.
    """
    count = int(environment.get("WORLD_SIZE", "1"))
    if count > 1:
        devices.set_device(int(environment.get("LOCAL_RANK", "0")))
    return int(environment.get("RANK", "0")) if count > 1 else 0, count


@contextmanager
def init_process_group(environment: Mapping[str, str]) -> Iterator[bool]:
    """Join the process group of a launcher (torchrun, accelerate launch, srun) within the context.

    An error in one process ends the others with a LostProcess that names it.

    Args:
        environment: The variables WORLD_SIZE, RANK, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; without them, this process runs
            alone and the context has no effect.

    Yields:
        Whether this process is rank 0, which writes files and prints.
    """
    if int(environment.get("WORLD_SIZE", "1")) == 1 or collectives.world() > 1:
        yield collectives.is_main()
        return
    backend = "gloo"
    if (device := devices.accelerator()) is not None:
        devices.set_device(int(environment.get("LOCAL_RANK", "0")))
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    store, number, count = next(rendezvous("env://", timeout=MEETING))
    dist.init_process_group(backend, store=store, rank=number, world_size=count, timeout=TIMEOUT)
    members = Members(store.clone())

    def end(*_: object) -> None:
        raise members.lost(LAUNCHER)

    previous = signal.signal(signal.SIGTERM, end)
    collectives.lost = members.lost
    try:
        yield collectives.is_main()
        collectives.broadcast_object(None)  # a barrier: no process leaves before rank 0 has written
        dist.destroy_process_group()
    except BaseException as error:
        members.close(error)
        if number > 0 and not (isinstance(error, LostProcess) and members.prints(number)):
            raise SystemExit(1) from error  # another process prints the error
        raise
    finally:
        signal.signal(signal.SIGTERM, previous)
        collectives.lost = None
