"""The outcome of the trainings of a run, for the description of a recovery."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import TYPE_CHECKING

from sparsellm.errors import plural
from sparsellm.pipeline.recovery_recipe import RecoveryRecipe

if TYPE_CHECKING:
    from sparsellm.methods import TrainingResult

WHOLE_MODEL = "whole model"
"""Name of the training of the whole model, beside those of blocks."""


def changed_nothing(found: Mapping[str, TrainingResult]) -> bool:
    """Whether trainings were tried, and none of them has a step that lowered its loss: the weights are unchanged."""
    return bool(found) and not any(training.steps for training in found.values())


def describe_recovery(recipe: RecoveryRecipe, found: Mapping[str, TrainingResult]) -> str:
    """Describe a recovery in one line by what it did, given its trainings by name."""
    if not found:
        return recipe.describe()
    if changed_nothing(found):
        none = f"none of {recipe.describe_steps()} lowered the held-out loss"
        return f"nothing was recovered from {PurePath(recipe.pruned).name}: {none}"
    unchanged = sum(not training.steps for training in found.values())
    kept = f", {unchanged} of {plural(len(found), 'block')} unchanged, since no step lowered the loss" if unchanged else ""
    return recipe.describe() + kept


def describe_losses(training: TrainingResult) -> str:
    """The held-out loss before and after the training of the whole model, in a sentence; empty if there was no training."""
    if not training.curve:
        return ""
    if not training.steps:
        return f"No step lowered the held-out loss, {training.before:.4g}: training changed nothing."
    last = training.curve[-1].step
    steps = f"{training.steps} of {last}" if training.steps < last else str(last)
    return f"Held-out loss: {training.before:.4g} before training, {training.after:.4g} after step {steps}, which is kept."


def why_unchanged(training: TrainingResult) -> str:
    """Why no step of the training of a pruning run lowered its loss, and what to change."""
    return f"{_no_step(training)}. Use more `samples`"


def why_not_recovered(recipe: RecoveryRecipe, training: TrainingResult) -> str:
    """Why no step of a recovery of the whole model lowered its loss, and what to change."""
    _, first, *_ = training.curve
    default = type(recipe).default_steps(recipe.scope)
    if first.held_out > training.before and recipe.resolved_steps < default:
        return (
            f"{_no_step(training)}. The learning rate was at its height after {first.step} of {recipe.resolved_steps} steps, "
            f"the loss {first.held_out:.4g}, and too few steps with a low rate followed. "
            f"Pass more `steps`, by default {default}"
        )
    return f"{_no_step(training)}. Use more text, with more `samples`, or more `steps`"


def _no_step(training: TrainingResult) -> str:
    """That no step lowered the loss, with the losses."""
    best = min(point.held_out for point in training.curve[1:])
    losses = f"{training.before:.4g} before and at best {best:.4g} after"
    return f"no step lowered the held-out loss, {losses}: the weights are unchanged"
