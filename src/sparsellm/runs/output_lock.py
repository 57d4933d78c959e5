"""Who may write an output, and what of it a killed process left behind: half-written files, a folder beside it."""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from sparsellm.errors import CannotResume
from sparsellm.runs.inspection import REPORT, WORK
from sparsellm.runtime.offload import ACTIVATIONS

LOCK = "lock"
"""The file in the work folder that tells other processes that one is at work; the system releases it when that one ends."""

EXPORT = "export"
"""The folder in the work folder that a finished checkpoint is written to, until it takes the output's place."""


@contextmanager
def locked(output: str | Path) -> Iterator[Path]:
    """An output's folder with a work folder in it, which no other process has; what a killed one left half-written is removed.

    The thread that has it may enter again. When the context ends by an error and the work folder holds nothing, it is removed,
    and so is the output where it was not there before.
    Raises CannotResume where another process has it.
    """
    path = _place(output)
    lock = FileLock(path / WORK / LOCK, timeout=0, is_singleton=True)
    if lock.is_locked:
        yield path
        return
    recover(path)
    ours = not path.exists() or (path / WORK).exists()
    (path / WORK).mkdir(parents=True, exist_ok=True)
    _acquire(lock, path)
    try:
        _clear(path / WORK)
        yield path
    except BaseException:
        with suppress(OSError):
            if {file.name for file in (path / WORK).iterdir()} <= {LOCK}:
                shutil.rmtree(path / WORK)
        if ours:
            with suppress(OSError):
                path.rmdir()  # where it is empty
        raise
    finally:
        lock.release()


def recover(output: str | Path) -> None:
    """Mend what a process left that was killed while it put a finished output in its place (see `replacing`).

    Before the output had its name: the unfinished one gets its name back. After that: what the output replaced is removed.
    Raises CannotResume where a living process is between the two.
    """
    path = _place(output)
    replaced = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}\.old")
    for old in sorted(path.parent.iterdir()) if path.parent.is_dir() else ():
        if not replaced.fullmatch(old.name) or not (old.is_dir() and ((path / REPORT).is_file() or not path.exists())):
            continue
        lock = FileLock(old / WORK / LOCK, timeout=0)
        try:
            if (old / WORK).is_dir():  # else the rest of one that was being removed
                _acquire(lock, path)
            if path.exists():
                shutil.rmtree(old, ignore_errors=True)
            elif (old / WORK).is_dir():
                old.rename(path)
        except CannotResume:
            if not path.exists():
                raise
        finally:
            lock.release()


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """An empty folder that takes the output's place when the context ends well, at once; otherwise it is removed.

    The output with its work folder then steps aside under another name, and is removed last, when nothing can be lost any more.
    Raises CannotResume where another process works on the output.
    """
    with locked(path):
        export = path / WORK / EXPORT
        export.mkdir()
        try:
            yield export
            old = aside(path)
            path.rename(old)
            try:
                (old / WORK / EXPORT).rename(path)
            except BaseException:
                if not path.exists():
                    old.rename(path)
                raise
        except BaseException:
            shutil.rmtree(export, ignore_errors=True)
            raise
        shutil.rmtree(old, ignore_errors=True)


def aside(path: Path) -> Path:
    """Where an output steps while another takes its place: a name of its own beside it, a little longer than its own."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.old")


def _place(output: str | Path) -> Path:
    """An output's path under one spelling, whatever links lead to its parent."""
    path = Path(output).expanduser().absolute()
    return path.parent.resolve() / path.name


def _acquire(lock: FileLock, path: Path) -> None:
    """Take a lock, or raise CannotResume."""
    try:
        lock.acquire()
    except Timeout:
        raise CannotResume(f"Another process works on {path}. Wait for it, or choose another output.") from None


def _clear(work: Path) -> None:
    """Remove what is of no use to a later process: a checkpoint that was not finished, and what travelled between blocks."""
    for left in work.iterdir():
        if left.name == EXPORT or left.name.startswith(ACTIVATIONS):
            shutil.rmtree(left, ignore_errors=True)
