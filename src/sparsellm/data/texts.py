"""Texts by name or path: the data sets of the pruning papers, local files, and the demo's own."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from sparsellm.data.json_files import Unreadable, is_text, read_bytes
from sparsellm.errors import BadText, Unreachable, nearest

Split = Literal["calibration", "test"]
Row = tuple[str, object]  # where in a file ("line 3"), and what stands there

FIELD = "text"
JOINT = "\n\n"


@dataclass(frozen=True)
class Text:
    """Documents, and how they make one stream.

    documents: at least one is not blank. A hub's data set stays on disk and is read document by document.
    joint: what stands between two documents in the stream. source: where they are from, for reports.
    rows: the documents are the lines of one text, so calibration windows come from the stream, never from one document.
    test_windows: how many windows a test takes by the papers' protocol; None takes all.
    """

    documents: Sequence[str]
    joint: str
    source: str
    rows: bool = False
    test_windows: int | None = None

    @property
    def stream(self) -> str:
        """All documents as one string."""
        return self.joint.join(self.documents)


@dataclass(frozen=True)
class HubText:
    """Where a named text is on the hub, and how the papers' codes read it.

    parts: the data set's own names of the two splits. files: the one file read of a split, where not the whole split is.
    """

    path: str
    parts: Mapping[Split, str]
    joint: str
    column: str = FIELD
    rows: bool = True
    config: str | None = None
    revision: str | None = None
    files: Mapping[Split, str] | None = None
    test_documents: int | None = None
    test_windows: int | None = None


HUB = MappingProxyType({
    "c4": HubText(
        "allenai/c4",
        parts={"calibration": "train", "test": "validation"},
        joint=" ",
        rows=False,
        files={"calibration": "en/c4-train.00000-of-01024.json.gz", "test": "en/c4-validation.00000-of-00008.json.gz"},
        test_documents=1100,
        test_windows=256,
    ),
    "wikitext2": HubText(
        "Salesforce/wikitext",
        parts={"calibration": "train", "test": "test"},
        joint="\n\n",
        config="wikitext-2-raw-v1",
    ),
    "ptb": HubText(
        "ptb-text-only/ptb_text_only",
        parts={"calibration": "train", "test": "test"},
        joint=" ",
        column="sentence",
        revision="refs/convert/parquet",  # the main branch is a script, which `datasets` 4 no longer runs
    ),
})  # fmt: skip
NAMES = (*HUB, "demo")


def read_text(name_or_path: str, split: Split, field: str | None = None) -> Text:
    """The text of a name out of `NAMES`, or of a local file; at least one of its documents is not blank.

    A name comes before a file of that name (a file needs its suffix, so it never shadows one). By suffix:

    - .txt: the whole file is one document.
    - .raw: WikiText's raw files, row by row as the hub's data set holds them: the papers' protocol, without a network.
    - .json: a list of strings, or of objects with `field`. .jsonl: one of these a line. .parquet: the column `field`.

    split: which part of a named data set; a file has only one, read for either.
    field: where the text stands in a file's objects or columns; None is "text". Strings need none, nor do named data sets.

    Raises `BadText` for what is missing, empty, malformed or of another kind, and `Unreachable` for a hub's data set that
    is neither cached nor reachable.
    """
    if name_or_path == "demo":
        text = _demo(split)
    elif name_or_path in HUB:
        text = _from_hub(name_or_path, split)
    else:
        text = _from_file(name_or_path, field or FIELD)
    if not any(document.strip() for document in text.documents):
        raise BadText(f"{text.source} holds no text: all of its {len(text.documents):,} documents are blank.")
    return text


@cache
def _demo(split: Split) -> Text:
    """The demo's own text: what its models were trained on to calibrate, what they never saw to test.

    Kept, since it takes seconds to gather and a sweep asks for it in every cell.
    """
    from sparsellm.data.demo.text import documents

    part: Literal["train", "held-out"] = "train" if split == "calibration" else "held-out"
    try:
        return Text(tuple(documents(part)), JOINT, f"demo {part}")
    except FileNotFoundError as error:  # a Python without its library's sources
        raise BadText(str(error)) from error


def _from_hub(name: str, split: Split) -> Text:
    """A named data set, cached or downloaded, read as the papers' codes do."""
    import datasets  # a second that only named texts need

    known = HUB[name]
    part = known.parts[split]
    options: dict[str, object] = {}
    if known.files:
        # One file is less than the data set says of itself, which the checks would take for a broken download.
        options |= {"data_files": {part: known.files[split]}, "verification_mode": "no_checks"}
    try:
        with _quiet():
            data = datasets.load_dataset(known.path, known.config, split=part, revision=known.revision, **options)
    except Exception as error:  # beside its own errors `datasets` lets through those of the hub client's HTTP library
        reason = (str(error).splitlines() or [""])[0].rstrip(".")
        offline = "HF_HUB_OFFLINE is set. " if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0") else ""
        raise Unreachable(
            f"The text {name!r} ({known.path} on the hub) could not be read: {type(error).__name__}: {reason}. {offline}"
            f"Pass a local file ({_join_words(READERS)}), or `demo`, or read it once with a network to have it cached."
        ) from error
    documents: Sequence[str] = data[known.column]
    if split == "test" and known.test_documents:
        documents = documents[: known.test_documents]
    return Text(documents, known.joint, f"{name} {part}", known.rows, known.test_windows if split == "test" else None)


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bar and no log line of the hub's libraries while the body runs."""
    import datasets
    from huggingface_hub import utils

    hub: Any = utils  # its switches are public and documented, but not marked as exported
    loggers = [logging.getLogger(name) for name in ("datasets", "huggingface_hub")]
    levels = [logger.level for logger in loggers]
    switches: list[tuple[bool, Callable[[], object], Callable[[], object]]] = [
        (datasets.are_progress_bars_disabled(), datasets.disable_progress_bars, datasets.enable_progress_bars),
        (hub.are_progress_bars_disabled(), hub.disable_progress_bars, hub.enable_progress_bars),
    ]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        for disabled, disable, _ in switches:
            if not disabled:
                disable()
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        for disabled, _, enable in switches:
            if not disabled:
                enable()


