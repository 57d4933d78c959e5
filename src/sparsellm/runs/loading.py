"""Where a run holds the model: in memory as a whole, or read block by block; loading it, and a test run on a few tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sparsellm.activations.walk import walk
from sparsellm.checkpoints.block_loader import ResidentWeights
from sparsellm.checkpoints.loaded_model import LoadedModel
from sparsellm.checkpoints.loading import Checkpoint, InMemoryModel, compute_dtype
from sparsellm.checkpoints.tensor_index import NotStreamable
from sparsellm.errors import TooLarge
from sparsellm.models.blocks import blocks_of
from sparsellm.models.contexts import compute_dtype_context, eval_mode
from sparsellm.models.partial_forward import input_device, model_errors, prediction_head
from sparsellm.runs.recipe import RunRecipe
from sparsellm.runtime import collectives, devices
from sparsellm.runtime.memory import available, human_bytes
from sparsellm.runtime.offload import OffloadManager

SHARE = 0.8
"""Fraction of the free memory that a run uses by default."""

RESIDENT_SHARE = 0.5
"""Fraction of the run's memory that the model may fill; a larger model is read block by block."""

STREAMS_SHARE = 0.25
"""Fraction of the run's memory that holds hidden states; the rest goes to the host's memory (from a GPU), then to files."""


@dataclass(frozen=True)
class Placement:
    """Where a run holds the model, chosen before any weights are read.

    Attributes:
        memory: Bytes that the run may use for its data.
        model: Bytes of the whole model.
        streamed: Whether the model is read block by block.
        note: Reason for the choice, for the user; may be empty.
        ahead: Whether the next block is read while the current one is pruned.
        tight: Whether memory is too scarce for the allocator to keep what is freed.
    """

    memory: int
    model: int
    streamed: bool
    note: str = ""
    ahead: bool = False
    tight: bool = False


def choose_placement(recipe: RunRecipe, source: Checkpoint | InMemoryModel, device: torch.device, files: bool) -> Placement:
    """Choose where the recipe's model is held.

    Args:
        recipe: `offload` and `max_memory` override the defaults.
        source: The model to load.
        device: Device that computes.
        files: Whether the run may write files; without them the whole model must fit in memory.

    Raises:
        TooLarge: The run needs the whole model in memory, and it does not fit.
        InvalidSetting: A setting of the recipe cannot be used with this model.
        BadCheckpoint: The checkpoint cannot be read.
    """
    memory = recipe.memory_bytes or int(SHARE * available(device))
    size = resident_bytes(recipe, source)
    sizes = f"the model takes {human_bytes(size)} and may take {human_bytes(RESIDENT_SHARE * memory)}"
    streamed = size > RESIDENT_SHARE * memory if recipe.offload is None else recipe.offload
    if isinstance(source, InMemoryModel) or not streamed:
        return Placement(memory, size, False)
    if recipe.model_steps or recipe.calibration_written:
        stage = "gradient steps over it" if recipe.model_steps else "`written`"
        reason = sizes if recipe.offload is None else "--offload reads it block by block"
        raise TooLarge(f"With {stage} the whole model must be in memory: {reason}. Leave it out, or raise --max-memory.")
    if not files:
        reason = (
            sizes if recipe.offload is None else "`offload` reads the model block by block and stores pruned blocks in files"
        )
        raise TooLarge(f"{reason[0].upper()}{reason[1:]}. Name the folder to write, as `sparsellm prune MODEL OUT` does.")
    try:
        source.stream(recipe.dtype)
    except NotStreamable as error:
        return Placement(memory, size, False, f"loaded as a whole: {error}")
    ahead = 2 * block_bytes(recipe, source) <= RESIDENT_SHARE * memory
    return Placement(memory, size, True, "read block by block" + (f": {sizes}" if recipe.offload is None else ""), ahead)


def load(
    recipe: RunRecipe,
    source: Checkpoint | InMemoryModel,
    device: torch.device,
    folder: Path | None,
    place: Placement | None = None,
) -> LoadedModel:
    """Load the recipe's model, as a whole or for reading block by block.

    Args:
        recipe: Sets the dtype of the weights.
        source: The model to load.
        device: Device that computes.
        folder: Folder for the run's files; without one the model and the hidden states must fit in memory.
        place: Result of `choose_placement`; chosen here by default.

    Raises:
        TooLarge, InvalidSetting, BadCheckpoint: As `choose_placement`.
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


TOKENS = 16
"""Tokens of the test sequence."""


@torch.no_grad()
def check_runs(loaded: LoadedModel, by_block: bool) -> None:
    """Run a model on one short sequence.

    Args:
        loaded: The model.
        by_block: Run it block by block, as it is pruned, instead of as a whole. Of an offloaded model only the first block
            is run, since loading the others takes long.

    Raises:
        UnsupportedModel: The model's own code fails.
        NonFinite: The output of a block has NaN or infinity.
    """
    model = loaded.model
    tokens = torch.arange(TOKENS).view(1, -1) % model.get_input_embeddings().num_embeddings
    with model_errors(model, "as its config.json says"):
        if by_block:
            _run_blocks(loaded, tokens)
        else:
            with eval_mode(model), compute_dtype_context(model, loaded.compute):
                logits = model(input_ids=tokens.to(input_device(model)), use_cache=False).logits
                assert logits.shape[:2] == tokens.shape, f"logits of {tuple(logits.shape)}"


def _run_blocks(loaded: LoadedModel, tokens: Tensor) -> None:
    """Run all blocks, or only the first of an offloaded model, and the prediction head on one sequence, (1, seq)."""
    blocks = blocks_of(loaded.model)
    last = 0 if loaded.offloaded else len(blocks) - 1
    batches = [tokens] * collectives.world()  # one per process
    for block, inputs in walk(loaded.model, batches, last + 1, loaded.compute, weights=loaded.weights, storage=loaded.storage):
        if block.index == last:
            inputs.advance(block)
            with loaded.weights.non_block(), prediction_head(loaded.model, blocks, loaded.compute) as predict:
                predict(tokens, inputs.pruned[0])
