"""Texts by name or path: the data sets of the pruning papers, local files, and the demo text."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from sparsellm.errors import BadText, Unreachable, nearest
from sparsellm.texts import demo
from sparsellm.texts.data_sets import SHORT, DataSetDocuments, StoredDocuments, is_saved, open_saved
from sparsellm.texts.json_files import IS_POINTER, LFS_POINTER
from sparsellm.texts.paths import TEXT_FILES, TEXT_NAMES, local_path
from sparsellm.texts.rows import Document, row_documents
from sparsellm.texts.text_files import READERS, suffix_of

TextUse = Literal["calibration", "test"]

JOINT = "\n\n"

SHOWN_CHARACTERS, LONGEST_NAME = 60, 255
"""Characters of a string that a message shows, and that the name of a file has at most on common file systems."""


@dataclass(frozen=True)
class Text:
    """Documents and how they are joined to one stream.

    Attributes:
        documents: The documents, of which at least one is not blank. Those of a data set and of a long file stay on disk and
            are read one by one; None stands for an empty row of a data set.
        source: Name of the text, for reports.
        rows: Whether the documents are lines or pieces of one text, so that calibration sequences come from the stream.
        test_windows: Number of test sequences in the papers' protocol; None for all.
        chats: Whether the documents are conversations, which the chat template of a tokenizer writes.
        published: Whether it is a text of the papers, which their code divides into sequences in its own way.
        empty: Number of empty rows that are left out.
    """

    documents: Sequence[Document | None]
    joint: str
    source: str
    rows: bool = False
    test_windows: int | None = None
    chats: bool = False
    published: bool = False
    empty: int = 0

    @property
    def stream(self) -> str:
        """All documents as one string."""
        return self.joint.join(document for document in self.documents if isinstance(document, str))


@dataclass(frozen=True)
class HubText:
    """Location of a named text on the hub, and how the papers' code reads it.

    Attributes:
        path: Repository of the data set.
        parts: The data set's names of the two splits.
        column: Column that contains the text.
        rows: Whether the documents are lines of one text.
        config: Configuration of the data set.
        revision: Revision of the repository; None for the main branch.
        files: The one file of each split that is read; None for whole splits.
        test_documents: Number of documents of the test split that are read; None for all.
        test_windows: Number of test sequences; None for all.
    """

    path: str
    parts: Mapping[TextUse, str]
    joint: str = JOINT
    column: str = "text"
    rows: bool = True
    config: str | None = None
    revision: str | None = None
    files: Mapping[TextUse, str] | None = None
    test_documents: int | None = None
    test_windows: int | None = None


HUB_TEXTS = {
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


def read_text(name_or_path: str, split: TextUse, field: str | None = None, *, memory: int | None = None) -> Text:
    """Read a named text, a local file, or a folder that `datasets.save_to_disk` wrote.

    Names take precedence over files, which need a suffix:

    - .txt: the whole file is one document.
    - .raw: WikiText's raw files, split into the rows of the hub data set, for the papers' protocol without a network.
    - .json: a list of strings, conversations, or objects with `field`.
    - .jsonl: one of these per line.
    - .csv and .parquet: the column `field`.

    All but .parquet may be compressed: .txt.gz. `sparsellm.texts.rows` has the forms of conversations. Empty rows are left out.
    More than `sparsellm.texts.data_sets.SHORT` characters are copied to a temporary file, of which only what is used is in
    memory; a .txt file is then one text in pieces.

    Args:
        name_or_path: A name of `TEXT_NAMES` or a path.
        split: Split of a named text, or of a folder with several; a local file is used for both splits.
        field: Field or column of a local file that holds the documents; None for the first of `sparsellm.texts.rows.FORMS`, or
            the only column of a .csv file.
        memory: Most bytes of a .json or .raw file, which is read whole; None for no limit.

    Raises:
        BadText: If the file is missing, empty, malformed or of an unknown type, or all documents are blank.
        Unreachable: If a hub data set is neither cached nor reachable.
    """
    if name_or_path == "demo":
        text = _read_demo(split)
    elif name_or_path in HUB_TEXTS:
        text = _read_from_hub(name_or_path, split)
    elif is_saved(path := local_path(name_or_path)):
        text = data_set_text(open_saved(path, split), field, str(path), path.name)
    else:
        text = _read_from_file(name_or_path, field, memory)
    if not any(x.strip() if isinstance(x, str) else x for x in text.documents):
        count = len(text.documents) + text.empty
        raise BadText(f"{text.source} holds no text: all of its {count:,} documents are blank.")
    return text


def data_set_text(data: Any, field: str | None, place: str, source: str) -> Text:
    """Return the text of a `datasets.Dataset`, whose rows stay where they are.

    Args:
        field: Column that holds the documents; None for the first of `sparsellm.texts.rows.FORMS`.
        place: Its path or the argument that it is, for errors.
        source: Its name, for reports.

    Raises:
        BadText: There is no such column, it holds something else, or all rows are empty.
    """
    documents = DataSetDocuments(data, field, place)
    return Text(documents, JOINT, source, chats=documents.chats)


def is_name(string: str) -> bool:
    """Whether a string is the name of a text, or a path: it has the suffix of a text, or something is there."""
    try:
        path = Path(string).expanduser()
        return string in TEXT_NAMES or suffix_of(path) in READERS or path.exists()
    except (OSError, ValueError, RuntimeError):
        return False


@cache  # collecting it takes seconds, and a sweep reads it for every cell
def _read_demo(split: TextUse) -> Text:
    """Return the demo text: its models' training split for calibration, the held-out split for tests."""
    part: Literal["train", "held-out"] = "train" if split == "calibration" else "held-out"
    return Text(tuple(demo.named_documents(part).values()), JOINT, f"demo {part}")


