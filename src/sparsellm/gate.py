r"""The global minimiser of SparseLLM's gate problem, entry by entry.

$$\min_s \; f(s) = (s - m)^2 + r \, (p - \text{silu}(s) \, z)^2$$

The paper reads it off a table of three inputs; its code takes two gradient steps of 0.01. Here in two rounds:

1. Newton steps from m, and a proof, entry by entry, that f has no other valley. A better s can only lie within sqrt(f) of m,
   and there $f''/2 \ge 1 - r \, |z| \, |\text{miss}| \, \max|\text{silu}''|$; where that is positive, f is convex. This
   settles nearly all entries.
2. For the rest, Newton steps from the best of a few places in each of the valleys that there can be: near m, left of silu's
   minimum, and right of it. silu falls until LOWEST and rises after it, so t = p / z is met at most once on either side.

The tests hold the result against a grid.
"""

from __future__ import annotations

import torch
from torch import Tensor

LOWEST = -1.2784645
"""Where silu has its minimum."""

FLOOR = -0.2784645
"""The value of silu there: LOWEST * sigmoid(LOWEST)."""

STEEPEST, SHARPEST = 1.1, 0.5
"""Bounds on the slope (1.09984 at most) and on the curvature of silu, in absolute value."""

EASY_STEPS, HARD_STEPS = 4, 20
"""Newton steps: convex entries converge to float32 in four; the guarded steps of the others may stall before they do."""

CHUNK = 1 << 17
"""Entries solved at a time: the dozen temporaries then stay in the processor's cache."""


def best_gate(reached: Tensor, up: Tensor, activated: Tensor, ratio: float, present: Tensor | None = None) -> Tensor:
    """The minimising gate signal for every entry; all arguments and the result have one shape.

    reached: m, the gate layer's output. up: z. activated: p. ratio: r = beta / alpha, above 0.
    present: a gate signal that the result must not be worse than, if any.
    """
    pieces = [signal.reshape(-1).split(CHUNK) for signal in (reached, up, activated)]
    starts = present.reshape(-1).split(CHUNK) if present is not None else pieces[0]
    solved = [_solve(m, z, p, start, ratio) for m, z, p, start in zip(*pieces, starts, strict=True)]
    return torch.cat(solved).view_as(reached)


def _solve(m: Tensor, z: Tensor, p: Tensor, present: Tensor, ratio: float) -> Tensor:
    """`best_gate` for one chunk, all (entries,)."""
    best = m
    for _ in range(EASY_STEPS):
        best = best - _newton_step(best, m, z, p, ratio)
    cost = _cost(best, m, z, p, ratio)
    reach = cost.sqrt()
    miss = reach / ratio**0.5 + (2 * STEEPEST) * z.abs() * reach
    convex = SHARPEST * ratio * z.abs() * miss < 1
    settled = convex & (cost <= _cost(present, m, z, p, ratio)) & (cost <= _cost(m, m, z, p, ratio))
    (hard,) = torch.where(~settled)
    if len(hard):
        best[hard] = _solve_hard(m[hard], z[hard], p[hard], present[hard], ratio)
    return best


def _solve_hard(m: Tensor, z: Tensor, p: Tensor, present: Tensor, ratio: float) -> Tensor:
    """The best end of Newton steps in each valley that there can be."""
    target = torch.where(z == 0, 0, p / z).nan_to_num_(posinf=1e30, neginf=-1e30)
    beyond, before = m.clamp(min=LOWEST), m.clamp(max=LOWEST)
    straight = ((m + ratio * z * p) / (1 + ratio * z.square())).clamp_(min=LOWEST)  # the answer if silu(s) were s
    met_right, met_left = _right_meeting(target), _left_meeting(target)
    valleys = (
        (m, before - 0.75, before - 2),
        (met_left, 0.5 * (before + met_left), met_left - 0.5),
        (met_right, straight, 0.5 * (beyond + straight), 0.25 * met_right + 0.75 * LOWEST),
    )
    best, cost = present, _cost(present, m, z, p, ratio)
    for places in valleys:
        end = _descend(m, z, p, ratio, places)
        there = _cost(end, m, z, p, ratio)
        best, cost = torch.where(there < cost, end, best), torch.minimum(there, cost)
    return best


def _descend(m: Tensor, z: Tensor, p: Tensor, ratio: float, places: tuple[Tensor, ...]) -> Tensor:
    """The end of guarded Newton steps from the best of the places; never worse than any of them."""
    best, cost = places[0], _cost(places[0], m, z, p, ratio)
    for place in places[1:]:
        there = _cost(place, m, z, p, ratio)
        best, cost = torch.where(there < cost, place, best), torch.minimum(there, cost)
    trust = torch.ones_like(best)
    for _ in range(HARD_STEPS):
        step = best - trust * _newton_step(best, m, z, p, ratio)
        there = _cost(step, m, z, p, ratio)
        better = there < cost
        best, cost = torch.where(better, step, best), torch.where(better, there, cost)
        trust = torch.where(better, (2 * trust).clamp(max=1), 0.25 * trust)
    return best


def _cost(s: Tensor, m: Tensor, z: Tensor, p: Tensor, ratio: float) -> Tensor:
    """The objective, entry by entry."""
    return (s - m).square() + ratio * (p - torch.nn.functional.silu(s) * z).square()


def _newton_step(s: Tensor, m: Tensor, z: Tensor, p: Tensor, ratio: float) -> Tensor:
    """Gradient over curvature; over the Gauss-Newton curvature, which is always positive, where the true one is not."""
    sigma = torch.sigmoid(s)
    rise = sigma * (1 + s * (1 - sigma))
    bend = sigma * (1 - sigma) * (2 + s * (1 - 2 * sigma))
    miss = z * s * sigma - p
    gradient = (s - m) + ratio * miss * z * rise
    gauss = 1 + ratio * (z * rise).square()
    curvature = gauss + ratio * miss * z * bend
    return gradient / torch.where(curvature > 0.01 * gauss, curvature, gauss)


def _right_meeting(target: Tensor) -> Tensor:
    """Roughly the s >= LOWEST with silu(s) = target; LOWEST where target lies below silu's range."""
    gap = (target - FLOOR).clamp(min=0)
    # Near LOWEST silu is a parabola of curvature 0.22; far to the right it is s itself: blend, then two Newton steps.
    s = torch.where(gap < 0.6, LOWEST + (gap / 0.22).sqrt() * (1 + 0.12 * gap), target + 0.9 * torch.exp(-target.clamp(min=0)))
    for _ in range(2):
        sigma = torch.sigmoid(s)
        rise = (sigma * (1 + s * (1 - sigma))).clamp(min=1e-3)
        s = (s - (s * sigma - target) / rise).clamp(min=LOWEST)
    return s


def _left_meeting(target: Tensor) -> Tensor:
    """Roughly the s <= LOWEST with silu(s) = target, for target in (FLOOR, 0); LOWEST for others."""
    inside = (target > FLOOR) & (target < 0)
    depth = (-target).clamp(min=1e-12, max=-FLOOR)
    s = torch.log(depth) - torch.log(-torch.log(depth).clamp(max=-1.0))
    s = torch.minimum(s, LOWEST - ((target - FLOOR).clamp(min=0) / 0.22).sqrt() * 0.5)
    for _ in range(3):
        sigma = torch.sigmoid(s)
        rise = (sigma * (1 + s * (1 - sigma))).clamp(max=-1e-6)
        s = (s - ((s * sigma - target) / rise).clamp(-2, 2)).clamp(min=-30, max=LOWEST)
    return torch.where(inside, s, LOWEST)
