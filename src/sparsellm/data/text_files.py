"""Documents of local files: texts or conversations, by the suffix of the file."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sparsellm.data.json_files import Unreadable, is_text, read_bytes
from sparsellm.errors import BadText

Row = tuple[str, object]  # position in a file ("line 3") and value

Conversation = Sequence[Mapping[str, Any]]
"""The messages of a chat, each with its `role` and `content`."""

FIELDS = ("text", "messages")
"""Fields that hold a document, where none is named: the first that a row has."""


def read_documents(path: Path, field: str | None) -> tuple[list[str], list[Conversation]]:
    """Read a file with the reader of its suffix. Returns its texts and its conversations, of which one list is empty.

    Args:
        field: Field or column that holds the documents; None for the first of `FIELDS`, or the only column of a .csv file.

    Raises:
        BadText: If the file is malformed, or holds both texts and conversations.
    """
    return split_documents(str(path), READERS[suffix_of(path)](path, field), field)


def suffix_of(path: Path) -> str:
    """Return the suffix that names a file's reader, in lower case; that of a compressed file, such as a.jsonl.gz, is .jsonl."""
    suffix = path.suffix.lower()
    inner = Path(path.stem).suffix.lower()
    return inner if suffix == ".gz" and inner in READERS and inner != ".parquet" else suffix


def split_documents(source: str, rows: Iterable[Row], field: str | None) -> tuple[list[str], list[Conversation]]:
    """Return the texts and the conversations of rows, of which one list is empty.

    Args:
        source: The file or the argument that holds the rows, for errors.
        rows: Each a text, a conversation, or an object with either in a field.
        field: The field; None for the first of `FIELDS`.

    Raises:
        BadText: If a row has no such field or holds something else, or if there are both texts and conversations.
    """
    texts: list[str] = []
    conversations: list[Conversation] = []
    for position, row in rows:
        location = f"{source}, {position},"
        value, name = row, None
        if isinstance(row, Mapping):
            name = choose_field(location, row, field)
            value = row[name]
        if isinstance(value, str):
            if not is_text(value):
                raise BadText(f"{location} holds a surrogate, which is not a character. Rewrite the file as UTF-8.")
            texts.append(value)
        elif isinstance(value, (list, tuple)) and value and all(isinstance(x, Mapping) and "role" in x for x in value):
            conversations.append(value)
        else:
            place = f"a {type(value).__name__}" + (f" in field {name!r}" if name else "")
            expected = "a string, or the messages of a chat, each with `role` and `content`, was expected"
            raise BadText(f"{location} holds {place}; {expected}.")
        if texts and conversations:
            kind = "text" if isinstance(value, str) else "chat"
            raise BadText(f"{location} holds a {kind}, unlike the rows before it. Use a file for each kind.")
    return texts, conversations


def choose_field(location: str, names: Iterable[str], field: str | None, known: Sequence[str] = FIELDS) -> str:
    """Return the field that holds a document: `field`, or the first of `known` that is among the names.

    Raises:
        BadText: If it is not there.
    """
    found = next((name for name in ([field] if field else known) if name in names), None)
    if found is None:
        missing, fields = f"{location} has no field {field or known[0]!r}.", ", ".join(map(repr, names)) or "none"
        raise BadText(f"{missing} It has: {fields}. Name the one that holds the text, or chats, in `text_field`.")
    return found


def _decode(path: Path) -> str:
    """Read a UTF-8 file, decompressed, without a byte order mark and with LF line ends."""
    try:
        data = read_bytes(path, None)
        if path.suffix.lower() == ".gz":
            data = gzip.decompress(data)
        return data.decode("utf-8").removeprefix("\ufeff").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        byte, line = f"0x{error.object[error.start]:02x}", error.object.count(b"\n", 0, error.start) + 1
        reason = f"is not UTF-8: byte {byte} at position {error.start:,} (line {line:,}). Convert it, for example with iconv."
        raise BadText(f"{path} {reason}") from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise BadText(f"{path} is not a gzip file that can be read: {error}") from error
    except Unreadable as error:
        raise BadText(f"{path} cannot be read: {error}.") from error


