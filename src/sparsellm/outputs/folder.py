"""The folder of an output: whether it is finished or can be written, its lock, and its atomic replacement."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from sparsellm.checkpoints.files import REPORT, UNFINISHED, WORK, is_begun
from sparsellm.errors import CannotResume, InvalidSetting, OutputExists
from sparsellm.texts.json_files import is_text
from sparsellm.texts.paths import local_path

CARD = "README.md"
"""The model card, which users may edit."""

LOG = "sparsellm-log.jsonl"
"""Name of the log file, in the work folder and in the output."""

SCALES_FILE = "quantization.scales"
"""The scales of rounded weights. It has the format of safetensors, but another suffix: vLLM takes every file with that suffix
for weights."""

ANEW = (CARD, REPORT, SCALES_FILE)
"""Files of a model that everything made from it has in a form of its own."""

SWEEP = "sweep.json"
"""Name of the file that makes a folder that of a sweep."""


LOCK = "lock"
"""Lock file in the work folder; the operating system releases it when the process that holds it ends."""

EXPORT = "export"
"""Subfolder of the work folder in which the finished checkpoint is written before it replaces the output."""

REPLACED = "replaced"
"""File in the work folder with the name to which the output is moved while it is replaced: a folder of that name is ours."""


def check_place(output: str | Path, path: Path) -> Path:
    """The folder that is to hold a file or folder, or the part of its path that exists. Raises InvalidSetting if it cannot."""
    parent = next(folder for folder in path.parents if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise InvalidSetting(f"{output} cannot be written: {parent} is not a writable folder.")
    return parent


def check_name(output: str | Path, path: Path) -> None:
    """Raise InvalidSetting for a name that is too long for the file system or is not UTF-8."""
    if not is_text(path.name):
        raise InvalidSetting(f"{str(output)!r} is not UTF-8 text. Choose another output.")
    try:
        path.lstat()
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            reason = f"the name {path.name[:40]}… has {len(os.fsencode(path.name))} bytes, more than the file system allows"
            raise InvalidSetting(f"{output} cannot be written: {reason}. Choose a name that is 20 bytes shorter.") from None
        raise


def is_finished(output: str | Path) -> bool:
    """Whether a run wrote this folder completely."""
    path = local_path(output)
    return (path / REPORT).is_file() and not (path / WORK).exists()


def files_outside_work(path: Path) -> set[str]:
    """Relative paths of all files in an output and its subfolders, but for its work folder; of a file its name."""
    if not path.is_dir():
        return {path.name}
    files = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_symlink() or not file.is_dir()}
    return {name for name in files if not name.startswith(f"{WORK}/")}


def folder_path(output: str | Path) -> Path:
    """The path of what a run wrote. Raises InvalidSetting for anything but a path, such as a model in memory."""
    if not isinstance(output, (str, Path)):
        raise InvalidSetting(
            f"A folder that a run wrote is needed, got {type(output).__name__}. "
            "Write the result of a run with save_pretrained, which verifies what it writes, and pass the folder."
        )
    return local_path(output)


def is_sweep(folder: str | Path) -> bool:
    """Whether a folder is the folder of a sweep."""
    return (Path(folder) / SWEEP).is_file()


def check_results(folder: str | Path) -> Path:
    """The folder of a run or a sweep as a path. Raises InvalidSetting if it is neither."""
    path = folder_path(folder)
    if not is_sweep(path) and not (path / REPORT).is_file():
        problem = f"holds no run or sweep: it has no {REPORT}" if path.is_dir() else "does not exist"
        advice = "Give the output folder of a run or a sweep."
        raise InvalidSetting(f"{folder} {UNFINISHED if is_begun(path) else f'{problem}. {advice}'}")
    return path


def free_disk(folder: Path) -> int:
    """Bytes that are free where a folder is or would be."""
    path = local_path(folder).absolute()
    return shutil.disk_usage(next(parent for parent in (path, *path.parents) if parent.exists())).free


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
        OutputExists: The work folder is a link, or holds one.
    """
    path = _normalized_path(output)
    refuse_links(path, path / WORK)
    lock = FileLock(path / WORK / LOCK, timeout=0, is_singleton=True)
    if lock.is_locked:
        yield path
        return
    recover_output(path)
    removable = not path.exists() or (path / WORK).exists()
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


