"""Token sequences from texts: at random positions for calibration, consecutive for evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jinja2 import TemplateError
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sparsellm.data.texts import Text
from sparsellm.errors import BadText, InvalidSetting

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


PADDING = -1
"""Stands in place of a token after the end of a sequence that is shorter than others of its tensor; no model receives it."""


@dataclass(frozen=True, eq=False)
class Calibration:
    """Calibration sequences.

    Attributes:
        windows: Token ids, (samples, sequence_length) int64, `PADDING` after the end of shorter sequences.
        description: Number, length and source of the sequences, for reports.
    """

    windows: Tensor
    description: str


def calibration_windows(
    text: Text, tokenizer: PreTrainedTokenizerBase, *, samples: int, sequence_length: int, seed: int
) -> Calibration:
    """Draw sequences at random positions of a text; all have the full length, without padding.

    Of conversations, `samples` are drawn, or all if there are fewer. Each is a sequence from its start, cut after
    `sequence_length` tokens.

    If at least `samples` documents are longer than a sequence, each sequence comes from a different random document, as in the
    papers' code for C4 (which may draw a document twice). Otherwise, and for texts whose documents are rows of one text,
    sequences come from any position in the stream of all documents.

    Documents are tokenised until enough long ones are found, in the worst case all of them, and then the stream once.

    Args:
        samples: Number of sequences, at least 1.
        sequence_length: Tokens per sequence, at least 2.

    Raises:
        BadText: If the text is shorter than one sequence, or the tokenizer has no chat template for its conversations.
    """
    _check(sequence_length, samples=samples)
    generator = torch.Generator().manual_seed(seed)
    if text.conversations:
        return _draw_conversations(text, tokenizer, samples, length=sequence_length, seed=seed)
    windows = None if text.rows else _draw_from_documents(text, tokenizer, samples, length=sequence_length, generator=generator)
    origin = f", each at a random place of one of {len(text.documents):,} documents"
    if windows is None:
        stream = _tokenize_stream(text, tokenizer, sequence_length)
        starts = torch.randint(len(stream) - sequence_length + 1, (samples,), generator=generator.manual_seed(seed))
        windows = stream.unfold(0, sequence_length, 1)[starts]
        origin = f" at random places of one stream of {len(stream):,} tokens"
    count = f"{samples:,} window{'s' if samples > 1 else ''} of {sequence_length:,} tokens"
    return Calibration(windows, f"{count}{origin} ({text.source}), seed {seed}")


def test_windows(text: Text, tokenizer: PreTrainedTokenizerBase, sequence_length: int, *, limit: int | None = None) -> Tensor:  # noqa: PT028
    """Split the stream into consecutive sequences, (sequences, length) int64; a shorter remainder is dropped.

    Conversations follow each other in the stream as the chat template writes them, with nothing between.

    Args:
        sequence_length: Tokens per sequence, at least 2.
        limit: Maximum number of sequences, from the start; None follows the papers: 256 of C4, all of any other text.
    """
    limit = text.test_windows if limit is None else limit
    _check(sequence_length, limit=limit)
    stream = _tokenize_stream(text, tokenizer, sequence_length)
    return stream[: len(stream) // sequence_length * sequence_length].view(-1, sequence_length)[:limit]


test_windows.__test__ = False  # type: ignore[attr-defined]  # the prefix would make pytest collect it


def sequence_lengths(windows: Tensor) -> Tensor:
    """Number of tokens of each sequence, (samples,), without padding."""
    return (windows != PADDING).sum(1)


def unpadded_batches(windows: Tensor, batch: int) -> tuple[Tensor, ...]:
    """Divide sequences into batches without padding, so that no forward pass and no statistic ever contains it.

    Args:
        windows: Token ids, (samples, seq), `PADDING` after the end of shorter sequences.
        batch: Maximum number of sequences in a batch. Where any sequence is shorter, every sequence is a batch of its own.

    Returns:
        Token ids, (batch, seq), in the same order.
    """
    lengths = sequence_lengths(windows).tolist()
    if all(length == windows.shape[1] for length in lengths):
        return tuple(windows.split(batch))
    return tuple(window[:, :length] for window, length in zip(windows.split(1), lengths, strict=True))


def _draw_from_documents(
    text: Text, tokenizer: PreTrainedTokenizerBase, samples: int, *, length: int, generator: torch.Generator
) -> Tensor | None:
    """Draw a sequence from each of `samples` longer documents in random order; None if there are fewer."""
    if len(text.documents) < samples:
        return None
    windows: list[Tensor] = []
    for index in torch.randperm(len(text.documents), generator=generator).tolist():
        tokens = tokenize(tokenizer, text.documents[index])
        if len(tokens) > length:
            # As in the papers' code, the last position is never drawn.
            start = int(torch.randint(len(tokens) - length, (), generator=generator))
            windows.append(tokens[start : start + length])
            if len(windows) == samples:
                return torch.stack(windows)
    return None


def _draw_conversations(text: Text, tokenizer: PreTrainedTokenizerBase, samples: int, *, length: int, seed: int) -> Calibration:
    """Draw conversations without replacement; see `calibration_windows`."""
    order = torch.randperm(len(text.conversations), generator=torch.Generator().manual_seed(seed))[:samples].tolist()
    windows = [tokenize(tokenizer, _in_template(text, number, tokenizer), template=True)[:length] for number in order]
    count = f"{len(order):,} of {len(text.conversations):,} conversations"
    return Calibration(
        pad(windows), f"{count} in the chat template, each cut after {length:,} tokens ({text.source}), seed {seed}"
    )


def _in_template(text: Text, number: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a conversation as the tokenizer's chat template writes it."""
    if tokenizer.chat_template is None:
        raise BadText(
            f"{text.source} holds chat messages, but the tokenizer has no chat template to write them with. "
            "Use a chat model with its tokenizer, or a file with texts."
        )
    try:
        written: str = tokenizer.apply_chat_template([dict(message) for message in text.conversations[number]], tokenize=False)
    except (ValueError, TypeError, KeyError, TemplateError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
        raise BadText(
            f"{text.source}: conversation {number + 1} does not fit the tokenizer's chat template ({reason})."
        ) from error
    return written


def pad(sequences: Sequence[Tensor]) -> Tensor:
    """Stack sequences of token ids, (tokens,) each, to (samples, longest), with `PADDING` after the end of shorter ones.

    Raises:
        BadText: If a sequence has fewer than two tokens.
    """
    short = next((number for number, sequence in enumerate(sequences, 1) if len(sequence) < 2), None)
    if short is not None:
        raise BadText(f"Calibration sequence {short} has {len(sequences[short - 1])} tokens; at least 2 are needed.")
    return pad_sequence(list(sequences), batch_first=True, padding_value=PADDING)


def tokenize(tokenizer: PreTrainedTokenizerBase, string: str, *, template: bool = False) -> Tensor:
    """Tokenise a string to (tokens,) int64, without padding, truncation or a warning about its length.

    Special tokens are added unless the string is from a chat template, which contains them.
    """
    options = {"add_special_tokens": False} if template else {}
    encoded = tokenizer(string, padding=False, truncation=False, return_attention_mask=False, verbose=False, **options)
    return torch.tensor(encoded["input_ids"], dtype=torch.long)


def _tokenize_stream(text: Text, tokenizer: PreTrainedTokenizerBase, length: int) -> Tensor:
    """Tokenise the stream; raise BadText if it is shorter than one sequence."""
    # Special tokens stand at the ends of the stream, not of each document, as in the code of SparseGPT, Wanda and SparseLLM.
    written = [_in_template(text, number, tokenizer) for number in range(len(text.conversations))]
    stream = tokenize(tokenizer, "".join(written) or text.stream, template=bool(written))
    if len(stream) < length:
        alternative = f", or windows of at most {len(stream)} (`sequence_length={len(stream)}`)" if len(stream) > 1 else ""
        raise BadText(
            f"{text.source} has {len(stream):,} tokens, but one window needs {length:,}. Take a longer text{alternative}."
        )
    return stream


def _check(length: int, **counts: int | None) -> None:
    """Raise InvalidSetting for a length below 2 or a count below 1."""
    if length < 2:
        raise InvalidSetting(f"`sequence_length` must be at least 2, so that a window has a token to predict, got {length}.")
    for name, count in counts.items():
        if count is not None and count < 1:
            raise InvalidSetting(f"`{name}` must be at least 1, got {count}.")
