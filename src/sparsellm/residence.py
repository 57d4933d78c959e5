"""Where a run's model is: in memory as a whole, or read block by block; and what may be kept in memory beside it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparsellm.blocks import computed_in
from sparsellm.checkpoint import Checkpoint, Loaded, compute_dtype
from sparsellm.errors import TooLarge
from sparsellm.evaluation import Perplexity, perplexity, streamed_perplexity
from sparsellm.memory import available, human_bytes
from sparsellm.recipe import Recipe
from sparsellm.storage import Storage
from sparsellm.weights import InMemory, NotStreamable, OnDisk, Weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHARE = 0.8
"""Of the memory that is free, how much a run takes for its own where it is not told."""

RESIDENT_SHARE = 0.5
"""Of its memory, how much a run fills with the model; a larger one is read block by block."""

STREAMS_SHARE = 0.25
"""Of its memory, how much holds hidden states; what is more goes to files."""


@dataclass(frozen=True)
class Residence:
    """A model ready to be walked. weights: what fills it. storage: for what travels. compute: as for `walk`. note: what a
    reader should know, or nothing."""

    model: PreTrainedModel
    weights: Weights
    storage: Storage
    compute: torch.dtype | None
    note: str = ""

    @property
    def streamed(self) -> bool:
        """Whether the weights are read block by block."""
        return isinstance(self.weights, OnDisk)

    def measured(self, windows: Tensor, source: str) -> Perplexity:
        """The model's perplexity on windows."""
        if not self.streamed:
            return measured(self.model, windows, source)
        return streamed_perplexity(self.model, windows, self.weights, self.storage, self.compute, source)

    def size(self) -> tuple[int, int]:
        """How many parameters the model has, tied ones once, and how many of them are zero."""
        if isinstance(self.weights, OnDisk):
            return self.weights.size()
        tensors = list(self.model.parameters())
        return sum(tensor.numel() for tensor in tensors), sum(int((tensor == 0).sum()) for tensor in tensors)


def measured(model: PreTrainedModel, windows: Tensor, source: str = "") -> Perplexity:
    """A model's perplexity on windows, computed in the dtype that is fast on its device; its own dtype stays."""
    with computed_in(model, compute_dtype(model)):
        return perplexity(model, windows, source)


def settle(recipe: Recipe, source: Checkpoint | Loaded, device: torch.device, folder: Path | None) -> Residence:
    """The recipe's model, where its size and the memory let it be. Raises TooLarge, InvalidSetting or BadCheckpoint.

    folder: where a run may keep files; without one the model must fit, and what travels too.
    """
    memory = recipe.memory_bytes or int(SHARE * (available(device) or 2**63))
    storage = Storage(int(STREAMS_SHARE * memory) if folder else None, folder)
    needed = resident_bytes(recipe, source)
    if isinstance(source, Loaded) or needed <= RESIDENT_SHARE * memory:
        return _loaded(recipe, source, device, storage)
    told = f"the model takes {human_bytes(needed)} and may take {human_bytes(RESIDENT_SHARE * memory)}"
    if recipe.couple == "model" or recipe.written:
        what = "`couple` model" if recipe.couple == "model" else "`written`"
        raise TooLarge(f"With {what} the whole model must be in memory: {told}. Leave it out, or raise --memory.")
    if folder is None:
        raise TooLarge(f"{told[0].upper()}{told[1:]}. Name the folder to write, so that it can be read block by block.")
    try:
        model, weights = source.stream(recipe.dtype, device)
    except NotStreamable as error:
        resident = _loaded(recipe, source, device, storage)
        return Residence(resident.model, resident.weights, storage, resident.compute, f"loaded as a whole: {error}")
    compute = torch.float32 if device.type == "cpu" and weights.dtype in (torch.bfloat16, torch.float16) else None
    return Residence(model, weights, storage, compute, f"read block by block: {told}")


def resident_bytes(recipe: Recipe, source: Checkpoint | Loaded) -> int:
    """Bytes of the whole model in memory, in the dtype that it is loaded in."""
    if isinstance(source, Loaded):
        return sum(tensor.numel() * tensor.element_size() for tensor in source.model.parameters())
    told = getattr(source.config, "dtype", None) if recipe.dtype == "auto" else getattr(torch, recipe.dtype)
    if not isinstance(told, torch.dtype):
        return source.size()
    count: int = sum(tensor.numel() for tensor in source.skeleton().parameters())
    return told.itemsize * count


def _loaded(recipe: Recipe, source: Checkpoint | Loaded, device: torch.device, storage: Storage) -> Residence:
    """The model in memory."""
    model = source.load(recipe.dtype, device)
    return Residence(model, InMemory(), storage, compute_dtype(model))
