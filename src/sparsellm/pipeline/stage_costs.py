"""What each stage of a run takes, in closed form: its blocks, gradients of the dense model, training, and measuring."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

from sparsellm.activations.fisher_diagonal import FISHER_TOKENS
from sparsellm.activations.fisher_diagonal import WINDOWS as FISHER_WINDOWS
from sparsellm.activations.sensitivity import sampled_tokens
from sparsellm.allocation.error_curves import CURVE_TOKENS, DENSITIES, MEASURED_ROWS
from sparsellm.evaluation.perplexity import batch_to_measure
from sparsellm.methods import planned_layers
from sparsellm.methods.layerwise import LayerWise
from sparsellm.models.blocks import Block
from sparsellm.models.output_head import blocks_and_head
from sparsellm.pipeline.costs import BlockShapes, Cost, Work, block_cost, block_shapes, work
from sparsellm.pipeline.events import (
    ALLOCATION,
    GENERATING,
    MEASURING,
    MEASURING_CHECKPOINT,
    PREDICTING,
    SENSITIVITIES,
    TRAINING,
)
from sparsellm.pipeline.loading import Placement
from sparsellm.pipeline.preparation import Prepared, PreparedPruning, PreparedRecovery
from sparsellm.pipeline.recipe_fields import RULES
from sparsellm.pipeline.training import ModelTraining, model_step
from sparsellm.solvers.fast_admm import FastADMM
from sparsellm.texts.padding import count_tokens
from sparsellm.training.block_training import windows_a_step
from sparsellm.training.distillation import count_held_out
from sparsellm.training.generation import AT_A_TIME
from sparsellm.training.masked_training import VALIDATIONS
from sparsellm.training.memory import trained_bytes, trained_numbers
from sparsellm.training.trained_weights import Train

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
    block = partial(block_cost, ready.method)
    yield ready.stage, _blocks_cost(ready, placement, shapes, model=model, block=block)
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
) -> Cost:
    """Each planned block beside the model (or the block that is read), and the output head after all blocks.

    Args:
        model: Bytes of the weights in memory.
        block: What one block takes.
    """
    *_, last = planned = [b for b in blocks_and_head(ready.skeleton, ready.plan) if planned_layers(b, ready.plan)]
    # What is outside the blocks makes the first inputs.
    entering = _outside_bytes(placement, shapes) + placement.model * (not placement.streamed)
    total = Cost(entering, [], last.index * shapes.forward(shapes.tokens))
    if len(planned) > last.is_head:
        one = block(shapes)
        done = (len(planned) - last.is_head) * one.work + total.work
        total = Cost(max(model + one.memory, entering), one.lists, done, state=one.state)
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


LOGITS_PASSES = 10
"""How often a float32 logit is read or written for its cross entropy and the gradient by it."""

BYTES_A_LOGIT = 12
"""Bytes for each logit of a sequence while its loss and the gradient by it are computed."""


def gradient_cost(shapes: BlockShapes, model: float, tokens: int, *, batch: int, stop: int) -> Cost:
    """Forward, then for each block down to `stop` forward again and backward; the inputs of all blocks are held."""
    memory = model + max(2 * batch * shapes.forward_bytes, BYTES_A_LOGIT * shapes.length * shapes.vocabulary)
    # The logits' products, F of each block, and the logits' float32 softmax and running sums.
    products = 4 * shapes.vocabulary * shapes.width + 2 * shapes.depth * shapes.width**2
    done = tokens * work(products, passes=4 * LOGITS_PASSES * shapes.vocabulary)
    inputs = (shapes.depth + 1) * tokens * shapes.width * shapes.itemsize
    return Cost(memory, [inputs], done + (3 * shapes.depth - 2 * stop) * shapes.forward(tokens))


def errors_cost(shapes: BlockShapes, model: float) -> Cost:
    """The gradients of `fisher`, then a pass with a Gram matrix for each group of layers, and solves of a few rows of each."""
    tokens = min(shapes.tokens, max(FISHER_TOKENS, FISHER_WINDOWS * shapes.length))
    gradients = gradient_cost(shapes, model, tokens, batch=shapes.length, stop=0)
    rows = [(min(out, MEASURED_ROWS), into) for out, into in shapes.layers] * len(DENSITIES)
    block = block_cost(LayerWise(FastADMM()), replace(shapes, layers=rows, tokens=min(shapes.tokens, CURVE_TOKENS)))
    lists = max(gradients.lists, block.lists, key=sum)
    return Cost(max(gradients.memory, model + block.memory), lists, gradients.work + shapes.depth * block.work)


ADAM_BYTES = 84
"""Bytes that a step reads and writes for each trained number: 12 for its gradient as float32, and 72 by Adam's operations."""

SUM_BYTES = 16, 20
"""Bytes for each trained number to begin the float64 sum of a step's gradients, and to add those of a further batch."""

MASK_BYTES = 180
"""Time of filling a number under a mask, in bytes that are read or written; 167 to 195 on weights of 192 to 2,048 columns."""

LORA_BYTES = 24, 16
"""Bytes for each weight beside the masks: to form W0 + B A and copy it, and to read a batch's gradient for the factors."""

CALL_SECONDS = 1e-3
"""Seconds for calling the modules of a block on a token, beside the operations."""

CACHE_PASSES, SAMPLING_BYTES = 3, 70
"""Passes over the keys and values so far for a generated token; bytes read and written for each logit to draw it."""

LOGITS = (3, 23), (2, 15)
"""Products with the output head, and how often a logit is read or written, in a step and in a validation."""

STORED_COPIES = 4
"""float32 copies of the trained numbers that a durable state has: the present ones, the best ones, and Adam's two moments."""


def _state_bytes(numbers: int) -> int:
    """Bytes of the durable state of training so many numbers."""
    return 4 * STORED_COPIES * numbers


