"""The work directory of a run, inside its output folder, locked against other processes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sparsellm.errors import CannotResume, SparseLLMError
from sparsellm.pruning.journal import JOURNAL, Journal
from sparsellm.runs.inspection import WORK
from sparsellm.runs.output_lock import LOCK, locked
from sparsellm.runtime import collectives


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
        output: Folder of the output.
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
            raise CannotResume(f"{output} is unfinished. Pass --resume to continue it, or --restart to start over.")
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
    """After an error, keep the work directory if any block is finished or `resumable`, else clear it; note which on the error.

    `resumable` tells whether there was a journal before; it counts until the journal is read.
    """
    finished = len(work.journal.block_files()) if work.journal else 0
    if finished or (resumable and work.journal is None):
        state = f"{finished} blocks are finished and kept" if finished else "blocks that were finished before are kept"
        if not isinstance(error, CannotResume):  # its message names the options
            error.add_note(f"{state}: pass --resume to continue, or --restart to start over.")
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
