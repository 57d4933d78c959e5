"""The process group of a launched run, and a watchdog that ends all processes when one is lost.

Used by the command line only; Python callers create and destroy the process group themselves.
"""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed.rendezvous import rendezvous

from sparsellm.errors import LostProcess
from sparsellm.runtime import collectives, devices

FAILED = "failed"
"""What is said of a process that has ended by an error."""

MEETING = timedelta(minutes=10)
"""Time limit for all processes to connect at the start."""

TICK = 1.0
"""Seconds between two heartbeats."""

SILENCE = 40.0
"""Seconds without a heartbeat after which a process counts as lost; longer than any operation that blocks the interpreter."""

BROKEN = 5.0
"""The same, once a collective has failed or the launcher has sent SIGTERM: another process is then certainly lost."""

GRACE = 10.0
"""Seconds in which a process can end normally once another is lost."""

UNREACHABLE = "died or cannot be reached: it was killed, is out of memory, or its network is down"
"""Reason for a process that is lost without an error of its own."""


class Watchdog:
    """A thread that sends heartbeats to the other processes and detects when one of them is lost.

    Each process has a key in the store of the process group, which holds its number of heartbeats, or the error that ended it.
    A process is lost if its key holds an error, or has not changed for too long.

    Args:
        store: Store of the process group, served by rank 0.
        end: Called with the reason before this process is terminated in the middle of a computation.
    """

    def __init__(self, store: Store, end: Callable[[str], None]) -> None:
        self._store, self._end = store, end
        self._keys = [f"sparsellm/{rank}" for rank in range(collectives.world())]
        self._lost: dict[int, str] = {}  # reason by rank, -1 for the launcher
        self._silence, self._answered, self._parent = SILENCE, time.monotonic(), os.getppid()
        self._closed = threading.Event()
        self._publish("0")
        # Also a barrier: afterwards, the store holds the keys of all processes.
        self._locations = collectives.all_gather_object(f"(pid {os.getpid()} on {socket.gethostname()})")
        self._thread = threading.Thread(target=self._run, daemon=True, name="sparsellm watchdog")
        self._thread.start()

    def check(self, broken: str = "") -> None:
        """Check that no other process is lost.

        Args:
            broken: Why this process cannot continue, if it cannot; the lost process is then identified within seconds.

        Raises:
            LostProcess: If another process is lost, or `broken` is given.
        """
        if time.monotonic() - self._answered > SILENCE:  # the thread is blocked: the store does not answer
            self._lost[0] = UNREACHABLE
        if broken:
            self._silence = BROKEN
            deadline = time.monotonic() + BROKEN + 3 * TICK
            while not self._lost and time.monotonic() < deadline:
                time.sleep(TICK / 10)
        if self._lost or broken:
            raise LostProcess(self._message(broken))

    def close(self, error: BaseException | None = None) -> None:
        """Stop the thread; an error that ends this process is published, with time for the others to read it."""
        self._closed.set()
        if isinstance(error, LostProcess):
            return
        # Otherwise it could still wait for the store when this process or rank 0 ends, or overwrite the error.
        self._thread.join(3 * TICK)
        if error is None or (isinstance(error, SystemExit) and not error.code):
            return
        with suppress(RuntimeError):
            self._publish(f"{type(error).__name__}: {error}".partition("\n")[0])
            time.sleep(3 * TICK)  # rank 0 also ends the store

    def is_first_left(self) -> bool:
        """Return whether this process has the lowest rank of those that are left, and rank 0 did not print an error itself."""
        return all(rank in self._lost for rank in range(collectives.rank())) and not self._lost[0].startswith(FAILED)

    def _publish(self, state: str) -> None:
        """Write the state of this process to the store: its number of heartbeats, or an error."""
        self._store.set(self._keys[collectives.rank()], state)

    def _message(self, default: str = "") -> str:
        """Return an error message with the lost processes, or `default` if none is known to be lost."""
        lost = [
            f"Process {rank} of {len(self._locations)} {self._locations[rank]} {reason}" if rank >= 0 else reason
            for rank, reason in sorted(self._lost.items())
        ]
        return f"{'; '.join(lost) or default}. All processes of this run end. Start it again with `resume=True` to go on."

    def _run(self) -> None:
        """Run until another process is lost; then terminate this one, unless it ends within `GRACE` seconds."""
        states, changed, beats = [""] * len(self._keys), [time.monotonic()] * len(self._keys), 0
        while not self._lost:
            if self._closed.wait(TICK):
                return
            beats += 1
            lost: dict[int, str] = {}
            try:
                self._publish(str(beats))
                values = [value.decode() for value in self._store.multi_get(self._keys)]
            except RuntimeError:  # the store ends with rank 0, or with a launcher that serves it
                values = states
                lost[0] = UNREACHABLE
            self._answered = time.monotonic()
            for rank, value in enumerate(values):
                if value != states[rank]:
                    states[rank], changed[rank] = value, self._answered
                if value and not value.isdigit():
                    lost[rank] = f"{FAILED}: {value.rstrip('.')}"
                elif self._answered - changed[rank] > self._silence:
                    lost[rank] = UNREACHABLE
            self._lost |= lost if os.getppid() == self._parent else {-1: "The launcher ended"}
        if not self._closed.wait(GRACE):
            self._end(self._message())
            os._exit(1)


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
def init_process_group(environment: Mapping[str, str], end: Callable[[str], None] = lambda _: None) -> Iterator[bool]:
    """Join the process group of a launcher (torchrun, accelerate launch, srun) within the context.

    An error in one process ends the others with a LostProcess that names it.

    Args:
        environment: The variables WORLD_SIZE, RANK, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; without them, this process runs
            alone and the context has no effect.
        end: Called with the reason before this process is terminated in the middle of a computation.

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
    # Collectives have no useful time limit: another process may solve for hours. The watchdog detects lost processes.
    dist.init_process_group(backend, store=store, rank=number, world_size=count, timeout=timedelta(days=7))
    watchdog = Watchdog(store.clone(), end)
    message = "The launcher ended this process, as it does when another one failed"
    previous = signal.signal(signal.SIGTERM, lambda *_: watchdog.check(message))
    collectives.check = watchdog.check
    try:
        yield collectives.is_main()
        collectives.broadcast_object(None)  # a barrier: no process leaves before rank 0 has written
        watchdog.close()
        dist.destroy_process_group()
    except BaseException as error:
        watchdog.close(error)
        if not collectives.is_main() and not (isinstance(error, LostProcess) and watchdog.is_first_left()):
            raise SystemExit(1) from error  # another process prints the error
        raise
    finally:
        signal.signal(signal.SIGTERM, previous)
        collectives.check = None
