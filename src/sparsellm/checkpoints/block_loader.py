"""Where a model's tensors are: in memory, or in the checkpoint's files, read when a block's turn comes and given back after."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

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


class Weights(Protocol):
    """What lets a walk through a model have each part's tensors while it needs them."""

    def block(self, block: Block, next_block: Block | None = None) -> AbstractContextManager[None]:
        """Within the context a block's tensors are there. then: the block that is wanted next, which may be read meanwhile."""
        ...

    def non_block(self) -> AbstractContextManager[None]:
        """Within the context all is there that belongs to no block: embeddings, last norm, head."""
        ...


class ResidentWeights:
    """All tensors are there all the time."""

    def block(self, block: Block, next_block: Block | None = None) -> AbstractContextManager[None]:
        return nullcontext()

    def non_block(self) -> AbstractContextManager[None]:
        return nullcontext()


class DiskWeights:
    """Tensors on the meta device, filled from files while they are needed.

    model: a skeleton, its parameters on the meta device and its buffers real. places: where each parameter (and each buffer
    that checkpoints hold) is stored, by the name that the model gives it; tied ones once or more. dtype: what floating tensors
    are converted to. device: where they go. ahead: whether the block that is wanted next is read while one is worked on.

    A block that was changed must be written, and its places set anew (`moved`), before its context ends: what was in memory
    is gone after it. Reads raise BadCheckpoint for tensors that hold NaN or infinity, are misshapen, or cannot be read.
    """

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
        self._model, self._places = model, dict(places)
        blocks = tuple(f"{block.name}." for block in blocks_of(model))
        self._ends = [name for name in self._places if not name.startswith(blocks)]
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
        with self._filled(self._ends):
            yield

    @property
    def names(self) -> list[str]:
        """The names of all tensors."""
        return list(self._places)

    def file_of(self, names: Iterable[str]) -> Path | None:
        """The one safetensors file that holds these tensors under their own names, and nothing else; None if there is none."""
        wanted = set(names)
        places = {place for name in wanted if isinstance(place := self._places[name], TensorLocation)}
        if len(places) < len(wanted):
            return None
        files = {place.file for place in places}
        if len(files) != 1 or {place.key for place in places} != wanted or next(iter(files)).suffix != ".safetensors":
            return None
        file = next(iter(files))
        return file if set(keys_of(file)) == wanted else None

    def non_block_names(self) -> list[list[str]]:
        """The names of the tensors that belong to no block, tied ones once; those that are stored together, together."""
        first: dict[tuple[tuple[nn.Module, str], ...], str] = {}
        for name in self._ends:
            first.setdefault(self._owners[name], name)
        together: dict[str, list[str]] = {}
        for name in first.values():
            place = self._places[name]
            together.setdefault(place.first if isinstance(place, ConvertedTensor) else name, []).append(name)
        return list(together.values())

    def read(self, name: str) -> Tensor:
        """One tensor, in its stored shape and in the model's dtype, on the processor."""
        place = self._places[name]
        tensor = read_stored(place)
        if tensor.is_floating_point():
            if not all_finite(tensor):
                raise BadCheckpoint(
                    f"{place.file.name} holds NaN or infinity in {place.key}. Get a sound copy of the checkpoint."
                )
            tensor = tensor.to(self.dtype)
        return tensor

    def size(self) -> tuple[int, int]:
        """How many numbers the tensors hold, tied ones once, and how many of them are zero."""
        seen: set[tuple[tuple[nn.Module, str], ...]] = set()
        count = zeros = 0
        for name in self._places:
            if self._owners[name] not in seen and isinstance(_get_tensor(*self._owners[name][0]), nn.Parameter):
                seen.add(self._owners[name])
                tensor = self.read(name)
                count, zeros = count + tensor.numel(), zeros + count_zeros(tensor)
        return count, zeros

    def relocate(self, names: Iterable[str], file: Path) -> None:
        """From now on these tensors are read from another safetensors file, under the names that the model gives them."""
        self._places.update({name: TensorLocation(file, name) for name in names})

    def _names_of(self, block: Block) -> list[str]:
        """The names of a block's tensors."""
        return [name for name in self._places if name.startswith(f"{block.name}.")]

    def _prefetch(self, block: Block) -> None:
        """Begin to read a block's tensors; pinned, where they are to be copied to a GPU."""
        buffers: dict[str, Tensor] = {}
        for name in self._names_of(block):
            held = _get_tensor(*self._owners[name][0])
            if held.device.type == "meta":
                dtype = self.dtype if held.is_floating_point() else held.dtype
                buffers[name] = torch.empty(held.shape, dtype=dtype, pin_memory=devices.has_own_memory(self.device))
        self._coming = block.index, Prefetch(buffers, self.read)

    def _take_prefetched(self, block: Block) -> dict[str, Tensor]:
        """What was read of a block already; others that were sent for are no longer wanted."""
        if self._coming is None or self._coming[0] != block.index:
            self._discard_prefetched()
            return {}
        found = self._coming[1].take()
        self._coming = None
        return found

    def _discard_prefetched(self) -> None:
        """What was sent for is no longer wanted."""
        if self._coming is not None:
            self._coming[1].drop()
            self._coming = None

    @contextmanager
    def _filled(self, names: Iterable[str], early: dict[str, Tensor] | None = None) -> Iterator[None]:
        """Within the context these tensors are in the model. early: those that were read already; emptied."""
        early = {} if early is None else early
        emptied: list[tuple[nn.Module, str, Tensor]] = []
        try:
            for name in names:
                owners = self._owners[name]
                if _get_tensor(*owners[0]).device.type != "meta":
                    continue  # tied to one that was filled already
                value = early.pop(name) if name in early else self.read(name)
                value = value.to(self.device, non_blocking=value.is_pinned())
                if value.shape != _get_tensor(*owners[0]).shape:
                    place = self._places[name]
                    raise BadCheckpoint(
                        f"{place.file.name}: {place.key} is {tuple(value.shape)}, "
                        f"but the configuration calls for {tuple(_get_tensor(*owners[0]).shape)}."
                    )
                parameter = isinstance(_get_tensor(*owners[0]), nn.Parameter)
                filled = nn.Parameter(value, requires_grad=False) if parameter else value
                for module, leaf in owners:
                    emptied.append((module, leaf, _get_tensor(module, leaf)))
                    _set_tensor(module, leaf, filled)
            yield
        finally:
            for module, leaf, empty in emptied:
                _set_tensor(module, leaf, empty)


