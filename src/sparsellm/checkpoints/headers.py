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

KINDS = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F6_E2M3": "float6_e2m3",
    "F6_E3M2": "float6_e3m2",
    "F4": "float4_e2m1fn",
    "C64": "complex64",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
}
"""By safetensors' word for a dtype, torch's."""

FLOATS = ("float32", "bfloat16", "float16", "float64")
"""Dtypes of weights that are pruned."""

ZIP = b"PK\x03\x04"
"""What a .bin file begins with since torch 1.6."""


@dataclass(frozen=True)
class TensorHeader:
    """A tensor in a file. dtype: as torch calls it, such as "float32"."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)


def read_headers(file: Path) -> dict[str, TensorHeader]:
    """The tensors of a .safetensors or .bin file, by name; their numbers are not read.

    Raises BadCheckpoint for a file that is damaged, cut off, or holds more than tensors.
    """
    if file.suffix == ".safetensors":
        return _safetensors(file)
    return {key: TensorHeader(dtype_name(tensor.dtype), tuple(tensor.shape)) for key, tensor in read_pickle(file).items()}


def dtype_name(dtype: torch.dtype) -> str:
    """What torch calls a dtype, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def read_all_headers(files: Iterable[Path]) -> dict[str, TensorHeader]:
    """The tensors of several files."""
    return {key: entry for file in files for key, entry in read_headers(file).items()}


def is_zip(file: Path) -> bool:
    """Whether a .bin file is of the format since torch 1.6, whose tensors can be read by themselves."""
    with file.open("rb") as stream:
        return stream.read(len(ZIP)) == ZIP


def read_pickle(file: Path) -> dict[str, Tensor]:
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


def _safetensors(file: Path) -> dict[str, TensorHeader]:
    """The tensors of a safetensors file; the library checks its header against the file's length."""
    try:
        with safe_open(file, framework="pt") as opened:
            slices = {key: opened.get_slice(key) for key in sorted(opened.keys())}
            return {key: TensorHeader(KINDS[part.get_dtype()], tuple(part.get_shape())) for key, part in slices.items()}
    except (SafetensorError, KeyError, OSError) as error:
        why = str(error).splitlines()[0][:120]
        raise BadCheckpoint(f"{file.name} is damaged or cut off, or no safetensors file: {why}. Download it again.") from None
