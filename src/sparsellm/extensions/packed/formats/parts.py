"""The parts of a stored form: bytes that may be compressed by Huffman codes, and the mask of the kept numbers.

`encoding` says which parts there are.
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
from sparsellm.extensions.integers.formats import MASK_WORD, mask_bytes

Bytes = NDArray[np.uint8]

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
"""Dtypes that can be encoded."""

_MORE = ("mask", "mask_deflated", "groups", "dictionary", "codes", "codes_deflated", "exponents", "exponents_deflated")
_QUANTIZED = ("deflated", "scales", "scales_deflated")
PARTS = ("weight", *(f"weight_{name}" for name in _MORE + _QUANTIZED))
"""Names of the parts of a weight."""

_INFLATED = 8
"""Most bytes that a byte of Huffman codes becomes: the shortest code has one bit."""


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
