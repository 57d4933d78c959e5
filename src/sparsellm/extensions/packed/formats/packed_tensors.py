"""Packed tensors of any dimensions, quantized or not: their parts in files, and the matrices that these decode to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

from sparsellm.checkpoints.headers import stored_weights
from sparsellm.checkpoints.readers import TensorHeader
from sparsellm.errors import BadCheckpoint, dtype_name
from sparsellm.extensions.integers.formats import IntegerFormat
from sparsellm.extensions.integers.quantization import Quantized, Scales
from sparsellm.extensions.packed.formats import kernels
from sparsellm.extensions.packed.formats.bitmask import Bitmask
from sparsellm.extensions.packed.formats.encoding import decode_parts, encode
from sparsellm.extensions.packed.packed_files import PackedEntry, can_hold, parse_entries, parts_of, sha256_of

DENSE_FROM = 0.9
"""Fraction of kept weights above which a layer is decoded when it is loaded: it runs faster dense."""


def encode_tensor(name: str, tensor: Tensor | Bitmask, archive: bool = False) -> dict[str, Tensor]:
    """Encode a tensor of two or more dimensions, all but the last one of which are its rows, or a quantized matrix.

    Args:
        name: Its name.
        tensor: The tensor, in float32, float16 or bfloat16, or the matrix.
        archive: Compress further. Decoding takes longer.

    Returns:
        The parts by the names under which they are stored: that of the tensor in place of `weight`.
    """
    parts = encode(tensor if isinstance(tensor, Bitmask) else tensor.reshape(-1, tensor.shape[-1]), archive)
    return {name + part.removeprefix("weight"): encoded for part, encoded in parts.items()}


def decode_matrix(parts: Mapping[str, Tensor], entry: PackedEntry) -> Bitmask:
    """Decode the matrix of a packed tensor from its parts by name.

    Raises:
        BadCheckpoint: A part is damaged.
    """
    return decode_parts(parts, entry.matrix, getattr(torch, entry.dtype), entry.integers)


def dense_tensor(matrix: Bitmask, entry: PackedEntry) -> Tensor:
    """Return the tensor that a matrix was encoded from, in its dtype; a quantized one after rounding."""
    return entry.tensor_of(kernels.decode_rows(matrix, dtype=getattr(torch, entry.dtype)))


def pack_quantized(
    name: str, weight: Quantized, entry: PackedEntry, archive: bool = False
) -> tuple[dict[str, Tensor], PackedEntry]:
    """Encode the integers and scales of a tensor.

    Args:
        name: The name of the tensor.
        weight: The matrix.
        entry: The shape and dtype of the tensor, and whether the matrix is its transpose.
        archive: Compress further.

    Returns:
        The parts by the names under which they are stored, and the entry of the tensor as it is rounded.
    """
    # A kept weight that is rounded to 0 is removed: with an integer it would be the same number in more bits.
    matrix = Bitmask.from_quantized(weight, weight.integers != 0)
    described = PackedEntry.of(dense_tensor(matrix, entry), weight.format, transposed=entry.transposed)
    return encode_tensor(name, matrix, archive), described


def pack_again(name: str, tensor: Tensor, entry: PackedEntry, scales: Tensor | None) -> tuple[dict[str, Tensor], PackedEntry]:
    """Encode a tensor that was decoded from a packed one. If it is not quantized any more, it is stored bit by bit.

    Args:
        name: The name of its tensor.
        tensor: The tensor, perhaps in another dtype.
        entry: What was said of the packed one.
        scales: Those of the packed one, if it was quantized.

    Returns:
        The parts by the names under which they are stored, and the entry of the tensor.
    """
    if scales is not None and entry.integers is not None:
        stored = tensor.to(getattr(torch, entry.dtype))
        exact = Scales(scales, entry.integers).quantized(entry.matrix_of(stored))
        if exact is not None and bool((stored == tensor).all()):
            return pack_quantized(name, exact, replace(entry, dtype=dtype_name(tensor.dtype)))
    return encode_tensor(name, tensor), PackedEntry.of(tensor)


@dataclass(frozen=True)
class PackedWeight:
    """A packed tensor of a weight file.

    Attributes:
        entry: What its file says about it.
        parts: The file of each part and its name there, by the name of the part.
        sizes: The bytes of each part. Those of `weight` are the number of kept weights in 16 bits, and at least that number in
            32 bits.
    """

    entry: PackedEntry
    parts: Mapping[str, tuple[Path, str]] = field(hash=False)
    sizes: Mapping[str, int] = field(hash=False)
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

    @property
    def is_sparse(self) -> bool:
        """Whether so few weights are kept that a layer computes with the packed ones; archives have dense tensors, too."""
        if self.entry.bits is not None:
            return True
        rows, columns = self.entry.matrix
        return self.sizes["weight"] <= DENSE_FROM * (3 if self.entry.dtype == "float32" else 1) * rows * columns

    def decode(self, parts: Mapping[str, Tensor], dtype: torch.dtype | None) -> Tensor:
        """Decode the tensor, in its own dtype. Raises BadCheckpoint if a part is damaged, or the digest another one."""
        tensor = dense_tensor(decode_matrix(parts, self.entry), self.entry)
        if sha256_of(tensor) != self.entry.sha256:
            raise BadCheckpoint("it has another checksum than when it was packed")
        return tensor


def packed_weights(file: Path) -> dict[str, PackedWeight]:
    """The packed tensors of a weight file by name. Raises BadCheckpoint if the file is damaged."""
    return {name: weight for name, weight in stored_weights(file).items() if isinstance(weight, PackedWeight)}


def find_packed(file: Path, headers: Mapping[str, TensorHeader], metadata: Mapping[str, str]) -> dict[str, PackedWeight]:
    """The packed tensors of a file. Their sizes are what the parts can hold."""
    entries = parse_entries(file, metadata)
    if "-of-" in file.name:  # transformers writes the list of all shards into each
        entries = {key: entry for key, entry in entries.items() if key in headers}
    found: dict[str, PackedWeight] = {}
    parts: set[str] = set()
    for key, entry in entries.items():
        names = parts_of(key, headers)
        are_bytes = all(headers[name].dtype == "uint8" and len(headers[name].shape) == 1 for name in names.values())
        sizes = {part: headers[name].numel for part, name in names.items()}
        size = sum(sizes.values())
        if key not in headers or not are_bytes or not can_hold(size, entry.matrix):
            raise BadCheckpoint(
                f"{file.name} is damaged: {key[:80]} of shape {entry.shape} cannot be in parts of {size:,} bytes. "
                "Get a sound copy of the file."
            )
        found[key] = PackedWeight(entry, {part: (file, name) for part, name in names.items()}, sizes)
        parts |= set(names.values())
    if (left := next((key for key in headers if key not in parts and len(parts_of(key, headers)) > 1), None)) is not None:
        raise BadCheckpoint(f"{file.name} is damaged: it does not list {left[:80]}, of which it holds the parts.")
    return found
