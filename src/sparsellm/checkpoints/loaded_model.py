"""A loaded model with the settings of a walk through it: weights, storage of streams, compute dtype."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from sparsellm.checkpoints.block_loader import DiskWeights, Weights
from sparsellm.runtime.offload import OffloadManager
from sparsellm.solvers.linalg import count_zeros

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class LoadedModel:
    """A loaded model with the settings of a walk through it.

    Attributes:
        model: The model, on the meta device if its weights are read block by block.
        weights: Loads the weights of each block.
        storage: Stores streams and what methods keep per batch.
        compute: Dtype of the computation; None for the model's own.
        memory: Bytes that the run may use.
        note: A message for the user, or "".
    """

    model: PreTrainedModel
    weights: Weights
    storage: OffloadManager
    compute: torch.dtype | None
    memory: int
    note: str = ""

    @property
    def offloaded(self) -> bool:
        """Whether the weights are read from files block by block."""
        return isinstance(self.weights, DiskWeights)

    def size(self) -> tuple[int, int]:
        """Return the number of parameters, tied ones counted once, and how many of them are zero."""
        if isinstance(self.weights, DiskWeights):
            return self.weights.size()
        tensors = list(self.model.parameters())
        return sum(tensor.numel() for tensor in tensors), sum(count_zeros(tensor) for tensor in tensors)
