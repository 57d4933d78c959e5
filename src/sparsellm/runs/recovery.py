"""Recovery: training what is left of a pruned checkpoint, masks held, toward the dense model that it was made from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from sparsellm.activations.streams import Activations
from sparsellm.checkpoints.loading import Checkpoint, InMemoryModel, open_checkpoint
from sparsellm.checkpoints.tensor_index import NotStreamable
from sparsellm.errors import InvalidSetting
from sparsellm.methods import EpochResult, LayerResult, Plan, TrainingResult
from sparsellm.methods.layerwise import planned_layers
from sparsellm.models.blocks import Block
from sparsellm.recovery.masked_training import MaskedAdam, refine_block
from sparsellm.runs.finished import finished_report, pruned_layers
from sparsellm.runs.recipe import RecoveryRecipe
from sparsellm.runs.recipe_file import validated
from sparsellm.runs.verification import verify
from sparsellm.solvers.linalg import count_zeros
from sparsellm.solvers.statistics import InputRMS, TokenCount

RATE = 3e-4
"""The first learning rate over one block: short steps, since what the pruning left is near the block's optimum."""

KEPT = ("recipe", "resolved", "environment", "calibration", "perplexity", "tasks", "notes", "seconds", "recovered", "pruned")
"""What the report of a recovery repeats from the report of the pruned checkpoint."""


@dataclass(frozen=True)
class BlockRecovery:
    """Put the pruned weights into each block of the dense model, and train what is left of them toward the dense outputs.

    A method for `prune_blocks`, which walks the pruned stream and the dense one.

    Attributes:
        training: Gradient steps over each block, in the metric of `sparsellm.activations.sensitivity`. With 0 steps the
            weights are only copied.
        read: Gives a tensor of the pruned checkpoint by its name.
        layers: By block name, what pruning reported of its layers.
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
        if self.training.steps:
            keep = {name: block.layer(name).weight != 0 for name in planned_layers(block, plan)}
            fixed = block.parameters_of(set(block.layers) - set(keep))
            names = [name for name, _ in block.module.named_parameters() if name not in fixed]
            yield refine_block(block, inputs, keep, names, inputs.output_fisher(block), self.training)
            block.round_to_storage_dtype()
        for layer in self.layers[block.name]:
            weight = block.layer(layer.name.removeprefix(f"{block.name}.")).weight
            yield replace(layer, zeros=count_zeros(weight))


def read_recovery(settings: Mapping[str, Any]) -> RecoveryRecipe:
    """The recipe of a recovery from its settings, in the dtype in which the pruned checkpoint is stored.

    Raises:
        InvalidSetting: A setting is wrong, or the pruned folder is none that a run wrote and finished.
        BadCheckpoint: The pruned folder is damaged.
    """
    recipe = validated(RecoveryRecipe, settings)
    _, report = finished_report(recipe.pruned)
    return recipe.model_copy(update={"dtype": report["recipe"].get("dtype", "auto")})


def recovery_plan(
    recipe: RecoveryRecipe, source: Checkpoint | InMemoryModel, blocks: Sequence[Block]
) -> tuple[BlockRecovery, Plan, dict[str, Any]]:
    """What a recovery does to each block, the patterns of its layers, and what the pruned checkpoint's report says.

    Args:
        recipe: The recovery.
        source: The dense model.
        blocks: Its blocks.

    Raises:
        InvalidSetting: The pruned checkpoint has no zeros, or another form than the dense model.
        VerificationFailed: The pruned checkpoint was changed since it was written, or was made from another dense model.
    """
    if isinstance(source, InMemoryModel):
        raise InvalidSetting("Recovery needs the dense model as a checkpoint, got one in memory. Save it, and name its folder.")
    path, report = finished_report(recipe.pruned)
    if not any(zeros for zeros, _ in pruned_layers(report).values()):
        raise InvalidSetting(f"{recipe.pruned} has no zeros to keep: none of its layers was pruned. Prune the model first.")
    pruned = open_checkpoint(str(path), None, recipe.trust_remote_code, source.architecture)
    shapes = [{name: tuple(tensor.shape) for name, tensor in some.skeleton().named_parameters()} for some in (pruned, source)]
    if shapes[0] != shapes[1]:
        first = min(name for name in {**shapes[0], **shapes[1]} if shapes[0].get(name) != shapes[1].get(name))
        here, there = (str(list(some[first])) if first in some else "missing" for some in shapes)
        raise InvalidSetting(
            f"{recipe.pruned} was not made from {recipe.model}: {first} is {here} in the one and {there} in the other. "
            "Pass the dense model that it was made from as --against."
        )
    verify(str(path), str(source.folder), recipe.trust_remote_code, recipe.architecture)
    layers = {block["name"]: [_layer_result(layer) for layer in block["layers"]] for block in report["blocks"]}
    plan = {name: pattern for name, (_, pattern) in pruned_layers(report).items()}
    training = MaskedAdam(recipe.block_steps, RATE)
    kept = {name: report[name] for name in KEPT if name in report} | {"digest": report["digests"]["report"]}
    return BlockRecovery(training, _reader(pruned, source.dtype(recipe.dtype)), layers), plan, kept


def _reader(pruned: Checkpoint, dtype: torch.dtype) -> Callable[[str], Tensor]:
    """Gives the tensors of a checkpoint by the names that the model gives them, one at a time where its files allow that."""
    name = str(dtype).removeprefix("torch.")
    try:
        return pruned.stream(name)[1].read
    except NotStreamable:
        tensors: dict[str, Tensor] = pruned.load(name).state_dict()
        return tensors.__getitem__


def _layer_result(data: Mapping[str, Any]) -> LayerResult:
    """A layer of a report, where an infinite error is a word."""
    read = {field.name: data[field.name] for field in fields(LayerResult)}
    return LayerResult(**{**read, "shape": tuple(read["shape"]), "error": float(read["error"])})
