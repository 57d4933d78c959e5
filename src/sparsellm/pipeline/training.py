"""Gradient steps of a run over the whole model: what they train, the sequences that they read, the memory that they take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from sparsellm.models.output_head import outside_parameters
from sparsellm.pipeline.loading import OpenedModel
from sparsellm.runtime.memory import check_fits, human_bytes
from sparsellm.training.memory import outside_bytes, predictions_bytes, trained_bytes
from sparsellm.training.trained_weights import Train

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MODEL_TOKENS = 1024
"""Tokens per gradient step over the whole model, at least one sequence: with as many tokens, more and smaller steps recover
more."""

READS = 2
"""How often training the whole model reads a sequence, about: the dense model generates as many as the text lacks for it. With
few sequences alone, training overfits (LLM-QAT, Liu et al., 2023, generates all of its data)."""


@dataclass(frozen=True)
class ModelTraining:
    """The gradient steps of a run over the whole model.

    Attributes:
        train: The parameters that are trained, as in `sparsellm.training.trained_weights.trained_names`.
        rank: Rank of the changes for "lora".
        patience: As for `sparsellm.training.masked_training.MaskedAdam`.
        rounded: Whether the trained weights are integers times scales.
        targets: Full names of the layers that "lora" trains; None for all pruned ones.
        batch_size: Largest number of sequences per batch; None for those of a step.
    """

    steps: int
    train: Train = "full"
    rank: int = 0
    patience: int | None = None
    rounded: bool = False
    targets: frozenset[str] | None = None
    batch_size: int | None = None

    @property
    def trains_outside(self) -> bool:
        """Whether the last norm and the output head are trained too, as they are unless the layers hold integers."""
        return self.train == "full" and not self.rounded

    def count_generated(self, samples: int, length: int) -> int:
        """Number of sequences that the dense model generates."""
        return max(0, self.steps * model_step(samples, length) // READS - samples)

    def numbers_outside(self, model: PreTrainedModel) -> int:
        """Count the numbers outside of the blocks that are trained."""
        parameters = outside_parameters(model, ()) if self.trains_outside else {}
        return sum(parameter.numel() for parameter in parameters.values())

    def memory_bytes(self, opened: OpenedModel, windows: Tensor) -> int:
        """Bytes that the gradient steps take in addition to the model."""
        blocks, vocabulary = opened.blocks, opened.skeleton.get_input_embeddings().num_embeddings
        width = blocks[0].layer(blocks[0].architecture.groups[0][0]).in_features
        batch_tokens = min(model_step(*windows.shape), self.batch_size or len(windows)) * windows.shape[1]
        tokens = windows.numel() + self.count_generated(*windows.shape) * windows.shape[1]
        trained = trained_bytes(blocks, together=True, train=self.train, rank=self.rank, rounded=self.rounded)
        if outside := self.numbers_outside(opened.skeleton):
            trained += outside_bytes(outside, vocabulary * width)
        return trained + predictions_bytes(
            tokens=tokens, width=width, batch_tokens=batch_tokens, vocabulary=vocabulary, depth=len(blocks)
        )

    def check_memory(self, opened: OpenedModel, windows: Tensor) -> str:
        """Describe the memory that the training takes. Raises TooLarge if the device has less."""
        needed = self.memory_bytes(opened, windows)
        advice = "Pass `scope='block'` to recover, or a smaller `batch_size`."
        check_fits(needed, opened.device, stage="Training the whole model", advice=advice)
        return f"training the whole model takes {human_bytes(needed)}"


def model_step(samples: int, length: int) -> int:
    """Sequences per gradient step over the whole model: about 1,024 tokens, at most an eighth of all sequences."""
    return max(1, min(MODEL_TOKENS // length, samples // 8))
