"""The auxiliary signals of one feed-forward part, and the sums over tokens that its weights are solved from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from sparsellm.activations.hooks import Hooks
from sparsellm.errors import SingularGram
from sparsellm.models.blocks import Block
from sparsellm.models.feedforward import FeedForward, activation_correction, fit_activated
from sparsellm.models.linear_views import Layer
from sparsellm.runtime import collectives, devices
from sparsellm.solvers.linalg import dot_float64, quadratic_form
from sparsellm.solvers.problem import LayerProblem
from sparsellm.solvers.statistics import CrossMoment, Gram


@dataclass(frozen=True)
class Fit:
    """How well a weight maps a layer's present inputs to its present target, as a quadratic in the weight.

    power: E‖t‖². cross: E[t xᵀ], (out, in). inputs: the Gram of x.
    """

    power: float
    cross: Tensor
    inputs: Gram

    @classmethod
    def of_dense(cls, weight: Tensor, inputs: Gram) -> Fit:
        """The fit whose target is what the dense weight itself computes."""
        cross = weight @ inputs.matrix
        return cls(dot_float64(cross, weight), cross, inputs)

    def error(self, weight: Tensor) -> float:
        """E‖t - W x‖²."""
        return self.power - 2 * dot_float64(self.cross, weight) + float(quadratic_form(weight, self.inputs.matrix, weight))


class AuxiliarySignals:
    """The auxiliary signals of one block's feed-forward part, batch by batch.

    Between epochs only the readers' signals z (and s) are kept, (tokens, hidden) each, in float32. The writer's inputs p are a
    closed form of them: they live for one batch and leave their sums E[p pᵀ] and E[y pᵀ].
    """

    def __init__(self, block: Block, feed_forward: FeedForward, ratio: float) -> None:
        """feed_forward: the block's. ratio: beta / alpha."""
        self._feed_forward = feed_forward
        self._ratio = ratio
        self._names = {name: block.full_name(name) for name in (*feed_forward.in_proj, feed_forward.out_proj)}
        self._layers = {name: block.layer(name) for name in self._names}
        self._dense = {name: layer.weight.detach().to(torch.float32, copy=True) for name, layer in self._layers.items()}
        self._inputs: list[Tensor] = []  # x, (tokens, model), in the model's dtype
        self._outputs: list[Tensor] = []  # y, (tokens, model)
        self._hidden: list[tuple[Tensor, ...]] = []
        self._fits: dict[str, Fit] = {}
        self._distance = 0.0  # E‖p - φ(z)‖²

    def hooks(self) -> tuple[Hooks, Hooks]:
        """What to watch in the dense block: the readers' inputs, and the writer's outputs."""
        return {self._feed_forward.in_proj[0]: [self._inputs.append]}, {self._feed_forward.out_proj: [self._outputs.append]}

    def start(self, inputs: Mapping[str, Gram]) -> None:
        """The signals of the dense part: z = W₀x, p = φ(z). inputs: each layer's Gram."""
        self._fits = {name: Fit.of_dense(weight, inputs[name]) for name, weight in self._dense.items()}

    def objective(self, weights: Mapping[str, Tensor]) -> float:
        """The paper's objective over alpha (eq. 5 or 6), mean over tokens, at the present signals."""
        fits = sum(self._fits[name].error(weight) for name, weight in weights.items())
        return fits + self._ratio * self._distance

    def problems(self, ridge: float) -> dict[str, LayerProblem]:
        """Each layer's problem toward the present signals (Algorithm 1: the regressions before the pruning)."""
        aims: dict[str, LayerProblem] = {}
        for name, fit in self._fits.items():
            try:
                aims[name] = LayerProblem.from_targets(fit.cross, fit.inputs, self._dense[name], ridge)
            except SingularGram as error:
                error.add_note(f"in the regression for {self._names[name]}, {fit.inputs.tokens:,} calibration tokens")
                raise
        return aims

    def error(self, weights: Mapping[str, Tensor]) -> float:
        """The true feed-forward error of these weights, relative to E‖y‖², y without the writer's bias."""
        writer = self._feed_forward.out_proj
        missed = torch.zeros(2, dtype=devices.widest_float(weights[writer].device), device=weights[writer].device)
        for inputs, outputs in zip(self._inputs, self._outputs, strict=True):
            target = _unbiased(outputs.float(), self._layers[writer])
            missed += torch.stack(
                [self._missed(self._reached(inputs.float(), weights), target, weights), target.square().sum()]
            )
        collectives.all_reduce_(missed)
        return float(missed[0] / missed[1]) if missed[1] > 0 else 0.0

    def refit(self, weights: Mapping[str, Tensor]) -> float:
        """Move every signal to its minimiser for these weights; the true feed-forward error that they have, as `error`.

        weights: the pruned ones, float32. One pass over the batches, in the order p, z, s (paper eqs. 9-12).
        """
        readers, writer = self._feed_forward.in_proj, self._feed_forward.out_proj
        correction = activation_correction(weights[writer], self._ratio)
        sums = _Sums({name: tuple(weight.shape) for name, weight in weights.items()}, writer, weights[writer].device)
        for batch, (inputs, outputs) in enumerate(zip(self._inputs, self._outputs, strict=True)):
            x = inputs.float()
            target = _unbiased(outputs.float(), self._layers[writer])
            reached = self._reached(x, weights)
            hidden = self._hidden[batch] if self._hidden[batch:] else self._of_dense(x)
            activated = fit_activated(self._feed_forward.activate(*hidden), weights[writer], target, correction)
            hidden = self._feed_forward.fit_hidden(hidden, reached, activated, self._ratio)
            self._hidden[batch : batch + 1] = [hidden]

            sums.target_power += target.square().sum()
            sums.missed += self._missed(reached, target, weights)
            sums.distance += self._feed_forward.activate(*hidden).sub_(activated).square_().sum()
            sums.inputs.update(activated)
            sums.add(writer, target, activated)
            for name, signal in zip(readers, hidden, strict=True):
                sums.add(name, _unbiased(signal, self._layers[name]), x)
        sums.reduce()
        tokens = max(sums.inputs.tokens, 1)
        self._distance = float(sums.distance) / tokens
        grams = {name: self._fits[name].inputs for name in readers} | {writer: sums.inputs}
        self._fits = {name: Fit(float(sums.power[name]) / tokens, sums.cross[name].matrix, grams[name]) for name in weights}
        return float(sums.missed / sums.target_power) if sums.target_power > 0 else 0.0

    def _reached(self, x: Tensor, weights: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """The readers' outputs with these weights."""
        return tuple(linear(x, weights[name], _bias(self._layers[name])) for name in self._feed_forward.in_proj)

    def _missed(self, reached: tuple[Tensor, ...], target: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """The sum over tokens of ‖y - V φ(z)‖² where the readers give z."""
        written = self._feed_forward.activate(*reached) @ weights[self._feed_forward.out_proj].T
        return written.sub_(target).square_().sum()

    def _of_dense(self, x: Tensor) -> tuple[Tensor, ...]:
        """The dense readers' outputs."""
        return self._reached(x, self._dense)


class _Sums:
    """What one pass over the batches adds up; sums over tokens, on the layers' device."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], writer: str, device: torch.device) -> None:
        self.cross = {name: CrossMoment(rows, columns, device) for name, (rows, columns) in shapes.items()}
        wide = devices.widest_float(device)
        self.power = {name: torch.zeros((), dtype=wide, device=device) for name in shapes}
        self.inputs = Gram(shapes[writer][1], device)  # of the writer's present inputs
        self.target_power, self.missed, self.distance = torch.zeros(3, dtype=wide, device=device)

    def add(self, name: str, targets: Tensor, inputs: Tensor) -> None:
        """Take in a batch of a layer's target, (tokens, out), and inputs, (tokens, in)."""
        self.cross[name].update(targets, inputs)
        self.power[name] += targets.square().sum()

    def reduce(self) -> None:
        """Sum over all processes; nothing when alone."""
        self.inputs.reduce()
        for cross in self.cross.values():
            cross.reduce()
        collectives.all_reduce_(*self.power.values(), self.target_power, self.missed, self.distance)


def _bias(layer: Layer) -> Tensor | None:
    """The layer's bias in float32, if it has one."""
    return None if layer.bias is None else layer.bias.float()


def _unbiased(outputs: Tensor, layer: Layer) -> Tensor:
    """Outputs less the layer's bias: the part that its weight has to explain."""
    return outputs if layer.bias is None else outputs - layer.bias.float()
