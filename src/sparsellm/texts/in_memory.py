"""Calibration and test data given in Python: texts, conversations, token ids, padded batches, data sets and data loaders."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsellm.errors import BadText
from sparsellm.texts.padding import pad
from sparsellm.texts.rows import FORMS, Conversation, document_fields, row_documents
from sparsellm.texts.texts import JOINT, LONGEST_NAME, Text, data_set_text, is_name

CalibrationData = Tensor | Mapping[str, Any] | Iterable[Any]
"""Any of the forms that `read_in_memory` takes."""

Given = Mapping[str, Any]
"""Data in place of a recipe's texts, by the field: "calibration", or "evaluate" with data, or the name of a text, by name."""

SOURCE = "given in memory"

IDS = ("input_ids",)

EXPECTED_DATA = (
    "Pass texts, conversations, token ids of shape (samples, length), a dict with `input_ids` and `attention_mask`, a list of "
    "these, a data set or a data loader."
)


def is_plain_text(value: object) -> bool:
    """Whether a value is a text and cannot be the name of one, or a path: a string with a line break, or a long one."""
    if not isinstance(value, str):
        return False
    return len(value.split()) > 1 and ("\n" in value.strip() or max(map(len, value.split("/"))) > LONGEST_NAME)


def given_text(value: str | Path | CalibrationData | None) -> tuple[str | None, CalibrationData | None]:
    """A recipe's `calibration`, and the data that replace it, if they are given in memory."""
    if is_plain_text(value):
        return SOURCE, [value]
    if value is None or isinstance(value, (str, Path)):
        return (None if value is None else str(value)), None
    return SOURCE, value


def given_texts(
    value: str | Path | Sequence[str | Path] | CalibrationData | None, field: str | None = None
) -> tuple[tuple[str, ...], dict[str, Any] | None]:
    """A recipe's `evaluate`, and the data that replace it by name, if they are given in memory.

    Strings in a list are names and paths if one is that of a text or of a file, or all are single words. Else they are texts.
    A mapping without `field` or another field of documents holds texts, or data, by name.
    """
    fields = {field, *(x for form in (IDS, *FORMS) for x in form)}
    if isinstance(value, Mapping) and value and not hasattr(value, "column_names") and not fields & set(value):
        return tuple(map(str, value)), {str(name): [x] if is_plain_text(x) else x for name, x in value.items()}
    if isinstance(value, (list, tuple)) and all(isinstance(item, (str, Path)) for item in value):
        names = tuple(map(str, value))
        are_texts = any(len(name.split()) != 1 for name in names) and not any(map(is_name, names))
        return ((SOURCE,), {SOURCE: names}) if are_texts else (names, None)
    text, given = given_text(value)
    return (() if text is None else (text,)), None if given is None else {SOURCE: given}


def read_in_memory(
    data: CalibrationData,
    field: str | None = None,
    *,
    samples: int | None,
    seed: int | None,
    what: str = "`calibration`",
    source: str = SOURCE,
) -> Text | Tensor:
    """Read data of any of these forms:

    - token ids: a tensor or array of shape (samples, length) or (length,), or a list of such;
    - padded batches: a dict with `input_ids`, and with the `attention_mask` that tells tokens from padding, or a list of such;
    - texts, conversations (lists of messages with `role` and `content`), or objects with either in a field, in a list;
    - a `datasets.Dataset` with a column of token ids, texts or conversations: `input_ids`, or as `field`;
    - a data loader, or another iterable, of the above, of which the first `samples` sequences or documents are read.

    Args:
        data: The data. Token ids in tensors, dicts and lists are all used.
        field: Field or column of the documents; None for `input_ids`, "text" or "messages".
        samples: Most sequences that are read from a data set or an iterable; None for all.
        seed: Seed for drawing rows of a data set with token ids; None for its first rows.
        what: What the data are, for messages.
        source: Name of the text, for reports.

    Returns:
        Documents; or token ids, (samples, longest) int64, `PADDING` after the end of shorter sequences.

    Raises:
        BadText: If the data has none of these forms, is empty, or an attention mask does not fit.
    """
    if hasattr(data, "column_names"):
        data = _rows(data, field, what, samples=samples, seed=seed, source=source)
        if isinstance(data, Text):
            return data
    items, limit = _items(data, what), None if isinstance(data, (Tensor, Mapping, np.ndarray, list, tuple)) else samples
    sequences: list[Tensor] = []
    documents: list[tuple[str, Any]] = []
    for number, item in enumerate(items, 1):
        position = f"entry {number}"
        if _holds_tokens(item) and not (isinstance(item, Mapping) and field != "input_ids" and field in item):
            sequences += _sequences(item, f"{what}, {position},")
        else:
            documents += [(position, document) for document in _collated(item, field, what)]
        if sequences and documents:
            raise BadText(f"{what} holds both token ids and other data ({position}: {type(item).__name__}). {EXPECTED_DATA}")
        if limit is not None and len(sequences) + len(documents) >= limit:
            break
    if sequences:
        return pad(sequences[:limit])
    found = list(row_documents(what, documents[:limit], field))
    kept = [document for document in found if document is not None]
    if not kept:
        raise BadText(f"{what} holds no text: a {type(data).__name__} of {len(found):,} blank documents. {EXPECTED_DATA}")
    return Text(kept, JOINT, source, chats=isinstance(kept[0], Conversation), empty=len(found) - len(kept))


