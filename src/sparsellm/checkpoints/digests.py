"""Digests of an output's files, tensors and report, by which a later change is detected."""

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
"""Bytes of a digest: 128 bits, which makes collisions negligible."""


@dataclass(frozen=True)
class TensorDigest:
    """Digest of a stored tensor.

    Attributes:
        dtype: Name of its dtype, such as "float32".
        shape: Its shape.
        digest: BLAKE2b digest of its bytes, in hexadecimal digits.
        finite: Whether it holds neither NaN nor infinity.
    """

    dtype: str
    shape: tuple[int, ...]
    digest: str
    finite: bool

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of a report."""
        return {"dtype": self.dtype, "shape": list(self.shape), "digest": self.digest}


def file_digest(file: Path) -> str:
    """Return the BLAKE2b digest of a file's bytes, in hexadecimal digits."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=WIDTH)).hexdigest()


def tensor_digests(file: Path) -> dict[str, TensorDigest]:
    """Return the digests of all tensors of a safetensors file, by name. Tensors are read in chunks of rows."""
    return {key: _tensor_digest(TensorLocation(file, key)) for key in keys_of(file)}


def _tensor_digest(location: TensorLocation) -> TensorDigest:
    """Return the digest of one tensor, read in chunks of rows."""
    hasher, finite = hashlib.blake2b(digest_size=WIDTH), True
    rows, dtype, shape = 0, "", torch.Size()
    for chunk in row_chunks(location):
        hasher.update(chunk.contiguous().reshape(-1).view(torch.uint8).numpy().data)
        finite = finite and (not chunk.dtype.is_floating_point or all_finite(chunk.float()))
        rows += len(chunk) if chunk.dim() else 0
        dtype, shape = str(chunk.dtype).removeprefix("torch."), chunk.shape
    return TensorDigest(dtype, (rows, *shape[1:]) if shape else (), hasher.hexdigest(), finite)


def report_digest(report: Mapping[str, Any]) -> str:
    """Return the digest of a report without its own digest. It does not depend on the order of keys."""
    digests = {key: value for key, value in report["digests"].items() if key != "report"}
    text = json.dumps({**report, "digests": digests}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=WIDTH).hexdigest()
