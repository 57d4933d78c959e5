"""Feed-forward parts: one or two input projections, an activation function and an output projection."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import gelu, relu, silu

BISECTIONS = 24
"""Bisection steps of an inverse. The bracket is at most 30 wide, so the result is within 2e-6; Newton steps refine it."""

TANH_SCALE, TANH_CUBIC = math.sqrt(2 / math.pi), 0.044715
"""Constants of the tanh approximation of GELU (Hendrycks & Gimpel, 2016)."""

QUICK = 1.702
"""Constant of the sigmoid approximation of GELU, from the same paper."""


@dataclass(frozen=True)
class ActivationFunction:
    """An activation function with one minimum that approaches the identity for large inputs.

    Attributes:
        curvature: Value, first and second derivative, elementwise.
        lowest: Where the minimum is.
        floor: The value there.
        steepest: Bound on the absolute first derivative.
        sharpest: Bound on the absolute second derivative.
    """

    value: Callable[[Tensor], Tensor]
    curvature: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]
    lowest: float
    floor: float
    steepest: float
    sharpest: float

    def right_meeting(self, target: Tensor) -> Tensor:
        """Approximate the s >= lowest with value `target`; `lowest` where `target` is below `floor`."""
        low, high = torch.full_like(target, self.lowest), target.clamp(min=0) + 0.5
        for _ in range(BISECTIONS):
            middle = 0.5 * (low + high)
            below = self.value(middle) < target
            low, high = torch.where(below, middle, low), torch.where(below, high, middle)
        return high

    def left_meeting(self, target: Tensor) -> Tensor:
        """Approximate the s <= lowest with value `target`, for targets in (floor, 0); `lowest` for all others."""
        inside = (target > self.floor) & (target < 0)
        low, high = torch.full_like(target, -30.0), torch.full_like(target, self.lowest)
        for _ in range(BISECTIONS):
            middle = 0.5 * (low + high)
            above = self.value(middle) > target
            low, high = torch.where(above, middle, low), torch.where(above, high, middle)
        return torch.where(inside, high, self.lowest)


@dataclass(frozen=True)
class SiLU(ActivationFunction):
    """s sigmoid(s). Newton steps from closed-form initial values invert it faster than bisection."""

    def right_meeting(self, target: Tensor) -> Tensor:
        gap = (target - self.floor).clamp(min=0)
        # Near the minimum a parabola of curvature 0.22, far to the right s itself; then two Newton steps.
        near = self.lowest + (gap / 0.22).sqrt() * (1 + 0.12 * gap)
        s = torch.where(gap < 0.6, near, target + 0.9 * torch.exp(-target.clamp(min=0)))
        for _ in range(2):
            sigma = torch.sigmoid(s)
            slope = (sigma * (1 + s * (1 - sigma))).clamp(min=1e-3)
            s = (s - (s * sigma - target) / slope).clamp(min=self.lowest)
        return s

    def left_meeting(self, target: Tensor) -> Tensor:
        inside = (target > self.floor) & (target < 0)
        depth = (-target).clamp(min=1e-12, max=-self.floor)
        s = torch.log(depth) - torch.log(-torch.log(depth).clamp(max=-1.0))
        s = torch.minimum(s, self.lowest - ((target - self.floor).clamp(min=0) / 0.22).sqrt() * 0.5)
        for _ in range(3):
            sigma = torch.sigmoid(s)
            slope = (sigma * (1 + s * (1 - sigma))).clamp(max=-1e-6)
            s = (s - ((s * sigma - target) / slope).clamp(-2, 2)).clamp(min=-30, max=self.lowest)
        return torch.where(inside, s, self.lowest)


def _silu(s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    sigma = torch.sigmoid(s)
    return s * sigma, sigma * (1 + s * (1 - sigma)), sigma * (1 - sigma) * (2 + s * (1 - 2 * sigma))


def _gelu(s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    probability = 0.5 * (1 + torch.erf(s * math.sqrt(0.5)))
    density = torch.exp(-0.5 * s.square()) * (1 / math.sqrt(2 * math.pi))
    return s * probability, probability + s * density, density * (2 - s.square())


def _gelu_tanh(s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    square = s.square()
    t = torch.tanh(TANH_SCALE * s * (1 + TANH_CUBIC * square))
    inner_slope, inner_curvature = TANH_SCALE * (1 + 3 * TANH_CUBIC * square), 6 * TANH_SCALE * TANH_CUBIC * s
    tanh_slope = 1 - t.square()
    curvature = tanh_slope * inner_slope + 0.5 * s * tanh_slope * (inner_curvature - 2 * t * inner_slope.square())
    return 0.5 * s * (1 + t), 0.5 * (1 + t) + 0.5 * s * tanh_slope * inner_slope, curvature


def _quick_gelu(s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    value, slope, curvature = _silu(QUICK * s)
    return value / QUICK, slope, QUICK * curvature


SILU = SiLU(silu, _silu, lowest=-1.2784645, floor=-0.2784645, steepest=1.1, sharpest=0.5)
GELU = ActivationFunction(gelu, _gelu, lowest=-0.7517916, floor=-0.1699712, steepest=1.129, sharpest=0.798)
GELU_TANH = ActivationFunction(
    lambda s: gelu(s, approximate="tanh"), _gelu_tanh, lowest=-0.7524614, floor=-0.1700410, steepest=1.1292, sharpest=0.798
)
QUICK_GELU = ActivationFunction(
    lambda s: s * torch.sigmoid(QUICK * s),
    _quick_gelu,
    lowest=SILU.lowest / QUICK,
    floor=SILU.floor / QUICK,
    steepest=1.1,
    sharpest=0.5 * QUICK,
)

ACTIVATION_FUNCTIONS = {
    "silu": SILU,
    "swish": SILU,
    "gelu": GELU,
    "gelu_python": GELU,
    "gelu_new": GELU_TANH,
    "gelu_fast": GELU_TANH,
    "gelu_pytorch_tanh": GELU_TANH,
    "gelu_accurate": GELU_TANH,
    "quick_gelu": QUICK_GELU,
}
"""Activation functions by their name in a model's configuration."""

