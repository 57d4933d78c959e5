"""Token sequences from texts: at random positions for calibration, consecutive for evaluation, or whole documents for both."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparsellm.errors import BadText, InvalidSetting, plural
from sparsellm.runtime.memory import check_fits
from sparsellm.texts.data_sets import SHORT
from sparsellm.texts.padding import pad
from sparsellm.texts.texts import Text
from sparsellm.texts.tokenized import BOS, CHARACTERS, FURTHER_TOKENS, Documents, TokenizedText

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPEATED = 2
"""A note says how often each token is seen from this number of times on."""

TRIED, MEDIAN = 64, 2
"""Documents whose lengths are looked at, at even distances; there is a note where half of them are shorter than a sequence."""

PARTS_A_SEQUENCE = 4
"""Parts of one text, between blank lines, that a sequence joins, but for the longest tenth, where a note asks whether they are
texts of their own. Paragraphs of prose have tens to hundreds of tokens."""

CHARACTER_BYTES = 4
"""Most bytes of a character, and so most tokens: a document of too few characters to be longer than a sequence is not read."""

TOKEN_BYTES = 8
"""Bytes of a token id."""

LARGE = 2**20
"""Bytes of sequences from which they are compared with the memory that is free."""

PLACES = 20
"""How often a place is drawn anew for each sequence where a long text ends too early behind it."""


@dataclass(frozen=True, eq=False)
class Sequences:
    """Sequences of a text.

    Attributes:
        windows: Token ids, (samples, longest) int64, `PADDING` after the end of shorter sequences.
        description: Number, length and source of the sequences, for reports.
        notes: What a user should know of them.
    """

    windows: Tensor
    description: str
    notes: tuple[str, ...] = ()


def calibration_windows(
    text: Text,
    tokenizer: PreTrainedTokenizerBase,
    *,
    samples: int,
    sequence_length: int,
    seed: int,
    documents: Documents = "auto",
    bos: BOS = "auto",
    family: str = "",
) -> Sequences:
    """Draw sequences at random positions of a text; all have the full length, without padding.

    Of whole documents, `samples` are drawn, or all if there are fewer. Each is a sequence from its start, cut after
    `sequence_length` tokens.

    If at least `samples` documents are longer than a sequence, each sequence comes from a different random document, as in the
    papers' code for C4 (which may draw a document twice). Otherwise, and for texts whose documents are rows of one text,
    sequences come from any position in the stream of all documents.

    Of a text of more than `sparsellm.texts.data_sets.SHORT` characters, but for the papers' texts, the positions are drawn in
    characters and only the text after them is tokenized. Of a shorter one, documents are tokenized until enough long ones are
    found, in the worst case all of them, and then the stream once.

    Args:
        samples: Number of sequences, at least 1.
        sequence_length: Tokens per sequence, at least 2.
        documents: Whether each document is a sequence, or sequences are cut from the stream; auto is whole for chats.
        bos: Whether each sequence begins with the tokenizer's BOS token; auto is where the tokenizer adds one by default, but
            for the papers' texts with their models. Whole documents begin as the tokenizer or template has it.
        family: `model_type` of the model, by which the papers' models are known.

    Raises:
        BadText: If the text is shorter than one sequence, or the tokenizer has no chat template for its conversations.
        InvalidSetting: The tokenizer has no BOS token, and `bos` is yes.
        TooLarge: The sequences do not fit in memory.
    """
    _check(sequence_length, samples=samples)
    tokenized = TokenizedText(text, tokenizer, documents=documents, bos=bos, family=family)
    generator = torch.Generator().manual_seed(seed)
    if tokenized.whole:
        order = iter(torch.randperm(len(tokenized), generator=generator).tolist())
        windows, short = _whole(tokenized, order, sequence_length, samples)
        kind = "conversations in the chat template, each" if text.chats else "documents, each from its start,"
        count = f"{len(windows):,} of {len(tokenized):,} {kind} cut after {sequence_length:,} tokens"
        notes = [
            *short,
            *([f"{text.source} has {len(windows):,} of the {samples:,} samples"] if len(windows) < samples else []),
        ]
        description = f"{count} ({text.source}), seed {seed}"
        return Sequences(windows, description, (*tokenized.notes(windows), *notes))
    room = tokenized.room(sequence_length)
    if (needed := TOKEN_BYTES * samples * sequence_length) >= LARGE:
        check_fits(needed, torch.device("cpu"), stage="Calibration", advice="Pass fewer `samples`.")
    drawn = None if text.rows or text.chats else _draw_from_documents(tokenized, samples, room, generator)
    drawn = None if drawn is None else _begun(tokenized, drawn)
    origin, distinct = f", each at a random place of one of {plural(len(tokenized), 'document')}", samples * room
    notes = []
    if drawn is None:
        notes += _short_documents(tokenized, sequence_length)
        if tokenized.is_long:
            drawn, distinct = _draw_from_long(tokenized, samples, room, generator.manual_seed(seed))
            drawn = _begun(tokenized, drawn)
            origin = f" at random places of one text of {int(tokenized.sizes.sum()):,} characters"
        else:
            stream = _long_enough(tokenized, tokenized.stream, sequence_length)
            starts = torch.randint(len(stream) - room + 1, (samples,), generator=generator.manual_seed(seed))
            drawn, distinct = _cut(tokenized, stream, starts, sequence_length), _covered(starts, room)
            origin = f" at random places of one stream of {len(stream):,} tokens"
    if (times := round(samples * room / distinct)) >= REPEATED:
        notes.append(f"{samples:,} sequences of {sequence_length:,} tokens from {distinct:,}: each is seen {times} times")
    count = f"{plural(samples, 'window')} of {sequence_length:,} tokens{_with_bos(tokenized)}"
    description = f"{count}{origin} ({text.source}), seed {seed}"
    return Sequences(drawn, description, (*tokenized.notes(drawn), *notes))


def test_windows(
    text: Text,
    tokenizer: PreTrainedTokenizerBase,
    sequence_length: int,
    *,
    limit: int | None = None,  # noqa: PT028
    documents: Documents = "auto",  # noqa: PT028
    bos: BOS = "auto",  # noqa: PT028
    family: str = "",  # noqa: PT028
) -> Sequences:
    """Split the stream into consecutive sequences; a shorter remainder is dropped. Or take each document from its start.

    Args:
        sequence_length: Tokens per sequence, at least 2.
        limit: Maximum number of sequences, from the start; None follows the papers: 256 of C4, all of any other text.
        documents: As for `calibration_windows`.
        bos: As for `calibration_windows`.
        family: `model_type` of the model.

    Raises:
        BadText: If the text is shorter than one sequence, or the tokenizer has no chat template for its conversations.
        InvalidSetting: The tokenizer has no BOS token, and `bos` is yes.
    """
    limit = text.test_windows if limit is None else limit
    _check(sequence_length, limit=limit)
    tokenized = TokenizedText(text, tokenizer, documents=documents, bos=bos, family=family)
    if tokenized.whole:
        windows, notes = _whole(tokenized, iter(range(len(tokenized))), sequence_length, limit)
        description = f"{plural(len(windows), 'document')}, each from its start, cut after {sequence_length:,} tokens"
    else:
        room = tokenized.room(sequence_length)
        stream = tokenized.stream if limit is None else tokenized.first_of_stream(limit * room)
        stream = _long_enough(tokenized, stream, sequence_length)
        starts = torch.arange(0, len(stream) - room + 1, room)[:limit]
        windows = _cut(tokenized, stream, starts, sequence_length)
        notes = list(_short_documents(tokenized, sequence_length))
        description = f"{plural(len(windows), 'window')} of {sequence_length:,} tokens{_with_bos(tokenized)}"
    return Sequences(windows, f"{description} ({text.source})", (*tokenized.notes(windows), *notes))


test_windows.__test__ = False  # type: ignore[attr-defined]  # the prefix would make pytest collect it


def _with_bos(tokenized: TokenizedText) -> str:
    return ", of which the first begins it," if len(tokenized.begin) else ""


def _begun(tokenized: TokenizedText, windows: Tensor) -> Tensor:
    """The sequences, (samples, room), each with its first token before it."""
    return torch.cat([tokenized.begin.expand(len(windows), -1), windows], dim=1) if len(tokenized.begin) else windows


def _cut(tokenized: TokenizedText, stream: Tensor, starts: Tensor, length: int) -> Tensor:
    """Sequences, (samples, length), from these places of the stream; a BOS token that is there is not put before it again."""
    windows = _begun(tokenized, stream.unfold(0, tokenized.room(length), 1)[starts])
    own = (starts + length <= len(stream)) & (len(tokenized.begin) > 0) & (stream[starts] == windows[:, 0])
    if bool(own.any()):
        windows[own] = stream.unfold(0, length, 1)[starts[own]]
    return windows


def _whole(tokenized: TokenizedText, order: Iterator[int], length: int, count: int | None) -> tuple[Tensor, list[str]]:
    """The first tokens of at most `count` documents, in that order; and a note on those that are too short."""
    windows: list[Tensor] = []
    short = 0
    for number in order:
        if len(windows) == count:
            break
        tokens = tokenized.sequence(number, length)
        if tokens is not None and len(tokens) < 2:
            short += 1
        elif tokens is not None:
            windows.append(tokens)
    if not windows:
        tokenized.check_refused()
        raise BadText(
            f"{tokenized.text.source} has no document of at least two tokens, which a sequence needs. Take another text."
        )
    verb = "is" if short == 1 else "are"
    return pad(windows), [f"{plural(short, 'document')} of fewer than two tokens {verb} left out"] if short else []


def _draw_from_documents(tokenized: TokenizedText, samples: int, length: int, generator: torch.Generator) -> Tensor | None:
    """Draw a sequence from each of `samples` longer documents in random order; None if there are fewer.

    Of a long text, so many documents are looked at as have the characters of a short one and of the sequences.
    """
    if len(tokenized) < samples:
        return None
    windows: list[Tensor] = []
    remaining = SHORT + 2 * CHARACTERS * samples * length
    for index in torch.randperm(len(tokenized), generator=generator).tolist():
        if tokenized.is_long:
            size = int(tokenized.sizes[index])
            if remaining < 0:
                return None
            if 0 < CHARACTER_BYTES * size < length:
                remaining -= size
                continue
        document = tokenized.document(index)
        if document is None:
            continue
        if tokenized.is_long:
            document = _part(document, length, generator)
            remaining -= len(document)
        tokens = tokenized.tokens(document)
        if len(tokens) > length:
            # As in the papers' code, the last position is never drawn.
            start = int(torch.randint(len(tokens) - length, (), generator=generator))
            windows.append(tokens[start : start + length])
            if len(windows) == samples:
                return torch.stack(windows)
    return None


def _part(document: str, length: int, generator: torch.Generator) -> str:
    """A random part of a document that has several times the tokens of a sequence, or all of a shorter one."""
    characters = 4 * CHARACTERS * (length + FURTHER_TOKENS)
    if len(document) <= characters:
        return document
    start = int(torch.randint(len(document) - characters, (), generator=generator))
    return document[start : start + characters].partition(" ")[2]


def _draw_from_long(tokenized: TokenizedText, samples: int, length: int, generator: torch.Generator) -> tuple[Tensor, int]:
    """Draw sequences at random places of a long text; and the number of tokens that are in any."""
    total = int(tokenized.sizes.sum())
    windows: list[Tensor] = []
    places: list[int] = []
    taken: list[int] = []
    for _ in range(PLACES * samples):
        place = int(torch.rand((), dtype=torch.float64, generator=generator) * total)
        found = tokenized.at(place, length)
        if found is not None:
            windows.append(found[0])
            places.append(place)
            taken.append(found[1])
        if len(windows) == samples:
            width = sum(taken) // samples
            return torch.stack(windows), max(length, _covered(torch.tensor(places), width) * length // width)
    tokenized.stream  # noqa: B018  # raises for a text without tokens
    raise BadText(
        f"{tokenized.text.source} has too few tokens behind most of its places. Take shorter sequences or another text."
    )


def _covered(starts: Tensor, length: int) -> int:
    """Number of positions that lie in any sequence of that length."""
    return int(starts.sort().values.diff().clamp(max=length).sum()) + length


def _short_documents(tokenized: TokenizedText, length: int) -> Iterator[str]:
    """A note where most documents, each a text of its own, are shorter than a sequence; or most parts of one text, by far."""
    text = tokenized.text
    if text.published or text.chats:
        return
    is_one = text.rows or len(tokenized) < MEDIAN
    parts = re.split(r"\n[^\S\n]*\n", (tokenized.document(0) or "")[:SHORT]) if is_one else range(len(tokenized))
    step = -(-len(parts) // TRIED)
    documents = (tokenized.document(x) if isinstance(x, int) else x for x in parts[::step])
    lengths = sorted(len(tokenized.tokens(x[: 2 * CHARACTERS * length])) for x in documents if x is not None and x.strip())
    median = lengths[len(lengths) // MEDIAN] if lengths else length
    if is_one and len(lengths) >= PARTS_A_SEQUENCE and PARTS_A_SEQUENCE * lengths[len(lengths) * 9 // 10] <= length:
        yield (
            f"{text.source} has blank lines around parts of few tokens (the median has {median:,}), and sequences of "
            f"{length:,} join them; if each is a text of its own, write them to a .jsonl file and pass `documents='whole'`"
        )
    elif not is_one and median < length:
        yield (
            f"most documents of {text.source} are shorter than {length:,} tokens (the median has {median:,}), so that "
            "sequences join several; `documents='whole'` takes each from its start"
        )


def _long_enough(tokenized: TokenizedText, stream: Tensor, length: int) -> Tensor:
    """The stream; raise BadText if it is shorter than one sequence."""
    needed = tokenized.room(length)
    if len(stream) < needed:
        most, source = len(stream) + length - needed, tokenized.text.source
        alternative = f", or windows of at most {most} (`sequence_length={most}`)" if most > 1 else ""
        raise BadText(f"{source} has {len(stream):,} tokens, but one window needs {length:,}. Take a longer text{alternative}.")
    return stream


def _check(length: int, **counts: int | None) -> None:
    """Raise InvalidSetting for a length below 2 or a count below 1."""
    for name, count in {"sequence_length": length, **counts}.items():
        least = 2 if name == "sequence_length" else 1  # a window has a token to predict
        if count is not None and count < least:
            raise InvalidSetting(f"`{name}` must be at least {least}, got {count}.")
