"""What a tokenizer does to a string: token ids, special tokens, and unknown tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparsellm.errors import BadText

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

UNKNOWN, TOO_MANY_UNKNOWN = 0.05, 0.5
"""Fractions of unknown tokens from which there is a note, and from which a text is refused."""


def adds_bos(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer by default begins a text with its BOS token."""
    own: int | None = getattr(tokenizer, "bos_token_id", None)
    if own is None:
        return False
    with_special, without = (tokenize(tokenizer, "a", special=special)[:1].tolist() for special in (True, False))
    return with_special == [own] != without


def tokenize(tokenizer: PreTrainedTokenizerBase, string: str, *, special: bool = True) -> Tensor:
    """Tokenize a string to (tokens,) int64, without padding, truncation or a warning about its length.

    Args:
        special: Whether to add the tokenizer's special tokens. Strings from a chat template contain them.
    """
    options = {} if special else {"add_special_tokens": False}
    encoded = tokenizer(string, padding=False, truncation=False, return_attention_mask=False, verbose=False, **options)
    return torch.tensor(encoded["input_ids"], dtype=torch.long)


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
    if share >= UNKNOWN:
        yield f"{100 * share:.0f} % of the tokens of {source} are unknown to the tokenizer ({tokenizer.unk_token})"
