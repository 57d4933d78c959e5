"""Layer-wise pruning: one separate problem for each linear layer, its statistics, its solution and its result."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from sparsellm.activations.streams import Capture, CaptureRequest
from sparsellm.activations.walk import Activations
from sparsellm.errors import NonFinite, SingularGram
from sparsellm.methods import (
    AfterSolve,
    BlockShapes,
    EpochResult,
    LayerResult,
    Memory,
    Plan,
    assign_owners,
    broadcast_results,
    planned_layers,
)
from sparsellm.methods.contract import SPARE, check_form, check_zeros, count_removed, versions
from sparsellm.models.blocks import Block
from sparsellm.runtime import collectives, devices
from sparsellm.solvers import LayerSolver, NonBlockingSolver
from sparsellm.solvers.linalg import all_finite, count_zeros
from sparsellm.solvers.patterns import Pattern
from sparsellm.solvers.problem import MIN_ENERGY, LayerProblem, is_finite_pair, relative_error, solve_bytes
from sparsellm.solvers.statistics import STORED, Gram, InputRMS, TokenCount

LARGEST_DAMPING = 1.0
"""Damping is not raised beyond this multiple of the Gram matrix's mean diagonal, where it outweighs the inputs."""

FOUND = "its model family is not known; the linear layers found in its blocks were pruned (docs/families.md)"
"""Note of a layer-wise method for a block of a family that is not in the table."""


@dataclass(frozen=True)
class LayerWise:
    """Prune each layer for its own output (paper eq. 2), on the inputs of the dense block.

    This is the order of SparseGPT, Wanda and ALPS: one pass through the block for all statistics, then the solves.

    Attributes:
        solver: Any layer solver.
        keep_zeros: Whether weights that are already zero stay zero.
        after_solve: What is done to each solved weight before it is written; None for nothing.
    """

    solver: LayerSolver
    keep_zeros: bool = False
    after_solve: AfterSolve | None = None

    needs_dense_stream: ClassVar[bool] = False
    needs_fisher: ClassVar[bool] = False

    @property
    def needs(self) -> type[TokenCount]:
        return self.solver.needs

    def note(self, block: Block, plan: Plan) -> str:
        return "" if block.architecture.known else FOUND

    def prune(self, block: Block, inputs: Activations, plan: Plan) -> Iterator[LayerResult | EpochResult]:
        yield from self.prune_layers(block, inputs, planned_layers(block, plan), plan)

    def block_memory(self, shapes: BlockShapes) -> Memory:
        """A pass for all statistics, then a solve for each layer."""
        solved = solve_bytes(self.solver, shapes.layers)
        if self.needs is TokenCount:
            return Memory(solved, [])
        squares = sum(features**2 for features in shapes.inputs) if issubclass(self.needs, Gram) else 0
        captured = shapes.batch * shapes.itemsize * sum(shapes.inputs)  # the inputs of a batch are held until its pass ends
        gathering = 8 * STORED * squares + shapes.batch * shapes.forward_bytes + captured
        return Memory(max(gathering, 4 * squares + solved), [shapes.stream])

    def prune_layers(self, block: Block, inputs: Activations, names: Sequence[str], plan: Plan) -> Iterator[LayerResult]:
        """Prune some layers of a block, with statistics from one pass."""
        statistics = collect_statistics(block, inputs, dict.fromkeys(names, self.solver.needs))
        owners = assign_owners(block, names)
        local = {name: statistics[name] for name in names if owners[name] == collectives.rank()}
        is_plain = not (self.keep_zeros or self.after_solve)
        if is_plain and isinstance(self.solver, NonBlockingSolver) and devices.queued(block.device):
            results = _prune_non_blocking(block, inputs, local, solver=self.solver, plan=plan)
        else:
            results = (self._prune_one(block, inputs, name, layer_stats, plan=plan) for name, layer_stats in local.items())
        yield from broadcast_results(block, owners, results)
        if self.after_solve:
            for name, owner in owners.items():
                self.after_solve.broadcast(block, name, owner)

    def _prune_one(self, block: Block, inputs: Activations, name: str, statistics: TokenCount, *, plan: Plan) -> LayerResult:
        """Prune one layer."""
        statistics.finalize()
        problem, routed = problem_of(block, name, statistics, self.keep_zeros), inputs.expert_tokens(block, name)
        return prune_layer(
            block, name, problem, solver=self.solver, plan=plan, after_solve=self.after_solve, routed_tokens=routed
        )


