"""Texts by name or path: the data sets of the pruning papers, local files, and the demo text."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from sparsellm.data import demo
from sparsellm.data.json_files import Unreadable, is_text, read_bytes
from sparsellm.errors import BadText, Unreachable, nearest

Split = Literal["calibration", "test"]
Row = tuple[str, object]  # position in a file ("line 3") and value

JOINT = "\n\n"


@dataclass(frozen=True)
class Text:
    """Documents and how they are joined to one stream.

    Attributes:
        documents: The documents, of which at least one is not blank. A hub data set stays on disk and is read one by one.
        joint: Separator of documents in the stream.
        source: Name of the text, for reports.
        rows: Whether the documents are lines of one text, so that calibration sequences come from the stream.
        test_windows: Number of test sequences in the papers' protocol; None for all.
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
    """Location of a named text on the hub, and how the papers' code reads it.

    Attributes:
        path: Repository of the data set.
        parts: The data set's names of the two splits.
        joint: Separator of documents in the stream.
        column: Column that contains the text.
        rows: Whether the documents are lines of one text.
        config: Configuration of the data set.
        revision: Revision of the repository; None for the main branch.
        files: The one file of each split that is read; None for whole splits.
        test_documents: Number of documents of the test split that are read; None for all.
        test_windows: Number of test sequences; None for all.
    """

    path: str
    parts: Mapping[Split, str]
    joint: str = JOINT
    column: str = "text"
    rows: bool = True
    config: str | None = None
    revision: str | None = None
    files: Mapping[Split, str] | None = None
    test_documents: int | None = None
    test_windows: int | None = None


HUB = {
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
        config="wikitext-2-raw-v1",
    ),
    "ptb": HubText(
        "ptb-text-only/ptb_text_only",
        parts={"calibration": "train", "test": "test"},
        joint=" ",
        column="sentence",
        revision="refs/convert/parquet",  # the main branch has a loading script, which `datasets` 4 does not support
    ),
}
NAMES = (*HUB, "demo")


def read_text(name_or_path: str, split: Split, field: str | None = None) -> Text:
    """Read a named text or a local file.

    Names take precedence over files, which need a suffix:

    - .txt: the whole file is one document.
    - .raw: WikiText's raw files, split into the rows of the hub data set, for the papers' protocol without a network.
    - .json: a list of strings, or of objects with `field`.
    - .jsonl: one string or object per line.
    - .parquet: the column `field`.

    Args:
        name_or_path: A name of `NAMES` or a path.
        split: Split of a named text; a local file is used for both splits.
        field: Field or column of a local file that contains the text; None for "text".

    Raises:
        BadText: If the file is missing, empty, malformed or of an unknown type, or all documents are blank.
        Unreachable: If a hub data set is neither cached nor reachable.
    """
    if name_or_path == "demo":
        text = _read_demo(split)
    elif name_or_path in HUB:
        text = _read_from_hub(name_or_path, split)
    else:
        text = _read_from_file(name_or_path, field or "text")
    if not any(document.strip() for document in text.documents):
        raise BadText(f"{text.source} holds no text: all of its {len(text.documents):,} documents are blank.")
    return text


@cache  # collecting it takes seconds, and a sweep reads it for every cell
def _read_demo(split: Split) -> Text:
    """Return the demo text: its models' training split for calibration, the held-out split for tests."""
    part: Literal["train", "held-out"] = "train" if split == "calibration" else "held-out"
    return Text(tuple(demo.named_documents(part).values()), JOINT, f"demo {part}")


def _read_from_hub(name: str, split: Split) -> Text:
    """Read a named data set from the cache or the hub, as the papers' code does."""
    import datasets  # takes a second to import

    source = HUB[name]
    part = source.parts[split]
    options: dict[str, object] = {}
    if source.files:
        # The checks compare with the size of the whole data set, which a single file does not have.
        options |= {"data_files": {part: source.files[split]}, "verification_mode": "no_checks"}
    try:
        with _silence_hub():
            data = datasets.load_dataset(source.path, source.config, split=part, revision=source.revision, **options)
    except Exception as error:  # `datasets` also raises the errors of the hub client's HTTP library
        reason = (str(error).splitlines() or [""])[0].rstrip(".")
        offline = "HF_HUB_OFFLINE is set. " if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0") else ""
        raise Unreachable(
            f"The text {name!r} ({source.path} on the hub) could not be read: {type(error).__name__}: {reason}. {offline}"
            f"Pass a local file ({SUFFIXES}), or 'demo', or read it once with a network to have it cached."
        ) from error
    documents: Sequence[str] = data[source.column]
    if split == "test" and source.test_documents:
        documents = documents[: source.test_documents]
    return Text(documents, source.joint, f"{name} {part}", source.rows, source.test_windows if split == "test" else None)


@contextmanager
def _silence_hub() -> Iterator[None]:
    """Disable progress bars and log messages of the hub libraries within the context."""
    import datasets
    from huggingface_hub import utils

    hub: Any = utils  # these functions are documented, but not exported for type checkers
    with ExitStack() as stack:
        for name, library in (("datasets", datasets), ("huggingface_hub", hub)):
            logger = logging.getLogger(name)
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.CRITICAL)
            if not library.are_progress_bars_disabled():
                stack.callback(library.enable_progress_bars)
                library.disable_progress_bars()
        yield


