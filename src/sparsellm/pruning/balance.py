"""A total shared out by curves: what each layer loses at each density, and where one more weight costs the same in all."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from sparsellm.runtime import devices

LEVELS = (2.0, 1.5, 1.0, 0.75, 0.5, 0.33)
"""Where curves are known: the density, relative to the one asked for."""

CAUTION = 0.5
"""How far to go from the uniform density to the best one by the curves, on a scale of logarithms. The curves are taken layer by
layer on the dense model and know nothing of what later layers make good: all the way helps one form and hurts another."""

LARGEST_DENSITY = 0.95
"""What a layer gets at most, unless more is asked for."""


def smallest_sums(costs: Tensor, counts: Sequence[int]) -> list[float]:
    """For each of some rising counts, the sum of so many of the smallest entries."""
    flat = costs.flatten()
    if not devices.queued(flat.device):  # a partition at all of these places is several times faster than sorting
        flat = torch.from_numpy(np.partition(flat.numpy(), [count - 1 for count in counts if count > 0]))
    else:
        flat = flat.sort().values
    pieces = flat.tensor_split(list(counts))[:-1]
    sums = torch.stack([piece.sum(dtype=devices.widest_float(flat.device)) for piece in pieces])
    return [float(some) for some in sums.cumsum(0).tolist()]


def levels_around(asked: float) -> list[float]:
    """The densities, in rising order, at which curves are known."""
    return sorted({min(asked * level, LARGEST_DENSITY) for level in LEVELS} | {asked})


def damp_toward_uniform(found: Mapping[str, float], asked: float) -> dict[str, float]:
    """Densities part of the way from the one asked for to those found."""
    return {name: asked * (density / asked) ** CAUTION for name, density in found.items()}


def allocate_by_curves(curves: Mapping[str, tuple[int, list[float]]], levels: list[float], asked: float) -> dict[str, float]:
    """Densities between the levels that minimise the sum of the curves at the mean density asked for, by a Lagrangian."""
    grid = torch.logspace(math.log10(levels[0]), math.log10(levels[-1]), 400, dtype=torch.float64)
    sizes = {name: size for name, (size, _) in curves.items()}
    values = {name: _interpolated(levels, errors, grid) for name, (_, errors) in curves.items()}
    low, high = -60.0, 60.0
    chosen: dict[str, float] = {}
    for _ in range(100):
        price = math.exp((low + high) / 2)
        chosen = {name: float(grid[(values[name] + price * sizes[name] * grid).argmin()]) for name in curves}
        mean = sum(chosen[name] * sizes[name] for name in curves) / sum(sizes.values())
        low, high = ((low + high) / 2, high) if mean > asked else (low, (low + high) / 2)
    return chosen


def _interpolated(levels: list[float], errors: list[float], grid: Tensor) -> Tensor:
    """The error at each density of the grid: log-log linear between the levels."""
    x = torch.tensor(levels, dtype=torch.float64).log()
    y = torch.tensor(errors, dtype=torch.float64).log()
    y = y.flip(0).cummax(0).values.flip(0)  # more weights never cost more
    where = torch.searchsorted(x, grid.log()).clamp(1, len(levels) - 1)
    share = (grid.log() - x[where - 1]) / (x[where] - x[where - 1])
    return torch.lerp(y[where - 1], y[where], share).exp()
