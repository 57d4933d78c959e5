"""Where a run's model is: in memory as a whole, or read block by block; and what may be kept in memory beside it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from sparsellm.checkpoints.block_loader import ResidentWeights
from sparsellm.checkpoints.loaded_model import LoadedModel
from sparsellm.checkpoints.loading import Checkpoint, InMemoryModel, compute_dtype
from sparsellm.checkpoints.tensor_index import NotStreamable
from sparsellm.errors import TooLarge
from sparsellm.models.blocks import blocks_of
from sparsellm.runs.recipe import RunRecipe
from sparsellm.runtime import devices
from sparsellm.runtime.memory import available, human_bytes
from sparsellm.runtime.offload import OffloadManager

SHARE = 0.8
"""Of the memory that is free, how much a run takes for its own where it is not told."""

RESIDENT_SHARE = 0.5
"""Of its memory, how much a run fills with the model; a larger one is read block by block."""

STREAMS_SHARE = 0.25
"""Of its memory, how much holds hidden states; what is more goes to files, a GPU's to such a share of the processor's first."""


@dataclass(frozen=True)
class Placement:
    """Where a run's model will be, before its weights are read.

    memory: bytes that the run may take for its data. model: bytes of the whole model. streamed: whether it is read block by
    block. note: what a reader should know, or nothing. ahead: whether a block is read while the one before is worked on.
    tight: whether there is no room for memory that was freed and is kept for what comes next.
    """

    memory: int
    model: int
    streamed: bool
    note: str = ""
    ahead: bool = False
    tight: bool = False


def choose_placement(recipe: RunRecipe, source: Checkpoint | InMemoryModel, device: torch.device, files: bool) -> Placement:
    """Where the recipe's model will be. Raises TooLarge, InvalidSetting or BadCheckpoint.

    files: whether the run may keep files; if not, the model must fit.
    """
    memory = recipe.memory_bytes or int(SHARE * available(device))
    size = resident_bytes(recipe, source)
    message = f"the model takes {human_bytes(size)} and may take {human_bytes(RESIDENT_SHARE * memory)}"
    wanted = size > RESIDENT_SHARE * memory if recipe.offload is None else recipe.offload
    if isinstance(source, InMemoryModel) or not wanted:
        return Placement(memory, size, False)
    if recipe.model_steps or recipe.calibration_written:
        what = "gradient steps over it" if recipe.model_steps else "`written`"
        reason = message if recipe.offload is None else "--offload reads it block by block"
        raise TooLarge(f"With {what} the whole model must be in memory: {reason}. Leave it out, or raise --max-memory.")
    if not files:
        reason = (
            message if recipe.offload is None else "`offload` reads the model block by block and keeps what is pruned in files"
        )
        raise TooLarge(f"{reason[0].upper()}{reason[1:]}. Name the folder to write, as `sparsellm prune MODEL OUT` does.")
    try:
        source.stream(recipe.dtype)
    except NotStreamable as error:
        return Placement(memory, size, False, f"loaded as a whole: {error}")
    ahead = 2 * block_bytes(recipe, source) <= RESIDENT_SHARE * memory
    return Placement(memory, size, True, "read block by block" + (f": {message}" if recipe.offload is None else ""), ahead)


def load(
    recipe: RunRecipe,
    source: Checkpoint | InMemoryModel,
    device: torch.device,
    folder: Path | None,
    place: Placement | None = None,
) -> LoadedModel:
    """The recipe's model, where its size and the memory let it be. Raises TooLarge, InvalidSetting or BadCheckpoint.

    folder: where a run may keep files; without one the model must fit, and what travels too. place: from `place_of`.
    """
    place = place or choose_placement(recipe, source, device, folder is not None)
    host = available(torch.device("cpu")) if devices.has_own_memory(device) else None
    storage = OffloadManager(
        int(STREAMS_SHARE * place.memory) if folder else None, folder, int(STREAMS_SHARE * SHARE * (host or 0))
    )
    if isinstance(source, InMemoryModel) or not place.streamed:
        model = source.load(recipe.dtype, device)
        return LoadedModel(model, ResidentWeights(), storage, compute_dtype(model), place.memory, place.note)
    model, weights = source.stream(recipe.dtype, device, place.ahead)
    compute = torch.float32 if device.type == "cpu" and weights.dtype in (torch.bfloat16, torch.float16) else None
    return LoadedModel(model, weights, storage, compute, place.memory, place.note)


def block_bytes(recipe: RunRecipe, source: Checkpoint) -> int:
    """Bytes of the largest block, in the dtype that it is loaded in."""
    sizes = [sum(tensor.numel() for tensor in block.module.parameters()) for block in blocks_of(source.skeleton())]
    return source.dtype(recipe.dtype).itemsize * max(sizes)


def resident_bytes(recipe: RunRecipe, source: Checkpoint | InMemoryModel) -> int:
    """Bytes of the whole model in memory, in the dtype that it is loaded in."""
    if isinstance(source, InMemoryModel):
        return sum(tensor.numel() * tensor.element_size() for tensor in source.model.parameters())
    count: int = sum(tensor.numel() for tensor in source.skeleton().parameters())
    return source.dtype(recipe.dtype).itemsize * count
