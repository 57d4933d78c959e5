"""Documents of local files: texts or conversations, by the suffix of the file."""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsellm.errors import BadText
from sparsellm.texts.json_files import Unreadable, read_bytes
from sparsellm.texts.large_files import (
    SHORT,
    JsonLines,
    LargeRows,
    LazyDocuments,
    TableRows,
    TextPieces,
    file_reader,
    parse_json,
)
from sparsellm.texts.rows import Conversation, FileRow, document_fields, split_documents

MIB = 2**20


@dataclass(frozen=True)
class FileDocuments:
    """The documents of a file: texts or conversations.

    Attributes:
        texts: None for an empty row of a large file.
        empty: Number of empty rows that are left out; those of a large file are counted when they are drawn.
        pieces: Whether the texts are parts of one text.
    """

    texts: Sequence[str | None]
    conversations: Sequence[Conversation | None] = ()
    empty: int = 0
    pieces: bool = False


def read_documents(path: Path, field: str | None, memory: int | None = None) -> FileDocuments:
    """Read a file with the reader of its suffix; of a large .txt, .jsonl or .parquet file, only what is used later.

    Args:
        field: Field or column that holds the documents; None for the first of `sparsellm.texts.rows.FORMS`, or the only column
            of a .csv file.
        memory: Most bytes of a file of another kind, decompressed; None for no limit.

    Raises:
        BadText: The file is malformed, too large, or holds both texts and conversations.
    """
    suffix = suffix_of(path)
    rows = READERS[suffix](path, field, memory)
    if suffix in (".txt", ".raw"):
        if isinstance(rows, LargeRows):
            return FileDocuments(LazyDocuments(str(path), rows, None), pieces=True)
        return FileDocuments([str(text) for _, text in rows])
    if isinstance(rows, LargeRows):
        documents = LazyDocuments(str(path), rows, field)
        return FileDocuments(() if documents.conversations else documents, documents if documents.conversations else ())
    return FileDocuments(*split_documents(str(path), rows, field))


def suffix_of(path: Path) -> str:
    """Return the suffix that names a file's reader, in lower case; that of a compressed file, such as a.jsonl.gz, is .jsonl."""
    suffix = path.suffix.lower()
    inner = Path(path.stem).suffix.lower()
    return inner if suffix == ".gz" and inner in READERS and inner != ".parquet" else suffix


def _bytes(path: Path, limit: int | None) -> bytes:
    """Read a file, decompressed, of at most `limit` bytes."""
    try:
        if limit is not None and path.stat().st_size > limit:
            raise _too_large(path, limit)
        data = read_bytes(path, None)
        if path.suffix.lower() == ".gz":
            with gzip.open(io.BytesIO(data)) as stream:
                data = stream.read(-1 if limit is None else limit + 1)
            if limit is not None and len(data) > limit:
                raise _too_large(path, limit)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise BadText(f"{path} is not a gzip file that can be read: {error}") from error
    except Unreadable as error:
        raise BadText(f"{path} cannot be read: {error}.") from error
    return data


def _too_large(path: Path, limit: int) -> BadText:
    packed = path.suffix.lower() == ".gz"
    advice = "Decompress it" if packed and suffix_of(path) in (".txt", ".jsonl") else "Store it as .jsonl"
    return BadText(
        f"{path} holds more than {limit // MIB:,} MiB{' decompressed' if packed else ''}, and must be read whole. "
        f"{advice}: of a .txt, .jsonl or .parquet file, only what is used is read. Or raise `max_memory`."
    )


def _decode(path: Path, data: bytes) -> str:
    """Decode UTF-8, without a byte order mark and with LF line ends."""
    try:
        return data.decode("utf-8").removeprefix("\ufeff").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        byte, line = f"0x{error.object[error.start]:02x}", error.object.count(b"\n", 0, error.start) + 1
        reason = f"is not UTF-8: byte {byte} at position {error.start:,} (line {line:,}). Convert it, for example with iconv."
        raise BadText(f"{path} {reason}") from error


