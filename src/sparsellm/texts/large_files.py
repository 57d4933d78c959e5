"""Rows of large files, each read when it is used: lines of JSON, pieces of a text, and rows of an Arrow table."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparsellm.errors import BadText
from sparsellm.texts.json_files import BOM
from sparsellm.texts.rows import Conversation, Document, FileRow, document_of

SHORT = 2**21
"""Characters, or bytes of a file, up to which a text is read and tokenized as a whole, in about two seconds. Of a longer one
only what is used is read."""

PIECE_BYTES, SEARCHED = 2**16, 2**12
"""Bytes of a piece of a large text, and of its end that is searched for the end of a line."""

SEARCHED_BYTES = 2**24
"""Bytes that are searched for line ends at once."""

Read = Callable[[int, int], bytes]
"""Bytes from the first position up to the second."""

Sizes = NDArray[np.int64]


def file_reader(path: Path) -> Read:
    """Return a function that reads parts of a file, which may be changed or removed meanwhile."""
    descriptor = os.open(path, os.O_RDONLY)

    class _Reader:
        def __call__(self, start: int, stop: int) -> bytes:
            return os.pread(descriptor, stop - start, start)

        def __del__(self) -> None:
            os.close(descriptor)

    return _Reader()


class LargeRows(ABC):
    """Rows that are read one at a time.

    Attributes:
        sizes: (rows,) Size of each, in bytes; places in the text are drawn in proportion.
    """

    sizes: Sizes

    def __len__(self) -> int:
        return len(self.sizes)

    @abstractmethod
    def __getitem__(self, number: int) -> FileRow:
        """Read a row."""


class JsonLines(LargeRows):
    """Lines of JSON.

    Args:
        path: The file, for errors.
        size: Its bytes.
    """

    def __init__(self, path: Path, read: Read, size: int) -> None:
        self._path, self._read = path, read
        ends = [
            np.flatnonzero(np.frombuffer(read(at, min(at + SEARCHED_BYTES, size)), np.uint8) == 10) + at
            for at in range(0, size, SEARCHED_BYTES)
        ]
        stops = np.concatenate([*ends, [size]])
        starts = np.concatenate([[0], stops[:-1] + 1])
        self._lines = np.flatnonzero(stops > starts)  # without those that are empty
        self._starts = starts[self._lines]
        self.sizes = (stops - starts)[self._lines]

    def __getitem__(self, number: int) -> FileRow:
        start = int(self._starts[number])
        line = decode_part(self._path, self._read(start, start + int(self.sizes[number])), start)
        position = int(self._lines[number]) + 1
        return f"line {position}", parse_json(self._path, line, position) if line.strip() else None


class TextPieces(LargeRows):
    """Consecutive pieces of a text, which begin after a line end or before a space where there is one.

    Args:
        path: The file, for errors.
        size: Its bytes.
    """

    def __init__(self, path: Path, read: Read, size: int) -> None:
        self._path, self._read, self._size = path, read, size
        self.sizes = np.diff(np.append(np.arange(0, size, PIECE_BYTES, dtype=np.int64), size))

    def __getitem__(self, number: int) -> FileRow:
        start, stop = self._begin(number), self._begin(number + 1)
        text = decode_part(self._path, self._read(start, stop), start).replace("\r\n", "\n")
        return f"byte {start:,}", text

    def _begin(self, number: int) -> int:
        """The position of a piece's first byte."""
        place = min(number * PIECE_BYTES, self._size)
        if place in (0, self._size):
            return place
        following = self._read(place, place + SEARCHED)
        line, word = following.find(b"\n"), following.find(b" ")
        if line >= 0:
            return place + line + 1
        if word >= 0:
            return place + word
        return place + next(
            (shift for shift, byte in enumerate(following) if byte & 0xC0 != 0x80), 0
        )  # the first of a character


class TableRows(LargeRows):
    """Rows of an Arrow table, as mappings from the names of its columns.

    Args:
        table: A `pyarrow.Table`.
    """

    def __init__(self, table: Any) -> None:
        from pyarrow import compute

        self._table = table
        self.sizes = np.full(len(table), max(1, table.nbytes // max(1, len(table))))
        column = table.column(0)
        if "string" in str(column.type):
            self.sizes = np.nan_to_num(compute.binary_length(column).to_numpy(zero_copy_only=False)).astype(np.int64)

    def __getitem__(self, number: int) -> FileRow:
        return f"row {number + 1}", self._table.slice(number, 1).to_pylist()[0]


class LazyDocuments(Sequence[Any]):
    """The documents of rows, each read when it is used; None for an empty row.

    Args:
        source: The file or the argument that holds the rows, for errors.
        rows: Sequence of rows with their `sizes`.
        field: Field that holds the documents, as for `document_of`.

    Attributes:
        conversations: Whether the documents are chats.

    Raises:
        BadText: All rows are empty.
    """

    def __init__(self, source: str, rows: LargeRows, field: str | None) -> None:
        self._source, self._rows, self._field = source, rows, field
        first = next((found for number in range(len(rows)) if (found := self._read(number)) is not None), None)
        if first is None:
            raise BadText(f"{source} holds no text: all of its {len(rows):,} rows are empty.")
        self.conversations = isinstance(first, Conversation)

    @property
    def sizes(self) -> Sizes:
        """(documents,) Bytes of each."""
        return self._rows.sizes

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[index] for index in range(*number.indices(len(self)))]
        number = range(len(self))[number]  # raises an error beyond the end
        document = self._read(number)
        if document is not None and isinstance(document, Conversation) != self.conversations:
            kinds = ("text", "chat") if self.conversations else ("chat", "text")
            position = self._rows[number][0]
            raise BadText(
                f"{self._source}, {position}, holds a {kinds[0]}, the first row a {kinds[1]}. Use a file for each kind."
            )
        return document

    def _read(self, number: int) -> Document | None:
        position, row = self._rows[number]
        return document_of(f"{self._source}, {position},", row, self._field)


def decode_part(path: Path, data: bytes, start: int) -> str:
    """Decode bytes of a file, without its byte-order mark. Raises BadText with the position of the first invalid byte."""
    try:
        return (data.removeprefix(BOM) if start == 0 else data).decode("utf-8")
    except UnicodeDecodeError as error:
        byte, position = data[error.start], start + error.start
        reason = f"is not UTF-8: byte 0x{byte:02x} at position {position:,}. Convert it, for example with iconv."
        raise BadText(f"{path} {reason}") from error


def parse_json(path: Path, text: str, line: int | None = None) -> Any:
    """Parse a JSON file, or one line of a JSONL file. Raises BadText."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise BadText(f"{path}, line {line or error.lineno}, is not JSON: {error.msg} (column {error.colno}).") from error
    except (RecursionError, ValueError):
        raise BadText(f"{path} is nested too deeply, or holds a number of thousands of digits (line {line or 1}).") from None
