"""The files of a checkpoint as they were when it was opened: readable, and unchanged when its output is complete."""

from __future__ import annotations

import errno
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sparsellm.checkpoints.documents import CONFIG_FILE, DocumentFiles
from sparsellm.checkpoints.files import file_stamp
from sparsellm.errors import BadCheckpoint


class SourceChanged(BadCheckpoint):
    """A checkpoint whose files were changed while something was made from it."""


@dataclass(frozen=True)
class Stamps:
    """Size and time of modification of the files that an output is made from.

    Attributes:
        name: The checkpoint's name as the user wrote it.
        weights: Of the weight files, by path.
        documents: Of config.json and the files that go along, by path.
    """

    name: str
    weights: Mapping[Path, tuple[int, int]]
    documents: Mapping[Path, tuple[int, int]]

    @classmethod
    def of(cls, name: str, folder: Path, weights: Collection[Path], documents: DocumentFiles) -> Stamps:
        """Take the stamps of files that are about to be read.

        Raises:
            BadCheckpoint: A file cannot be read.
        """
        copied = [folder / CONFIG_FILE, *(folder / file for file in documents.copied)]
        for file in (*weights, *copied):
            _check_readable(name, folder, file)
        return cls(name, {file: file_stamp(file) for file in weights}, {file: file_stamp(file) for file in copied})

    @property
    def document_bytes(self) -> int:
        """Bytes of the files besides the weights."""
        return sum(size for size, _ in self.documents.values())

    def check(self, ignored: Collection[str] = ()) -> None:
        """Raise SourceChanged if a file was changed or removed since, other than those of these names."""
        for file, stamp in {**self.weights, **self.documents}.items():
            try:
                is_same = file.name in ignored or file_stamp(file) == stamp
            except OSError:
                is_same = False
            if not is_same:
                raise SourceChanged(
                    f"{self.name} was changed during the run: {file.name} is no longer the file that was opened. "
                    "Run it again when nothing writes to the folder, or on a copy of it."
                )


@contextmanager
def unchanged(*sources: Stamps, ignored: Collection[str] = ()) -> Iterator[None]:
    """Raise SourceChanged if checkpoints were changed within the context, also in place of another error.

    Args:
        ignored: Names of files that do not matter.

    Raises:
        SourceChanged: A checkpoint was changed before the end.
    """

    def check() -> None:
        for source in sources:
            source.check(ignored)

    check()
    try:
        yield
    except Exception:
        check()
        raise
    check()


def _check_readable(name: str, folder: Path, file: Path) -> None:
    """Raise BadCheckpoint unless a file can be copied."""
    try:
        if file.exists() and not file.is_file():
            raise OSError(errno.EINVAL, "a pipe, a socket or a device")  # opening a pipe would wait
        with file.open("rb") as stream:
            stream.read(1)
    except OSError as error:
        shown = file.relative_to(folder)
        raise BadCheckpoint(
            f"{name}: {shown} cannot be read ({error.strerror}). Put a file that can be read in its place, or remove it."
        ) from None
