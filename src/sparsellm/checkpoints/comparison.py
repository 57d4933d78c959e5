"""Tensors of two models, in files or in memory, compared bit by bit, one at a time."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparsellm.checkpoints.block_loader import tied_names
from sparsellm.checkpoints.configuration import silence_transformers
from sparsellm.checkpoints.documents import CONFIG_FILE
from sparsellm.checkpoints.files import SHARDS, check_files, is_hub_name
from sparsellm.checkpoints.headers import read_headers
from sparsellm.checkpoints.stored_form import StoredForm
from sparsellm.checkpoints.tensor_index import (
    Stored,
    bit_identical,
    equal_stored,
    read_stored,
)
from sparsellm.errors import dtype_name
from sparsellm.models.blocks import Block
from sparsellm.models.output_head import blocks_and_head
from sparsellm.texts.paths import local_path

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class StoredTensors:
    """Tensors of a checkpoint, read one at a time from safetensors or `.bin` files (weights only), or of a model in memory.

    Tensors have the model's parameter names, as `from_pretrained` assigns them. Those that the model does not have have their
    names in the files. Stored buffers that the model computes itself are left out, and so are biases of 0 that GPTQ added.

    Args:
        model: The model, or one on the meta device that gives the names.
        held: The model in memory, whose packed layers are decoded when they are read; None for files.
    """

    def __init__(self, folder: Path | None, model: PreTrainedModel, held: PreTrainedModel | None = None) -> None:
        self._tied, self._held = tied_names(model), held
        self.files: dict[str, Stored | Tensor] = {}
        if folder is None:
            state = sorted(model.state_dict().items())  # tied tensors once, as in files
            self.files |= {key: tensor for key, tensor in state if self._tied.get(key, key) == key}
            return
        form = StoredForm.of(check_files(folder.name, folder), model)
        self.files |= sorted({**form.carried, **form.locations}.items())

    @classmethod
    def of_source(cls, model: PreTrainedModel) -> StoredTensors | None:
        """The tensors of the folder, or of the hub's cache, that a model in memory was loaded from; None if it is not there."""
        from huggingface_hub import try_to_load_from_cache

        name, folder = str(model.name_or_path or ""), local_path(str(model.name_or_path))
        if name and not folder.is_dir() and is_hub_name(name):
            with suppress(ValueError):  # not a name that a hub has
                cached = try_to_load_from_cache(name, CONFIG_FILE, revision=getattr(model.config, "_commit_hash", None))
                folder = Path(cached).parent if isinstance(cached, str) else folder
        if not name or not any((folder / shard).is_file() for shard in SHARDS):
            return None
        with torch.device("meta"), silence_transformers():
            skeleton = type(model)(copy.deepcopy(model.config))  # the model itself may have the names of adapters
        skeleton.tie_weights()
        return cls(folder, skeleton)

    def __getitem__(self, key: str) -> Tensor:
        return self.read(key)

    def read(self, key: str, dtype: torch.dtype | None = None) -> Tensor:
        """Read a tensor, a quantized one in this dtype, as `read_stored` does."""
        stored = self.files[key]
        if isinstance(stored, Tensor) and stored.is_meta and self._held is not None:
            path, _, name = key.rpartition(".")
            stored = getattr(self._held.get_submodule(path), name)
        return stored.cpu() if isinstance(stored, Tensor) else read_stored(stored, dtype)

    def dtype(self, key: str) -> str:
        """Name of a tensor's dtype as it is stored."""
        stored = self.files[key]
        if isinstance(stored, Tensor):
            return dtype_name(self.read(key).dtype)
        return read_headers(stored.file)[stored.key].dtype

    def one_name(self, key: str) -> str:
        """Canonical name of a tensor: the first of its tied names, without the base model's prefix, which some files omit."""
        return self._tied.get(key, key).removeprefix("model.")

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return ((key, self[key]) for key in self.files)


def layers_by_parameter(model: PreTrainedModel, pruned: Collection[str]) -> dict[str, list[tuple[Block, str]]]:
    """The linear layers of the blocks, and the head if it is `pruned`, by the full name of the parameter that holds them."""
    layers: dict[str, list[tuple[Block, str]]] = {}
    for block in blocks_and_head(model, pruned):
        for name in block.layers:
            layers.setdefault(block.full_name(block.parameter(name)), []).append((block, name))
    return layers


@dataclass(frozen=True)
class CheckpointComparison:
    """Differences of a model from another one.

    Attributes:
        changed: Tensors that differ from the other checkpoint's.
        alike: Number of tensors that are bit-identical in both.
        converted: Tensors that are bit-identical once the other checkpoint's are converted to their dtype.
        only_here: Tensors that only this checkpoint has.
        only_there: Tensors that only the other checkpoint has.
    """

    changed: tuple[str, ...] = ()
    alike: int = 0
    converted: tuple[str, ...] = ()
    only_here: tuple[str, ...] = ()
    only_there: tuple[str, ...] = ()


def compare(here: StoredTensors, there: StoredTensors) -> CheckpointComparison:
    """Compare the tensors of two checkpoints bit by bit. Tied tensors match under any of their names."""
    names = {here.one_name(key) for key in here.files}
    keys_there = {there.one_name(key): key for key in there.files}
    common = {key: keys_there[here.one_name(key)] for key in here.files if here.one_name(key) in keys_there}
    changed, converted = [], []
    for key, other in common.items():
        if not _equal_tensors(here, key, there, other=other):
            changed.append(key)
        elif here.dtype(key) != there.dtype(other):
            converted.append(key)
    return CheckpointComparison(
        changed=tuple(changed),
        alike=len(common) - len(changed) - len(converted),
        converted=tuple(converted),
        only_here=tuple(key for key in here.files if key not in common),
        only_there=tuple(key for key in there.files if there.one_name(key) not in names),
    )


def _equal_tensors(here: StoredTensors, key: str, there: StoredTensors, *, other: str) -> bool:
    """Whether two tensors have the same bits in the dtype of the first."""
    first, second, dtype = here.files[key], there.files[other], getattr(torch, here.dtype(key))
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        return bit_identical(here[key], there.read(other, dtype).to(dtype))
    return equal_stored(first, second, dtype)
