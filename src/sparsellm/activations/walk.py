"""Iterates over the blocks of a model with the hidden states that enter each."""

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


@torch.no_grad()  # as a decorator, it applies only while the generator runs, not in the caller's loop
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
    """Yield each block with the activations that enter it, and advance the activations when the caller continues.

    Changes that the caller makes to a block affect the inputs of the blocks after it.

    Args:
        model: The model.
        batches: Token ids, each (batch, seq), without padding. Each process walks with its share of them.
        stop: Index of the first block not to visit; None visits all.
        compute: Dtype of the computation, if not the model's own. Stored weights keep their dtype.
        teacher: Whether to carry the dense stream too, through a copy of each block.
        metrics: F of each block's output from `output_sensitivities`, for methods that need it.
        weights: Loads the weights of each block, if they are not in memory.
        storage: Stores the streams, if not in memory.

    Raises:
        InvalidSetting: There are fewer batches than processes.
    """
    weights, storage = weights or ResidentWeights(), storage or OffloadManager()
    blocks = blocks_of(model)
    visited = blocks[:stop]
    if len(batches) < collectives.world():
        count = f"are {len(batches)} calibration batches for {collectives.world()} processes"
        message = f"There {count if batches else 'is no calibration batch'}."
        raise InvalidSetting(f"{message} Pass token numbers of (samples, length), split into at least as many batches.")
    with eval_mode(model), storage.new_lists(1 + teacher, stream_bytes(model, collectives.shard(batches), compute)) as streams:
        with weights.non_block():
            activations = Activations.from_model(model, blocks, batches, compute, streams, storage)
        activations.metrics = metrics
        with closing(activations):
            for block, next_block in zip(visited, [*visited[1:], None], strict=True):
                with weights.block(block, next_block), compute_dtype_context(block.module, compute):
                    activations.begin_block(block)
                    yield block, activations
                    if block is not visited[-1]:
                        activations.advance(block)
