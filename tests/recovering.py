"""A recovery of blocks from a model in memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from sparsellm.extensions.recover.block_recovery import BlockRecovery
from sparsellm.extensions.recover.training.masked_training import MaskedAdam
from sparsellm.methods import BlockResult, Step

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def block_recovery(pruned: PreTrainedModel, steps: Iterable[Step], training: MaskedAdam) -> BlockRecovery:
    """The method that trains the blocks of a model as it is now, pruned with these results."""
    tensors = {name: tensor.detach().clone() for name, tensor in pruned.state_dict().items()}
    layers = {step.name: step.layers for step in steps if isinstance(step, BlockResult)}
    return BlockRecovery(training, tensors.__getitem__, layers)
