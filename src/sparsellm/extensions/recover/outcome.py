"""Notes on trainings that changed nothing: why, and what to change."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparsellm.extensions.recover.recipe import RecoveryRecipe
    from sparsellm.methods import TrainingResult


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
