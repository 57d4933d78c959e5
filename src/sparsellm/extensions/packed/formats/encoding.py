r"""The stored form of a pruned weight: its mask and its kept values, without loss of a bit; `integer_encoding` has integers.

A number whose bits are all zero is removed; -0.0 is kept. The bits of a kept number are divided into a byte `exponent` and
the rest: for bfloat16 and float16 :math:`\lfloor \mathrm{bits} / 2^7 \rfloor \bmod 2^8` (for float16 that includes three bits
of the mantissa), for float32 the eight exponent bits. The rest is the sign followed by the other bits of the mantissa.

All parts are one-dimensional uint8 tensors. Bits are stored lowest first, and numbers row by row:

- `weight`: the rest of each kept number. float32 takes up to three planes of bytes, highest first; planes at the end that
  are all zero are left out.
- `weight_mask`: one bit a number, set if it is kept. With `weight_groups`, only the groups of four bits that are not all zero.
- `weight_groups`: one bit for each group of four numbers, set if any of them is kept.
- `weight_dictionary`: the :math:`2^w - 1` most frequent exponents, :math:`w \le 7`.
- `weight_codes`: :math:`w` planes of bits, lowest first: the position of the exponent in the dictionary; :math:`2^w - 1` if it
  is not in there.
- `weight_exponents`: the exponents that are not in the dictionary, in order.

Empty parts are left out, except `weight`. The archive form has no groups; those of mask, codes and exponents that become
smaller by Huffman codes are zlib streams, named `weight_mask_deflated` and so on.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparsellm.errors import BadCheckpoint
from sparsellm.extensions.integers.formats import IntegerFormat
from sparsellm.extensions.packed.formats.bitmask import VALUES_PADDING, Bitmask, bits_of, starts_of_rows
from sparsellm.extensions.packed.formats.integer_encoding import decode_integers, decode_scales, encode_integers
from sparsellm.extensions.packed.formats.parts import (
    Bytes,
    decode_mask,
    deflate,
    encode_mask,
    mask_in_rows,
    read_part,
    size_of,
    stored_bytes,
    stored_tensors,
)

_WIDEST = 7
"""Most bits of a code. Eight would be as long as an exponent."""

_ARCHIVE_WIDTHS = (0, 1, 2)
"""Widths that the archive form tries. Of few exponents, a Huffman code of single ones (0) takes a bit each."""

_CHUNK = 2**17
"""Numbers that are decoded at a time, so that intermediate results stay in the processor's cache."""


def encode(weight: Tensor | Bitmask, archive: bool = False) -> dict[str, Tensor]:
    """Encode a weight. Time and memory are proportional to its size.

    Args:
        weight: (out, in), bfloat16, float16 or float32, not empty; or a matrix of integers.
        archive: Compress further. Decoding takes longer.

    Returns:
        The parts that are not empty, by name; `weight` always.
    """
    if isinstance(weight, Bitmask):
        return stored_tensors(encode_integers(weight, archive))
    integers = bits_of(weight.detach().cpu()).numpy().reshape(-1)
    bits: NDArray[np.unsignedinteger] = integers.view(np.uint32 if integers.itemsize == 4 else np.uint16)
    keep = bits != 0
    kept = bits[np.flatnonzero(keep)]  # faster than a boolean index
    parts = {"weight": _rest(kept)}
    exponents = (kept >> (7 if kept.itemsize == 2 else 23)).astype(np.uint8)
    mask = np.packbits(keep, bitorder="little")
    choices = [deflate(_coded(exponents, width)) for width in _ARCHIVE_WIDTHS] if archive else [_coded(exponents)]
    parts |= encode_mask(mask, archive) | min(choices, key=size_of)
    return stored_tensors(parts)


def decode_parts(
    parts: Mapping[str, Tensor], shape: tuple[int, int], dtype: torch.dtype, format: IntegerFormat | None = None
) -> Bitmask:
    """Decode what `encode` returned. Every length is checked before anything is indexed.

    Memory is in proportion to the shape, which the header of a file was compared with (`can_hold`).

    Args:
        parts: The parts by name.
        shape: (out, in).
        dtype: bfloat16, float16 or float32: the dtype of the weight as an ordinary tensor.
        format: The format of integers; None for floating-point values.

    Returns:
        The weight, whose numbers have the same bits as before.

    Raises:
        BadCheckpoint: A part has the wrong dtype, shape or length, contradicts another one, or holds impossible numbers.
    """
    stored = stored_bytes(parts)
    masked = format is None or bool(stored.keys() & {"weight_mask", "weight_mask_deflated", "weight_groups"})
    ones = np.ones(0 if masked else shape[0] * shape[1], dtype=np.bool_)
    mask = decode_mask(stored, shape[0] * shape[1]) if masked else np.packbits(ones, bitorder="little")
    kept = int(np.bitwise_count(mask).sum(dtype=np.int64))
    if format is not None:
        integers = torch.from_numpy(decode_integers(stored, format, kept, masked=masked))
        scales = decode_scales(stored, shape, format)
        rows = torch.from_numpy(mask_in_rows(mask, shape))
        return Bitmask.from_parts(rows, integers, shape[1], scales=scales, format=format)
    exponents = _read_exponents(stored, kept)
    rest = read_part(stored, "weight", kept * (3 if dtype == torch.float32 else 1), exact=False)
    values = _join(rest, exponents, kept, dtype=dtype)
    rows = torch.from_numpy(mask_in_rows(mask, shape))
    return Bitmask(shape, rows, values, starts_of_rows(rows, None))


