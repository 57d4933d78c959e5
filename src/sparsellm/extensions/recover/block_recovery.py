"""Recovery: train the remaining weights of a pruned checkpoint with fixed masks, to match its dense model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparsellm.activations.walk import Activations
from sparsellm.checkpoints.block_loader import tied_names
from sparsellm.checkpoints.loading import Checkpoint, InMemoryModel, open_checkpoint
from sparsellm.checkpoints.stamps import Stamps
from sparsellm.checkpoints.tensor_index import NotStreamable
from sparsellm.errors import BadCheckpoint, InvalidSetting, MissingPackage, VerificationFailed, dtype_name
from sparsellm.extensions.integers.quantization import Scales
from sparsellm.extensions.integers.scales_file import layer_scales
from sparsellm.extensions.recover.recipe import RecoveryRecipe
from sparsellm.extensions.recover.training.block_training import refine_block
from sparsellm.extensions.recover.training.distillation import RATES
from sparsellm.extensions.recover.training.masked_training import MaskedAdam, TrainingStore
from sparsellm.extensions.recover.training.trained_weights import Train, trained_bytes, trained_names
from sparsellm.methods import LayerResult, Plan, Step, TrainingResult, planned_layers
from sparsellm.models.blocks import Block, blocks_of
from sparsellm.models.loaded_model import LoadedModel
from sparsellm.outputs.fingerprint import WEIGHT_ENDINGS, changed_input, run_inputs
from sparsellm.outputs.journal import Journal
from sparsellm.outputs.report import PrunedReport
from sparsellm.outputs.verification import Output, read_finished, verify
from sparsellm.pipeline.loading import OpenedModel
from sparsellm.pipeline.sequential import block_steps
from sparsellm.recipes.file import validated
from sparsellm.recipes.path_names import PathNames
from sparsellm.recipes.selection import layer_names, matching, unmatched
from sparsellm.runtime.memory import check_fits, human_bytes
from sparsellm.solvers.linalg import count_zeros
from sparsellm.solvers.statistics import InputRMS, TokenCount

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RATE = 3e-4
"""Initial learning rate for one block; small, since the pruned weights are near the block's optimum."""


@dataclass(frozen=True)
class BlockRecovery:
    """Copy the pruned weights into each block of the dense model, and train the remaining ones to match the dense outputs.

    Attributes:
        training: Gradient steps on each block, with output errors weighted as in `sparsellm.activations.sensitivity`.
            With 0 steps the weights are only copied, as those of the output head always are.
        read: Reads a tensor of the pruned checkpoint by its name.
        layers: Results of pruning each layer, by block name.
        outside: Parameters outside of the blocks that an earlier recovery changed, which are copied too.
        train: The parameters that are trained, as in `trained_names`.
        targets: Full names of the layers that "lora" trains; None for all pruned ones.
        scales: By full name of a rounded layer, its scales, which are trained with its integers.
        store: Makes the store of the training of a block, by the block's name.
        stamps: The files of the pruned checkpoint as they were when it was opened.
    """

    training: MaskedAdam
    read: Callable[[str], Tensor] = field(repr=False)
    layers: Mapping[str, Sequence[LayerResult]] = field(repr=False)
    train: Train = "full"
    targets: frozenset[str] | None = None
    scales: Mapping[str, Scales] = field(default_factory=dict, repr=False)
    outside: tuple[str, ...] = field(default=(), repr=False)
    store: Callable[[str], TrainingStore] | None = field(default=None, repr=False)
    stamps: Stamps | None = field(default=None, repr=False)

    @property
    def needs(self) -> type[TokenCount]:
        return InputRMS if self.training.steps else TokenCount

    @property
    def needs_dense_stream(self) -> bool:
        return self.training.steps > 0

    @property
    def needs_fisher(self) -> bool:
        return self.training.steps > 0

    def trained_bytes(self, blocks: Sequence[Block]) -> int:
        """Bytes for the training of the largest of these blocks."""
        rank, rounded = self.training.rank or 0, bool(self.scales)
        return max((trained_bytes(block, train=self.train, rank=rank, rounded=rounded) for block in blocks), default=0)

    def check_memory(self, opened: OpenedModel, windows: Tensor) -> str:
        """Describe the memory that training a block takes. Raises TooLarge if the device has less."""
        blocks = opened.blocks
        width = blocks[0].layer(blocks[0].architecture.groups[0][0]).in_features
        needed = self.trained_bytes(blocks) + 2 * 4 * windows.numel() * width  # two streams
        check_fits(needed, opened.device, stage="Training a block", advice="Pass fewer `samples`.")
        return f"training a block takes {human_bytes(needed)}"

    @torch.no_grad()
    def copy_outside(self, loaded: LoadedModel, journal: Journal | None) -> None:
        """Copy `outside` into the model, or into a file of the journal that it reads from now on."""
        tensors = {name: self.read(name) for name in self.outside}
        if loaded.weights.on_disk:
            assert journal is not None  # as for the blocks
            loaded.weights.relocate(tensors, journal.store_tensors("outside", tensors))
            return
        for name, tensor in tensors.items():
            loaded.model.get_parameter(name).copy_(tensor)

    def steps(self, plan: Plan, block: Block, inputs: Activations) -> Iterator[Step]:
        """Recover a block in place, and yield the results, as `sparsellm.pipeline.sequential.block_steps`."""
        return block_steps(block, self.recover(block, inputs, plan), plan)

    def recover(self, block: Block, inputs: Activations, plan: Plan) -> Iterator[LayerResult | TrainingResult]:
        """Recover a block in place: the result of its training, if it is trained, then those of its layers."""
        with torch.no_grad():
            for name, parameter in block.module.named_parameters():
                parameter.copy_(self.read(block.full_name(name)))
        found = {name: self.scales[name] for name in map(block.full_name, block.layers) if name in self.scales}
        scales = {name: replace(x, scales=x.scales.clone()) for name, x in found.items()}
        if self.training.steps and not block.is_head:
            keep = {name: block.layer(name).weight != 0 for name in planned_layers(block, plan)}
            trained = trained_names(block, list(keep), self.train, self.targets)
            fisher = inputs.output_fisher(block)
            store = self.store(block.name) if self.store else None
            train = partial(refine_block, adam=self.training, scales=scales, store=store)
            yield train(block, inputs, keep, names=trained, fisher=fisher)
            block.round_to_storage_dtype()
        names = {block.full_name(name): name for name in block.layers}
        block.scales.update({names[full_name]: x.scales for full_name, x in scales.items()})
        for layer in self.layers[block.name]:
            weight, integers = block.layer(names[layer.name]).weight, scales.get(layer.name)
            yield replace(layer, zeros=count_zeros(weight), **(integers.format.fields_of(weight) if integers else NO_FORMAT))


