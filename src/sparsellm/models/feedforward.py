r"""Plain and gated feed-forward parts, and SparseLLM's closed-form updates of their auxiliary signals.

A feed-forward part is one or two input projections, an activation function $\varphi$ and an output projection. The auxiliary
signals are the outputs $z$ (and $s$, of the gate) of the input projections and the input $p$ of the output projection. Each
update minimises the objective over one signal, with all others and the weights fixed (paper eqs. 5 and 6; $W x$ includes the
bias, $y$ is the target output):

$$\alpha \lVert y - W_{out} p \rVert^2 + \beta \lVert p - \varphi(z) \rVert^2 + \alpha \lVert z - W_{in} x \rVert^2
  \qquad \text{plain}$$

$$\alpha \lVert y - W_{down} p \rVert^2 + \beta \lVert p - \varphi(s) \odot z \rVert^2
  + \alpha \lVert z - W_{up} x \rVert^2 + \alpha \lVert s - W_{gate} x \rVert^2 \qquad \text{gated}$$

with $\varphi$ the ReLU (plain only), SiLU or a GELU. The minimisers depend on alpha and beta only through r = beta / alpha.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import relu

from sparsellm.models.activation_functions import ACTIVATION_FUNCTIONS
from sparsellm.models.gate_update import solve_gate
from sparsellm.solvers.linalg import cholesky

Hidden = tuple[Tensor, ...]
"""Outputs of the input projections, each (tokens, hidden): (z,) for a plain feed-forward part, (s, z) for a gated one."""


class FeedForward(Protocol):
    """Interface of a feed-forward part. Layers are given by their names within the block."""

    @property
    def in_proj(self) -> tuple[str, ...]:
        """The input projections, in the order of the arguments of `activate`."""
        ...

    @property
    def out_proj(self) -> str:
        """The output projection."""
        ...

    def activate(self, *hidden: Tensor) -> Tensor:
        """Compute the input of the output projection, (tokens, hidden), from the outputs of the input projections."""
        ...

    def slopes(self, *hidden: Tensor) -> Hidden:
        """Compute the elementwise derivatives of `activate` by its arguments, each (tokens, hidden)."""
        ...

    def fit_hidden(self, hidden: Hidden, outputs: Hidden, activated: Tensor, ratio: float) -> Hidden:
        """Update the signals of the input projections in turn: each minimises the objective with all others fixed.

        Args:
            hidden: The current signals.
            outputs: Outputs W x + bias of the pruned input projections.
            activated: The signal p, (tokens, hidden).
            ratio: beta / alpha.
        """
        ...


@dataclass(frozen=True)
class PlainFeedForward:
    """out_proj(φ(up(x))), as in OPT (ReLU) and GPT-2 (GELU).

    Attributes:
        up: The input projection.
        out_proj: The output projection.
        activation: φ: "relu" or a name in `ACTIVATION_FUNCTIONS`.
    """

    up: str
    out_proj: str
    activation: str = "relu"

    @property
    def in_proj(self) -> tuple[str, ...]:
        return (self.up,)

    def activate(self, *hidden: Tensor) -> Tensor:
        return relu(hidden[0]) if self.activation == "relu" else ACTIVATION_FUNCTIONS[self.activation].value(hidden[0])

    def slopes(self, *hidden: Tensor) -> Hidden:
        if self.activation != "relu":
            return (ACTIVATION_FUNCTIONS[self.activation].curvature(hidden[0])[1],)
        return ((hidden[0] > 0).to(hidden[0].dtype),)

    def fit_hidden(self, hidden: Hidden, outputs: Hidden, activated: Tensor, ratio: float) -> Hidden:
        r"""For ReLU, the better branch for every entry (paper eq. 12); otherwise the gate's minimiser with z = 1.

        With m the pruned output, $z = \max((m + r p) / (1 + r), 0)$ on the positive branch and $z = \min(m, 0)$ on the other.
        The positive branch costs less where $m + (\sqrt{1 + r} - 1)\, \max(p, 0) \ge 0$.
        """
        (output,) = outputs
        if self.activation != "relu":
            curve = ACTIVATION_FUNCTIONS[self.activation]
            return (solve_gate(output, torch.ones_like(output), activated, ratio, present=hidden[0], curve=curve),)
        is_positive = activated.clamp(min=0).mul_(ratio / (1 + math.sqrt(1 + ratio))).add_(output) >= 0
        positive = torch.lerp(output, activated, ratio / (1 + ratio)).clamp_(min=0)
        return (torch.where(is_positive, positive, output),)


@dataclass(frozen=True)
class GatedFeedForward:
    """out_proj(φ(gate(x)) * up(x)), as in Llama (SiLU) and Gemma (GELU). Its signals are (s, z), of the gate and of `up`.

    Attributes:
        gate: The input projection inside the activation function.
        up: The other input projection.
        out_proj: The output projection.
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

    def fit_hidden(self, hidden: Hidden, outputs: Hidden, activated: Tensor, ratio: float) -> Hidden:
        r"""First $z = (m + r \, \varphi(s) \, p) / (1 + r \, \varphi(s)^2)$, m the pruned output, then the gate's minimiser.

        The paper gives the first for alpha = beta; its code omits the factor and replaces the second by two gradient steps.
        """
        gate_output, up_output = outputs
        curve = ACTIVATION_FUNCTIONS[self.activation]
        gated = curve.value(hidden[0])
        up = (up_output + ratio * gated * activated) / (1 + ratio * gated.square())
        # `present` keeps the current gate where rounding would make the minimiser worse.
        return solve_gate(gate_output, up, activated, ratio, present=hidden[0], curve=curve), up


def fit_activated(shape: Tensor, weight: Tensor, target: Tensor, correction: Tensor) -> Tensor:
    r"""Minimise $\lVert y - W p \rVert^2 + r \lVert p - \varphi \rVert^2$ over the inputs p of the output projection.

    $$p = \varphi + W^\top (W W^\top + r I)^{-1} (y - W \varphi)$$

    This is paper eq. 9 by Woodbury's identity. The matrix is (model, model) and better conditioned than the paper's
    $(W^\top W + r I)$, which is (hidden, hidden).

    Args:
        shape: φ, the output of the activation function, (tokens, hidden).
        weight: W, (model, hidden).
        target: y without the bias, (tokens, model).
        correction: (W Wᵀ + r I)⁻¹ W, from `activation_correction`; the same for all tokens of an epoch.

    Returns:
        p, (tokens, hidden).
    """
    return torch.addmm(shape, torch.addmm(target, shape, weight.T, alpha=-1), correction)


def activation_correction(weight: Tensor, ratio: float) -> Tensor:
    """Compute (W Wᵀ + r I)⁻¹ W, (model, hidden), for the weight W of an output projection."""
    matrix = weight @ weight.T
    matrix.diagonal().add_(ratio)
    return torch.cholesky_solve(weight, cholesky(matrix, ratio, "beta / alpha"))
