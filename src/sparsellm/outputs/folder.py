"""Output folders by their names and the files in them, without reading any: whether one is finished, or can be written."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from sparsellm.checkpoints.files import REPORT, UNFINISHED, is_begun
from sparsellm.errors import InvalidSetting
from sparsellm.outputs.lock import WORK as WORK
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


def is_empty(path: Path) -> bool:
    """Whether a path is a folder without anything in it, as a process leaves that is killed as soon as it made it."""
    return path.is_dir() and not any(path.iterdir())


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


def check_report(folder: Path) -> None:
    """Raise InvalidSetting unless a folder has the report of a run."""
    if not (folder / REPORT).is_file():
        reason = f"was not written by sparsellm: it has no {REPORT}" if folder.is_dir() else "is not a folder"
        raise InvalidSetting(f"{folder} {reason}. Name a folder that a run wrote.")


def check_finished(output: str | Path) -> Path:
    """The folder of a finished output. Raises InvalidSetting if it is unfinished, or no output."""
    folder = local_path(output)
    if (folder / WORK).exists():
        raise InvalidSetting(f"{output} {UNFINISHED}")
    check_report(folder)
    return folder


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