def collect_statistics(
    block: Block,
    inputs: Activations,
    needs: Mapping[str, type[TokenCount]],
    *,
    request: CaptureRequest | None = None,
    observe: Callable[[Capture], None] | None = None,
    advance: bool = False,
) -> dict[str, TokenCount]:
    """Collect the input statistics of layers in one pass through the block.

    Args:
        needs: By layer, the class of statistics.
        request: Further tensors to capture in the same pass.
        observe: Called with what is captured from each batch.
        advance: Whether the block is final, so that the pass may also compute the input of the next block.

    Returns:
        By layer, the statistics over all processes. Layers of one group share one object.
    """
    statistics: dict[str, TokenCount] = {}
    first: dict[str, TokenCount] = {}  # by the first layer of each group
    for group in block.architecture.groups:
        names = [name for name in group if name in needs]
        if not names:
            continue
        layer = block.layer(names[0])
        richest = max((needs[name] for name in names), key=lambda kind: kind.rank)
        first[names[0]] = richest(layer.in_features, layer.weight.device, inputs.window)
        statistics.update(dict.fromkeys(names, first[names[0]]))
    further = request or CaptureRequest()
    if further or any(kind is not TokenCount for kind in needs.values()):
        captures = CaptureRequest(list(dict.fromkeys([*first, *further.inputs])), further.outputs)
        for captured in inputs.run(block, captures, advance=advance):
            for name, shared in first.items():
                shared.update(captured.inputs[name])
            if observe:
                observe(captured)
            del captured  # its memory serves the next batch
    for shared in first.values():
        shared.reduce()
    return statistics


def _prune_non_blocking(
    block: Block, inputs: Activations, statistics: Mapping[str, TokenCount], *, solver: NonBlockingSolver, plan: Plan
) -> Iterator[LayerResult]:
    """Solve all layers with one device synchronisation, then write them. Layers that fail are solved by `prune_layer`."""
    clock = devices.Clock(block.device)
    weights: list[Tensor] = []
    scalars: list[Tensor] = []  # for each layer: success, pattern, zeros, weights removed, lost energy, total energy
    for name, layer_stats in statistics.items():
        layer_stats.finalize()
        problem, pattern = problem_of(block, name, layer_stats), plan[block.full_name(name)]
        if pattern.count_removed(problem.weight.shape):
            pattern, before = pattern.for_costs(problem.removal_costs), versions(problem)
            weight, success = solver.solve_async(problem, pattern)
            check_form(weight, problem, solver, name=block.full_name(name), before=before)
        else:
            weight, success = problem.weight, torch.ones((), dtype=torch.bool, device=block.device)
        weights.append(block.rounded_to_storage(name, weight))
        rounded = weights[-1].float()
        right, kept = pattern.holds_async(rounded)
        zeros = rounded.numel() - kept, count_removed(rounded, problem)
        scalars += [success & rounded.isfinite().all(), right, *zeros, *problem.energies(rounded)]
        clock.mark()
    values = iter(devices.to_python(scalars))
    for (name, layer_stats), weight, seconds in zip(statistics.items(), weights, clock.seconds(), strict=True):
        succeeded, holds, count, removed, lost, total = (next(values) for _ in range(6))
        routed, wanted = inputs.expert_tokens(block, name), plan[block.full_name(name)].count_removed(weight.shape)
        is_pruned = holds and removed <= wanted + SPARE * weight.numel()
        if not (succeeded and is_pruned and is_finite_pair(lost, total)) or total < MIN_ENERGY:
            problem = problem_of(block, name, layer_stats)
            yield prune_layer(block, name, problem, solver=solver, plan=plan, routed_tokens=routed)
            continue
        block.assign(name, weight)
        yield layer_result(
            block,
            name,
            layer_stats,
            plan=plan,
            zeros=int(count),
            error=relative_error(lost, total),
            damping=getattr(solver, "damping", None) if wanted else None,
            seconds=seconds,
            routed_tokens=routed,
        )


