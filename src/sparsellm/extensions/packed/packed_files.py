"""Weight files with packed tensors: which tensors they hold, and safetensors files that are written one tensor at a time."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from pydantic import TypeAdapter
from torch import Tensor

from sparsellm.checkpoints.headers import KINDS
from sparsellm.checkpoints.readers import quantization_settings
from sparsellm.errors import BadCheckpoint, UnsupportedModel, dtype_name
from sparsellm.extensions.integers.formats import GROUP_SIZES, MASK_WORD, WIDTHS, IntegerFormat
from sparsellm.extensions.packed.formats.encoding import PARTS
from sparsellm.texts.json_files import build_mapping, first_fault

PACKED_METHOD = "sparsellm"
"""`quant_method` of a packed checkpoint's configuration, and the metadata of a weight file that list packed tensors."""

PACKED_VERSION = 1
"""Version of the format."""

NUMBERS_A_BYTE = 64
"""Most numbers of a packed tensor for each of its stored bytes: a byte of the mask has the bits of eight numbers, and takes at
least one bit when it is compressed by Huffman codes."""

WIDENED_A_BYTE, WIDENED_COLUMNS = 8, 2**25
"""Columns that decoding may add to the rows of a packed tensor, which then are whole groups of `MASK_WORD`: for each of its
bytes, and in all. Half a million rows of one number pass, and more where they are not almost all removed."""

STORED_KINDS = {name: kind for kind, name in KINDS.items()}
"""Names of dtypes in safetensors, by their names in torch."""


@dataclass(frozen=True)
class PackedEntry:
    """The entry of a packed tensor in the metadata of its weight file.

    Attributes:
        shape: Its shape. It is encoded as a matrix: all dimensions but the last one are its rows.
        dtype: Name of its dtype in torch.
        sha256: Digest of its bytes before it was packed; of a quantized tensor, of its bytes once it was rounded.
        bits: Bits of the integers of a quantized tensor; None of one that is not.
        group_size: Columns of the matrix of a quantized tensor that share a scale; 0 for whole rows.
        transposed: Whether the last dimension are the rows of the matrix and the one before its columns, for quantized layers
            whose weight is (in, out).
    """

    shape: tuple[int, ...]
    dtype: str
    sha256: str
    bits: int | None = None
    group_size: int = 0
    transposed: bool = False

    @classmethod
    def of(cls, tensor: Tensor, format: IntegerFormat | None = None, *, transposed: bool = False) -> PackedEntry:
        """Describe a tensor."""
        dtype, integers = dtype_name(tensor.dtype), {} if format is None else vars(format)
        return cls(tuple(tensor.shape), dtype, sha256_of(tensor), **integers, transposed=transposed)

    @property
    def integers(self) -> IntegerFormat | None:
        """The format of the integers of a quantized tensor; None of one that is not."""
        return IntegerFormat.of(self)

    @property
    def matrix(self) -> tuple[int, int]:
        """Shape of the matrix that is encoded."""
        if self.transposed:
            return math.prod(self.shape[:-2]) * self.shape[-1], self.shape[-2]
        return math.prod(self.shape[:-1]), self.shape[-1]

    def matrix_of(self, tensor: Tensor) -> Tensor:
        """Return the matrix that is encoded of the tensor."""
        return (tensor.transpose(-1, -2) if self.transposed else tensor).reshape(self.matrix)

    def tensor_of(self, matrix: Tensor) -> Tensor:
        """Return the tensor of which a matrix is encoded."""
        if not self.transposed:
            return matrix.view(self.shape)
        return matrix.view(*self.shape[:-2], self.shape[-1], self.shape[-2]).transpose(-1, -2).contiguous()

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of the metadata."""
        unquantized = {"bits", "group_size", "transposed"} if self.bits is None else set()
        return {key: value for key, value in asdict(self).items() if key not in unquantized}


def can_hold(size: int, matrix: tuple[int, int]) -> bool:
    """Return whether so many bytes can be those of a packed matrix of a shape. What decoding takes is in proportion to them."""
    rows, columns = matrix
    widened = rows * (-columns % MASK_WORD)
    return rows * columns <= NUMBERS_A_BYTE * size and widened <= WIDENED_A_BYTE * size + WIDENED_COLUMNS


def sha256_of(tensor: Tensor) -> str:
    """Return the digest of a tensor's bytes."""
    return hashlib.sha256(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data).hexdigest()


