"""The folder that a run works in, within its output, until that is finished; and who may work there."""

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
    """An output in the making. journal: what is finished of it, once the run is known well enough to say."""

    def __init__(self, output: Path, resume: bool) -> None:
        self.output, self._resume = output, resume
        self.journal: Journal | None = None

    @property
    def folder(self) -> Path:
        """Where the run keeps its files."""
        return self.output / WORK

    def begin(self, fingerprint: Mapping[str, Any]) -> Journal:
        """The journal: a new one, or the one of the run that is resumed. Raises CannotResume where that was another run.

        Of several processes that work together, which all call this, one keeps it for all.
        """
        journal = Journal(self.folder)
        if collectives.is_main():
            resumes = self._resume and journal.file.exists()
            journal = (Journal.resume if resumes else Journal.begin)(self.folder, fingerprint)
        self.journal = journal.share()
        return self.journal


@contextmanager
def work_directory(output: str | Path, resume: bool = False, restart: bool = False) -> Iterator[WorkDirectory]:
    """The work on an output, which no other process may do at the same time.

    resume: go on with an unfinished run, or start where there is none. restart: throw an unfinished run away first.
    Raises CannotResume for an unfinished output when neither is asked for, and for one that another process works on.
    When the context ends by an error and no block is finished, nothing is left; else the error gets a note that says how to
    go on. When it ends well, the output is finished and holds no files of the work.

    Of several processes that work together, which all enter, one does this for all.
    """
    path = Path(output).expanduser().absolute()
    if not collectives.is_main():
        with _following(path) as work:
            yield work
        return
    work = WorkDirectory(path, resume)
    with locked(path):
        begun = (work.folder / JOURNAL).exists()
        if begun and not resume and not restart:
            raise CannotResume(f"{output} is unfinished. Pass --resume to go on with it, or --restart to begin anew.")
        try:
            if restart:
                _emptied(work.folder)
            collectives.broadcast_object(None)
            yield work
        except BaseException as error:
            _end(work, error, kept=begun and not restart)
            raise
        shutil.rmtree(work.folder, ignore_errors=True)


def _end(work: WorkDirectory, error: BaseException, kept: bool) -> None:
    """Keep the work that an error ends where something is finished of it, and say in a note to the error what becomes of it.

    kept: whether there was work before, which counts until the journal says what is finished of it.
    """
    done = len(work.journal.block_files()) if work.journal else 0
    if done or (kept and work.journal is None):
        what = f"{done} blocks are finished and kept" if done else "what was finished before is kept"
        if not isinstance(error, CannotResume):  # which says itself what to pass
            error.add_note(f"{what}: pass --resume to go on, or --restart to begin anew.")
        return
    _emptied(work.folder)
    if isinstance(error, (KeyboardInterrupt, OSError)) and not isinstance(error, SparseLLMError):
        error.add_note("nothing was written")


def _emptied(folder: Path) -> None:
    """Remove everything from a work folder but its lock."""
    for left in list(folder.iterdir()) if folder.is_dir() else ():
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)
        elif left.name != LOCK:
            left.unlink()


@contextmanager
def _following(path: Path) -> Iterator[WorkDirectory]:
    """The work of a process that does not lead: a place for its files, which may be on a machine of its own."""
    collectives.broadcast_object(None)  # the leader has the folder
    work = WorkDirectory(path, resume=False)
    work.folder.mkdir(parents=True, exist_ok=True)
    try:
        yield work
    finally:
        for folder in (work.folder, path):  # where it is the leader's, that one removes it
            with suppress(OSError):
                folder.rmdir()