Hidden = tuple[Tensor, ...]
"""Outputs of the input projections, each (tokens, hidden): (z,) for a plain feed-forward part, (s, z) for a gated one."""


@dataclass(frozen=True)
class PlainFeedForward:
    """out_proj(φ(up(x))), as in OPT (ReLU) and GPT-2 (GELU). Layers are given by their names within the block.

    Attributes:
        activation: φ: "relu" or a name in `ACTIVATION_FUNCTIONS`.
    """

    up: str
    out_proj: str
    activation: str = "relu"

    @property
    def in_proj(self) -> tuple[str, ...]:
        """The input projections, in the order of the arguments of `activate`."""
        return (self.up,)

    def activate(self, *hidden: Tensor) -> Tensor:
        """Compute the input of the output projection, (tokens, hidden), from the outputs of the input projections."""
        return relu(hidden[0]) if self.activation == "relu" else ACTIVATION_FUNCTIONS[self.activation].value(hidden[0])

    def slopes(self, *hidden: Tensor) -> Hidden:
        """Compute the elementwise derivatives of `activate` by its arguments, each (tokens, hidden)."""
        if self.activation != "relu":
            return (ACTIVATION_FUNCTIONS[self.activation].curvature(hidden[0])[1],)
        return ((hidden[0] > 0).to(hidden[0].dtype),)


@dataclass(frozen=True)
class GatedFeedForward:
    """out_proj(φ(gate(x)) * up(x)), as in Llama (SiLU) and Gemma (GELU). Its signals are (s, z), of the gate and of `up`.

    Attributes:
        gate: The input projection inside the activation function.
        up: The other input projection.
        activation: φ, a name in `ACTIVATION_FUNCTIONS`.
    """

    gate: str
    up: str
    out_proj: str
    activation: str = "silu"

    @property
    def in_proj(self) -> tuple[str, ...]:
        return (self.gate, self.up)

    def activate(self, *hidden: Tensor) -> Tensor:
        return ACTIVATION_FUNCTIONS[self.activation].value(hidden[0]) * hidden[1]

    def slopes(self, *hidden: Tensor) -> Hidden:
        gate, up = hidden
        value, slope, _ = ACTIVATION_FUNCTIONS[self.activation].curvature(gate)
        return slope * up, value


FeedForward = PlainFeedForward | GatedFeedForward
"""A feed-forward part."""