def _rest(kept: NDArray[np.unsignedinteger]) -> Bytes:
    """Return the sign and the bits of the mantissa that are not in the exponent: a byte, or up to three planes of bytes."""
    if kept.itemsize == 2:
        return ((kept >> 8 & 0x80) | (kept & 0x7F)).astype(np.uint8)
    rest = (kept >> 8 & 0x800000) | (kept & 0x7FFFFF)
    planes = [(rest >> shift).astype(np.uint8) for shift in (16, 8, 0)]
    used = max((number for number, plane in enumerate(planes, 1) if plane.any()), default=1)
    return np.concatenate(planes[:used])


def _coded(exponents: Bytes, width: int | None = None) -> dict[str, Bytes]:
    """Return the exponents in codes of a width in bits; None chooses the one that takes the fewest bytes."""
    counts = np.bincount(exponents, minlength=256)
    order = np.argsort(-counts, kind="stable")
    if width is None:
        rest = len(exponents) - np.concatenate([[0], np.cumsum(counts[order])])  # outside of a dictionary of each size
        plane = -(-len(exponents) // 8)
        width = int(np.argmin([bits * plane + 2**bits - 1 + int(rest[2**bits - 1]) for bits in range(_WIDEST + 1)]))
    dictionary = order[: 2**width - 1].astype(np.uint8)
    code_of = np.full(256, 2**width - 1, dtype=np.uint8)
    code_of[dictionary] = np.arange(len(dictionary), dtype=np.uint8)
    codes = code_of[exponents]
    planes = [np.packbits(codes >> bit & 1, bitorder="little") for bit in range(width)]
    return {
        "weight_dictionary": dictionary,
        "weight_codes": np.concatenate([np.zeros(0, dtype=np.uint8), *planes]),
        "weight_exponents": exponents[codes == 2**width - 1],
    }


def _read_exponents(stored: Mapping[str, Bytes], kept: int) -> Bytes:
    """Return the exponent of each kept number."""
    dictionary = read_part(stored, "weight_dictionary", 2**_WIDEST - 1, exact=False)
    width = len(dictionary).bit_length()
    if len(dictionary) != 2**width - 1:
        raise BadCheckpoint(f"weight_dictionary has {len(dictionary):,} bytes, which is no power of two less one.")
    plane = -(-kept // 8)
    planes = read_part(stored, "weight_codes", width * plane).reshape(width, plane)
    if width == 0:
        return read_part(stored, "weight_exponents", kept)
    others = read_part(stored, "weight_exponents", kept, exact=False)
    table = np.append(dictionary, np.uint8(0))
    exponents = np.empty(kept, dtype=np.uint8)
    used = 0
    for start in range(0, kept, _CHUNK):
        chunk = exponents[start : start + _CHUNK]
        packed = planes[:, start // 8 : (start + _CHUNK) // 8]
        codes = np.unpackbits(packed[0], count=len(chunk), bitorder="little")
        for bit in range(1, width):
            codes |= np.unpackbits(packed[bit], count=len(chunk), bitorder="little") << bit
        np.take(table, codes, out=chunk)
        escaped = np.flatnonzero(codes == len(dictionary))
        if len(others) - used < len(escaped):
            break
        chunk[escaped] = others[used : used + len(escaped)]
        used += len(escaped)
    else:
        if used == len(others):
            return exponents
    raise BadCheckpoint("weight_exponents has not one byte for each escape code: the packed weight is damaged.")


def _join(rest: Bytes, exponents: Bytes, kept: int, *, dtype: torch.dtype) -> Tensor:
    """Return the kept numbers from their exponents and the rest of their bits, and `VALUES_PADDING` zeros."""
    planes = len(rest) // max(kept, 1)
    if len(rest) != planes * kept or (kept and planes not in ((1, 2, 3) if dtype == torch.float32 else (1,))):
        raise BadCheckpoint(f"weight has {len(rest):,} bytes for {kept:,} kept numbers: the packed weight is damaged.")
    values = np.zeros(kept + VALUES_PADDING, dtype=np.uint32 if dtype == torch.float32 else np.uint16)
    for start in range(0, kept, _CHUNK):
        stop = min(start + _CHUNK, kept)
        bits = exponents[start:stop].astype(values.dtype)
        if dtype == torch.float32:
            bits <<= 23
            high = rest[start:stop].astype(np.uint32)
            bits |= (high & 0x80) << 24 | (high & 0x7F) << 16
            for number in range(1, planes):
                plane = rest[number * kept + start : number * kept + stop]
                bits |= plane.astype(np.uint32) << (16 - 8 * number)
        else:
            bits <<= 7
            low = rest[start:stop].astype(np.uint16)
            bits |= (low & 0x80) << 8 | low & 0x7F
        values[start:stop] = bits
    return torch.from_numpy(values.view(np.int32 if dtype == torch.float32 else np.int16)).view(dtype)
