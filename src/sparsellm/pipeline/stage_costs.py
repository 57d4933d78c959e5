"""What each stage of a run takes, in closed form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from sparsellm.activations.fisher import TOKENS as FISHER_TOKENS
from sparsellm.activations.fisher import WINDOWS as FISHER_WINDOWS
from sparsellm.activations.sensitivity import sampled_tokens
from sparsellm.evaluation.perplexity import batch_to_measure
from sparsellm.methods import planned_layers
from sparsellm.models.output_head import blocks_and_head
from sparsellm.pipeline.costs import BlockShapes, Cost, block_cost, block_shapes, work
from sparsellm.pipeline.events import (
    ALLOCATION,
    MEASURING,
    MEASURING_CHECKPOINT,
    PRUNING,
    RECOVERING,
    SENSITIVITIES,
)
from sparsellm.pipeline.gradient_costs import errors_cost, gradient_cost
from sparsellm.pipeline.loading import Placement
from sparsellm.pipeline.preparation import Prepared
from sparsellm.pipeline.recipe import RunRecipe
from sparsellm.pipeline.recipe_fields import RULES
from sparsellm.pipeline.recovery import BlockRecovery
from sparsellm.pipeline.recovery_recipe import RecoveryRecipe
from sparsellm.pipeline.training_costs import block_training_cost, model_training_costs
from sparsellm.texts.padding import count_tokens

HEAD_EXTRA = (1, 0), (2, 2)
"""float32 matrices of the output head's size, and products of it by a Gram matrix, that a block's formulas leave out, since in
a block they are small against the rest: of a layer-wise method, and of one with a dense stream. Counted."""


def stage_costs(recipe: RunRecipe, ready: Prepared, placement: Placement, *, batch: int) -> Iterator[tuple[str, Cost]]:
    """What each stage takes, by its name, in running order."""
    shapes = block_shapes(recipe, ready, batch)
    depth, vocabulary, stored = shapes.depth, shapes.vocabulary, shapes.stored
    parameters = placement.model // stored
    non_block = shapes.itemsize * (parameters - depth * shapes.parameters)
    model = placement.model + shapes.parameters * (shapes.itemsize - stored)  # one block is converted for computing
    if placement.streamed:
        model = shapes.parameters * (shapes.itemsize + placement.ahead * stored)

    if ready.method.needs_fisher:
        tokens = min(shapes.tokens, sampled_tokens(shapes.width))
        yield SENSITIVITIES, gradient_cost(shapes, model, tokens, batch=shapes.batch, stop=1)
    if recipe.allocation_rule == "fisher":
        tokens = min(shapes.tokens, max(FISHER_TOKENS, FISHER_WINDOWS * shapes.length))
        yield f"{ALLOCATION} (fisher)", gradient_cost(shapes, model, tokens, batch=shapes.length, stop=0)
    elif recipe.allocation_rule == RULES[-1]:
        yield f"{ALLOCATION} (bits)", errors_cost(shapes, model)
    elif recipe.allocation_rule in RULES[1:]:
        memory = model + max(shapes.batch * shapes.forward_bytes, 12 * shapes.parameters)  # a block's scores
        yield f"{ALLOCATION} ({recipe.allocation_rule})", Cost(memory, [shapes.stream], depth * shapes.forward(shapes.tokens))

    yield block_stage(recipe), _pruning_cost(recipe, ready, placement, shapes=shapes, model=model, non_block=non_block)

    if ready.tests:
        lengths = list(map(count_tokens, ready.tests.values()))
        tokens = min(shapes.length * batch_to_measure(vocabulary, shapes.length, placement.memory), max(lengths))
        logits, memory = 2 * tokens * vocabulary * shapes.itemsize, tokens * shapes.forward_bytes
        done = work(2 * vocabulary * shapes.width * sum(lengths)) + depth * shapes.forward(sum(lengths))
        lists = [max(lengths) * shapes.width * shapes.itemsize] if placement.streamed else []
        memory = max(model + memory, non_block + logits) if lists else parameters * shapes.itemsize + max(memory, logits)
        if isinstance(recipe, RecoveryRecipe):
            yield MEASURING_CHECKPOINT, Cost(memory, lists, done)
        yield MEASURING, Cost(memory, lists, 2 * done)  # before and after
    if recipe.model_steps:
        yield from model_training_costs(recipe, ready, placement, shapes)


def _pruning_cost(
    recipe: RunRecipe, ready: Prepared, placement: Placement, *, shapes: BlockShapes, model: float, non_block: float
) -> Cost:
    """Each planned block beside the model (or the block that is read), and the output head after all blocks."""
    if isinstance(ready.method, BlockRecovery) and not ready.method.training.steps:
        shapes = replace(shapes, tokens=0)  # the pruned weights are copied, and no sequence is read
    *_, last = planned = [b for b in blocks_and_head(ready.skeleton, ready.plan) if planned_layers(b, ready.plan)]
    entering = non_block + placement.model * (not placement.streamed)  # what is outside the blocks makes the first inputs
    total = Cost(entering, [], last.index * shapes.forward(shapes.tokens))
    if len(planned) > last.is_head:
        block = _block_cost(ready, shapes)
        # For `predicted_kl`, the dense weights are copied.
        copies = sum(out * into for out, into in shapes.layers) * shapes.stored
        copies *= recipe.allocation_rule in ("fisher", RULES[-1])
        done = (len(planned) - last.is_head) * block.work + total.work
        total = Cost(max(model + block.memory + copies, entering), block.lists, done)
    if last.is_head:
        outputs, inputs = next(iter(last.layers.values())).weight.shape
        one = {
            "layers": [(outputs, inputs)],
            "inputs": [inputs],
            "parameters": outputs * inputs,
            "pattern": ready.plan[last.name],
        }
        alone = replace(shapes, parts=0, projections=0, hidden=0, active=0, **one)  # type: ignore[arg-type]
        head = _block_cost(ready, alone)
        matrices, products = HEAD_EXTRA[ready.method.needs_dense_stream]
        memory = placement.model * (not placement.streamed) + (shapes.itemsize + 4 * matrices) * alone.parameters + head.memory
        done = total.work + head.work + work(2 * products * alone.parameters * inputs)
        total = Cost(max(total.memory, memory), max(total.lists, head.lists, key=sum), done)
    return total


def _block_cost(ready: Prepared, shapes: BlockShapes) -> Cost:
    """What pruning or recovering a block takes."""
    method = ready.method
    return block_training_cost(method, ready, shapes) if isinstance(method, BlockRecovery) else block_cost(method, shapes)


def block_stage(recipe: RunRecipe) -> str:
    """Name of the stage that goes from block to block."""
    return RECOVERING if isinstance(recipe, RecoveryRecipe) else PRUNING
