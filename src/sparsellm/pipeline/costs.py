"""What pruning a block takes, in closed form, by method, solver and the block's shapes; and this machine's rates."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import median
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from sparsellm.activations.sensitivity import sampled_tokens
from sparsellm.methods import coupled_parts, planned_layers
from sparsellm.methods.algorithm1 import PublishedSparseLLM
from sparsellm.methods.auxiliary_signals import ERROR_TOKENS
from sparsellm.methods.block_solver import GRADIENT_STEPS, REFIT_STEPS
from sparsellm.methods.feedforward_problem import SAMPLED_WIDTHS
from sparsellm.methods.layerwise import LayerWise
from sparsellm.methods.sparsellm import SparseLLM, TrueSequential
from sparsellm.pipeline.preparation import Prepared
from sparsellm.runtime import devices
from sparsellm.solvers import Magnitude, Wanda
from sparsellm.solvers.alps import ALPS, CHECK_EVERY, MIN_ITERATIONS
from sparsellm.solvers.fast_admm import FastADMM
from sparsellm.solvers.patterns import NM, Pattern
from sparsellm.solvers.sparsegpt import SparseGPT
from sparsellm.solvers.statistics import Gram, TokenCount

Work = NDArray[np.float64]
"""Operations of matrix products in float32, of those of layers and Gram matrices, of Cholesky factors and of
eigendecompositions, and bytes that all else reads and writes."""

STORED = 9 / 16
"""Fraction of a Gram matrix that is computed: see `sparsellm.solvers.statistics.PANELS`."""

FORWARD_PASSES = 4.5
"""How often each number at the peak of a forward pass is read or written in all. Counted on Llama's and OPT's blocks."""

EIGH = 9
"""Operations of an eigendecomposition of an (n, n) matrix, in n³: the textbooks' count."""

SORT_PASSES = 280
"""Time of a stable sort of each row of 1,024 entries, in reads of a float32 matrix; 254 to 333 from 512 to 2,048 entries."""

GATE_BYTES = 5800
"""Bytes read and written to solve for one gate signal. Counted: four Newton steps, and many more for a few signals."""


class SolverCost(NamedTuple):
    """What one solve takes. With a curvature, "(in, in)" also stands for (out, out)."""

    matrices: float  # float32 (out, in) at the peak, beside the weight
    squares: float  # float32 (in, in) at the peak, beside the Gram matrix
    products: float  # of (out, in) by (in, in)
    factors: float  # Cholesky factors of (in, in); an inverse counts as two more
    spectra: float  # eigendecompositions of (in, in)
    passes: float  # reads and writes of (out, in)


class Cost(NamedTuple):
    """What a stage takes. Of one block, as from `block_cost`: without the block's weights, and without the pass to the next."""

    memory: float  # bytes at the peak, without the lists
    lists: Sequence[float]  # bytes of each list of hidden states, which may be in files
    work: Work
    seconds: float = 0.0  # besides the work
    state: float = 0.0  # bytes of the durable state of a training


