"""Local pruning: one problem for every linear layer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sparsellm.activations.hooks import Hook, Hooks
from sparsellm.activations.streams import Activations
from sparsellm.errors import NonFinite, SingularGram
from sparsellm.methods import EpochResult, LayerResult, Plan
from sparsellm.methods.parallel_solve import assign_owners, broadcast_results
from sparsellm.models.blocks import Block
from sparsellm.models.feedforward import FeedForward
from sparsellm.runtime import collectives, devices
from sparsellm.runtime.costs import SUMS, BlockCost, BlockShapes
from sparsellm.solvers import LayerSolver, NonBlockingSolver
from sparsellm.solvers.criteria import Magnitude
from sparsellm.solvers.linalg import all_finite, count_zeros
from sparsellm.solvers.patterns import Pattern
from sparsellm.solvers.problem import MIN_ENERGY, LayerProblem, is_finite_pair, relative_error
from sparsellm.solvers.statistics import Gram, InputRMS, TokenCount

LARGEST_DAMPING = 1.0
"""Where raising the damping ends: beyond the mean of the diagonal nothing of the inputs is left."""


@dataclass(frozen=True)
class LayerWise:
    """Every layer is pruned for its own outputs (paper eq. 2), on what it reads before any layer of its block is pruned.

    That is the order of SparseGPT, Wanda and ALPS: one pass through the block for all its moments, then the solves.
    true_sequential: on what it really reads, the layers before it in its block pruned too, as SparseGPT's code has it on
    demand. Passes do not run what is settled again, so that this takes fewer operations: those of one pass through the block,
    where there is memory for what the feed-forward's writer reads. keep_zeros: weights that are zero already stay zero.
    """

    solver: LayerSolver
    keep_zeros: bool = False
    true_sequential: bool = False

    @property
    def needs(self) -> type[TokenCount]:
        return self.solver.needs

    @property
    def needs_dense_stream(self) -> bool:
        return False

    @property
    def needs_fisher(self) -> bool:
        return False

    def note(self, block: Block, plan: Plan) -> str:
        return "" if block.architecture.known else FOUND

    def cost(self, shapes: BlockShapes) -> BlockCost:
        """What a block takes: a pass for all statistics, then a solve for each layer."""
        exact = issubclass(self.needs, Gram)
        solved = shapes.solve_bytes(self.solver, shapes.layers)
        work = shapes.solves(self.solver, shapes.layers, 2 if exact else 0)
        if self.needs is TokenCount:
            return BlockCost(solved, [], work)
        squares = sum(features**2 for features in shapes.grams) if exact else 0
        work += shapes.forward(shapes.tokens * (0.5 if self.true_sequential else 1))  # what is settled does not run again
        work = sum((shapes.gram(features) for features in shapes.grams if exact), work)
        memory = max(SUMS * squares + shapes.batch * shapes.forward_bytes, 4 * squares + solved)
        return BlockCost(memory, [shapes.stream], work)

    def prune(self, block: Block, inputs: Activations, plan: Plan) -> Iterator[LayerResult | EpochResult]:
        names = planned_layers(block, plan)
        stages = stages_of(block, names) if self.true_sequential else [names]
        for stage in stages:
            yield from self._prune_stage(block, inputs, stage, plan)
            inputs.mark_final(block, stage)

    def _prune_stage(self, block: Block, inputs: Activations, names: Sequence[str], plan: Plan) -> Iterator[LayerResult]:
        """Layers that are pruned on one pass."""
        last = names[0] if self.true_sequential else None
        moments = collect_statistics(block, inputs, dict.fromkeys(names, self.solver.needs), last=last)
        whose = assign_owners(block, names)
        local = {name: moments[name] for name in names if whose[name] == collectives.rank()}
        if isinstance(self.solver, NonBlockingSolver) and devices.queued(block.device) and not self.keep_zeros:
            steps = _prune_non_blocking(block, inputs, self.solver, local, plan)
        else:
            steps = (self._prune_one(block, inputs, name, known, plan) for name, known in local.items())
        yield from broadcast_results(block, whose, steps)

    def _prune_one(self, block: Block, inputs: Activations, name: str, known: TokenCount, plan: Plan) -> LayerResult:
        """One layer by itself."""
        known.finalize()
        problem = problem_of(block, name, known, self.keep_zeros)
        return prune_layer(block, name, self.solver, problem, plan, inputs.expert_tokens(block, name))


def stages_of(block: Block, names: Sequence[str]) -> list[list[str]]:
    """These layers, in running order, as they are pruned: those of a group together, and the same of all experts."""
    stages: dict[str, list[str]] = {}
    for group in block.architecture.groups:
        wanted = [name for name in group if name in names]
        view = block.views.get(group[0])
        expert = view is not None and view.expert is not None
        if wanted:
            stages.setdefault(group[0].rpartition(".")[2] if expert else group[0], []).extend(wanted)
    return list(stages.values())


def coupled_parts(block: Block, plan: Plan) -> list[FeedForward]:
    """The block's feed-forward parts of which every layer is planned: those that can be one problem."""
    there = set(planned_layers(block, plan))
    return [part for part in block.architecture.feed_forward_parts if {*part.in_proj, part.out_proj} <= there]


