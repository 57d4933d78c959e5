"""The walk through a model, block by block, with the hidden states that enter each."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparsellm.activations.streams import Activations, stream_bytes
from sparsellm.checkpoints.block_loader import ResidentWeights, Weights
from sparsellm.errors import InvalidSetting
from sparsellm.models.blocks import Block, blocks_of
from sparsellm.models.contexts import compute_dtype_context, eval_mode
from sparsellm.runtime import collectives
from sparsellm.runtime.offload import OffloadManager

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@torch.no_grad()  # as a decorator: it then holds only while the generator itself runs, not in the caller's loop
def walk(
    model: PreTrainedModel,
    batches: Sequence[Tensor],
    stop: int | None = None,
    compute: torch.dtype | None = None,
    teacher: bool = False,
    metrics: Sequence[Tensor] = (),
    weights: Weights | None = None,
    storage: OffloadManager | None = None,
) -> Generator[tuple[Block, Activations], None, None]:
    """Each block with what enters it. What the caller does to a block is done before its outputs travel on.

    batches: token numbers, each (batch, seq), without padding; of several processes each walks with those dealt to it.
    stop: the first block not to visit; None visits all.
    compute: the dtype in which the blocks run while visited, if not their own; what is stored keeps its dtype.
    teacher: whether the dense stream travels too, through a copy of each block. metrics: what errors of each block's output
    cost, from `output_sensitivities`, for methods that ask. weights: where the model's tensors are, if not in memory. storage:
    where the streams are kept, if not in memory.
    """
    weights, storage = weights or ResidentWeights(), storage or OffloadManager()
    blocks = blocks_of(model)
    visited = blocks[:stop]
    if len(batches) < collectives.world():
        few = f"are {len(batches)} calibration batches for {collectives.world()} processes"
        message = f"There {few if batches else 'is no calibration batch'}."
        raise InvalidSetting(f"{message} Pass token numbers of (samples, length), split into at least as many batches.")
    with eval_mode(model), storage.new_lists(1 + teacher, stream_bytes(model, collectives.shard(batches), compute)) as streams:
        with weights.non_block():
            inputs = Activations.from_model(model, blocks, batches, compute, streams, storage)
        inputs.metrics = metrics
        with closing(inputs):
            for block, next_block in zip(visited, [*visited[1:], None], strict=True):
                with weights.block(block, next_block), compute_dtype_context(block.module, compute):
                    inputs.begin_block(block)
                    yield block, inputs
                    if block is not visited[-1]:
                        inputs.advance(block)