def _items(data: CalibrationData, what: str) -> Iterator[Any]:
    """Iterate over the items of data; a tensor or a dict is one item."""
    if isinstance(data, (Tensor, Mapping, np.ndarray)):
        return iter([data])
    if isinstance(data, str) or not isinstance(data, Iterable):
        raise BadText(f"{what} is a {type(data).__name__}. {EXPECTED_DATA}")
    return iter(data)


def _rows(data: Any, field: str | None, what: str, *, samples: int | None, seed: int | None, source: str) -> Any:
    """Return the documents of a `datasets.Dataset`, which stay on disk, or rows of its token ids at random places."""
    names = data.column_names
    if isinstance(names, Mapping):
        splits = ", ".join(map(repr, names))
        raise BadText(f"{what} has the splits {splits}. Pass one of them, such as data[{next(iter(names))!r}].")
    if not hasattr(data, "__len__"):  # streamed: its rows are read in their order
        return islice(data, samples)
    name = document_fields(what, names, field, (IDS, *FORMS))[0]
    if len(data) == 0:
        return []
    if name == "input_ids":
        order = torch.arange(len(data))
        if seed is not None:
            order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))
        columns = [column for column in (name, "attention_mask") if column in names]
        return [{column: row[column] for column in columns} for row in (data[number] for number in order[:samples].tolist())]
    return data_set_text(data, field, what, source)


def _holds_tokens(item: Any) -> bool:
    """Return whether an item holds token ids."""
    if isinstance(item, (list, tuple)) and item:
        return isinstance(item[0], int) or _holds_tokens(item[0])
    return isinstance(item, (Tensor, np.ndarray)) or (isinstance(item, Mapping) and "input_ids" in item)


def _collated(item: Any, field: str | None, what: str) -> list[Any]:
    """Return the documents of an item: several if a data loader collated their strings to a list."""
    if isinstance(item, Mapping):
        names = document_fields(f"A dict of {what}", item, field, (IDS, *FORMS))
        value = item[names[0]]
        collated = isinstance(value, (list, tuple)) and value and all(isinstance(document, str) for document in value)
        if len(names) > 1 or not collated:
            return [item]
        item = value
    is_batch = isinstance(item, (list, tuple)) and item and all(isinstance(document, str) for document in item)
    return list(item) if is_batch else [item]


def _sequences(item: Any, location: str) -> list[Tensor]:
    """Return the sequences of token ids, (tokens,) each, of an item, without padding."""
    if isinstance(item, (list, tuple)) and isinstance(item[0], (Tensor, np.ndarray)):  # from a `TensorDataset`
        if len(item) > 1:
            raise BadText(f"{location} holds {len(item)} tensors. Pass a dict with `input_ids` and `attention_mask`.")
        item = item[0]
    ids = item["input_ids"] if isinstance(item, Mapping) else item
    rows, mask = _integer_rows(ids), item.get("attention_mask") if isinstance(item, Mapping) else None
    if not rows or any(len(row) and int(row.min()) < 0 for row in rows):
        raise BadText(
            f"{location} must be integers of shape (samples, length), none of them negative, got {_shape(ids)}. Mark padding "
            "by zeros in an `attention_mask`."
        )
    if mask is None:
        return rows
    masks = _integer_rows(mask)
    if masks is None or [len(row) for row in masks] != [len(row) for row in rows]:
        raise BadText(f"{location} has `input_ids` of shape {_shape(ids)}, but an `attention_mask` of shape {_shape(mask)}.")
    return [row[_span(row_mask, location)] for row, row_mask in zip(rows, masks, strict=True)]


def _integer_rows(value: Any) -> list[Tensor] | None:
    """Return integers of shape (samples, length) or (length,) as a tensor for each sample; None if they are something else."""
    try:
        nested = isinstance(value, (list, tuple)) and value and not isinstance(value[0], int)
        rows = [torch.as_tensor(row) for row in (value if nested else [value])]
    except (TypeError, ValueError, RuntimeError):
        return None
    if len(rows) == 1 and rows[0].ndim == 2:
        rows = list(rows[0])
    if any(row.ndim != 1 or row.is_floating_point() or row.is_complex() for row in rows):
        return None
    return [row.cpu().long() for row in rows]


def _span(mask: Tensor, location: str) -> slice:
    """Return the positions of the tokens in a sequence, given its attention mask, (length,)."""
    positions = mask.nonzero()
    span = slice(int(positions[0]), int(positions[-1]) + 1) if len(positions) else slice(0, 0)
    if not bool((mask[span] == 1).all()) or span.stop == 0:
        raise BadText(f"{location} has an `attention_mask` that is not a row of ones with zeros before or after all of them.")
    return span


def _shape(value: Any) -> str:
    """Describe the shape and dtype of a tensor, or the lengths of lists, for a message."""
    if isinstance(value, (Tensor, np.ndarray)):
        return f"{tuple(value.shape)} {value.dtype}"
    rows = [len(row) for row in value if isinstance(row, (list, tuple))] if isinstance(value, (list, tuple)) else []
    return f"{len(rows)} lists of {min(rows)} to {max(rows)}" if rows else f"a {type(value).__name__}"
