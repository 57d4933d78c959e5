"""Pages and plots that commands write beside outputs. They replace earlier ones, and nothing else in silence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from sparsellm.errors import InvalidSetting, OutputExists
from sparsellm.pipeline.output_folder import REPORT, WORK, check_place
from sparsellm.texts.json_files import durable

MARKS = (
    b'<meta name="generator" content="sparsellm">',
    b"<dc:title>sparsellm</dc:title>",
    b"Software\0sparsellm",
)
"""What HTML, SVG and PNG files hold near their start that this package wrote."""

HEAD = 4096
"""Bytes at the start of a file in which a mark stands."""


def check_files(files: Iterable[Path], *, overwrite: bool) -> None:
    """Check that pages or plots can be written.

    Args:
        overwrite: Whether to replace files that sparsellm did not write.

    Raises:
        InvalidSetting: A path is a folder, is inside the output of a run, or cannot be written.
        OutputExists: A file exists that sparsellm did not write.
    """
    for file in files:
        if file.is_dir():
            raise InvalidSetting(f"{file} is a folder. Name a file to write.")
        place = file.absolute()
        check_place(file, place)
        for folder in {*place.parents, *place.resolve().parents}:
            if (folder / REPORT).is_file() or (folder / WORK).exists():
                raise InvalidSetting(f"{file} is inside {folder.name}, the output of a run. Choose a place outside of it.")
        if not overwrite and (file.is_symlink() or file.exists()) and not _is_ours(file):
            raise OutputExists(
                f"{file} exists, and sparsellm did not write it. Choose another name, or pass `overwrite=True` to replace it."
            )


def write_files(contents: Mapping[Path, bytes], *, overwrite: bool) -> None:
    """Write pages or plots once all of them are checked as `check_files` does, in new folders if need be."""
    check_files(contents, overwrite=overwrite)
    for file, content in contents.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        durable(file, content)


def _is_ours(file: Path) -> bool:
    """Whether a file is a page or plot that this package wrote."""
    if file.is_symlink() or not file.is_file():
        return False
    with file.open("rb") as stream:
        head = stream.read(HEAD)
    return any(mark in head for mark in MARKS)