def _read_from_file(name: str, field: str) -> Text:
    """Read a local file with the reader of its suffix."""
    path = Path(name).expanduser()
    suffix = path.suffix.lower()
    try:
        if path.is_dir():
            raise BadText(f"{path} is a folder. Name one file in it ({SUFFIXES}).")
        if not path.exists():
            if suffix or "/" in name or os.sep in name:
                raise BadText(f"No such file: {path.absolute()}")
            raise BadText(f"No text is called {name!r}. {nearest(name, NAMES)} Or give a path to {SUFFIXES}.")
        if suffix not in READERS:
            raise BadText(f"{path} has the suffix {suffix!r}; a text must be {SUFFIXES}.")
        if not path.is_file() or not path.stat().st_size:  # reading a pipe would block
            raise BadText(f"{path} is {'empty' if path.is_file() else 'not a regular file'}.")
    except OSError as error:
        raise BadText(f"{path} cannot be read: {error.strerror}.") from error
    documents = tuple(_strings(path, READERS[suffix](path, field), field))
    return Text(documents, JOINT, path.name, rows=suffix == ".raw")


def _strings(path: Path, rows: Iterable[Row], field: str) -> Iterator[str]:
    """Yield the text of each row, which is a string or an object with `field`."""
    for position, row in rows:
        if isinstance(row, dict) and field not in row:
            raise _missing_field(f"{path}, {position},", field, row)
        text = row[field] if isinstance(row, dict) else row
        if not isinstance(text, str):
            value = f"a {type(text).__name__}" + (f" in field {field!r}" if isinstance(row, dict) else "")
            raise BadText(f"{path}, {position}, holds {value}; a string, or an object with a string, was expected.")
        if not is_text(text):
            raise BadText(f"{path}, {position}, holds a surrogate, which is not a character. Rewrite the file as UTF-8.")
        yield text


def _missing_field(location: str, field: str, names: Iterable[str]) -> BadText:
    """Build the error for a row or file without a field."""
    fields = ", ".join(repr(name) for name in names) or "none"
    return BadText(f"{location} has no field {field!r}. It has: {fields}. Name the one that holds the text in `text_field`.")


def _decode(path: Path) -> str:
    """Read a UTF-8 file, without a byte order mark and with LF line ends."""
    try:
        return read_bytes(path, None).decode("utf-8").removeprefix("\ufeff").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        byte, line = f"0x{error.object[error.start]:02x}", error.object.count(b"\n", 0, error.start) + 1
        reason = f"is not UTF-8: byte {byte} at position {error.start:,} (line {line:,}). Convert it, for example with iconv."
        raise BadText(f"{path} {reason}") from error
    except Unreadable as error:
        raise BadText(f"{path} cannot be read: {error}.") from error


def _read_txt(path: Path, _: str) -> list[Row]:
    """Return a file as one row."""
    return [("the file", _decode(path))]


def _read_raw(path: Path, _: str) -> list[Row]:
    """Return the lines of a WikiText file with their line ends, blank ones as empty strings; none after the last line end."""
    lines = _decode(path).removesuffix("\n").split("\n")
    return [(f"line {number}", f"{line}\n" if line.strip() else "") for number, line in enumerate(lines, 1)]


def _read_json(path: Path, _: str) -> list[Row]:
    """Return the entries of a JSON list."""
    rows = _parse(path, _decode(path))
    if not isinstance(rows, list):
        raise BadText(f"{path} must hold a list of strings or of objects, got a {type(rows).__name__}.")
    return [(f"entry {number}", row) for number, row in enumerate(rows, 1)]


def _read_jsonl(path: Path, _: str) -> Iterator[Row]:
    """Yield the values of the lines of a JSONL file."""
    for number, line in enumerate(_decode(path).split("\n"), 1):  # splitlines would split at U+2028 in a JSON string
        if line.strip():
            yield f"line {number}", _parse(path, line, number)


def _parse(path: Path, text: str, line: int | None = None) -> Any:
    """Parse a JSON file, or one line of a JSONL file."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        hint = " One object per line is .jsonl: rename the file." if line is None and error.msg == "Extra data" else ""
        raise BadText(f"{path}, line {line or error.lineno}, is not JSON: {error.msg} (column {error.colno}).{hint}") from error
    except (RecursionError, ValueError):
        raise BadText(f"{path} is nested too deeply, or holds a number of thousands of digits (line {line or 1}).") from None


def _read_parquet(path: Path, field: str) -> list[Row]:
    """Return the values of a column of a Parquet file."""
    import pyarrow  # comes with `datasets`
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
        if field not in file.schema_arrow.names:
            raise _missing_field(str(path), field, file.schema_arrow.names)
        column = file.read([field]).column(field).to_pylist()
    except (pyarrow.ArrowException, OSError, UnicodeError) as error:
        raise BadText(f"{path} is not a Parquet file that can be read: {error}") from error
    return [(f"row {number}", text) for number, text in enumerate(column, 1)]


READERS: Mapping[str, Callable[[Path, str], Iterable[Row]]] = {
    ".txt": _read_txt,
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
    ".raw": _read_raw,
}
"""By suffix, the function that reads the rows of a file; its second argument is the field that contains the text."""

SUFFIXES = f"{', '.join([*READERS][:-1])} or {[*READERS][-1]}"
