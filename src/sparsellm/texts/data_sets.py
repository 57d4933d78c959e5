"""Documents that stay on disk: of data sets of the library `datasets`, and of long files."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from tempfile import SpooledTemporaryFile, gettempdir
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from sparsellm.errors import BadText, first_line, plural, written_to
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

Sizes = NDArray[np.int64]


class DataSetDocuments(Sequence[Any]):
    """The documents of a data set, each read when it is used; None for an empty row.

    Args:
        data: A `datasets.Dataset`.
        field: Column that holds the documents; None for the first of `sparsellm.texts.rows.FORMS`.
        source: Its name, for errors.

    Attributes:
        chats: Whether the documents are conversations.

    Raises:
        BadText: There is no such column, it holds something else, or all rows are empty.
    """

    def __init__(self, data: Any, field: str | None, source: str) -> None:
        names = document_fields(source, data.column_names, field)
        self._data, self._column = data.select_columns(names).with_format(None), names[0]
        self._field, self._source = field, source
        first = next((found for number in range(len(data)) if (found := self._read(number)) is not None), None)
        if first is None:
            raise BadText(f"{source} holds no text in its {plural(len(data), 'row')}.")
        self.chats = isinstance(first, Conversation)

    @cached_property
    def sizes(self) -> Sizes:
        """(documents,) Characters of the first column of each row."""
        values = (value for batch in self._data.iter(ROWS_A_BATCH) for value in batch[self._column])
        lengths = (0 if x is None else len(x if isinstance(x, str) else str(x)) for x in values)
        return np.fromiter(lengths, np.int64, len(self._data))

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, number: Any) -> Any:
        number = range(len(self))[number]  # raises an error beyond the end
        document = self._read(number)
        if document is not None and isinstance(document, Conversation) != self.chats:
            kinds = ("text", "chat") if self.chats else ("chat", "text")
            place = f"{self._source}, row {number + 1},"
            raise BadText(f"{place} holds a {kinds[0]}, the first row a {kinds[1]}. Use a data set for each kind.")
        return document

    def _read(self, number: int) -> Document | None:
        return document_of(f"{self._source}, row {number + 1},", self._data[number], self._field)


class StoredDocuments(Sequence[Any]):
    """Documents in memory up to `SHORT` bytes, beyond them in a temporary file without a name, which ends with the process.

    Args:
        documents: Texts or conversations; None for empty rows, which are left out.

    Attributes:
        sizes: (documents,) Characters of each.
        empty: Number of empty rows.
        chats: Whether the documents are conversations.
    """

    def __init__(self, documents: Iterable[Document | None]) -> None:
        self._file = SpooledTemporaryFile(SHORT, prefix="sparsellm-")  # noqa: SIM115  # closed with this object
        self._places: list[int] = []
        self.empty, self.chats = 0, False
        sizes: list[int] = []
        with written_to(gettempdir()):
            for document in documents:
                if document is None:
                    self.empty += 1
                    continue
                self._places.append(self._file.tell())
                sizes.append(document_size(document))
                self.chats = isinstance(document, Conversation)
                plain = [document.messages, document.tools] if isinstance(document, Conversation) else document
                self._file.write(f"{json.dumps(plain, default=str)}\n".encode())
        self.sizes = np.array(sizes, np.int64)

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, number: Any) -> Any:
        self._file.seek(self._places[number])
        document = json.loads(self._file.readline())
        return Conversation(*document) if self.chats else document


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
