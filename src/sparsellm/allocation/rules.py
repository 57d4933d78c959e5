"""Allocation: per-layer sparsities from the dense model's activations or gradients on the calibration batches.

Every rule keeps the total number of removed weights exact. Allocation needs an unstructured pattern: the sparsity of an N:M
pattern is fixed. Curves of each layer's loss give the densities that minimize their sum at a given mean.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from sparsellm.activations.fisher_diagonal import FisherFactors, weight_costs
from sparsellm.activations.walk import walk
from sparsellm.errors import InvalidSetting
from sparsellm.methods import Plan
from sparsellm.methods.layerwise import collect_statistics, problem_of
from sparsellm.models.blocks import blocks_of
from sparsellm.models.loaded_model import LoadedModel
from sparsellm.runtime import devices
from sparsellm.solvers.patterns import Unstructured
from sparsellm.solvers.statistics import InputRMS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OUTLIER, OWL_SPREAD = 5.0, 0.08
"""OWL's M and lambda: a score above 5 times the block's mean is an outlier; densities differ by at most 2 * 0.08."""


class Facts(Protocol):
    """Stores results on the dense model by name, as the journal of a run does."""

    def fact(self, name: str) -> Any: ...
    def store_fact(self, name: str, value: Any) -> None: ...


def allocate(
    rule: str,
    model: PreTrainedModel | LoadedModel,
    batches: Sequence[Tensor],
    plan: Plan,
    *,
    factors: dict[str, FisherFactors] | None = None,
    cache: Facts | None = None,
) -> Plan:
    """Distribute the total sparsity of a plan over its layers.

    "owl" runs the calibration batches through the model once. "fisher" instead runs two forward passes and one backward pass on
    the first sequences: at least four, with at least 2,048 tokens.

    Args:
        rule: "owl" or "fisher".
        batches: Calibration batches of token ids, each (batch, seq).
        plan: The same unstructured pattern for every layer.
        factors: For "fisher", the factors of each layer's removal costs from an earlier call, which serve every sparsity, or an
            empty dictionary that receives them.
        cache: For "owl", stores the outliers, which serve every sparsity.

    Returns:
        The plan with an unstructured pattern for each layer, which together remove as many weights as `plan` does. That of the
        output head stays as it is.

    Raises:
        InvalidSetting: A pattern is not unstructured, or the total is more than all but one weight of each layer.
    """
    check_shared(plan)
    loaded = LoadedModel.of(model)
    layers = {block.full_name(name): layer for block in blocks_of(loaded.model) for name, layer in block.layers.items()}
    head = {name: pattern for name, pattern in plan.items() if name not in layers}
    if not (plan := {name: pattern for name, pattern in plan.items() if name in layers}):
        return head
    densities = owl(loaded, batches, plan, cache) if rule == "owl" else fisher(loaded, batches, plan, factors=factors)
    sizes = {name: layers[name].in_features * layers[name].out_features for name in plan}
    pattern = next(iter(plan.values()))
    total = round(pattern.sparsity * sum(sizes.values()))
    removed = round_to_total({name: (1 - densities[name]) * sizes[name] for name in plan}, sizes, total)
    return {name: Unstructured(removed[name] / sizes[name]) for name in plan} | head


def check_shared(plan: Plan) -> None:
    """Raise InvalidSetting unless all patterns of the plan are unstructured."""
    other = next((name for name, pattern in plan.items() if not pattern.is_shareable), None)
    if other is not None:
        raise InvalidSetting(
            f"Only an unstructured sparsity can be allocated to layers, got {plan[other]} for {other}. "
            "Use `allocation='uniform'`, or a file that names each layer's pattern."
        )


def round_to_total(wanted: Mapping[str, float], sizes: Mapping[str, int], total: int) -> dict[str, int]:
    """Round counts to integers with an exact sum, after adding the same share of its size to each.

    Args:
        wanted: Number of weights to remove from each layer, before rounding.
        sizes: Number of weights of each layer; a result is at least 0 and less than the size.
        total: Sum of the results.

    Raises:
        InvalidSetting: The total is negative, or more than all but one weight of each layer.
    """
    largest = {name: size - 1 for name, size in sizes.items()}
    if not 0 <= total <= sum(largest.values()):
        raise InvalidSetting(f"{total:,} weights cannot be removed from layers of {sum(sizes.values()):,}.")
    low, high = -1.0, 1.0

    def shifted(shift: float) -> dict[str, int]:
        return {name: max(min(math.floor(count + shift * sizes[name]), largest[name]), 0) for name, count in wanted.items()}

    for _ in range(100):  # bisection on the shift, as a share of each layer
        middle = (low + high) / 2
        low, high = (middle, high) if sum(shifted(middle).values()) <= total else (low, middle)
    counts = shifted(low)
    for name in counts:  # the remainder is less than one weight for each layer
        if sum(counts.values()) < total and counts[name] < largest[name]:
            counts[name] += 1
    return counts


def owl(
    model: PreTrainedModel | LoadedModel, batches: Sequence[Tensor], plan: Plan, cache: Facts | None = None
) -> dict[str, float]:
    """Return layer densities that increase with the share of outliers among the scores |W| * rms of the block.

    All layers of a block get the same density, at most 0.16 from that of any other. Follows Yin et al., Outlier Weighed
    Layerwise Sparsity (OWL), ICML 2024. Arguments as for `allocate`.
    """
    mean_density = 1 - next(iter(plan.values())).sparsity
    fact = f"outliers-{hashlib.blake2b(' '.join(plan).encode(), digest_size=8).hexdigest()}"
    outliers: list[tuple[list[str], float]] | None = cache.fact(fact) if cache else None
    if outliers is None:
        outliers = _outlier_shares(model, batches, plan)
        if cache:
            cache.store_fact(fact, outliers)
    outlier_shares = [share for _, share in outliers]
    width = max(outlier_shares) - min(outlier_shares)
    spread = min(OWL_SPREAD, mean_density / 2, (1 - mean_density) / 2)
    ranks = [(share - min(outlier_shares)) / width if width > 0 else 0.5 for share in outlier_shares]
    mean_rank = sum(ranks) / len(ranks)
    densities = [mean_density + 2 * spread * (rank - mean_rank) for rank in ranks]
    return {name: density for (names, _), density in zip(outliers, densities, strict=True) for name in names}


def _outlier_shares(
    model: PreTrainedModel | LoadedModel, batches: Sequence[Tensor], plan: Plan
) -> list[tuple[list[str], float]]:
    """The planned layers of each block, and the share of outliers among their scores."""
    result = []
    for block, inputs in walk(model, batches):
        names = [name for name in block.layers if block.full_name(name) in plan]
        if names:
            statistics = collect_statistics(block, inputs, dict.fromkeys(names, InputRMS), advance=True)
            problems = [problem_of(block, name, rms) for name, rms in statistics.items()]
            scores = torch.cat([(problem.weight.abs() * problem.rms).flatten() for problem in problems])
            share = int((scores > OUTLIER * scores.mean()).count_nonzero()) / scores.numel()
            result.append(([block.full_name(name) for name in names], share))
    return result


def fisher(
    model: PreTrainedModel | LoadedModel,
    batches: Sequence[Tensor],
    plan: Plan,
    *,
    factors: dict[str, FisherFactors] | None = None,
) -> dict[str, float]:
    """Return layer densities at which removing one more weight costs the same in every layer, by Fisher costs.

    The loss of a layer at a density is the sum of its smallest costs from `weight_costs`; compensation by the remaining weights
    is ignored. It is computed at a few densities and interpolated linearly between their logarithms. Arguments as for
    `allocate`.
    """
    mean_density = 1 - next(iter(plan.values())).sparsity
    levels = levels_around(mean_density)
    curves: dict[str, tuple[int, list[float]]] = {}
    for name, costs in weight_costs(model, batches, plan, factors=factors):
        size = costs.numel()
        losses = smallest_sums(costs, [round((1 - level) * size) for level in reversed(levels)])
        floor = max(1e-12 * float(costs.sum()), torch.finfo(torch.float32).tiny)
        curves[name] = size, [max(loss, floor) for loss in reversed(losses)]
    return damp_toward_uniform(allocate_by_curves(curves, levels, mean_density), mean_density)


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
    """Minimize the sum of the loss curves at a mean density, by bisection on its Lagrange multiplier.

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
