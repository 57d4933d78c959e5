"""Reads a model's weights block by block from the checkpoint's files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sparsellm.checkpoints.prefetch import Prefetch
from sparsellm.checkpoints.tensor_index import (
    ConvertedTensor,
    NotStreamable,
    Stored,
    TensorLocation,
    index_tensors,
    keys_of,
    read_stored,
)
from sparsellm.errors import BadCheckpoint
from sparsellm.models.blocks import Block, blocks_of
from sparsellm.runtime import devices
from sparsellm.runtime.memory import release_free_memory
from sparsellm.solvers.linalg import all_finite, count_zeros

if TYPE_CHECKING:
    from transformers import PreTrainedModel


Owners = tuple[tuple[nn.Module, str], ...]
"""The modules that hold a parameter or buffer, each with its name there; several if it is tied."""


class DiskWeights:
    """Reads the weights of a model on the meta device from files while they are needed.

    A context discards its tensors at its end. A block that has been changed must be written, and its new file set with
    `relocate`, before that. Reads raise BadCheckpoint for tensors that hold NaN or infinity, have the wrong shape, or cannot be
    read.

    Args:
        model: A skeleton, with parameters on the meta device and real buffers.
        places: Where each parameter (and each buffer that checkpoints hold) is stored, by its name in the model. Tied
            parameters appear under at least one of their names.
        dtype: Dtype to which floating-point tensors are converted.
        device: Device of the tensors.
        ahead: Whether to read the next block while one is in use.
    """

    on_disk = True

    def __init__(
        self,
        model: PreTrainedModel,
        places: Mapping[str, Stored],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        ahead: bool = False,
    ) -> None:
        self.dtype, self.device, self.ahead = dtype, torch.device(device), ahead
        self._coming: tuple[int, Prefetch] | None = None
        self._model, self._locations = model, dict(places)
        prefixes = tuple(f"{block.name}." for block in blocks_of(model))
        self._non_block = [name for name in self._locations if not name.startswith(prefixes)]
        self._owners = _owners(model)

    @contextmanager
    def block(self, block: Block, next_block: Block | None = None) -> Iterator[None]:
        try:
            with self._filled(self._names_of(block), self._take_prefetched(block)):
                if self.ahead and next_block is not None:
                    self._prefetch(next_block)
                yield
        except BaseException:
            self._discard_prefetched()
            raise
        finally:
            release_free_memory()

    @contextmanager
    def non_block(self) -> Iterator[None]:
        with self._filled(self._non_block):
            yield

    @property
    def names(self) -> list[str]:
        """The names of all tensors."""
        return list(self._locations)

    def file_of(self, names: Iterable[str]) -> Path | None:
        """Return the safetensors file that holds exactly these tensors, under these names; None if there is none."""
        wanted = set(names)
        locations = {location for name in wanted if isinstance(location := self._locations[name], TensorLocation)}
        if len(locations) < len(wanted):
            return None
        files = {location.file for location in locations}
        keys = {location.key for location in locations}
        if len(files) != 1 or keys != wanted or next(iter(files)).suffix != ".safetensors":
            return None
        file = next(iter(files))
        return file if set(keys_of(file)) == wanted else None

    def non_block_names(self) -> list[list[str]]:
        """Return the names of the tensors outside the blocks, tied ones once, grouped by the pieces they are stored in."""
        first: dict[Owners, str] = {}
        for name in self._non_block:
            first.setdefault(self._owners[name], name)
        groups: dict[str, list[str]] = {}
        for name in first.values():
            location = self._locations[name]
            groups.setdefault(location.first if isinstance(location, ConvertedTensor) else name, []).append(name)
        return list(groups.values())

    def read(self, name: str) -> Tensor:
        """Read one tensor into CPU memory, in its stored shape and in the model's dtype."""
        location = self._locations[name]
        tensor = read_stored(location)
        if tensor.is_floating_point():
            if not all_finite(tensor):
                raise BadCheckpoint(
                    f"{location.file.name} holds NaN or infinity in {location.key}. Get a sound copy of the checkpoint."
                )
            tensor = tensor.to(self.dtype)
        return tensor

    def size(self) -> tuple[int, int]:
        """Return the number of parameters, tied ones counted once, and how many of them are zero."""
        counted: set[Owners] = set()
        count = zeros = 0
        for name in self._locations:
            if self._owners[name] not in counted and isinstance(_get_tensor(*self._owners[name][0]), nn.Parameter):
                counted.add(self._owners[name])
                tensor = self.read(name)
                count, zeros = count + tensor.numel(), zeros + count_zeros(tensor)
        return count, zeros

    def relocate(self, names: Iterable[str], file: Path) -> None:
        """Read these tensors from another safetensors file from now on, in which they have their names in the model."""
        self._locations.update({name: TensorLocation(file, name) for name in names})

    def _names_of(self, block: Block) -> list[str]:
        """Return the names of a block's tensors."""
        return [name for name in self._locations if name.startswith(f"{block.name}.")]

    def _prefetch(self, block: Block) -> None:
        """Start reading a block's tensors, into pinned memory if they are to be copied to a GPU."""
        buffers: dict[str, Tensor] = {}
        for name in self._names_of(block):
            tensor = _get_tensor(*self._owners[name][0])
            if tensor.device.type == "meta":
                dtype = self.dtype if tensor.is_floating_point() else tensor.dtype
                buffers[name] = torch.empty(tensor.shape, dtype=dtype, pin_memory=devices.has_own_memory(self.device))
        self._coming = block.index, Prefetch(buffers, self.read)

    def _take_prefetched(self, block: Block) -> dict[str, Tensor]:
        """Return the prefetched tensors of a block; discard those of another block."""
        if self._coming is None or self._coming[0] != block.index:
            self._discard_prefetched()
            return {}
        tensors = self._coming[1].take()
        self._coming = None
        return tensors

    def _discard_prefetched(self) -> None:
        """Cancel the prefetch in progress."""
        if self._coming is not None:
            self._coming[1].drop()
            self._coming = None

    @contextmanager
    def _filled(self, names: Iterable[str], prefetched: dict[str, Tensor] | None = None) -> Iterator[None]:
        """Put these tensors into the model within the context, taking (and removing) those that were prefetched."""
        prefetched = {} if prefetched is None else prefetched
        replaced: list[tuple[nn.Module, str, Tensor]] = []
        try:
            for name in names:
                owners = self._owners[name]
                if _get_tensor(*owners[0]).device.type != "meta":
                    continue  # tied to a tensor that is filled already
                value = prefetched.pop(name) if name in prefetched else self.read(name)
                value = value.to(self.device, non_blocking=value.is_pinned())
                if value.shape != _get_tensor(*owners[0]).shape:
                    location = self._locations[name]
                    raise BadCheckpoint(
                        f"{location.file.name}: {location.key} is {tuple(value.shape)}, "
                        f"but the configuration calls for {tuple(_get_tensor(*owners[0]).shape)}."
                    )
                is_parameter = isinstance(_get_tensor(*owners[0]), nn.Parameter)
                filled = nn.Parameter(value, requires_grad=False) if is_parameter else value
                for module, leaf in owners:
                    replaced.append((module, leaf, _get_tensor(module, leaf)))
                    _set_tensor(module, leaf, filled)
            yield
        finally:
            for module, leaf, empty in replaced:
                _set_tensor(module, leaf, empty)


