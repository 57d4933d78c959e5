"""One layer of a block: its problem, solved in one of the processes, and its result."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparsellm.errors import NonFinite, SingularGram
from sparsellm.methods import LAYER_RESULT, LayerResult, Plan
from sparsellm.models.blocks import Block
from sparsellm.runtime import collectives
from sparsellm.solvers import LayerSolver
from sparsellm.solvers.linalg import all_finite, count_zeros
from sparsellm.solvers.patterns import Pattern
from sparsellm.solvers.problem import LayerProblem
from sparsellm.solvers.statistics import InputRMS, TokenCount

LARGEST_DAMPING = 1.0
"""Damping is not raised beyond this multiple of the Gram matrix's mean diagonal, where it outweighs the inputs."""


def problem_of(block: Block, name: str, moments: TokenCount, keep_zeros: bool = False) -> LayerProblem:
    """The local problem of a layer, with a float32 copy of its current weight."""
    weight = block.layer(name).weight.detach().to(torch.float32, copy=True)
    return LayerProblem(weight, moments, pruned_mask=zero_mask(weight, keep_zeros))


def zero_mask(weight: Tensor, keep_zeros: bool) -> Tensor | None:
    """True where a weight is zero; None if there are no zeros or they need not stay."""
    pruned_mask = weight == 0 if keep_zeros else None
    return None if pruned_mask is None or not bool(pruned_mask.any()) else pruned_mask


def prune_layer(
    block: Block, name: str, problem: LayerProblem, *, solver: LayerSolver, plan: Plan, routed_tokens: int | None = None
) -> LayerResult:
    """Solve one layer and write the weight.

    Args:
        block: The block.
        name: The layer, by name within the block.
        problem: Its problem, with the dense weight.
        solver: The solver.
        plan: Patterns by full layer name.
        routed_tokens: As in `LayerResult`.
    """
    started = time.perf_counter()
    full_name = block.full_name(name)
    weight, damping = solve(solver, problem, plan[full_name], name=full_name)
    block.write(name, weight)
    seconds = time.perf_counter() - started
    return measure_layer(block, name, problem, plan=plan, damping=damping, seconds=seconds, routed_tokens=routed_tokens)


def solve(solver: LayerSolver, problem: LayerProblem, pattern: Pattern, *, name: str) -> tuple[Tensor, float | None]:
    """Solve a layer problem, raising the damping tenfold as often as a factorisation fails.

    A layer that received no token, as experts of an unknown model family may, loses its smallest weights.

    Args:
        solver: The solver.
        problem: The problem.
        pattern: The pattern that the weight must satisfy.
        name: Full name of the layer, for errors.

    Returns:
        The weight, (out, in), and the damping used; None for solvers without damping.

    Raises:
        SingularGram: If a factorisation fails even with `LARGEST_DAMPING`.
        NonFinite: If the weight is not finite.
    """
    if pattern.count_removed(problem.weight.numel()) == 0:
        mask = problem.pruned_mask
        return problem.weight.clone() if mask is None else problem.weight.masked_fill(mask, 0), None
    if problem.inputs.tokens == 0:
        score = problem.weight.abs() if problem.row_scale is None else problem.weight.abs() * problem.row_scale
        return problem.weight * problem.keep(pattern, score), None
    try:
        while True:
            damping: float | None = getattr(solver, "damping", None)
            try:
                weight = solver.solve(problem, pattern)
                break
            except SingularGram:
                if damping is None or damping >= LARGEST_DAMPING:
                    raise
                raised: Any = {"damping": min(max(10 * damping, 1e-3), LARGEST_DAMPING)}
                solver = replace(solver, **raised)  # type: ignore[type-var]
        if not all_finite(weight):
            raise NonFinite(f"The pruned weight of {name} is not finite. Try `dtype='float32'`, or more calibration tokens.")
    except (SingularGram, NonFinite) as error:
        if isinstance(problem.inputs, InputRMS) and not all_finite(problem.rms):
            message = f"The inputs of {name} overflow float32. Look for weights before it that are far too large."
            raise NonFinite(message) from error
        error.add_note(f"in layer {name}, {problem.inputs.tokens:,} calibration tokens")
        raise
    return weight, damping


