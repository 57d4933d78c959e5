"""Recoveries before weights are read: prepared as prunings are, with the memory and disk space that they take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from sparsellm.checkpoints.loading import InMemoryModel
from sparsellm.checkpoints.stamps import Stamps
from sparsellm.extensions.recover.block_recovery import BlockRecovery
from sparsellm.extensions.recover.model_training import ModelTraining, state_bytes, trained_by_block
from sparsellm.extensions.recover.recipe import RecoveryRecipe
from sparsellm.extensions.recover.training.trained_weights import pruned_blocks
from sparsellm.methods import BlockShapes, Memory, Plan
from sparsellm.models.output_head import blocks_and_head
from sparsellm.observers.events import MEASURING, SENSITIVITIES, Note, Observer
from sparsellm.outputs.report import Report
from sparsellm.pipeline.dense_results import DenseCache
from sparsellm.pipeline.loading import OpenedModel, Placement
from sparsellm.pipeline.planning import check_disk, estimate
from sparsellm.pipeline.preparation import Prepared, read_texts, sequences_a_batch
from sparsellm.pipeline.stage_memory import block_shapes, blocks_memory, measuring_memory, model_bytes, sensitivities_memory
from sparsellm.recipes.plan import PlannedLayer, list_layers
from sparsellm.solvers.patterns import Unstructured
from sparsellm.texts.in_memory import Given

MEASURING_CHECKPOINT = "measuring the pruned checkpoint"
"""Name of the stage before the dense model is loaded."""


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


def fit_to_disk(
    ready: PreparedRecovery, placement: Placement, *, observer: Observer, output: Path | None = None
) -> tuple[Placement, int]:
    """Check that a recovery fits on the disk, as `fit_to_memory`; `prepare_recovery` refuses one that needs more memory."""
    if output and not isinstance(ready.source, InMemoryModel):
        plan = estimate(ready, recovery_memory, placement, batch=ready.batch, output=output)
        check_disk(output, plan.peak.disk_bytes, plan.disk_free_bytes)
    return placement, ready.batch


def recovery_memory(ready: PreparedRecovery, placement: Placement, batch: int) -> Iterator[tuple[str, Memory]]:
    """The memory of each stage of a recovery, as `pruning_memory`."""
    shapes = block_shapes(ready, batch)
    model = model_bytes(placement, shapes)
    if ready.method.needs_fisher:
        yield SENSITIVITIES, sensitivities_memory(shapes, model)
    yield ready.recipe.stage, blocks_memory(ready, placement, shapes, model=model, block=partial(_block_training_memory, ready))
    if ready.tests:
        measured = measuring_memory(ready, placement, shapes, model=model)
        yield from ((MEASURING_CHECKPOINT, measured), (MEASURING, measured))
    for step in ready.steps:
        yield from step.memory(ready, placement, shapes)


def _block_training_memory(ready: PreparedRecovery, shapes: BlockShapes) -> Memory:
    """The memory of recovering a block: its pruned weights are copied, and it is trained if the recovery trains blocks."""
    method = ready.method
    if not method.training.steps or shapes.is_head:  # the output head is not trained
        return Memory(0, [])
    trained = method.trained_bytes(pruned_blocks(ready.blocks, ready.plan))
    # Beside the weights of the block: the other copies, the dense block or a batch's activations, F and its root.
    copies = trained - 4 * shapes.parameters + 2 * 4 * shapes.width**2
    peak = copies + max(shapes.itemsize * shapes.parameters, 2 * shapes.batch * shapes.forward_bytes)
    return Memory(peak, [2 * shapes.stream], state_bytes(max(trained_by_block(ready, method.train, method.training.rank or 0))))
