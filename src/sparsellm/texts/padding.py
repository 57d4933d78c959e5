"""Sequences of different lengths in one tensor, and batches of them without padding."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from sparsellm.errors import BadText, plural

PADDING = -1
"""Stands in place of a token after the end of a sequence that is shorter than others of its tensor; no model receives it."""

TOKENS_A_STEP = 4096
"""Approximate number of tokens per gradient step of a block."""


def pad(sequences: Sequence[Tensor]) -> Tensor:
    """Stack sequences of token ids, (tokens,) each, to (samples, longest), with `PADDING` after the end of shorter ones.

    Raises:
        BadText: If a sequence has fewer than two tokens.
    """
    short = next((number for number, sequence in enumerate(sequences, 1) if len(sequence) < 2), None)
    if short is not None:
        raise BadText(f"Sequence {short} has {plural(len(sequences[short - 1]), 'token')}; at least 2 are needed.")
    return pad_sequence(list(sequences), batch_first=True, padding_value=PADDING)


def sequence_lengths(windows: Tensor) -> Tensor:
    """Number of tokens of each sequence, (samples,), without padding."""
    return (windows != PADDING).sum(1)


def count_tokens(windows: Tensor) -> int:
    """Number of tokens of all sequences, (samples, length), without padding."""
    return int((windows != PADDING).sum())


def count_contexts(windows: Tensor) -> int:
    """Number of different tokens of all sequences, (samples, length), each taken with the two before it.

    About the number of tokens of a text that does not repeat itself, and 3 of one repeated word.
    """
    ids = windows.long() + 2  # 0 stands before a sequence, 1 for padding
    before, base = torch.nn.functional.pad(ids, (2, 0)), int(ids.max()) + 1
    keys = (before[:, :-2] * base + before[:, 1:-1]) * base + ids  # below 2^63, since no vocabulary has 2^21 tokens
    return len(keys[windows != PADDING].unique())


def token_digest(windows: Tensor) -> str:
    """Digest of token ids."""
    return hashlib.blake2b(windows.cpu().numpy().tobytes(), digest_size=16).hexdigest()


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


def windows_a_step(samples: int, length: int) -> int:
    """Number of sequences per gradient step of a block; at most an eighth of all, so that some can be held out."""
    return max(1, min(TOKENS_A_STEP // length, samples // 8))


def split_batches(windows: Tensor, batch: int) -> tuple[Tensor, ...]:
    """Divide sequences, (samples, seq), into batches of at most `batch` that do not cross the boundaries of gradient steps.

    The sequences of a step then do not depend on the batch size, unless a batch is larger than a step. Batches have no padding.
    """
    step = max(batch, windows_a_step(*windows.shape))
    return tuple(part for group in windows.split(step) for part in unpadded_batches(group, batch))