def _read_raw(path: Path, _: str | None) -> list[Row]:
    """Return the lines of a WikiText file with their line ends, blank ones as empty strings; none after the last line end."""
    lines = _decode(path).removesuffix("\n").split("\n")
    return [(f"line {number}", f"{line}\n" if line.strip() else "") for number, line in enumerate(lines, 1)]


def _read_json(path: Path, _: str | None) -> list[Row]:
    """Return the entries of a JSON list; or of lines, which some data sets store under this suffix."""
    text = _decode(path)
    if text.startswith("{") and "\n{" in text:
        return list(_lines(path, text))
    rows = _parse(path, text)
    if not isinstance(rows, list):
        raise BadText(f"{path} must hold a list of strings or of objects, got a {type(rows).__name__}.")
    return [(f"entry {number}", row) for number, row in enumerate(rows, 1)]


def _lines(path: Path, text: str) -> Iterator[Row]:
    """Yield the values of the lines of a JSONL file's text."""
    for number, line in enumerate(text.split("\n"), 1):  # splitlines would split at U+2028 in a JSON string
        if line.strip():
            yield f"line {number}", _parse(path, line, number)


def _parse(path: Path, text: str, line: int | None = None) -> Any:
    """Parse a JSON file, or one line of a JSONL file."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise BadText(f"{path}, line {line or error.lineno}, is not JSON: {error.msg} (column {error.colno}).") from error
    except (RecursionError, ValueError):
        raise BadText(f"{path} is nested too deeply, or holds a number of thousands of digits (line {line or 1}).") from None


def _read_parquet(path: Path, field: str | None) -> list[Row]:
    """Return the values of a column of a Parquet file."""
    import pyarrow  # comes with `datasets`
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
        name = choose_field(str(path), file.schema_arrow.names, field)
        column = file.read([name]).column(name).to_pylist()
    except (pyarrow.ArrowException, OSError, UnicodeError) as error:
        raise BadText(f"{path} is not a Parquet file that can be read: {error}") from error
    return [(f"row {number}", text) for number, text in enumerate(column, 1)]


def _read_csv(path: Path, field: str | None) -> list[Row]:
    """Return the values of a column of a CSV file, whose first line names the columns; without `field` the only one will do."""
    reader = csv.reader(io.StringIO(_decode(path)), strict=True)
    rows: list[Row] = []
    try:
        with _unlimited_cells():
            names = next(reader, [])
            column = 0 if field is None and len(names) == 1 else names.index(choose_field(str(path), names, field))
            for cells in reader:
                if cells and len(cells) != len(names):
                    raise BadText(f"{path}, line {reader.line_num}, has {len(cells)} cells, but line 1 names {len(names)}.")
                rows += [(f"line {reader.line_num}", cells[column])] if cells else []
    except csv.Error as error:
        raise BadText(f"{path}, line {reader.line_num}, is not CSV: {error}.") from error
    return rows


@contextmanager
def _unlimited_cells() -> Iterator[None]:
    """Within the context, let the csv module read cells of more than 131,072 characters."""
    limit = csv.field_size_limit(2**31 - 1)  # what fits a C long on every system
    try:
        yield
    finally:
        csv.field_size_limit(limit)


READERS: Mapping[str, Callable[[Path, str | None], Iterable[Row]]] = {
    ".txt": lambda path, _: [("the file", _decode(path))],
    ".json": _read_json,
    ".jsonl": lambda path, _: _lines(path, _decode(path)),
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".raw": _read_raw,
}
"""By suffix, the function that reads the rows of a file; its second argument is the field that holds the documents."""

SUFFIXES = f"{', '.join([*READERS][:-1])} or {[*READERS][-1]}"
