"""The reader of packed checkpoints: which parts form a tensor, and its bits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparsellm.checkpoints.readers import FoundWeights, TensorHeader
from sparsellm.errors import BadCheckpoint
from sparsellm.extensions.integers.formats import IntegerFormat
from sparsellm.extensions.packed.formats.packed_tensors import decode_matrix, dense_tensor
from sparsellm.extensions.packed.packed_files import (
    PackedEntry,
    can_hold,
    check_version,
    parse_entries,
    parts_of,
    sha256_of,
)


@dataclass(frozen=True)
class PackedWeight:
    """A packed tensor of a weight file."""

    entry: PackedEntry
    parts: Mapping[str, tuple[Path, str]] = field(hash=False)
    adds_bias: ClassVar[bool] = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.entry.shape

    @property
    def dtype(self) -> str:
        """Name of its dtype."""
        return self.entry.dtype

    @property
    def integers(self) -> IntegerFormat | None:
        """The format of the integers of a quantized tensor; None of one that is not."""
        return self.entry.integers

    def decode(self, parts: Mapping[str, Tensor], dtype: torch.dtype | None) -> Tensor:
        """Decode the tensor, in its own dtype. Raises BadCheckpoint if a part is damaged, or the digest another one."""
        tensor = dense_tensor(decode_matrix(parts, self.entry), self.entry)
        if sha256_of(tensor) != self.entry.sha256:
            raise BadCheckpoint("it has another checksum than when it was packed")
        return tensor


class PackedReader:
    """Reads packed checkpoints.

    Args:
        name: Name of the checkpoint, for messages.
        fields: The fields of its config.json.

    Raises:
        UnsupportedModel: It is packed in a version of the format that this package does not read.
    """

    lossless: ClassVar[bool] = True

    def __init__(self, name: str, fields: Mapping[str, Any]) -> None:
        check_version(name, fields)

    def register(self) -> None:
        """Make transformers load packed models."""
        from sparsellm.extensions.packed.formats.transformers import register  # imports transformers

        register()

    def find(
        self,
        headers: Mapping[Path, Mapping[str, TensorHeader]],
        metadata: Mapping[Path, Mapping[str, str]],
        read: Callable[[Path, str], bytes],
    ) -> FoundWeights:
        """Find the packed tensors, as `sparsellm.checkpoints.readers.Reader.find`."""
        weights = {file: _packed_weights(file, stored, metadata[file]) for file, stored in headers.items()}
        parts = {name for found in weights.values() for weight in found.values() for _, name in weight.parts.values()}
        return FoundWeights(weights, frozenset(parts), lossless=True)


def _packed_weights(file: Path, headers: Mapping[str, TensorHeader], metadata: Mapping[str, str]) -> dict[str, PackedWeight]:
    """The packed tensors of a file. Their sizes are what the parts can hold."""
    entries = parse_entries(file, metadata)
    if "-of-" in file.name:  # transformers writes the list of all shards into each
        entries = {key: entry for key, entry in entries.items() if key in headers}
    found: dict[str, PackedWeight] = {}
    parts: set[str] = set()
    for key, entry in entries.items():
        names = parts_of(key, headers)
        are_bytes = all(headers[name].dtype == "uint8" and len(headers[name].shape) == 1 for name in names.values())
        size = sum(headers[name].numel for name in names.values())
        if key not in headers or not are_bytes or not can_hold(size, entry.matrix):
            raise BadCheckpoint(
                f"{file.name} is damaged: {key[:80]} of shape {entry.shape} cannot be in parts of {size:,} bytes. "
                "Get a sound copy of the file."
            )
        found[key] = PackedWeight(entry, {part: (file, name) for part, name in names.items()})
        parts |= set(names.values())
    if left := next((key for key in headers if key not in parts and len(parts_of(key, headers)) > 1), None):
        raise BadCheckpoint(f"{file.name} is damaged: it does not list {left[:80]}, of which it holds the parts.")
    return found
