"""Regressions computed from the tokens themselves in float64: what `sparsellm.solvers.regression` is compared with."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparsellm.solvers.regression import DEPENDENT_TOKENS, FLOOR, MAX_RIDGE, MIN_RIDGE, TOLERANCE


def least_squares(x: Tensor, y: Tensor, prior: Tensor, ridge: float, affine: bool) -> Tensor:
    """The W that minimizes the mean of ‖y - W x - b‖², b free, and the pull toward W0: the rows of the problem, by QR.

    The pull on the squared change of an input's weights is `FLOOR` times the mean power, and `ridge` times the sum of this and
    the input's power.
    """
    x, y, prior = x.double(), y.double(), prior.double()
    seen = x - x.mean(0) if affine else x
    power = seen.square().sum(0)
    pull = (ridge * power + (1 + ridge) * FLOOR * power.mean()).sqrt().diag()
    left, right = torch.cat([x, pull]), torch.cat([y, pull @ prior.T])
    if affine:
        free = torch.cat([torch.ones(len(x), 1), torch.zeros(len(pull), 1)]).double()
        left = torch.cat([left, free], 1)
    solution: Tensor = torch.linalg.lstsq(left, right, driver="gelsd").solution
    return solution[: x.shape[1]].T


def estimated_ridge(x: Tensor, y: Tensor, prior: Tensor, affine: bool) -> float:
    """The ridge from the tokens themselves: that of two moments, a tenth of it as often as this helps cross-validation.

    Changes of variance a and noise of power s have these moments in the mean. Cross-validation is by the hat matrix; the
    floor's pull counts as further tokens.
    """
    x, left = x.double(), y.double() - x.double() @ prior.double().T
    if affine:
        x, left = x - x.mean(0), left - left.mean(0)
    scale, tokens, power = x.square().mean(0).sqrt(), len(x), x.square().sum(0).mean()
    seen = x[:, scale > 0]
    x = seen / scale[scale > 0]
    features = x.shape[1]
    correlation = x.T @ x / tokens
    moments = torch.tensor([float((left.T @ x / tokens).square().sum()), float(left.square().sum(1).mean())]).double()
    of_changes_and_noise = torch.tensor(
        [[float(correlation.square().sum()), features / tokens], [float(features), 1.0]]
    ).double()
    variance, noise = torch.linalg.solve(of_changes_and_noise, moments).tolist()
    ridge = min(max(noise / (tokens * variance), MIN_RIDGE), MAX_RIDGE) if variance > 0 else MAX_RIDGE
    rows = torch.cat([seen, (FLOOR * power).sqrt() * torch.eye(features)])
    targets = torch.cat([left, torch.zeros(features, left.shape[1])])

    def error(ridge: float) -> float:
        hat = rows @ torch.linalg.solve(rows.T @ rows + ridge * rows.square().sum(0).diag(), rows.T)
        free = 1 - float(hat.trace()) / (tokens / DEPENDENT_TOKENS)
        return float((targets - hat @ targets).square().sum()) / free**2 if free > 0 else math.inf

    ridges = [ridge]
    while ridges[-1] > MIN_RIDGE and error(ridges[-1] / 10) < error(ridges[-1]):
        ridges.append(ridges[-1] / 10)
    return next(ridge for ridge in ridges if error(ridge) <= (1 + TOLERANCE) * error(ridges[-1]))
