r"""The global minimiser of SparseLLM's gate problem, entry by entry.

$$\min_s \; f(s) = (s - m)^2 + r \, (p - \varphi(s) \, z)^2$$

with $\varphi$ SiLU or one of the GELUs (`sparsellm.models.activation_functions`). With z = 1 it is the problem of a plain
feed-forward part.

The paper reads it off a table of three inputs; its code takes two gradient steps of 0.01. Here in two rounds:

1. Newton steps from m, and a proof, entry by entry, that f has no other valley. A better s can only lie within sqrt(f) of m,
   and there $f''/2 \ge 1 - r \, |z| \, |\text{miss}| \, \max|\varphi''|$; where that is positive, f is convex. This
   settles nearly all entries.
2. For the rest, Newton steps from the best of a few places in each of the valleys that there can be: near m, left of the
   curve's minimum, and right of it. It falls until there and rises after it, so t = p / z is met at most once on either side.

The tests hold the result against a grid.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsellm.models.activation_functions import SILU, ActivationFunction

EASY_STEPS, HARD_STEPS = 4, 20
"""Newton steps: convex entries converge to float32 in four; the guarded steps of the others may stall before they do."""

CHUNK = 1 << 17
"""Entries solved at a time: the dozen temporaries then stay in the processor's cache."""


def solve_gate(
    reached: Tensor,
    up: Tensor,
    activated: Tensor,
    ratio: float,
    present: Tensor | None = None,
    curve: ActivationFunction = SILU,
) -> Tensor:
    """The minimising gate signal for every entry; all arguments and the result have one shape.

    reached: m, the gate layer's output. up: z. activated: p. ratio: r = beta / alpha, above 0.
    present: a gate signal that the result must not be worse than, if any. curve: φ.
    """
    pieces = [signal.reshape(-1).split(CHUNK) for signal in (reached, up, activated)]
    starts = present.reshape(-1).split(CHUNK) if present is not None else pieces[0]
    solved = [_solve(m, z, p, start, ratio, curve) for m, z, p, start in zip(*pieces, starts, strict=True)]
    return torch.cat(solved).view_as(reached)


def _solve(m: Tensor, z: Tensor, p: Tensor, present: Tensor, ratio: float, curve: ActivationFunction) -> Tensor:
    """`best_gate` for one chunk, all (entries,)."""
    best = m
    for _ in range(EASY_STEPS):
        best = best - _newton_step(best, m, z, p, ratio, curve)
    cost = _cost(best, m, z, p, ratio, curve)
    reach = cost.sqrt()
    miss = reach / ratio**0.5 + (2 * curve.steepest) * z.abs() * reach
    convex = curve.sharpest * ratio * z.abs() * miss < 1
    settled = convex & (cost <= _cost(present, m, z, p, ratio, curve)) & (cost <= _cost(m, m, z, p, ratio, curve))
    (hard,) = torch.where(~settled)
    if len(hard):
        best[hard] = _solve_hard(m[hard], z[hard], p[hard], present[hard], ratio, curve)
    return best


def _solve_hard(m: Tensor, z: Tensor, p: Tensor, present: Tensor, ratio: float, curve: ActivationFunction) -> Tensor:
    """The best end of Newton steps in each valley that there can be."""
    target = torch.where(z == 0, 0, p / z).nan_to_num_(posinf=1e30, neginf=-1e30)
    beyond, before = m.clamp(min=curve.lowest), m.clamp(max=curve.lowest)
    straight = ((m + ratio * z * p) / (1 + ratio * z.square())).clamp_(min=curve.lowest)  # if φ(s) were s
    met_right, met_left = curve.right_meeting(target), curve.left_meeting(target)
    valleys = (
        (m, before - 0.75, before - 2),
        (met_left, 0.5 * (before + met_left), met_left - 0.5),
        (met_right, straight, 0.5 * (beyond + straight), 0.25 * met_right + 0.75 * curve.lowest),
    )
    best, cost = present, _cost(present, m, z, p, ratio, curve)
    for places in valleys:
        end = _descend(m, z, p, ratio, curve, places)
        there = _cost(end, m, z, p, ratio, curve)
        best, cost = torch.where(there < cost, end, best), torch.minimum(there, cost)
    return best


def _descend(m: Tensor, z: Tensor, p: Tensor, ratio: float, curve: ActivationFunction, places: tuple[Tensor, ...]) -> Tensor:
    """The end of guarded Newton steps from the best of the places; never worse than any of them."""
    best, cost = places[0], _cost(places[0], m, z, p, ratio, curve)
    for place in places[1:]:
        there = _cost(place, m, z, p, ratio, curve)
        best, cost = torch.where(there < cost, place, best), torch.minimum(there, cost)
    trust = torch.ones_like(best)
    for _ in range(HARD_STEPS):
        step = best - trust * _newton_step(best, m, z, p, ratio, curve)
        there = _cost(step, m, z, p, ratio, curve)
        better = there < cost
        best, cost = torch.where(better, step, best), torch.where(better, there, cost)
        trust = torch.where(better, (2 * trust).clamp(max=1), 0.25 * trust)
    return best


def _cost(s: Tensor, m: Tensor, z: Tensor, p: Tensor, ratio: float, curve: ActivationFunction) -> Tensor:
    """The objective, elementwise."""
    return (s - m).square() + ratio * (p - curve.value(s) * z).square()


def _newton_step(s: Tensor, m: Tensor, z: Tensor, p: Tensor, ratio: float, curve: ActivationFunction) -> Tensor:
    """Gradient over curvature; over the Gauss-Newton curvature, which is always positive, where the true one is not."""
    value, rise, bend = curve.curvature(s)
    miss = z * value - p
    gradient = (s - m) + ratio * miss * z * rise
    gauss = 1 + ratio * (z * rise).square()
    curvature = gauss + ratio * miss * z * bend
    return gradient / torch.where(curvature > 0.01 * gauss, curvature, gauss)
