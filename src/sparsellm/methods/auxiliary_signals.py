r"""The auxiliary signals of one feed-forward part, their closed-form updates, and the sums for the regressions of its layers.

The auxiliary signals are the outputs $z$ (and $s$, of the gate) of the input projections and the input $p$ of the output
projection. Each update minimizes the objective over one signal, with all others and the weights fixed (paper eqs. 5 and 6;
$W x$ includes the bias, $y$ is the target output):

$$\alpha \lVert y - W_{out} p \rVert^2 + \beta \lVert p - \varphi(z) \rVert^2 + \alpha \lVert z - W_{in} x \rVert^2
  \qquad \text{plain}$$

$$\alpha \lVert y - W_{down} p \rVert^2 + \beta \lVert p - \varphi(s) \odot z \rVert^2
  + \alpha \lVert z - W_{up} x \rVert^2 + \alpha \lVert s - W_{gate} x \rVert^2 \qquad \text{gated}$$

with $\varphi$ the ReLU (plain only), SiLU or a GELU. The minimizers depend on alpha and beta only through r = beta / alpha.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsellm.activations.streams import Capture, CaptureRequest
from sparsellm.errors import SingularGram
from sparsellm.methods.gate_update import solve_gate
from sparsellm.models.blocks import Block
from sparsellm.models.feedforward import ACTIVATION_FUNCTIONS, FeedForward, Hidden
from sparsellm.models.linear_views import Layer
from sparsellm.models.sparse_matmul import MatMul, matmul_of
from sparsellm.runtime import collectives, devices
from sparsellm.runtime.products import matmul
from sparsellm.solvers.linalg import cholesky_, dot_float64, quadratic_form
from sparsellm.solvers.problem import LayerProblem
from sparsellm.solvers.statistics import CrossMoment, Gram

ERROR_TOKENS = 2048
"""Least number of tokens on which the feed-forward error of an epoch is measured where it is only reported."""


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
        cross = matmul(weight, inputs.matrix)
        return cls(dot_float64(cross, weight), cross, inputs)

    def error(self, weight: Tensor) -> float:
        """E‖t - W x‖²."""
        return self.power - 2 * dot_float64(self.cross, weight) + float(quadratic_form(weight, self.inputs.view, weight))


class AuxiliarySignals:
    """The auxiliary signals of one feed-forward part, batch by batch.

    Between epochs only the signals of the input projections, z (and s), are kept: (tokens, hidden) for each batch. The signal
    p, the input of the output projection, follows from them in closed form and exists for one batch at a time; only its sums
    E[p pᵀ] and E[y pᵀ] are kept.

    Where the part's inputs are bfloat16, as with products in bfloat16, the signals are rounded to it, and so are the products
    that compute them. The regressions are of the rounded signals. Otherwise all are float32.

    Cost of an epoch that updates them: two products of (tokens, model) by (model, hidden) for each input projection, three for
    the output projection, and the Gram matrix of p.

    Args:
        feed_forward: A feed-forward part of it.
        ratio: beta / alpha.
        updated: Whether the signals are ever updated, so that their first values are kept.
        error_tokens: Least number of tokens, over all processes, on which errors are measured; they are evenly spaced. None for
            all tokens.
    """

    def __init__(
        self,
        block: Block,
        feed_forward: FeedForward,
        ratio: float,
        *,
        updated: bool = True,
        error_tokens: int | None = ERROR_TOKENS,
    ) -> None:
        self._feed_forward = feed_forward
        self._ratio = ratio
        self._updated, self._error_tokens, self._error_step = updated, error_tokens, 1
        self._names = {name: block.full_name(name) for name in (*feed_forward.in_proj, feed_forward.out_proj)}
        self._layers = {name: block.layer(name) for name in self._names}
        self._dense = {name: layer.weight.detach().to(torch.float32, copy=True) for name, layer in self._layers.items()}
        self._inputs: list[Tensor] = []  # x, (tokens, model), in the model's dtype
        self._outputs: list[Tensor] = []  # y, (tokens, model)
        self._hidden: list[Hidden] = []  # (z,) or (s, z), (tokens, hidden) each
        self._products: torch.dtype | None = None  # dtype of the signals and their products; None for float32
        self._fits: dict[str, Fit] = {}
        self._distance = 0.0  # E‖p - φ(z)‖²

    @property
    def request(self) -> CaptureRequest:
        """The request of a pass through the dense block: the part's inputs and outputs, and the first signals."""
        in_proj = self._feed_forward.in_proj
        return CaptureRequest([in_proj[0]], [*(in_proj if self._updated else ()), self._feed_forward.out_proj])

    def append(self, captured: Capture) -> None:
        """Add what was captured from a batch."""
        inputs = captured.inputs[self._feed_forward.in_proj[0]]
        self._products = torch.bfloat16 if inputs.dtype == torch.bfloat16 else None
        self._inputs.append(inputs)
        self._outputs.append(captured.outputs[self._feed_forward.out_proj])
        if self._updated:
            self._hidden.append(tuple(self._rounded(captured.outputs[name]) for name in self._feed_forward.in_proj))

    def start(self, inputs: Mapping[str, Gram]) -> None:
        """Start from the signals of the dense part: z = W₀x, p = φ(z). `inputs`: the Gram matrix of each layer's inputs."""
        self._fits = {name: Fit.of_dense(weight, inputs[name]) for name, weight in self._dense.items()}
        tokens = inputs[self._feed_forward.out_proj].tokens
        self._error_step = 1 if self._error_tokens is None else max(1, tokens // self._error_tokens)

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
        errors = _ErrorSums(weights[self._feed_forward.out_proj].device)
        products = self._matmuls(weights)
        for inputs, outputs in zip(self._inputs, self._outputs, strict=True):
            rows = slice(None, None, self._error_step)
            self._add_error(errors, self._project(self._rounded(inputs[rows]), products), outputs[rows], products)
        return errors.relative()

    def refit(self, weights: Mapping[str, Tensor]) -> float:
        """Set every signal to its minimizer for these weights, in one pass over the batches in the order p, z, s (eqs. 9-12).

        Args:
            weights: The pruned weights by layer, (out, in) float32.

        Returns:
            The same as `error`.
        """
        in_proj, out_proj = self._feed_forward.in_proj, self._feed_forward.out_proj
        correction = self._rounded(activation_correction(weights[out_proj], self._ratio))
        products = self._matmuls(weights)
        device = weights[out_proj].device
        sums, errors = (
            _Sums({name: tuple(weight.shape) for name, weight in weights.items()}, out_proj, device),
            _ErrorSums(device),
        )
        for batch, (inputs, outputs) in enumerate(zip(self._inputs, self._outputs, strict=True)):
            x = self._rounded(inputs)
            target = self._rounded(_without_bias(outputs.float(), self._layers[out_proj]))
            projected = self._project(x, products)
            rows = slice(None, None, self._error_step)
            self._add_error(errors, tuple(signal[rows] for signal in projected), outputs[rows], products)
            hidden = self._hidden[batch]
            shape = self._feed_forward.activate(*hidden)
            activated = fit_activated_(shape, products[out_proj](shape, None), target, correction)  # p, in place of shape
            targets = self._update_hidden(hidden, projected, activated, sums)
            self._hidden[batch] = projected
            sums.inputs.update(activated)
            sums.add(out_proj, target, activated)
            for name, signal in zip(in_proj, targets, strict=True):
                sums.cross[name].update(signal, x)
        sums.reduce()
        sums.inputs.finalize()
        tokens = max(sums.inputs.tokens, 1)
        self._distance = float(sums.distance) / tokens
        grams = {name: self._fits[name].inputs for name in in_proj} | {out_proj: sums.inputs}
        self._fits = {name: Fit(float(sums.power[name]) / tokens, sums.cross[name].matrix, grams[name]) for name in weights}
        return errors.relative()

    def _update_hidden(self, hidden: Hidden, projected: Hidden, activated: Tensor, sums: _Sums) -> Hidden:
        """Update the signals of one batch in place of `projected`, and overwrite `hidden`; the signals without biases.

        On a CPU a few rows at a time, so that the temporaries stay in its cache.
        """
        in_proj = self._feed_forward.in_proj
        for part, *signals in devices.row_chunks(activated, *hidden, *projected):
            old, outputs, p = tuple(signals[: len(hidden)]), tuple(signals[len(hidden) :]), part.float()
            new = fit_hidden(self._feed_forward, _in_float32(old), _in_float32(outputs), p, ratio=self._ratio)
            for name, before, output, signal in zip(in_proj, old, outputs, new, strict=True):
                output.copy_(signal)
                target = before.copy_(_without_bias(output.float(), self._layers[name]))
                sums.power[name] += target.float().square().sum()
            sums.distance += self._feed_forward.activate(*_in_float32(outputs)).sub_(p).square_().sum()
        return hidden

    def _add_error(self, errors: _ErrorSums, hidden: Hidden, outputs: Tensor, products: Mapping[str, MatMul]) -> None:
        """Add ‖y - V φ(z)‖² and ‖y‖² of some tokens, where `hidden` is z."""
        out_proj = self._feed_forward.out_proj
        target = _without_bias(outputs.float(), self._layers[out_proj])
        output = products[out_proj](self._feed_forward.activate(*hidden), None).float()
        errors.squared += torch.stack([output.sub_(target).square_().sum(), target.square().sum()])

    def _project(self, x: Tensor, products: Mapping[str, MatMul]) -> Hidden:
        """The outputs of the input projections, (tokens, hidden) each."""
        return tuple(products[name](x, _bias(self._layers[name])) for name in self._feed_forward.in_proj)

    def _matmuls(self, weights: Mapping[str, Tensor]) -> Mapping[str, MatMul]:
        """The products of signals with weights, by layer."""
        return {name: matmul_of(weight, self._products) for name, weight in weights.items()}

    def _rounded(self, tensor: Tensor) -> Tensor:
        """A tensor in the dtype of the signals."""
        return tensor.to(self._products or torch.float32)


class _ErrorSums:
    """Sums over tokens of the squared feed-forward error and of the energy of its target."""

    def __init__(self, device: torch.device) -> None:
        self.squared = torch.zeros(2, dtype=devices.widest_float(device), device=device)

    def relative(self) -> float:
        """The relative error over all processes; 0 if the target's energy is 0."""
        collectives.all_reduce_(self.squared)
        error, power = devices.to_python(list(self.squared))
        return error / power if power > 0 else 0.0


class _Sums:
    """Sums over tokens from one pass over the batches, on the layers' device."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], out_proj: str, device: torch.device) -> None:
        self.cross = {name: CrossMoment(rows, columns, device) for name, (rows, columns) in shapes.items()}
        wide = devices.widest_float(device)
        self.power = {name: torch.zeros((), dtype=wide, device=device) for name in shapes}
        self.inputs = Gram(shapes[out_proj][1], device)  # of p
        self.distance = torch.zeros((), dtype=wide, device=device)  # of p from φ(z)

    def add(self, name: str, targets: Tensor, inputs: Tensor) -> None:
        """Add a batch of a layer's targets, (tokens, out), and inputs, (tokens, in)."""
        self.cross[name].update(targets, inputs)
        self.power[name] += targets.float().square().sum()

    def reduce(self) -> None:
        """Sum over all processes."""
        self.inputs.reduce()
        for cross in self.cross.values():
            cross.reduce()
        collectives.all_reduce_(*self.power.values(), self.distance)


def _bias(layer: Layer) -> Tensor | None:
    """The layer's bias in float32; None if it has none."""
    return None if layer.bias is None else layer.bias.float()


def _in_float32(signals: Hidden) -> Hidden:
    """Signals in float32."""
    return tuple(signal.float() for signal in signals)


def _without_bias(outputs: Tensor, layer: Layer) -> Tensor:
    """Outputs minus the layer's bias: the targets of its weight."""
    return outputs if layer.bias is None else outputs - layer.bias.float()


def fit_hidden(part: FeedForward, hidden: Hidden, outputs: Hidden, activated: Tensor, *, ratio: float) -> Hidden:
    r"""Update the signals of the input projections in turn: each minimizes the objective with all others fixed.

    With m the pruned output of a projection:

    - plain with ReLU, the better branch for every entry (paper eq. 12): $z = \max((m + r p) / (1 + r), 0)$ on the positive
      branch and $z = \min(m, 0)$ on the other. The positive branch costs less where
      $m + (\sqrt{1 + r} - 1)\, \max(p, 0) \ge 0$.
    - plain with another activation function, the gate's minimizer with z = 1.
    - gated, first $z = (m + r \, \varphi(s) \, p) / (1 + r \, \varphi(s)^2)$, then the gate's minimizer. The paper gives the
      first for alpha = beta; its code omits the factor and replaces the second by two gradient steps.

    Args:
        hidden: The current signals, (z,) or (s, z), each (tokens, hidden).
        outputs: Outputs W x + bias of the pruned input projections, in the same order.
        activated: The signal p, (tokens, hidden).
        ratio: r = beta / alpha.
    """
    if len(part.in_proj) == 2:
        gate_output, up_output = outputs
        curve = ACTIVATION_FUNCTIONS[part.activation]
        gated = curve.value(hidden[0])
        up = (up_output + ratio * gated * activated) / (1 + ratio * gated.square())
        # `present` keeps the current gate where rounding would make the minimizer worse.
        return solve_gate(gate_output, up, activated, ratio=ratio, present=hidden[0], curve=curve), up
    (output,) = outputs
    if part.activation != "relu":
        curve = ACTIVATION_FUNCTIONS[part.activation]
        return (solve_gate(output, torch.ones_like(output), activated, ratio=ratio, present=hidden[0], curve=curve),)
    is_positive = activated.clamp(min=0).mul_(ratio / (1 + math.sqrt(1 + ratio))).add_(output) >= 0
    positive = torch.lerp(output, activated, ratio / (1 + ratio)).clamp_(min=0)
    return (torch.where(is_positive, positive, output),)


def fit_activated_(shape: Tensor, output: Tensor, target: Tensor, correction: Tensor) -> Tensor:
    r"""Minimize $\lVert y - W p \rVert^2 + r \lVert p - \varphi \rVert^2$ over the inputs p of the output projection.

    $$p = \varphi + W^\top (W W^\top + r I)^{-1} (y - W \varphi)$$

    This is paper eq. 9 by Woodbury's identity. The matrix is (model, model) and better conditioned than the paper's
    $(W^\top W + r I)$, which is (hidden, hidden).

    Args:
        shape: φ, the output of the activation function, (tokens, hidden). Overwritten by p.
        output: W φ, (tokens, model).
        target: y without the bias, (tokens, model).
        correction: (W Wᵀ + r I)⁻¹ W, from `activation_correction`; the same for all tokens of an epoch.

    Returns:
        p, (tokens, hidden).
    """
    return shape.add_(matmul(target - output, correction))


def activation_correction(weight: Tensor, ratio: float) -> Tensor:
    """Compute (W Wᵀ + r I)⁻¹ W, (model, hidden), for the weight W of an output projection."""
    matrix = matmul(weight, weight.T)
    matrix.diagonal().add_(ratio)
    return torch.cholesky_solve(weight, cholesky_(matrix, ratio, "beta / alpha"))
