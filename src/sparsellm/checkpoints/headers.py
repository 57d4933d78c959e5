"""Names, dtypes and shapes of the tensors in weight files, checked against the file size without reading the tensors."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sparsellm.checkpoints.files import SHARDS, file_stamp
from sparsellm.checkpoints.readers import FoundWeights, StoredWeight, TensorHeader, reader_of
from sparsellm.errors import BadCheckpoint, UnsupportedModel, dtype_name
from sparsellm.runtime.devices import raise_unless_damaged
from sparsellm.texts.json_files import read_json

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
"""Names of dtypes in torch, by their names in safetensors."""

FLOATS = ("float32", "bfloat16", "float16", "float64")
"""Dtypes of weights that can be pruned."""


ZIP = b"PK\x03\x04"
"""First bytes of a .bin file since torch 1.6."""


def read_headers(file: Path, decoded: bool = True) -> dict[str, TensorHeader]:
    """Return the headers of the tensors in a .safetensors or .bin file, by name.

    Args:
        decoded: Whether the parts of a weight of another form (see `stored_weights`) count as it; they do if it is lossless.

    Raises:
        BadCheckpoint: The file is damaged, truncated, or holds more than tensors.
    """
    if file.suffix != ".safetensors":
        return {key: TensorHeader(dtype_name(tensor.dtype), tuple(tensor.shape)) for key, tensor in read_pickle(file).items()}
    headers, found = _stored_headers(file)[0], found_weights(file.parent)
    if found is None or not (decoded or found.lossless):
        return headers
    weights = {name: TensorHeader(weight.dtype, weight.shape) for name, weight in found.weights.get(file, {}).items()}
    plain = {key: header for key, header in headers.items() if key not in found.hidden and key not in weights}
    return dict(sorted((weights | plain).items()))


def check_dtypes(name: str, headers: Mapping[str, TensorHeader], *, packed: bool = False) -> None:
    """Raise UnsupportedModel for weights that are not floating-point numbers of at least 16 bits.

    Integer tensors that are not weights, such as masks and positions in older files, are accepted.
    """
    for key, header in headers.items():
        weight = "weight" in key.rpartition(".")[2] or (header.dtype in ("int8", "uint8") and len(header.shape) in (2, 3))
        if header.dtype not in FLOATS and (weight or header.dtype.startswith(("float", "complex"))):
            verb = "packed. Get a sound copy" if packed else "pruned. Prune the plain checkpoint that it was made from"
            lost = " config.json lacks the quantization_config that would say how to read it."
            raise UnsupportedModel(
                f"{name} holds {key[:200]} in {header.dtype}, and only weights in {', '.join(FLOATS[:-1])} or {FLOATS[-1]} can "
                f"be {verb}.{lost if header.dtype.startswith('float8') else ''}"
            )


def file_metadata(files: Iterable[Path]) -> dict[str, str]:
    """Return the metadata of weight files for those that are made from them."""
    found: dict[str, str] = {"format": "pt"}
    for file in files:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="numpy") as stream:
                found = {**(stream.metadata() or {}), **found}
    return {key: found[key] for key in sorted(found)}


def is_zip(file: Path) -> bool:
    """Return whether a .bin file has the format since torch 1.6, whose tensors can be read one at a time."""
    with file.open("rb") as stream:
        return stream.read(len(ZIP)) == ZIP


def read_pickle(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a .bin file, memory-mapped if the format allows it. Code in the file is not run.

    Raises:
        BadCheckpoint: The file is damaged or holds more than plain tensors.
    """
    try:
        content: Any = torch.load(file, map_location="cpu", mmap=is_zip(file), weights_only=True)
    except Exception as error:  # torch may raise any exception on a damaged file
        raise_unless_damaged(error)
        raise BadCheckpoint(
            f"{file.name} is damaged or holds more than tensors, and code in a weight file is not run. Download it again."
        ) from error
    size = file.stat().st_size
    strange = [type(content).__name__] if not isinstance(content, Mapping) else []
    for key, tensor in content.items() if not strange else ():
        is_plain = isinstance(key, str) and isinstance(tensor, Tensor) and tensor.layout == torch.strided
        is_plain = is_plain and not tensor.is_quantized and tensor.device.type == "cpu"
        if not is_plain or tensor.numel() * tensor.element_size() > size:  # a stride of zero repeats stored elements
            strange.append(str(key)[:80])
    if strange:
        raise BadCheckpoint(
            f"{file.name} holds more than plain tensors of at most its {size:,} bytes: {strange[0]!r} is not one."
        )
    return dict(content)


