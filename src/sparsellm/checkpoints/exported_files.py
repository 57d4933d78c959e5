"""Weight files of compressed-tensors (pack-quantized): integers of 4 or 8 bits with scales, read as dense weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsellm.checkpoints.packed_files import PackedEntry
from sparsellm.errors import BadCheckpoint

EXPORT_METHOD, EXPORT_FORMAT = "compressed-tensors", "pack-quantized"
"""`quant_method` and `format` of the configuration of such a checkpoint."""

PART_ENDINGS = ("_packed", "_scale", "_shape")
"""Endings of the names of a weight's parts."""

STORED_BITS, STORED_WORD = (4, 8), 32
"""Bits of an integer, and of those that several are packed into."""


class ExportedEntry(PackedEntry):
    """What the parts of a weight say about it. `sha256` is empty."""


def is_exported(fields: Mapping[str, Any]) -> bool:
    """Return whether a configuration is that of a checkpoint whose integers can be read: symmetric, columns in their order."""
    settings = fields.get("quantization_config")
    if not isinstance(settings, dict) or (settings.get("quant_method"), settings.get("format")) != (
        EXPORT_METHOD,
        EXPORT_FORMAT,
    ):
        return False
    groups = settings.get("config_groups")
    weights = [group.get("weights") if isinstance(group, dict) else None for group in groups.values()] if groups else []
    return bool(weights) and all(
        isinstance(x, dict) and x.get("symmetric", True) is True and x.get("num_bits") in STORED_BITS and not x.get("actorder")
        for x in weights
    )


def exported_entries(
    file: Path, headers: Mapping[str, tuple[str, tuple[int, ...]]], read_shape: Callable[[str], Sequence[int]]
) -> dict[str, ExportedEntry]:
    """Return the weights whose parts a file holds, by name.

    Args:
        headers: Dtype and shape of each tensor in the file.
        read_shape: Reads the two numbers of a part that holds a shape.

    Raises:
        BadCheckpoint: The parts do not fit each other.
    """
    names = [key.removesuffix(PART_ENDINGS[0]) for key in headers if key.endswith(PART_ENDINGS[0])]
    found = {}
    for name in (name for name in names if all(name + part in headers for part in PART_ENDINGS)):
        (kind, words), (dtype, scales), (shape_kind, pair) = (headers[name + part] for part in PART_ENDINGS)
        shape = tuple(map(int, read_shape(name + PART_ENDINGS[2]))) if (shape_kind, pair) == ("int64", (2,)) else (0, 0)
        bits = next((x for x in STORED_BITS if shape[1] > 0 and words[1:] == (-(-shape[1] * x // STORED_WORD),)), None)
        rows = {shape[0], *words[:1], *scales[:1]}
        if kind != "int32" or bits is None or len(rows) > 1 or len(scales) != 2 or not scales[1] or shape[1] % scales[1]:
            raise BadCheckpoint(
                f"{file.name} is damaged: {name[:80]} of shape {shape} is not in {words} words of integers and {scales} scales."
            )
        found[name] = ExportedEntry(shape, dtype, "", bits, 0 if scales[1] == 1 else shape[1] // scales[1])
    return found


def decode_exported(parts: Mapping[str, Tensor], entry: PackedEntry) -> Tensor:
    """Return a weight, (out, in): its integers times their scales, in the dtype of the scales."""
    integers = unpack_integers(parts["_packed"], entry.bits or 0, entry.shape[1])
    return decoded(integers, parts["_scale"])


def decoded(integers: Tensor, scales: Tensor) -> Tensor:
    """Return integers, (out, in), times the scales of their groups of columns, in the dtype of the scales, without -0.0."""
    factors = scales.float().repeat_interleave(integers.shape[1] // scales.shape[1], 1)
    return integers.float().mul_(factors).add_(0.0).to(scales.dtype)


def pack_integers(integers: Tensor, num_bits: int) -> Tensor:
    """Pack (out, in) integers, plus 2^(num_bits - 1), into (out, ceil(in · num_bits / 32)) int32, lowest bits first."""
    unsigned = (integers.int() + 2 ** (num_bits - 1)).to(torch.uint8)
    unsigned = pad(unsigned, (0, -unsigned.shape[1] % (STORED_WORD // num_bits)))
    if num_bits == 4:
        unsigned = unsigned[:, ::2] | unsigned[:, 1::2] << 4
    words: Tensor = unsigned.contiguous().view(torch.int32)
    return words


def unpack_integers(words: Tensor, num_bits: int, columns: int) -> Tensor:
    """Unpack what `pack_integers` packed: (out, columns) int8."""
    unsigned = words.contiguous().view(torch.uint8)
    if num_bits == 4:
        unsigned = torch.stack([unsigned & 15, unsigned >> 4], 2).flatten(1)
    integers: Tensor = (unsigned[:, :columns].int() - 2 ** (num_bits - 1)).to(torch.int8)
    return integers