def _from_file(name: str, field: str) -> Text:
    """A local file, read by its suffix."""
    path = Path(name).expanduser()
    suffix = path.suffix.lower()
    try:
        if path.is_dir():
            raise BadText(f"{path} is a folder. Name one file in it ({_join_words(READERS)}).")
        if not path.exists():
            if suffix or "/" in name or os.sep in name:
                raise BadText(f"No such file: {path.absolute()}")
            raise BadText(f"No text is called {name!r}. {nearest(name, NAMES)} Or give a path to {_join_words(READERS)}.")
        if suffix not in READERS:
            raise BadText(f"{path} has the suffix {suffix!r}; a text must be {_join_words(READERS)}.")
        if not path.is_file() or not path.stat().st_size:  # a pipe would be waited for
            raise BadText(f"{path} is {'empty' if path.is_file() else 'not a regular file'}.")
    except OSError as error:
        raise BadText(f"{path} cannot be read: {error.strerror}.") from error
    documents = tuple(_strings(path, READERS[suffix](path, field), field))
    return Text(documents, JOINT, path.name, rows=suffix == ".raw")


def _strings(path: Path, rows: Iterable[Row], field: str) -> Iterator[str]:
    """The text of each row: the row itself, or its `field`."""
    for place, row in rows:
        if isinstance(row, dict) and field not in row:
            raise _no_field(f"{path}, {place},", field, row)
        text = row[field] if isinstance(row, dict) else row
        if not isinstance(text, str):
            what = f"a {type(text).__name__}" + (f" in field {field!r}" if isinstance(row, dict) else "")
            raise BadText(f"{path}, {place}, holds {what}; a string, or an object with a string, was expected.")
        if not is_text(text):
            raise BadText(f"{path}, {place}, holds a surrogate, which is no character. Write the file anew as UTF-8.")
        yield text


def _no_field(where: str, field: str, there: Iterable[str]) -> BadText:
    fields = ", ".join(repr(name) for name in there) or "none"
    return BadText(f"{where} has no field {field!r}. It has: {fields}. Name the one that holds the text (--text-field).")


def _decoded(path: Path) -> str:
    """A file as text, its line ends made plain ones and a byte order mark dropped."""
    try:
        return read_bytes(path, None).decode("utf-8").removeprefix("\ufeff").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        byte, line = f"0x{error.object[error.start]:02x}", error.object.count(b"\n", 0, error.start) + 1
        why = f"is not UTF-8: byte {byte} at position {error.start:,} (line {line:,}). Convert it, for example with iconv."
        raise BadText(f"{path} {why}") from error
    except Unreadable as error:
        raise BadText(f"{path} cannot be read: {error}.") from error


def _txt(path: Path, _: str) -> list[Row]:
    return [("the file", _decoded(path))]


def _raw(path: Path, _: str) -> list[Row]:
    """WikiText's rows: a line keeps its end, a blank one is empty, and nothing follows the last line's end."""
    lines = _decoded(path).removesuffix("\n").split("\n")
    return [(f"line {number}", f"{line}\n" if line.strip() else "") for number, line in enumerate(lines, 1)]


def _json(path: Path, _: str) -> list[Row]:
    rows = _value(path, _decoded(path))
    if not isinstance(rows, list):
        raise BadText(f"{path} must hold a list of strings or of objects, got a {type(rows).__name__}.")
    return [(f"entry {number}", row) for number, row in enumerate(rows, 1)]


def _jsonl(path: Path, _: str) -> Iterator[Row]:
    for number, line in enumerate(_decoded(path).split("\n"), 1):  # not splitlines: U+2028 may stand in a JSON string
        if line.strip():
            yield f"line {number}", _value(path, line, number)


def _value(path: Path, text: str, line: int | None = None) -> Any:
    """The value of a file of JSON, or of one line of it."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        hint = " One object a line is .jsonl: rename the file." if line is None and error.msg == "Extra data" else ""
        raise BadText(f"{path}, line {line or error.lineno}, is not JSON: {error.msg} (column {error.colno}).{hint}") from error
    except (RecursionError, ValueError):
        raise BadText(f"{path} is nested too deeply, or holds a number of thousands of digits (line {line or 1}).") from None


def _parquet(path: Path, field: str) -> list[Row]:
    import pyarrow  # comes with `datasets`
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
        if field not in file.schema_arrow.names:
            raise _no_field(str(path), field, file.schema_arrow.names)
        column = file.read([field]).column(field).to_pylist()
    except (pyarrow.ArrowException, OSError, UnicodeError) as error:
        raise BadText(f"{path} is not a Parquet file that can be read: {error}") from error
    return [(f"row {number}", text) for number, text in enumerate(column, 1)]


READERS: Mapping[str, Callable[[Path, str], Iterable[Row]]] = MappingProxyType({
    ".txt": _txt,
    ".json": _json,
    ".jsonl": _jsonl,
    ".parquet": _parquet,
    ".raw": _raw,
})  # fmt: skip


def _join_words(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} or {last}"
