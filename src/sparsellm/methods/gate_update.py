r"""The global minimizer of SparseLLM's gate problem, elementwise.

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

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparsellm.models.feedforward import SILU, ActivationFunction
from sparsellm.runtime.devices import CACHED_ENTRIES

EASY_STEPS, HARD_STEPS = 4, 20
"""Newton steps of the two stages. Four converge to float32 precision where f is convex; the damped steps of the second stage
may stall and need more."""


@dataclass(frozen=True)
class _Gate:
    """The problem of some entries; all tensors are (entries,). Symbols as in the module's docstring."""

    m: Tensor
    z: Tensor
    p: Tensor
    ratio: float
    curve: ActivationFunction

    def cost(self, s: Tensor) -> Tensor:
        """The objective f, elementwise."""
        return (s - self.m).square() + self.ratio * (self.p - self.curve.value(s) * self.z).square()

    def newton_step(self, s: Tensor) -> Tensor:
        """Gradient over second derivative; over its Gauss-Newton part, which is always positive, where the sum is too small."""
        value, slope, curvature = self.curve.curvature(s)
        residual = self.z * value - self.p
        gradient = (s - self.m) + self.ratio * residual * self.z * slope
        gauss_newton = 1 + self.ratio * (self.z * slope).square()
        second = gauss_newton + self.ratio * residual * self.z * curvature
        return gradient / torch.where(second > 0.01 * gauss_newton, second, gauss_newton)

    def rows(self, indices: Tensor) -> _Gate:
        """The problem of these entries."""
        return replace(self, m=self.m[indices], z=self.z[indices], p=self.p[indices])


def solve_gate(
    reached: Tensor,
    up: Tensor,
    activated: Tensor,
    *,
    ratio: float,
    present: Tensor | None = None,
    curve: ActivationFunction = SILU,
) -> Tensor:
    """Compute the gate signal s that minimizes f for every entry.

    Args:
        reached: m, the output of the gate layer, of any shape.
        up: z, of the same shape.
        activated: p, of the same shape.
        ratio: r = beta / alpha, above 0.
        present: A gate signal that the result must not be worse than, of the same shape; None for no such bound.
        curve: φ.
    """
    chunks = [signal.reshape(-1).split(CACHED_ENTRIES) for signal in (reached, up, activated)]
    starts = present.reshape(-1).split(CACHED_ENTRIES) if present is not None else chunks[0]
    solutions = [_solve(_Gate(m, z, p, ratio, curve), start) for m, z, p, start in zip(*chunks, starts, strict=True)]
    return torch.cat(solutions).view_as(reached)


def _solve(gate: _Gate, present: Tensor) -> Tensor:
    """Solve one chunk of entries."""
    m, z, ratio, curve = gate.m, gate.z, gate.ratio, gate.curve
    best = m
    for _ in range(EASY_STEPS):
        best = best - gate.newton_step(best)
    cost = gate.cost(best)
    radius = cost.sqrt()
    residual = radius / ratio**0.5 + (2 * curve.steepest) * z.abs() * radius
    convex = curve.sharpest * ratio * z.abs() * residual < 1
    solved = convex & (cost <= gate.cost(present)) & (cost <= gate.cost(m))
    (hard,) = torch.where(~solved)
    if len(hard):
        best[hard] = _solve_hard(gate.rows(hard), present[hard])
    return best


def _solve_hard(gate: _Gate, present: Tensor) -> Tensor:
    """Return the best of the local minima, or `present` where it is better."""
    m, z, p, ratio, curve = gate.m, gate.z, gate.p, gate.ratio, gate.curve
    target = torch.where(z == 0, 0, p / z).nan_to_num_(posinf=1e30, neginf=-1e30)
    right, left = m.clamp(min=curve.lowest), m.clamp(max=curve.lowest)
    linear = ((m + ratio * z * p) / (1 + ratio * z.square())).clamp_(min=curve.lowest)  # the minimizer for φ(s) = s
    target_right, target_left = curve.right_meeting(target), curve.left_meeting(target)
    starts = (
        (m, left - 0.75, left - 2),
        (target_left, 0.5 * (left + target_left), target_left - 0.5),
        (target_right, linear, 0.5 * (right + linear), 0.25 * target_right + 0.75 * curve.lowest),
    )
    best, cost = present, gate.cost(present)
    for points in starts:
        minimum = _descend(gate, points)
        new_cost = gate.cost(minimum)
        best, cost = torch.where(new_cost < cost, minimum, best), torch.minimum(new_cost, cost)
    return best


def _descend(gate: _Gate, points: tuple[Tensor, ...]) -> Tensor:
    """Take damped Newton steps from the best of the points, keeping only steps that lower the objective."""
    best, cost = points[0], gate.cost(points[0])
    for point in points[1:]:
        new_cost = gate.cost(point)
        best, cost = torch.where(new_cost < cost, point, best), torch.minimum(new_cost, cost)
    damping = torch.ones_like(best)
    for _ in range(HARD_STEPS):
        step = best - damping * gate.newton_step(best)
        new_cost = gate.cost(step)
        better = new_cost < cost
        best, cost = torch.where(better, step, best), torch.where(better, new_cost, cost)
        damping = torch.where(better, (2 * damping).clamp(max=1), 0.25 * damping)
    return best
