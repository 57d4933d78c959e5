"""The work directory of an unfinished output, from which a run is resumed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sparsellm.checkpoints.files import REPORT
from sparsellm.checkpoints.stamps import SourceChanged
from sparsellm.errors import CannotResume, SparseLLMError
from sparsellm.methods import WHOLE_MODEL
from sparsellm.outputs.folder import WORK
from sparsellm.outputs.journal import JOURNAL, Journal
from sparsellm.outputs.lock import LOCK, locked, refuse_links, remove
from sparsellm.runtime import collectives
from sparsellm.texts.paths import local_path

TRAINING_STATE = "training"
"""Name under which the journal of a run has the state of its training."""


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
    path = local_path(output).absolute()
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
        if path.name != LOCK:
            remove(path)


@contextmanager
def _secondary_directory(path: Path) -> Iterator[WorkDirectory]:
    """The work directory of a process other than the main one, possibly on another machine."""
    collectives.broadcast_object(None)  # the main process holds the lock
    work = WorkDirectory(path, resume=False)
    refuse_links(path, work.folder)
    work.folder.mkdir(parents=True, exist_ok=True)
    try:
        yield work
    finally:
        for folder in (work.folder, path):  # a folder shared with the main process is not empty and stays
            with suppress(OSError):
                folder.rmdir()
