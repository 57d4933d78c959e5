"""What weight files say of their tensors: names, dtypes and shapes, held against the file's length. No tensor is read."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sparsellm.errors import BadCheckpoint
from sparsellm.json_files import parse_json

LONGEST_HEADER = 100 * 2**20
"""Bytes of a safetensors header at most: the limit of the safetensors library."""

KINDS = {
    "F64": ("float64", 64),
    "F32": ("float32", 32),
    "F16": ("float16", 16),
    "BF16": ("bfloat16", 16),
    "F8_E5M2": ("float8_e5m2", 8),
    "F8_E4M3": ("float8_e4m3fn", 8),
    "F8_E5M2FNUZ": ("float8_e5m2fnuz", 8),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 8),
    "F8_E8M0": ("float8_e8m0fnu", 8),
    "F6_E2M3": ("float6_e2m3", 6),
    "F6_E3M2": ("float6_e3m2", 6),
    "F4": ("float4_e2m1fn", 4),
    "C64": ("complex64", 64),
    "I64": ("int64", 64),
    "I32": ("int32", 32),
    "I16": ("int16", 16),
    "I8": ("int8", 8),
    "U64": ("uint64", 64),
    "U32": ("uint32", 32),
    "U16": ("uint16", 16),
    "U8": ("uint8", 8),
    "BOOL": ("bool", 8),
}
"""By safetensors' word for a dtype, torch's, and the bits of an entry."""

FLOATS = ("float32", "bfloat16", "float16", "float64")
"""Dtypes of weights that are pruned."""

ZIP = b"PK\x03\x04"
"""What a .bin file begins with since torch 1.6."""


@dataclass(frozen=True)
class Entry:
    """A tensor in a file. dtype: as torch calls it, such as "float32"."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)


def entries_of(file: Path) -> dict[str, Entry]:
    """The tensors of a .safetensors or .bin file, by name; their numbers are not read.

    Raises BadCheckpoint for a file that is damaged, cut off, or holds more than tensors.
    """
    if file.suffix == ".safetensors":
        return _safetensors(file)
    return {key: Entry(dtype_name(tensor.dtype), tuple(tensor.shape)) for key, tensor in unpickled(file).items()}


def dtype_name(dtype: torch.dtype) -> str:
    """What torch calls a dtype, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def all_entries(files: Iterable[Path]) -> dict[str, Entry]:
    """The tensors of several files."""
    return {key: entry for file in files for key, entry in entries_of(file).items()}


def is_zip(file: Path) -> bool:
    """Whether a .bin file is of the format since torch 1.6, whose tensors can be read by themselves."""
    with file.open("rb") as stream:
        return stream.read(len(ZIP)) == ZIP


def unpickled(file: Path) -> dict[str, Tensor]:
    """The tensors of a .bin file, mapped and not yet read where the format allows it; no code that it may hold is run.

    Raises BadCheckpoint for a file that is damaged or holds more than tensors.
    """
    try:
        content: Any = torch.load(file, map_location="cpu", mmap=is_zip(file), weights_only=True)
    except UnpicklingError as error:
        raise BadCheckpoint(
            f"{file.name} is damaged or holds more than tensors, and code in a weight file is not run."
        ) from error
    except Exception as error:  # torch parses a damaged file as far as it can, and raises whatever comes
        raise BadCheckpoint(f"{file.name} is damaged or cut off: torch cannot read it. Download it again.") from error
    if not isinstance(content, Mapping):
        raise BadCheckpoint(f"{file.name} holds a {type(content).__name__}, not tensors by name.")
    size = file.stat().st_size
    for key, tensor in content.items():
        plain = isinstance(key, str) and isinstance(tensor, Tensor) and tensor.layout == torch.strided
        if not plain or tensor.is_quantized or tensor.device.type != "cpu":
            raise BadCheckpoint(f"{file.name} holds more than plain tensors: {str(key)[:80]!r} is none.")
        if tensor.numel() * tensor.element_size() > size:  # repeated by a stride of zero
            raise BadCheckpoint(f"{file.name} is damaged: it has {size:,} bytes, and {key} alone would take more.")
    return dict(content)


def _safetensors(file: Path) -> dict[str, Entry]:
    """The tensors of a safetensors file, whose bytes they fill without gap or overlap."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, LONGEST_HEADER):
            raise BadCheckpoint(f"{file.name} is not a safetensors file, or is cut off. Download it again.")
        header = stream.read(length)
    content = parse_json(header, f"The header of {file.name}", BadCheckpoint)
    try:
        spans = {key: _span(entry) for key, entry in content.items() if key != "__metadata__"}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        why = error if isinstance(error, ValueError) else "an entry is of another form"
        raise BadCheckpoint(f"{file.name} has a damaged header: {str(why)[:120]}. Download it again.") from None
    end = 0
    for key, (_, start, stop) in sorted(spans.items(), key=lambda item: item[1][1:]):
        if start != end:
            raise BadCheckpoint(
                f"{file.name} has a damaged header: {key[:80]!r} begins at {start}, not {end}. Download it again."
            )
        end = stop
    if 8 + length + end != size:
        raise BadCheckpoint(
            f"{file.name} has {size:,} bytes where its header calls for {8 + length + end:,}. Download it again."
        )
    try:
        with safe_open(file, framework="pt"):  # what else the library minds
            return {key: spans[key][0] for key in sorted(spans)}
    except SafetensorError as error:
        raise BadCheckpoint(f"{file.name} is not a sound safetensors file: {str(error).splitlines()[0]}.") from None


def _span(entry: Any) -> tuple[Entry, int, int]:
    """A header's entry, and from which byte to which its numbers are; ValueError where they do not agree."""
    name, bits = KINDS[entry["dtype"]] if isinstance(entry["dtype"], str) and entry["dtype"] in KINDS else ("", 0)
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not bits:
        raise ValueError(f"no dtype is called {entry['dtype']!r}")
    if not (_lengths(shape) and _lengths(offsets) and len(offsets) == 2):
        raise ValueError("a shape or an offset is not a list of whole numbers of at least 0")
    start, stop = offsets
    if 8 * (stop - start) != math.prod(shape) * bits:
        raise ValueError(f"a tensor of shape {shape} in {name} has {stop - start:,} bytes")
    return Entry(name, tuple(shape)), start, stop


def _lengths(values: Any) -> bool:
    """Whether this is a list of whole numbers, at least 0, that a file can have."""
    return isinstance(values, list) and len(values) <= 64 and all(type(value) is int and 0 <= value < 2**63 for value in values)
