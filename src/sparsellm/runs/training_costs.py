"""What training takes, in closed form: of one block, of the whole model, and the sequences that the dense model generates."""

from __future__ import annotations

from collections.abc import Iterator

from sparsellm.methods import planned_layers
from sparsellm.recovery.block_training import windows_a_step
from sparsellm.recovery.distillation import AT_A_TIME, count_held_out
from sparsellm.recovery.masked_training import VALIDATIONS
from sparsellm.recovery.memory import trained_bytes, trained_numbers
from sparsellm.runs.costs import BlockShapes, Cost, work
from sparsellm.runs.events import GENERATING, PREDICTING, TRAINING
from sparsellm.runs.loading import Placement
from sparsellm.runs.preparation import Prepared
from sparsellm.runs.recipe import RunRecipe
from sparsellm.runs.recovery import BlockRecovery
from sparsellm.runs.recovery_recipe import RecoveryRecipe
from sparsellm.runs.training import model_bytes, model_step, model_written, trained_of

ADAM_PASSES = 4
"""How often a step of Adam reads and writes its float32 numbers: weights, two moments, gradients and their float64 sums."""

CALL_SECONDS = 1e-3
"""Seconds for calling the modules of a block on a token, beside the operations."""

CACHE_PASSES, SAMPLING_BYTES = 6, 600
"""How often a generated token reads or writes the keys and values so far; bytes read and written to draw it, for each logit."""

LOGITS_PASSES = 10
"""How often a float32 logit is read or written for its loss and the gradient by it."""

STORED_COPIES = 4
"""float32 copies of the trained numbers that a durable state has: the present ones, the best ones, and Adam's two moments."""


def state_bytes(recipe: RunRecipe, ready: Prepared) -> int:
    """Bytes of the durable state of training the whole model or the largest block; 0 for a run that does not train."""
    train, rank = trained_of(recipe)
    sizes = [trained_numbers(block, train, rank) for block in ready.blocks if planned_layers(block, ready.plan)]
    if isinstance(ready.method, BlockRecovery) and ready.method.training.steps:
        return 4 * STORED_COPIES * max(sizes, default=0)
    return 4 * STORED_COPIES * sum(sizes) if recipe.model_steps else 0


def block_training_cost(method: BlockRecovery, ready: Prepared, shapes: BlockShapes) -> Cost:
    """What recovering a block takes: its pruned weights are copied, and it is trained if the method has steps."""
    moved, steps = work(passes=8 * shapes.parameters), method.training.steps
    if not steps or not shapes.active:  # the output head is not trained
        return Cost(0, [], moved)
    pruned = [block for block in ready.blocks if planned_layers(block, ready.plan)]
    trained = trained_bytes(pruned, together=False, train=method.train, rank=method.training.rank or 0)
    # Beside the weights of the block: the other copies, the dense block or a batch's activations, F and its root.
    copies = trained - 4 * shapes.parameters + 2 * 4 * shapes.width**2
    memory = copies + max(shapes.itemsize * shapes.parameters, 2 * shapes.batch * shapes.forward_bytes)
    per_step = windows_a_step(shapes.tokens // shapes.length, shapes.length) * shapes.length
    validations = (min(VALIDATIONS, steps) + 1) * shapes.forward(method.training.held * shapes.tokens)
    done = moved + shapes.forward(shapes.tokens) + steps * (3 * shapes.forward(per_step) + ADAM_PASSES * moved) + validations
    return Cost(memory, [2 * shapes.stream], done)


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
    recipe: RunRecipe, ready: Prepared, placement: Placement, shapes: BlockShapes
) -> Iterator[tuple[str, Cost]]:
    """What each stage of training the whole model takes, by its name."""
    samples, length = ready.windows.shape
    more, vocabulary, depth = model_written(recipe, samples, length), shapes.vocabulary, shapes.depth
    if more:
        yield GENERATING, generation_cost(ready, placement, more)
    head = work(2 * vocabulary * shapes.width, passes=LOGITS_PASSES * vocabulary)  # of a token
    whole = 4 * (placement.model // shapes.stored)  # float32
    if not isinstance(recipe, RecoveryRecipe) or recipe.resolved_loss != "text":
        tokens = (samples + more) * length
        states = 4 * tokens * shapes.width
        yield PREDICTING, Cost(whole + states + shapes.batch * shapes.forward_bytes, [], depth * shapes.forward(tokens))
    per_step, held_out = model_step(samples, length), count_held_out(ready.windows)
    train, rank = trained_of(recipe)
    blocks = sum(sum(x.numel() for x in block.module.parameters()) for block in ready.blocks)
    batch = min(per_step, recipe.batch_size or samples) * length
    copies = whole - 4 * blocks + model_bytes(recipe, ready.blocks, ready.windows, vocabulary=vocabulary)
    memory = copies + 2 * batch * shapes.forward_bytes  # of the block whose activations are computed again
    validated = (min(VALIDATIONS, recipe.model_steps) + 1) * held_out * length
    passed = (4 * recipe.model_steps * per_step) * length + validated  # forward, again forward, and backward
    numbers = sum(trained_numbers(block, train, rank) for block in ready.blocks)
    adam = recipe.model_steps * work(passes=ADAM_PASSES * 8 * numbers + 4 * 4 * blocks)
    yield TRAINING, Cost(memory, [], depth * shapes.forward(passed) + passed * head + adam)
