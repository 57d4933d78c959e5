"""Locates a model's tensors in weight files, under their stored names and in one or several pieces, reads and digests them."""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from sparsellm.checkpoints.files import file_stamp
from sparsellm.checkpoints.headers import (
    FLOATS,
    found_weights,
    is_zip,
    locate_all,
    read_headers,
    read_pickle,
    stored_weights,
)
from sparsellm.checkpoints.readers import TensorHeader
from sparsellm.errors import BadCheckpoint
from sparsellm.runtime.devices import raise_unless_damaged
from sparsellm.solvers.linalg import all_finite, count_negative_zeros, count_zeros

if TYPE_CHECKING:
    from transformers import PreTrainedModel


READ_ELEMENTS = 2**22
"""Elements of a tensor that are read at a time."""


@dataclass(frozen=True)
class TensorLocation:
    """A tensor's file, .safetensors or .bin, and its name in that file."""

    file: Path
    key: str


@dataclass(frozen=True)
class ConvertedTensor:
    """A tensor that transformers converts from stored pieces, such as one per expert, or from a fused tensor.

    Attributes:
        first: Name of the first tensor that is converted from the same pieces.
        sources: The location of each piece and the pattern of its name, in the order in which transformers collects them.
        converter: The `WeightConverter` of transformers.
    """

    name: str
    first: str
    sources: tuple[tuple[TensorLocation, str], ...]
    converter: Any
    model: PreTrainedModel

    @property
    def file(self) -> Path:
        """File of the first piece."""
        return self.sources[0][0].file

    @property
    def key(self) -> str:
        """Name of the first piece in its file."""
        return self.sources[0][0].key


Stored = TensorLocation | ConvertedTensor
"""A tensor stored in one piece or several."""


def locations_of(stored: Stored | Tensor) -> list[TensorLocation]:
    """Return the locations of a tensor's pieces; none of one in memory."""
    if isinstance(stored, Tensor):
        return []
    return [stored] if isinstance(stored, TensorLocation) else [location for location, _ in stored.sources]


class NotStreamable(Exception):
    """The checkpoint cannot be read block by block, and is loaded as a whole instead. The message says why."""


