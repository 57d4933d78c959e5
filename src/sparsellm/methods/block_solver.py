"""The layers of one block, solved group by group on the pruned stream toward the dense stream, and Gauss-Newton rounds."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor

from sparsellm.activations.streams import CaptureRequest
from sparsellm.activations.walk import Activations
from sparsellm.errors import InvalidSetting, NonFinite
from sparsellm.methods import LAYER_RESULT, AfterSolve, EpochResult, LayerResult, Plan, planned_layers, solve_in_parallel
from sparsellm.methods.feedforward_problem import SAMPLED, FeedForwardProblem, PartWeights, moved, weights_of
from sparsellm.methods.gauss_newton import gauss_newton_changes
from sparsellm.methods.layerwise import layer_result, solve, zero_mask
from sparsellm.methods.targets import LayerTargets, expert_regressions
from sparsellm.models.blocks import Block
from sparsellm.models.feedforward import FeedForward
from sparsellm.runtime import collectives
from sparsellm.runtime.offload import TensorList
from sparsellm.solvers import LayerSolver
from sparsellm.solvers.alps import ALPS
from sparsellm.solvers.linalg import add_curvature_diagonal, add_diagonal_, conjugate_gradient_refit, count_zeros
from sparsellm.solvers.problem import LayerProblem, relative_error
from sparsellm.solvers.regression import Regression

GRADIENT_STEPS = 8
"""Conjugate gradient steps in one Gauss-Newton round."""

TRIAL_LENGTH = 0.5
"""The fraction of a Gauss-Newton change that is tried before the output projection is refitted to it, which allows for more."""

REFIT_STEPS, REFIT_DAMPING = 8, 0.01
"""Conjugate gradient steps in one refit of the output projection, and the damping of its Gram matrix and F: the solvers'."""

Scope = Literal["none", "feedforward"]


@dataclass(frozen=True)
class Settings:
    """The settings of `sparsellm.methods.sparsellm.SparseLLM`, documented there."""

    solver: LayerSolver = field(default_factory=ALPS.accurate)
    rounds: int | None = None
    sampled: int = SAMPLED
    scope: Scope = "feedforward"
    keep_zeros: bool = False
    after_solve: AfterSolve | None = None

    def __post_init__(self) -> None:
        if self.rounds is not None and self.rounds < 0:
            raise InvalidSetting(f"SparseLLM needs rounds >= 0, got {self.rounds}.")
        if self.rounds and self.scope == "none":
            raise InvalidSetting(f"With the scope none every layer is pruned alone: leave out rounds, got {self.rounds}.")

    @property
    def most_rounds(self) -> int:
        """`rounds`, or 3 if the layers of a feed-forward part form one problem."""
        return 3 * (self.scope != "none") if self.rounds is None else self.rounds


@dataclass(frozen=True, eq=False)
class Task:
    """A layer to solve toward the targets of a regression.

    Attributes:
        regression: Statistics of its inputs and targets.
        curvature: S, (out, out): the weights of its output errors; None if all count alike.
    """

    name: str
    regression: Regression
    curvature: Tensor | None


