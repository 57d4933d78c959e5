"""Exclusive access to an output folder, its atomic replacement, and cleanup after a killed process."""

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
"""Lock file in the work folder; the operating system releases it when the process that holds it ends."""

EXPORT = "export"
"""Subfolder of the work folder in which the finished checkpoint is written before it replaces the output."""


@contextmanager
def locked(output: str | Path) -> Iterator[Path]:
    """Lock an output folder for this process, and remove partial files of a killed one.

    The thread that holds the lock may enter again. After an error an empty work folder is removed, and so is the output
    folder if the context created it.

    Args:
        output: The folder, created with its work folder if missing.

    Yields:
        The absolute path of the folder.

    Raises:
        CannotResume: Another process holds the lock.
    """
    path = _normalized_path(output)
    lock = FileLock(path / WORK / LOCK, timeout=0, is_singleton=True)
    if lock.is_locked:
        yield path
        return
    recover(path)
    removable = not path.exists() or (path / WORK).exists()
    (path / WORK).mkdir(parents=True, exist_ok=True)
    _acquire(lock, path)
    try:
        _remove_stale(path / WORK)
        yield path
    except BaseException:
        with suppress(OSError):
            if {file.name for file in (path / WORK).iterdir()} <= {LOCK}:
                shutil.rmtree(path / WORK)
        if removable:
            with suppress(OSError):
                path.rmdir()  # fails unless it is empty
        raise
    finally:
        lock.release()


def recover(output: str | Path) -> None:
    """Clean up after a process that was killed while it moved a finished output into place (see `replacing`).

    If the output does not exist, the unfinished one is moved back to its name. If it does, the folder that it replaced is
    removed.

    Raises:
        CannotResume: A running process is moving the output.
    """
    path = _normalized_path(output)
    replaced = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}\.old")
    for old in sorted(path.parent.iterdir()) if path.parent.is_dir() else ():
        if not replaced.fullmatch(old.name) or not (old.is_dir() and ((path / REPORT).is_file() or not path.exists())):
            continue
        lock = FileLock(old / WORK / LOCK, timeout=0)
        try:
            if (old / WORK).is_dir():  # otherwise its removal was interrupted
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
    """Provide an empty folder that atomically replaces the output when the context ends; after an error it is removed.

    The old output with its work folder is renamed first, and removed once the new one is in place.

    Raises:
        CannotResume: Another process is working on the output.
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
    """Random name in the same folder to which an output is moved while it is replaced."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.old")


def _normalized_path(output: str | Path) -> Path:
    """Absolute path of an output, with links in its parent resolved."""
    path = Path(output).expanduser().absolute()
    return path.parent.resolve() / path.name


def _acquire(lock: FileLock, path: Path) -> None:
    """Acquire a lock without waiting, or raise CannotResume."""
    try:
        lock.acquire()
    except Timeout:
        raise CannotResume(f"Another process is working on {path}. Wait for it, or choose another output.") from None


def _remove_stale(work: Path) -> None:
    """Remove an unfinished export and offloaded activations of an earlier process."""
    for entry in work.iterdir():
        if entry.name == EXPORT or entry.name.startswith(ACTIVATIONS):
            shutil.rmtree(entry, ignore_errors=True)