WIDENED = {"_keep_in_fp32_modules": (torch.float16,), "_keep_in_fp32_modules_strict": (torch.float16, torch.bfloat16)}
"""By which of its attributes a model of transformers keeps tensors in float32, and in which dtypes it then is."""


def locate_tensors(files: Iterable[Path], model: PreTrainedModel) -> dict[str, Stored]:
    """Where every tensor of a model is stored, by the name that the model gives it, as `from_pretrained` would find it.

    Raises NotStreamable, saying why, where a tensor has no place, or cannot be read by itself.
    """
    places, _, model._weight_conversions = index_tensors(files, model)  # so that it is written as it was read
    if any(type(entry).__name__ == "GroupWeightRename" for entry in model._weight_conversions):
        raise NotStreamable("the stored names of some of its tensors depend on those of others")
    known, owners = model.state_dict(), _owners(model)
    there = {owners[name] for name in places}
    missing = [name for name in known if owners[name] not in there]
    if missing:
        raise NotStreamable(f"{missing[0]} is not in the checkpoint under a name of its own")
    if any(getattr(model, name, None) and model.dtype in dtypes for name, dtypes in WIDENED.items()):
        raise NotStreamable(
            f"some of its tensors stay in float32 where the others are {str(model.dtype).removeprefix('torch.')}"
        )
    return places


def tied_names(model: nn.Module) -> dict[str, str]:
    """By each name of a model's tensors, the first name of that tensor: of tied ones, which are one tensor, the same."""
    first: dict[tuple[tuple[nn.Module, str], ...], str] = {}
    return {name: first.setdefault(owners, name) for name, owners in _owners(model).items()}


def _owners(model: nn.Module) -> dict[str, tuple[tuple[nn.Module, str], ...]]:
    """By name, the modules that hold a parameter or buffer and what they call it; all of them where it is tied."""
    held: dict[int, list[tuple[nn.Module, str]]] = {}
    names: dict[str, int] = {}
    for path, module in model.named_modules():
        for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                held.setdefault(id(tensor), []).append((module, leaf))
                names[f"{path}.{leaf}" if path else leaf] = id(tensor)
    return {name: tuple(held[number]) for name, number in names.items()}


def _get_tensor(module: nn.Module, leaf: str) -> Tensor:
    """A module's own parameter or buffer."""
    tensor = module._parameters.get(leaf)
    found = module._buffers[leaf] if tensor is None else tensor
    assert found is not None
    return found


def _set_tensor(module: nn.Module, leaf: str, tensor: Tensor) -> None:
    """Give a module a parameter or buffer in place of the one it has."""
    if isinstance(tensor, nn.Parameter):
        module._parameters[leaf] = tensor
    else:
        module._buffers[leaf] = tensor
