"""The model of a run: opened and checked, held in memory or read block by block, loaded, and run on a few tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sparsellm.activations.walk import walk
from sparsellm.checkpoints.block_loader import tied_names
from sparsellm.checkpoints.loading import Checkpoint, InMemoryModel, open_checkpoint
from sparsellm.checkpoints.machine_cache import use_cache
from sparsellm.checkpoints.remarks import remark
from sparsellm.checkpoints.stored_form import StoredForm
from sparsellm.checkpoints.tensor_index import NotStreamable
from sparsellm.checkpoints.tokenizers import NoTokenizer
from sparsellm.errors import BadCheckpoint, MissingPackage, TooLarge, UnsupportedModel, capitalized, first_line
from sparsellm.methods import Plan
from sparsellm.models.blocks import Block, blocks_of
from sparsellm.models.contexts import compute_dtype_context, eval_mode
from sparsellm.models.coverage import Coverage, check_coverage, coverage_of
from sparsellm.models.loaded_model import LoadedModel, ResidentWeights, Weights, input_device, model_errors
from sparsellm.models.output_head import check_causal, other_last_token, prediction_head
from sparsellm.recipes.recipe import RunRecipe
from sparsellm.runtime import collectives, devices
from sparsellm.runtime.memory import available, human_bytes
from sparsellm.runtime.offload import OffloadManager

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TEST_TOKENS = 16
"""Tokens of the test sequence."""

SHARE = 0.8
"""Fraction of the free memory that a run uses by default."""

RESIDENT_SHARE = 0.5
"""Fraction of the run's memory that the model may fill; a larger model is read block by block."""

STREAMS_SHARE = 0.25
"""Fraction of the run's memory that holds hidden states; the rest goes to the host's memory (from a GPU), then to files."""


@dataclass(frozen=True, eq=False)
class OpenedModel:
    """A model that can be pruned, before its weights are read.

    Attributes:
        skeleton: The model without weights, or a model in memory itself.
        coverage: Fraction of the blocks' matrix weights that can be pruned.
        no_text: Why no text can be tokenized; empty if one can.
    """

    source: Checkpoint | InMemoryModel
    device: torch.device
    skeleton: PreTrainedModel
    blocks: Sequence[Block]
    coverage: Coverage
    no_text: str


def open_model(recipe: RunRecipe, source: Checkpoint | InMemoryModel | None = None, *, packed: bool = False) -> OpenedModel:
    """Open the recipe's model, which may be packed if `packed`, or check `source`.

    Raises:
        InvalidSetting: The device is not available.
        BadCheckpoint: The checkpoint is damaged, or its tokenizer belongs to another model.
        UnsupportedModel: The model cannot be pruned, or is packed.
    """
    use_cache()
    device = devices.resolve_device(recipe.device)
    source = source or open_checkpoint(recipe.model, recipe.revision, recipe.trust_remote_code, packed=packed)
    if isinstance(source, InMemoryModel) and source.packed and not packed:
        raise UnsupportedModel(f"The weights of {source.name} are packed. Decode them first: model.dequantize().")
    skeleton = source.skeleton(recipe.dtype)
    no_text = check_vocabulary(skeleton, source, needed=bool(recipe.task))  # a text is read later
    blocks = blocks_of(skeleton)
    coverage = coverage_of(skeleton, blocks)
    check_coverage(skeleton, coverage)
    return OpenedModel(source, device, skeleton, blocks, coverage, no_text)


def check_names(form: StoredForm, source: Checkpoint, *, blocks: Sequence[Block], plan: Plan) -> None:
    """Raise BadCheckpoint unless the files hold every parameter to prune under the name that verification uses."""
    canonical = tied_names(form.model)
    stored = {canonical[name] for name in form.locations}
    planned = {
        block.full_name(block.parameter(name)) for block in blocks for name in block.layers if block.full_name(name) in plan
    }
    missing = sorted(name for name in planned if canonical[name] not in stored)
    if missing:
        raise BadCheckpoint(
            f"{source.name} lacks {len(missing)} weights that its configuration calls for, {missing[0]} among them: no tensor "
            "in its files maps to that name. The download may be incomplete, or config.json belongs to another model."
        )


