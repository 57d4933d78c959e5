"""Recovery: train the remaining weights of a pruned checkpoint, with fixed masks, to match its dense model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor

from sparsellm.activations.walk import Activations
from sparsellm.checkpoints.loading import Checkpoint, InMemoryModel, open_checkpoint
from sparsellm.checkpoints.tensor_index import NotStreamable
from sparsellm.errors import InvalidSetting
from sparsellm.methods import BlockResult, EpochResult, LayerResult, Plan, TrainingResult, planned_layers
from sparsellm.models.architecture_file import read_architecture
from sparsellm.models.blocks import Block
from sparsellm.recovery.block_training import refine_block
from sparsellm.recovery.masked_training import MaskedAdam
from sparsellm.runs.outputs import read_finished
from sparsellm.runs.recipe import RecoveryRecipe
from sparsellm.runs.recipe_file import validated
from sparsellm.runs.verification import verify
from sparsellm.solvers.linalg import count_zeros
from sparsellm.solvers.statistics import InputRMS, TokenCount

RATE = 3e-4
"""Initial learning rate for one block; small, since the pruned weights are near the block's optimum."""

KEPT = ("recipe", "resolved", "environment", "calibration", "perplexity", "tasks", "notes", "seconds", "recovered", "pruned")
"""Entries of the pruned checkpoint's report that the report of the recovery repeats."""


@dataclass(frozen=True)
class BlockRecovery:
    """Copy the pruned weights into each block of the dense model, and train the remaining ones to match the dense outputs.

    A method for `prune_blocks`.

    Attributes:
        training: Gradient steps on each block, with output errors weighted as in `sparsellm.activations.sensitivity`.
            With 0 steps the weights are only copied, as those of the output head always are.
        read: Reads a tensor of the pruned checkpoint by its name.
        layers: Results of pruning each layer, by block name.
    """

    training: MaskedAdam
    read: Callable[[str], Tensor] = field(repr=False)
    layers: Mapping[str, Sequence[LayerResult]] = field(repr=False)

    @property
    def needs(self) -> type[TokenCount]:
        return InputRMS if self.training.steps else TokenCount

    @property
    def needs_dense_stream(self) -> bool:
        return self.training.steps > 0

    @property
    def needs_fisher(self) -> bool:
        return self.training.steps > 0

    def note(self, block: Block, plan: Plan) -> str:
        return ""

    def prune(self, block: Block, inputs: Activations, plan: Plan) -> Iterator[LayerResult | EpochResult | TrainingResult]:
        with torch.no_grad():
            for name, parameter in block.module.named_parameters():
                parameter.copy_(self.read(block.full_name(name)))
        if self.training.steps and not block.is_head:
            keep = {name: block.layer(name).weight != 0 for name in planned_layers(block, plan)}
            fixed = block.parameters_of(set(block.layers) - set(keep))
            names = [name for name, _ in block.module.named_parameters() if name not in fixed]
            yield refine_block(block, inputs, keep, names=names, metric=inputs.output_fisher(block), adam=self.training)
            block.round_to_storage_dtype()
        weights = {block.full_name(name): layer.weight for name, layer in block.layers.items()}
        for layer in self.layers[block.name]:
            yield replace(layer, zeros=count_zeros(weights[layer.name]))


def read_recovery(settings: Mapping[str, Any]) -> RecoveryRecipe:
    """Read the recipe of a recovery; its dtype is that of the pruned run.

    Raises:
        InvalidSetting: A setting is invalid, or the pruned folder is not a finished output.
        BadCheckpoint: The pruned folder is damaged.
    """
    recipe = validated(RecoveryRecipe, settings)
    return recipe.model_copy(update={"dtype": read_finished(recipe.pruned).report.recipe.get("dtype", "auto")})


def recovery_plan(recipe: RecoveryRecipe, source: Checkpoint | InMemoryModel) -> tuple[BlockRecovery, Plan, dict[str, Any]]:
    """Verify the pruned checkpoint, and plan its recovery.

    Returns:
        The method for each block, the pattern of each layer, and the entries of the pruned checkpoint's report to repeat.

    Raises:
        InvalidSetting: The pruned checkpoint has no zeros, or its tensors differ in name or shape from the dense model's.
        VerificationFailed: The pruned checkpoint was changed since it was written, or was made from another dense model.
    """
    output = read_finished(recipe.pruned)
    if not any(layer.zeros for layer in output.report.layers):
        raise InvalidSetting(f"{recipe.pruned} has no zeros to keep: none of its layers was pruned. Prune the model first.")
    described = None if recipe.architecture is None else read_architecture(recipe.architecture)
    pruned = open_checkpoint(str(output.folder), trusted=recipe.trust_remote_code, architecture=described)
    pruned_shapes, dense_shapes = _shapes(pruned), _shapes(source)
    if pruned_shapes != dense_shapes:
        names = {**pruned_shapes, **dense_shapes}
        first = min(name for name in names if pruned_shapes.get(name) != dense_shapes.get(name))
        raise InvalidSetting(
            f"{recipe.pruned} was not made from {recipe.model}: {first} is {pruned_shapes.get(first, 'missing')} in the pruned "
            f"model and {dense_shapes.get(first, 'missing')} in the dense one. "
            "Pass the dense model that it was made from as `against`."
        )
    dense = source.folder or source.skeleton()
    verify(output.folder, dense, trust_remote_code=recipe.trust_remote_code, architecture=recipe.architecture)
    blocks = TypeAdapter(list[BlockResult]).validate_python(output.content["blocks"])
    training = MaskedAdam(recipe.resolved_steps if recipe.scope == "block" else 0, RATE)
    read = _reader(pruned, source.dtype(recipe.dtype))
    method = BlockRecovery(training, read, {block.name: block.layers for block in blocks})
    plan = {layer.name: layer.pattern for block in blocks for layer in block.layers}
    kept = {name: output.content[name] for name in KEPT if name in output.content} | {"digest": output.digests.report}
    return method, plan, kept


def _shapes(checkpoint: Checkpoint | InMemoryModel) -> dict[str, list[int]]:
    """Shape of each parameter."""
    return {name: list(parameter.shape) for name, parameter in checkpoint.skeleton().named_parameters()}


def _reader(pruned: Checkpoint, dtype: torch.dtype) -> Callable[[str], Tensor]:
    """Function that reads a tensor by its parameter name, one at a time if the files support it."""
    name = str(dtype).removeprefix("torch.")
    try:
        return pruned.stream(name)[1].read
    except NotStreamable:
        tensors: dict[str, Tensor] = pruned.load(name).state_dict()
        return tensors.__getitem__
