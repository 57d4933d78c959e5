"""Regressions computed from the tokens themselves in float64: what `sparsellm.solvers.regression` is compared with."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsellm.solvers.regression import FLOOR, MAX_RIDGE


def least_squares(x: Tensor, y: Tensor, prior: Tensor, ridge: float, affine: bool) -> Tensor:
    """The W that minimizes the mean of ‖y - W x - b‖², b free, and the pull toward W0: the rows of the problem, by QR.

    The pull on the squared change of an input's weights is `ridge` times its power and `FLOOR` times the mean power.
    """
    x, y, prior = x.double(), y.double(), prior.double()
    seen = x - x.mean(0) if affine else x
    power = seen.square().sum(0)
    pull = (ridge * power + FLOOR * power.mean()).sqrt().diag()
    left, right = torch.cat([x, pull]), torch.cat([y, pull @ prior.T])
    if affine:
        free = torch.cat([torch.ones(len(x), 1), torch.zeros(len(pull), 1)]).double()
        left = torch.cat([left, free], 1)
    solution: Tensor = torch.linalg.lstsq(left, right, driver="gelsd").solution
    return solution[: x.shape[1]].T


def estimated_ridge(x: Tensor, y: Tensor, prior: Tensor, affine: bool) -> float:
    """The ridge from the tokens themselves: changes of variance a and noise of power s have these two moments in the mean."""
    x, left = x.double(), y.double() - x.double() @ prior.double().T
    if affine:
        x, left = x - x.mean(0), left - left.mean(0)
    scale, count = x.square().mean(0).sqrt(), len(x)
    x = x[:, scale > 0] / scale[scale > 0]
    features = x.shape[1]
    correlation = x.T @ x / count
    moments = torch.tensor([float((left.T @ x / count).square().sum()), float(left.square().sum(1).mean())]).double()
    of_changes_and_noise = torch.tensor(
        [[float(correlation.square().sum()), features / count], [float(features), 1.0]]
    ).double()
    variance, noise = torch.linalg.solve(of_changes_and_noise, moments).tolist()
    return min(max(noise / (count * variance), 0.0), MAX_RIDGE)
