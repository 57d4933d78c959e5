"""A block on its way: its layers solved one group after the other on the pruned stream, toward the dense one, and coupled."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sparsellm.activations.hooks import CaptureRequest
from sparsellm.activations.streams import Activations
from sparsellm.errors import NonFinite
from sparsellm.methods import EpochResult, LayerResult, Plan
from sparsellm.methods.feedforward_problem import METRIC_LIFT, FeedForwardProblem, Weights, weights_of
from sparsellm.methods.layerwise import planned_layers, solve, zero_mask
from sparsellm.methods.parallel_solve import solve_in_parallel, step_from_dict
from sparsellm.methods.settings import Settings
from sparsellm.methods.targets import LayerTargets, expert_regressions
from sparsellm.models.blocks import Block
from sparsellm.models.feedforward import FeedForward
from sparsellm.runtime.offload import TensorList
from sparsellm.solvers.linalg import add_curvature_diagonal, add_diagonal_, conjugate_gradient_refit, count_zeros
from sparsellm.solvers.problem import relative_error
from sparsellm.solvers.regression import Regression
from sparsellm.solvers.statistics import Gram

NEWTON_STEPS = 8
"""Conjugate gradients in one Gauss-Newton round."""

SHORTEST_STEP = 0.1
"""Of a Gauss-Newton step's length, how little is still tried."""

WRITER_STEPS = 20
"""Conjugate gradients in a refit of the writer."""


@dataclass(frozen=True, eq=False)
class Task:
    """A layer to solve toward the targets of a regression. curvature: of its outputs."""

    name: str
    regression: Regression
    curvature: Tensor | None