WIDENED = {"_keep_in_fp32_modules": (torch.float16,), "_keep_in_fp32_modules_strict": (torch.float16, torch.bfloat16)}
"""Attributes by which a transformers model keeps some tensors in float32, with the model dtypes to which they apply."""


def locate_tensors(files: Iterable[Path], model: PreTrainedModel) -> dict[str, Stored]:
    """Find where each tensor of a model is stored, as `from_pretrained` would.

    Also records on the model the weight conversions that apply, so that it is saved in the form of its files.

    Args:
        files: The weight files.
        model: The model, on the meta device.

    Returns:
        The location of each tensor, by its name in the model.

    Raises:
        NotStreamable: A tensor is not in the files, or cannot be read on its own.
    """
    locations, _, model._weight_conversions = index_tensors(files, model)
    if any(type(entry).__name__ == "GroupWeightRename" for entry in model._weight_conversions):
        raise NotStreamable("the stored names of some of its tensors depend on those of others")
    state, owners = model.state_dict(), _owners(model)
    located = {owners[name] for name in locations}
    missing = [name for name in state if owners[name] not in located]
    if missing:
        raise NotStreamable(f"{missing[0]} is not in the checkpoint under a name of its own")
    if any(getattr(model, name, None) and model.dtype in dtypes for name, dtypes in WIDENED.items()):
        raise NotStreamable(
            f"some of its tensors stay in float32 where the others are {str(model.dtype).removeprefix('torch.')}"
        )
    return locations


def tied_names(model: nn.Module) -> dict[str, str]:
    """Map the name of each tensor to the first name of that tensor; tied tensors share one."""
    first: dict[Owners, str] = {}
    return {name: first.setdefault(owners, name) for name, owners in _owners(model).items()}


def _owners(model: nn.Module) -> dict[str, Owners]:
    """Map the name of each parameter and buffer to its owners, several if it is tied."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    ids: dict[str, int] = {}
    for path, module in model.named_modules():
        for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                owners.setdefault(id(tensor), []).append((module, leaf))
                ids[f"{path}.{leaf}" if path else leaf] = id(tensor)
    return {name: tuple(owners[number]) for name, number in ids.items()}


def _get_tensor(module: nn.Module, leaf: str) -> Tensor:
    """Return a parameter or buffer of a module."""
    parameter = module._parameters.get(leaf)
    tensor = module._buffers[leaf] if parameter is None else parameter
    assert tensor is not None
    return tensor


def _set_tensor(module: nn.Module, leaf: str, tensor: Tensor) -> None:
    """Replace a parameter or buffer of a module."""
    if isinstance(tensor, nn.Parameter):
        module._parameters[leaf] = tensor
    else:
        module._buffers[leaf] = tensor
