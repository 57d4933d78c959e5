"""Layer-wise pruning: one separate problem for each linear layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsellm.activations.streams import Capture, CaptureRequest
from sparsellm.activations.walk import Activations
from sparsellm.methods import EpochResult, LayerResult, Plan, planned_layers
from sparsellm.methods.layer_solve import assign_owners, broadcast_results, layer_result, problem_of, prune_layer
from sparsellm.models.blocks import Block
from sparsellm.runtime import collectives, devices
from sparsellm.solvers import LayerSolver, NonBlockingSolver
from sparsellm.solvers.problem import MIN_ENERGY, is_finite_pair, relative_error
from sparsellm.solvers.statistics import TokenCount

FOUND = "its model family is not known; the linear layers found in its blocks were pruned (docs/families.md)"
"""Note of a layer-wise method for a block of a family that is not in the table."""


@dataclass(frozen=True)
class LayerWise:
    """Prune each layer for its own output (paper eq. 2), on the inputs of the dense block.

    This is the order of SparseGPT, Wanda and ALPS: one pass through the block for all statistics, then the solves.

    Attributes:
        solver: Any layer solver.
        keep_zeros: Whether weights that are already zero stay zero.
    """

    solver: LayerSolver
    keep_zeros: bool = False

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

    def prune(self, block: Block, inputs: Activations, plan: Plan) -> Iterator[LayerResult | EpochResult]:
        yield from self.prune_layers(block, inputs, planned_layers(block, plan), plan)

    def prune_layers(self, block: Block, inputs: Activations, names: Sequence[str], plan: Plan) -> Iterator[LayerResult]:
        """Prune some layers of a block, with statistics from one pass."""
        statistics = collect_statistics(block, inputs, dict.fromkeys(names, self.solver.needs))
        owners = assign_owners(block, names)
        local = {name: statistics[name] for name in names if owners[name] == collectives.rank()}
        if isinstance(self.solver, NonBlockingSolver) and devices.queued(block.device) and not self.keep_zeros:
            results = _prune_non_blocking(block, inputs, local, solver=self.solver, plan=plan)
        else:
            results = (self._prune_one(block, inputs, name, layer_stats, plan=plan) for name, layer_stats in local.items())
        yield from broadcast_results(block, owners, results)

    def _prune_one(self, block: Block, inputs: Activations, name: str, statistics: TokenCount, *, plan: Plan) -> LayerResult:
        """Prune one layer."""
        statistics.finalize()
        problem, routed = problem_of(block, name, statistics, self.keep_zeros), inputs.expert_tokens(block, name)
        return prune_layer(block, name, problem, solver=self.solver, plan=plan, routed_tokens=routed)


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
        block: The block.
        inputs: Its inputs.
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
    scalars: list[Tensor] = []  # for each layer: success, zeros, lost energy, total energy
    for name, layer_stats in statistics.items():
        layer_stats.finalize()
        problem, pattern = problem_of(block, name, layer_stats), plan[block.full_name(name)]
        if pattern.count_removed(problem.weight.numel()):
            weight, success = solver.solve_async(problem, pattern)
        else:
            weight, success = problem.weight, torch.ones((), dtype=torch.bool, device=block.device)
        weights.append(block.rounded_to_storage(name, weight))
        rounded = weights[-1].float()
        scalars += [success & rounded.isfinite().all(), (rounded == 0).sum(), *problem.energies(rounded)]
        clock.mark()
    values = iter(devices.to_python(scalars))
    for (name, layer_stats), weight, seconds in zip(statistics.items(), weights, clock.seconds(), strict=True):
        succeeded, zeros, lost, total = (next(values) for _ in range(4))
        routed = inputs.expert_tokens(block, name)
        if not succeeded or not is_finite_pair(lost, total) or total < MIN_ENERGY:
            problem = problem_of(block, name, layer_stats)
            yield prune_layer(block, name, problem, solver=solver, plan=plan, routed_tokens=routed)
            continue
        block.assign(name, weight)
        is_pruned = plan[block.full_name(name)].count_removed(weight.numel())
        yield layer_result(
            block,
            name,
            layer_stats,
            plan=plan,
            zeros=int(zeros),
            error=relative_error(lost, total),
            damping=getattr(solver, "damping", None) if is_pruned else None,
            seconds=seconds,
            routed_tokens=routed,
        )
