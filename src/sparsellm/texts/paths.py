"""Paths as users write them, with `~`, and what this machine must have for them."""

from __future__ import annotations

import errno
import tempfile
from contextlib import suppress
from pathlib import Path

from sparsellm.errors import InvalidSetting

TEXT_NAMES = ("c4", "wikitext2", "ptb", "demo")
"""The names of texts."""

TEXT_FILES = ".txt, .json, .jsonl, .csv, .parquet, .raw or .txt.gz"
"""The files that texts are read from, by their suffixes, as help and messages list them; the last is any compressed one."""


def local_path(path: str | Path, *, any_length: bool = False) -> Path:
    """The path with a home folder in place of `~`.

    Raises InvalidSetting if this machine does not know that folder, or for a name that is too long or a link to itself: what
    methods of `Path` raise for these depends on the version of Python. any_length: accept a name that is too long.
    """
    try:
        found = Path(path).expanduser()
    except RuntimeError:
        raise InvalidSetting(
            f"{path} begins with a home folder that this machine does not know. Write the whole path, or set HOME."
        ) from None
    try:
        found.stat()
    except OSError as error:
        if error.errno == errno.ELOOP or (error.errno == errno.ENAMETOOLONG and not any_length):
            raise InvalidSetting(f"{str(path)[:200]} names no file or folder: {error.strerror}. Write another path.") from None
    except ValueError:  # a zero byte, of which each use of the path tells
        pass
    return found


def is_task_file(task: str) -> bool:
    """Whether a task is given by a file with its definition, not by its name."""
    return task.endswith((".yaml", ".yml"))


def home() -> Path | None:
    """The user's home folder; None for a user without one, as in containers."""
    with suppress(RuntimeError):
        return Path.home()
    return None


def check_machine() -> None:
    """Raise InvalidSetting unless this process has a working folder and one for temporary files, which torch needs to start."""
    problem = "The working folder was removed. Change to a folder that exists."
    try:
        Path.cwd()
        problem = "There is no writable folder for temporary files. Set TMPDIR to one."
        tempfile.gettempdir()
    except OSError:
        raise InvalidSetting(problem) from None
