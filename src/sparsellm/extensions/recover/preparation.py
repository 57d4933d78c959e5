"""Recoveries, prepared before weights are read: as prunings are, with the pruned checkpoint beside the dense one."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sparsellm.checkpoints.stamps import Stamps
from sparsellm.extensions.recover.block_recovery import BlockRecovery
from sparsellm.extensions.recover.model_training import ModelTraining
from sparsellm.extensions.recover.recipe import RecoveryRecipe
from sparsellm.methods import Plan
from sparsellm.models.output_head import blocks_and_head
from sparsellm.observers.events import Note, Observer
from sparsellm.outputs.report import Report
from sparsellm.pipeline.dense_results import DenseCache
from sparsellm.pipeline.loading import OpenedModel
from sparsellm.pipeline.preparation import Prepared, read_texts, sequences_a_batch
from sparsellm.recipes.plan import PlannedLayer, list_layers
from sparsellm.solvers.patterns import Unstructured
from sparsellm.texts.in_memory import Given


@dataclass(frozen=True, eq=False)
class PreparedRecovery(Prepared):
    """A recovery before its weights are read."""

    recipe: RecoveryRecipe
    method: BlockRecovery

    def stamps(self) -> tuple[Stamps, ...]:
        return (*super().stamps(), *filter(None, [self.method.stamps]))


def prepare_recovery(
    opened: OpenedModel,
    recipe: RecoveryRecipe,
    method: BlockRecovery,
    plan: Plan,
    *,
    report: Report,
    observer: Observer,
    given: Given | None = None,
    shared: DenseCache | None = None,
) -> PreparedRecovery:
    """Check the plan of a recovery and read its texts, as `prepare_pruning` does."""
    texts = read_texts(opened, recipe, plan, report=report, observer=observer, given=given, shared=shared)
    windows = texts.windows
    trains_blocks = method.training.steps > 0
    batch = sequences_a_batch(recipe, windows, length=texts.length, observer=observer, at_most_a_step=trains_blocks)
    steps = (ModelTraining.of_recovery(recipe, method),) if recipe.steps_after else ()
    if trains_blocks:
        observer(Note(method.check_memory(opened, windows)))
    for step in steps:
        observer(Note(step.check_memory(opened, windows)))
    found = vars(opened) | texts._asdict()
    return PreparedRecovery(**found, recipe=recipe, method=method, plan=plan, batch=batch, steps=steps)


def recovery_layers(ready: PreparedRecovery) -> list[PlannedLayer]:
    """Every linear layer of the blocks with its pattern in the pruned model, or the reason why it stays dense."""
    layers = list_layers(blocks_and_head(ready.skeleton, ready.plan), Unstructured(0))
    reason = "the pruned model has it dense"
    return [replace(x, pattern=ready.plan.get(x.name), reason="" if x.name in ready.plan else reason) for x in layers]
