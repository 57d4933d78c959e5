r"""The parts of a stored form that are integers with scales, in place of floating-point values.

As in `encoding`, all parts are one-dimensional uint8 tensors, bits are stored lowest first, and numbers row by row:

- `weight`: the integers in two's complement. With 8 bits a byte each, with 4 bits two a byte, the lower half first, with 3 bits
  three planes of bits, lowest first. With 3 bits and a mask, integers above 0 are stored minus 1: the mask has no zeros, and
  the range reaches 4.
- `weight_mask`, `weight_groups`: as in `encoding`. Without either, the integers of removed weights are stored too, which are 0.
- `weight_scales`: the lower bytes of the bfloat16 scales, row by row, then the upper ones.

In the archive form, mask, scales and integers that become smaller by Huffman codes are zlib streams. `weight` is then empty and
`weight_deflated` holds the integers; those of 3 bits are two a byte, as those of 4 bits are.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparsellm.errors import BadCheckpoint
from sparsellm.extensions.integers.formats import IntegerFormat
from sparsellm.extensions.packed.formats.bitmask import Bitmask, unpack_bits
from sparsellm.extensions.packed.formats.parts import (
    Bytes,
    deflate,
    encode_mask,
    join_halves,
    read_part,
    size_of,
    split_halves,
)

Integers = NDArray[np.int8]


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
        planes = [np.packbits(numbers >> bit & 1, bitorder="little") for bit in range(bits)]
        plain = {"weight": np.concatenate(planes)}
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
        planes = read_part(stored, "weight", bits * plane).reshape(bits, plane)
        numbers = np.zeros(count, dtype=np.uint8)
        for bit in range(bits):
            numbers |= np.unpackbits(planes[bit], count=count, bitorder="little") << np.uint8(bit)
        integers = (numbers ^ 4).view(np.int8) - np.int8(4)
    if bits == 3 and masked:
        integers += integers >= 0
    least, largest = format.limits(0 if masked else 1)
    if count and (integers.min() < least or integers.max() > largest):
        raise BadCheckpoint(f"weight holds an integer outside of {least} to {largest}: the packed weight is damaged.")
    return integers
