"""Rows of local files, by the suffix of the file."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sparsellm.errors import BadText, first_line
from sparsellm.texts.data_sets import ROWS_A_BATCH
from sparsellm.texts.rows import FileRow, document_fields

MIB = 2**20

PIECE = 2**16
"""Characters from which lines of a long text are a piece of it."""


def suffix_of(path: Path) -> str:
    """Return the suffix that names a file's reader, in lower case; that of a compressed file, such as a.jsonl.gz, is .jsonl."""
    suffix = path.suffix.lower()
    inner = Path(path.stem).suffix.lower()
    return inner if suffix == ".gz" and inner in READERS and inner != ".parquet" else suffix


@contextmanager
def _opened(path: Path) -> Iterator[io.BufferedIOBase]:
    """Open a file, decompressed. Raises BadText where it cannot be read."""
    try:
        with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as stream:
            yield stream
    except (OSError, EOFError, zlib.error) as error:
        raise BadText(f"{path} cannot be read: {first_line(error)}.") from error


def _decode(path: Path, data: bytes, line: int = 1) -> str:
    """Decode UTF-8, from that line of a file on, without a byte-order mark and with LF line ends."""
    try:
        return data.decode("utf-8-sig" if line == 1 else "utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        byte, line = error.object[error.start], line + error.object.count(b"\n", 0, error.start)
        raise BadText(f"{path}, line {line}, is not UTF-8: byte 0x{byte:02x}. Convert it, for example with iconv.") from error


def _lines(path: Path) -> Iterator[str]:
    """Yield the lines of a file with their ends."""
    with _opened(path) as stream:
        for number, line in enumerate(stream, 1):
            yield _decode(path, line, number)


def _whole(path: Path, memory: int | None) -> str:
    """Read a file of at most `memory` bytes."""
    with _opened(path) as stream:
        data = stream.read(-1 if memory is None else memory + 1)
    if memory is not None and len(data) > memory:
        raise BadText(
            f"{path} holds more than {memory // MIB:,} MiB and must be read whole. Store it as .jsonl, of which only what is "
            "used is in memory, or raise `max_memory`."
        )
    return _decode(path, data)


def _read_txt(path: Path, _: str | None, memory: int | None) -> Iterator[FileRow]:
    """Yield pieces of the text: whole lines, but for long ones."""
    parts: list[str] = []
    size = 0
    for line in _lines(path):
        for start in range(0, len(line), PIECE):
            parts.append(line[start : start + PIECE])
            size += len(parts[-1])
            if size >= PIECE:
                yield "", "".join(parts)
                parts, size = [], 0
    if parts:
        yield "", "".join(parts)


def _read_raw(path: Path, _: str | None, memory: int | None) -> Iterator[FileRow]:
    """Yield the lines of a WikiText file with their line ends, blank ones as empty strings; none after the last line end."""
    lines = _whole(path, memory).removesuffix("\n").split("\n")
    yield from ((f"line {number}", f"{line}\n" if line.strip() else "") for number, line in enumerate(lines, 1))


def _read_json(path: Path, _: str | None, memory: int | None) -> Iterator[FileRow]:
    """Yield the entries of a JSON list; or of lines, which some data sets store under this suffix."""
    text = _whole(path, memory)
    if text.startswith("{") and "\n{" in text:
        yield from _read_jsonl(path, None, memory)
        return
    rows = _parsed(path, text)
    if not isinstance(rows, list):
        raise BadText(f"{path} must hold a list of strings or of objects, got a {type(rows).__name__}.")
    yield from ((f"entry {number}", row) for number, row in enumerate(rows, 1))


def _read_jsonl(path: Path, _: str | None, memory: int | None) -> Iterator[FileRow]:
    """Yield the values of lines."""
    for number, line in enumerate(_lines(path), 1):
        if line.strip():
            yield f"line {number}", _parsed(path, line.removesuffix("\n"), number)


def _parsed(path: Path, text: str, line: int | None = None) -> Any:
    """Parse a JSON file, or one line of a JSONL file."""
    try:
        return json.loads(text)
    except (RecursionError, ValueError) as error:  # also for a number of thousands of digits
        place, reason = line or getattr(error, "lineno", 1), getattr(error, "msg", first_line(error))
        raise BadText(f"{path}, line {place}, is not JSON: {reason}.") from error


def _read_parquet(path: Path, field: str | None, memory: int | None) -> Iterator[FileRow]:
    """Yield the rows of a Parquet file, with the columns that hold the documents."""
    import pyarrow  # comes with `datasets`
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            names = document_fields(str(path), file.schema_arrow.names, field)
            rows = (row for batch in file.iter_batches(ROWS_A_BATCH, columns=names) for row in batch.to_pylist())
            yield from ((f"row {number}", row) for number, row in enumerate(rows, 1))
    except (pyarrow.ArrowException, OSError, UnicodeError) as error:
        raise BadText(f"{path} is not a Parquet file that can be read: {error}") from error


def _read_csv(path: Path, field: str | None, memory: int | None) -> Iterator[FileRow]:
    """Yield rows of a CSV file, whose first line names the columns; without `field` the only one will do."""
    reader = csv.reader(_lines(path), strict=True)
    limit = csv.field_size_limit(2**31 - 1)  # for cells of more than 131,072 characters: what fits a C long on every system
    try:
        names = next(reader, [])
        only = field is None and len(names) == 1
        chosen = names if only else document_fields(str(path), names, field)
        places = [names.index(name) for name in chosen]
        for cells in reader:
            if cells and len(cells) != len(names):
                raise BadText(f"{path}, line {reader.line_num}, has {len(cells)} cells, but line 1 names {len(names)}.")
            if cells:
                row: Any = cells[0] if only else {name: cells[place] for name, place in zip(chosen, places, strict=True)}
                yield f"line {reader.line_num}", row
    except csv.Error as error:
        raise BadText(f"{path}, line {reader.line_num}, is not CSV: {error}.") from error
    finally:
        csv.field_size_limit(limit)


READERS: Mapping[str, Callable[[Path, str | None, int | None], Iterator[FileRow]]] = {
    ".txt": _read_txt,
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".csv": _read_csv,
    ".parquet": _read_parquet,
    ".raw": _read_raw,
}
"""By suffix, the function that yields the rows of a file. Its further arguments are the field that holds the documents, and the
most bytes of a file that must be read whole."""
