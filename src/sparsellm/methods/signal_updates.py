r"""SparseLLM's closed-form updates of the auxiliary signals of a feed-forward part.

The auxiliary signals are the outputs $z$ (and $s$, of the gate) of the input projections and the input $p$ of the output
projection. Each update minimises the objective over one signal, with all others and the weights fixed (paper eqs. 5 and 6;
$W x$ includes the bias, $y$ is the target output):

$$\alpha \lVert y - W_{out} p \rVert^2 + \beta \lVert p - \varphi(z) \rVert^2 + \alpha \lVert z - W_{in} x \rVert^2
  \qquad \text{plain}$$

$$\alpha \lVert y - W_{down} p \rVert^2 + \beta \lVert p - \varphi(s) \odot z \rVert^2
  + \alpha \lVert z - W_{up} x \rVert^2 + \alpha \lVert s - W_{gate} x \rVert^2 \qquad \text{gated}$$

with $\varphi$ the ReLU (plain only), SiLU or a GELU. The minimisers depend on alpha and beta only through r = beta / alpha.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparsellm.methods.gate_update import solve_gate
from sparsellm.models.feedforward import ACTIVATION_FUNCTIONS, FeedForward, Hidden
from sparsellm.runtime.products import matmul
from sparsellm.solvers.linalg import cholesky_


def fit_hidden(part: FeedForward, hidden: Hidden, outputs: Hidden, activated: Tensor, *, ratio: float) -> Hidden:
    r"""Update the signals of the input projections in turn: each minimises the objective with all others fixed.

    With m the pruned output of a projection:

    - plain with ReLU, the better branch for every entry (paper eq. 12): $z = \max((m + r p) / (1 + r), 0)$ on the positive
      branch and $z = \min(m, 0)$ on the other. The positive branch costs less where
      $m + (\sqrt{1 + r} - 1)\, \max(p, 0) \ge 0$.
    - plain with another activation function, the gate's minimiser with z = 1.
    - gated, first $z = (m + r \, \varphi(s) \, p) / (1 + r \, \varphi(s)^2)$, then the gate's minimiser. The paper gives the
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
        # `present` keeps the current gate where rounding would make the minimiser worse.
        return solve_gate(gate_output, up, activated, ratio=ratio, present=hidden[0], curve=curve), up
    (output,) = outputs
    if part.activation != "relu":
        curve = ACTIVATION_FUNCTIONS[part.activation]
        return (solve_gate(output, torch.ones_like(output), activated, ratio=ratio, present=hidden[0], curve=curve),)
    is_positive = activated.clamp(min=0).mul_(ratio / (1 + math.sqrt(1 + ratio))).add_(output) >= 0
    positive = torch.lerp(output, activated, ratio / (1 + ratio)).clamp_(min=0)
    return (torch.where(is_positive, positive, output),)


def fit_activated_(shape: Tensor, output: Tensor, target: Tensor, correction: Tensor) -> Tensor:
    r"""Minimise $\lVert y - W p \rVert^2 + r \lVert p - \varphi \rVert^2$ over the inputs p of the output projection.

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