def unplanned_layers(block: Block, plan: Plan) -> list[str]:
    """The layers that the plan lacks of feed-forward parts that it names in part."""
    there = set(planned_layers(block, plan))
    wanted = [{*part.in_proj, part.out_proj} for part in block.architecture.feed_forward_parts]
    return sorted(set().union(*(names - there for names in wanted if names & there)))


FOUND = "models of its form are not known: its layers are those that were found in its blocks (docs/families.md)"
"""What the report of a layer-wise method says of a block of a family that is not in the table."""

UNKNOWN = (
    "its layers were pruned one by one, since models of its form are not known (docs/families.md says how to describe one)"
)
"""What a report says of a block of a family that is not in the table."""


def planned_layers(block: Block, plan: Plan) -> list[str]:
    """The block's layers that the plan names, in running order."""
    return [name for name in block.layers if block.full_name(name) in plan]


def collect_statistics(
    block: Block,
    inputs: Activations,
    needs: Mapping[str, type[TokenCount]],
    reads: Hooks | None = None,
    writes: Hooks | None = None,
    onward: bool = False,
    last: str | None = None,
) -> dict[str, TokenCount]:
    """The moments of each named layer, from one pass through the block; layers of one group share theirs.

    needs: the class of moments for every layer wanted. reads, writes: other looks to take in the same pass. onward: whether the
    block will stay as it is, so that what enters it may travel on. last: as for `Activations.watch`.
    """
    moments: dict[str, TokenCount] = {}
    looks: dict[str, list[Hook]] = {name: list(many) for name, many in (reads or {}).items()}
    for group in block.architecture.groups:
        wanted = [name for name in group if name in needs]
        if not wanted:
            continue
        layer = block.layer(wanted[0])
        richest = max((needs[name] for name in wanted), key=lambda kind: len(kind.__mro__))
        shared = richest(layer.in_features, layer.weight.device, inputs.window)
        moments.update(dict.fromkeys(wanted, shared))
        looks.setdefault(wanted[0], []).append(shared.update)
    if any(kind is not TokenCount for kind in needs.values()) or reads or writes:
        inputs.run_with_hooks(block, looks, writes, onward, last)
    for shared in dict.fromkeys(moments.values()):
        shared.reduce()
    return moments


def problem_of(block: Block, name: str, moments: TokenCount, keep_zeros: bool = False) -> LayerProblem:
    """A layer's local problem, with a float32 copy of its weight as it now is. keep_zeros: what is zero in it stays so."""
    weight = block.layer(name).weight.detach().to(torch.float32, copy=True)
    return LayerProblem(weight, moments, pruned_mask=zero_mask(weight, keep_zeros))


def zero_mask(weight: Tensor, keep_zeros: bool) -> Tensor | None:
    """Where a weight is zero, if that is to be kept and there are any."""
    pruned_mask = weight == 0 if keep_zeros else None
    return None if pruned_mask is None or not bool(pruned_mask.any()) else pruned_mask


def prune_layer(
    block: Block, name: str, solver: LayerSolver, problem: LayerProblem, plan: Plan, routed: int | None = None
) -> LayerResult:
    """Solve one layer by itself and write the answer. routed: tokens that go to its expert, if it belongs to one."""
    started = time.perf_counter()
    full = block.full_name(name)
    weight, damping = solve(solver, problem, plan[full], full)
    block.write(name, weight)
    return layer_result(block, name, plan, problem, damping, 1, time.perf_counter() - started, routed)


