"""Inspection of a checkpoint: zeros per layer, whether a pattern holds, and which tensors differ from another checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparsellm.checkpoints.block_loader import tied_names
from sparsellm.checkpoints.files import check_files
from sparsellm.checkpoints.headers import read_headers, read_pickle
from sparsellm.checkpoints.loading import open_checkpoint
from sparsellm.checkpoints.tensor_index import NotStreamable, Stored, TensorLocation, index_tensors, read_stored, row_chunks
from sparsellm.models.architecture_file import read_architecture
from sparsellm.models.blocks import Block, blocks_of
from sparsellm.runs.records import read_saved_report
from sparsellm.solvers.linalg import count_zeros
from sparsellm.solvers.patterns import NM, Pattern, Unstructured, parse_pattern

if TYPE_CHECKING:
    from transformers import PreTrainedModel

REPORT = "sparsellm.json"
"""Name of the report file beside the weights."""

WORK = ".sparsellm"
"""Name of the work folder in an unfinished output; a finished output has none."""


@dataclass(frozen=True)
class LayerZeros:
    """Zeros of one linear layer.

    Attributes:
        name: Full name of the layer.
        shape: (out, in).
        zeros: Number of zero weights.
        pattern: Expected pattern; None if none is expected.
        holds: Whether the layer has that pattern; None if none is expected.
    """

    name: str
    shape: tuple[int, int]
    zeros: int
    pattern: str | None
    holds: bool | None

    @property
    def sparsity(self) -> float:
        """The fraction of weights that are zero."""
        return self.zeros / (self.shape[0] * self.shape[1])


@dataclass(frozen=True)
class Inspection:
    """Zeros of a checkpoint, and its differences from another one.

    Attributes:
        model: Name of the checkpoint.
        layers: Zeros of each linear layer in the blocks.
        parameters: Number of parameters, tied ones counted once.
        zeros: Number of parameters that are zero.
        expected: The expected pattern, if any.
        against: Name of the other checkpoint, if any.
        changed: Tensors that differ from the other checkpoint's.
        alike: Number of tensors that are bit-identical in both.
        only_here: Tensors that only this checkpoint has.
        only_there: Tensors that only the other checkpoint has.
        missing: Layers that the checkpoint should have and does not.
        total: Fraction of zeros in all checked layers together.
        total_holds: Whether `total` reaches the expected sparsity; True if none is expected.
    """

    model: str
    layers: tuple[LayerZeros, ...]
    parameters: int
    zeros: int
    expected: str | None = None
    against: str | None = None
    changed: tuple[str, ...] = ()
    alike: int = 0
    only_here: tuple[str, ...] = ()
    only_there: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    total: float = 0.0
    total_holds: bool = True

    @property
    def as_expected(self) -> bool:
        """Whether all checked layers, at least one, are present and have their pattern, and the total sparsity holds."""
        checked = [layer.holds for layer in self.layers if layer.holds is not None]
        return self.expected is None or (bool(checked) and all(checked) and not self.missing and self.total_holds)

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data for JSON."""
        layers = [asdict(layer) | {"sparsity": layer.sparsity} for layer in self.layers]
        return asdict(self) | {"layers": layers, "as_expected": self.as_expected}


def inspect(
    model: str,
    against: str | None = None,
    expect: str | Pattern | None = None,
    trusted: bool = False,
    architecture: str | Path | None = None,
) -> Inspection:
    """Count the zeros of a checkpoint tensor by tensor, check a pattern, and compare with another checkpoint.

    Args:
        model: Checkpoint folder, model name on the hub, or demo:opt.
        against: Another checkpoint to compare with, named in the same way.
        expect: Pattern that every pruned layer must have: each layer that the folder's sparsellm.json lists, or every linear
            layer of the blocks if there is no such file. If the run allocated different sparsities to the layers, each layer
            must have its own, and all together the expected one.
        trusted: Run Python code that comes with the checkpoints.
        architecture: YAML file that describes the model's architecture.
    """
    described = None if architecture is None else read_architecture(architecture)
    checkpoint = open_checkpoint(model, trusted=trusted, architecture=described)
    pattern = parse_pattern(expect) if isinstance(expect, str) else expect
    skeleton = checkpoint.skeleton()
    tensors = Tensors(checkpoint.folder, skeleton)
    layers_by_parameter: dict[str, list[tuple[Block, str]]] = {}
    for block in blocks_of(skeleton):
        for layer in block.layers:
            layers_by_parameter.setdefault(block.full_name(block.parameter(layer)), []).append((block, layer))
    planned = planned_layers(checkpoint.folder)
    allocated = isinstance(pattern, Unstructured) and len(set((planned or {}).values())) > 1
    layers: list[LayerZeros] = []
    parameters = zeros = 0
    counted: set[str] = set()
    for key, tensor in tensors:
        if tensors.one_name(key) in counted:
            continue  # the same tensor under another name
        counted.add(tensors.one_name(key))
        parameters += tensor.numel()
        zeros += count_zeros(tensor)
        for block, layer in layers_by_parameter.get(key, ()):
            name, weight = block.full_name(layer), block.linear_view(layer, tensor)
            required = pattern if planned is None or name in planned else None
            if required is not None and allocated and planned:
                required = parse_pattern(planned[name])
            holds = None if required is None else follows(weight, required)
            shape = weight.shape[0], weight.shape[1]
            layers.append(LayerZeros(name, shape, count_zeros(weight), None if required is None else str(required), holds))
    changes = compare(tensors, _open_tensors(against, trusted)) if against else {}
    checked = [layer for layer in layers if layer.holds is not None]
    weights = sum(layer.shape[0] * layer.shape[1] for layer in checked)
    removed = sum(layer.zeros for layer in checked)
    # Each layer rounds its number of zeros separately.
    total_holds = pattern is None or not allocated or removed >= pattern.count_removed(weights) - len(checked)
    required_layers = planned or [block.full_name(name) for pairs in layers_by_parameter.values() for block, name in pairs]
    return Inspection(
        model,
        tuple(layers),
        parameters,
        zeros,
        str(pattern) if pattern else None,
        against,
        missing=tuple(sorted(set(required_layers) - {layer.name for layer in layers})),
        total=removed / max(weights, 1),
        total_holds=total_holds,
        **changes,
    )


