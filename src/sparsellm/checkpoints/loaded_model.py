"""A model with what is needed to walk it: where its weights are, where streams are kept, in which dtype it computes."""

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
    """A model ready to be walked. weights: what fills it. storage: for what travels. compute: as for `walk`.
    memory: bytes that the run may take. note: what a reader should know, or nothing."""

    model: PreTrainedModel
    weights: Weights
    storage: OffloadManager
    compute: torch.dtype | None
    memory: int
    note: str = ""

    @property
    def offloaded(self) -> bool:
        """Whether the weights are read block by block."""
        return isinstance(self.weights, DiskWeights)

    def size(self) -> tuple[int, int]:
        """How many parameters the model has, tied ones once, and how many of them are zero."""
        if isinstance(self.weights, DiskWeights):
            return self.weights.size()
        tensors = list(self.model.parameters())
        return sum(tensor.numel() for tensor in tensors), sum(count_zeros(tensor) for tensor in tensors)
