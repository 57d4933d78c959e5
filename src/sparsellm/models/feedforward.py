r"""The feed-forward part of a block as SparseLLM sees it: two or three linear layers around an activation, and the closed-form
updates of the auxiliary signals between them.

The signals minimise, one at a time, with the weights held (paper eqs. 5 and 6; $z$, $s$ are the readers' outputs, $p$ the
writer's inputs, biases included in $W x$):

$$\alpha \lVert y - W_{out} p \rVert^2 + \beta \lVert p - \varphi(z) \rVert^2 + \alpha \lVert z - W_{in} x \rVert^2
  \qquad \text{plain}$$

$$\alpha \lVert y - W_{down} p \rVert^2 + \beta \lVert p - \varphi(s) \odot z \rVert^2
  + \alpha \lVert z - W_{up} x \rVert^2 + \alpha \lVert s - W_{gate} x \rVert^2 \qquad \text{gated}$$

with $\varphi$ the ReLU (plain only), SiLU or a GELU. Every update divides by alpha and works with the one ratio beta / alpha.
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
"""The readers' outputs, each (tokens, hidden): (z,) for a plain feed-forward, (s, z) for a gated one."""


class FeedForward(Protocol):
    """What SparseLLM needs to know of a feed-forward part."""

    @property
    def in_proj(self) -> tuple[str, ...]:
        """The layers that read the block's stream, by name within the block, in the order of `activate`'s arguments."""
        ...

    @property
    def out_proj(self) -> str:
        """The layer that writes the part's output, by name within the block."""
        ...

    def activate(self, *hidden: Tensor) -> Tensor:
        """What the writer reads, (tokens, hidden), from the readers' outputs."""
        ...

    def slopes(self, *hidden: Tensor) -> Hidden:
        """The derivatives of `activate` by each of its arguments, entry by entry; each (tokens, hidden)."""
        ...

    def fit_hidden(self, hidden: Hidden, outputs: Hidden, activated: Tensor, ratio: float) -> Hidden:
        """New readers' signals: each the minimiser of the objective with all else held, one after the other.

        hidden: the present signals. outputs: W x + bias of the pruned readers. activated: p. ratio: beta / alpha.
        """
        ...


@dataclass(frozen=True)
class PlainFeedForward:
    """writer(φ(reader(x))): with a ReLU as in OPT, with a GELU as in GPT-2.

    activation: φ, by its name in a configuration; "relu" or one of `CURVES`.
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
        r"""For a ReLU the better of the two branches, entry by entry (paper eq. 12); else the gate's minimiser with z = 1.

        $z = \max((m + r p) / (1 + r), 0)$ where the ReLU passes, $z = \min(m, 0)$ where it does not. Both costs compared, it
        should pass where $m \ge 0$, and where $m + (\sqrt{1 + r} - 1)\, p \ge 0$: one look at each signal decides.
        """
        (reached,) = outputs
        if self.activation != "relu":
            curve = ACTIVATION_FUNCTIONS[self.activation]
            return (solve_gate(reached, torch.ones_like(reached), activated, ratio, present=hidden[0], curve=curve),)
        passes = activated.clamp(min=0).mul_(ratio / (1 + math.sqrt(1 + ratio))).add_(reached) >= 0
        passing = torch.lerp(reached, activated, ratio / (1 + ratio)).clamp_(min=0)
        return (torch.where(passes, passing, reached),)


@dataclass(frozen=True)
class GatedFeedForward:
    """writer(φ(gate(x)) * up(x)): with SiLU as in Llama, with a GELU as in Gemma.

    The signals are (s, z): the gate's output and the up projection's. activation: φ, one of `CURVES` by its name.
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
        r"""First $z = (m + r \, \varphi(s) \, p) / (1 + r \, \varphi(s)^2)$, then the gate by its global minimiser.

        The paper writes the first for alpha = beta; its code drops the factor, and takes two gradient steps for the second.
        """
        gate_reached, up_reached = outputs
        curve = ACTIVATION_FUNCTIONS[self.activation]
        opened = curve.value(hidden[0])
        up = (up_reached + ratio * opened * activated) / (1 + ratio * opened.square())
        # The present gate competes too: a minimiser found to rounding must never be a step back.
        return solve_gate(gate_reached, up, activated, ratio, present=hidden[0], curve=curve), up


def fit_activated(shape: Tensor, weight: Tensor, target: Tensor, correction: Tensor) -> Tensor:
    r"""The writer's inputs that minimise $\lVert y - W p \rVert^2 + r \lVert p - \varphi \rVert^2$ (paper eq. 9, by Woodbury):

    $$p = \varphi + W^\top (W W^\top + r I)^{-1} (y - W \varphi)$$

    The matrix is (model, model) where the paper's $(W^\top W + r I)$ is (hidden, hidden), and it is better conditioned.

    shape: φ(z), (tokens, hidden). weight: (model, hidden). target: y less the bias, (tokens, model).
    correction: (W Wᵀ + r I)⁻¹ W, from `activation_correction`; the same for all tokens of an epoch.
    """
    return torch.addmm(shape, torch.addmm(target, shape, weight.T, alpha=-1), correction)


def activation_correction(weight: Tensor, ratio: float) -> Tensor:
    """(W Wᵀ + r I)⁻¹ W, (model, hidden), for a writer weight W of that shape."""
    matrix = weight @ weight.T
    matrix.diagonal().add_(ratio)
    return torch.cholesky_solve(weight, cholesky(matrix, ratio, "beta / alpha"))
