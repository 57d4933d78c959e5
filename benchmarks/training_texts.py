"""Reads texts to train on and to measure, for `python benchmarks/larger_model.py`."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import lzma
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from sparsellm.errors import BadText

OPENERS: dict[str, Callable[..., Any]] = {".txt": open, ".xz": lzma.open, ".gz": gzip.open, ".bz2": bz2.open}
HELD_BACK = "held-back.txt"


@dataclass(frozen=True)
class Texts:
    """The text to train on and the text to measure, with a digest of both."""

    train: str
    held_back: str
    digest: str


def read_texts(paths: Sequence[Path]) -> Texts:
    """Read files and folders of text.

    Raises:
        BadText: A path is missing or holds no text, or a file cannot be read.
    """
    train, held_back = [], []
    for path in paths:
        files = sorted(file for file in path.iterdir() if file.suffix in OPENERS) if path.is_dir() else [path]
        if not files:
            raise BadText(f"{path} holds no .txt files, also none of .xz, .gz or .bz2. Make them by benchmarks/english.py.")
        for file in files:
            try:
                with OPENERS.get(file.suffix, open)(file, "rt", encoding="utf-8", errors="replace") as opened:
                    (held_back if file.name.startswith(HELD_BACK) else train).append(opened.read())
            except (OSError, EOFError, lzma.LZMAError) as error:
                raise BadText(f"{file} cannot be read: {error}.") from error
    text, rest = "\n\n".join(train), "\n\n".join(held_back)
    if not rest:
        at = len(text) * 19 // 20
        text, rest = text[:at], text[at:]
    return Texts(text, rest, hashlib.sha256(f"{text}\0{rest}".encode()).hexdigest()[:16])


def token_ids(tokenizer: PreTrainedTokenizerBase, text: str) -> Tensor:
    """Token ids of a text, (tokens,) int32, in pieces that several threads tokenize."""
    pieces = [f"{piece}\n\n" for piece in text.split("\n\n")]
    found = []
    for start in range(0, len(pieces), 10_000):
        encodings = tokenizer.backend_tokenizer.encode_batch_fast(pieces[start : start + 10_000])
        found.append(np.concatenate([np.asarray(encoding.ids, np.uint16) for encoding in encodings]))
    return torch.from_numpy(np.concatenate(found).astype(np.int32))
