"""Look into a written checkpoint: zeros per layer, whether a pattern holds, which tensors differ from another's."""

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
"""The file in which a run leaves its report beside the weights."""

WORK = ".sparsellm"
"""The folder within an unfinished output where a run works; a finished one has none."""


@dataclass(frozen=True)
class LayerZeros:
    """Zeros of one linear layer. pattern: what is expected of it, None where nothing is. holds: whether it has that."""

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
    """What is in a checkpoint. changed: tensors that differ from the other checkpoint's; alike: how many are bit-identical.

    only_here, only_there: tensors that just one of the two has. missing: layers that it should hold and does not. total: the
    share of zeros of all layers checked together. total_holds: whether that is the one expected; True where none was.
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
        """Whether every layer that should have the expected pattern is there and has it, one at least, and the total too."""
        checked = [layer.holds for layer in self.layers if layer.holds is not None]
        return self.expected is None or (bool(checked) and all(checked) and not self.missing and self.total_holds)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        layers = [asdict(layer) | {"sparsity": layer.sparsity} for layer in self.layers]
        return asdict(self) | {"layers": layers, "as_expected": self.as_expected}


def inspect(
    model: str,
    against: str | None = None,
    expect: str | Pattern | None = None,
    trusted: bool = False,
    architecture: str | Path | None = None,
) -> Inspection:
    """Zeros, patterns and changes of a checkpoint, read tensor by tensor.

    model, against: folders, hub names, or demo:opt. expect: a pattern that every layer that a run pruned must have (as the
    folder's sparsellm.json says), or every linear layer of a block where there is no such file. Where a run shared an
    unstructured sparsity out, each layer must have its own share, and all together the one expected. trusted: run code that
    they bring. architecture: a file that describes their form.
    """
    described = None if architecture is None else read_architecture(architecture)
    checkpoint = open_checkpoint(model, None, trusted, described)
    pattern = parse_pattern(expect) if isinstance(expect, str) else expect
    skeleton = checkpoint.skeleton()
    here = Tensors(checkpoint.folder, skeleton)
    within: dict[str, list[tuple[Block, str]]] = {}  # the layers that each parameter holds
    for block in blocks_of(skeleton):
        for name in block.layers:
            within.setdefault(block.full_name(block.parameter(name)), []).append((block, name))
    planned = planned_layers(checkpoint.folder)
    shared = isinstance(pattern, Unstructured) and len(set((planned or {}).values())) > 1
    layers: list[LayerZeros] = []
    parameters = zeros = 0
    counted: set[str] = set()
    for key, tensor in here:
        if here.one_name(key) in counted:
            continue  # the same tensor under its other name
        counted.add(here.one_name(key))
        parameters += tensor.numel()
        zeros += count_zeros(tensor)
        for block, part in within.get(key, ()):
            name, weight = block.full_name(part), block.linear_view(part, tensor)
            checked = pattern is not None and (planned is None or name in planned)
            own = parse_pattern(planned[name]) if shared and planned and name in planned else pattern
            asked = own if checked else None
            holds = None if asked is None else follows(weight, asked)
            shape = weight.shape[0], weight.shape[1]
            layers.append(LayerZeros(name, shape, count_zeros(weight), None if asked is None else str(asked), holds))
    changes = compare(here, _other(against, trusted)) if against else {}
    checked_layers = [layer for layer in layers if layer.holds is not None]
    weights = sum(layer.shape[0] * layer.shape[1] for layer in checked_layers)
    removed = sum(layer.zeros for layer in checked_layers)
    # Layers round their shares one by one.
    holds = pattern is None or not shared or removed >= pattern.count_removed(weights) - len(checked_layers)
    expected = str(pattern) if pattern else None
    wanted = planned or [block.full_name(part) for parts in within.values() for block, part in parts]
    missing = tuple(sorted(set(wanted) - {layer.name for layer in layers}))
    return Inspection(
        model,
        tuple(layers),
        parameters,
        zeros,
        expected,
        against,
        missing=missing,
        total=removed / max(weights, 1),
        total_holds=holds,
        **changes,
    )


def follows(weight: Tensor, pattern: Pattern) -> bool:
    """Whether a weight, (out, in), has at least the zeros that the pattern asks for: in every group of N:M, else in all."""
    zero = weight == 0
    if isinstance(pattern, NM):
        if weight.shape[1] % pattern.group:
            return False
        return bool((zero.unflatten(1, (-1, pattern.group)).sum(-1) >= pattern.zeros).all())
    return int(zero.sum()) >= pattern.count_removed(weight.numel())


def compare(here: Tensors, there: Tensors, as_stored: bool = True) -> dict[str, Any]:
    """Which tensors differ between two checkpoints, bit by bit. Tied names are one tensor, by whichever each has stored it.

    as_stored: another dtype is a difference; if not, the other's tensor is converted first.
    """
    names = {here.one_name(key) for key in here.files}
    others = {there.one_name(key): key for key in there.files}
    common = {key: others[here.one_name(key)] for key in here.files if here.one_name(key) in others}
    changed = [key for key, other in common.items() if not _alike(here, key, there, other, as_stored)]
    return {
        "changed": tuple(changed),
        "alike": len(common) - len(changed),
        "only_here": tuple(key for key in here.files if key not in common),
        "only_there": tuple(key for key in there.files if there.one_name(key) not in names),
    }


def _alike(here: Tensors, key: str, there: Tensors, other: str, as_stored: bool) -> bool:
    """Whether two tensors have the same bits, read by some rows at a time where both files allow it."""
    first, second = here.place(key), there.place(other)
    if first is None or second is None:
        return _identical(here[key], there[other], as_stored)
    for one, two in zip_longest(row_chunks(first), row_chunks(second)):
        if one is None or two is None or not _identical(one, two, as_stored):
            return False
    return True


def planned_layers(folder: Path) -> dict[str, str] | None:
    """The layers that a run pruned and their patterns, by its own report; None without a report."""
    file = folder / REPORT
    if not file.is_file():
        return None
    return {layer.name: layer.pattern for block in read_saved_report(file).blocks for layer in block.layers}


def _other(name: str, trusted: bool) -> Tensors:
    """The tensors of another checkpoint."""
    checkpoint = open_checkpoint(name, None, trusted)
    return Tensors(checkpoint.folder, checkpoint.skeleton())


class Tensors:
    """The tensors of a checkpoint, read one at a time; sharded or single safetensors, or `.bin` (weights only).

    By the names that the model gives them, as `from_pretrained` would have it; what the model does not know, and all of a
    checkpoint that must be loaded as a whole, by the names in the files.
    """

    def __init__(self, folder: Path, model: PreTrainedModel) -> None:
        files = check_files(folder.name, folder)
        self._whole: dict[str, Tensor] = {}
        self._tied = tied_names(model)
        try:
            places, unknown, _ = index_tensors(files, model)
            self.files: dict[str, Stored] = dict(sorted({**unknown, **places}.items()))
        except NotStreamable:
            self.files = {}
            for file in files:
                if file.suffix != ".safetensors":
                    self._whole |= read_pickle(file)
                self.files |= {key: TensorLocation(file, key) for key in read_headers(file)}

    def __getitem__(self, key: str) -> Tensor:
        return self._whole[key] if key in self._whole else read_stored(self.files[key])

    def one_name(self, key: str) -> str:
        """The first of a tensor's names, without the base model's prefix, with which only some checkpoints are written."""
        return self._tied.get(key, key).removeprefix("model.")

    def place(self, key: str) -> TensorLocation | None:
        """Where a tensor can be read by rows; None where it is read as a whole."""
        found = self.files[key]
        return found if isinstance(found, TensorLocation) and found.file.suffix == ".safetensors" else None

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return ((key, self[key]) for key in self.files)


def _identical(one: Tensor, other: Tensor, as_stored: bool) -> bool:
    """Whether two tensors have the same bits; without `as_stored`, after conversion to the first's dtype."""
    other = other if as_stored else other.to(one.dtype)
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return bool(torch.equal(*(tensor.flatten().view(torch.uint8) for tensor in (one, other))))
