r"""A layer's targets as a function of its inputs: the sums over tokens from which any target becomes a layer problem."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsellm import devices, distributed
from sparsellm.linalg import dot, quadratic
from sparsellm.moments import Cross, Gram
from sparsellm.problem import LayerProblem


class Regression:
    r"""What $E\lVert t - W x - b \rVert^2$ is for every weight, from sums over tokens of inputs x and targets t.

    With a bias that may move, the best one for a weight is $E[t] - W E[x]$, and the weight's own problem is that of the
    centred moments; without, the target is taken as it comes.

    inputs: the Gram of x; layers that read the same inputs share one. outputs: how many the layer has. affine: whether it has a
    bias that may move.
    """

    def __init__(self, inputs: Gram, outputs: int, affine: bool) -> None:
        device = inputs.mean.device
        self.inputs = inputs
        self.affine = affine
        self._cross = Cross(outputs, inputs.features, device)
        self._targets = torch.zeros(outputs, dtype=devices.widest(device), device=device)
        self._power = torch.zeros((), dtype=devices.widest(device), device=device)

    def update(self, targets: Tensor, inputs: Tensor) -> None:
        """Take in a batch: targets (tokens, out) and inputs (tokens, in). The shared Gram is not updated here."""
        self._cross.update(targets, inputs)
        self._targets += targets.float().sum(0)
        self._power += targets.float().square().sum()

    def reduce(self) -> None:
        """Sum over all processes; nothing when alone. The shared Gram is not reduced here."""
        self._cross.reduce()
        distributed.sum_(self._targets, self._power)

    def problem(
        self, prior: Tensor, ridge: float, curvature: Tensor | None = None, start: Tensor | None = None
    ) -> LayerProblem:
        """The layer problem toward the targets, pulled toward a prior weight (out, in): see `LayerProblem.toward`."""
        return LayerProblem.toward(self._centred_cross, self._centred_inputs, prior, ridge, curvature, start)

    def bias(self, weight: Tensor) -> Tensor | None:
        """(out,): the best bias for a weight; None where there is none to move."""
        return self._mean.float() - weight @ self.inputs.mean if self.affine else None

    def error(self, weight: Tensor) -> float:
        """E‖t - W x - b‖² with the best bias."""
        gram, cross = self._centred_inputs.matrix, self._centred_cross
        return self.power - 2 * dot(cross, weight) + float(quadratic(weight, gram, weight))

    @property
    def power(self) -> float:
        """E‖t‖², about the mean where a bias may move."""
        power = float(self._power) / max(self.inputs.tokens, 1)
        return power - float(devices.precise(self._mean).square().sum()) if self.affine else power

    @property
    def _mean(self) -> Tensor:
        return self._targets / max(self.inputs.tokens, 1)

    @property
    def _centred_inputs(self) -> Gram:
        return self.inputs.centred() if self.affine else self.inputs

    @property
    def _centred_cross(self) -> Tensor:
        if not self.affine:
            return self._cross.matrix
        constant = self._centred_inputs.matrix.diagonal() == 0  # what is left of their products is rounding
        return self._cross.less(self._mean, self.inputs.centre).masked_fill_(constant, 0)
