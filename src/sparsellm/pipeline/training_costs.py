"""What training takes, in closed form: of one block, of the whole model, and the sequences that the dense model generates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sparsellm.methods import planned_layers
from sparsellm.models.blocks import Block
from sparsellm.pipeline.costs import BlockShapes, Cost, Work, work
from sparsellm.pipeline.events import GENERATING, PREDICTING, TRAINING
from sparsellm.pipeline.loading import Placement
from sparsellm.pipeline.preparation import Prepared, PreparedRecovery
from sparsellm.pipeline.training import ModelTraining, model_step
from sparsellm.training.block_training import windows_a_step
from sparsellm.training.distillation import count_held_out
from sparsellm.training.generation import AT_A_TIME
from sparsellm.training.masked_training import VALIDATIONS
from sparsellm.training.memory import trained_bytes, trained_numbers
from sparsellm.training.trained_weights import Train

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
    once = work(2 * rank * weights, passes=(formed + MASK_BYTES) * weights)  # B A
    return done + once + batches * work(4 * rank * weights, passes=(read + MASK_BYTES) * weights)  # Bᵀ G and G Aᵀ


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
        logits += tokens * work(2 * products * vocabulary * shapes.width, passes=4 * passes * vocabulary)
    if outside:
        logits += stepped * work(2 * vocabulary * shapes.width)  # the gradient by the output head
    step = _step_work(ready.blocks, training.train, training.rank, batches=-(-per_step * length // batch), outside=outside)
    passed = 4 * stepped + validated  # forward, again forward, and backward
    done = depth * shapes.forward(passed) + logits + training.steps * step
    state = _state_bytes(sum(_trained(ready, training.train, training.rank)) + outside)
    yield TRAINING, Cost(memory, [], done, state=state)
