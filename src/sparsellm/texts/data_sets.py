"""Documents that stay on disk: of data sets of the library `datasets`, and of long files, in a file that it memory-maps."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from sparsellm.errors import BadText, first_line, written_to
from sparsellm.texts.rows import Conversation, Document, document_fields, document_of, document_size

SHORT = 2**21
"""Characters up to which a text is kept in memory and tokenized as a whole, in about two seconds. A longer one stays on disk,
and only what is used is tokenized."""

SAVED_FILES, SAVED_SPLITS = "state.json", "dataset_dict.json"
"""Files of a folder that `save_to_disk` wrote of one data set, and of several splits."""

SPLITS = {"calibration": ("train",), "test": ("test", "validation")}
"""The splits that are read for each purpose, the first that is there."""

ROWS_A_BATCH = 1000
"""Rows of a data set that are read at once for their sizes."""

WRITTEN_AT_ONCE = 100
"""Documents that are held in memory while a long file is read."""

Sizes = NDArray[np.int64]


class DataSetDocuments(Sequence[Any]):
    """The documents of a data set, each read when it is used; None for an empty row.

    Args:
        data: A `datasets.Dataset`.
        field: Column that holds the documents; None for the first of `sparsellm.texts.rows.FORMS`.
        source: Its name, for errors.

    Attributes:
        conversations: Whether the documents are chats.

    Raises:
        BadText: There is no such column, it holds something else, or all rows are empty.
    """

    def __init__(self, data: Any, field: str | None, source: str) -> None:
        names = document_fields(source, data.column_names, field)
        self._data, self._column = data.select_columns(names).with_format(None), names[0]
        self._field, self._source = field, source
        first = next((found for number in range(len(data)) if (found := self._read(number)) is not None), None)
        if first is None:
            raise BadText(f"{source} holds no text: all of its {len(data):,} rows are empty.")
        self.conversations = isinstance(first, Conversation)

    @cached_property
    def sizes(self) -> Sizes:
        """(documents,) Characters of the first column of each row."""
        return np.fromiter(self._lengths(), np.int64, len(self._data))

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, number: Any) -> Any:
        number = range(len(self))[number]  # raises an error beyond the end
        document = self._read(number)
        if document is not None and isinstance(document, Conversation) != self.conversations:
            kinds = ("text", "chat") if self.conversations else ("chat", "text")
            place = f"{self._source}, row {number + 1},"
            raise BadText(f"{place} holds a {kinds[0]}, the first row a {kinds[1]}. Use a data set for each kind.")
        return document

    def _read(self, number: int) -> Document | None:
        return document_of(f"{self._source}, row {number + 1},", self._data[number], self._field)

    def _lengths(self) -> Iterator[int]:
        for batch in self._data.iter(ROWS_A_BATCH):
            for value in batch[self._column]:
                yield 0 if value is None else len(value if isinstance(value, str) else str(value))


class StoredDocuments(Sequence[Any]):
    """Documents in a temporary file, which is memory-mapped and has no name, so that it ends with the process at the latest.

    The readers of `datasets` are not used: they take dates for times, and "NA" in a .csv file for nothing.

    Args:
        documents: Texts or conversations; None for empty rows, which are left out.

    Attributes:
        sizes: (documents,) Characters of each.
        empty: Number of empty rows.
    """

    def __init__(self, documents: Iterable[Document | None]) -> None:
        import datasets  # takes a second to import
        import pyarrow

        sizes: list[int] = []
        self.empty, self._chats = 0, False

        def strings() -> Iterator[str]:
            for document in documents:
                if document is None:
                    self.empty += 1
                    continue
                sizes.append(document_size(document))
                if isinstance(document, Conversation):
                    self._chats = True
                    yield json.dumps([document.messages, document.tools], default=str)
                else:
                    yield document

        schema = pyarrow.schema({"document": pyarrow.large_string()})
        remaining = strings()
        with TemporaryDirectory(prefix="sparsellm-", ignore_cleanup_errors=True) as folder:
            file = Path(folder) / "documents.arrow"
            with written_to(file), pyarrow.OSFile(str(file), "wb") as stream, pyarrow.ipc.new_stream(stream, schema) as writer:
                while batch := list(islice(remaining, WRITTEN_AT_ONCE)):
                    writer.write_batch(pyarrow.record_batch({"document": batch}, schema=schema))
            self._data = datasets.Dataset.from_file(str(file))
        self.sizes = np.array(sizes, np.int64)

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, number: Any) -> Any:
        string = self._data[number]["document"]
        return Conversation(*json.loads(string)) if self._chats else string


def keep_documents(documents: Iterable[Document | None]) -> tuple[Sequence[Any], int]:
    """Keep documents in a list, or on disk if they have more than `SHORT` characters.

    Args:
        documents: Texts or conversations, each made when it is asked for; None for empty rows.

    Returns:
        The documents without the empty ones, and the number of these.
    """
    remaining, found, size = iter(documents), list[Document | None](), 0
    for document in remaining:
        found.append(document)
        size += document_size(document)
        if size > SHORT:
            stored = StoredDocuments(chain(found, remaining))
            return stored, stored.empty
    kept = [document for document in found if document is not None]
    return kept, len(found) - len(kept)


def is_saved(path: Path) -> bool:
    """Whether a path is a folder that `save_to_disk` wrote."""
    try:
        return (path / SAVED_FILES).is_file() or (path / SAVED_SPLITS).is_file()
    except (OSError, ValueError):
        return False


def open_saved(path: Path, split: Literal["calibration", "test"]) -> Any:
    """Open a folder that `save_to_disk` wrote.

    Args:
        split: What it is read for, where it has several splits.

    Raises:
        BadText: It cannot be read, or has none of the splits.
    """
    import datasets  # takes a second to import

    try:
        data = datasets.load_from_disk(str(path))
    except MemoryError:
        raise
    except Exception as error:  # of many kinds, for files that are damaged
        raise BadText(f"{path} is not a data set that can be read: {first_line(error)}.") from error
    if not isinstance(data, datasets.DatasetDict):
        return data
    found = next((name for name in SPLITS[split] if name in data), None)
    if found is None and len(data) == 1:
        found = next(iter(data))
    if found is None:
        have, wanted = ", ".join(map(repr, data)), " or ".join(map(repr, SPLITS[split]))
        raise BadText(f"{path} has the splits {have}, none of them {wanted}. Name the folder of one split.")
    return data[found]
