r"""A layer's targets as a function of its inputs: the sums over tokens from which any target becomes a layer problem."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from sparsellm.runtime import collectives, devices
from sparsellm.solvers.linalg import dot_float64, quadratic_form
from sparsellm.solvers.problem import LayerProblem
from sparsellm.solvers.statistics import CrossMoment, Gram


class Regression(ABC):
    r"""What $E\lVert t - W x - b \rVert^2$ is for every weight, from sums over tokens of inputs x and targets t.

    With a bias that may move, the best one for a weight is $E[t] - W E[x]$, and the weight's own problem is that of the
    centred moments; without, the target is taken as it comes.

    inputs: the Gram of x; layers that read the same inputs share one. affine: whether the layer has a bias that may move.
    """

    def __init__(self, inputs: Gram, affine: bool) -> None:
        self.inputs = inputs
        self.affine = affine

    def problem(self, prior: Tensor, ridge: float, curvature: Tensor | None = None) -> LayerProblem:
        """The layer problem toward the targets, pulled toward a prior weight (out, in): see `LayerProblem.toward`."""
        return LayerProblem.from_targets(self._cross(), self._gram, prior, ridge, curvature)

    def bias(self, weight: Tensor) -> Tensor | None:
        """(out,): the best bias for a weight; None where there is none to move."""
        return self._mean.float() - weight @ self.inputs.mean if self.affine else None

    def error(self, weight: Tensor) -> float:
        """E‖t - W x - b‖² with the best bias."""
        return self.power - 2 * dot_float64(self._cross(), weight) + float(quadratic_form(weight, self._gram.matrix, weight))

    @property
    @abstractmethod
    def power(self) -> float:
        """E‖t‖², about the mean where a bias may move."""

    @property
    @abstractmethod
    def _mean(self) -> Tensor:
        """(out,): E[t], in double precision."""

    @abstractmethod
    def _products(self) -> Tensor:
        """(out, in) float32: E[t xᵀ], about the means where a bias may move."""

    @property
    def _gram(self) -> Gram:
        return self.inputs.centered() if self.affine else self.inputs

    def _cross(self) -> Tensor:
        """The products, but for inputs that are constant, of which nothing but rounding is left."""
        products = self._products()
        return products.masked_fill_(self._gram.rms == 0, 0) if self.affine else products


class TargetRegression(Regression):
    """A regression whose targets are taken in batch by batch."""

    def __init__(self, inputs: Gram, outputs: int, affine: bool) -> None:
        """outputs: how many the layer has."""
        super().__init__(inputs, affine)
        device = inputs.mean.device
        self._sums = CrossMoment(outputs, inputs.features, device, inputs.unit)
        self._targets = torch.zeros(outputs, dtype=devices.widest_float(device), device=device)
        self._squares = torch.zeros((), dtype=devices.widest_float(device), device=device)

    def update(self, targets: Tensor, inputs: Tensor) -> None:
        """Take in a batch: targets (tokens, out) and inputs (tokens, in). The shared Gram is not updated here."""
        self._sums.update(targets, inputs)
        for rows in targets.float().split(self.inputs.unit or max(len(targets), 1)):
            self._targets += rows.sum(0)
            self._squares += rows.square().sum()

    def reduce(self) -> None:
        """Sum over all processes; nothing when alone. The shared Gram is not reduced here."""
        self._sums.reduce()
        collectives.all_reduce_(self._targets, self._squares)

    @property
    def power(self) -> float:
        power = float(self._squares) / max(self.inputs.tokens, 1)
        return power - float(devices.full_precision(self._mean).square().sum()) if self.affine else power

    @property
    def _mean(self) -> Tensor:
        return self._targets / max(self.inputs.tokens, 1)

    def _products(self) -> Tensor:
        return self._sums.centered_matrix(self._mean, self.inputs.centre) if self.affine else self._sums.matrix


class PairedStatistics:
    """Sums over tokens of what a layer reads, x, and of what it would have read, z: (tokens, in) each.

    Enough for targets that layers themselves make of z, which then never need be made. inputs: the Gram of x.
    Cost: two more (in, in) matrices, and for every token one and a half product of one.
    """

    def __init__(self, inputs: Gram) -> None:
        device = inputs.mean.device
        self.inputs, self.others = inputs, Gram(inputs.features, device, inputs.unit)
        self.cross = CrossMoment(inputs.features, inputs.features, device, inputs.unit)

    def update(self, inputs: Tensor, others: Tensor) -> None:
        """Take in a batch. The Gram of the inputs is not updated here."""
        self.others.update(others)
        self.cross.update(others, inputs)

    def reduce(self) -> None:
        """Sum over all processes; nothing when alone. The Gram of the inputs is not reduced here."""
        self.others.reduce()
        self.cross.reduce()


class LinearTargetRegression(Regression):
    r"""A regression whose targets are $t = A z + a$ of other inputs z: $E[t x^\top] = A\,E[z x^\top] + a\,E[x]^\top$."""

    def __init__(self, twins: PairedStatistics, weight: Tensor, bias: Tensor | None) -> None:
        """weight, bias: A, (out, in), and a, (out,), if there is one: it may then move."""
        super().__init__(twins.inputs, bias is not None)
        self._twins, self._weight, self._offset = twins, weight, bias

    @property
    def power(self) -> float:
        others = self._twins.others.centered() if self.affine else self._twins.others
        return float(quadratic_form(self._weight, others.matrix, self._weight))

    @property
    def _mean(self) -> Tensor:
        centre = self._twins.others.centre
        mean = self._weight.to(centre.dtype) @ centre
        return mean if self._offset is None else mean + self._offset

    def _products(self) -> Tensor:
        means = (self._twins.others.centre, self.inputs.centre) if self.affine else (None, None)
        return self._weight @ self._twins.cross.centered_matrix(*means)
