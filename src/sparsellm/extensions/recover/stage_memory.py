"""The memory and disk space that a recovery takes, in closed form."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from sparsellm.checkpoints.loading import InMemoryModel
from sparsellm.extensions.recover.model_training import state_bytes, trained_by_block
from sparsellm.extensions.recover.preparation import PreparedRecovery
from sparsellm.extensions.recover.training.memory import trained_bytes
from sparsellm.methods import BlockShapes, Memory, planned_layers
from sparsellm.observers.events import MEASURING, SENSITIVITIES, Observer
from sparsellm.pipeline.loading import Placement
from sparsellm.pipeline.planning import check_disk, estimate
from sparsellm.pipeline.stage_memory import block_shapes, blocks_memory, measuring_memory, model_bytes, sensitivities_memory

MEASURING_CHECKPOINT = "measuring the pruned checkpoint"
"""Name of the stage before the dense model is loaded."""


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
    pruned = [block for block in ready.blocks if planned_layers(block, ready.plan)]
    rank, rounded = method.training.rank or 0, bool(method.scales)
    trained = trained_bytes(pruned, together=False, train=method.train, rank=rank, rounded=rounded)
    # Beside the weights of the block: the other copies, the dense block or a batch's activations, F and its root.
    copies = trained - 4 * shapes.parameters + 2 * 4 * shapes.width**2
    peak = copies + max(shapes.itemsize * shapes.parameters, 2 * shapes.batch * shapes.forward_bytes)
    return Memory(peak, [2 * shapes.stream], state_bytes(max(trained_by_block(ready, method.train, rank))))
