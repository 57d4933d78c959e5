"""Reads a model's weights block by block from the checkpoint's files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sparsellm.checkpoints.headers import is_zip, read_headers, stored_weights
from sparsellm.checkpoints.tensor_index import (
    NotStreamable,
    Stored,
    TensorLocation,
    index_tensors,
    read_finite,
    read_stored,
)
from sparsellm.errors import BadCheckpoint
from sparsellm.models.blocks import Block, blocks_of
from sparsellm.models.loaded_model import Weights
from sparsellm.runtime import devices
from sparsellm.runtime.memory import release_free_memory
from sparsellm.solvers.linalg import count_zeros

if TYPE_CHECKING:
    from transformers import PreTrainedModel


Owners = tuple[tuple[nn.Module, str], ...]
"""The modules that hold a parameter or buffer, each with its name there; several if it is tied."""


class DiskWeights(Weights):
    """Reads the weights of a model on the meta device from files while they are needed.

    A context discards its tensors at its end. A block that has been changed must be written, and its new file set with
    `relocate`, before that. Reads raise BadCheckpoint for tensors that hold NaN or infinity, have the wrong shape, or cannot be
    read.

    Args:
        model: A skeleton whose tensors have the dtypes to which those of the files are converted. Those that are stored go to
            the meta device; other buffers are real.
        locations: Where each parameter (and each buffer that checkpoints hold) is stored, by its name in the model. Tied
            parameters appear under at least one of their names.
        prefetch: Whether to read the next block while one is in use.
    """

    on_disk = True

    def __init__(
        self,
        model: PreTrainedModel,
        locations: Mapping[str, Stored],
        *,
        device: torch.device | str = "cpu",
        prefetch: bool = False,
    ) -> None:
        self.device, self.prefetch = torch.device(device), prefetch
        self._prefetched: tuple[Block, dict[str, Future[Tensor]]] | None = None
        self._locations = dict(locations)
        prefixes = tuple(f"{block.name}." for block in blocks_of(model))
        self._non_block = [name for name in self._locations if not name.startswith(prefixes)]
        self._owners = _owners(model)
        self._empty = {name: getattr(*self._owners[name][0]).to("meta") for name in self._locations}
        for name, empty in self._empty.items():
            for module, attribute in self._owners[name]:
                setattr(module, attribute, empty)

    @contextmanager
    def block(self, block: Block, next_block: Block | None = None) -> Iterator[None]:
        if self._prefetched is not None and self._prefetched[0].index != block.index:
            self._cancel_prefetch()
        try:
            with self.filled(self._names_of(block), self._prefetched[1] if self._prefetched else {}):
                self._prefetched = None
                if self.prefetch and next_block is not None and not next_block.is_head:  # that is read with the last norm
                    self._start_prefetch(next_block)
                yield
        except BaseException:
            self._cancel_prefetch()
            raise
        finally:
            release_free_memory()

    @contextmanager
    def non_block(self) -> Iterator[None]:
        try:
            with self.filled(self._non_block):
                yield
        finally:
            release_free_memory()

    @property
    def names(self) -> list[str]:
        """The names of all tensors."""
        return list(self._locations)

    def file_of(self, names: Iterable[str]) -> Path | None:
        """Return the safetensors file that holds exactly these tensors, under these names; None if there is none."""
        locations = {name: self._locations[name] for name in names}
        file = next(location.file for location in locations.values())
        is_stored = all(location == TensorLocation(file, name) for name, location in locations.items())
        is_stored = is_stored and file.suffix == ".safetensors" and not stored_weights(file)
        return file if is_stored and read_headers(file).keys() == locations.keys() else None

    def read(self, name: str) -> Tensor:
        """Read one tensor into CPU memory, in its stored shape and in the dtype that it has in the model."""
        location, dtype = self._locations[name], self._empty[name].dtype
        read = read_finite if isinstance(self._empty[name], nn.Parameter) else read_stored
        return read(location, dtype).to(dtype)

    def size(self) -> tuple[int, int, int]:
        """Return the number of parameters, tied ones counted once, how many of them are zero, and their bytes."""
        counted: set[Owners] = set()
        count = zeros = size = 0
        for name in self._locations:
            if self._owners[name] not in counted and isinstance(getattr(*self._owners[name][0]), nn.Parameter):
                counted.add(self._owners[name])
                tensor = self.read(name)
                count, zeros, size = count + tensor.numel(), zeros + count_zeros(tensor), size + tensor.nbytes
        return count, zeros, size

    def relocate(self, names: Iterable[str], file: Path) -> None:
        """Read these tensors from another safetensors file from now on, in which they have their names in the model."""
        files = {self._owners[name]: TensorLocation(file, name) for name in names}
        self._locations.update({name: files[self._owners[name]] for name in self._locations if self._owners[name] in files})

    def _names_of(self, block: Block) -> list[str]:
        """Return the names of a block's tensors."""
        return [name for name in self._locations if name.startswith(f"{block.name}.")]

    def _start_prefetch(self, block: Block) -> None:
        """Start a thread that reads a block's tensors, into pinned memory if they are to be copied to a GPU."""
        thread, futures = ThreadPoolExecutor(1, "prefetch"), dict[str, Future[Tensor]]()
        for name in self._names_of(block):
            tensor = getattr(*self._owners[name][0])
            if tensor.device.type == "meta":
                # Allocated here, so that it counts as memory of this thread.
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=devices.has_own_memory(self.device))
                futures[name] = thread.submit(self._read_into, buffer, name)
        thread.shutdown(wait=False)  # it ends after the last tensor
        self._prefetched = block, futures

    def _read_into(self, buffer: Tensor, name: str) -> Tensor:
        """Read one tensor into a buffer, which is returned; a tensor of another shape is returned as it is stored."""
        tensor = self.read(name)
        return buffer.copy_(tensor) if tensor.shape == buffer.shape else tensor

    def _cancel_prefetch(self) -> None:
        """Stop reading the next block, after the tensor at hand."""
        if self._prefetched is not None:
            futures = list(self._prefetched[1].values())
            for future in futures:
                future.cancel()
            wait(futures)
            self._prefetched = None

    @contextmanager
    def filled(self, names: Iterable[str], prefetched: dict[str, Future[Tensor]] | None = None) -> Iterator[None]:
        """Put these tensors into the model within the context, taking (and removing) those that were prefetched."""
        prefetched = {} if prefetched is None else prefetched
        replaced: list[tuple[nn.Module, str, Tensor]] = []
        try:
            for name in names:
                empty = getattr(*self._owners[name][0])
                if empty.device.type != "meta":
                    continue  # tied to a tensor that is filled already
                value = prefetched.pop(name).result() if name in prefetched else self.read(name)
                value = value.to(self.device, non_blocking=value.is_pinned())
                if value.shape != empty.shape:
                    location = self._locations[name]
                    raise BadCheckpoint(
                        f"{location.file.name}: {location.key} is {tuple(value.shape)}, "
                        f"but the configuration calls for {tuple(empty.shape)}."
                    )
                filled = nn.Parameter(value, requires_grad=False) if isinstance(empty, nn.Parameter) else value
                for module, attribute in self._owners[name]:
                    replaced.append((module, attribute, empty))
                    setattr(module, attribute, filled)
            yield
        finally:
            for module, attribute, empty in replaced:
                setattr(module, attribute, empty)


def locate_tensors(files: Iterable[Path], model: PreTrainedModel) -> dict[str, Stored]:
    """Find where each tensor of a model is stored, as `from_pretrained` would.

    Also records on the model the weight conversions that apply, so that it is saved in the form of its files.

    Raises:
        NotStreamable: A tensor is not in the files, or cannot be read on its own.
    """
    files = list(files)
    if old := [file for file in files if file.suffix != ".safetensors" and not is_zip(file)]:
        raise NotStreamable(f"{old[0].name} has the format before torch 1.6, which cannot be read in parts")
    locations, _, model._weight_conversions = index_tensors(files, model)
    if any(type(entry).__name__ == "GroupWeightRename" for entry in model._weight_conversions):
        raise NotStreamable("the stored names of some of its tensors depend on those of others")
    state, owners = model.state_dict(), _owners(model)
    located = {owners[name] for name in locations}
    missing = [name for name in state if owners[name] not in located]
    if missing:
        raise NotStreamable(f"{missing[0]} is not in the checkpoint under a name of its own")
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
        for attribute, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                owners.setdefault(id(tensor), []).append((module, attribute))
                ids[f"{path}.{attribute}" if path else attribute] = id(tensor)
    return {name: tuple(owners[number]) for name, number in ids.items()}
