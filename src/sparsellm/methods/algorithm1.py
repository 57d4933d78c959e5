"""SparseLLM as published: the layers of a feed-forward part pruned towards its output, through auxiliary signals."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from sparsellm.activations.streams import Activations
from sparsellm.errors import InvalidSetting, NonFinite, UnsupportedModel
from sparsellm.methods import EpochResult, LayerResult, Plan
from sparsellm.methods.auxiliary_signals import AuxiliarySignals
from sparsellm.methods.layerwise import (
    UNKNOWN,
    LayerWise,
    collect_statistics,
    coupled_parts,
    layer_result,
    planned_layers,
    problem_of,
    prune_layer,
    solve,
    unplanned_layers,
)
from sparsellm.methods.parallel_solve import assign_owners, broadcast_results, solve_in_parallel
from sparsellm.models.blocks import Block
from sparsellm.models.feedforward import FeedForward
from sparsellm.runtime import collectives
from sparsellm.solvers import LayerSolver
from sparsellm.solvers.problem import LayerProblem
from sparsellm.solvers.sparsegpt import SparseGPT
from sparsellm.solvers.statistics import Gram, TokenCount


@dataclass(frozen=True)
class PublishedSparseLLM:
    r"""Prune a block's feed-forward layers for the output of the whole part; its attention layers for their own.

    Alternates between the weights, each the solver's answer to a layer problem toward the present signals, and the signals,
    each in closed form (`sparsellm.models.feedforward`). Epoch 1 prunes the dense weights themselves, so one epoch is local
    pruning, bit for bit.

    Follows Bai et al., SparseLLM: towards global pruning of pre-trained language models (NeurIPS 2024), Algorithm 1, eqs. 5-12.
    Departs from it: least squares by Cholesky with a ridge, not by a pseudo-inverse of the activations; the activation step
    inverts (model, model), not (hidden, hidden); the gate's global minimiser, not a table's; `keep_best`.
    Departs from its code: fc2 by least squares, not ten gradient steps; damping does not accumulate; float32 signals; no block
    is special-cased by its number.

    solver: any layer solver. epochs: K >= 1; 2-4 in the paper. alpha, beta: weights of fitting the layers and of fitting the
    activation; only beta / alpha changes the result. ridge: of the least squares, toward the dense weight, as a share of the
    Gram's mean diagonal. couple: the set Omega, as the numbers of the blocks whose feed-forward layers form one problem: None
    for every block, empty for local pruning. keep_best: return the epoch of the smallest true feed-forward error, not the last.
    keep_zeros: weights that are zero already stay zero.
    """

    solver: LayerSolver = field(default_factory=SparseGPT)
    epochs: int = 4
    alpha: float = 0.1
    beta: float = 0.1
    ridge: float = 1e-3
    scope: frozenset[int] | None = None
    keep_best: bool = False
    keep_zeros: bool = False

    def __post_init__(self) -> None:
        if self.epochs < 1 or not self.alpha > 0 or not self.beta > 0 or not self.ridge >= 0:
            raise InvalidSetting(
                "SparseLLM needs epochs >= 1, alpha > 0, beta > 0 and ridge >= 0, "
                f"got {self.epochs}, {self.alpha}, {self.beta} and {self.ridge}."
            )

    @property
    def needs(self) -> type[TokenCount]:
        return self.solver.needs if self.scope == frozenset() else Gram

    @property
    def needs_dense_stream(self) -> bool:
        return False

    @property
    def needs_fisher(self) -> bool:
        return False

    def note(self, block: Block, plan: Plan) -> str:
        if not self._wants(block):
            return ""
        if not block.architecture.known:
            return UNKNOWN
        left = unplanned_layers(block, plan)
        return f"pruned layer-wise, since the plan excludes {', '.join(left)}" if left else ""

    def prune(self, block: Block, inputs: Activations, plan: Plan) -> Iterator[LayerResult | EpochResult]:
        parts = coupled_parts(block, plan) if self._wants(block) else []
        if self._wants(block) and block.architecture.known and not block.architecture.feed_forward_parts:
            raise UnsupportedModel(
                f"The feed-forward part of {block.name} has an activation that SparseLLM does not solve. "
                "Use --scope none, or a layer-wise method."
            )
        if parts:
            yield from self._prune_coupled(block, parts, inputs, plan)
        else:
            yield from LayerWise(self.solver, self.keep_zeros).prune(block, inputs, plan)

    def _wants(self, block: Block) -> bool:
        """Whether the block's feed-forward layers are in Omega."""
        return self.scope is None or block.index in self.scope

    def _prune_coupled(
        self, block: Block, parts: Sequence[FeedForward], inputs: Activations, plan: Plan
    ) -> Iterator[LayerResult | EpochResult]:
        """`prune` for a block with feed-forward parts whose layers are all planned."""
        together = {name for part in parts for name in (*part.in_proj, part.out_proj)}
        needs = {name: Gram if name in together else self.solver.needs for name in planned_layers(block, plan)}
        signals = [AuxiliarySignals(block, part, self.beta / self.alpha) for part in parts]
        looks = [some.hooks() for some in signals]
        reads = {name: many for looked, _ in looks for name, many in looked.items()}
        writes = {name: many for _, looked in looks for name, many in looked.items()}
        moments = collect_statistics(block, inputs, needs, reads, writes)
        problems = {name: problem_of(block, name, known, self.keep_zeros) for name, known in moments.items()}
        whose = assign_owners(block, [name for name in problems if name not in together])
        local = [name for name, owner in whose.items() if owner == collectives.rank()]
        steps = (
            prune_layer(block, name, self.solver, problems[name], plan, inputs.expert_tokens(block, name)) for name in local
        )
        yield from broadcast_results(block, whose, steps)
        for part, some in zip(parts, signals, strict=True):
            own = {name: problems[name] for name in (*part.in_proj, part.out_proj)}
            for step in self._prune_part(block, some, own, plan):
                yield (
                    replace(step, routed_tokens=inputs.expert_tokens(block, part.out_proj))
                    if isinstance(step, LayerResult)
                    else step
                )

    def _prune_part(
        self, block: Block, signals: AuxiliarySignals, problems: dict[str, LayerProblem], plan: Plan
    ) -> Iterator[LayerResult | EpochResult]:
        """One feed-forward part: the alternation, then what became of each layer. problems: the dense weights' own."""
        signals.start({name: problem.inputs for name, problem in problems.items() if isinstance(problem.inputs, Gram)})
        aims = problems
        best = PartSolution({}, {}, 0, float("inf"))
        for epoch in range(1, self.epochs + 1):
            answer = self._solve_all(block, aims, plan, epoch)
            after_weights, last = self.alpha * signals.objective(answer.weights), epoch == self.epochs
            answer.error = signals.error(answer.weights) if last else signals.refit(answer.weights)
            after_signals = None if last else self.alpha * signals.objective(answer.weights)
            better = answer.error < best.error or not self.keep_best
            yield EpochResult(block.name, epoch, "published", answer.error, better, after_weights, after_signals)
            if better:
                best = answer
            if not last:
                fresh = signals.problems(self.ridge)
                aims = {name: replace(aim, pruned_mask=problems[name].pruned_mask) for name, aim in fresh.items()}

        if not best.weights:
            raise NonFinite(f"The feed-forward error of {block.name} is not finite in any epoch. Try --dtype float32.")
        for name, weight in best.weights.items():
            block.write(name, weight)
            damping, seconds = best.spent[name]
            yield layer_result(block, name, plan, problems[name], damping, best.epoch, seconds)

    def _solve_all(self, block: Block, aims: dict[str, LayerProblem], plan: Plan, epoch: int) -> PartSolution:
        """One weight step: every coupled layer toward its present aim."""

        def solved(name: str) -> tuple[Tensor, list[float | None]]:
            started, full = time.perf_counter(), block.full_name(name)
            weight, damping = solve(self.solver, aims[name], plan[full], full)
            return weight, [damping, time.perf_counter() - started]

        answer = PartSolution({}, {}, epoch, float("inf"))
        for name, weight, (damping, seconds) in solve_in_parallel(block, list(aims), solved):
            answer.weights[name], answer.spent[name] = weight, (damping, seconds)
        return answer


@dataclass
class PartSolution:
    """One epoch's weights by layer, the damping and the seconds that each took, and the true feed-forward error they have."""

    weights: dict[str, Tensor]
    spent: dict[str, tuple[float | None, float]]
    epoch: int
    error: float