def _trained(ready: Prepared, train: Train, rank: int) -> list[int]:
    """The trained numbers of each block that has pruned layers."""
    return [trained_numbers(block, train, rank) for block in ready.blocks if planned_layers(block, ready.plan)]


def _step_work(blocks: Sequence[Block], train: Train, rank: int, *, batches: int, outside: int = 0) -> Work:
    """What a gradient step takes beside its passes: sums of gradients, Adam, masks, and the products of low-rank factors.

    Args:
        outside: The trained numbers outside of the blocks.
    """
    numbers = outside + sum(trained_numbers(block, train, rank) for block in blocks)
    weights = sum(layer.in_features * layer.out_features for block in blocks for layer in block.layers.values())
    first, further = SUM_BYTES
    done = work(passes=numbers * (first + further * (batches - 1) + ADAM_BYTES))
    if train == "full":
        return done + work(passes=MASK_BYTES * weights)
    formed, read = LORA_BYTES
    once = work(layers=2 * rank * weights, passes=(formed + MASK_BYTES) * weights)  # B A
    return done + once + batches * work(layers=4 * rank * weights, passes=(read + MASK_BYTES) * weights)  # Bᵀ G and G Aᵀ


def block_training_cost(ready: PreparedRecovery, shapes: BlockShapes) -> Cost:
    """What recovering a block takes: its pruned weights are copied, and it is trained if the recovery trains blocks."""
    method = ready.method
    moved, steps = work(passes=8 * shapes.parameters), method.training.steps
    if not steps or not shapes.active:  # the output head is not trained
        return Cost(0, [], moved)
    pruned = [block for block in ready.blocks if planned_layers(block, ready.plan)]
    rank, rounded = method.training.rank or 0, bool(method.scales)
    trained = trained_bytes(pruned, together=False, train=method.train, rank=rank, rounded=rounded)
    # Beside the weights of the block: the other copies, the dense block or a batch's activations, F and its root.
    copies = trained - 4 * shapes.parameters + 2 * 4 * shapes.width**2
    memory = copies + max(shapes.itemsize * shapes.parameters, 2 * shapes.batch * shapes.forward_bytes)
    per_step = windows_a_step(shapes.tokens // shapes.length, shapes.length) * shapes.length
    validations = (min(VALIDATIONS, steps) + 1) * shapes.forward(method.training.held * shapes.tokens)
    largest = max(pruned, key=lambda block: trained_numbers(block, "full", 0))
    one = _step_work([largest], method.train, rank, batches=-(-per_step // shapes.batch))
    done = moved + shapes.forward(shapes.tokens) + steps * (3 * shapes.forward(per_step) + one) + validations
    state = _state_bytes(max(_trained(ready, method.train, rank)))
    return Cost(memory, [2 * shapes.stream], done, state=state)


def generation_cost(ready: Prepared, placement: Placement, count: int) -> Cost:
    """What the generation of sequences with the dense model takes, token by token."""
    config, length, depth = ready.skeleton.config.get_text_config(), ready.length, len(ready.blocks)
    stored = ready.source.dtype("auto").itemsize
    batches, cached = -(-count // AT_A_TIME), 2 * 4 * length / 2 * config.hidden_size * depth  # keys and values, on average
    passes = batches * placement.model + count * (CACHE_PASSES * cached + SAMPLING_BYTES * config.vocab_size)
    products = 2 * count * placement.model / stored
    memory = placement.model * max(4, stored) / stored + min(count, AT_A_TIME) * (2 * cached + 12 * config.vocab_size)
    seconds = length * CALL_SECONDS * batches * depth
    return Cost(memory, [], length * work(products, passes=passes), seconds)


def model_training_costs(
    training: ModelTraining, ready: Prepared, placement: Placement, shapes: BlockShapes
) -> Iterator[tuple[str, Cost]]:
    """What each stage of training the whole model takes, by its name."""
    samples, length = ready.windows.shape
    more, vocabulary, depth = training.count_generated(samples, length), shapes.vocabulary, shapes.depth
    if more:
        yield GENERATING, generation_cost(ready, placement, more)
    whole = 4 * (placement.model // shapes.stored)  # float32
    tokens = (samples + more) * length
    states = 4 * tokens * shapes.width
    yield PREDICTING, Cost(whole + states + shapes.batch * shapes.forward_bytes, [], depth * shapes.forward(tokens))
    per_step, held_out = model_step(samples, length), count_held_out(ready.windows)
    blocks = sum(sum(x.numel() for x in block.module.parameters()) for block in ready.blocks)
    batch = min(per_step, training.batch_size or samples) * length
    outside = training.numbers_outside(ready.skeleton)
    copies = whole - 4 * (blocks + outside) + training.memory_bytes(ready, ready.windows)
    memory = copies + 2 * batch * shapes.forward_bytes  # of the block whose activations are computed again
    validated = (min(VALIDATIONS, training.steps) + 1) * held_out * length
    stepped = training.steps * per_step * length
    logits = work()
    for tokens, (products, passes) in zip((stepped, validated), LOGITS, strict=True):
        logits += tokens * work(layers=2 * products * vocabulary * shapes.width, passes=4 * passes * vocabulary)
    if outside:
        logits += stepped * work(layers=2 * vocabulary * shapes.width)  # the gradient by the output head
    step = _step_work(ready.blocks, training.train, training.rank, batches=-(-per_step * length // batch), outside=outside)
    passed = 4 * stepped + validated  # forward, again forward, and backward
    done = depth * shapes.forward(passed) + logits + training.steps * step
    state = _state_bytes(sum(_trained(ready, training.train, training.rank)) + outside)
    yield TRAINING, Cost(memory, [], done, state=state)
