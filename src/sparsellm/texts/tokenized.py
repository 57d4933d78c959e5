"""The documents of a text as token ids: special tokens, chat templates, and pieces of long texts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from sparsellm.errors import BadText, InvalidSetting, first_line, plural
from sparsellm.texts.data_sets import SHORT, Sizes
from sparsellm.texts.rows import Conversation, document_size
from sparsellm.texts.texts import Text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Documents = Literal["auto", "whole", "joined"]
"""How documents become sequences: each from its start, or cut from the stream of all; auto is whole for chats."""

BOS = Literal["auto", "yes", "no"]
"""Whether each sequence begins with the BOS token; auto is where the tokenizer adds one, but for the papers' texts."""

PAPERS_FAMILIES = ("opt", "llama")
"""Values of `model_type` for which the papers' texts are divided as in their code."""

CHARACTERS, FURTHER_TOKENS = 8, 64
"""Characters that are tokenized at first for each wanted token, twice what English takes; and further tokens, as the last
ones of a piece may differ from the whole text's."""

WORD = 64
"""Characters in which a piece looks for the start of a word."""


class TokenizedText:
    """The documents of a text as token ids.

    Args:
        text: The documents.
        tokenizer: Their tokenizer.
        documents: How they become sequences.
        bos: Whether each sequence begins with the BOS token.
        family: `model_type` of the model.

    Attributes:
        whole: Whether each document is a sequence.
        begin: (0,) or (1,) The BOS token that stands before each sequence cut from the stream.

    Raises:
        InvalidSetting: The tokenizer has no BOS token, and `bos` is yes.
        BadText: The tokenizer has no chat template for conversations, or the documents are parts of one text and `documents` is
            whole.
    """

    def __init__(
        self,
        text: Text,
        tokenizer: PreTrainedTokenizerBase,
        *,
        documents: Documents = "auto",
        bos: BOS = "auto",
        family: str = "",
    ) -> None:
        self.text, self._tokenizer, self._bos = text, tokenizer, bos
        self.whole = documents == "whole" or (documents == "auto" and text.chats)
        self._empty: set[int] = set()
        self._refused: dict[int, str] = {}
        if self.whole and text.rows:
            raise BadText(
                f"{text.source} is one text, and `documents='whole'` needs several documents. Leave it out, or take a "
                "file with more, such as a .jsonl file."
            )
        if text.chats and tokenizer.chat_template is None:
            raise BadText(
                f"{text.source} holds chat messages, but the tokenizer has no chat template to write them with. "
                "Use a chat model with its tokenizer, or a file with texts."
            )
        own: int | None = getattr(tokenizer, "bos_token_id", None)
        if bos == "yes" and own is None:
            raise InvalidSetting("`bos` is yes, but the tokenizer has no BOS token (bos_token). Leave it out.")
        self.papers = text.published and not self.whole and bos == "auto" and family in PAPERS_FAMILIES
        self._around = added_tokens(tokenizer)
        self.added = own is not None and self._around[0][:1] == [own]
        begins = not self.whole and not self.papers and (bos == "yes" or (bos == "auto" and self.added))
        self.begin = torch.tensor([own] if begins and own is not None else [], dtype=torch.long)
        self._special = not begins and bos != "no" and not text.chats

    def __len__(self) -> int:
        return len(self.text.documents)

    def document(self, number: int) -> str | None:
        """A document; a conversation as the chat template writes it. None for an empty row, and for one that is refused."""
        document = self.text.documents[number]
        if document is None or (isinstance(document, str) and not document.strip() and not self.text.rows):
            self._empty.add(number)
            return None
        if isinstance(document, str):
            return document
        try:
            return write_conversation(document, self._tokenizer)
        except DoesNotFit as error:
            self._refused[number] = f"row {number + 1}: {error}"
            return None

    @cached_property
    def sizes(self) -> Sizes:
        """(documents,) About the characters of each document."""
        sizes: Sizes | None = getattr(self.text.documents, "sizes", None)
        return np.array([document_size(x) for x in self.text.documents]) if sizes is None else sizes

    @cached_property
    def _ends(self) -> Sizes:
        """(documents,) Sums of `sizes`."""
        return np.cumsum(self.sizes)

    @cached_property
    def is_long(self) -> bool:
        """Whether only what is used is tokenized. The papers' texts are tokenized as in their code."""
        return not self.text.published and int(self.sizes.sum()) > SHORT

    def room(self, length: int) -> int:
        """Tokens of the text in a sequence of that length."""
        return length - len(self.begin)

    def tokens(self, string: str, *, ends: bool = True) -> Tensor:
        """Tokenize a string to (tokens,) int64, with the tokenizer's special tokens where sequences have them from it.

        Where each sequence has a BOS token of its own, one at the start of the string is left out.

        Args:
            ends: Whether the string may have special tokens at its ends; a piece of a text may not.
        """
        tokens = tokenize(self._tokenizer, string, self._around if ends and self._special else None)
        return tokens[1:] if len(self.begin) and torch.equal(tokens[:1], self.begin) else tokens

    def sequence(self, number: int, length: int) -> Tensor | None:
        """The first tokens of a document, with its special tokens. None for an empty row."""
        document = self.document(number)
        if document is None:
            return None
        tokens = self._first_tokens(document, length)
        own = getattr(self._tokenizer, "bos_token_id", None)
        starts = len(tokens) > 0 and int(tokens[0]) == own
        if self._bos == "yes" and not starts:
            tokens = torch.cat([torch.tensor([own]), tokens])
        elif self._bos == "no" and starts:
            tokens = tokens[1:]
        return tokens[:length]

    def _first_tokens(self, document: str, length: int) -> Tensor:
        """At least the first `length` tokens of a document, or all."""
        characters = CHARACTERS * (length + FURTHER_TOKENS)
        while characters < len(document):
            tokens = self.tokens(document[:characters])
            if len(tokens) >= length + FURTHER_TOKENS:
                return tokens
            characters *= 2
        return self.tokens(document)

    @cached_property
    def stream(self) -> Tensor:
        """All documents as one sequence, (tokens,).

        Raises:
            BadText: There is no token.
        """
        pieces = (self.tokens(piece, ends=not self.is_long) for piece in self._stream_pieces())
        return self._checked(torch.cat([torch.empty(0, dtype=torch.long), *pieces]))

    def first_of_stream(self, count: int) -> Tensor:
        """At least the first tokens of the stream, or all."""
        if not self.is_long:
            return self.stream
        found = [torch.empty(0, dtype=torch.long)]
        for piece in self._stream_pieces():
            tokens = self.tokens(piece[: 2 * CHARACTERS * (count + FURTHER_TOKENS)], ends=False)
            tokens = tokens if len(tokens) >= count + FURTHER_TOKENS else self.tokens(piece, ends=False)
            found.append(tokens)
            count -= len(tokens)
            if count <= 0:
                break
        return self._checked(torch.cat(found))

    def _checked(self, stream: Tensor) -> Tensor:
        """The stream, which has tokens."""
        if len(stream) == 0:
            self.check_refused()
            raise BadText(
                f"The tokenizer makes no token of {self.text.source} ({int(self.sizes.sum()):,} characters): its vocabulary is "
                "empty, or it drops every character. Copy the model's own tokenizer files into the folder."
            )
        return stream

    def check_refused(self) -> None:
        """Raise BadText if there are conversations that the chat template refused, where none is left."""
        if self._refused:
            reason = next(iter(self._refused.values()))
            raise BadText(f"{self.text.source}: no conversation fits the tokenizer's chat template ({reason}).")

    def _stream_pieces(self) -> Iterator[str]:
        """The stream as one string; in pieces of whole documents if the text is long."""
        limit = SHORT if self.is_long else None
        joint = "" if self.text.chats else self.text.joint
        parts: list[str] = []
        size = 0
        for number in range(len(self)):
            document = self.document(number)
            if document is None:
                continue
            parts.append(document)
            size += len(document)
            if limit is not None and size > limit:
                yield joint.join(parts)
                parts, size = [""], 0  # so that the next piece begins with the joint
        yield joint.join(parts)

    def at(self, place: int, count: int) -> tuple[Tensor, int] | None:
        """Tokens of the stream from a place on.

        Args:
            place: Position within the sum of `sizes`.
            count: Number of tokens.

        Returns:
            The tokens and about how many characters they take; None where the stream ends before.
        """
        first = int(np.searchsorted(self._ends, place, side="right"))
        shift = (place - int(self._ends[first]) + int(self.sizes[first])) / max(1, int(self.sizes[first]))
        characters = CHARACTERS * (count + FURTHER_TOKENS)
        while True:
            piece, ended = self._piece(first, shift, characters)
            tokens = self.tokens(piece, ends=False)
            if len(tokens) >= count + (0 if ended else FURTHER_TOKENS):
                return tokens[:count], max(1, len(piece) * count // len(tokens))
            if ended:
                return None
            characters *= 2

    def _piece(self, number: int, shift: float, characters: int) -> tuple[str, bool]:
        """Characters of the stream from a share of a document on, from the start of a word; and whether the stream ends."""
        joint = "" if self.text.chats else self.text.joint
        document = self.document(number) or ""
        start = int(shift * len(document))
        if start:
            space = re.compile(r"\s").search(document, start, start + WORD)
            last = len(document) if len(document) - start < WORD else start  # no space: the last word, or a script without
            start = space.start() if space else last
        parts, size = [document[start : start + characters]], len(document) - start
        while size < characters:
            number += 1
            if number == len(self):
                return "".join(parts), True
            following = self.document(number)
            if following is not None:
                parts.append(joint + following[: characters - size])
                size += len(joint) + len(following)
        return "".join(parts), False

    def notes(self, windows: Tensor) -> Iterator[str]:
        """Notes for the user on sequences, (samples, length), that were made of this text."""
        token = getattr(self._tokenizer, "bos_token", None)
        if self.papers and self.added:
            yield f"sequences of {self.text.source} are cut as in the papers' code, so that few begin with {token}: see `bos`"
        elif len(self.begin) and self._bos == "auto":
            yield f"each sequence begins with {token}, as the tokenizer begins a text; `bos='no'` leaves it out"
        empty, refused = self.text.empty + len(self._empty), len(self._refused)
        if empty + refused:
            reasons = [f"{empty:,} empty"] if empty else []
            if refused:
                reasons.append(f"{refused:,} that the chat template refuses ({next(iter(self._refused.values()))})")
            verb = "is" if empty + refused == 1 else "are"
            yield f"{plural(empty + refused, 'row')} of {self.text.source} {verb} left out: {' and '.join(reasons)}"
        yield from twice_notes(getattr(self._tokenizer, "bos_token_id", None), windows, self.text.source)
        yield from unknown_notes(self._tokenizer, windows, self.text.source)


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


UNKNOWN_SHARES, TOO_MANY_UNKNOWN = 0.05, 0.5
"""Fractions of unknown tokens from which there is a note, and from which a text is refused."""


def added_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """The special tokens that the tokenizer by default puts before a text, and those that it puts behind it."""
    plain, special = (_encode(tokenizer, "a", special=special) for special in (False, True))
    begin = next((n for n in range(len(special)) if special[n : n + len(plain)] == plain), 0)
    return special[:begin], special[begin + len(plain) :]


def tokenize(
    tokenizer: PreTrainedTokenizerBase, string: str, added: tuple[Sequence[int], Sequence[int]] | None = None
) -> Tensor:
    """Tokenize a string to (tokens,) int64, without padding, truncation or a warning about its length.

    Args:
        added: What `added_tokens` gives, to have special tokens before and behind the text. Those that it has there itself, as
            one that was written with a chat template, are not added a second time. None adds none.
    """
    tokens = _encode(tokenizer, string, special=added is not None)
    before, behind = map(list, added or ((), ()))
    if before and tokens[len(before) : 2 * len(before)] == before:
        del tokens[: len(before)]
    if behind and tokens[-2 * len(behind) : -len(behind)] == behind:
        del tokens[-len(behind) :]
    return torch.tensor(tokens, dtype=torch.long)


def _encode(tokenizer: PreTrainedTokenizerBase, string: str, *, special: bool) -> list[int]:
    """Tokenize a string, with what the tokenizer by default adds to any if `special`."""
    options = {} if special else {"add_special_tokens": False}
    encoded = tokenizer(string, padding=False, truncation=False, return_attention_mask=False, verbose=False, **options)
    return list(encoded["input_ids"])


def twice_notes(bos: int | None, windows: Tensor, source: str) -> Iterator[str]:
    """A note where sequences, (samples, length), begin with the BOS token twice."""
    if bos is not None and windows.numel() and (count := int((windows[:, :2] == bos).all(1).sum())):
        yield f"{count:,} of {len(windows):,} sequences of {source} begin with the BOS token twice"


def unknown_notes(tokenizer: PreTrainedTokenizerBase, windows: Tensor, source: str) -> Iterator[str]:
    """A note where many tokens are the unknown one. Raises BadText where half of them are."""
    unknown = getattr(tokenizer, "unk_token_id", None)
    others = (getattr(tokenizer, name, None) for name in ("bos_token_id", "eos_token_id", "pad_token_id"))
    if unknown is None or unknown in others or not windows.numel():
        return
    share = float((windows == unknown).sum() / (windows >= 0).sum())
    if share >= TOO_MANY_UNKNOWN:
        raise BadText(
            f"{100 * share:.0f} % of the tokens of {source} are unknown to the tokenizer ({tokenizer.unk_token}). "
            "Use the model's own tokenizer files, or a text in a language that it knows."
        )
    if share >= UNKNOWN_SHARES:
        yield f"{100 * share:.0f} % of the tokens of {source} are unknown to the tokenizer ({tokenizer.unk_token})"