def index_tensors(
    files: Iterable[Path], model: PreTrainedModel
) -> tuple[dict[str, Stored], dict[str, TensorLocation], list[Any]]:
    """Locate the tensors in weight files.

    Returns:
        The location of each tensor of the model, by its name there; the location of each stored tensor that the model does not
        have, by its stored name; and the entries of transformers' conversion mapping that apply.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    state = model.state_dict()
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    locations: dict[str, Stored] = {}
    pieces: dict[str, list[tuple[TensorLocation, str]]] = {}
    unknown: dict[str, TensorLocation] = {}
    stored = [TensorLocation(file, key) for file in files for key in read_headers(file)]
    for location in sorted(stored, key=lambda entry: dot_natural_key(entry.key)):
        name, pattern = rename_source_key(location.key, renamings, converters, model.base_model_prefix, state)
        if name not in state:
            name, pattern = rename_source_key(location.key, [], [], model.base_model_prefix, state)
        if name not in state:
            unknown[location.key] = location
        elif pattern is not None:
            pieces.setdefault(name, []).append((location, pattern))
        else:
            locations[name] = location
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    for name, sources in pieces.items():
        converted = ConvertedTensor(name, name, tuple(sources), by_pattern[sources[0][1]], model)
        targets = _target_names(converted) if len(converted.converter.target_patterns) > 1 else [name]
        locations |= {target: replace(converted, name=target) for target in targets}
    return locations, unknown, [entry for entry in mapping if entry.was_used()]


def _target_names(converted: ConvertedTensor) -> list[str]:
    """Return the names of the tensors converted from the same pieces, by converting meta tensors of their shapes."""
    sources = [location for location, _ in converted.sources]
    headers = {file: read_headers(file) for file in {location.file for location in sources}}
    return list(_convert(converted, [torch.empty(headers[source.file][source.key].shape, device="meta") for source in sources]))


def _convert(converted: ConvertedTensor, pieces: Iterable[Tensor]) -> dict[str, Any]:
    """Return what transformers converts the pieces to: by name, a tensor or a list of one."""
    converter = copy.deepcopy(converted.converter)
    for (location, pattern), piece in zip(converted.sources, pieces, strict=True):
        converter.add_tensor(converted.first, location.key, pattern, piece)
    try:
        tensors: dict[str, Any] = converter.convert(converted.first, model=converted.model, config=converted.model.config)
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        raise_unless_damaged(error)
        reason = f"from {converted.key} and similar tensors: {str(error).splitlines()[0]}"
        raise BadCheckpoint(f"{converted.name} cannot be built {reason}") from error
    return tensors


def read_stored(stored: Stored, dtype: torch.dtype | None = None) -> Tensor:
    """Read a tensor in the shape that it has in the model, without memory mapping.

    Args:
        stored: Where it is stored.
        dtype: The dtype of a quantized weight; by default that of its configuration. Any other tensor has the stored dtype.
    """
    if isinstance(stored, TensorLocation):
        return _read(stored, dtype)
    result = _convert(stored, (_read(location, dtype) for location, _ in stored.sources))[stored.name]
    tensor: Tensor = result[0] if isinstance(result, list) else result
    is_view = tensor.untyped_storage().nbytes() > tensor.nbytes  # of a fused tensor
    return tensor.clone(memory_format=torch.contiguous_format) if is_view else tensor


def read_finite(stored: Stored, dtype: torch.dtype | None = None) -> Tensor:
    """Read a tensor as `read_stored` does. Raises BadCheckpoint if it holds NaN or infinity."""
    tensor = read_stored(stored, dtype)
    if tensor.is_floating_point() and not all_finite(tensor):
        raise BadCheckpoint(f"{stored.file.name} holds NaN or infinity in {stored.key}. Get a sound copy of the checkpoint.")
    return tensor


def read_all(files: Iterable[Path], dtype: torch.dtype) -> dict[str, Tensor]:
    """Read the tensors of several files, by their stored names, those of another form decoded, to `dtype` if that may be."""
    return {key: _read(TensorLocation(file, key), dtype) for file in files for key in read_headers(file)}


def _read(location: TensorLocation, dtype: torch.dtype | None = None) -> Tensor:
    """Read a stored tensor into new memory, decoded if it is stored in another form, without leaving the file mapped."""
    with _read_errors(location):
        if location.file.suffix != ".safetensors":
            tensors = read_pickle(location.file) if is_zip(location.file) else _whole(location.file, file_stamp(location.file))
            return tensors[location.key].clone()
        weight = stored_weights(location.file).get(location.key)
        if weight is None:
            return _read_elements(location, 0, None)
        parts = {part: _read_elements(TensorLocation(file, key), 0, None) for part, (file, key) in weight.parts.items()}
    try:
        return weight.decode(parts, dtype)
    except (IndexError, ArithmeticError, BadCheckpoint) as error:
        reason = str(error).removesuffix(".") if isinstance(error, BadCheckpoint) else "its parts do not fit each other"
        raise BadCheckpoint(f"{location.file.name}: {location.key}: {reason}. Get a sound copy of the file.") from error


def stored_row_chunks(location: TensorLocation, dtype: torch.dtype | None = None, decoded: bool = True) -> Iterator[Tensor]:
    """Yield a tensor in chunks of rows, which are the same for every dtype; one of a .bin file as a whole.

    Args:
        location: Where it is stored.
        dtype: As in `read_stored`.
        decoded: Whether a weight of another form is decoded. Otherwise its parts are read, unless the form is lossless.
    """
    if location.file.suffix != ".safetensors":
        yield _read(location)
        return
    with _read_errors(location):
        found = found_weights(location.file.parent)
        weights = found.weights.get(location.file, {}) if found and (decoded or found.lossless) else {}
        weight = weights.get(location.key)
        shape = torch.Size(weight.shape if weight else locate_all(location.file)[location.key][0].shape)
    rows = max(1, READ_ELEMENTS // max(shape[1:].numel(), 1))
    if weight:
        yield from _read(location, dtype).split(rows)
        return
    for start in range(0, shape[0], rows) if len(shape) and shape.numel() > READ_ELEMENTS else (None,):
        with _read_errors(location):
            chunk = _read_elements(location, start or 0, None if start is None else start + rows)
        yield chunk


@lru_cache(maxsize=1)
def _whole(file: Path, _: tuple[int, int]) -> dict[str, Tensor]:
    """The tensors of a .bin file of the format before torch 1.6, which is in memory for the next one of them."""
    return read_pickle(file)


def equal_stored(first: Stored, second: Stored, dtype: torch.dtype | None = None, *, decoded: bool = True) -> bool:
    """Whether two stored tensors have the same bits, compared in chunks of rows if both are in safetensors files.

    Args:
        dtype: Convert the second to this dtype; None for tensors that must have the same.
        decoded: Whether weights of another form are decoded, as in `stored_row_chunks`.
    """
    in_rows = all(isinstance(x, TensorLocation) and x.file.suffix == ".safetensors" for x in (first, second))

    def chunks(stored: Stored, dtype: torch.dtype | None) -> Iterable[Tensor]:
        if in_rows and isinstance(stored, TensorLocation):
            return stored_row_chunks(stored, dtype, decoded)
        return [read_stored(stored, dtype)]

    pairs = zip_longest(chunks(first, None), chunks(second, dtype))
    return all(a is not None and b is not None and bit_identical(a, b if dtype is None else b.to(dtype)) for a, b in pairs)


def bit_identical(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same dtype, shape and bits."""
    if tensor.dtype != other.dtype or tensor.shape != other.shape:
        return False
    return torch.equal(tensor.flatten().view(torch.uint8), other.flatten().view(torch.uint8))


