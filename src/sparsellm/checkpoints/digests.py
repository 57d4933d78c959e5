"""Digests of an output's files, of the tensors in them and of its report: by these it is known to be as it was written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sparsellm.checkpoints.tensor_index import TensorLocation, keys_of, row_chunks
from sparsellm.solvers.linalg import all_finite

WIDTH = 16
"""Bytes of a digest: 128 bits, so that no two contents have the same one."""


@dataclass(frozen=True)
class TensorDigest:
    """A tensor as it is stored: dtype, shape, digest of its bytes, and whether it holds neither NaN nor infinity."""

    dtype: str
    shape: tuple[int, ...]
    digest: str
    finite: bool

    def to_dict(self) -> dict[str, Any]:
        """What a report keeps of it."""
        return {"dtype": self.dtype, "shape": list(self.shape), "digest": self.digest}


def file_digest(file: Path) -> str:
    """The BLAKE2b digest of a file's bytes, in hexadecimal digits."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=WIDTH)).hexdigest()


def tensor_digests(file: Path) -> dict[str, TensorDigest]:
    """Every tensor of a safetensors file by its name there, read some rows at a time."""
    return {key: _tensor_digest(TensorLocation(file, key)) for key in keys_of(file)}


def _tensor_digest(place: TensorLocation) -> TensorDigest:
    """One tensor, some rows at a time."""
    found, finite = hashlib.blake2b(digest_size=WIDTH), True
    rows, dtype, shape = 0, "", torch.Size()
    for piece in row_chunks(place):
        found.update(piece.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        finite = finite and (not piece.dtype.is_floating_point or all_finite(piece.float()))
        rows += len(piece) if piece.dim() else 0
        dtype, shape = str(piece.dtype).removeprefix("torch."), piece.shape
    return TensorDigest(dtype, (rows, *shape[1:]) if shape else (), found.hexdigest(), finite)


def report_digest(report: Mapping[str, Any]) -> str:
    """The digest of a report as JSON has it, but for the digest itself; the order of its keys does not matter."""
    digests = {key: value for key, value in report["digests"].items() if key != "report"}
    text = json.dumps({**report, "digests": digests}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=WIDTH).hexdigest()
