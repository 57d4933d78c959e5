"""What gradients of the dense model take, in closed form, and what measuring the errors of few bits takes."""

from __future__ import annotations

from dataclasses import replace

from sparsellm.activations.fisher import TOKENS as FISHER_TOKENS
from sparsellm.activations.fisher import WINDOWS as FISHER_WINDOWS
from sparsellm.allocation.error_curves import DENSITIES, ROWS, TOKENS
from sparsellm.methods.layerwise import LayerWise
from sparsellm.pipeline.costs import BlockShapes, Cost, block_cost, work
from sparsellm.solvers.fast_admm import FastADMM

LOGITS_PASSES = 10
"""How often a float32 logit is read or written for its cross entropy and the gradient by it."""

LOGITS_BYTES = 12
"""Bytes for each logit of a sequence while its loss and the gradient by it are computed."""


def gradient_cost(shapes: BlockShapes, model: float, tokens: int, *, batch: int, stop: int) -> Cost:
    """Forward, then for each block down to `stop` forward again and backward; the inputs of all blocks are held."""
    memory = model + max(2 * batch * shapes.forward_bytes, LOGITS_BYTES * shapes.length * shapes.vocabulary)
    # The logits' products, F of each block, and the logits' float32 softmax and running sums.
    products = 4 * shapes.vocabulary * shapes.width + 2 * shapes.depth * shapes.width**2
    done = tokens * work(products, passes=4 * LOGITS_PASSES * shapes.vocabulary)
    inputs = (shapes.depth + 1) * tokens * shapes.width * shapes.itemsize
    return Cost(memory, [inputs], done + (3 * shapes.depth - 2 * stop) * shapes.forward(tokens))


def errors_cost(shapes: BlockShapes, model: float) -> Cost:
    """The gradients of `fisher`, then a pass with a Gram matrix for each group of layers, and solves of a few rows of each."""
    tokens = min(shapes.tokens, max(FISHER_TOKENS, FISHER_WINDOWS * shapes.length))
    gradients = gradient_cost(shapes, model, tokens, batch=shapes.length, stop=0)
    rows = [(min(out, ROWS), into) for out, into in shapes.layers] * len(DENSITIES)
    block = block_cost(LayerWise(FastADMM()), replace(shapes, layers=rows, tokens=min(shapes.tokens, TOKENS)))
    lists = max(gradients.lists, block.lists, key=sum)
    return Cost(max(gradients.memory, model + block.memory), lists, gradients.work + shapes.depth * block.work)