@dataclass(frozen=True)
class BlockShapes:
    """Sizes of the model, of the largest block that is pruned, and of the calibration sequences."""

    depth: int  # blocks
    vocabulary: int
    stored: int  # bytes of a number in the model
    itemsize: int  # and in computations; the fields below are of the block and of the sequences
    layers: Sequence[tuple[int, int]]  # (out, in) of each layer to prune
    inputs: Sequence[int]  # of each group of layers that share them
    parts: int  # coupled feed-forward parts
    projections: int  # input projections of a part, (hidden, width) each
    width: int  # of the hidden states
    hidden: int  # inputs of a part's output projection
    share: float  # fraction of the tokens that a part computes for
    parameters: int
    active: float  # parameters that compute for a token; 0 for the output head, of which passes only read the inputs
    tokens: int
    length: int  # tokens per sequence
    batch: int  # tokens per batch
    pattern: Pattern  # of the first layer

    @property
    def stream(self) -> float:
        """Bytes of the hidden states of all tokens."""
        return self.itemsize * self.width * self.tokens

    @property
    def forward_bytes(self) -> float:
        """Bytes that a forward pass holds for each token at its peak: hidden signals, and some tensors of the width."""
        return self.itemsize * ((1 + self.projections) * self.hidden + (2 + self.projections) * self.width)

    def forward(self, tokens: float) -> Work:
        """Work of passing tokens through the block."""
        products = tokens * (2 * self.active + 4 * self.length * self.width)
        return work(layers=products, passes=FORWARD_PASSES * tokens * self.forward_bytes)

    def gram(self, features: int) -> Work:
        """Work of one Gram matrix: the products of each sequence, in float32, are added to sums in float64."""
        return STORED * features**2 * self.tokens * work(layers=2, passes=(2 * 4 + 2 * 8) / self.length)

    def solve_bytes(self, solver: object, shapes: Iterable[tuple[int, int]], curved: bool = False) -> float:
        """Bytes of the largest solve, with its weight and without Gram matrix and curvature."""
        cost = solver_cost(solver, self.pattern, curved)
        return max(4 * ((1 + cost.matrices) * o * i + cost.squares * (i**2 + curved * o**2)) for o, i in shapes)

    def solves(self, solver: object, shapes: Iterable[tuple[int, int]], *, extra: float, curved: bool = False) -> Work:
        """Work of solving layers; `extra` products of (out, in) by (in, in) besides, as for the reported error."""
        cost, total = solver_cost(solver, self.pattern, curved), work()
        for o, i in shapes:
            products, cubes = 2 * o * i * (i + curved * o), i**3 + curved * o**3
            factors, spectra, passes = cost.factors * cubes / 3, EIGH * cost.spectra * cubes, 4 * cost.passes * o * i
            total += work((cost.products + extra) * products, factors=factors, spectra=spectra, passes=passes)
        return total


def block_shapes(ready: Prepared, batch: int) -> BlockShapes:
    """Measure the model and its largest block that is pruned, if any is, for batches of this many sequences."""
    pruned = [block for block in ready.blocks if planned_layers(block, ready.plan)] or ready.blocks
    sizes = [sum(tensor.numel() for tensor in block.module.parameters()) for block in pruned]
    parameters, block = max(sizes), pruned[sizes.index(max(sizes))]
    config, planned = ready.skeleton.config.get_text_config(), planned_layers(block, ready.plan)
    layers = {name: (layer.out_features, layer.in_features) for name, layer in block.layers.items()}
    part = next(iter(block.architecture.feed_forward_parts), None)
    experts = {name: view.expert for name, view in block.views.items() if view.expert is not None}
    count = len(set(experts.values()))
    share = min(1.0, (getattr(config, "num_experts_per_tok", None) or 1) / count) if count else 1.0
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
        share=share,
        parameters=parameters,
        active=parameters - (1 - share) * sum(layers[name][0] * layers[name][1] for name in experts),
        tokens=len(ready.windows) * ready.length,
        length=ready.length,
        batch=min(batch, len(ready.windows)) * ready.length,
        pattern=ready.plan[block.full_name(planned[0])] if planned else next(iter(ready.plan.values())),
    )


def work(products: float = 0, *, layers: float = 0, factors: float = 0, spectra: float = 0, passes: float = 0) -> Work:
    """Build a `Work` vector: operations of products in float32, of those of a model's layers and their Gram matrices, which may
    be in bfloat16, of factorizations and eigendecompositions; `passes` in bytes."""
    return np.array([products, layers, factors, spectra, passes], dtype=float)


def solver_cost(solver: object, pattern: Pattern, curved: bool = False) -> SolverCost:
    """What one solve takes, with a curvature if `curved`. A solver that is not known is taken to be like SparseGPT.

    Counted on single solves (tests/integration/test_planning.py does so again). A mask counts by its time, measured in reads of
    the matrix: a partition 38 to 70, the ranks within groups of N:M 15 for each member and 25 besides.
    """
    mask = 25 + 15 * pattern.group if isinstance(pattern, NM) else 45
    solver = solver.with_curvature or solver if isinstance(solver, ALPS) and curved else solver
    match solver:
        case Magnitude():
            return SolverCost(2.3, 0, 0, 0, 0, 6 + mask)
        case Wanda():
            return SolverCost(4, 0, 0, 0, 0, 14 + (mask if isinstance(pattern, NM) else SORT_PASSES))
        case ALPS():  # mostly ends after the fewest iterations, later where the penalty rises more slowly
            steps = min(solver.iterations, MIN_ITERATIONS / solver.penalty_growth**0.85)
            penalties = steps / CHECK_EVERY
        case FastADMM():
            steps, penalties = solver.count_steps(0.4 if curved else None), 1  # m of feed-forward layers: 0.25 to 0.55
        case _:
            return SolverCost(2.6, 1.0, 0.8, 1, 0, 50 + mask)
    products, passes = steps + solver.refit_steps + 2, (30 + mask) * steps + 10 * solver.refit_steps
    if curved:  # one eigendecomposition serves all penalties, and a step takes two products
        return SolverCost(9.2, 2.5, products + steps, 0, 1, passes)
    return SolverCost(9.2, 3.7 if penalties > 1 else 1.4, products, 3 * penalties, 0, passes)  # 3.7: two inverses at a time


