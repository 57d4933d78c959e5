r"""The stored form of a pruned weight: its mask and its kept values, without loss of a bit.

All parts are one-dimensional uint8 tensors. Bits are stored lowest first, and numbers row by row. Empty parts are left out,
except `weight`.

A floating-point number whose bits are all zero is removed; -0.0 is kept. The bits of a kept number are divided into a byte
`exponent` and the rest: for bfloat16 and float16 :math:`\lfloor \mathrm{bits} / 2^7 \rfloor \bmod 2^8` (for float16 that
includes three bits of the mantissa), for float32 the eight exponent bits. The rest is the sign followed by the other bits of
the mantissa.

- `weight`: the rest of each kept number. float32 takes up to three planes of bytes, highest first; planes at the end that
  are all zero are left out.
- `weight_mask`: one bit a number, set if it is kept. With `weight_groups`, only the groups of four bits that are not all zero.
- `weight_groups`: one bit for each group of four numbers, set if any of them is kept.
- `weight_dictionary`: the :math:`2^w - 1` most frequent exponents, :math:`w \le 7`.
- `weight_codes`: :math:`w` planes of bits, lowest first: the position of the exponent in the dictionary; :math:`2^w - 1` if it
  is not in there.
- `weight_exponents`: the exponents that are not in the dictionary, in order.

Integers with scales have, in place of the exponents:

- `weight`: the integers in two's complement. With 8 bits a byte each, with 4 bits two a byte, the lower half first, with 3 bits
  three planes of bits, lowest first. With 3 bits and a mask, integers above 0 are stored minus 1: the mask has no zeros, and
  the range reaches 4.
- `weight_mask`, `weight_groups`: as above. Without either, the integers of removed weights are stored too, which are 0.
- `weight_scales`: the lower bytes of the bfloat16 scales, row by row, then the upper ones.

The archive form has no groups; those of mask, codes, exponents, scales and integers that become smaller by Huffman codes are
zlib streams, named `weight_mask_deflated` and so on. With `weight_deflated`, `weight` is empty, and integers of 3 bits are two
a byte, as those of 4 bits are.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparsellm.errors import BadCheckpoint
from sparsellm.extensions.integers.formats import MASK_WORD, IntegerFormat, mask_bytes
from sparsellm.extensions.packed.formats.bitmask import VALUES_PADDING, Bitmask, bits_of, starts_of_rows, unpack_bits

Bytes = NDArray[np.uint8]
Integers = NDArray[np.int8]

_MORE = ("mask", "mask_deflated", "groups", "dictionary", "codes", "codes_deflated", "exponents", "exponents_deflated")
_QUANTIZED = ("deflated", "scales", "scales_deflated")
PARTS = ("weight", *(f"weight_{name}" for name in _MORE + _QUANTIZED))
"""Names of the parts of a weight."""

_INFLATED = 8
"""Most bytes that a byte of Huffman codes becomes: the shortest code has one bit."""

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
    return {
        "weight_dictionary": dictionary,
        "weight_codes": _to_planes(codes, width),
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
        codes = _from_planes(planes[:, start // 8 : (start + _CHUNK) // 8], len(chunk))
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


def encode_integers(weight: Bitmask, archive: bool) -> dict[str, Bytes]:
    """Return the parts of a matrix of integers, with a mask or with the zeros of all removed weights, whichever is smaller."""
    assert weight.format is not None
    assert weight.scales is not None
    keep = unpack_bits(weight.mask.cpu(), weight.shape[1])
    integers = weight.kept_values().cpu().numpy()
    if weight.format.bits == 3:
        keep = keep.masked_scatter(keep, torch.from_numpy(integers != 0))
        integers = integers[integers != 0]
    mask = np.packbits(keep.numpy(), bitorder="little")
    kept = _encode_integers(integers, weight.format, archive, masked=True) | encode_mask(mask, archive)
    fits = not len(integers) or integers.max() <= weight.format.limits(1)[1]
    if fits and weight.kept > 0.5 * keep.numel():  # a mask of few zeros may take more than they do
        everything = _encode_integers(weight.to_integers().cpu().flatten().numpy(), weight.format, archive, masked=False)
        kept = min(everything, kept, key=size_of)
    scales = weight.scales.cpu().contiguous().view(torch.int16).numpy().view(np.uint16).reshape(-1)
    planes = {"weight_scales": np.concatenate([scales & 255, scales >> 8]).astype(np.uint8)}
    return kept | (deflate(planes) if archive else planes)


def decode_scales(stored: Mapping[str, Bytes], shape: tuple[int, int], format: IntegerFormat) -> Tensor:
    """Return the scales in the parts of a weight of a shape: (out, groups) bfloat16. Raises BadCheckpoint for damaged ones."""
    groups = format.groups(shape[1])
    low, high = read_part(stored, "weight_scales", 2 * shape[0] * groups).reshape(2, -1).astype(np.uint16)
    scales = torch.from_numpy((low | high << 8).view(np.int16)).view(torch.bfloat16).view(shape[0], groups)
    if not bool(scales.isfinite().all()):
        raise BadCheckpoint("weight_scales holds NaN or infinity: the packed weight is damaged.")
    return scales


def _encode_integers(integers: Integers, format: IntegerFormat, archive: bool, *, masked: bool) -> dict[str, Bytes]:
    """Return integers in the fewest bytes; those of 3 bits that are `masked` are not 0."""
    numbers, bits = integers.view(np.uint8), format.bits
    if bits == 3:
        numbers = (integers - (integers > 0) if masked else integers).view(np.uint8)
        plain = {"weight": _to_planes(numbers, bits)}
    else:
        plain = {"weight": numbers.copy() if bits == 8 else join_halves(numbers)}
    if not archive:
        return plain
    deflated = deflate({"weight": numbers if bits == 8 else join_halves(numbers)})
    if "weight_deflated" in deflated and size_of(deflated) < size_of(plain):
        return {"weight": np.zeros(0, dtype=np.uint8)} | deflated
    return plain


def decode_integers(stored: Mapping[str, Bytes], format: IntegerFormat, count: int, *, masked: bool) -> Integers:
    """Return `count` integers, of removed weights too unless they are `masked`. Raises BadCheckpoint for damaged ones."""
    bits = format.bits
    if bits == 8:
        integers = read_part(stored, "weight", count).view(np.int8)
    elif bits == 4 or "weight_deflated" in stored:
        halves = split_halves(read_part(stored, "weight", -(-count // 2)), count)
        integers = (halves ^ 8).view(np.int8) - np.int8(8)
    else:
        plane = -(-count // 8)
        numbers = _from_planes(read_part(stored, "weight", bits * plane).reshape(bits, plane), count)
        integers = (numbers ^ 4).view(np.int8) - np.int8(4)
    if bits == 3 and masked:
        integers += integers >= 0
    least, largest = format.limits(0 if masked else 1)
    if count and (integers.min() < least or integers.max() > largest):
        raise BadCheckpoint(f"weight holds an integer outside of {least} to {largest}: the packed weight is damaged.")
    return integers


def stored_tensors(parts: Mapping[str, Bytes]) -> dict[str, Tensor]:
    """Return the parts that are not empty as tensors, by name; `weight` always."""
    return {name: torch.from_numpy(part) for name, part in parts.items() if len(part) or name == "weight"}


def stored_bytes(parts: Mapping[str, Tensor]) -> dict[str, Bytes]:
    """Return the bytes of parts by name. Raises BadCheckpoint for what is no part."""
    for name, part in parts.items():
        if name not in PARTS or part.dtype != torch.uint8 or part.dim() != 1:
            raise BadCheckpoint(f"{name[:80]} in {part.dtype} with {part.dim()} dimensions is no part of a packed weight.")
    return {name: part.detach().cpu().contiguous().numpy() for name, part in parts.items()}


def encode_mask(mask: Bytes, archive: bool) -> dict[str, Bytes]:
    """Return the mask, one bit a number: as it is or in groups of four bits, whichever is smaller; compressed for archives."""
    if archive:
        return deflate({"weight_mask": mask})
    groups = split_halves(mask, 2 * len(mask))
    used = groups != 0
    count = int(np.count_nonzero(used))
    if mask_bytes(8 * len(mask), count) == len(mask):
        return {"weight_mask": mask}
    return {"weight_mask": join_halves(groups[used]), "weight_groups": np.packbits(used, bitorder="little")}


def join_halves(numbers: Bytes) -> Bytes:
    """Return the lower halves of bytes, two a byte, the first one lower."""
    halves = np.zeros(-(-len(numbers) // 2) * 2, dtype=np.uint8)
    halves[: len(numbers)] = numbers & 15
    return halves[::2] | halves[1::2] << np.uint8(4)


def split_halves(joined: Bytes, count: int) -> Bytes:
    """Return the `count` halves of bytes, each in a byte of its own."""
    return np.stack([joined & 15, joined >> 4], axis=1).reshape(-1)[:count]


def _to_planes(numbers: Bytes, bits: int) -> Bytes:
    """Return the lower bits of bytes in planes, the lowest bits first."""
    planes = [np.packbits(numbers >> bit & 1, bitorder="little") for bit in range(bits)]
    return np.concatenate([np.zeros(0, dtype=np.uint8), *planes])


def _from_planes(planes: Bytes, count: int) -> Bytes:
    """Return the `count` numbers of (bits, bytes) planes, each in a byte of its own."""
    numbers = np.zeros(count, dtype=np.uint8)
    for bit, plane in enumerate(planes):
        numbers |= np.unpackbits(plane, count=count, bitorder="little") << np.uint8(bit)
    return numbers


def size_of(parts: Mapping[str, Bytes]) -> int:
    """Return the bytes of all parts."""
    return sum(map(len, parts.values()))


def deflate(parts: Mapping[str, Bytes]) -> dict[str, Bytes]:
    """Return parts with those compressed by Huffman codes that become smaller."""
    smaller = {}
    for name, part in parts.items():
        compressor = zlib.compressobj(9, memLevel=9, strategy=zlib.Z_HUFFMAN_ONLY)
        compressed = compressor.compress(part.data) + compressor.flush()
        if len(compressed) < len(part):
            smaller[f"{name}_deflated"] = np.frombuffer(bytearray(compressed), dtype=np.uint8)
        else:
            smaller[name] = part
    return smaller


def read_part(stored: Mapping[str, Bytes], name: str, length: int, *, exact: bool = True) -> Bytes:
    """Return a part, inflated if it is deflated, after checking that it has `length` bytes, or at most so many."""
    part = stored.get(name, np.zeros(0, dtype=np.uint8))
    deflated = stored.get(f"{name}_deflated")
    if deflated is not None:
        inflater, most = zlib.decompressobj(), min(length, _INFLATED * len(deflated))
        with suppress(zlib.error):  # after which it is not at the end
            part = np.frombuffer(bytearray(inflater.decompress(deflated.tobytes(), most + 1)), dtype=np.uint8)
        if len(stored.get(name, ())) or not inflater.eof or inflater.unused_data:
            raise BadCheckpoint(f"{name}_deflated has more or fewer bytes than it should: the packed weight is damaged.")
    if len(part) > length or (exact and len(part) != length):
        limit = f"{length:,}" if exact else f"at most {length:,}"
        raise BadCheckpoint(f"{name} has {len(part):,} bytes and should have {limit}: the packed weight is damaged.")
    return part


def decode_mask(stored: Mapping[str, Bytes], count: int) -> Bytes:
    """Return the mask of `count` numbers, one bit each."""
    size = -(-count // 8)
    if "weight_groups" not in stored:
        mask = read_part(stored, "weight_mask", size)
    else:
        flags = read_part(stored, "weight_groups", -(-2 * size // 8))
        used = np.flatnonzero(np.unpackbits(flags, count=2 * size, bitorder="little"))  # faster than a boolean index
        pairs = read_part(stored, "weight_mask", -(-len(used) // 2))
        both = np.zeros(2 * size, dtype=np.uint8)
        both[used] = split_halves(pairs, len(used))
        mask = join_halves(both)
    if count % 8 and mask[-1] >> count % 8:
        raise BadCheckpoint("weight_mask keeps numbers behind the last one: the packed weight is damaged.")
    return mask


def mask_in_rows(mask: Bytes, shape: tuple[int, int]) -> Bytes:
    """Return a mask whose rows begin with a byte of their own and are padded as `Bitmask.mask` is."""
    rows, columns = shape
    padded = np.zeros((rows, -(-columns // MASK_WORD) * 8), dtype=np.uint8)
    if columns % 8 == 0:
        padded[:, : columns // 8] = mask.reshape(rows, columns // 8)
    else:
        keep = np.unpackbits(mask, count=rows * columns, bitorder="little").reshape(rows, columns)
        packed = np.packbits(keep, axis=1, bitorder="little")
        padded[:, : packed.shape[1]] = packed
    return padded
