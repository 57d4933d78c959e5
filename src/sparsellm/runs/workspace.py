"""The work directory of an output: locked, resumable, and replaced atomically by the finished output."""

from __future__ import annotations

import re
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from sparsellm.checkpoints.stamps import SourceChanged
from sparsellm.errors import CannotResume, SparseLLMError
from sparsellm.pruning.journal import JOURNAL, Journal
from sparsellm.runs.records import REPORT, TRAINING_STATE, WHOLE_MODEL, WORK
from sparsellm.runtime import collectives
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
    recover_output(path)
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


def recover_output(output: str | Path) -> None:
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


class WorkDirectory:
    """Work directory of an unfinished output. `journal` is None until `begin`."""

    def __init__(self, output: Path, resume: bool) -> None:
        self.output, self._resume = output, resume
        self.journal: Journal | None = None

    @property
    def folder(self) -> Path:
        """Folder of the run's files."""
        return self.output / WORK

    def begin(self, fingerprint: Mapping[str, Any]) -> Journal:
        """Open the journal: a new one, or that of the run to resume.

        In a distributed run every process calls this, and the main process writes the journal.

        Raises:
            CannotResume: The journal has another fingerprint.
        """
        journal = Journal(self.folder)
        if collectives.is_main():
            resumes = self._resume and journal.file.exists()
            journal = (Journal.resume if resumes else Journal.begin)(self.folder, fingerprint)
        self.journal = journal.share()
        return self.journal


@contextmanager
def work_directory(output: str | Path, resume: bool = False, restart: bool = False) -> Iterator[WorkDirectory]:
    """Open the work directory of an output, locked against other runs.

    On success the work directory is removed. On an error it is kept if any block is finished, with a note on the error that
    says how to resume, and removed otherwise. In a distributed run every process enters, and the main process does the work.

    Args:
        resume: Resume an unfinished run, or start a new one if there is none.
        restart: Discard an unfinished run first.

    Raises:
        CannotResume: The output is unfinished and neither is set, or another process works on it.
    """
    path = Path(output).expanduser().absolute()
    if not collectives.is_main():
        with _secondary_directory(path) as work:
            yield work
        return
    work = WorkDirectory(path, resume)
    with locked(path):
        unfinished = (work.folder / JOURNAL).exists()
        if unfinished and not resume and not restart:
            raise CannotResume(f"{output} is unfinished. Pass `resume=True` to continue it, or `restart=True` to start over.")
        try:
            if restart:
                _clear(work.folder)
            collectives.broadcast_object(None)
            yield work
        except BaseException as error:
            _clean_up(work, error, resumable=unfinished and not restart)
            raise
        shutil.rmtree(work.folder, ignore_errors=True)


def _clean_up(work: WorkDirectory, error: BaseException, resumable: bool) -> None:
    """After an error, keep the work directory if it holds results or is `resumable`, else clear it; note which on the error.

    Results are finished blocks and the state of a training.

    `resumable` tells whether there was a journal before; it counts until the journal is read.
    """
    finished = len(work.journal.block_files()) if work.journal else 0
    trained = work.journal.fact(TRAINING_STATE) if work.journal else None
    is_kept = finished or trained or (resumable and work.journal is None)
    if is_kept and not isinstance(error, SourceChanged):  # whose blocks belong to no model
        count = "1 block is" if finished == 1 else f"{finished} blocks are"
        state = f"{count} finished and kept" if finished else "blocks that were finished before are kept"
        if trained and (not finished or trained["value"]["training"] == WHOLE_MODEL):
            state = "the state of the training is kept"
        if not isinstance(error, CannotResume):  # its message names the options
            replacing = " and `overwrite=True`" if (work.output / REPORT).exists() else ""
            error.add_note(f"{state}: pass `resume=True`{replacing} to continue, or `restart=True`{replacing} to start over.")
        return
    _clear(work.folder)
    if isinstance(error, (KeyboardInterrupt, OSError)) and not isinstance(error, SparseLLMError):
        error.add_note("nothing was written")


def _clear(folder: Path) -> None:
    """Remove everything from a work folder except its lock."""
    for path in list(folder.iterdir()) if folder.is_dir() else ():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        elif path.name != LOCK:
            path.unlink()


@contextmanager
def _secondary_directory(path: Path) -> Iterator[WorkDirectory]:
    """The work directory of a process other than the main one, possibly on another machine."""
    collectives.broadcast_object(None)  # the main process holds the lock
    work = WorkDirectory(path, resume=False)
    work.folder.mkdir(parents=True, exist_ok=True)
    try:
        yield work
    finally:
        for folder in (work.folder, path):  # a folder shared with the main process is not empty and stays
            with suppress(OSError):
                folder.rmdir()
