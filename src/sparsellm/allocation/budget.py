"""Layer densities that minimise the sum of per-layer loss curves at a given mean density."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from sparsellm.runtime import devices

LEVELS = (2.0, 1.5, 1.0, 0.75, 0.5, 0.33)
"""Densities at which loss curves are sampled, relative to the mean density."""

CAUTION = 0.5
"""Exponent between the uniform density (0) and the optimum of the loss curves (1). The curves come from the dense model, one
layer at a time, and ignore compensation by later layers: the full step helps some model families and hurts others."""

LARGEST_DENSITY = 0.95
"""Maximum density of a layer, unless the mean density is larger."""


def smallest_sums(costs: Tensor, counts: Sequence[int]) -> list[float]:
    """Return the sum of the `count` smallest entries for every count in `counts`, which must be increasing."""
    flat = costs.flatten()
    if not devices.queued(flat.device):  # a partition at all counts is several times faster than sorting
        flat = torch.from_numpy(np.partition(flat.numpy(), [count - 1 for count in counts if count > 0]))
    else:
        flat = flat.sort().values
    pieces = flat.tensor_split(list(counts))[:-1]
    sums = torch.stack([piece.sum(dtype=devices.widest_float(flat.device)) for piece in pieces])
    return [float(value) for value in sums.cumsum(0).tolist()]


def levels_around(asked: float) -> list[float]:
    """Return the densities at which loss curves are sampled around a mean density, in increasing order."""
    return sorted({min(asked * level, LARGEST_DENSITY) for level in LEVELS} | {asked})


def damp_toward_uniform(found: Mapping[str, float], asked: float) -> dict[str, float]:
    """Move layer densities toward the mean density `asked`, on a logarithmic scale, by `CAUTION`."""
    return {name: asked * (density / asked) ** CAUTION for name, density in found.items()}


def allocate_by_curves(curves: Mapping[str, tuple[int, list[float]]], levels: list[float], asked: float) -> dict[str, float]:
    """Minimise the sum of the loss curves at a mean density, by bisection on its Lagrange multiplier.

    Args:
        curves: Number of weights and loss at each level, by layer.
        levels: Densities at which the losses are given, in increasing order; results are between the first and the last.
        asked: The mean density, weighted by the number of weights.
    """
    grid = torch.logspace(math.log10(levels[0]), math.log10(levels[-1]), 400, dtype=torch.float64)
    sizes = {name: size for name, (size, _) in curves.items()}
    losses = {name: _interpolated(levels, values, grid) for name, (_, values) in curves.items()}
    low, high = -60.0, 60.0
    densities: dict[str, float] = {}
    for _ in range(100):
        multiplier = math.exp((low + high) / 2)
        densities = {name: float(grid[(losses[name] + multiplier * sizes[name] * grid).argmin()]) for name in curves}
        mean = sum(densities[name] * sizes[name] for name in curves) / sum(sizes.values())
        low, high = ((low + high) / 2, high) if mean > asked else (low, (low + high) / 2)
    return densities


def _interpolated(levels: list[float], losses: list[float], grid: Tensor) -> Tensor:
    """Interpolate losses to the densities of the grid, linearly between logarithms."""
    x = torch.tensor(levels, dtype=torch.float64).log()
    y = torch.tensor(losses, dtype=torch.float64).log()
    y = y.flip(0).cummax(0).values.flip(0)  # the loss does not increase with the density
    right = torch.searchsorted(x, grid.log()).clamp(1, len(levels) - 1)
    fraction = (grid.log() - x[right - 1]) / (x[right] - x[right - 1])
    return torch.lerp(y[right - 1], y[right], fraction).exp()
