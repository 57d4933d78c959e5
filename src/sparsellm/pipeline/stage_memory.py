"""The memory that each stage of a run takes, in closed form: its blocks, gradients of the dense model, training, measuring."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from sparsellm.activations.fisher_diagonal import FISHER_TOKENS
from sparsellm.activations.fisher_diagonal import WINDOWS as FISHER_WINDOWS
from sparsellm.activations.sensitivity import sampled_tokens
from sparsellm.evaluation.perplexity import batch_to_measure
from sparsellm.methods import BlockShapes, Memory, coupled_parts, planned_layers
from sparsellm.methods.layerwise import LayerWise
from sparsellm.models.output_head import blocks_and_head
from sparsellm.observers.events import ALLOCATION, MEASURING, SENSITIVITIES
from sparsellm.pipeline.cached_allocation import rule_of
from sparsellm.pipeline.loading import Placement
from sparsellm.pipeline.preparation import Prepared, PreparedPruning
from sparsellm.recipes.recipe import Recipe
from sparsellm.solvers.sparsegpt import SparseGPT
from sparsellm.texts.padding import count_tokens

HEAD_MATRICES = (1, 2)
"""float32 matrices of the output head's size that a block's formulas leave out, since in a block they are small against the
rest: of a layer-wise method, and of one with a dense stream. Counted."""

BYTES_A_LOGIT = 12
"""Bytes for each logit of a sequence while its loss and the gradient by it are computed."""


def block_shapes(ready: Prepared, batch: int) -> BlockShapes:
    """Measure the model and its largest block that is pruned, if any is, for batches of this many sequences."""
    pruned = [block for block in ready.blocks if planned_layers(block, ready.plan)] or ready.blocks
    sizes = [sum(tensor.numel() for tensor in block.module.parameters()) for block in pruned]
    parameters, block = max(sizes), pruned[sizes.index(max(sizes))]
    config, planned = ready.skeleton.config.get_text_config(), planned_layers(block, ready.plan)
    layers = {name: (layer.out_features, layer.in_features) for name, layer in block.layers.items()}
    part = next(iter(block.architecture.feed_forward_parts), None)
    count = len({view.expert for view in block.views.values() if view.expert is not None})
    stored = ready.source.dtype(ready.recipe.dtype).itemsize
    return BlockShapes(
        depth=len(ready.blocks),
        vocabulary=int(config.vocab_size),
        stored=stored,
        itemsize=max(4, stored) if ready.device.type == "cpu" or ready.recipe.in_float32 else stored,
        layers=[layers[name] for name in planned],
        inputs=[layers[group[0]][1] for group in block.architecture.groups if not {*group}.isdisjoint(planned)],
        parts=len(coupled_parts(block, ready.plan)),
        projections=len(part.in_proj) if part else 2,
        width=int(config.hidden_size),
        hidden=layers[part.out_proj][1] if part else max(max(shape) for shape in layers.values()),
        share=min(1.0, (getattr(config, "num_experts_per_tok", None) or 1) / count) if count else 1.0,
        parameters=parameters,
        tokens=len(ready.windows) * ready.length,
        length=ready.length,
        batch=min(batch, len(ready.windows)) * ready.length,
    )


def pruning_memory(ready: PreparedPruning, placement: Placement, batch: int) -> Iterator[tuple[str, Memory]]:
    """The memory of each stage of a pruning run, by its name, in running order, with this many sequences per batch."""
    recipe, shapes = ready.recipe, block_shapes(ready, batch)
    model = model_bytes(placement, shapes)
    if ready.method.needs_fisher:
        yield SENSITIVITIES, sensitivities_memory(shapes, model)
    if recipe.allocates:
        yield f"{ALLOCATION} ({recipe.allocation_rule})", _allocation_memory(recipe, shapes, model)
    block = getattr(ready.method, "block_memory", LayerWise(SparseGPT()).block_memory)  # of an unknown method
    yield ready.recipe.stage, blocks_memory(ready, placement, shapes, model=model, block=block)
    if ready.tests:
        yield MEASURING, measuring_memory(ready, placement, shapes, model=model)
    for step in ready.steps:
        yield from step.memory(ready, placement, shapes)


def model_bytes(placement: Placement, shapes: BlockShapes) -> float:
    """Bytes of the weights that are in memory while a block is computed with."""
    if placement.streamed:
        return shapes.parameters * (shapes.itemsize + placement.ahead * shapes.stored)
    return placement.model + shapes.parameters * (shapes.itemsize - shapes.stored)  # one block is converted for computing


def _outside_bytes(placement: Placement, shapes: BlockShapes) -> float:
    """Bytes of the weights outside of the blocks."""
    return shapes.itemsize * (placement.model // shapes.stored - shapes.depth * shapes.parameters)


def _gradient_memory(shapes: BlockShapes, model: float, tokens: int, *, batch: int) -> Memory:
    """Forward, then for each block forward again and backward; the inputs of all blocks are held."""
    peak = model + max(2 * batch * shapes.forward_bytes, BYTES_A_LOGIT * shapes.length * shapes.vocabulary)
    return Memory(peak, [(shapes.depth + 1) * tokens * shapes.width * shapes.itemsize])


def sensitivities_memory(shapes: BlockShapes, model: float) -> Memory:
    """The backward pass for F of each block's output."""
    return _gradient_memory(shapes, model, min(shapes.tokens, sampled_tokens(shapes.width)), batch=shapes.batch)


