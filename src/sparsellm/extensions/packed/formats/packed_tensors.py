"""Packed tensors of any dimensions, quantized or not: their parts by stored name, and the matrices that these decode to."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from sparsellm.errors import dtype_name
from sparsellm.extensions.integers.formats import mask_bits
from sparsellm.extensions.integers.quantization import Scales
from sparsellm.extensions.packed.formats import kernels
from sparsellm.extensions.packed.formats.bitmask import Bitmask
from sparsellm.extensions.packed.formats.encoding import decode_parts, encode
from sparsellm.extensions.packed.packed_files import PackedEntry

SPARSE = 0.1
"""Fraction of zeros from which a matrix is packed for running. With fewer, decoding costs more time than its bytes."""

CODED_BITS = {"bfloat16": 11.2, "float16": 14.2, "float32": 27.2}
"""Bits that a number of a dense Gaussian matrix takes in the plain form."""

SAVED_BITS, SAVED_FROM = 0.7, 0.3
"""Bits that a kept number takes less where so many small ones are removed, since few exponents are left."""


def estimated_bytes(numel: int, removed: int, dtype: str) -> int:
    """Estimate the bytes of a matrix in the plain form from above, within a few per cent for weights pruned by their size.

    Args:
        numel: Number of its weights.
        removed: How many are removed. The estimate takes their positions for random.
        dtype: Name of its dtype.
    """
    sparsity = removed / max(numel, 1)
    item: torch.dtype = getattr(torch, dtype)
    dense = numel * item.itemsize
    if sparsity < SPARSE:
        return dense
    value = CODED_BITS[dtype] - SAVED_BITS * min(1.0, sparsity / SAVED_FROM) ** 2
    return min(dense, math.ceil((numel * mask_bits(sparsity) + (numel - removed) * value) / 8))


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
    """Return the tensor that a matrix was encoded of, in its dtype; of a quantized one, as it is once it is rounded."""
    return entry.tensor_of(kernels.decode_rows(matrix, dtype=getattr(torch, entry.dtype)))


def pack_quantized(
    name: str, matrix: Bitmask, entry: PackedEntry, archive: bool = False
) -> tuple[dict[str, Tensor], PackedEntry]:
    """Encode a quantized matrix.

    Args:
        name: The name of its tensor.
        matrix: The matrix.
        entry: What there is to say of the tensor, without the digest.
        archive: Compress further.

    Returns:
        The parts by the names under which they are stored, and the entry with the digest.
    """
    dense = dense_tensor(matrix, entry)
    described = PackedEntry.of(dense, entry.integers, transposed=entry.transposed)
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
            matrix = Bitmask.from_quantized(exact, exact.integers != 0)
            return pack_quantized(name, matrix, replace(entry, dtype=dtype_name(tensor.dtype)))
    return encode_tensor(name, tensor), PackedEntry.of(tensor)
