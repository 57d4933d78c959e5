"""What becomes of processes that work together when one of them is lost: the others end, and say which it was."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

from torch._C._distributed_c10d import Store

from sparsellm.errors import LostProcess

TICK = 1.0
"""Seconds between two looks at the other processes."""

SILENCE = 40.0
"""Seconds without a sign of life after which a process counts as lost: longer than anything that keeps Python from running."""

GRACE = 10.0
"""Seconds that a process has to end in good order once another is lost."""


class Watch:
    """Tells the other processes that this one lives, and looks after them, from a thread of its own.

    A process is lost when it says that it failed, when it is gone from this machine, or when nothing was heard of it for a
    while; so is the leader's machine when its store cannot be reached.
    """

    def __init__(self, store: Store, number: int, count: int, say: Callable[[str], None]) -> None:
        """number: this process's, of so many. say: told why the process ends, if it has to be ended."""
        self._store, self._number, self._count, self._say = store, number, count, say
        self._lost: dict[int, str] = {}
        self._parent = os.getppid()
        self._heard = time.monotonic()
        self._over = threading.Event()
        self._noticed: float | None = None
        mine = {"pid": os.getpid(), "host": socket.gethostname(), "home": _home()}
        for name, value in (("here", json.dumps(mine)), ("beat", "0"), ("failed", "")):
            store.set(f"{name}/{number}", value)
        self._others: dict[int, dict[str, Any]] = {}
        for other in range(count):
            store.wait([f"failed/{other}"])
            self._others[other] = json.loads(store.get(f"here/{other}"))
        for work in (self._look, self._guard):
            threading.Thread(target=work, daemon=True, name=f"sparsellm {work.__name__}").start()

    def check(self) -> None:
        """Raise LostProcess if another process is lost."""
        if self._lost:
            raise LostProcess(self._message())

    def explained(self, what: str) -> LostProcess:
        """The error for an exchange that broke off: who is lost, as soon as it is known."""
        end = time.monotonic() + 5 * TICK
        while not self._lost and time.monotonic() < end:
            time.sleep(TICK / 10)
        return LostProcess(self._message(what))

    def stopped(self, number: int, frame: FrameType | None) -> None:
        """What this process does when it is told to end: it does, and says why if another one is the reason."""
        raise self.explained("this process was told to end")

    def fail(self, error: BaseException) -> None:
        """Tell the others that this process ends by an error, and give them the time to hear of it."""
        self._over.set()
        if isinstance(error, LostProcess) or (isinstance(error, SystemExit) and not error.code):
            return
        what = f"{type(error).__name__}: {error}".partition("\n")[0]
        with suppress(RuntimeError):
            self._store.set(f"failed/{self._number}", what)
            time.sleep(3 * TICK)  # the store may end with this process

    def over(self) -> None:
        """All went well."""
        self._over.set()

    def speaks_for(self, error: BaseException) -> bool:
        """Whether this process has to tell what happened: the first of those that are left."""
        return isinstance(error, LostProcess) and self._number == min(set(range(self._count)) - set(self._lost), default=0)

    def _message(self, otherwise: str = "") -> str:
        """Who is lost, and what to do."""
        told = [f"{self._named(other)} {why}" for other, why in sorted(self._lost.items())]
        what = "; ".join(told) or otherwise or "another process is lost"
        return f"{what[0].upper()}{what[1:]}. All processes of this run end. Start it again with --resume to go on."

    def _named(self, other: int) -> str:
        """A process by its number and place."""
        if other < 0:
            return "the launcher"
        place = self._others[other]
        return f"process {other} of {self._count} (pid {place['pid']} on {place['host']})"

    def _look(self) -> None:
        """Look after the others, until it is over."""
        keys = [f"{name}/{other}" for name in ("beat", "failed") for other in range(self._count)]
        seen = {other: (b"", time.monotonic()) for other in range(self._count)}
        beats = 0
        while not self._over.wait(TICK):
            beats += 1
            try:
                self._store.set(f"beat/{self._number}", str(beats))
                values = self._store.multi_get(keys)
            except RuntimeError:
                continue  # `_guard` knows since when
            self._heard = now = time.monotonic()
            for other in range(self._count):
                beat, failed = values[other], values[self._count + other].decode()
                if beat != seen[other][0]:
                    seen[other] = beat, now
                if other == self._number or other in self._lost:
                    continue
                if failed:
                    self._lost[other] = f"failed: {failed.rstrip('.')}"
                elif now - seen[other][1] > SILENCE:
                    self._lost[other] = f"has not been heard of for {SILENCE:.0f} seconds"

    def _guard(self) -> None:
        """Notice what the store cannot tell; and end a process that does not end by itself."""
        while not self._over.wait(TICK):
            now = time.monotonic()
            if os.getppid() != self._parent:
                self._lost.setdefault(-1, "is gone")
            for other, place in self._others.items():
                if place["home"] == self._others[self._number]["home"] and not _lives(place["pid"]):
                    # Its own words, if it had any, come by the store.
                    self._lost.setdefault(other, "died: it was killed, or is out of memory")
            if now - self._heard > SILENCE:
                self._lost.setdefault(0, f"cannot be reached for {SILENCE:.0f} seconds")
            if self._lost and self._noticed is None:
                self._noticed = now
            if self._noticed is not None and now - self._noticed > GRACE:
                self._say(self._message())
                os._exit(1)


def _home() -> str:
    """Where process numbers mean the same: one machine, one start of it, one container."""
    found = [socket.gethostname()]
    with suppress(OSError):
        with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
            found.append(file.read().strip())
        found.append(str(os.stat("/proc/self/ns/pid").st_ino))
    return " ".join(found)


def _lives(pid: int) -> bool:
    """Whether a process of this machine runs; one that has ended and is not yet cleared away does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    with suppress(OSError, IndexError), open(f"/proc/{pid}/stat", encoding="utf-8") as file:
        return file.read().rpartition(")")[2].split()[0] != "Z"
    return True
