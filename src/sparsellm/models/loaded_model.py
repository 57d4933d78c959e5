"""A loaded model with the settings of a walk through it: where its weights are, where streams are stored, compute dtype."""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from sparsellm.models.blocks import Block
from sparsellm.runtime.offload import OffloadManager
from sparsellm.solvers.linalg import count_zeros

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Weights(Protocol):
    """Makes a model's tensors available to a walk through the model, one part at a time."""

    @property
    def on_disk(self) -> bool:
        """Whether tensors are read from files for each context and discarded after it."""
        ...

    def block(self, block: Block, next_block: Block | None = None) -> AbstractContextManager[None]:
        """Make a block's tensors available within the context.

        Args:
            block: The block.
            next_block: The block that is needed next, which may be read in the meantime.
        """
        ...

    def non_block(self) -> AbstractContextManager[None]:
        """Make the tensors outside the blocks available within the context: embeddings, last norm, head."""
        ...

    def relocate(self, names: Iterable[str], file: Path) -> None:
        """Read these tensors, by their names in the model, from another safetensors file from now on."""
        ...

    def size(self) -> tuple[int, int]:
        """Return the number of parameters, tied ones counted once, and how many of them are zero."""
        ...


class ResidentWeights:
    """The weights of a model whose tensors are all in memory."""

    on_disk = False

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def block(self, block: Block, next_block: Block | None = None) -> AbstractContextManager[None]:
        return nullcontext()

    def non_block(self) -> AbstractContextManager[None]:
        return nullcontext()

    def relocate(self, names: Iterable[str], file: Path) -> None:
        """Do nothing: the tensors stay in memory."""

    def size(self) -> tuple[int, int]:
        tensors = list(self._model.parameters())
        return sum(tensor.numel() for tensor in tensors), sum(count_zeros(tensor) for tensor in tensors)


@dataclass(frozen=True)
class LoadedModel:
    """A loaded model with the settings of a walk through it.

    Attributes:
        model: The model, on the meta device if its weights are read block by block.
        weights: Loads the weights of each block.
        storage: Stores streams and what methods keep per batch.
        compute: Dtype of the computation; None for the model's own. Stored weights keep their dtype.
        memory: Bytes that the run may use.
        note: A message for the user, or "".
    """

    model: PreTrainedModel
    weights: Weights
    storage: OffloadManager = field(default_factory=OffloadManager)
    compute: torch.dtype | None = None
    memory: float = math.inf
    note: str = ""

    @classmethod
    def of(cls, model: PreTrainedModel | LoadedModel, compute: torch.dtype | None = None) -> LoadedModel:
        """Return a `LoadedModel` as it is, and a model in memory with the default settings, computing in `compute`."""
        return model if isinstance(model, LoadedModel) else cls(model, ResidentWeights(model), compute=compute)