def _read_elements(location: TensorLocation, start: int, stop: int | None) -> Tensor:
    """Read the rows start to stop (all if stop is None) of a tensor of a safetensors file into new memory.

    The file is read, not mapped: mapped pages count as memory of the process, and torch cannot map a file larger than memory.
    """
    header, position = locate_all(location.file)[location.key]
    shape = header.shape if stop is None else (min(stop, header.shape[0]) - start, *header.shape[1:])
    elements = torch.empty(math.prod(shape), dtype=getattr(torch, header.dtype))
    position += start * math.prod(header.shape[1:]) * elements.itemsize
    with location.file.open("rb") as stream:
        stream.seek(position)
        if stream.readinto(elements.view(torch.uint8).numpy().data) != elements.nbytes:
            raise ValueError("the file is cut off")
    return elements.view(shape)


@contextmanager
def _read_errors(location: TensorLocation) -> Iterator[None]:
    """Convert errors of reading a file into BadCheckpoint."""
    try:
        yield
    except (OSError, KeyError, RuntimeError, ValueError, SafetensorError) as error:
        raise_unless_damaged(error)
        raise BadCheckpoint(f"{location.key} cannot be read from {location.file}: {str(error).splitlines()[0]}") from error


DIGEST_BYTES = 16
"""Bytes of a digest: 128 bits, which makes collisions negligible."""


@dataclass(frozen=True)
class TensorDigest(TensorHeader):
    """Header and digest of a stored tensor.

    Attributes:
        digest: BLAKE2b digest of its bytes, in hexadecimal digits.
        finite: Whether it holds neither NaN nor infinity.
        zeros: Number of its zeros.
        negative_zeros: How many of them are -0.0.
    """

    digest: str
    finite: bool
    zeros: int
    negative_zeros: int

    def to_dict(self) -> dict[str, Any]:
        """Return the entry of a report."""
        return {"dtype": self.dtype, "shape": list(self.shape), "digest": self.digest}


def file_digest(file: Path) -> str:
    """Return the BLAKE2b digest of a file's bytes, in hexadecimal digits."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=DIGEST_BYTES)).hexdigest()


def tensor_digests(file: Path) -> dict[str, TensorDigest]:
    """Return the digests of all tensors of a file, by name, of quantized weights those of the parts; read in chunks of rows.

    Raises:
        BadCheckpoint: The file is damaged, or a tensor has a dtype of less than 16 bits with an exponent.
    """
    digests: dict[str, TensorDigest] = {}
    for key, header in read_headers(file, decoded=False).items():
        if header.dtype.startswith("float") and header.dtype not in FLOATS:
            raise BadCheckpoint(f"{file.name} holds {key[:200]} in {header.dtype}, an unknown dtype. Take a plain checkpoint.")
        hasher, finite, zeros = hashlib.blake2b(digest_size=DIGEST_BYTES), True, [0, 0]
        for chunk in stored_row_chunks(TensorLocation(file, key), decoded=False):
            hasher.update(chunk.contiguous().reshape(-1).view(torch.uint8).numpy().data)
            finite = finite and (not chunk.dtype.is_floating_point or all_finite(chunk.float()))
            zeros[0] += count_zeros(chunk)
            zeros[1] += count_negative_zeros(chunk)
        digests[key] = TensorDigest(header.dtype, header.shape, hasher.hexdigest(), finite, *zeros)
    return digests


def report_digest(report: Mapping[str, Any]) -> str:
    """Return the digest of a report without its own digest. It does not depend on the order of keys."""
    digests = {key: value for key, value in report["digests"].items() if key != "report"}
    text = json.dumps({**report, "digests": digests}, sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=DIGEST_BYTES).hexdigest()
