"""What each stage of a run takes, in closed form."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

from sparsellm.activations.fisher import TOKENS as FISHER_TOKENS
from sparsellm.activations.fisher import WINDOWS as FISHER_WINDOWS
from sparsellm.activations.sensitivity import sampled_tokens
from sparsellm.evaluation.perplexity import batch_to_measure
from sparsellm.methods import planned_layers
from sparsellm.models.output_head import blocks_and_head
from sparsellm.pipeline.costs import BlockShapes, Cost, block_cost, block_shapes, work
from sparsellm.pipeline.events import ALLOCATION, MEASURING, MEASURING_CHECKPOINT, SENSITIVITIES
from sparsellm.pipeline.gradient_costs import errors_cost, gradient_cost
from sparsellm.pipeline.loading import Placement
from sparsellm.pipeline.preparation import Prepared, PreparedPruning, PreparedRecovery
from sparsellm.pipeline.recipe_fields import RULES
from sparsellm.pipeline.training_costs import block_training_cost, model_training_costs
from sparsellm.texts.padding import count_tokens

HEAD_EXTRA = (1, 0), (2, 2)
"""float32 matrices of the output head's size, and products of it by a Gram matrix, that a block's formulas leave out, since in
a block they are small against the rest: of a layer-wise method, and of one with a dense stream. Counted."""


def pruning_costs(ready: PreparedPruning, placement: Placement, batch: int) -> Iterator[tuple[str, Cost]]:
    """What each stage of a pruning run takes, by its name, in running order, with this many sequences per batch."""
    recipe, shapes = ready.recipe, block_shapes(ready, batch)
    model = _model_bytes(placement, shapes)
    if ready.method.needs_fisher:
        yield SENSITIVITIES, _sensitivities_cost(shapes, model)
    if recipe.allocation_rule == "fisher":
        tokens = min(shapes.tokens, max(FISHER_TOKENS, FISHER_WINDOWS * shapes.length))
        yield f"{ALLOCATION} (fisher)", gradient_cost(shapes, model, tokens, batch=shapes.length, stop=0)
    elif recipe.allocation_rule == RULES[-1]:
        yield f"{ALLOCATION} (bits)", errors_cost(shapes, model)
    elif recipe.allocation_rule in RULES[1:]:
        memory = model + max(shapes.batch * shapes.forward_bytes, 12 * shapes.parameters)  # a block's scores
        done = shapes.depth * shapes.forward(shapes.tokens)
        yield f"{ALLOCATION} ({recipe.allocation_rule})", Cost(memory, [shapes.stream], done)
    # For `predicted_kl`, the dense weights are copied.
    copies = sum(out * into for out, into in shapes.layers) * shapes.stored
    copies *= recipe.allocation_rule in ("fisher", RULES[-1])
    block = partial(block_cost, ready.method)
    yield ready.stage, _blocks_cost(ready, placement, shapes, model=model, block=block, copies=copies)
    if ready.tests:
        yield MEASURING, _measuring_cost(ready, placement, shapes, model=model, times=2)  # before and after
    if ready.training:
        yield from model_training_costs(ready.training, ready, placement, shapes)


def recovery_costs(ready: PreparedRecovery, placement: Placement, batch: int) -> Iterator[tuple[str, Cost]]:
    """What each stage of a recovery takes, as `pruning_costs`."""
    shapes = block_shapes(ready, batch)
    model = _model_bytes(placement, shapes)
    if ready.method.needs_fisher:
        yield SENSITIVITIES, _sensitivities_cost(shapes, model)
    # Where the pruned weights are only copied, no sequence is read.
    read = shapes if ready.method.training.steps else replace(shapes, tokens=0)
    block = partial(block_training_cost, ready)
    yield ready.stage, _blocks_cost(ready, placement, read, model=model, block=block)
    if ready.tests:
        yield MEASURING_CHECKPOINT, _measuring_cost(ready, placement, shapes, model=model)
        yield MEASURING, _measuring_cost(ready, placement, shapes, model=model, times=2)
    if ready.training:
        yield from model_training_costs(ready.training, ready, placement, shapes)


def _model_bytes(placement: Placement, shapes: BlockShapes) -> float:
    """Bytes of the weights that are in memory while a block is computed with."""
    if placement.streamed:
        return shapes.parameters * (shapes.itemsize + placement.ahead * shapes.stored)
    return placement.model + shapes.parameters * (shapes.itemsize - shapes.stored)  # one block is converted for computing


def _outside_bytes(placement: Placement, shapes: BlockShapes) -> float:
    """Bytes of the weights outside of the blocks."""
    return shapes.itemsize * (placement.model // shapes.stored - shapes.depth * shapes.parameters)


def _sensitivities_cost(shapes: BlockShapes, model: float) -> Cost:
    """The backward pass from the last block to the second."""
    tokens = min(shapes.tokens, sampled_tokens(shapes.width))
    return gradient_cost(shapes, model, tokens, batch=shapes.batch, stop=1)


def _measuring_cost(ready: Prepared, placement: Placement, shapes: BlockShapes, *, model: float, times: int = 1) -> Cost:
    """Measuring the perplexity of a model on all texts, this many times."""
    vocabulary, depth = shapes.vocabulary, shapes.depth
    lengths = list(map(count_tokens, ready.tests.values()))
    tokens = min(shapes.length * batch_to_measure(vocabulary, shapes.length, placement.memory), max(lengths))
    logits, memory = 2 * tokens * vocabulary * shapes.itemsize, tokens * shapes.forward_bytes
    done = work(2 * vocabulary * shapes.width * sum(lengths)) + depth * shapes.forward(sum(lengths))
    if placement.streamed:
        memory = max(model + memory, _outside_bytes(placement, shapes) + logits)
        return Cost(memory, [max(lengths) * shapes.width * shapes.itemsize], times * done)
    return Cost(placement.model // shapes.stored * shapes.itemsize + max(memory, logits), [], times * done)


def _blocks_cost(
    ready: Prepared,
    placement: Placement,
    shapes: BlockShapes,
    *,
    model: float,
    block: Callable[[BlockShapes], Cost],
    copies: float = 0,
) -> Cost:
    """Each planned block beside the model (or the block that is read), and the output head after all blocks.

    Args:
        model: Bytes of the weights in memory.
        block: What one block takes.
        copies: Bytes of copied dense weights.
    """
    *_, last = planned = [b for b in blocks_and_head(ready.skeleton, ready.plan) if planned_layers(b, ready.plan)]
    # What is outside the blocks makes the first inputs.
    entering = _outside_bytes(placement, shapes) + placement.model * (not placement.streamed)
    total = Cost(entering, [], last.index * shapes.forward(shapes.tokens))
    if len(planned) > last.is_head:
        one = block(shapes)
        done = (len(planned) - last.is_head) * one.work + total.work
        total = Cost(max(model + one.memory + copies, entering), one.lists, done, state=one.state)
    if last.is_head:
        outputs, inputs = next(iter(last.layers.values())).weight.shape
        head = block(
            replace(
                shapes,
                parts=0,
                projections=0,
                hidden=0,
                active=0,
                layers=[(outputs, inputs)],
                inputs=[inputs],
                parameters=outputs * inputs,
                pattern=ready.plan[last.name],
            )
        )
        matrices, products = HEAD_EXTRA[ready.method.needs_dense_stream]
        weight = outputs * inputs
        memory = placement.model * (not placement.streamed) + (shapes.itemsize + 4 * matrices) * weight + head.memory
        done = total.work + head.work + work(2 * products * weight * inputs)
        total = Cost(max(total.memory, memory), max(total.lists, head.lists, key=sum), done, state=total.state)
    return total