def check_vocabulary(skeleton: PreTrainedModel, source: Checkpoint | InMemoryModel, *, needed: bool) -> str:
    """Check that the model has an embedding for each token of its tokenizer.

    The tokenizer is loaded even for methods without calibration text, since every output includes its files. Added tokens may
    lie beyond the embeddings, as in some published models; `check_tokens` rejects a text that contains one.

    Args:
        needed: Whether a text will be tokenized in any case.

    Returns:
        Why no text can be tokenized; empty if one can.

    Raises:
        BadCheckpoint: The tokenizer does not load, or has more tokens than the model has embeddings; or it is missing and
            `needed`.
        MissingPackage: The tokenizer needs a package that is not installed, and is `needed`.
    """
    if isinstance(source, InMemoryModel) and source.own_tokenizer is None:
        return ""
    try:
        embeddings, tokens = skeleton.get_input_embeddings().num_embeddings, source.tokenizer().vocab_size
    except (NoTokenizer, MissingPackage) as error:
        if needed:
            raise
        return first_line(error)
    if tokens > embeddings:
        raise BadCheckpoint(
            f"The tokenizer of {source.name} has {tokens:,} tokens, but the model has embeddings for {embeddings:,}. "
            "Copy the model's own tokenizer files into the folder."
        )
    return ""


@dataclass(frozen=True)
class Placement:
    """Where a run holds the model, chosen before any weights are read.

    Attributes:
        memory: Bytes that the run may take on its device.
        model: Bytes of the model's weights.
        streamed: Whether the weights are read block by block.
        note: Reason for the choice, for the user; may be empty.
        ahead: Whether the next block is read while the current one is pruned.
        tight: Whether freed memory is returned at once, because memory is scarce or the model is read block by block.
        products: Dtype of the matrix products of passes through the blocks, as in `LoadedModel`.
    """

    memory: int
    model: int
    streamed: bool
    note: str = ""
    ahead: bool = False
    tight: bool = False
    products: torch.dtype | None = None


def choose_placement(recipe: RunRecipe, opened: OpenedModel, *, files: bool) -> Placement:
    """Choose where the recipe's model is held.

    Args:
        recipe: `offload` and `max_memory` override the defaults.
        files: Whether the run may write files; without them the whole model must fit in memory.

    Raises:
        TooLarge: The run needs the whole model in memory, and it does not fit.
        InvalidSetting: A setting of the recipe cannot be used with this model.
        BadCheckpoint: The checkpoint cannot be read.
    """
    source, memory = opened.source, recipe.memory_bytes or int(SHARE * available(opened.device))

    def bytes_of(module: nn.Module) -> int:
        return sum(tensor.nbytes for tensor in module.parameters())

    size = bytes_of(opened.skeleton)
    sizes = f"the model takes {human_bytes(size)} and may take {human_bytes(RESIDENT_SHARE * memory)}"
    streamed = size > RESIDENT_SHARE * memory if recipe.offload is None else recipe.offload
    if isinstance(source, InMemoryModel) or not streamed:
        return Placement(memory, size, streamed=False)
    if step := recipe.changing_whole_model:
        reason = sizes if recipe.offload is None else "`offload=True` reads it block by block"
        raise TooLarge(f"{capitalized(step)} needs the whole model in memory: {reason}. Leave it out, or raise `max_memory`.")
    if not files:
        reason = "`offload=True` reads the model block by block and stores pruned blocks in files"
        reason = sizes if recipe.offload is None else reason
        raise TooLarge(f"{reason[0].upper()}{reason[1:]}. Name the folder to write: pass `output`.")
    try:
        source.stream(recipe.dtype)
    except NotStreamable as error:
        return Placement(memory, size, streamed=False, note=f"loaded as a whole: {error}")
    note = "read block by block" + (f": {sizes}" if recipe.offload is None else "")
    ahead = 2 * max(bytes_of(block.module) for block in opened.blocks) <= RESIDENT_SHARE * memory
    return Placement(memory, size, streamed=True, note=note, ahead=ahead)