def stored_weights(file: Path) -> Mapping[str, StoredWeight]:
    """Return the weights in a safetensors file that are stored in another form, by name."""
    found = found_weights(file.parent)
    return {} if found is None else found.weights.get(file, {})


def found_weights(folder: Path) -> FoundWeights | None:
    """Return the weights of a checkpoint that are stored in another form; None if config.json does not say that they are.

    Raises:
        BadCheckpoint: The tensors contradict each other or config.json.
        UnsupportedModel: The form is not read.
    """
    files = [folder / "config.json", folder / SHARDS[1], *sorted(folder.glob("*.safetensors"))]
    return _found_weights(folder, tuple((file, file_stamp(file)) for file in files if file.is_file()))


@lru_cache(maxsize=32)
def _found_weights(folder: Path, _: tuple[tuple[Path, tuple[int, int]], ...]) -> FoundWeights | None:
    """Return what `found_weights` does; if a file of the folder changed, all are read again."""
    config, single, index = (folder / name for name in ("config.json", *SHARDS[:2]))
    fields = read_json(config, BadCheckpoint) if config.is_file() else None
    reader = reader_of(folder.name, fields) if isinstance(fields, dict) else None
    if reader is None:
        return None
    names = {single.name}  # which transformers reads before an index
    if index.is_file() and not single.is_file():
        names = set(read_json(index, BadCheckpoint)["weight_map"].values())
    read = {file: _stored_headers(file) for file in sorted(folder / name for name in names) if file.is_file()}
    headers, metadata = {file: found for file, (found, _) in read.items()}, {file: found for file, (_, found) in read.items()}
    return reader.find(headers, metadata, read_small_tensor)


def read_small_tensor(file: Path, key: str) -> bytes:
    """Read the bytes of a small tensor of a safetensors file that was checked before."""
    header, position = locate_all(file)[key]
    with file.open("rb") as stream:
        stream.seek(position)
        return stream.read(header.nbytes)


def locate_all(file: Path) -> dict[str, tuple[TensorHeader, int]]:
    """Return the header and the position of the first byte of each tensor in a safetensors file that was checked before."""
    return _locate_tensors(file, file_stamp(file))


@lru_cache(maxsize=128)
def _locate_tensors(file: Path, _: tuple[int, int]) -> dict[str, tuple[TensorHeader, int]]:
    """Return what `locate_all` does; a file that changed is read again."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        entries = json.loads(stream.read(length))
    entries.pop("__metadata__", None)
    return {
        key: (TensorHeader(KINDS[entry["dtype"]], tuple(entry["shape"])), 8 + length + entry["data_offsets"][0])
        for key, entry in entries.items()
    }


def _stored_headers(file: Path) -> tuple[dict[str, TensorHeader], dict[str, str]]:
    """Return the headers and the metadata of a safetensors file. The library checks them against the file size.

    It opens the file as numpy does, read-only: torch's own mapping is refused by the system for files larger than its memory.
    """
    try:
        with safe_open(file, framework="numpy") as stream:
            slices = {key: stream.get_slice(key) for key in sorted(stream.keys())}
            headers = {key: TensorHeader(KINDS[view.get_dtype()], tuple(view.get_shape())) for key, view in slices.items()}
            return headers, stream.metadata() or {}
    except (SafetensorError, KeyError, OSError) as error:
        raise_unless_damaged(error)
        reason = str(error).splitlines()[0][:120]
        raise BadCheckpoint(
            f"{file.name} is damaged or cut off, or no safetensors file: {reason}. Download it again."
        ) from None
