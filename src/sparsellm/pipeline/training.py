"""Gradient steps of a run over the whole model: how many sequences they read, and the memory that they take."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from sparsellm.methods import BlockMethod
from sparsellm.models.output_head import outside_parameters
from sparsellm.pipeline.loading import OpenedModel
from sparsellm.pipeline.recipe import Recipe, RunRecipe
from sparsellm.pipeline.recovery import BlockRecovery
from sparsellm.pipeline.recovery_recipe import RecoveryRecipe
from sparsellm.runtime.memory import check_fits, human_bytes
from sparsellm.training.memory import outside_bytes, predictions_bytes, trained_bytes
from sparsellm.training.trained_weights import Train

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MODEL_TOKENS = 1024
"""Tokens per gradient step over the whole model, at least one sequence: for the same tokens, smaller steps win back more."""

READS = 2
"""How often training the whole model reads a sequence, about: the dense model generates as many as the text lacks for it. With
few sequences alone, training overfits (LLM-QAT, Liu et al., 2023, generates all of its data)."""


def trained_of(recipe: RunRecipe) -> tuple[Train, int]:
    """Which parameters a run trains, and the rank of their changes for "lora"."""
    return (recipe.train, recipe.lora_rank) if isinstance(recipe, RecoveryRecipe) else ("full", 0)


def _trains_rounded(recipe: RunRecipe, method: BlockMethod) -> bool:
    """Whether the weights that a run trains are integers times scales."""
    return bool(method.scales) if isinstance(method, BlockRecovery) else isinstance(recipe, Recipe) and recipe.rounds


def model_step(samples: int, length: int) -> int:
    """Sequences per gradient step over the whole model: about 1,024 tokens, at most an eighth of all sequences."""
    return max(1, min(MODEL_TOKENS // length, samples // 8))


def count_generated(recipe: RunRecipe, samples: int, length: int) -> int:
    """Number of sequences that the dense model generates for training the whole model."""
    return max(0, recipe.model_steps * model_step(samples, length) // READS - samples)


def check_memory(recipe: RunRecipe, method: BlockMethod, opened: OpenedModel, *, windows: Tensor, vocabulary: int) -> str:
    """Describe the memory that the training stages take; empty without such stages.

    Raises:
        TooLarge: The device has less memory than a stage takes.
    """
    blocks, device, parts = opened.blocks, opened.device, []
    if isinstance(method, BlockRecovery) and method.training.steps:
        width = blocks[0].layer(blocks[0].architecture.groups[0][0]).in_features
        rank, rounded = method.training.rank or 0, bool(method.scales)
        needed = trained_bytes(blocks, together=False, train=method.train, rank=rank, rounded=rounded)
        needed += 2 * 4 * windows.numel() * width  # two streams
        parts.append(f"training a block takes {human_bytes(needed)}")
        check_fits(needed, device, stage="Training a block", advice="Pass fewer `samples`.")
    if recipe.model_steps:
        needed = model_bytes(recipe, method, opened, windows, vocabulary=vocabulary)
        parts.append(f"training the whole model takes {human_bytes(needed)}")
        advice = "Pass `scope='block'` to recover, or a smaller `batch_size`."
        check_fits(needed, device, stage="Training the whole model", advice=advice)
    return ", ".join(parts)


def trains_outside(recipe: RunRecipe, method: BlockMethod) -> bool:
    """Whether training the whole model includes the last norm and the output head; beside integers they stay."""
    return recipe.model_steps > 0 and trained_of(recipe)[0] == "full" and not _trains_rounded(recipe, method)


def numbers_outside(recipe: RunRecipe, method: BlockMethod, model: PreTrainedModel) -> int:
    """Count the numbers outside of the blocks that a run trains."""
    parameters = outside_parameters(model, ()) if trains_outside(recipe, method) else {}
    return sum(parameter.numel() for parameter in parameters.values())


def model_bytes(recipe: RunRecipe, method: BlockMethod, opened: OpenedModel, windows: Tensor, *, vocabulary: int) -> int:
    """Bytes that gradient steps over the whole model take in addition to the model."""
    blocks = opened.blocks
    width = blocks[0].layer(blocks[0].architecture.groups[0][0]).in_features
    batch_tokens = min(model_step(*windows.shape), recipe.batch_size or len(windows)) * windows.shape[1]
    tokens = windows.numel() + count_generated(recipe, *windows.shape) * windows.shape[1]
    train, rank = trained_of(recipe)
    trained = trained_bytes(blocks, together=True, train=train, rank=rank, rounded=_trains_rounded(recipe, method))
    if outside := numbers_outside(recipe, method, opened.skeleton):
        trained += outside_bytes(outside, vocabulary * width)
    return trained + predictions_bytes(
        tokens=tokens, width=width, batch_tokens=batch_tokens, vocabulary=vocabulary, depth=len(blocks)
    )
