"""Text into windows of tokens: tokenised once, cut at seeded places to calibrate and one after another to test."""

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
    """Windows to calibrate on, (samples, length) int64, and a sentence on where they are from."""

    windows: Tensor
    description: str


def tokenize(tokenizer: PreTrainedTokenizerBase, text: Text) -> Tensor:
    """The text's stream as token numbers, (tokens,) int64: tokenised once, never padded, never cut.

    Special tokens stand where the tokenizer adds them, which is at the ends of the stream and not of each document, as in
    the codes of SparseGPT, Wanda and SparseLLM.
    """
    return _tokens(tokenizer, text.stream)


def calibration_windows(text: Text, tokenizer: PreTrainedTokenizerBase, samples: int, length: int, seed: int) -> Calibration:
    """Windows at random places of the text: the same for the same seed, and full, so that no padding enters.

    Where `samples` documents are longer than a window, each window is from a random one of them, as the papers' codes do
    for C4. Otherwise, and for texts that are rows of one whole, from anywhere in the stream of all documents. Departs from
    the codes: a document is drawn at most once.

    samples: how many windows, at least one. length: tokens a window, at least two.
    Cost: tokenises documents until enough long ones are found, in the worst case all of them, and then the stream once.
    Raises `BadText` when the text is shorter than one window.
    """
    _check(length, samples=samples)
    windows = None if text.rows else _from_documents(text, tokenizer, samples, length, seed)
    if windows is not None:
        place = f"each at a random place of one of {len(text.documents):,} documents"
        return Calibration(windows, f"{_counted(samples, length)}, {place} ({text.source}), seed {seed}")
    stream = _long_enough(text, tokenizer, length)
    starts = torch.randint(len(stream) - length + 1, (samples,), generator=torch.Generator().manual_seed(seed))
    windows = stream.unfold(0, length, 1)[starts]
    place = f"at random places of one stream of {len(stream):,} tokens"
    return Calibration(windows, f"{_counted(samples, length)} {place} ({text.source}), seed {seed}")


def test_windows(text: Text, tokenizer: PreTrainedTokenizerBase, length: int, limit: int | None = None) -> Tensor:  # noqa: PT028
    """The stream cut into consecutive windows, (windows, length) int64; a last piece shorter than a window is dropped.

    limit: at most so many windows, from the start; None takes what the papers do, 256 of C4 and all of any other text.
    Raises `BadText` when the text is shorter than one window.
    """
    limit = text.test_windows if limit is None else limit
    _check(length, limit=limit)
    stream = _long_enough(text, tokenizer, length)
    return stream[: len(stream) // length * length].view(-1, length)[:limit]


test_windows.__test__ = False  # type: ignore[attr-defined]  # for pytest: its name begins like a test's


def _from_documents(text: Text, tokenizer: PreTrainedTokenizerBase, samples: int, length: int, seed: int) -> Tensor | None:
    """A window out of each of `samples` documents longer than one, in random order; None when there are fewer."""
    if len(text.documents) < samples:
        return None
    generator = torch.Generator().manual_seed(seed)
    windows: list[Tensor] = []
    for index in torch.randperm(len(text.documents), generator=generator).tolist():
        tokens = _tokens(tokenizer, text.documents[index])
        if len(tokens) > length:
            start = int(torch.randint(len(tokens) - length, (), generator=generator))  # the last place is left out,
            windows.append(tokens[start : start + length])  # as the codes do
            if len(windows) == samples:
                return torch.stack(windows)
    return None


def _tokens(tokenizer: PreTrainedTokenizerBase, string: str) -> Tensor:
    """(tokens,): whatever padding or truncation the tokenizer is set to is off; `verbose` would warn of the length."""
    encoded = tokenizer(string, padding=False, truncation=False, return_attention_mask=False, verbose=False)
    return torch.tensor(encoded["input_ids"], dtype=torch.long)


def _long_enough(text: Text, tokenizer: PreTrainedTokenizerBase, length: int) -> Tensor:
    """The stream, at least one window long."""
    stream = tokenize(tokenizer, text)
    if len(stream) < length:
        shorter = f", or windows of at most {len(stream)} (--sequence-length {len(stream)})" if len(stream) > 1 else ""
        raise BadText(
            f"{text.source} has {len(stream):,} tokens, but one window needs {length:,}. Take a longer text{shorter}."
        )
    return stream


def _check(length: int, **counts: int | None) -> None:
    if length < 2:
        raise InvalidSetting(f"`length` must be at least 2, so that a window has a token to predict, got {length}.")
    for name, count in counts.items():
        if count is not None and count < 1:
            raise InvalidSetting(f"`{name}` must be at least 1, got {count}.")


def _counted(samples: int, length: int) -> str:
    return f"{samples:,} window{'s' if samples > 1 else ''} of {length:,} tokens"