def load_model(
    recipe: RunRecipe, opened: OpenedModel, *, folder: Path | None, placement: Placement | None = None
) -> LoadedModel:
    """Load the recipe's model, as a whole or for reading block by block.

    Args:
        recipe: Sets the dtype of the weights.
        folder: Folder for the run's files; without one the model and the hidden states must fit in memory.
        placement: Result of `choose_placement`; chosen here by default.
    """
    source, device = opened.source, opened.device
    placement = placement or choose_placement(recipe, opened, files=folder is not None)
    host = available(torch.device("cpu")) if devices.has_own_memory(device) else 0
    limit = int(STREAMS_SHARE * placement.memory) if folder else None
    storage = OffloadManager(limit, folder, int(STREAMS_SHARE * SHARE * host))
    weights: Weights
    if isinstance(source, InMemoryModel) or not placement.streamed:
        model = source.load(recipe.dtype, device)
        weights = ResidentWeights(model)
    else:
        model, weights = source.stream(recipe.dtype, device, placement.ahead)
    dtype = source.dtype(recipe.dtype)
    in_float32 = device.type == "cpu" or recipe.in_float32
    compute = torch.float32 if in_float32 and dtype in (torch.bfloat16, torch.float16) else None
    return LoadedModel(model, weights, storage, compute, placement.memory, placement.note, placement.products)


def short_sequence(model: PreTrainedModel) -> Tensor:
    """Token ids to try a model on, (1, seq)."""
    vocabulary: int = model.get_input_embeddings().num_embeddings
    return torch.arange(TEST_TOKENS).view(1, -1) % vocabulary


@torch.no_grad()
def check_runs(loaded: LoadedModel, *, by_block: bool, predicts: bool) -> None:
    """Run a model on two short sequences that differ in the last token.

    Args:
        by_block: Run it block by block, as it is pruned, instead of as a whole. Of an offloaded model only the first block
            is run, since loading the others takes long.
        predicts: Whether predictions are measured, or learned from: those of a model that is not causal mean nothing.

    Raises:
        UnsupportedModel: The model's own code fails; or the model is not causal, and `predicts`.
        NonFinite: The output of a block has NaN or infinity.
    """
    model = loaded.model
    tokens = short_sequence(model)
    sequences = [tokens, other_last_token(tokens)]
    with model_errors(model, "as its config.json says"):
        if by_block:
            logits = _run_blocks(loaded, sequences)
        else:
            with eval_mode(model), compute_dtype_context(model, loaded.compute):
                logits = [model(input_ids=x.to(input_device(model)), use_cache=False).logits for x in sequences]
                assert logits[0].shape[:2] == tokens.shape, f"logits of {tuple(logits[0].shape)}"
    try:
        check_causal(model, *logits, dtype=loaded.computed_in)
    except UnsupportedModel as error:
        if predicts:
            raise
        remark(str(error), "causal")


def _run_blocks(loaded: LoadedModel, sequences: Sequence[Tensor]) -> list[Tensor]:
    """The logits of sequences, (1, seq), after all blocks; or after the first of an offloaded model."""
    blocks = blocks_of(loaded.model)
    last = 0 if loaded.weights.on_disk else len(blocks) - 1
    batches = [x for x in sequences for _ in range(collectives.world())]  # each process runs all
    logits: list[Tensor] = []
    for block, inputs in walk(loaded, batches, stop=last + 1):
        if block.index == last:
            inputs.advance(block)
            with loaded.weights.non_block(), prediction_head(loaded.model, blocks, loaded.compute) as predict:
                logits = [predict(x, hidden) for x, hidden in zip(sequences, inputs.pruned, strict=True)]
    return logits