NO_FORMAT = dict.fromkeys(("bits", "group_size", "bits_per_weight"))
"""Entries of a result on a layer whose numbers have no format."""


def read_recovery(settings: Mapping[str, Any]) -> RecoveryRecipe:
    """Read the recipe of a recovery; its dtype is that of the pruned run.

    Raises:
        InvalidSetting: A setting is invalid, or the pruned folder is not a finished output.
        BadCheckpoint: The pruned folder is damaged.
    """
    finished = read_finished(settings["pruned"])
    recipe = validated(RecoveryRecipe, settings)
    for name in sorted(recipe.inherited & settings.keys()):
        raise InvalidSetting(f"`{name}` of a recovery is that of the pruned run, got {settings[name]}. Leave it out.")
    return recipe.model_copy(update={"dtype": finished.report.recipe.dtype})


def recovery_plan(
    recipe: RecoveryRecipe, source: Checkpoint | InMemoryModel, *, verified: bool = True
) -> tuple[BlockRecovery, Plan, PrunedReport]:
    """Verify the pruned checkpoint, and plan its recovery.

    Args:
        verified: Whether to read and verify all weights; names and shapes are compared in any case.

    Returns:
        The method for each block, the pattern of each layer, and the entries of the pruned checkpoint's report to repeat.

    Raises:
        InvalidSetting: The pruned checkpoint has no zeros, or its tensors differ in name or shape from the dense model's.
        VerificationFailed: The pruned checkpoint was changed since it was written, or was made from another dense model.
    """
    output = read_finished(recipe.pruned)
    if source.folder is not None and source.folder.resolve() == output.folder.resolve():
        raise InvalidSetting(f"{recipe.model} is the pruned model. Pass the dense one that it was made from as `against`.")
    pruned = open_checkpoint(str(output.folder), trusted=recipe.trust_remote_code)
    if not any(layer.zeros for layer in output.report.layers):
        raise InvalidSetting(f"{recipe.pruned} has no zeros to keep: none of its layers was pruned. Prune the model first.")
    pruned_shapes, dense_shapes = _shapes(pruned), _shapes(source)
    if pruned_shapes != dense_shapes:
        names = {**pruned_shapes, **dense_shapes}
        first = min(name for name in names if pruned_shapes.get(name) != dense_shapes.get(name))
        raise InvalidSetting(
            f"{recipe.pruned} was not made from {recipe.model}: {first} is {pruned_shapes.get(first, 'missing')} in the pruned "
            f"model and {dense_shapes.get(first, 'missing')} in the dense one. "
            "Pass the dense model that it was made from as `against`."
        )
    _check_tokenizers(recipe, pruned, source)
    dense = source.folder or source.skeleton()
    if verified:
        _check_dense(recipe, output, source)
        verify(output.folder, dense, trust_remote_code=recipe.trust_remote_code)
    blocks = output.report.blocks
    plan = {layer.name: layer.pattern for block in blocks for layer in block.layers}
    scales = _trainable_scales(recipe, output.folder, pruned.skeleton(), plan)
    rank = recipe.lora_rank if recipe.train == "lora" else None
    steps = recipe.resolved_steps if recipe.scope == "block" else 0
    method = BlockRecovery(
        MaskedAdam(steps, RATE * RATES[recipe.train], rank=rank, patience=recipe.patience),
        _reader(pruned, source.dtype(recipe.dtype)),
        {block.name: block.layers for block in blocks},
        train=recipe.train,
        targets=lora_targets(recipe, blocks_of(source.skeleton()), plan),
        scales=scales,
        outside=tuple(sorted(output.report.changed_outside)),
        stamps=pruned.stamps,
    )
    kept = {field.name: getattr(output.report, field.name) for field in fields(PrunedReport) if field.name != "digest"}
    return method, plan, PrunedReport(**kept, digest=output.digests.report)


