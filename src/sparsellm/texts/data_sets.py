"""Documents of data sets of the library `datasets`: in memory, or in folders that `save_to_disk` wrote."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np

from sparsellm.errors import BadText, first_line
from sparsellm.texts.large_files import LargeRows, LazyDocuments, Sizes
from sparsellm.texts.rows import Conversation, FileRow, document_fields

SAVED_FILES, SAVED_SPLITS = "state.json", "dataset_dict.json"
"""Files of a folder that `save_to_disk` wrote of one data set, and of several splits."""

SPLITS = {"calibration": ("train",), "test": ("test", "validation")}
"""The splits that are read for each purpose, the first that is there."""

ROWS_A_BATCH = 1000


class DataSetRows(LargeRows):
    """Rows of a data set, as mappings from the names of columns.

    Args:
        data: A `datasets.Dataset`.
        names: The columns.
    """

    def __init__(self, data: Any, names: Sequence[str]) -> None:
        self._data, self._first = data.select_columns(list(names)).with_format(None), names[0]

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, number: int) -> FileRow:
        return f"row {number + 1}", self._data[number]

    @cached_property
    def sizes(self) -> Sizes:  # type: ignore[override]
        """(rows,) Characters of the first column of each row."""
        return np.fromiter(self._lengths(), np.int64, len(self._data))

    def _lengths(self) -> Iterator[int]:
        for batch in self._data.iter(ROWS_A_BATCH):
            for value in batch[self._first]:
                yield 0 if value is None else len(value if isinstance(value, str) else str(value))


def read_data_set(data: Any, field: str | None, source: str) -> tuple[Sequence[str | None], Sequence[Conversation | None]]:
    """Return the texts and the conversations of a data set, of which one list is empty; they stay where they are.

    Args:
        data: A `datasets.Dataset`.
        field: Column that holds the documents; None for the first of `sparsellm.texts.rows.FORMS`.
        source: Its name, for errors.

    Raises:
        BadText: There is no such column, it holds something else, or all rows are empty.
    """
    documents = LazyDocuments(source, DataSetRows(data, document_fields(source, data.column_names, field)), field)
    return ((), documents) if documents.conversations else (documents, ())


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