def _prune_non_blocking(
    block: Block, inputs: Activations, solver: NonBlockingSolver, moments: Mapping[str, TokenCount], plan: Plan
) -> Iterator[LayerResult]:
    """Solve all layers with one wait for the device, then write them; one that failed is pruned by itself, as elsewhere."""
    clock = devices.Clock(block.device)
    answers: list[Tensor] = []
    message: list[Tensor] = []
    for name, known in moments.items():
        known.finalize()
        problem, pattern = problem_of(block, name, known), plan[block.full_name(name)]
        if pattern.count_removed(problem.weight.numel()):
            weight, sound = solver.solve_async(problem, pattern)
        else:
            weight, sound = problem.weight, torch.ones((), dtype=torch.bool, device=block.device)
        answers.append(block.rounded_to_storage(name, weight))
        kept = answers[-1].float()
        message += [sound & kept.isfinite().all(), (kept == 0).sum(), *problem.energies(kept)]
        clock.mark()
    values = devices.to_python(message)
    for number, ((name, known), answer, seconds) in enumerate(zip(moments.items(), answers, clock.seconds(), strict=True)):
        succeeded, zeros, lost, had = values[4 * number : 4 * number + 4]
        routed = inputs.expert_tokens(block, name)
        if not succeeded or not is_finite_pair(lost, had) or had < MIN_ENERGY:
            yield prune_layer(block, name, solver, problem_of(block, name, known), plan, routed)
            continue
        block.assign(name, answer)
        damping = getattr(solver, "damping", None) if plan[block.full_name(name)].count_removed(answer.numel()) else None
        yield _result(block, name, plan, known, int(zeros), relative_error(lost, had), damping, 1, seconds, routed)


def solve(solver: LayerSolver, problem: LayerProblem, pattern: Pattern, name: str) -> tuple[Tensor, float | None]:
    """The solver's weight and the damping really used: raised tenfold, as often as needed, where a factorisation fails.

    A layer that saw no token, as an expert of a form that is not known may, loses its smallest weights instead.
    Raises SingularGram when LARGEST_DAMPING does not help, NonFinite when the answer is not finite; both name the layer.
    """
    if pattern.count_removed(problem.weight.numel()) == 0:
        return problem.weight.clone() if problem.pruned_mask is None else problem.weight.masked_fill(
            problem.pruned_mask, 0
        ), None
    if problem.inputs.tokens == 0:
        return Magnitude().solve(problem, pattern), None
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
            raise NonFinite(f"The pruned weight of {name} is not finite. Try --dtype float32, or more calibration tokens.")
    except (SingularGram, NonFinite) as error:
        if isinstance(problem.inputs, InputRMS) and not all_finite(problem.rms):
            why = f"The inputs of {name} overflow float32. Look for weights before it that are far too large."
            raise NonFinite(why) from error
        error.add_note(f"in layer {name}, {problem.inputs.tokens:,} calibration tokens")
        raise
    return weight, damping


def layer_result(
    block: Block,
    name: str,
    plan: Plan,
    problem: LayerProblem,
    damping: float | None,
    epoch: int,
    seconds: float,
    routed: int | None = None,
) -> LayerResult:
    """The result for a layer that was written, as it now stands. problem: the dense weight's."""
    weight = block.layer(name).weight.float()
    try:
        zeros, error = count_zeros(weight), problem.error(weight)
    except NonFinite as failure:
        failure.add_note(f"in layer {block.full_name(name)}")
        raise
    return _result(block, name, plan, problem.inputs, zeros, error, damping, epoch, seconds, routed)


def _result(
    block: Block,
    name: str,
    plan: Plan,
    moments: TokenCount,
    zeros: int,
    error: float,
    damping: float | None,
    epoch: int,
    seconds: float,
    routed: int | None,
) -> LayerResult:
    """What is said of a layer, from what was found of it."""
    layer, full = block.layer(name), block.full_name(name)
    return LayerResult(
        name=full,
        pattern=str(plan[full]),
        shape=(layer.out_features, layer.in_features),
        zeros=zeros,
        error=error,
        known=type(moments).__name__,
        damping=damping,
        tokens=moments.tokens,
        epoch=epoch,
        seconds=seconds,
        routed_tokens=routed,
    )
