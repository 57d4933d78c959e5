"""The packed tensors of a checkpoint, and the layers that compute with them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sparsellm.checkpoints.headers import locate_all, read_headers
from sparsellm.checkpoints.readers import TensorHeader
from sparsellm.errors import BadCheckpoint
from sparsellm.extensions.packed.formats.bitmask import Bitmask
from sparsellm.extensions.packed.formats.linear import PackedLinear
from sparsellm.extensions.packed.formats.packed_tensors import decode_matrix
from sparsellm.extensions.packed.packed_files import PackedEntry, packed_entries, parts_of

DENSE_FROM = 0.9
"""Fraction of kept weights above which a layer is decoded when it is loaded: it runs faster dense."""


@dataclass(frozen=True)
class PackedTensor:
    """A packed tensor of a checkpoint.

    Attributes:
        entry: What its file says about it.
        parts: The stored names of its parts, by name of the part.
        size: The size of its first part: the number of kept weights in 16 bits, and at least that number in 32 bits.
    """

    entry: PackedEntry
    parts: Mapping[str, str]
    size: int

    @property
    def is_sparse(self) -> bool:
        """Whether so few weights are kept that a layer computes with the packed ones; archives have dense tensors, too."""
        if self.entry.bits is not None:
            return True
        rows, columns = self.entry.matrix
        return self.size <= DENSE_FROM * (3 if self.entry.dtype == "float32" else 1) * rows * columns

    def layer(self, *, dtype: torch.dtype, transposed: bool = False) -> PackedLinear:
        """Build a layer on the meta device, without a bias, that has room for the tensor."""
        outputs, inputs = self.entry.shape[::-1] if transposed else self.entry.shape
        return PackedLinear(
            inputs,
            outputs,
            False,
            kept=self.size,
            format=self.entry.integers,
            transposed=transposed,
            dtype=dtype,
            device="meta",
        )

    def decode(self, stored: Mapping[str, Tensor]) -> Bitmask:
        """Decode its parts, given by stored name, as a matrix."""
        parts = {part: stored[name] for part, name in self.parts.items()}
        try:
            return decode_matrix(parts, self.entry)
        except BadCheckpoint as error:
            raise BadCheckpoint(f"{self.parts['weight']}: {error}") from None


def read_packed(files: Iterable[Path]) -> tuple[dict[str, PackedTensor], set[str]]:
    """Return the packed tensors in weight files by name, and the names of the other tensors.

    Raises:
        BadCheckpoint: A file is damaged.
    """
    headers: dict[str, TensorHeader] = {}
    entries: dict[str, PackedEntry] = {}
    for file in files:
        read_headers(file)  # which checks what `locate_all` reads
        headers |= {name: header for name, (header, _) in locate_all(file).items()}
        entries |= packed_entries(file)
    packed = {
        key: PackedTensor(entry, parts_of(key, headers), headers[key].numel) for key, entry in entries.items() if key in headers
    }
    return packed, set(headers) - {name for tensor in packed.values() for name in tensor.parts.values()}
