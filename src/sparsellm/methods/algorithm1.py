"""Algorithm 1 of the SparseLLM paper: prunes the layers of a feed-forward part jointly, by means of auxiliary signals."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from torch import Tensor

from sparsellm.activations.streams import Capture, CaptureRequest
from sparsellm.activations.walk import Activations
from sparsellm.errors import InvalidSetting, NonFinite, UnsupportedModel
from sparsellm.methods import (
    UNKNOWN_FAMILY,
    AfterSolve,
    BlockShapes,
    EpochResult,
    LayerResult,
    Memory,
    Plan,
    assign_owners,
    broadcast_results,
    coupled_parts,
    planned_layers,
    solve_in_parallel,
    unplanned_layers,
)
from sparsellm.methods.auxiliary_signals import ERROR_TOKENS, AuxiliarySignals
from sparsellm.methods.layerwise import LayerWise, collect_statistics, measure_layer, problem_of, prune_layer, solve
from sparsellm.models.blocks import Block
from sparsellm.models.feedforward import FeedForward
from sparsellm.runtime import collectives
from sparsellm.solvers import LayerSolver
from sparsellm.solvers.problem import LayerProblem, solve_bytes
from sparsellm.solvers.sparsegpt import SparseGPT
from sparsellm.solvers.statistics import STORED, Gram, TokenCount


@dataclass(frozen=True)
class Algorithm1:
    r"""Prune a block's feed-forward layers for the output of the whole part, and its attention layers for their own outputs.

    Alternates between the weights, each solved by the layer solver toward the current signals, and the signals, each updated in
    closed form (`sparsellm.methods.auxiliary_signals`). Epoch 1 prunes the dense weights, so one epoch is layer-wise pruning,
    to the bit.

    Follows Bai et al., SparseLLM: towards global pruning of pre-trained language models (NeurIPS 2024), Algorithm 1, eqs. 5-12.

    Differences from the paper: the regressions use a Cholesky factorization and a ridge, not a pseudo-inverse of the
    activations; the activation update inverts a (model, model) matrix, not (hidden, hidden); the gate update finds the global
    minimizer, not the best entry of a table; `keep_best`.

    Differences from its code: fc2 is solved by least squares, not ten gradient steps; damping does not accumulate; signals are
    float32 unless products are in bfloat16; no block is treated differently because of its number.

    Attributes:
        solver: Any layer solver.
        epochs: K >= 1; 2-4 in the paper.
        alpha: Weight of the layers' errors in the objective.
        beta: Weight of the activation's error. Only beta / alpha affects the result.
        ridge: Regularization of the regressions toward the dense weight, relative to the mean diagonal of the Gram matrix.
        blocks: The set Omega: numbers of the blocks whose feed-forward layers form one problem. None for every block; empty for
            layer-wise pruning.
        keep_best: Whether to return the epoch with the smallest true feed-forward error instead of the last one.
        keep_zeros: Whether weights that are already zero stay zero.
        after_solve: What is done to each solved weight before it is written; None for nothing.
    """

    solver: LayerSolver = field(default_factory=SparseGPT)
    epochs: int = 4
    alpha: float = 0.1
    beta: float = 0.1
    ridge: float = 1e-3
    blocks: frozenset[int] | None = None
    keep_best: bool = False
    keep_zeros: bool = False
    after_solve: AfterSolve | None = None

    needs_dense_stream: ClassVar[bool] = False
    needs_fisher: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.epochs < 1 or not self.alpha > 0 or not self.beta > 0 or not self.ridge >= 0:
            raise InvalidSetting(
                "Algorithm 1 needs epochs >= 1, alpha > 0, beta > 0 and ridge >= 0, "
                f"got {self.epochs}, {self.alpha}, {self.beta} and {self.ridge}."
            )

    @property
    def needs(self) -> type[TokenCount]:
        return self.solver.needs if self.blocks == frozenset() else Gram

    def check_blocks(self, blocks: Sequence[Block], model: str) -> None:
        """Raise UnsupportedModel if the method cannot solve the feed-forward layers of a model of this name."""
        if self.blocks == frozenset() or not blocks[0].architecture.known:
            return
        if not any(block.architecture.feed_forward_parts for block in blocks):
            raise UnsupportedModel(
                f"The feed-forward part of {model} has an activation function that SparseLLM does not support. "
                "Pass the setting `blocks` none, or a layer-wise method such as `method='alps'`."
            )

    def note(self, block: Block, plan: Plan) -> str:
        if not self._in_scope(block):
            return ""
        if not block.architecture.known:
            return UNKNOWN_FAMILY
        excluded = unplanned_layers(block, plan)
        return f"pruned layer-wise, since the plan excludes {', '.join(excluded)}" if excluded else ""

    def prune(self, block: Block, inputs: Activations, plan: Plan) -> Iterator[LayerResult | EpochResult]:
        parts = coupled_parts(block, plan) if self._in_scope(block) else []
        if self._in_scope(block) and block.architecture.known and not block.architecture.feed_forward_parts:
            raise UnsupportedModel(
                f"The feed-forward part of {block.name} has an activation function that SparseLLM does not support. "
                "Use the setting `blocks` none, or a layer-wise method."
            )
        if parts:
            yield from self._prune_coupled(block, parts, inputs, plan)
        else:
            yield from LayerWise(self.solver, self.keep_zeros, self.after_solve).prune(block, inputs, plan)

    def block_memory(self, shapes: BlockShapes) -> Memory:
        """Layer-wise pruning, and in further epochs the signals of the parts and new solves of their layers."""
        first = LayerWise(self.solver, self.keep_zeros).block_memory(shapes)
        if self.blocks == frozenset() or not shapes.parts:
            return first
        width, hidden, projections = shapes.width, shapes.hidden, shapes.projections
        layers, tokens = [*[(hidden, width)] * projections, (width, hidden)], shapes.parts * shapes.share * shapes.tokens
        part = shapes.parts * (projections + 1) * width * hidden
        # All dense weights; of the part also the targets, their products, this epoch's weights and the best.
        weights = 4 * (sum(outputs * inputs for outputs, inputs in shapes.layers) + 4 * part)
        signals = tokens * (2 * shapes.itemsize * width + 4 * projections * hidden)
        sums = 8 * part + 8 * STORED * hidden**2 + 4 * 4 * shapes.length * hidden
        solved = max(sums, solve_bytes(self.solver, layers))
        return Memory(weights + signals + solved + 4 * sum(n**2 for n in shapes.inputs), first.lists)

    def _in_scope(self, block: Block) -> bool:
        """Whether the block's feed-forward layers are in Omega."""
        return not block.is_head and (self.blocks is None or block.index in self.blocks)

    def _prune_coupled(
        self, block: Block, parts: Sequence[FeedForward], inputs: Activations, plan: Plan
    ) -> Iterator[LayerResult | EpochResult]:
        """`prune` for a block with feed-forward parts whose layers are all planned."""
        coupled = {name for part in parts for name in (*part.in_proj, part.out_proj)}
        needs = {name: Gram if name in coupled else self.solver.needs for name in planned_layers(block, plan)}
        ratio, error_tokens = self.beta / self.alpha, None if self.keep_best else ERROR_TOKENS
        signals = [AuxiliarySignals(block, part, ratio, updated=self.epochs > 1, error_tokens=error_tokens) for part in parts]
        requests = [part_signals.request for part_signals in signals]
        request = CaptureRequest(
            [name for one in requests for name in one.inputs], [name for one in requests for name in one.outputs]
        )

        def observe(captured: Capture) -> None:
            for part_signals in signals:
                part_signals.append(captured)

        statistics = collect_statistics(block, inputs, needs, request=request, observe=observe)
        for layer_stats in statistics.values():
            layer_stats.finalize()
        problems = {name: problem_of(block, name, layer_stats, self.keep_zeros) for name, layer_stats in statistics.items()}
        owners = assign_owners(block, [name for name in problems if name not in coupled])
        local = [name for name, owner in owners.items() if owner == collectives.rank()]
        results = (
            prune_layer(
                block,
                name,
                problems[name],
                solver=self.solver,
                plan=plan,
                after_solve=self.after_solve,
                routed_tokens=inputs.expert_tokens(block, name),
            )
            for name in local
        )
        yield from broadcast_results(block, owners, results)
        if self.after_solve:
            for name, owner in owners.items():
                self.after_solve.broadcast(block, name, owner)
        for part, part_signals in zip(parts, signals, strict=True):
            part_problems = {name: problems[name] for name in (*part.in_proj, part.out_proj)}
            for result in self._prune_part(block, part_signals, part_problems, plan):
                yield (
                    replace(result, routed_tokens=inputs.expert_tokens(block, part.out_proj))
                    if isinstance(result, LayerResult)
                    else result
                )

    def _prune_part(
        self, block: Block, signals: AuxiliarySignals, problems: dict[str, LayerProblem], plan: Plan
    ) -> Iterator[LayerResult | EpochResult]:
        """Prune one feed-forward part: the epochs, then the results of its layers. `problems`: those of the dense weights."""
        signals.start({name: problem.inputs for name, problem in problems.items() if isinstance(problem.inputs, Gram)})
        current = problems
        best = PartSolution({}, {}, 0, float("inf"))
        for epoch in range(1, self.epochs + 1):
            solution = self._solve_all(block, current, plan, epoch)
            after_weights, last = self.alpha * signals.objective(solution.weights), epoch == self.epochs
            solution.error = signals.error(solution.weights) if last else signals.refit(solution.weights)
            better = solution.error < best.error or not self.keep_best
            yield EpochResult(block.name, epoch, "published", solution.error, better, after_weights)
            if better:
                best = solution
            if not last:
                current = {
                    name: replace(problem, pruned_mask=problems[name].pruned_mask)
                    for name, problem in signals.problems(self.ridge).items()
                }

        if not best.weights:
            raise NonFinite(f"The feed-forward error of {block.name} is not finite in any epoch. Try `dtype='float32'`.")
        for name, weight in best.weights.items():
            final = weight
            if self.after_solve:  # toward the solved weight, since its targets are not kept
                problem = replace(problems[name], weight=weight)
                final = self.after_solve.project(block, name, weight, problem)
                self.after_solve.broadcast(block, name, 0)
            block.write(name, final)
            damping, seconds = best.spent[name]
            yield measure_layer(block, name, problems[name], plan=plan, damping=damping, seconds=seconds, epoch=best.epoch)

    def _solve_all(self, block: Block, problems: dict[str, LayerProblem], plan: Plan, epoch: int) -> PartSolution:
        """Solve the current problem of every layer of a part; the error is not computed yet."""

        def solve_layer(name: str) -> tuple[Tensor, list[float | None]]:
            started, full_name = time.perf_counter(), block.full_name(name)
            weight, damping = solve(self.solver, problems[name], plan[full_name], name=full_name)
            return weight, [damping, time.perf_counter() - started]

        solution = PartSolution({}, {}, epoch, float("inf"))
        for name, weight, (damping, seconds) in solve_in_parallel(block, list(problems), solve_layer):
            solution.weights[name], solution.spent[name] = weight, (damping, seconds)
        return solution


@dataclass
class PartSolution:
    """The result of one epoch.

    Attributes:
        weights: Pruned weights by layer, (out, in) float32.
        spent: By layer, the damping used and the seconds.
        error: True feed-forward error of the weights, relative.
    """

    weights: dict[str, Tensor]
    spent: dict[str, tuple[float | None, float]]
    epoch: int
    error: float