def _read_from_hub(name: str, split: TextUse) -> Text:
    """Read a named data set from the cache or the hub, as the papers' code does."""
    import datasets  # takes a second to import

    source = HUB_TEXTS[name]
    part = source.parts[split]
    options: dict[str, object] = {}
    if source.files:
        # The checks compare with the size of the whole data set, which a single file does not have.
        options |= {"data_files": {part: source.files[split]}, "verification_mode": "no_checks"}
    try:
        with _silence_hub():
            data = datasets.load_dataset(source.path, source.config, split=part, revision=source.revision, **options)
    except MemoryError:
        raise
    except Exception as error:  # `datasets` also raises the errors of the hub client's HTTP library
        reason = (str(error).splitlines() or [""])[0].rstrip(".")
        offline = "HF_HUB_OFFLINE is set. " if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0") else ""
        raise Unreachable(
            f"The text {name!r} ({source.path} on the hub) could not be read: {type(error).__name__}: {reason}. {offline}"
            f"Pass a local file, {TEXT_FILES}, or 'demo', or read it once with a network to have it cached."
        ) from error
    documents: Sequence[str] = data[source.column]
    if split == "test" and source.test_documents:
        documents = documents[: source.test_documents]
    windows = source.test_windows if split == "test" else None
    return Text(documents, source.joint, f"{name} {part}", source.rows, windows, published=True)


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


def _read_from_file(name: str, field: str | None, memory: int | None) -> Text:
    """Read a local file."""
    path = _checked(name)
    suffix = suffix_of(path)
    rows = READERS[suffix](path, field, memory)
    if suffix == ".raw":
        return Text([str(line) for _, line in rows], JOINT, path.name, rows=True, published=True)
    if suffix == ".txt":
        pieces = StoredDocuments(str(piece) for _, piece in rows)
        if pieces.sizes.sum() > SHORT:
            return Text(pieces, "", path.name, rows=True)
        return Text(["".join(pieces)], JOINT, path.name)
    documents = StoredDocuments(row_documents(str(path), rows, field))
    return Text(documents, JOINT, path.name, chats=documents.chats, empty=documents.empty)


def check_text(name_or_path: str) -> None:
    """Check what `read_text` is given, without reading it. Raises BadText for a file that is missing, empty or unreadable."""
    if name_or_path not in TEXT_NAMES and not is_saved(local_path(name_or_path, any_length=True)):
        _checked(name_or_path)


def _checked(name: str) -> Path:
    """The path of a file that can be read and has a reader. Raises BadText."""
    path = local_path(name, any_length=True)
    suffix, shown = suffix_of(path), _shortened(name)
    try:
        if not path.exists():
            is_path = len(name.split()) == 1 and (suffix or "/" in name or os.sep in name)
            if suffix in READERS or is_path:
                missing = path.absolute() if shown == name else shown
                raise BadText(f"There is no file {missing}. Give a path to {TEXT_FILES}, or the name of a text.")
            raise BadText(f"No text is called {shown!r}. {nearest(shown, TEXT_NAMES)} Or give a path to {TEXT_FILES}.")
        if reason := _unusable(path, suffix):
            raise BadText(f"{path} {reason}. A text must be {TEXT_FILES}, or a folder that save_to_disk wrote.")
        return path
    except OSError as error:
        why = "it is too long for a name" if error.errno == errno.ENAMETOOLONG else error.strerror
        raise BadText(f"{shown!r} cannot be read: {why}. Give a path to {TEXT_FILES}, or the name of a text.") from error


def _unusable(path: Path, suffix: str) -> str:
    """Why a path that exists is no file of text; empty if it is one."""
    if path.is_dir():
        return "is a folder"
    if suffix not in READERS:
        return f"has the suffix {suffix!r}"
    if not path.is_file() or not path.stat().st_size:  # reading a pipe would block
        return "is empty" if path.is_file() else "is not a regular file"
    with path.open("rb") as stream:
        return IS_POINTER if stream.read(len(LFS_POINTER)) == LFS_POINTER else ""


def _shortened(name: str) -> str:
    """A name to show in a message, cut after 60 characters if it is a sentence, or longer than the name of a file may be."""
    return (
        name
        if len(name) <= (LONGEST_NAME if len(name.split()) == 1 else SHOWN_CHARACTERS)
        else f"{name[: SHOWN_CHARACTERS - 1]}…"
    )