class BlockSolver:
    """Prunes the layers of one block and collects their results.

    Args:
        curvatures: S by layer, (out, out); layers without one count all output errors alike.
    """

    def __init__(
        self,
        settings: Settings,
        block: Block,
        inputs: Activations,
        *,
        plan: Plan,
        curvatures: Mapping[str, Tensor],
    ) -> None:
        self._settings, self._block, self._inputs, self._plan = settings, block, inputs, plan
        self._keep: dict[str, Tensor] = {}
        self._results: dict[str, LayerResult] = {}
        self._targets = LayerTargets(block, inputs, plan)
        names = planned_layers(block, plan)
        self._pruned_masks = {name: zero_mask(block.layer(name).weight, settings.keep_zeros) for name in names}
        self._curvatures = curvatures
        self._tasks: dict[str, Task] = {}  # of layers that are still to be solved or projected

    def solve_group(self, names: Sequence[str], last: bool) -> None:
        """Solve layers that share an input, each separately, and write them.

        Args:
            names: The layers, by name within the block.
            last: Whether this is the last group of the block.
        """
        regressions = self._targets.regressions(names, last)
        self._tasks |= {name: Task(name, regressions[name], self._curvatures.get(name)) for name in names}
        self._solve(names, self._settings.after_solve)
        self._targets.mark_final(names)

    def solve_part(self, feed_forward: FeedForward, fisher: Tensor) -> Iterator[EpochResult]:
        """Solve the feed-forward part: its layers, then the Gauss-Newton rounds. `fisher`: F, (model, model)."""
        in_proj, out_proj = (self._block.layer(name) for name in (feed_forward.in_proj[0], feed_forward.out_proj))
        size = 4 * self._inputs.tokens * max(in_proj.in_features, out_proj.out_features)  # bytes, float32
        with self._inputs.storage.new_lists(2, size) as (inputs, targets):
            yield from self._solve_jointly(
                self._targets.regressions(feed_forward.in_proj, True, (inputs, targets)),  # first, since it fills the lists
                self._problem(feed_forward, fisher, inputs, targets),
            )

    def solve_experts(self, parts: Sequence[FeedForward], fisher: Tensor) -> Iterator[EpochResult]:
        """Solve experts one after another, each as a feed-forward part on the tokens that are routed to it.

        The target of an expert is the dense expert's output for the same tokens of the dense stream. It does not include the
        accumulated error of the stream, since the router decides which experts a token passes through.

        Args:
            fisher: F, (model, model).
        """
        routes = self._inputs.expert_samples(self._block, parts[0].in_proj)
        max_tokens = 0 if routes is None else routes.max_tokens
        with self._inputs.storage.new_lists(
            2 * len(parts), 4 * max_tokens * self._block.layer(parts[0].in_proj[0]).in_features
        ) as lists:
            pairs = list(zip(lists[::2], lists[1::2], strict=True))
            request = CaptureRequest([part.in_proj[0] for part in parts])
            for pruned, dense in self._inputs.run_paired(self._block, request, request):
                for part, (inputs, targets) in zip(parts, pairs, strict=True):
                    inputs.append(pruned.inputs[part.in_proj[0]].float())
                    targets.append(dense.inputs[part.in_proj[0]].float())
            for part, (inputs, targets) in zip(parts, pairs, strict=True):
                yield from self._solve_jointly(
                    expert_regressions(self._block, part, inputs, targets), self._problem(part, fisher, inputs, targets)
                )

    def _problem(
        self, feed_forward: FeedForward, fisher: Tensor, inputs: TensorList, targets: TensorList
    ) -> FeedForwardProblem:
        """The problem of a feed-forward part with its inputs and targets."""
        return FeedForwardProblem(feed_forward, fisher, inputs, targets, self._settings.sampled, self._inputs.window)

    def _solve_jointly(self, regressions: Mapping[str, Regression], problem: FeedForwardProblem) -> Iterator[EpochResult]:
        """Solve the layers of a feed-forward part, given the regressions of its input projections, which are freed early."""
        names, rounds, after_solve = problem.names, self._settings.most_rounds, self._settings.after_solve
        # Nothing may be fitted to what judges the rounds, and the first solve is measured on the same tokens as they are.
        training, judge = problem.split() if rounds else (problem, problem)
        curvatures = problem.curvatures(self._weights(names))
        energy = max(judge.target_energy(), 1e-30)
        self._tasks |= {name: Task(name, regressions[name], curvatures.pop(name)) for name in names[:-1]}
        del regressions
        self._solve(names[:-1], keep=after_solve is not None)
        self._tasks[names[-1]] = Task(names[-1], training.regression(self._weights(names)), problem.fisher)
        self._solve(names[-1:])
        yield EpochResult(self._block.name, 1, "solve", judge.error(self._weights(names)) / energy, True)
        yield from self._gauss_newton(problem, names, energy) if rounds else ()
        if after_solve:
            self._project_part(problem, after_solve)
            yield EpochResult(self._block.name, 1, "round", judge.error(self._weights(names)) / energy, True)

    def _gauss_newton(self, problem: FeedForwardProblem, names: tuple[str, ...], energy: float) -> Iterator[EpochResult]:
        """Gauss-Newton rounds, until the error on held-out tokens no longer falls; then a refit to all tokens."""
        training, held_out = problem.split()
        error = held_out.error(self._weights(names))
        for number in range(1, self._settings.most_rounds + 1):
            new_weights, new_error = self._newton_round(training, held_out, names, error)
            yield EpochResult(self._block.name, number, "newton", new_error / energy, new_error < error)
            if new_error < error:
                self._write(new_weights)
            del new_weights  # before the next round or refit, which needs the memory
            if not new_error < error:
                break
            error = new_error
        if not self._settings.after_solve:  # else the refit follows the rounding
            weight, _ = self._weights(names[-1:])[names[-1]]
            self._write({names[-1]: self._refitted(problem, problem.regression(self._weights(names)), weight)})

    def _newton_round(
        self, training: FeedForwardProblem, held_out: FeedForwardProblem, names: tuple[str, ...], error: float
    ) -> tuple[PartWeights, float]:
        """Weights after the last change before the held-out error of a part of it rises, with a refit, and their error."""
        weights, chosen, new_error = self._weights(names), PartWeights(), error
        for change in gauss_newton_changes(training, weights, self._keep, GRADIENT_STEPS):
            new_error = held_out.error(moved(weights, change, TRIAL_LENGTH))
            if not new_error < error:
                break
            chosen, error = change, new_error
        if not chosen:
            return weights, new_error
        weights = moved(weights, chosen)
        del change, chosen  # as large as the input projections
        weights[names[-1]] = self._refitted(training, training.regression(weights), weights[names[-1]][0])
        return weights, held_out.error(weights)

    def results(self) -> Iterator[LayerResult]:
        """The result of each layer, in running order: zeros of the current weight, error of the first solve."""
        for name in planned_layers(self._block, self._plan):
            yield replace(self._results[name], zeros=count_zeros(self._block.layer(name).weight))

    def _solve(self, names: Sequence[str], after_solve: AfterSolve | None = None, *, keep: bool = False) -> None:
        """Solve layers toward their targets, in parallel over processes, and write biases, and weights after `after_solve`.

        Without `after_solve`, the curvature and products of a layer are freed as soon as the layer is solved.

        Args:
            keep: Whether their tasks stay, for `_project_part`.
        """
        regressions = {name: self._tasks[name].regression for name in names}

        def solve_task(name: str) -> tuple[Tensor, dict[str, Any]]:
            weight, result = self._solve_task(self._tasks[name] if keep or after_solve else self._tasks.pop(name))
            return weight, LAYER_RESULT.dump_python(result, mode="json")

        for name, weight, result in solve_in_parallel(self._block, names, solve_task):
            self._results[name], self._keep[name] = LAYER_RESULT.validate_python(result), weight != 0
            regression, final = regressions.pop(name), weight
            if after_solve:
                final, kept = self._projected(self._tasks.pop(name), weight, after_solve), self._results[name]
                self._results[name] = replace(kept, error=relative_error(regression.error(final), regression.power))
            self._write({name: (final, regression.bias(final))})
            if not keep:
                self._tasks.pop(name, None)  # which another process solved

    def _solve_task(self, task: Task) -> tuple[Tensor, LayerResult]:
        """Solve one layer; the weight is not written."""
        started, regression = time.perf_counter(), task.regression
        full_name = self._block.full_name(task.name)
        problem = replace(self._layer_problem(task), pruned_mask=self._pruned_masks[task.name])
        weight, damping = solve(self._settings.solver, problem, self._plan[full_name], name=full_name)
        try:
            error = relative_error(regression.error(weight), regression.power)
        except NonFinite as failure:
            failure.add_note(f"in layer {full_name}")
            raise
        return weight, layer_result(
            self._block,
            task.name,
            regression.inputs,
            plan=self._plan,
            zeros=count_zeros(weight),
            error=error,
            damping=damping,
            seconds=time.perf_counter() - started,
            routed_tokens=self._inputs.expert_tokens(self._block, task.name),
        )

    def _layer_problem(self, task: Task) -> LayerProblem:
        """The problem of a layer, regularized toward its current weight."""
        prior = self._block.layer(task.name).weight.detach().float()
        return task.regression.problem(prior, task.curvature)

    def _projected(self, task: Task, weight: Tensor, after_solve: AfterSolve) -> Tensor:
        """Project a solved weight of a layer that still has the weight it was solved from; the same in every process."""
        projected = after_solve.project(self._block, task.name, weight, self._layer_problem(task))
        after_solve.broadcast(self._block, task.name, 0)
        return collectives.broadcast(0, projected)

    def _project_part(self, problem: FeedForwardProblem, after_solve: AfterSolve) -> None:
        """Project the input projections, then the output projection, refitted to what they give."""
        names = problem.names
        for name in names[:-1]:
            self._write_projected(self._tasks.pop(name), self._weights(names)[name], after_solve)
        weights = self._weights(names)
        task = Task(names[-1], problem.regression(weights), problem.fisher)
        self._write_projected(task, self._refitted(problem, task.regression, weights[names[-1]][0]), after_solve)

    def _write_projected(self, task: Task, current: tuple[Tensor, Tensor | None], after_solve: AfterSolve) -> None:
        """Project a weight and write it, with the bias that keeps the mean of the outputs."""
        weight, bias = current
        projected = self._projected(task, weight, after_solve)
        if bias is not None:
            bias = bias + (weight - projected) @ task.regression.inputs.mean
        self._write({task.name: (projected, bias)})

    def _refitted(self, problem: FeedForwardProblem, regression: Regression, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the output projection, refitted to the current activations with a fixed mask."""
        layer_problem = regression.problem(weight)
        fisher = add_curvature_diagonal(problem.fisher, REFIT_DAMPING)
        gram = add_diagonal_(layer_problem.gram, REFIT_DAMPING)
        weight = conjugate_gradient_refit(
            weight, layer_problem.weight, gram, keep=self._keep[problem.names[-1]], steps=REFIT_STEPS, curvature=fisher
        )
        return weight, regression.bias(weight)

    def _weights(self, names: tuple[str, ...]) -> PartWeights:
        return weights_of(self._block, names)

    def _write(self, weights: PartWeights) -> None:
        """Write weights, and biases where there are any, to the block."""
        for name, (weight, bias) in weights.items():
            self._block.write(name, weight)
            if bias is not None:
                self._block.write_bias(name, bias)
