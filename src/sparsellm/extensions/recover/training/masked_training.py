"""Gradient steps with fixed masks: the optimizer, its early stop, and the durable state of an interrupted training."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparsellm.extensions.recover.training.quantized_training import QuantizedParameters, RoundedLayer
from sparsellm.extensions.recover.training.trained_weights import MaskedLoRA, MaskedParameters, TrainedWeights
from sparsellm.methods import CurvePoint, TrainingResult
from sparsellm.outputs.journal import TRAINING_STATE, Journal
from sparsellm.runtime import collectives, devices

VALIDATIONS = 10
"""Number of validations during training."""

WARMUP = 0.1
"""Fraction of the steps over which the rate rises: Adam's first steps are as long for weights whose gradients are all noise."""

RISE = 2.0
"""Largest held-out loss at the first validation, relative to that before the training, that leaves the learning rate as it is.
Not used for quantized weights, whose loss rises more during the warm-up and falls again at the same rate."""

Pieces = Callable[[int], Iterator[Tensor]]
"""Maps the number of a group to its loss, in terms that are computed one at a time and add up to it."""


STORING_SHARE = 0.1
"""Largest fraction of the time of a training that storing its states takes, after the first one."""


class TrainingStore:
    """Keeps the state of a training in the journal of a run, so that a killed one continues to the same bytes.

    It serves one training after the other; the last state of the last one is kept. All processes call `save` and `load`.

    A state is left out if it comes so soon after the one before that storing takes more than `STORING_SHARE` of the time.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal, self._training = journal, ""
        self._last, self._seconds = time.monotonic(), 0.0

    def begin(self, training: str) -> TrainingStore:
        """Store the states of the training of this name from now on; returns the store."""
        self._training, self._last = training, time.monotonic()
        return self

    def save(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Replace the stored state."""
        began = time.monotonic()
        if not collectives.broadcast_object(began - self._last >= self._seconds / STORING_SHARE):
            return
        on_cpu = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
        self._journal.store_latest(TRAINING_STATE, on_cpu, {"training": self._training, "state": dict(values)})
        self._last = time.monotonic()
        self._seconds = self._last - began

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The stored state of this training, or None."""
        fact = self._journal.fact(TRAINING_STATE)
        stored = self._journal.latest(TRAINING_STATE) if fact and fact["value"]["training"] == self._training else None
        return (stored[0], stored[1]["state"]) if stored else None


@dataclass(frozen=True)
class MaskedAdam:
    """Adam with fixed masks; the state with the best validation loss is kept.

    The learning rate rises linearly to `rate` during the warm-up, the first tenth of the steps, and falls linearly to 0. If the
    held-out loss after the warm-up, L, is more than `RISE` times the loss before training, L0, the remaining steps start from
    the initial weights, with the learning rate multiplied by sqrt(RISE L0 / L): near a minimum, gradient noise adds a loss
    proportional to the square of the learning rate.

    Attributes:
        held: Fraction of the groups held out for validation; at least one group is.
        rank: Rank of the factors that are trained in place of the parameters (`MaskedLoRA`); None trains the parameters.
        patience: Number of validations in a row, of `VALIDATIONS`, without a new best one that end the training; None for no
            early stop.
    """

    steps: int
    rate: float
    held: float = 0.125
    rank: int | None = None
    patience: int | None = None

    def run(
        self,
        parameters: Mapping[str, nn.Parameter],
        keep: Mapping[str, Tensor],
        loss: Pieces,
        *,
        groups: int,
        seed: int,
        rounded: Sequence[RoundedLayer] = (),
        held_out: int | None = None,
        progress: Callable[[float, int], None] | None = None,
        store: TrainingStore | None = None,
    ) -> TrainingResult:
        """Train the parameters in place and keep the state with the smallest mean loss of the held-out groups.

        A non-finite loss ends the training. Equal arguments give equal results.

        Args:
            keep: Masks by parameter name, of the parameters' shapes; entries that are False stay zero.
            loss: Loss of a group, see `Pieces`. Each process returns the terms of its own sequences; gradients are summed.
            groups: Number of groups; with fewer than two there is no training.
            seed: Seed of the order of the groups, and of the first factors.
            rounded: Layers that stay integers times scales (`QuantizedParameters`). Parameters then have their full names.
            held_out: Number of held-out groups, the last ones; by default the fraction `held`.
            progress: Called after each step with its number and that of all steps.
            store: Keeps the state after each validation; a training that it holds is continued.

        Returns:
            The validation losses before and after, the number of the step whose state is kept, and a note on failures.
        """
        held_out = min(held_out or max(1, round(self.held * groups)), groups - 1)
        if self.steps == 0 or groups < 2 or not parameters:
            too_few = self.steps > 0 and groups < 2
            note = "not refined: there is only one group of sequences, and none can be held out" if too_few else ""
            return TrainingResult(0.0, 0.0, 0, note)
        weights: TrainedWeights = MaskedParameters(parameters, keep)
        if rounded:
            weights = QuantizedParameters(parameters, keep, rounded)
        elif self.rank is not None:
            weights = MaskedLoRA(parameters, keep, rank=self.rank, seed=seed)
        rise = math.inf if rounded else RISE
        state = _State(weights, list(parameters.values()), seed=seed, rise=rise)
        stored = store.load() if store else None
        if stored:
            state.restore(*stored)
        else:
            state.curve = [CurvePoint(0, None, _validation_loss(loss, groups - held_out, groups))]
            if not math.isfinite(state.curve[0].held_out):
                return TrainingResult(*2 * (state.curve[0].held_out,), 0, "not refined: the loss is not finite")
        note = self._train(state, loss, held_out=held_out, groups=groups, progress=progress, store=store)
        state.keep_best()
        best = state.best
        return TrainingResult(state.curve[0].held_out, best.held_out, best.step, note, tuple(state.curve))

    def _train(
        self,
        state: _State,
        loss: Pieces,
        *,
        held_out: int,
        groups: int,
        progress: Callable[[float, int], None] | None,
        store: TrainingStore | None,
    ) -> str:
        """Take the steps that are left; return a note on why they ended early, or an empty string."""
        validation_steps = {round(self.steps * (number + 1) / VALIDATIONS) for number in range(VALIDATIONS)}
        losses: list[float] = []  # since the last validation
        for step in range(state.curve[-1].step + 1, self.steps + 1):
            rate = self.rate * min(1.0, step / (WARMUP * self.steps)) * (1 - (step - 1) / self.steps)
            losses.append(state.step(loss, state.rate_scale * rate, groups=groups - held_out))
            if not math.isfinite(losses[-1]):
                return f"the loss became infinite or undefined at step {step}: the best weights before it were kept"
            if step in validation_steps:
                held_out_loss = _validation_loss(loss, groups - held_out, groups)
                state.add_point(CurvePoint(step, sum(losses) / len(losses), held_out_loss))
                losses.clear()
                if not math.isfinite(held_out_loss):
                    return f"the held-out loss became infinite or undefined at step {step}: the best weights were kept"
                if len(state.curve) == 2 and state.rate_scale < 1:
                    state.keep_best()
                later = sum(point.step > state.best.step for point in state.curve)
                if self.patience is not None and later >= self.patience and step < self.steps:
                    return f"stopped at step {step} of {self.steps}: the held-out loss was lowest at step {state.best.step}"
                if store and step < self.steps:
                    store.save(*state.stored())
            if progress is not None:
                progress(step, self.steps)
        return ""


class _State:
    """A training between two steps.

    Attributes:
        curve: The validations so far; the first is that of the initial weights.
    """

    def __init__(self, weights: TrainedWeights, parameters: Sequence[nn.Parameter], *, seed: int, rise: float) -> None:
        self._weights, self._parameters, self._rise = weights, parameters, rise
        self._best_state = {name: tensor.detach().clone() for name, tensor in weights.trained.items()}
        self._optimizer = torch.optim.Adam(weights.trained.values(), betas=(0.9, 0.95))
        self._generator = torch.Generator().manual_seed(seed)
        self._order: list[int] = []
        self.curve: list[CurvePoint] = []

    @property
    def best(self) -> CurvePoint:
        """The first validation with the smallest loss."""
        best = self.curve[0]
        for point in self.curve[1:]:
            best = point if point.held_out < best.held_out else best  # no NaN is smaller
        return best

    @property
    def rate_scale(self) -> float:
        """The factor of the learning rate that follows from the losses before training and after the warm-up."""
        before, first, *_ = *(point.held_out for point in self.curve), 0.0, 0.0
        return math.sqrt(self._rise * before / first) if first > self._rise * before >= 0 else 1.0

    def step(self, loss: Pieces, rate: float, *, groups: int) -> float:
        """Take one step on the next of the groups and return its loss; none is taken if that is not finite."""
        self._order = self._order or torch.randperm(groups, generator=self._generator).tolist()
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        value = _compute_gradients(loss(self._order.pop()), self._parameters, self._weights)
        if math.isfinite(value):
            self._optimizer.step()
            self._weights.apply()
        return value

    def add_point(self, point: CurvePoint) -> None:
        """Record a validation, and the weights if it is the best so far."""
        self.curve.append(point)
        if self.best is point:
            self._best_state = {name: tensor.detach().clone() for name, tensor in self._weights.trained.items()}

    @torch.no_grad()
    def keep_best(self) -> None:
        """Set the parameters to the best state."""
        for name, tensor in self._weights.trained.items():
            tensor.copy_(self._best_state[name])
        self._weights.apply()

    def stored(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The state as tensors and data."""
        tensors = {f"trained/{name}": tensor.detach() for name, tensor in self._weights.trained.items()}
        tensors |= {f"best/{name}": tensor for name, tensor in self._best_state.items()}
        for name, tensor in self._weights.trained.items():
            moments: Mapping[str, Tensor] = self._optimizer.state.get(tensor, {})
            tensors |= {f"adam/{field}/{name}": value for field, value in moments.items()}
        tensors["generator"] = self._generator.get_state()
        return tensors, {"order": self._order, "curve": [asdict(point) for point in self.curve]}

    @torch.no_grad()
    def restore(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Continue from a state that was stored."""
        for name, tensor in self._weights.trained.items():
            tensor.copy_(tensors[f"trained/{name}"])
            self._best_state[name].copy_(tensors[f"best/{name}"])
            moments = {field: tensors.get(f"adam/{field}/{name}") for field in ("step", "exp_avg", "exp_avg_sq")}
            self._optimizer.state[tensor] = {  # empty for a parameter that got no gradient yet
                field: value.clone() if field == "step" else value.to(tensor, copy=True)
                for field, value in moments.items()
                if value is not None
            }
        self._weights.apply()
        self._generator.set_state(tensors["generator"])
        self._order = list(values["order"])
        self.curve = [CurvePoint(**point) for point in values["curve"]]


@torch.no_grad()
def _validation_loss(loss: Pieces, start: int, end: int) -> float:
    """The mean loss of the groups from `start` to `end` - 1, over all processes."""
    total = torch.tensor(sum(float(term) for number in range(start, end) for term in loss(number)), dtype=torch.float64)
    collectives.all_reduce_(total)
    return float(total) / (end - start)


def _compute_gradients(terms: Iterator[Tensor], parameters: Sequence[nn.Parameter], weights: TrainedWeights) -> float:
    """Set the gradients of the sum of all terms over all processes, None for tensors without one; return the sum.

    Accumulates in float64, as `sparsellm.solvers.statistics` does.
    """
    value, trained = 0.0, list(weights.trained.values())
    sums: list[Tensor | None] = [None] * len(trained)
    for tensor in trained:
        tensor.grad = None  # releases the memory of the previous step's gradient
    with torch.enable_grad():
        for term in terms:
            value += float(term.detach())
            gradients = weights.gradients(torch.autograd.grad(term, parameters, allow_unused=True))
            for number, gradient in enumerate(gradients):
                total = sums[number]
                if gradient is not None:
                    wide = devices.widest_float(gradient.device)
                    sums[number] = gradient.to(wide) if total is None else total.add_(gradient)
            del gradients
    if collectives.world() > 1:
        # the loss, and for each tensor whether this process has a gradient
        message = torch.tensor([value, *(float(total is not None) for total in sums)], dtype=torch.float64)
        filled = [
            torch.zeros_like(tensor, dtype=devices.widest_float(tensor.device)) if total is None else total
            for total, tensor in zip(sums, trained, strict=True)
        ]
        collectives.all_reduce_(message, *filled)
        value, *counts = message.tolist()
        sums = [total if count else None for total, count in zip(filled, counts, strict=True)]
    for tensor, total in zip(trained, sums, strict=True):
        tensor.grad = None if total is None else total.to(tensor.dtype)
    return value
