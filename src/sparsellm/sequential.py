"""The main path: through the model block by block, pruning each on what the pruned blocks before it let through."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparsellm.activations import Activations
from sparsellm.blocks import Block, blocks_of, computed_in, evaluating
from sparsellm.errors import InvalidSetting
from sparsellm.methods import BlockMethod, BlockResult, EpochResult, LayerResult, Plan
from sparsellm.moments import NoInputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Step = LayerResult | EpochResult | BlockResult
"""What `prune_blocks` yields, as it happens."""


@torch.no_grad()  # as a decorator: it then holds only while the generator itself runs, not in the caller's loop
def walk(
    model: PreTrainedModel, batches: Sequence[Tensor], stop: int | None = None, compute: torch.dtype | None = None
) -> Generator[tuple[Block, Activations], None, None]:
    """Each block with what enters it. What the caller does to a block is done before its outputs travel on.

    batches: token numbers, each (batch, seq), without padding. stop: the first block not to visit; None visits all.
    compute: the dtype in which the blocks run while visited, if not their own; what is stored keeps its dtype.
    """
    blocks = blocks_of(model)
    visited = blocks[:stop]
    if not batches:
        raise InvalidSetting("There is no calibration batch. Pass token numbers of (samples, length), split into batches.")
    with evaluating(model):
        inputs = Activations.entering(model, blocks, batches, compute)
        for block in visited:
            with computed_in(block.module, compute):
                yield block, inputs
                if block is not visited[-1]:
                    inputs.advance(block)


@torch.no_grad()
def prune_blocks(
    model: PreTrainedModel,
    batches: Sequence[Tensor],
    method: BlockMethod,
    plan: Plan,
    compute: torch.dtype | None = None,
) -> Iterator[Step]:
    """Prune the planned layers of a model in place, yielding every layer's, epoch's and block's result as it is known.

    A generator: a bar or a log line is the caller's loop, and a caller that stops early leaves a model pruned so far.
    batches, compute: as for `walk`; batches may be empty for a method that needs no inputs.
    """
    blocks = blocks_of(model)
    mine = {block.index for block in blocks if any(block.full_name(name) in plan for name in block.layers)}
    if not mine:
        return
    nothing = Activations([], [[] for _ in blocks])
    blind = method.needs is NoInputs
    visits = ((block, nothing) for block in blocks) if blind else walk(model, batches, max(mine) + 1, compute)
    with closing(visits):  # an error must not leave the walk, and with it the model, half-way
        for block, inputs in visits:
            if block.index in mine:
                yield from _prune_block(block, inputs, method, plan)


def _prune_block(block: Block, inputs: Activations, method: BlockMethod, plan: Plan) -> Iterator[Step]:
    """One block's results, the block's own last."""
    started = time.perf_counter()
    layers: list[LayerResult] = []
    epochs: list[EpochResult] = []
    for step in method.prune(block, inputs, plan):
        if isinstance(step, LayerResult):
            layers.append(step)
        else:
            epochs.append(step)
        yield step
    seconds = time.perf_counter() - started
    yield BlockResult(block.index, block.name, tuple(layers), tuple(epochs), seconds, method.note(block, plan))