def problem_of(block: Block, name: str, moments: TokenCount, keep_zeros: bool = False) -> LayerProblem:
    """The local problem of a layer, with a float32 copy of its current weight."""
    weight = block.layer(name).weight.detach().to(torch.float32, copy=True)
    return LayerProblem(weight, moments, pruned_mask=zero_mask(weight, keep_zeros))


def zero_mask(weight: Tensor, keep_zeros: bool) -> Tensor | None:
    """True where a weight is zero; None if there are no zeros or they need not stay."""
    pruned_mask = weight == 0 if keep_zeros else None
    return None if pruned_mask is None or not bool(pruned_mask.any()) else pruned_mask


def prune_layer(
    block: Block,
    name: str,
    problem: LayerProblem,
    *,
    solver: LayerSolver,
    plan: Plan,
    after_solve: AfterSolve | None = None,
    routed_tokens: int | None = None,
) -> LayerResult:
    """Solve one layer, project the weight by `after_solve`, and write it."""
    started = time.perf_counter()
    full_name = block.full_name(name)
    weight, damping = solve(solver, problem, plan[full_name], name=full_name)
    if after_solve:
        weight = after_solve.project(block, name, weight, problem)
    block.write(name, weight)
    seconds = time.perf_counter() - started
    return measure_layer(block, name, problem, plan=plan, damping=damping, seconds=seconds, routed_tokens=routed_tokens)


def solve(solver: LayerSolver, problem: LayerProblem, pattern: Pattern, *, name: str) -> tuple[Tensor, float | None]:
    """Solve a layer problem by `solve_damped`, and check the answer.

    A layer that received no token, as experts of an unknown model family may, loses its smallest weights where the solver needs
    inputs.

    Args:
        name: Full name of the layer, for errors.

    Returns:
        The weight, (out, in), and the damping used; None for solvers without damping.

    Raises:
        SingularGram: If a factorization fails even with `LARGEST_DAMPING`.
        NonFinite: If the weight is not finite.
        BrokenContract: If the solver breaks a rule of `methods.contract`.
    """
    if pattern.count_removed(problem.weight.shape) == 0:
        mask = problem.pruned_mask
        return problem.weight.clone() if mask is None else problem.weight.masked_fill(mask, 0), None
    if problem.inputs.tokens == 0 and solver.needs is not TokenCount:
        score = problem.weight.abs() if problem.row_scale is None else problem.weight.abs() * problem.row_scale
        return problem.weight * problem.keep(pattern, score), None
    pattern, before = pattern.for_costs(problem.removal_costs), versions(problem)
    try:
        weight, damping = solve_damped(solver, problem, pattern)
        check_form(weight, problem, solver, name=name, before=before)
        if not all_finite(weight):
            kind = type(solver).__name__
            reason = f"The pruned weight of {name} by {kind} is not finite."
            raise NonFinite(f"{reason} Try `dtype='float32'`, or more calibration tokens.")
    except (SingularGram, NonFinite) as error:
        if isinstance(problem.inputs, InputRMS) and not all_finite(problem.rms):
            message = f"The inputs of {name} overflow float32. Look for weights before it that are far too large."
            raise NonFinite(message) from error
        error.add_note(f"in layer {name}, {problem.inputs.tokens:,} calibration tokens")
        raise
    check_zeros(weight, problem, pattern, solver, name=name)
    return weight, damping


def solve_damped(solver: LayerSolver, problem: LayerProblem, pattern: Pattern) -> tuple[Tensor, float | None]:
    """The weight that a solver returns, and its damping, which is raised tenfold as often as a factorization fails."""
    while True:
        damping: float | None = getattr(solver, "damping", None)
        try:
            return solver.solve(problem, pattern), damping
        except SingularGram:
            if damping is None or damping >= LARGEST_DAMPING:
                raise
            raised: Any = {"damping": min(max(10 * damping, 1e-3), LARGEST_DAMPING)}
            solver = replace(solver, **raised)  # type: ignore[type-var]


def measure_layer(block: Block, name: str, problem: LayerProblem, **fields: Any) -> LayerResult:
    """The result of a layer whose weight is written."""
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
