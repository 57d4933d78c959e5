"""The folder that a run works in, within its output, until that is finished; and who may work there."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from torch import Tensor

from sparsellm import distributed
from sparsellm.checkpoint import Checkpoint, Loaded
from sparsellm.errors import CannotResume
from sparsellm.inspection import WORK
from sparsellm.journal import JOURNAL, Journal
from sparsellm.recipe import Recipe
from sparsellm.relay import Relay

LOCK = "lock"
"""The file that tells other processes that one is at work; the system releases it when that one ends, however it ends."""

NOT_DECISIVE = ("memory", "stream", "evaluate", "evaluate_limit", "prompt", "task", "task_data", "task_limit")
"""Fields of a recipe that may differ when a run goes on: they do not change the weights."""


class Work:
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
        if distributed.leads():
            resumes = self._resume and (self.folder / JOURNAL).exists()
            self.journal = (Journal.resume if resumes else Journal.begin)(self.folder, fingerprint)
        return Relay(self.folder, self.journal) if self.journal is None or distributed.world() > 1 else self.journal


@contextmanager
def working(output: str | Path, resume: bool = False, restart: bool = False) -> Iterator[Work]:
    """The work on an output, which no other process may do at the same time.

    resume: go on with an unfinished run, or start where there is none. restart: throw an unfinished run away first.
    Raises CannotResume for an unfinished output when neither is asked for, and for one that another process works on.
    When the context ends by an error and no block is finished, nothing is left; else the error gets a note that says how to
    go on. When it ends well, the output is finished and holds no files of the work.

    Of several processes that work together, which all enter, one does this for all.
    """
    path = Path(output).expanduser().absolute()
    if not distributed.leads():
        with _following(path) as work:
            yield work
        return
    _recover(path)
    work, there = Work(path, resume), path.exists()
    begun = (work.folder / JOURNAL).exists()
    if begun and not resume and not restart:
        raise CannotResume(f"{output} is unfinished. Pass --resume to go on with it, or --restart to begin anew.")
    work.folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(work.folder / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise CannotResume(f"Another process works on {output}. Wait for it, or choose another output.") from None
    try:
        for left in work.folder.iterdir():
            if left.name != LOCK and (restart or left.name.startswith("activations-")):
                shutil.rmtree(left) if left.is_dir() else left.unlink()
        distributed.agreed(None)
        yield work
    except BaseException as error:
        done = len(work.journal.block_files()) if work.journal else 0
        if done:
            error.add_note(f"{done} blocks are finished and kept: pass --resume to go on, or --restart to begin anew.")
        elif not begun or restart or work.journal:
            shutil.rmtree(work.folder, ignore_errors=True)
            if not there:
                with suppress(OSError):
                    path.rmdir()
        raise
    finally:
        lock.release()
    shutil.rmtree(work.folder, ignore_errors=True)


@contextmanager
def _following(path: Path) -> Iterator[Work]:
    """The work of a process that does not lead: a place for its files, which may be on a machine of its own."""
    distributed.agreed(None)  # the leader has the folder
    work = Work(path, resume=False)
    work.folder.mkdir(parents=True, exist_ok=True)
    try:
        yield work
    finally:
        for folder in (work.folder, path):  # where it is the leader's, that one removes it
            with suppress(OSError):
                folder.rmdir()


def fingerprint(recipe: Recipe, source: Checkpoint | Loaded, windows: Tensor, environment: Mapping[str, str]) -> dict[str, Any]:
    """What must be the same for a run to go on: recipe, model files, calibration tokens, and the versions and machine.

    How many processes and threads there are may differ: sums then round otherwise, which is told.
    """
    told = {f"recipe.{name}": value for name, value in recipe.model_dump(mode="json").items() if name not in NOT_DECISIVE}
    if isinstance(source, Checkpoint):
        told |= files_told(source)
        if source.architecture is not None:
            told["architecture"] = repr(source.architecture)
    told["calibration tokens"] = tokens_told(windows)
    return told | {f"environment.{name}": value for name, value in environment.items() if name != "threads"}


def files_told(source: Checkpoint) -> dict[str, Any]:
    """What tells a model's files from others: sizes, times, and what they begin with."""
    stats = {file: file.stat() for file in source.files()}
    return {f"file {file.name}": [stat.st_size, stat.st_mtime_ns, _head(file)] for file, stat in stats.items()}


def tokens_told(windows: Tensor) -> str:
    """A digest of token numbers."""
    return hashlib.blake2b(windows.numpy().tobytes(), digest_size=16).hexdigest()


def _head(file: Path) -> str:
    """A digest of a file's first MiB: its header, and the beginning of its tensors."""
    with file.open("rb") as stream:
        return hashlib.blake2b(stream.read(2**20), digest_size=16).hexdigest()


def _recover(path: Path) -> None:
    """Put an unfinished output back where it was, if a crash came between the two renames that finish one."""
    if not path.exists():
        for old in path.parent.glob(f".{path.name}.*.old"):
            if (old / WORK).is_dir():
                old.rename(path)
                return
