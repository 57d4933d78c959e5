"""How a model's sparsity is shared among its layers, from what the dense model shows on the calibration windows.

Every rule keeps the total exact to one weight. They share unstructured patterns only: what N:M removes is fixed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparsellm.activations.fisher import weight_costs
from sparsellm.activations.walk import walk
from sparsellm.checkpoints.block_loader import Weights
from sparsellm.errors import InvalidSetting
from sparsellm.methods import Plan
from sparsellm.methods.layerwise import collect_statistics, problem_of
from sparsellm.models.blocks import blocks_of
from sparsellm.pruning.balance import allocate_by_curves, damp_toward_uniform, levels_around, smallest_sums
from sparsellm.runtime.offload import OffloadManager
from sparsellm.solvers.patterns import Unstructured
from sparsellm.solvers.statistics import InputRMS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OUTLIER, OWL_SPREAD = 5.0, 0.08
"""OWL's M and lambda: a score above five times its layer's mean is an outlier; densities differ by 0.16 at most."""


def allocate(
    rule: str,
    model: PreTrainedModel,
    batches: Sequence[Tensor],
    plan: Plan,
    compute: torch.dtype | None = None,
    bounds: tuple[float, float] = (0.0, 1.0),
    weights: Weights | None = None,
    storage: OffloadManager | None = None,
) -> Plan:
    """The plan with its total shared out anew: "owl" or "fisher".

    plan: the same unstructured sparsity for every layer. batches, compute, weights, storage: as for `prune_blocks`.
    bounds: the least and the largest sparsity that a layer may get; the plan's own must lie between them.
    Cost: one pass of the calibration windows; for "fisher" instead two passes and a backward one of four windows, or of 2,048
    tokens.
    """
    check_shared(plan)
    densities = {"owl": owl, "fisher": fisher}[rule](model, batches, plan, compute, weights, storage)
    layers = {block.full_name(name): layer for block in blocks_of(model) for name, layer in block.layers.items()}
    sizes = {name: layers[name].in_features * layers[name].out_features for name in plan}
    asked = next(iter(plan.values()))
    total = asked.count_removed(sum(sizes.values()))
    removed = round_to_total({name: (1 - densities[name]) * sizes[name] for name in plan}, sizes, total, bounds)
    return {name: Unstructured(removed[name] / sizes[name]) for name in plan}


def check_shared(plan: Plan) -> None:
    """Raise InvalidSetting unless the plan holds one unstructured pattern."""
    other = next((name for name, pattern in plan.items() if not isinstance(pattern, Unstructured)), None)
    if other is not None:
        raise InvalidSetting(
            f"Only an unstructured sparsity can be shared out, got {plan[other]} for {other}. "
            "Use --allocation uniform, or a file that names each layer's pattern."
        )


def round_to_total(
    wanted: Mapping[str, float], sizes: Mapping[str, int], total: int, bounds: tuple[float, float] = (0.0, 1.0)
) -> dict[str, int]:
    """Whole numbers near `wanted` that add up to `total`, each at least 0 and less than its size; all are shifted alike to
    get there. bounds: the least and the largest share of its size that any may have. Raises InvalidSetting where these
    leave no room for the total."""
    least = {name: math.ceil(bounds[0] * size - 1e-9) for name, size in sizes.items()}
    most = {name: min(math.floor(bounds[1] * size + 1e-9), size - 1) for name, size in sizes.items()}
    if not sum(least.values()) <= total <= sum(most.values()):
        within = "" if bounds == (0.0, 1.0) else f" with every layer's share in {bounds[0]:.10g}-{bounds[1]:.10g}"
        raise InvalidSetting(f"{total:,} weights cannot be removed from layers of {sum(sizes.values()):,}{within}.")
    low, high = -1.0, 1.0

    def shifted(shift: float) -> dict[str, int]:
        return {n: max(min(math.floor(w + shift * sizes[n]), most[n]), least[n]) for n, w in wanted.items()}

    for _ in range(100):  # bisection on the shift, as a share of each layer
        middle = (low + high) / 2
        low, high = (middle, high) if sum(shifted(middle).values()) <= total else (low, middle)
    found = shifted(low)
    for name in found:  # what is left is less than one weight a layer
        if sum(found.values()) < total and found[name] < most[name]:
            found[name] += 1
    return found


def owl(
    model: PreTrainedModel,
    batches: Sequence[Tensor],
    plan: Plan,
    compute: torch.dtype | None,
    weights: Weights | None = None,
    storage: OffloadManager | None = None,
) -> dict[str, float]:
    """Densities by the share of outliers among a block's scores, within 0.08 of the one asked for.

    Follows Yin et al., Outlier weighed layerwise sparsity (OWL), ICML 2024, with its scores |W| times input norm.
    """
    asked = 1 - next(iter(plan.values())).sparsity
    layers: list[list[str]] = []
    outliers: list[float] = []
    for block, inputs in walk(model, batches, compute=compute, weights=weights, storage=storage):
        names = [name for name in block.layers if block.full_name(name) in plan]
        if names:
            moments = collect_statistics(block, inputs, dict.fromkeys(names, InputRMS), onward=True)
            problems = [problem_of(block, name, known) for name, known in moments.items()]
            scores = torch.cat([(problem.weight.abs() * problem.rms).flatten() for problem in problems])
            layers.append([block.full_name(name) for name in names])
            outliers.append(int((scores > OUTLIER * scores.mean()).count_nonzero()) / scores.numel())
    width = max(outliers) - min(outliers)
    spread = min(OWL_SPREAD, asked / 2, (1 - asked) / 2)
    ranks = [(share - min(outliers)) / width if width > 0 else 0.5 for share in outliers]
    mean = sum(ranks) / len(ranks)
    densities = [asked + 2 * spread * (rank - mean) for rank in ranks]
    return {name: density for names, density in zip(layers, densities, strict=True) for name in names}


def fisher(
    model: PreTrainedModel,
    batches: Sequence[Tensor],
    plan: Plan,
    compute: torch.dtype | None = None,
    weights: Weights | None = None,
    storage: OffloadManager | None = None,
) -> dict[str, float]:
    """Densities at which one more weight costs the same in every layer, by what its weights cost one by one (`weight_costs`).

    What a layer loses at a density is the sum of its smallest costs: what the other weights would make good is left out, and no
    layer is solved. Between the densities at which it is known, its logarithm is linear in the logarithm of the density.
    """
    asked = 1 - next(iter(plan.values())).sparsity
    levels = levels_around(asked)
    curves: dict[str, tuple[int, list[float]]] = {}
    for name, costs in weight_costs(model, batches, plan, compute, weights, storage):
        size = costs.numel()
        lost = smallest_sums(costs, [round((1 - level) * size) for level in reversed(levels)])
        least = max(1e-12 * float(costs.sum()), torch.finfo(torch.float32).tiny)
        curves[name] = size, [max(some, least) for some in reversed(lost)]
    return damp_toward_uniform(allocate_by_curves(curves, levels, asked), asked)