def measure_layer(block: Block, name: str, problem: LayerProblem, **fields: Any) -> LayerResult:
    """The result of a layer whose weight is written.

    Args:
        block: The block.
        name: The layer, by name within the block.
        problem: Its problem, with the dense weight.
        **fields: As for `layer_result`.
    """
    weight = block.layer(name).weight.float()
    try:
        zeros, error = count_zeros(weight), problem.error(weight)
    except NonFinite as failure:
        failure.add_note(f"in layer {block.full_name(name)}")
        raise
    return layer_result(block, name, problem.inputs, zeros=zeros, error=error, **fields)


def layer_result(
    block: Block,
    name: str,
    statistics: TokenCount,
    *,
    plan: Plan,
    zeros: int,
    error: float,
    damping: float | None,
    seconds: float,
    epoch: int = 1,
    routed_tokens: int | None = None,
) -> LayerResult:
    """Build the `LayerResult` of a layer from its statistics and what is known of its solve; fields as there."""
    layer, full_name = block.layer(name), block.full_name(name)
    return LayerResult(
        name=full_name,
        pattern=plan[full_name],
        shape=(layer.out_features, layer.in_features),
        zeros=zeros,
        error=error,
        known=type(statistics).__name__,
        damping=damping,
        tokens=statistics.tokens,
        epoch=epoch,
        seconds=seconds,
        routed_tokens=routed_tokens,
    )


def assign_owners(block: Block, names: Sequence[str]) -> dict[str, int]:
    """The rank that solves each layer, balanced by cost: a factorisation, (in, in), and a pass over the weight."""
    layers = [block.layer(name) for name in names]
    costs = [float(layer.in_features**2 * (layer.in_features + layer.out_features)) for layer in layers]
    return dict(zip(names, collectives.balance_costs(costs), strict=True))


def solve_in_parallel(
    block: Block, names: Sequence[str], solve: Callable[[str], tuple[Tensor, Any]]
) -> Iterator[tuple[str, Tensor, Any]]:
    """Solve each layer in one process and broadcast the solution to all.

    Args:
        block: The block that the layers belong to.
        names: The layers, by name within the block.
        solve: Returns a layer's weight, (out, in) float32 on the block's device, and plain data about it.

    Returns:
        Name, weight and data of each layer, the same in every process.
    """
    owners = assign_owners(block, names)
    local = {name: solve(name) for name, owner in owners.items() if owner == collectives.rank()}
    for name, owner in owners.items():
        layer = block.layer(name)
        weight, data = local.get(name) or (torch.empty(layer.weight.shape, device=layer.weight.device), None)
        yield name, collectives.broadcast(owner, weight), collectives.broadcast_object(data, owner)


def broadcast_results(block: Block, owners: Mapping[str, int], results: Iterable[LayerResult]) -> Iterator[LayerResult]:
    """Prune the layers of this process, then broadcast weights and results, so that all processes hold the same bits.

    Args:
        block: The block that the layers belong to.
        owners: By layer, the rank that prunes it.
        results: Prunes the layers of this process as it is consumed.

    Returns:
        The results of all layers.
    """
    if collectives.world() == 1:
        yield from results
        return
    local = {result.name: result for result in results}
    for name, owner in owners.items():
        block.assign(name, collectives.broadcast(owner, block.layer(name).weight.detach().contiguous()))
        result = local.get(block.full_name(name))
        fields = None if result is None else LAYER_RESULT.dump_python(result, mode="json")
        yield LAYER_RESULT.validate_python(collectives.broadcast_object(fields, owner))
