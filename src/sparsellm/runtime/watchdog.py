"""Processes that a launcher starts to work together: how they meet, and how the others end when one is lost.

For the command line alone: from Python, the caller makes the process group and ends it.
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

MEETING = timedelta(minutes=10)
"""How long processes wait for each other at the start."""

TICK = 1.0
"""Seconds between two signs of life."""

SILENCE = 40.0
"""Seconds without a sign of life after which a process counts as lost: longer than anything that keeps Python from running."""

BROKEN = 5.0
"""The same, once an exchange broke off or the launcher ends this process: then one of the others is lost for certain."""

GRACE = 10.0
"""Seconds that a process has to end in good order once another is lost."""

_GONE = "died or cannot be reached: it was killed, is out of memory, or its network is down"


class Watch:
    """A thread that tells the other processes that this one lives, and notices when one of them is lost.

    Each process has a key in the store of the process group: the number of its signs of life so far, or the error that it ended
    by. A process is lost when there is an error, or the same number for too long.

    Args:
        store: The process group's store, which the first process serves.
        end: Is told why this process ends, where it has to be ended in the middle of a computation.
    """

    def __init__(self, store: Store, end: Callable[[str], None]) -> None:
        self._store, self._end, self._key = store, end, f"sparsellm/{collectives.rank()}"
        self._lost: dict[int, str] = {}
        self._silence = SILENCE
        self._answered = time.monotonic()
        self._parent = os.getppid()
        self._over = threading.Event()
        store.set(self._key, "0")
        self._places = collectives.all_gather_object(
            f"(pid {os.getpid()} on {socket.gethostname()})"
        )  # and every key is in the store
        self._thread = threading.Thread(target=self._run, daemon=True, name="sparsellm watch")
        self._thread.start()

    def check(self, broken: str = "") -> None:
        """Raise LostProcess if another process is lost. broken: why this one cannot go on; who is lost is known in a moment."""
        if time.monotonic() - self._answered > SILENCE:  # the thread waits in vain for an answer of the store
            self._lost[0] = _GONE
        if broken:
            self._silence = BROKEN
            end = time.monotonic() + BROKEN + 3 * TICK
            while not self._lost and time.monotonic() < end:
                time.sleep(TICK / 10)
        if self._lost or broken:
            raise LostProcess(self._message(broken))

    def close(self, error: BaseException | None = None) -> None:
        """End the watch. error: what this process ends by, which the others are told, and given the time to hear of."""
        self._over.set()
        if error is None or isinstance(error, LostProcess) or (isinstance(error, SystemExit) and not error.code):
            return
        self._thread.join(3 * TICK)  # or its next sign of life would take the error's place
        with suppress(RuntimeError):
            self._store.set(self._key, f"{type(error).__name__}: {error}".partition("\n")[0])
            time.sleep(3 * TICK)  # the store may end with this process

    def speaks(self) -> bool:
        """Whether this process tells the user what happened: it is the first of those that are left."""
        return collectives.rank() == min(set(range(collectives.world())) - set(self._lost), default=0)

    def _message(self, otherwise: str = "") -> str:
        """Who is lost, and what to do."""
        lost = [
            f"Process {rank} of {len(self._places)} {self._places[rank]} {why}" if rank >= 0 else why
            for rank, why in sorted(self._lost.items())
        ]
        return f"{'; '.join(lost) or otherwise}. All processes of this run end. Start it again with --resume to go on."

    def _run(self) -> None:
        """Watch until another process is lost; end this one if it does not end by itself then."""
        ranks = range(len(self._places))
        states = dict.fromkeys(ranks, "")
        heard = {rank: time.monotonic() for rank in ranks}
        beats = 0
        while not self._lost:
            if self._over.wait(TICK):
                return
            beats += 1
            try:
                self._store.set(self._key, str(beats))
                found = [value.decode() for value in self._store.multi_get([f"sparsellm/{rank}" for rank in ranks])]
            except RuntimeError:
                self._lost[0] = _GONE
                break
            self._answered = time.monotonic()
            for rank in ranks:
                if found[rank] != states[rank]:
                    states[rank], heard[rank] = found[rank], time.monotonic()
                if not found[rank].isdigit():
                    self._lost[rank] = f"failed: {found[rank].rstrip('.')}"
                elif time.monotonic() - heard[rank] > self._silence:
                    self._lost[rank] = _GONE
            if os.getppid() != self._parent:
                self._lost[-1] = "The launcher is gone"
        if not self._over.wait(GRACE):
            self._end(self._message())
            os._exit(1)


def apart(environment: Mapping[str, str]) -> tuple[int, int]:
    """The number of this process and how many there are, for processes of one launcher that work each on its own; each takes
    its own GPU, if there are any. environment: as for `joined`."""
    count = int(environment.get("WORLD_SIZE", "1"))
    if count > 1:
        devices.set_device(int(environment.get("LOCAL_RANK", "0")))
    return int(environment.get("RANK", "0")) if count > 1 else 0, count


@contextmanager
def init_process_group(environment: Mapping[str, str], end: Callable[[str], None] = lambda _: None) -> Iterator[bool]:
    """Work together with the other processes of a launcher (torchrun, accelerate launch, srun).

    An error in one process ends the others, whose LostProcess says which one it was.

    Args:
        environment: The variables WORLD_SIZE, RANK, LOCAL_RANK, MASTER_ADDR and MASTER_PORT; without them this process is
            alone, and nothing happens.
        end: Is told why, where this process has to be ended in the middle of a computation.

    Yields:
        Whether this process is the first one, which writes and speaks for all.
    """
    if int(environment.get("WORLD_SIZE", "1")) == 1 or collectives.world() > 1:
        yield collectives.is_main()
        return
    backend = "gloo"
    if (device := devices.accelerator()) is not None:
        devices.set_device(int(environment.get("LOCAL_RANK", "0")))
        backend = f"cpu:gloo,{device.type}:{dist.get_default_backend_for_device(device)}"
    store, number, count = next(rendezvous("env://", timeout=MEETING))
    # How long an exchange may take is not known: another process may solve for hours. Lost ones are found by the watch.
    dist.init_process_group(backend, store=store, rank=number, world_size=count, timeout=timedelta(days=7))
    watch = Watch(store.clone(), end)
    message = "The launcher ended this process, as it does when another one failed"
    before = signal.signal(signal.SIGTERM, lambda *_: watch.check(message))
    collectives.check = watch.check
    try:
        yield collectives.is_main()
        collectives.broadcast_object(None)  # nobody leaves before the first has written
        watch.close()
        dist.destroy_process_group()
    except BaseException as error:
        watch.close(error)
        if not collectives.is_main() and not (isinstance(error, LostProcess) and watch.speaks()):
            raise SystemExit(1) from error  # the first one tells it
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
        collectives.check = None