def _trainable_scales(recipe: RecoveryRecipe, folder: Path, skeleton: PreTrainedModel, plan: Plan) -> dict[str, Scales]:
    """The scales of the pruned checkpoint by layer; raise InvalidSetting if it has some that cannot be trained."""
    scales, others = layer_scales(folder, skeleton, plan)
    if others:
        raise InvalidSetting(
            f"{recipe.pruned} has integers in {others[0]}, which is stored in pieces or was not pruned, and training would "
            "not keep them. Recover the model first, and round it with `values` when you pack it."
        )
    if scales and recipe.train == "lora":
        raise InvalidSetting(
            f"{recipe.pruned} is quantized, and `train` lora would not keep its weights integers times scales. "
            "Pass `train='full'`, which trains integers, scales, norms and biases."
        )
    return scales


def lora_targets(recipe: RecoveryRecipe, blocks: Sequence[Block], plan: Plan) -> frozenset[str] | None:
    """Full names of the pruned layers that `lora_targets` names; None without it.

    Raises:
        InvalidSetting: A name matches no pruned layer.
    """
    layers = [layer for layer in layer_names(blocks) if layer.full_name in plan]
    found: set[str] = set()
    for pattern in recipe.lora_targets:
        matched = matching(layers, pattern, "`lora_targets`")
        if not matched:
            raise unmatched(pattern, "`lora_targets`", layers)
        found |= matched
    return frozenset(found) or None


def _check_dense(recipe: RecoveryRecipe, output: Output, source: Checkpoint | InMemoryModel) -> None:
    """Raise VerificationFailed if weights of the dense model were changed since the checkpoint was made from it."""
    inputs = PathNames(recipe).keys(run_inputs(recipe, source))
    if difference := changed_input(output.report.inputs, inputs, WEIGHT_ENDINGS):
        raise VerificationFailed(
            f"{recipe.pruned} was made from another dense model: {difference}. "
            "Pass the dense model that it was made from as `against`."
        )


def _check_tokenizers(recipe: RecoveryRecipe, pruned: Checkpoint, source: Checkpoint | InMemoryModel) -> None:
    """Raise InvalidSetting if the tokenizers of the pruned and the dense model differ in a token."""
    if isinstance(source, InMemoryModel) and source.own_tokenizer is None:
        return
    try:
        tokens, dense_tokens = (model.tokenizer().get_vocab() for model in (pruned, source))
    except (BadCheckpoint, MissingPackage):  # of the dense model if that one is needed, and then refused where a text is read
        return
    if tokens != dense_tokens:
        first = min(token for token in {**tokens, **dense_tokens} if tokens.get(token) != dense_tokens.get(token))
        raise InvalidSetting(
            f"The tokenizers of {recipe.pruned} and {recipe.model} differ: the token {first!r} is {tokens.get(first)} in the "
            f"first and {dense_tokens.get(first)} in the second. Pass the dense model that it was made from as `against`."
        )


def _shapes(checkpoint: Checkpoint | InMemoryModel) -> dict[str, list[int]]:
    """Shape of each parameter."""
    return {name: list(parameter.shape) for name, parameter in checkpoint.skeleton().named_parameters()}


def _reader(pruned: Checkpoint, dtype: torch.dtype) -> Callable[[str], Tensor]:
    """Function that reads a tensor by its parameter name, one at a time if the files support it."""
    name = dtype_name(dtype)
    try:
        model, weights = pruned.stream(name)
        tied = tied_names(model)
        stored = {tied[key]: key for key in weights.names}
        return lambda key: weights.read(stored[tied[key]])
    except NotStreamable:
        tensors: dict[str, Tensor] = pruned.load(name).state_dict()
        return tensors.__getitem__
