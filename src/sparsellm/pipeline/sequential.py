"""The main path: prune block by block, each on the hidden states that the pruned blocks before it produce."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparsellm.activations.walk import Activations, walk
from sparsellm.errors import InvalidSetting
from sparsellm.methods import BlockMethod, BlockResult, EpochResult, LayerResult, Plan, TrainingResult
from sparsellm.models.blocks import Block
from sparsellm.models.loaded_model import LoadedModel
from sparsellm.models.output_head import blocks_and_head
from sparsellm.runtime import devices
from sparsellm.solvers.statistics import TokenCount

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from sparsellm.activations.fisher import FisherFactors
    from sparsellm.pipeline.journal import Journal

Step = LayerResult | EpochResult | TrainingResult | BlockResult
"""A result that `prune_blocks` yields."""


@torch.no_grad()
def prune_blocks(
    model: PreTrainedModel | LoadedModel,
    batches: Sequence[Tensor],
    method: BlockMethod,
    plan: Plan,
    *,
    metrics: Sequence[Tensor] = (),
    factors: Mapping[str, FisherFactors] | None = None,
    journal: Journal | None = None,
) -> Iterator[Step]:
    """Prune the planned layers of a model in place, and yield the result of each layer, epoch and block as soon as it is known.

    A caller that stops early leaves a model whose first blocks are pruned.

    Args:
        model: The dense model.
        batches: Calibration batches of token ids, each (batch, seq); may be empty for a method that needs no inputs.
        method: Prunes one block.
        plan: The pattern of each layer to prune, by full name.
        metrics: F of each block's output, from `output_sensitivities`, for a method whose `needs_fisher` is True.
        factors: By full layer name, from `weight_costs`; layers that have them get a `predicted_kl`, for which each block's
            planned weights are copied.
        journal: Stores each finished block before its result is yielded; blocks that it already holds are restored instead of
            pruned. Required for weights on disk, which are dropped when the next block is loaded.

    Raises:
        InvalidSetting: The weights are on disk and there is no journal, or the method needs metrics and there are none.
    """
    loaded = LoadedModel.of(model)
    if journal is None and loaded.weights.on_disk:
        raise InvalidSetting("A model that is read block by block needs a journal, to keep the pruned blocks in.")
    blocks = blocks_and_head(loaded.model, plan)
    planned = {block.index for block in blocks if any(block.full_name(name) in plan for name in block.layers)}
    if not planned:
        return
    if method.needs_fisher and not metrics:
        raise InvalidSetting(f"{type(method).__name__} needs `metrics`: pass output_sensitivities(model, batches).")
    if method.needs is TokenCount:
        visits = _blocks_without_inputs(loaded, blocks)
    else:
        stop, dense = max(planned) + 1, method.needs_dense_stream
        visits = walk(loaded, batches, stop=stop, layers=plan, needs_dense_stream=dense, metrics=metrics)
    with closing(visits):  # an error must close the walk, which restores the model
        for block, inputs in visits:
            if block.index not in planned:
                continue
            finished = journal.finished(block.index) if journal else None
            for step in [finished] if finished else _prune_block(block, inputs, method, plan=plan, factors=factors or {}):
                if journal and isinstance(step, BlockResult):
                    file = journal.restore(block) if finished else journal.keep(block, step)
                    loaded.weights.relocate([block.full_name(name) for name in block.module.state_dict()], file)
                    if finished:
                        step = replace(step, scales={block.full_name(name): x for name, x in block.scales.items()})  # noqa: PLW2901
                yield step


def _blocks_without_inputs(loaded: LoadedModel, blocks: Sequence[Block]) -> Generator[tuple[Block, Activations], None, None]:
    """Load block by block without computing hidden states, for a method that needs no inputs."""
    no_inputs = Activations([], [[] for _ in blocks])
    for block, next_block in zip(blocks, [*blocks[1:], None], strict=True):
        with loaded.weights.block(block, next_block):
            yield block, no_inputs


def _prune_block(
    block: Block, inputs: Activations, method: BlockMethod, *, plan: Plan, factors: Mapping[str, FisherFactors]
) -> Iterator[Step]:
    """Prune one block; the block's own result comes last."""
    started = time.perf_counter()
    layers: list[LayerResult] = []
    epochs: list[EpochResult] = []
    training: TrainingResult | None = None
    unpruned = {name: tensor.clone() for name, tensor in block.unpruned_parameters().items()}
    zeros_before = _zeros(block, plan)
    dense = {  # in the storage dtype, which holds every dense weight exactly
        block.full_name(name): layer.weight.detach().to(block.dtypes[block.parameter(name)], copy=True)
        for name, layer in block.layers.items()
        if block.full_name(name) in plan and block.full_name(name) in factors
    }
    values, weights = getattr(method, "values", None), {block.full_name(name): layer for name, layer in block.layers.items()}
    for result in method.prune(block, inputs, plan):
        step = result
        if isinstance(step, LayerResult):
            weight = weights[step.name].weight
            step = replace(step, zeros_before=zeros_before[step.name])
            if values is not None:
                step = replace(step, **values.fields_of(step.name, weight))
            if step.name in dense:
                removed = weight == 0
                step = replace(step, predicted_kl=factors[step.name].removal_cost(dense.pop(step.name), removed))
            layers.append(step)
        elif isinstance(step, EpochResult):
            epochs.append(step)
        else:
            training = step
        yield step
    parameters = dict(block.module.named_parameters())
    changes = devices.to_python([(before != parameters[name]).any() for name, before in unpruned.items()])
    changed = tuple(block.full_name(name) for name, is_changed in zip(unpruned, changes, strict=True) if is_changed)
    seconds = time.perf_counter() - started
    note = method.note(block, plan)
    scales = {block.full_name(name): tensor for name, tensor in block.scales.items()}
    yield BlockResult(block.index, block.name, tuple(layers), tuple(epochs), seconds, note, training, changed, scales)


def _zeros(block: Block, plan: Plan) -> dict[str, int]:
    """The number of zeros in each planned layer, by its full name."""
    weights = {block.full_name(name): layer.weight for name, layer in block.layers.items() if block.full_name(name) in plan}
    kept = devices.to_python([weight.count_nonzero() for weight in weights.values()])
    return {name: weight.numel() - int(count) for (name, weight), count in zip(weights.items(), kept, strict=True)}