def block_cost(method: object, shapes: BlockShapes) -> Cost:
    """What pruning a block takes. A method that is not known is taken to be like `LayerWise(SparseGPT())`."""
    match method:
        case SparseLLM():
            return _sparsellm_cost(method, shapes)
        case PublishedSparseLLM():
            return _algorithm1_cost(method, shapes)
    return _layerwise_cost(method if isinstance(method, LayerWise) else LayerWise(SparseGPT()), shapes)


def _layerwise_cost(method: LayerWise, shapes: BlockShapes) -> Cost:
    """A pass for all statistics, then a solve for each layer."""
    grams = shapes.inputs if issubclass(method.needs, Gram) else []
    solved = shapes.solve_bytes(method.solver, shapes.layers)
    done = shapes.solves(method.solver, shapes.layers, extra=1.5 if grams else 0)
    if method.needs is TokenCount:
        return Cost(solved, [], done)
    squares = sum(features**2 for features in grams)
    passes = 0.5 if isinstance(method, TrueSequential) else 1.0  # cached outputs also serve the next block
    done += shapes.forward(passes * shapes.tokens)
    done = sum(map(shapes.gram, grams), done)
    captured = shapes.batch * shapes.itemsize * sum(shapes.inputs)  # the inputs of a batch are held until its pass ends
    memory = max(8 * STORED * squares + shapes.batch * shapes.forward_bytes + captured, 4 * squares + solved)
    return Cost(memory, [shapes.stream], done)


def _algorithm1_cost(method: PublishedSparseLLM, shapes: BlockShapes) -> Cost:
    """Layer-wise pruning, then for each further epoch a pass over the part's signals and new solves of its layers."""
    first = _layerwise_cost(LayerWise(method.solver, method.keep_zeros), shapes)
    if method.scope == frozenset() or not shapes.parts:
        return first
    width, hidden, projections = shapes.width, shapes.hidden, shapes.projections
    layers, tokens = [*[(hidden, width)] * projections, (width, hidden)], shapes.parts * shapes.share * shapes.tokens
    product, part = 2 * width * hidden, shapes.parts * (projections + 1) * width * hidden
    # All dense weights; of the part also the targets, their products, this epoch's weights and the best.
    weights = 4 * (sum(outputs * inputs for outputs, inputs in shapes.layers) + 4 * part)
    signals = tokens * (2 * shapes.itemsize * width + 4 * projections * hidden)
    sums = 8 * part + 8 * STORED * hidden**2 + 4 * 4 * shapes.length * hidden
    memory = weights + signals + max(sums, shapes.solve_bytes(method.solver, layers)) + 4 * sum(n**2 for n in shapes.inputs)
    measured = tokens if method.keep_best else min(tokens, shapes.parts * ERROR_TOKENS)  # for the reported error
    epoch = work(product * (tokens * (2 * projections + 3) + measured), passes=GATE_BYTES * tokens * hidden * (projections > 1))
    epoch += shapes.parts * (shapes.gram(hidden) + shapes.solves(method.solver, layers, extra=3.5))
    return Cost(memory, first.lists, first.work + (method.epochs - 1) * epoch + work(product * measured * (projections + 1)))