def metadata_of(entries: Mapping[str, PackedEntry]) -> dict[str, str]:
    """Return the metadata of a weight file with these packed tensors."""
    return {"format": "pt", PACKED_METHOD: json.dumps({key: entries[key].to_dict() for key in sorted(entries)})}


def parse_entries(file: Path, metadata: Mapping[str, str] | None) -> dict[str, PackedEntry]:
    """Return the packed tensors that a weight file's metadata lists, by name.

    Raises:
        BadCheckpoint: The list is damaged.
    """
    text = (metadata or {}).get(PACKED_METHOD)
    if text is None:
        return {}
    try:
        entries = TypeAdapter(dict[str, PackedEntry]).validate_python(json.loads(text, object_pairs_hook=build_mapping))
    except (ValueError, RecursionError) as error:  # also pydantic's
        raise BadCheckpoint(f"{file.name} is damaged: its list of packed tensors ({first_fault(error)}).") from None
    for key, entry in entries.items():
        is_matrix = len(entry.shape) >= 2 and min(entry.shape) >= 1 and entry.dtype in ("float32", "float16", "bfloat16")
        if not is_matrix or entry.bits not in (None, *WIDTHS) or entry.group_size not in GROUP_SIZES:
            raise BadCheckpoint(
                f"{file.name} is damaged: {key[:80]} of shape {entry.shape} in {entry.dtype[:20]} with {entry.bits} bits in "
                f"groups of {entry.group_size} is not packed."
            )
    return entries


def parts_of(key: str, stored: Collection[str]) -> dict[str, str]:
    """Return the names in a file of a packed tensor's parts, by the name of the part."""
    return {part: name for part in PARTS if (name := key + part.removeprefix("weight")) in stored}


def is_packed(fields: Mapping[str, Any]) -> bool:
    """Return whether a configuration says that the weights are packed."""
    settings = fields.get("quantization_config")
    return isinstance(settings, dict) and settings.get("quant_method") == PACKED_METHOD


class FileWriter:
    """Writes a safetensors file tensor by tensor: its data first, then the header in front of them.

    The data of each size of element go to a file of their own, so that all tensors are aligned. The files are joined and
    removed at the end of the context; after an error nothing is left.

    Args:
        file: The file to write.
        metadata: Its metadata.
    """

    def __init__(self, file: Path, metadata: dict[str, str]) -> None:
        self.file, self.metadata = file, metadata
        self._entries: dict[int, dict[str, tuple[str, list[int], int]]] = {}
        self._data: dict[int, BinaryIO] = {}
        self._stack = ExitStack()

    def __enter__(self) -> FileWriter:
        return self

    def __exit__(self, kind: Any, *details: Any) -> None:
        try:
            if kind is None:
                self._join()
        finally:
            self._stack.close()

    def add(self, name: str, tensor: Tensor) -> None:
        """Write a tensor."""
        size = tensor.element_size()
        if size not in self._data:
            path = self.file.with_name(f"{self.file.name}.{size}.partial")
            self._stack.callback(path.unlink, missing_ok=True)
            self._data[size] = self._stack.enter_context(path.open("w+b"))
            self._entries[size] = {}
        self._data[size].write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        self._entries[size][name] = dtype_name(tensor.dtype), list(tensor.shape), tensor.nbytes

    def _join(self) -> None:
        """Write the header and the data."""
        header: dict[str, Any] = {"__metadata__": self.metadata}
        position = 0
        for size in sorted(self._data, reverse=True):
            for name, (dtype, shape, length) in self._entries[size].items():
                header[name] = {"dtype": STORED_KINDS[dtype], "shape": shape, "data_offsets": [position, position + length]}
                position += length
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        path = self.file.with_name(f"{self.file.name}.partial")
        self._stack.callback(path.unlink, missing_ok=True)
        with path.open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            for size in sorted(self._data, reverse=True):
                self._data[size].seek(0)
                shutil.copyfileobj(self._data[size], stream, 2**20)
        path.replace(self.file)


def check_version(name: str, fields: Mapping[str, Any]) -> None:
    """Raise UnsupportedModel unless a packed checkpoint has the version of the format that this package reads.

    Args:
        name: Its name, for the message.
        fields: The fields of its config.json.
    """
    if (version := (quantization_settings(fields) or {}).get("version")) != PACKED_VERSION:
        raise UnsupportedModel(
            f"{name} is packed in version {str(version)[:20]} of the format, and this sparsellm reads version "
            f"{PACKED_VERSION}. Install a newer sparsellm."
        )
