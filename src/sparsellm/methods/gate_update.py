r"""The global minimiser of SparseLLM's gate problem, elementwise.

$$\min_s \; f(s) = (s - m)^2 + r \, (p - \varphi(s) \, z)^2$$

with $\varphi$ SiLU or one of the GELUs (`sparsellm.models.feedforward`). With z = 1 it is the problem of a plain
feed-forward part.

The paper uses a table of three inputs; its code takes two gradient steps of 0.01. This module solves it in two stages:

1. Newton steps from m, with a check that f has no other local minimum. A better s can only be within sqrt(f) of m, where
   $f''/2 \ge 1 - r \, |z| \, |p - \varphi(s) z| \, \max|\varphi''|$; if this bound is positive, f is convex there. Nearly all
   entries pass.
2. For the others, Newton steps from the best of a few starting points near each possible local minimum: near m, and where
   $\varphi(s)$ takes the value t = p / z, at most once on either side of its minimum.

The tests compare the result with a grid search.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsellm.models.feedforward import SILU, ActivationFunction

EASY_STEPS, HARD_STEPS = 4, 20
"""Newton steps of the two stages. Four converge to float32 precision where f is convex; the damped steps of the second stage
may stall and need more."""

CHUNK = 1 << 17
"""Number of entries solved at a time, so that a dozen temporaries fit in the processor's cache."""


def solve_gate(
    reached: Tensor,
    up: Tensor,
    activated: Tensor,
    ratio: float,
    present: Tensor | None = None,
    curve: ActivationFunction = SILU,
) -> Tensor:
    """Compute the gate signal s that minimises f for every entry.

    Args:
        reached: m, the output of the gate layer, of any shape.
        up: z, of the same shape.
        activated: p, of the same shape.
        ratio: r = beta / alpha, above 0.
        present: A gate signal that the result must not be worse than, of the same shape; None for no such bound.
        curve: φ.

    Returns:
        The gate signal, of the same shape.
    """
    chunks = [signal.reshape(-1).split(CHUNK) for signal in (reached, up, activated)]
    starts = present.reshape(-1).split(CHUNK) if present is not None else chunks[0]
    solutions = [_solve(m, z, p, start, ratio, curve) for m, z, p, start in zip(*chunks, starts, strict=True)]
    return torch.cat(solutions).view_as(reached)


def _solve(m: Tensor, z: Tensor, p: Tensor, present: Tensor, ratio: float, curve: ActivationFunction) -> Tensor:
    """Solve one chunk of entries; all tensors are (entries,)."""
    best = m
    for _ in range(EASY_STEPS):
        best = best - _newton_step(best, m, z, p, ratio, curve)
    cost = _cost(best, m, z, p, ratio, curve)
    radius = cost.sqrt()
    residual = radius / ratio**0.5 + (2 * curve.steepest) * z.abs() * radius
    convex = curve.sharpest * ratio * z.abs() * residual < 1
    solved = convex & (cost <= _cost(present, m, z, p, ratio, curve)) & (cost <= _cost(m, m, z, p, ratio, curve))
    (hard,) = torch.where(~solved)
    if len(hard):
        best[hard] = _solve_hard(m[hard], z[hard], p[hard], present[hard], ratio, curve)
    return best


def _solve_hard(m: Tensor, z: Tensor, p: Tensor, present: Tensor, ratio: float, curve: ActivationFunction) -> Tensor:
    """Return the best of the local minima, or `present` where it is better."""
    target = torch.where(z == 0, 0, p / z).nan_to_num_(posinf=1e30, neginf=-1e30)
    right, left = m.clamp(min=curve.lowest), m.clamp(max=curve.lowest)
    linear = ((m + ratio * z * p) / (1 + ratio * z.square())).clamp_(min=curve.lowest)  # the minimiser for φ(s) = s
    target_right, target_left = curve.right_meeting(target), curve.left_meeting(target)
    starts = (
        (m, left - 0.75, left - 2),
        (target_left, 0.5 * (left + target_left), target_left - 0.5),
        (target_right, linear, 0.5 * (right + linear), 0.25 * target_right + 0.75 * curve.lowest),
    )
    best, cost = present, _cost(present, m, z, p, ratio, curve)
    for points in starts:
        minimum = _descend(m, z, p, ratio, curve, points)
        new_cost = _cost(minimum, m, z, p, ratio, curve)
        best, cost = torch.where(new_cost < cost, minimum, best), torch.minimum(new_cost, cost)
    return best


def _descend(m: Tensor, z: Tensor, p: Tensor, ratio: float, curve: ActivationFunction, points: tuple[Tensor, ...]) -> Tensor:
    """Take damped Newton steps from the best of the points, keeping only steps that lower the objective."""
    best, cost = points[0], _cost(points[0], m, z, p, ratio, curve)
    for point in points[1:]:
        new_cost = _cost(point, m, z, p, ratio, curve)
        best, cost = torch.where(new_cost < cost, point, best), torch.minimum(new_cost, cost)
    damping = torch.ones_like(best)
    for _ in range(HARD_STEPS):
        step = best - damping * _newton_step(best, m, z, p, ratio, curve)
        new_cost = _cost(step, m, z, p, ratio, curve)
        better = new_cost < cost
        best, cost = torch.where(better, step, best), torch.where(better, new_cost, cost)
        damping = torch.where(better, (2 * damping).clamp(max=1), 0.25 * damping)
    return best


def _cost(s: Tensor, m: Tensor, z: Tensor, p: Tensor, ratio: float, curve: ActivationFunction) -> Tensor:
    """Return the objective f, elementwise."""
    return (s - m).square() + ratio * (p - curve.value(s) * z).square()


def _newton_step(s: Tensor, m: Tensor, z: Tensor, p: Tensor, ratio: float, curve: ActivationFunction) -> Tensor:
    """Return the Newton step; where the second derivative is too small, its Gauss-Newton part, always positive, replaces it."""
    value, slope, curvature = curve.curvature(s)
    residual = z * value - p
    gradient = (s - m) + ratio * residual * z * slope
    gauss_newton = 1 + ratio * (z * slope).square()
    second = gauss_newton + ratio * residual * z * curvature
    return gradient / torch.where(second > 0.01 * gauss_newton, second, gauss_newton)