def _sparsellm_cost(method: SparseLLM, shapes: BlockShapes) -> Cost:
    """Each layer toward the dense stream, then the Gauss-Newton rounds of each feed-forward part."""
    curved, tokens, width = method.needs_fisher and shapes.active > 0, shapes.tokens, shapes.width
    coupled = shapes.parts * (shapes.projections * shapes.hidden**2 + width**2)  # a part's curvatures are made one by one
    curvatures = curved * (sum(outputs**2 for outputs, _ in shapes.layers) - coupled)
    widest = max(shapes.inputs)
    # A Gram matrix, and sums toward the targets: two more matrices of the width, or one of (width, widest).
    sums = 8 * STORED * widest**2 + max((8 + 8 * STORED) * width**2, 8 * width * widest)
    solved = 4 * widest**2 + shapes.solve_bytes(method.solver, shapes.layers, curved)
    memory = max(sums + shapes.batch * shapes.forward_bytes, solved)
    done = 1.3 * shapes.forward(tokens) + shapes.solves(method.solver, shapes.layers, extra=3.5, curved=curved)
    for features in shapes.inputs:
        done += (4 if features == width else 2) * shapes.gram(features)
    lists = [2 * shapes.stream, shapes.stream, shapes.stream]  # the two streams, and what attention writes in each
    if curved:
        seen = min(tokens, sampled_tokens(width))
        done += 2 * shapes.forward(seen) + work(seen * 2 * STORED * curvatures)
    if shapes.parts and method.scope != "none":
        part_memory, part_work = _gauss_newton_cost(method, shapes)
        memory = max(memory + 4 * shapes.projections * shapes.hidden**2, part_memory)
        done += shapes.parts * part_work
        lists.append(shapes.parts * 2 * 4 * shapes.share * tokens * width)
    return Cost(shapes.itemsize * shapes.parameters + 4 * curvatures + memory, lists, done)


def _gauss_newton_cost(method: SparseLLM, shapes: BlockShapes) -> tuple[float, Work]:
    """Bytes at the peak of one feed-forward part, and its work besides the solves, with half of the rounds."""
    width, hidden, projections, tokens = shapes.width, shapes.hidden, shapes.projections, shapes.share * shapes.tokens
    sampled = tokens / max(1, tokens // max(method.sampled, SAMPLED_WIDTHS * width))
    # The sample's slopes; nine matrices of the input projections' size; hidden signals of a sequence; curvatures.
    memory = 4 * projections * hidden * (sampled + 9 * width + 4 * shapes.length + hidden)
    product = 2 * width * hidden  # operations of one projection for a token
    once = sampled * projections * (product + 2 * STORED * hidden**2) + tokens * product * (2 * projections + 2)
    refit = work(tokens * product * (projections + 1) + (REFIT_STEPS + 1) * product * (hidden + width), factors=hidden**3 / 3)
    refit += shapes.gram(hidden)
    steps = sampled * product * GRADIENT_STEPS * (2 * projections + 2)
    numbers = 4 * projections * hidden * (2 * tokens + 2 * GRADIENT_STEPS * sampled)
    rounds = refit + work(tokens * product * (2 * projections + 2) + steps, passes=FORWARD_PASSES * numbers)
    return memory, work(once) + (method.gauss_newton_steps > 0) * refit + 0.5 * method.gauss_newton_steps * rounds


@cache
def rates(device: torch.device, seconds: float = 0.1) -> Work:
    """Measure what this machine does in a second of each kind of work: medians of three times or these seconds."""
    wide = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0)).to(device)
    definite, long = wide[:512] @ wide[:512].T, torch.ones(2**22, device=device)

    def rate(amount: float, operation: Callable[[], object]) -> float:
        taken: list[float] = []
        while len(taken) < 3 or sum(taken) < seconds:  # the first one of a process is slow
            begin = time.perf_counter()
            operation()
            devices.synchronize(device)
            taken.append(time.perf_counter() - begin)
        return amount / median(taken)

    product = rate(2 * 1024**3, lambda: devices.product(wide, wide, wide.dtype))
    return work(
        product,
        layers=product,
        factors=rate(512**3 / 3, lambda: torch.linalg.cholesky_ex(definite)),
        spectra=rate(EIGH * 512**3, lambda: torch.linalg.eigh(definite)),
        passes=rate(2 * 4 * 2**22, lambda: long * 2.0),
    )