def _read_txt(path: Path, _: str | None, memory: int | None) -> Iterable[FileRow] | LargeRows:
    """Return the whole file as one row; pieces of it if it is large."""
    if path.suffix.lower() != ".gz" and (size := path.stat().st_size) > SHORT:
        return TextPieces(path, file_reader(path), size)
    data = _bytes(path, memory)
    if len(data) > SHORT:
        return TextPieces(path, lambda start, stop: data[start:stop], len(data))
    return [("the file", _decode(path, data))]


def _read_raw(path: Path, _: str | None, memory: int | None) -> list[FileRow]:
    """Return the lines of a WikiText file with their line ends, blank ones as empty strings; none after the last line end."""
    lines = _decode(path, _bytes(path, memory)).removesuffix("\n").split("\n")
    return [(f"line {number}", f"{line}\n" if line.strip() else "") for number, line in enumerate(lines, 1)]


def _read_json(path: Path, _: str | None, memory: int | None) -> list[FileRow] | LargeRows:
    """Return the entries of a JSON list; or of lines, which some data sets store under this suffix."""
    text = _decode(path, _bytes(path, memory))
    if text.startswith("{") and "\n{" in text:
        return list(_lines(path, text))
    rows = parse_json(path, text)
    if not isinstance(rows, list):
        raise BadText(f"{path} must hold a list of strings or of objects, got a {type(rows).__name__}.")
    return [(f"entry {number}", row) for number, row in enumerate(rows, 1)]


def _read_jsonl(path: Path, _: str | None, memory: int | None) -> Iterable[FileRow] | LargeRows:
    """Return the values of lines."""
    if path.suffix.lower() != ".gz" and (size := path.stat().st_size) > SHORT:
        return JsonLines(path, file_reader(path), size)
    data = _bytes(path, memory)
    if len(data) > SHORT:
        return JsonLines(path, lambda start, stop: data[start:stop], len(data))
    return _lines(path, _decode(path, data))


def _lines(path: Path, text: str) -> Iterator[FileRow]:
    """Yield the values of the lines of a JSONL file's text."""
    for number, line in enumerate(text.split("\n"), 1):  # splitlines would split at U+2028 in a JSON string
        if line.strip():
            yield f"line {number}", parse_json(path, line, number)


def _read_parquet(path: Path, field: str | None, memory: int | None) -> list[FileRow] | LargeRows:
    """Return the rows of a Parquet file, with the columns that hold the documents."""
    import pyarrow  # comes with `datasets`
    from pyarrow import parquet

    try:
        names = document_fields(str(path), parquet.ParquetFile(path).schema_arrow.names, field)
        table = parquet.read_table(path, columns=names, memory_map=True)
        if memory is not None and table.nbytes > memory:
            raise BadText(
                f"{path} holds {table.nbytes // MIB:,} MiB in {', '.join(names)}. Raise `max_memory`, or name a part."
            )
        if table.nbytes > SHORT:
            table.validate(full=True)
            return TableRows(table)
        rows = table.to_pylist()
    except (pyarrow.ArrowException, OSError, UnicodeError) as error:
        raise BadText(f"{path} is not a Parquet file that can be read: {error}") from error
    return [(f"row {number}", row) for number, row in enumerate(rows, 1)]


def _read_csv(path: Path, field: str | None, memory: int | None) -> list[FileRow]:
    """Return rows of a CSV file, whose first line names the columns; without `field` the only one will do."""
    reader = csv.reader(io.StringIO(_decode(path, _bytes(path, memory))), strict=True)
    rows: list[FileRow] = []
    try:
        with _unlimited_cells():
            names = next(reader, [])
            only = field is None and len(names) == 1
            chosen = names if only else document_fields(str(path), names, field)
            places = [names.index(name) for name in chosen]
            for cells in reader:
                if cells and len(cells) != len(names):
                    raise BadText(f"{path}, line {reader.line_num}, has {len(cells)} cells, but line 1 names {len(names)}.")
                if cells:
                    row: Any = cells[0] if only else {name: cells[place] for name, place in zip(chosen, places, strict=True)}
                    rows.append((f"line {reader.line_num}", row))
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


READERS: Mapping[str, Callable[[Path, str | None, int | None], Iterable[FileRow] | LargeRows]] = {
    ".txt": _read_txt,
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".raw": _read_raw,
}
"""By suffix, the function that reads the rows of a file. Its further arguments are the field that holds the documents, and the
most bytes of a file that must be read whole."""