class BlockSolver:
    """One block on its way, the pruned stream held against the dense one: what is known of it so far."""

    def __init__(
        self,
        settings: Settings,
        block: Block,
        inputs: Activations,
        plan: Plan,
        metric: Tensor | None,
        sensitivities: Mapping[str, Tensor],
    ) -> None:
        self._settings, self._block, self._inputs, self._plan, self._metric = settings, block, inputs, plan, metric
        self._keep: dict[str, Tensor] = {}
        self._results: dict[str, LayerResult] = {}
        self._targets = LayerTargets(block, inputs, plan)
        self._gone = {name: zero_mask(block.layer(name).weight, settings.keep_zeros) for name in planned_layers(block, plan)}
        self._sensitivities = sensitivities

    def solve_group(self, names: Sequence[str], last: bool) -> None:
        """Solve layers that share an input, each by itself, and write them. last: whether no other of the block follows."""
        regressions = self._targets.regressions(names, last)
        self._solve(*(Task(name, regressions[name], self._sensitivities.get(name)) for name in names))
        self._targets.mark_final(names)

    def solve_part(self, feed_forward: FeedForward, metric: Tensor) -> Iterator[EpochResult]:
        """Solve the feed-forward part: its layers, then the Gauss-Newton rounds. metric: F, (model, model)."""
        reads, writes = (self._block.layer(name) for name in (feed_forward.in_proj[0], feed_forward.out_proj))
        size = 4 * self._inputs.tokens * max(reads.in_features, writes.out_features)
        with self._inputs.storage.new_lists(2, size) as (inputs, targets):
            regressions = self._targets.regressions(feed_forward.in_proj, True, (inputs, targets))
            yield from self._solve_together(self._part(feed_forward, metric, inputs, targets), regressions)

    def solve_experts(self, parts: Sequence[FeedForward], metric: Tensor) -> Iterator[EpochResult]:
        """Solve experts one after the other, each as a feed-forward part of its own on the tokens that it is shown.

        Each aims at what the dense expert makes of the dense stream's same tokens. What the stream has lost is not laid on
        experts: which of them a token goes to is the router's matter.
        """
        routes = self._inputs.expert_samples(self._block, parts[0].in_proj)
        shown = 0 if routes is None else routes.max_tokens
        with self._inputs.storage.new_lists(
            2 * len(parts), 4 * shown * self._block.layer(parts[0].in_proj[0]).in_features
        ) as lists:
            seen = list(zip(lists[::2], lists[1::2], strict=True))
            asked = CaptureRequest([part.in_proj[0] for part in parts])
            for pruned, dense in self._inputs.paired_batches(self._block, asked, asked):
                for part, (inputs, targets) in zip(parts, seen, strict=True):
                    inputs.append(pruned.inputs[part.in_proj[0]].float())
                    targets.append(dense.inputs[part.in_proj[0]].float())
            for part, (inputs, targets) in zip(parts, seen, strict=True):
                regressions = expert_regressions(self._block, part, inputs, targets)
                yield from self._solve_together(self._part(part, metric, inputs, targets), regressions)

    def _part(self, feed_forward: FeedForward, metric: Tensor, inputs: TensorList, targets: TensorList) -> FeedForwardProblem:
        """The part with what it reads and should write."""
        return FeedForwardProblem(feed_forward, metric, inputs, targets, self._settings.sampled, self._inputs.window)

    def _solve_together(self, part: FeedForwardProblem, regressions: Mapping[str, Regression]) -> Iterator[EpochResult]:
        """Solve a part's layers, given its readers' regressions."""
        names = part.names
        curvatures = part.curvatures(self._weights(names))
        power = max(part.target_energy(), 1e-30)
        self._solve(*(Task(name, regressions[name], curvatures[name]) for name in names[:-1]))
        self._solve(Task(names[-1], part.regression(self._weights(names)), part.metric))
        error = part.error(self._weights(names))
        yield EpochResult(self._block.name, 1, "solve", error / power, True)
        yield from self._gauss_newton(part, names, power)

    def _gauss_newton(self, part: FeedForwardProblem, names: tuple[str, ...], power: float) -> Iterator[EpochResult]:
        """Gauss-Newton rounds over the readers, the writer refitted after each, as long as held-back batches gain by it."""
        fitted, held = part.split()
        error = held.error(self._weights(names))
        for number in range(1, self._settings.gauss_newton_steps + 1):
            weights = self._weights(names)
            steps = fitted.gauss_newton_step(weights, self._keep, NEWTON_STEPS)
            length, found, moved = 1.0, error, weights
            while length > SHORTEST_STEP:
                moved = weights | {name: _moved(weights[name], step, length) for name, step in steps.items()}
                moved |= {names[-1]: self._refit_out_proj(fitted, moved, names[-1])}
                found = held.error(moved)
                if found < error:
                    break
                length /= 2
            yield EpochResult(self._block.name, number, "newton", found / power, found < error)
            if not found < error:
                break
            error = found
            self._write(moved)

    def results(self) -> Iterator[LayerResult]:
        """What became of each layer, in running order: the zeros as they now are, the error as the layer was solved."""
        for name in planned_layers(self._block, self._plan):
            zeros = count_zeros(self._block.layer(name).weight)
            yield replace(self._results[name], zeros=zeros)

    def _solve(self, *tasks: Task) -> None:
        """Solve layers toward their targets and write weights and biases. Several processes share them out."""
        by_name = {task.name: task for task in tasks}

        def solved(name: str) -> tuple[Tensor, dict[str, Any]]:
            weight, step = self._solution(by_name[name])
            return weight, asdict(step)

        for name, weight, step in solve_in_parallel(self._block, list(by_name), solved):
            self._results[name], self._keep[name] = step_from_dict(step), weight != 0
            self._write({name: (weight, by_name[name].regression.bias(weight))})

    def _solution(self, task: Task) -> tuple[Tensor, LayerResult]:
        """The weight that solves a layer, and what to say of it."""
        started, regression = time.perf_counter(), task.regression
        full, layer = self._block.full_name(task.name), self._block.layer(task.name)
        dense = layer.weight.detach().to(torch.float32, copy=True)
        problem = replace(regression.problem(dense, self._settings.ridge, task.curvature), pruned_mask=self._gone[task.name])
        weight, damping = solve(self._settings.solver, problem, self._plan[full], full)
        try:
            error = relative_error(regression.error(weight), regression.power)
        except NonFinite as failure:
            failure.add_note(f"in layer {full}")
            raise
        return weight, LayerResult(
            name=full,
            pattern=str(self._plan[full]),
            shape=(weight.shape[0], weight.shape[1]),
            zeros=count_zeros(weight),
            error=error,
            known=Gram.__name__,
            damping=damping,
            tokens=regression.inputs.tokens,
            epoch=1,
            seconds=time.perf_counter() - started,
            routed_tokens=self._inputs.expert_tokens(self._block, task.name),
        )

    def _refit_out_proj(self, part: FeedForwardProblem, weights: Weights, name: str) -> tuple[Tensor, Tensor | None]:
        """The writer fitted to what the readers now give, its mask held."""
        regression = part.regression(weights)
        problem = regression.problem(weights[name][0], self._settings.ridge)
        metric, gram = add_curvature_diagonal(part.metric, METRIC_LIFT), add_diagonal_(problem.gram, self._settings.ridge)
        weight = conjugate_gradient_refit(
            weights[name][0], problem.weight, gram, self._keep[name], WRITER_STEPS, curvature=metric
        )
        return weight, regression.bias(weight)

    def _weights(self, names: tuple[str, ...]) -> Weights:
        return weights_of(self._block, names)

    def _write(self, weights: Weights) -> None:
        """Put weights, and biases where there are any, into the block."""
        for name, (weight, bias) in weights.items():
            self._block.write(name, weight)
            if bias is not None:
                self._block.write_bias(name, bias)


def _moved(
    present: tuple[Tensor, Tensor | None], step: tuple[Tensor, Tensor | None], length: float
) -> tuple[Tensor, Tensor | None]:
    """A weight and bias after a step of some length."""
    bias = present[1] if present[1] is None or step[1] is None else present[1] + length * step[1]
    return present[0] + length * step[0], bias
