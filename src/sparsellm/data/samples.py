"""Token sequences from texts: at random positions for calibration, consecutive for evaluation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparsellm.data.texts import Text, read_text
from sparsellm.errors import BadText, InvalidSetting

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Calibration", "Text", "calibration_windows", "read_text", "test_windows", "tokenize"]


@dataclass(frozen=True, eq=False)
class Calibration:
    """Calibration sequences.

    Attributes:
        windows: Token ids, (samples, length) int64.
        description: Number, length and source of the sequences, for reports.
    """

    windows: Tensor
    description: str


def tokenize(tokenizer: PreTrainedTokenizerBase, text: Text) -> Tensor:
    """Tokenise the whole text as one stream, (tokens,) int64, without padding or truncation.

    The tokenizer adds special tokens at the ends of the stream, not of each document, as in the code of SparseGPT, Wanda and
    SparseLLM.
    """
    return _tokens(tokenizer, text.stream)


def calibration_windows(text: Text, tokenizer: PreTrainedTokenizerBase, samples: int, length: int, seed: int) -> Calibration:
    """Draw sequences at random positions of a text; all have the full length, without padding.

    If at least `samples` documents are longer than a sequence, each sequence comes from a different random document, as in the
    papers' code for C4 (which may draw a document twice). Otherwise, and for texts whose documents are rows of one text,
    sequences come from any position in the stream of all documents.

    Documents are tokenised until enough long ones are found, in the worst case all of them, and then the stream once.

    Args:
        text: The text.
        tokenizer: Tokenizer of the model.
        samples: Number of sequences, at least 1.
        length: Tokens per sequence, at least 2.
        seed: Seed of the random positions.

    Raises:
        BadText: If the text is shorter than one sequence.
    """
    _check(length, samples=samples)
    windows = None if text.rows else _from_documents(text, tokenizer, samples, length, seed)
    if windows is not None:
        origin = f"each at a random place of one of {len(text.documents):,} documents"
        return Calibration(windows, f"{_describe(samples, length)}, {origin} ({text.source}), seed {seed}")
    stream = _tokenize_stream(text, tokenizer, length)
    starts = torch.randint(len(stream) - length + 1, (samples,), generator=torch.Generator().manual_seed(seed))
    windows = stream.unfold(0, length, 1)[starts]
    origin = f"at random places of one stream of {len(stream):,} tokens"
    return Calibration(windows, f"{_describe(samples, length)} {origin} ({text.source}), seed {seed}")


def test_windows(text: Text, tokenizer: PreTrainedTokenizerBase, length: int, limit: int | None = None) -> Tensor:  # noqa: PT028
    """Split the stream into consecutive sequences, (sequences, length) int64; a shorter remainder is dropped.

    Args:
        text: The text.
        tokenizer: Tokenizer of the model.
        length: Tokens per sequence, at least 2.
        limit: Maximum number of sequences, from the start; None follows the papers: 256 of C4, all of any other text.

    Raises:
        BadText: If the text is shorter than one sequence.
    """
    limit = text.test_windows if limit is None else limit
    _check(length, limit=limit)
    stream = _tokenize_stream(text, tokenizer, length)
    return stream[: len(stream) // length * length].view(-1, length)[:limit]


test_windows.__test__ = False  # type: ignore[attr-defined]  # the prefix would make pytest collect it


def _from_documents(text: Text, tokenizer: PreTrainedTokenizerBase, samples: int, length: int, seed: int) -> Tensor | None:
    """One sequence from each of `samples` longer documents in random order; None if there are fewer."""
    if len(text.documents) < samples:
        return None
    generator = torch.Generator().manual_seed(seed)
    windows: list[Tensor] = []
    for index in torch.randperm(len(text.documents), generator=generator).tolist():
        tokens = _tokens(tokenizer, text.documents[index])
        if len(tokens) > length:
            # As in the papers' code, the last position is never drawn.
            start = int(torch.randint(len(tokens) - length, (), generator=generator))
            windows.append(tokens[start : start + length])
            if len(windows) == samples:
                return torch.stack(windows)
    return None


def _tokens(tokenizer: PreTrainedTokenizerBase, string: str) -> Tensor:
    """Token ids of a string, (tokens,), without padding, truncation or a warning about the length."""
    encoded = tokenizer(string, padding=False, truncation=False, return_attention_mask=False, verbose=False)
    return torch.tensor(encoded["input_ids"], dtype=torch.long)


def _tokenize_stream(text: Text, tokenizer: PreTrainedTokenizerBase, length: int) -> Tensor:
    """Tokenise the stream; raises BadText if it is shorter than one sequence."""
    stream = tokenize(tokenizer, text)
    if len(stream) < length:
        alternative = f", or windows of at most {len(stream)} (--sequence-length {len(stream)})" if len(stream) > 1 else ""
        raise BadText(
            f"{text.source} has {len(stream):,} tokens, but one window needs {length:,}. Take a longer text{alternative}."
        )
    return stream


def _check(length: int, **counts: int | None) -> None:
    """Raise InvalidSetting for a length below 2 or a count below 1."""
    if length < 2:
        raise InvalidSetting(f"`length` must be at least 2, so that a window has a token to predict, got {length}.")
    for name, count in counts.items():
        if count is not None and count < 1:
            raise InvalidSetting(f"`{name}` must be at least 1, got {count}.")


def _describe(samples: int, length: int) -> str:
    return f"{samples:,} window{'s' if samples > 1 else ''} of {length:,} tokens"
