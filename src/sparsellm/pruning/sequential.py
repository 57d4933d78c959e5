"""The main path: walk through the model, and prune each block on the hidden states that the pruned blocks before it give."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparsellm.activations.sensitivity import output_sensitivities
from sparsellm.activations.streams import Activations
from sparsellm.activations.walk import walk
from sparsellm.checkpoints.block_loader import DiskWeights, ResidentWeights, Weights
from sparsellm.errors import InvalidSetting
from sparsellm.methods import BlockMethod, BlockResult, EpochResult, LayerResult, Plan, TrainingResult
from sparsellm.models.blocks import Block, blocks_of
from sparsellm.pruning.journal import Journal
from sparsellm.runtime import devices
from sparsellm.runtime.offload import OffloadManager
from sparsellm.solvers.statistics import TokenCount

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Step = LayerResult | EpochResult | TrainingResult | BlockResult
"""What `prune_blocks` yields, as it happens."""


@torch.no_grad()
def prune_blocks(
    model: PreTrainedModel,
    batches: Sequence[Tensor],
    method: BlockMethod,
    plan: Plan,
    compute: torch.dtype | None = None,
    metrics: Sequence[Tensor] = (),
    weights: Weights | None = None,
    storage: OffloadManager | None = None,
    journal: Journal | None = None,
) -> Iterator[Step]:
    """Prune the planned layers of a model in place, yielding every layer's, epoch's and block's result as it is known.

    A generator: a bar or a log line is the caller's loop, and a caller that stops early leaves a model pruned so far.
    batches, compute: as for `walk`; batches may be empty for a method that needs no inputs. metrics: as for `walk`, where they
    are known already; a method that asks for them has them found. weights, storage: as for `walk`. journal: where each block is
    kept when it is finished, before its result is yielded; blocks that it holds already are taken from there. Needed where
    the weights are not in memory: a block's would be lost when the next one's turn comes.
    """
    if journal is None and isinstance(weights, DiskWeights):
        raise InvalidSetting("A model that is read block by block needs a journal, to keep the pruned blocks in.")
    blocks = blocks_of(model)
    local = {block.index for block in blocks if any(block.full_name(name) in plan for name in block.layers)}
    if not local:
        return
    blind = method.needs is TokenCount
    if method.needs_fisher and not metrics:
        metrics = output_sensitivities(model, batches, compute, weights, storage)
    seen = walk(model, batches, max(local) + 1, compute, method.needs_dense_stream, metrics, weights, storage)
    visits = _blocks_without_inputs(blocks, weights or ResidentWeights()) if blind else seen
    with closing(visits):  # an error must not leave the walk, and with it the model, half-way
        for block, inputs in visits:
            if block.index not in local:
                continue
            done = journal.finished(block.index) if journal else None
            for step in [done] if done else _prune_block(block, inputs, method, plan):
                if journal and isinstance(step, BlockResult):
                    file = journal.restore(block) if done else journal.keep(block, step)
                    if isinstance(weights, DiskWeights):
                        weights.relocate([block.full_name(name) for name in block.module.state_dict()], file)
                yield step


def _blocks_without_inputs(blocks: Sequence[Block], weights: Weights) -> Generator[tuple[Block, Activations], None, None]:
    """Each block for a method that needs no inputs: nothing travels."""
    nothing = Activations([], [[] for _ in blocks])
    for block, next_block in zip(blocks, [*blocks[1:], None], strict=True):
        with weights.block(block, next_block):
            yield block, nothing


def _prune_block(block: Block, inputs: Activations, method: BlockMethod, plan: Plan) -> Iterator[Step]:
    """One block's results, the block's own last."""
    started = time.perf_counter()
    layers: list[LayerResult] = []
    epochs: list[EpochResult] = []
    refined: TrainingResult | None = None
    small = {name: tensor.clone() for name, tensor in block.unpruned_parameters().items()}
    for step in method.prune(block, inputs, plan):
        if isinstance(step, LayerResult):
            layers.append(step)
        elif isinstance(step, EpochResult):
            epochs.append(step)
        else:
            refined = step
        yield step
    present = dict(block.module.named_parameters())
    differs = devices.to_python([(before != present[name]).any() for name, before in small.items()])
    moved = tuple(block.full_name(name) for name, differing in zip(small, differs, strict=True) if differing)
    seconds = time.perf_counter() - started
    note = method.note(block, plan)
    yield BlockResult(block.index, block.name, tuple(layers), tuple(epochs), seconds, note, refined, moved)
