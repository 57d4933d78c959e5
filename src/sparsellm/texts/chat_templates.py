"""Conversations as a tokenizer's chat template writes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sparsellm.errors import first_line
from sparsellm.texts.rows import Conversation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Messages = list[dict[str, Any]]


class DoesNotFit(ValueError):
    """A conversation that the chat template refuses; the message has the reason."""


def write_conversation(conversation: Conversation, tokenizer: PreTrainedTokenizerBase) -> str:
    """Write a conversation with the tokenizer's chat template, with its tools.

    Templates differ in the form of a message's content: a string, or a list of parts; and in whether it may be null beside
    calls of tools. The first form is taken whose result has the text of the last question in it.

    Raises:
        DoesNotFit: The template refuses every form, or the conversation holds more than text.
    """
    question = next((_text(x) for x in reversed(conversation.messages) if x.get("role") == "user"), None) or ""
    tools: Any = list(conversation.tools) if conversation.tools else None
    written, reason = "", ""
    for messages in _forms(conversation.messages):
        try:
            result = str(tokenizer.apply_chat_template(messages, tools=tools, tokenize=False))
        except Exception as error:  # a template is a program: it may divide by zero, or ask for endless memory
            reason = reason or first_line(error)
            continue
        if question.strip() in result:
            return result
        written = written or result
    if not written:
        raise DoesNotFit(reason)
    return written


def _forms(messages: Sequence[Mapping[str, Any]]) -> Iterator[Messages]:
    """The messages with strings as contents; with empty strings in place of null; with lists of parts."""
    texts: Messages = [
        {**message, "content": _text(message)} if "content" in message else dict(message) for message in messages
    ]
    yield texts
    filled: Messages = [{**message, "content": message.get("content") or ""} for message in texts]
    if filled != texts:
        yield filled
    yield [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in filled]


def _text(message: Mapping[str, Any]) -> str | None:
    """The content of a message as one string; None if it is null."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content
    parts = content if isinstance(content, (list, tuple)) else [content]
    texts = [part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        kinds = {
            str(part.get("type")) for part, text in zip(parts, texts, strict=True) if text is None and isinstance(part, Mapping)
        }
        raise DoesNotFit(f"a message has content that is not text{': ' + ', '.join(sorted(kinds)) if kinds else ''}")
    return "\n".join(str(text) for text in texts)