def follows(weight: Tensor, pattern: Pattern) -> bool:
    """Whether a weight, (out, in), has at least the zeros that a pattern requires: per group for N:M, otherwise in total."""
    zero = weight == 0
    if isinstance(pattern, NM):
        if weight.shape[1] % pattern.group:
            return False
        return bool((zero.unflatten(1, (-1, pattern.group)).sum(-1) >= pattern.zeros).all())
    return int(zero.sum()) >= pattern.count_removed(weight.numel())


def compare(here: Tensors, there: Tensors, as_stored: bool = True) -> dict[str, Any]:
    """Compare the tensors of two checkpoints bit by bit. Tied tensors match under any of their names.

    Args:
        here: The first checkpoint.
        there: The other checkpoint.
        as_stored: Count different dtypes as a difference; otherwise the other tensor is converted to the first's dtype.

    Returns:
        The fields `changed`, `alike`, `only_here` and `only_there` of an `Inspection`.
    """
    names = {here.one_name(key) for key in here.files}
    keys_there = {there.one_name(key): key for key in there.files}
    common = {key: keys_there[here.one_name(key)] for key in here.files if here.one_name(key) in keys_there}
    changed = [key for key, other in common.items() if not _equal_tensors(here, key, there, other, as_stored)]
    return {
        "changed": tuple(changed),
        "alike": len(common) - len(changed),
        "only_here": tuple(key for key in here.files if key not in common),
        "only_there": tuple(key for key in there.files if there.one_name(key) not in names),
    }


def _equal_tensors(here: Tensors, key: str, there: Tensors, other: str, as_stored: bool) -> bool:
    """Whether two tensors are bit-identical; they are read in chunks of rows if both files support it."""
    location, other_location = here.place(key), there.place(other)
    if location is None or other_location is None:
        return _bit_identical(here[key], there[other], as_stored)
    return all(
        rows is not None and other_rows is not None and _bit_identical(rows, other_rows, as_stored)
        for rows, other_rows in zip_longest(row_chunks(location), row_chunks(other_location))
    )


def planned_layers(folder: Path) -> dict[str, str] | None:
    """Pattern of each pruned layer by its full name, from the report in the folder; None without a report."""
    file = folder / REPORT
    if not file.is_file():
        return None
    return {layer.name: layer.pattern for block in read_saved_report(file).blocks for layer in block.layers}


def _open_tensors(name: str, trusted: bool) -> Tensors:
    """Open a checkpoint and return its tensors."""
    checkpoint = open_checkpoint(name, trusted=trusted)
    return Tensors(checkpoint.folder, checkpoint.skeleton())


class Tensors:
    """Tensors of a checkpoint, read one at a time from safetensors or `.bin` files (weights only).

    Tensors have the model's parameter names, as `from_pretrained` assigns them. Those that the model does not have, and all
    tensors of a checkpoint that cannot be read one at a time, have their names in the files.
    """

    def __init__(self, folder: Path, model: PreTrainedModel) -> None:
        files = check_files(folder.name, folder)
        self._loaded: dict[str, Tensor] = {}
        self._tied = tied_names(model)
        try:
            locations, unknown, _ = index_tensors(files, model)
            self.files: dict[str, Stored] = dict(sorted({**unknown, **locations}.items()))
        except NotStreamable:
            self.files = {}
            for file in files:
                if file.suffix != ".safetensors":
                    self._loaded |= read_pickle(file)
                self.files |= {key: TensorLocation(file, key) for key in read_headers(file)}

    def __getitem__(self, key: str) -> Tensor:
        return self._loaded[key] if key in self._loaded else read_stored(self.files[key])

    def one_name(self, key: str) -> str:
        """Canonical name of a tensor: the first of its tied names, without the base model's prefix, which some files omit."""
        return self._tied.get(key, key).removeprefix("model.")

    def place(self, key: str) -> TensorLocation | None:
        """Location of a tensor that can be read in chunks of rows; None if it can only be read entirely."""
        stored = self.files[key]
        return stored if isinstance(stored, TensorLocation) and stored.file.suffix == ".safetensors" else None

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return ((key, self[key]) for key in self.files)


def _bit_identical(tensor: Tensor, other: Tensor, as_stored: bool) -> bool:
    """Whether two tensors have the same bits; without `as_stored`, after conversion to the first's dtype."""
    other = other if as_stored else other.to(tensor.dtype)
    if tensor.dtype != other.dtype or tensor.shape != other.shape:
        return False
    return torch.equal(tensor.flatten().view(torch.uint8), other.flatten().view(torch.uint8))