def refuse_links(output: Path, folder: Path) -> None:
    """Raise OutputExists if a folder of an output is a link or holds one: what it leads to is not the output's."""
    if link := first_link(folder):
        raise OutputExists(
            f"{output} holds {link.relative_to(output)}, a link, which sparsellm did not write. "
            "Move it away yourself, or choose another output."
        )


def first_link(folder: Path) -> Path | None:
    """Return the folder if it is a link, else the first link in it and its subfolders, if there is one."""
    if folder.is_symlink():
        return folder
    for parent, folders, files in os.walk(folder):
        if links := [path for name in sorted([*folders, *files]) if (path := Path(parent, name)).is_symlink()]:
            return links[0]
    return None


def recover_output(output: str | Path) -> None:
    """Clean up after a process that was killed while it moved a finished output into place (see `replacing`).

    A finished output that has no name yet is moved back, with what it replaces, to the name of the output; if there is
    something else by now, it stays where it is. What is left of a replaced output is removed.

    Raises:
        CannotResume: A running process is moving the output.
    """
    path = _normalized_path(output)
    replaced = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}\.old")
    for old in sorted(path.parent.iterdir()) if path.parent.is_dir() else ():
        if replaced.fullmatch(old.name):
            with suppress(FileNotFoundError):  # another process cleans up at the same time
                _recover_replaced(old, path)


def _recover_replaced(old: Path, path: Path) -> None:
    """Move the finished output in `old` to its name, or remove what is left of a replaced one; nothing for a user's folder."""
    if not _was_replaced(old):
        return
    lock = FileLock(old / WORK / LOCK, timeout=0)
    try:
        if (old / WORK / LOCK).exists():  # otherwise its removal was interrupted
            _acquire(lock, path)
        if not (old / WORK / EXPORT).exists():
            _remove_replaced(old)
        elif not path.exists():
            old.rename(path)
            (path / WORK / REPLACED).unlink()
    except CannotResume:
        if not path.exists():
            raise
    finally:
        lock.release()


def _was_replaced(folder: Path) -> bool:
    """Whether `replacing` gave a folder its name: it says so, or nothing is left in it."""
    if first_link(folder):
        return False
    mark = folder / WORK / REPLACED
    if mark.is_file():
        return mark.read_bytes() == folder.name.encode()
    return folder.is_dir() and all(path.is_dir() for path in folder.rglob("*"))


def _remove_replaced(folder: Path) -> None:
    """Remove a replaced output, last the file that says what it is, so that the next process can go on."""
    work = folder / WORK
    for path in [*folder.glob("*"), *work.glob("*")]:
        if path not in (work, work / REPLACED):
            remove(path)
    shutil.rmtree(work, ignore_errors=True)
    shutil.rmtree(folder, ignore_errors=True)


def remove(path: Path) -> None:
    """Remove a file, a link or a folder."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


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
            (path / WORK / REPLACED).write_bytes(old.name.encode())
            path.rename(old)
            try:
                (old / WORK / EXPORT).rename(path)
            except BaseException:
                if not path.exists():
                    old.rename(path)
                raise
        except BaseException:
            remove(export)
            (path / WORK / REPLACED).unlink(missing_ok=True)
            raise
        _remove_replaced(old)


def aside(path: Path) -> Path:
    """Random name in the same folder to which an output is moved while it is replaced."""
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.old")


def _normalized_path(output: str | Path) -> Path:
    """Absolute path of an output, with links in its parent resolved."""
    path = local_path(output).absolute()
    return path.parent.resolve() / path.name


def _acquire(lock: FileLock, path: Path) -> None:
    """Acquire a lock without waiting, in a folder that is made where it is missing, or raise CannotResume."""
    with not_moved(path):
        Path(lock.lock_file).parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()


@contextmanager
def not_moved(path: Path) -> Iterator[None]:
    """Context that reads an output which another process may be moving or removing: raises CannotResume if it does."""
    try:
        yield
    except (Timeout, FileNotFoundError):
        raise CannotResume(f"Another process is working on {path}. Wait for it, or choose another output.") from None


def _remove_stale(work: Path) -> None:
    """Remove an unfinished export and offloaded activations of an earlier process."""
    from sparsellm.runtime.offload import ACTIVATIONS  # imports torch

    for entry in work.iterdir():
        if entry.name in (EXPORT, REPLACED) or entry.name.startswith(ACTIVATIONS):
            remove(entry)
