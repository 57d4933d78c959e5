"""Where a model's tensors are stored: under which names, in one piece or several, and reading each by itself."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sparsellm.checkpoints.headers import FLOATS, is_zip, read_headers, read_pickle
from sparsellm.errors import BadCheckpoint

if TYPE_CHECKING:
    from transformers import PreTrainedModel


PIECE = 2**22
"""Entries of a tensor that are mapped at a time."""


@dataclass(frozen=True)
class TensorLocation:
    """Where a tensor is stored. file: .safetensors or .bin. key: its name there."""

    file: Path
    key: str


@dataclass(frozen=True)
class ConvertedTensor:
    """A tensor that is stored in pieces, such as one for each expert, or fused with others, and converted when it is loaded.

    first: the name of the first tensor that comes of the same pieces. sources: each piece and the pattern of its name, in the
    order in which transformers collects them. converter: its way to convert them. model: whose tensor it is.
    """

    name: str
    first: str
    sources: tuple[tuple[TensorLocation, str], ...]
    converter: Any
    model: PreTrainedModel

    @property
    def file(self) -> Path:
        """Where the first piece is stored."""
        return self.sources[0][0].file

    @property
    def key(self) -> str:
        """The first piece's name there."""
        return self.sources[0][0].key


Stored = TensorLocation | ConvertedTensor
"""Where a tensor is stored, in one piece or several."""


class NotStreamable(Exception):
    """A checkpoint that cannot be read block by block, and why; it is loaded whole instead."""


def index_tensors(
    files: Iterable[Path], model: PreTrainedModel
) -> tuple[dict[str, Stored], dict[str, TensorLocation], list[Any]]:
    """Where tensors are stored: by the model's names, and by their own those that the model does not know.

    And what transformers changes of their names and forms when it loads them. Raises NotStreamable for a file whose tensors
    cannot be read by themselves.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    known = model.state_dict()
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    places: dict[str, Stored] = {}
    pieces: dict[str, list[tuple[TensorLocation, str]]] = {}
    unknown: dict[str, TensorLocation] = {}
    stored = [TensorLocation(file, key) for file in files for key in keys_of(file)]
    for place in sorted(stored, key=lambda some: dot_natural_key(some.key)):
        name, pattern = rename_source_key(place.key, renamings, converters, model.base_model_prefix, known)
        if name not in known:
            name, pattern = rename_source_key(place.key, [], [], model.base_model_prefix, known)
        if name not in known:
            unknown[place.key] = place
        elif pattern is not None:
            pieces.setdefault(name, []).append((place, pattern))
        else:
            places[name] = place
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    for name, sources in pieces.items():
        gathered = ConvertedTensor(name, name, tuple(sources), by_pattern[sources[0][1]], model)
        several = len(gathered.converter.target_patterns) > 1
        places |= {one: replace(gathered, name=one) for one in (_names_from(gathered) if several else [name])}
    return places, unknown, [entry for entry in mapping if entry.was_used()]


def _names_from(gathered: ConvertedTensor) -> list[str]:
    """The names of the tensors that come of the same pieces, from tensors without memory in the shapes of the headers."""
    sources = [place for place, _ in gathered.sources]
    shapes = {file: read_headers(file) for file in {place.file for place in sources}}
    return list(_converted(gathered, [torch.empty(shapes[place.file][place.key].shape, device="meta") for place in sources]))


def _converted(gathered: ConvertedTensor, pieces: Iterable[Tensor]) -> dict[str, Any]:
    """What transformers makes of the pieces, by name; a tensor, or a list of one."""
    converter = copy.deepcopy(gathered.converter)
    for (place, pattern), piece in zip(gathered.sources, pieces, strict=True):
        converter.add_tensor(gathered.first, place.key, pattern, piece)
    try:
        found: dict[str, Any] = converter.convert(gathered.first, model=gathered.model, config=gathered.model.config)
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError) as error:
        raise BadCheckpoint(
            f"{gathered.name} cannot be put together from {gathered.key} and its like: {str(error).splitlines()[0]}"
        ) from error
    return found


def stored_dtype(file: Path) -> torch.dtype:
    """The dtype of the first floating tensor in a file; float32 where there is none."""
    floats = [entry.dtype for entry in read_headers(file).values() if entry.dtype in FLOATS]
    found: torch.dtype = getattr(torch, floats[0]) if floats else torch.float32
    return found


def keys_of(file: Path) -> list[str]:
    """The names of the tensors in a file; NotStreamable for a format whose tensors cannot be read by themselves."""
    if file.suffix != ".safetensors" and not is_zip(file):
        raise NotStreamable(f"{file.name} is of the format before torch 1.6, which cannot be read in parts")
    return list(read_headers(file))


def read_stored(stored: Stored) -> Tensor:
    """A tensor as the model has it, in the dtype of its file, with memory of its own."""
    if isinstance(stored, TensorLocation):
        return _read(stored)
    found = _converted(stored, (_read(place) for place, _ in stored.sources))[stored.name]
    tensor: Tensor = found[0] if isinstance(found, list) else found
    shares = tensor.untyped_storage().nbytes() > tensor.nbytes  # with others that come of the same pieces
    return tensor.clone(memory_format=torch.contiguous_format) if shares else tensor


def _read(place: TensorLocation) -> Tensor:
    """A tensor with memory of its own: nothing of the file stays mapped."""
    if place.file.suffix != ".safetensors":
        with _readable(place):
            return read_pickle(place.file)[place.key].clone()
    pieces = row_chunks(place)
    first, second = next(pieces), next(pieces, None)
    if second is None:
        return first
    with _readable(place), safe_open(place.file, framework="pt") as opened:
        found = first.new_empty(opened.get_slice(place.key).get_shape())
    start = 0
    for some in chain((first, second), pieces):
        found[start : start + len(some)] = some
        start += len(some)
    return found


def row_chunks(place: TensorLocation) -> Iterator[Tensor]:
    """A tensor of a safetensors file, so many rows at a time, the same for every dtype; each with memory of its own.

    The file is opened anew for each: what is mapped of it counts as this process's memory until it is closed, and would be a
    large tensor a second time.
    """
    with _readable(place), safe_open(place.file, framework="pt") as opened:
        shape = torch.Size(opened.get_slice(place.key).get_shape())
        small = len(shape) == 0 or shape.numel() <= PIECE
        whole = opened.get_tensor(place.key).clone() if small else None
    if whole is not None:
        yield whole
        return
    rows = max(1, PIECE // shape[1:].numel())
    for start in range(0, shape[0], rows):
        with _readable(place), safe_open(place.file, framework="pt") as opened:
            some = opened.get_slice(place.key)[start : start + rows].clone()
        yield some


@contextmanager
def _readable(place: TensorLocation) -> Iterator[None]:
    """What goes wrong with a file, in words."""
    try:
        yield
    except (OSError, KeyError, RuntimeError, ValueError, SafetensorError) as error:
        raise BadCheckpoint(f"{place.key} cannot be read from {place.file}: {str(error).splitlines()[0]}") from error
