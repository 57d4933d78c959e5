"""Documents of rows: texts, or chats in the forms that data sets have."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparsellm.errors import BadText
from sparsellm.texts.json_files import is_text

FileRow = tuple[str, object]
"""Position in a file ("line 3") and value."""

FORMS: Sequence[tuple[str, ...]] = (
    ("text",),
    ("messages",),
    ("conversations",),
    ("prompt", "completion"),
    ("instruction", "output"),
)
"""Fields that hold a document, where none is named: the first of these that a row has all of. Those after `text` are chats:
OpenAI's, ShareGPT's, TRL's, and Alpaca's."""

FURTHER: Mapping[str, Sequence[str]] = {"instruction": ("input",)}
"""Fields that a chat also takes, by the first field of its form. All chats take `tools` and `system`."""

ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bard": "assistant",
    "bing": "assistant",
    "model": "assistant",
    "function_call": "assistant",
    "observation": "tool",
    "function_response": "tool",
}
"""Role of a message by its `from` in ShareGPT's form; other names are roles already."""

EXPECTED_ROW = "a string, or the messages of a chat, each with `role` and `content`, was expected"


@dataclass(frozen=True)
class Conversation:
    """A chat.

    Attributes:
        messages: Each with its `role` and `content`.
        tools: Descriptions of functions, which the chat template writes; None for none.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Any] | None = None


Document = str | Conversation


def document_fields(
    location: str, names: Iterable[str], field: str | None, known: Sequence[tuple[str, ...]] = FORMS
) -> list[str]:
    """Return the fields that hold a document.

    Args:
        location: What has the fields, for errors.
        names: All fields.
        field: The one to take; None for the first of `known` that is among the names, with those that belong to it.

    Raises:
        BadText: They are not there.
    """
    names = list(names)
    form = next((form for form in ([(field,)] if field else known) if set(form) <= set(names)), None)
    if form is None:
        missing, fields = f"{location} has no field {field or known[0][0]!r}.", ", ".join(map(repr, names)) or "none"
        raise BadText(f"{missing} It has: {fields}. Name the one that holds the text, or chats, in `text_field`.")
    further = (*FURTHER.get(form[0], ()), "system", "tools") if form != ("text",) else ()
    return [*form, *(name for name in further if name in names)]


def row_documents(source: str, rows: Iterable[FileRow], field: str | None) -> Iterator[Document | None]:
    """Yield the document of each row; None for an empty one.

    Args:
        source: The file or the argument that holds the rows, for errors.
        rows: Each a text, a conversation, or an object with either in fields.
        field: The field; None for the first of `FORMS`.

    Raises:
        BadText: A row has no such field or holds something else, or there are both texts and conversations.
    """
    kind: type | None = None
    for position, row in rows:
        document = document_of(f"{source}, {position},", row, field)
        if document is not None and kind not in (None, type(document)):
            other = "text" if isinstance(document, str) else "chat"
            raise BadText(f"{source}, {position}, holds a {other}, unlike the rows before it. Use a file for each kind.")
        kind = kind if document is None else type(document)
        yield document


def document_size(document: Document | None) -> int:
    """Characters of a document, about those of a chat before its template writes it."""
    if document is None:
        return 0
    return len(document) if isinstance(document, str) else len(str(document.messages))


def document_of(location: str, row: object, field: str | None) -> Document | None:
    """Return the document of a row; None for an empty one: null, a blank text, or a chat without messages.

    Args:
        location: The row's place, for errors.

    Raises:
        BadText: The row has no such field or holds something else.
    """
    if not isinstance(row, Mapping):
        return _document(location, row, "")
    names = document_fields(location, row, field)
    is_pair = field is None and names[0] in ("prompt", "instruction")
    if all(_is_empty(row[name]) for name in names[: 1 + is_pair]):
        return None
    document = _question_and_answer(location, row, names) if is_pair else _document(location, row[names[0]], names[0])
    if not isinstance(document, Conversation):
        return document
    system = row.get("system") if "system" in names else None
    if isinstance(system, str) and system.strip() and document.messages[0].get("role") != "system":
        document = Conversation([{"role": "system", "content": system}, *document.messages])
    return Conversation(document.messages, _tools(location, row.get("tools")) if "tools" in names else None)


def _document(location: str, value: object, name: str) -> Document | None:
    """The document that a value is; None for an empty one."""
    if _is_empty(value):
        return None
    if isinstance(value, str):
        if not is_text(value):
            raise BadText(f"{location} holds a surrogate, which is not a character. Rewrite the file as UTF-8.")
        return value
    if isinstance(value, (list, tuple)) and all(isinstance(x, Mapping) and ("role" in x or "from" in x) for x in value):
        return Conversation([_message(x) for x in value])
    place = f"a {type(value).__name__}" + (f" in field {name!r}" if name else "")
    raise BadText(f"{location} holds {place}; {EXPECTED_ROW}.")


def _is_empty(value: object) -> bool:
    """Whether a field holds nothing."""
    return value is None or (isinstance(value, str) and not value.strip()) or (isinstance(value, (list, tuple)) and not value)


def _message(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """A message with `role` and `content`, also where it has `from` and `value`; fields that are null, as columns of a table
    have them where a message lacks them, are left out but for the content."""
    if "role" not in message:
        return {"role": ROLES.get(str(message["from"]), message["from"]), "content": message.get("value")}
    return {name: value for name, value in message.items() if value is not None or name == "content"}


def _question_and_answer(location: str, row: Mapping[str, Any], names: Sequence[str]) -> Conversation:
    """The chat of a question and its answer, each a text or messages, in the first two of the fields."""
    messages: list[Mapping[str, Any]] = []
    for name, role in zip(names[:2], ("user", "assistant"), strict=True):
        document = _document(location, row[name], name)
        if isinstance(document, Conversation):
            messages += document.messages
        elif document is not None:
            messages.append({"role": role, "content": document})
    more = row["input"] if "input" in names else None
    if isinstance(more, str) and more.strip():
        messages[0] = {**messages[0], "content": f"{messages[0]['content']}\n\n{more}"}
    return Conversation(messages)


def _tools(location: str, value: object) -> Sequence[Any] | None:
    """The tools of a row, which tables hold as JSON."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except ValueError as error:
            raise BadText(f"{location} holds tools that are not JSON: {error}.") from None
    return value if isinstance(value, (list, tuple)) and value else None
