"""The auxiliary signals of one feed-forward part, and the sums over tokens for the regressions of its layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from sparsellm.activations.streams import Capture, CaptureRequest
from sparsellm.errors import SingularGram
from sparsellm.methods.signal_updates import activation_correction, fit_activated, fit_hidden
from sparsellm.models.blocks import Block
from sparsellm.models.feedforward import FeedForward
from sparsellm.models.linear_views import Layer
from sparsellm.runtime import collectives, devices
from sparsellm.solvers.linalg import dot_float64, quadratic_form
from sparsellm.solvers.problem import LayerProblem
from sparsellm.solvers.statistics import CrossMoment, Gram


@dataclass(frozen=True)
class Fit:
    """The squared error of a layer on its current inputs x and targets t, as a quadratic function of its weight.

    Attributes:
        power: E‖t‖².
        cross: E[t xᵀ], (out, in).
    """

    power: float
    cross: Tensor
    inputs: Gram

    @classmethod
    def of_dense(cls, weight: Tensor, inputs: Gram) -> Fit:
        """The fit whose target is the output of the dense weight."""
        cross = weight @ inputs.matrix
        return cls(dot_float64(cross, weight), cross, inputs)

    def error(self, weight: Tensor) -> float:
        """E‖t - W x‖²."""
        return self.power - 2 * dot_float64(self.cross, weight) + float(quadratic_form(weight, self.inputs.matrix, weight))


class AuxiliarySignals:
    """The auxiliary signals of one feed-forward part, batch by batch.

    Between epochs only the signals of the input projections, z (and s), are kept: (tokens, hidden) float32 for each batch. The
    signal p, the input of the output projection, follows from them in closed form and exists for one batch at a time; only its
    sums E[p pᵀ] and E[y pᵀ] are kept.

    Args:
        feed_forward: A feed-forward part of it.
        ratio: beta / alpha.
    """

    def __init__(self, block: Block, feed_forward: FeedForward, ratio: float) -> None:
        self._feed_forward = feed_forward
        self._ratio = ratio
        self._names = {name: block.full_name(name) for name in (*feed_forward.in_proj, feed_forward.out_proj)}
        self._layers = {name: block.layer(name) for name in self._names}
        self._dense = {name: layer.weight.detach().to(torch.float32, copy=True) for name, layer in self._layers.items()}
        self._inputs: list[Tensor] = []  # x, (tokens, model), in the model's dtype
        self._outputs: list[Tensor] = []  # y, (tokens, model)
        self._hidden: list[tuple[Tensor, ...]] = []  # (z,) or (s, z), (tokens, hidden) each
        self._fits: dict[str, Fit] = {}
        self._distance = 0.0  # E‖p - φ(z)‖²

    @property
    def request(self) -> CaptureRequest:
        """What to capture in a pass through the dense block: the part's inputs and outputs."""
        return CaptureRequest([self._feed_forward.in_proj[0]], [self._feed_forward.out_proj])

    def append(self, captured: Capture) -> None:
        """Add what was captured from a batch."""
        self._inputs.append(captured.inputs[self._feed_forward.in_proj[0]])
        self._outputs.append(captured.outputs[self._feed_forward.out_proj])

    def start(self, inputs: Mapping[str, Gram]) -> None:
        """Start from the signals of the dense part: z = W₀x, p = φ(z). `inputs`: the Gram matrix of each layer's inputs."""
        self._fits = {name: Fit.of_dense(weight, inputs[name]) for name, weight in self._dense.items()}

    def objective(self, weights: Mapping[str, Tensor]) -> float:
        """The paper's objective (eq. 5 or 6) divided by alpha, mean over tokens, for the current signals."""
        fits = sum(self._fits[name].error(weight) for name, weight in weights.items())
        return fits + self._ratio * self._distance

    def problems(self, ridge: float) -> dict[str, LayerProblem]:
        """Each layer's problem toward the current signals (the regressions of Algorithm 1)."""
        problems: dict[str, LayerProblem] = {}
        for name, fit in self._fits.items():
            try:
                problems[name] = LayerProblem.from_targets(fit.cross, fit.inputs, self._dense[name], ridge=ridge)
            except SingularGram as error:
                error.add_note(f"in the regression for {self._names[name]}, {fit.inputs.tokens:,} calibration tokens")
                raise
        return problems

    def error(self, weights: Mapping[str, Tensor]) -> float:
        """The true feed-forward error of these weights, relative to E‖y‖², where y is the dense output without its bias."""
        out_proj = self._feed_forward.out_proj
        device = weights[out_proj].device
        sums = torch.zeros(2, dtype=devices.widest_float(device), device=device)  # squared error, energy of the target
        for inputs, outputs in zip(self._inputs, self._outputs, strict=True):
            target = _without_bias(outputs.float(), self._layers[out_proj])
            error = self._squared_error(self._project(inputs.float(), weights), target, weights)
            sums += torch.stack([error, target.square().sum()])
        collectives.all_reduce_(sums)
        return float(sums[0] / sums[1]) if sums[1] > 0 else 0.0

    def refit(self, weights: Mapping[str, Tensor]) -> float:
        """Set every signal to its minimiser for these weights, in one pass over the batches in the order p, z, s (eqs. 9-12).

        Args:
            weights: The pruned weights by layer, (out, in) float32.
        """
        in_proj, out_proj = self._feed_forward.in_proj, self._feed_forward.out_proj
        correction = activation_correction(weights[out_proj], self._ratio)
        sums = _Sums({name: tuple(weight.shape) for name, weight in weights.items()}, out_proj, weights[out_proj].device)
        for batch, (inputs, outputs) in enumerate(zip(self._inputs, self._outputs, strict=True)):
            x = inputs.float()
            target = _without_bias(outputs.float(), self._layers[out_proj])
            projected = self._project(x, weights)
            hidden = self._hidden[batch] if self._hidden[batch:] else self._project(x, self._dense)
            activated = fit_activated(self._feed_forward.activate(*hidden), weights[out_proj], target, correction)  # p
            hidden = fit_hidden(self._feed_forward, hidden, projected, activated, ratio=self._ratio)
            self._hidden[batch : batch + 1] = [hidden]

            sums.target_power += target.square().sum()
            sums.squared_error += self._squared_error(projected, target, weights)
            sums.distance += self._feed_forward.activate(*hidden).sub_(activated).square_().sum()
            sums.inputs.update(activated)
            sums.add(out_proj, target, activated)
            for name, signal in zip(in_proj, hidden, strict=True):
                sums.add(name, _without_bias(signal, self._layers[name]), x)
        sums.reduce()
        tokens = max(sums.inputs.tokens, 1)
        self._distance = float(sums.distance) / tokens
        grams = {name: self._fits[name].inputs for name in in_proj} | {out_proj: sums.inputs}
        self._fits = {name: Fit(float(sums.power[name]) / tokens, sums.cross[name].matrix, grams[name]) for name in weights}
        return float(sums.squared_error / sums.target_power) if sums.target_power > 0 else 0.0

    def _project(self, x: Tensor, weights: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """The outputs of the input projections with these weights, (tokens, hidden) each."""
        return tuple(linear(x, weights[name], _bias(self._layers[name])) for name in self._feed_forward.in_proj)

    def _squared_error(self, hidden: tuple[Tensor, ...], target: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        """The sum over tokens of ‖y - V φ(z)‖², where `hidden` is z."""
        output = self._feed_forward.activate(*hidden) @ weights[self._feed_forward.out_proj].T
        return output.sub_(target).square_().sum()


class _Sums:
    """Sums over tokens from one pass over the batches, on the layers' device."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], out_proj: str, device: torch.device) -> None:
        self.cross = {name: CrossMoment(rows, columns, device) for name, (rows, columns) in shapes.items()}
        wide = devices.widest_float(device)
        self.power = {name: torch.zeros((), dtype=wide, device=device) for name in shapes}
        self.inputs = Gram(shapes[out_proj][1], device)  # of p
        self.target_power, self.squared_error, self.distance = torch.zeros(3, dtype=wide, device=device)

    def add(self, name: str, targets: Tensor, inputs: Tensor) -> None:
        """Add a batch of a layer's targets, (tokens, out), and inputs, (tokens, in)."""
        self.cross[name].update(targets, inputs)
        self.power[name] += targets.square().sum()

    def reduce(self) -> None:
        """Sum over all processes."""
        self.inputs.reduce()
        for cross in self.cross.values():
            cross.reduce()
        collectives.all_reduce_(*self.power.values(), self.target_power, self.squared_error, self.distance)


def _bias(layer: Layer) -> Tensor | None:
    """The layer's bias in float32; None if it has none."""
    return None if layer.bias is None else layer.bias.float()


def _without_bias(outputs: Tensor, layer: Layer) -> Tensor:
    """Outputs minus the layer's bias: the targets of its weight."""
    return outputs if layer.bias is None else outputs - layer.bias.float()