def removal_memory(shapes: BlockShapes, model: float) -> Memory:
    """The gradients of single tokens, by which `fisher` weighs the removal of each weight."""
    tokens = min(shapes.tokens, max(FISHER_TOKENS, FISHER_WINDOWS * shapes.length))
    return _gradient_memory(shapes, model, tokens, batch=shapes.length)


def _allocation_memory(recipe: Recipe, shapes: BlockShapes, model: float) -> Memory:
    """The memory of the allocation rule."""
    if rule := rule_of(recipe):
        return rule.memory(shapes, model)
    if recipe.allocation_rule == "fisher":
        return removal_memory(shapes, model)
    peak = model + max(shapes.batch * shapes.forward_bytes, 12 * shapes.parameters)  # a block's scores
    return Memory(peak, [shapes.stream])


def measuring_memory(ready: Prepared, placement: Placement, shapes: BlockShapes, *, model: float) -> Memory:
    """The perplexity of a model, on one text after the other."""
    vocabulary, longest = shapes.vocabulary, max(map(count_tokens, ready.tests.values()))
    tokens = min(shapes.length * batch_to_measure(vocabulary, shapes.length, placement.memory), longest)
    logits, pass_bytes = 2 * tokens * vocabulary * shapes.itemsize, tokens * shapes.forward_bytes
    if placement.streamed:
        peak = max(model + pass_bytes, _outside_bytes(placement, shapes) + logits)
        return Memory(peak, [longest * shapes.width * shapes.itemsize])
    return Memory(placement.model // shapes.stored * shapes.itemsize + max(pass_bytes, logits), [])


def blocks_memory(
    ready: Prepared,
    placement: Placement,
    shapes: BlockShapes,
    *,
    model: float,
    block: Callable[[BlockShapes], Memory],
) -> Memory:
    """Each planned block beside the model (or the block that is read), and the output head after all blocks.

    Args:
        model: Bytes of the weights in memory.
        block: What one block takes.
    """
    *_, last = planned = [b for b in blocks_and_head(ready.skeleton, ready.plan) if planned_layers(b, ready.plan)]
    # What is outside the blocks makes the first inputs.
    total = Memory(_outside_bytes(placement, shapes) + placement.model * (not placement.streamed), [])
    if len(planned) > last.is_head:
        one = block(shapes)
        total = one._replace(peak=max(model + one.peak, total.peak))
    if last.is_head:
        outputs, inputs = next(iter(last.layers.values())).weight.shape
        size = outputs * inputs
        alone = replace(shapes, parts=0, projections=0, hidden=0, layers=[(outputs, inputs)], inputs=[inputs])
        head = block(replace(alone, parameters=size, is_head=True))
        matrices = HEAD_MATRICES[ready.method.needs_dense_stream]
        peak = placement.model * (not placement.streamed) + (shapes.itemsize + 4 * matrices) * size + head.peak
        total = Memory(max(total.peak, peak), max(total.lists, head.lists, key=sum), total.state)
    return total
