"""How a model's sparsity is shared among its layers, from what the dense model shows on the calibration windows.

Every rule keeps the total exact to one weight. They share unstructured patterns only: what N:M removes is fixed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparsellm.activations import Activations
from sparsellm.balance import balanced, cautious, levels_around, smallest_sums
from sparsellm.blocks import Block, blocks_of
from sparsellm.errors import InvalidSetting
from sparsellm.fisher import weight_costs
from sparsellm.methods import Plan
from sparsellm.methods.layerwise import gather, problem_of, solve
from sparsellm.moments import Gram, InputNorms
from sparsellm.patterns import Unstructured
from sparsellm.problem import LayerProblem
from sparsellm.sensitivity import layer_sensitivities, output_sensitivities
from sparsellm.solvers.sparsegpt import SparseGPT
from sparsellm.storage import Storage
from sparsellm.walk import walk
from sparsellm.weights import Weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

OUTLIER, OWL_SPREAD = 5.0, 0.08
"""OWL's M and lambda: a score above five times its layer's mean is an outlier; densities differ by 0.16 at most."""

DLP_SPREAD = 0.15
"""DLP's alpha."""


def share_out(
    rule: str,
    model: PreTrainedModel,
    batches: Sequence[Tensor],
    plan: Plan,
    compute: torch.dtype | None = None,
    metrics: Sequence[Tensor] = (),
    bounds: tuple[float, float] = (0.0, 1.0),
    weights: Weights | None = None,
    storage: Storage | None = None,
) -> Plan:
    """The plan with its total shared out anew: "owl", "dlp", "fisher" or "error".

    plan: the same unstructured sparsity for every layer. batches, compute, metrics, weights, storage: as for `prune_blocks`.
    bounds: the least and the largest sparsity that a layer may get; the plan's own must lie between them.
    Cost: one pass of the calibration windows; for "fisher" instead two passes and a backward one of four windows, or of 2,048
    tokens; for "error" also the sensitivities (two passes and a backward one) and six quick solves for each layer.
    """
    check_shared(plan)
    if rule == "error":
        densities = by_error(model, batches, plan, compute, metrics, weights, storage)
    else:
        densities = {"owl": owl, "dlp": dlp, "fisher": fisher}[rule](model, batches, plan, compute, weights, storage)
    layers = {block.full_name(name): layer for block in blocks_of(model) for name, layer in block.layers.items()}
    sizes = {name: layers[name].in_features * layers[name].out_features for name in plan}
    asked = next(iter(plan.values()))
    total = asked.removed(sum(sizes.values()))
    removed = exactly({name: (1 - densities[name]) * sizes[name] for name in plan}, sizes, total, bounds)
    return {name: Unstructured(removed[name] / sizes[name]) for name in plan}


def check_shared(plan: Plan) -> None:
    """Raise InvalidSetting unless the plan holds one unstructured pattern."""
    other = next((name for name, pattern in plan.items() if not isinstance(pattern, Unstructured)), None)
    if other is not None:
        raise InvalidSetting(
            f"Only an unstructured sparsity can be shared out, got {plan[other]} for {other}. "
            "Use --allocation uniform, or a file that names each layer's pattern."
        )


def exactly(
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
    storage: Storage | None = None,
) -> dict[str, float]:
    """Densities by the share of outliers among a block's scores, within 0.08 of the one asked for.

    Follows Yin et al., Outlier weighed layerwise sparsity (OWL), ICML 2024, with its scores |W| times input norm.
    """
    found: dict[int, tuple[list[str], float]] = {}
    for block, names, scores in _scores(model, batches, plan, compute, weights, storage):
        every = torch.cat([score.flatten() for score in scores])
        found[block.index] = names, int((every > OUTLIER * every.mean()).count_nonzero()) / every.numel()
    return _spread(found, plan, OWL_SPREAD)


def dlp(
    model: PreTrainedModel,
    batches: Sequence[Tensor],
    plan: Plan,
    compute: torch.dtype | None,
    weights: Weights | None = None,
    storage: Storage | None = None,
) -> dict[str, float]:
    """Densities by the median of a block's scores, within 0.15 of the one asked for.

    Follows Chen et al., DLP: dynamic layerwise pruning (ICML 2025). Departs from it: the median is relative to the block's mean
    score, since hidden states grow with depth.
    """
    found: dict[int, tuple[list[str], float]] = {}
    for block, names, scores in _scores(model, batches, plan, compute, weights, storage):
        every = torch.cat([score.flatten() for score in scores])
        found[block.index] = names, float(every.median() / every.mean())
    return _spread(found, plan, DLP_SPREAD)


def by_error(
    model: PreTrainedModel,
    batches: Sequence[Tensor],
    plan: Plan,
    compute: torch.dtype | None = None,
    metrics: Sequence[Tensor] = (),
    weights: Weights | None = None,
    storage: Storage | None = None,
) -> dict[str, float]:
    r"""Densities at which one more weight costs the same in every layer, by measured curves of the error.

    A layer's error at a sparsity is $\mathrm{tr}\, S \Delta G \Delta^\top$ with SparseGPT's $\Delta$: twice the KL divergence
    of the model's predictions in nats, to second order, so that layers can be compared. Between the measured points its
    logarithm is taken as linear in the logarithm of the density.
    """
    asked = 1 - next(iter(plan.values())).sparsity
    levels = levels_around(asked)
    curves: dict[str, tuple[int, list[float]]] = {}
    metrics = metrics or output_sensitivities(model, batches, compute, weights, storage)
    for block, inputs in walk(model, batches, compute=compute, metrics=metrics, weights=weights, storage=storage):
        names = [name for name in block.layers if block.full_name(name) in plan]
        if not names:
            continue
        calls, metric = inputs.calls(block), inputs.metric(block)
        weighs = layer_sensitivities(block, inputs.pruned, calls, names, metric, inputs.firsts, inputs.window)
        for name, known in gather(block, inputs, dict.fromkeys(names, Gram), onward=True).items():
            problem = problem_of(block, name, known)
            full = block.full_name(name)
            weighed = LayerProblem(problem.weight, problem.inputs, weighs[name])
            gram = weighed.gram
            least = 1e-12 * float(weighed.energy(weighed.weight, gram))
            errors = []
            for level in levels:
                pruned, _ = solve(SparseGPT(), problem, Unstructured(1 - level), full)
                errors.append(max(float(weighed.energy(pruned.sub_(weighed.weight), gram)), least))
            curves[full] = problem.weight.numel(), errors
    return cautious(balanced(curves, levels, asked), asked)


def fisher(
    model: PreTrainedModel,
    batches: Sequence[Tensor],
    plan: Plan,
    compute: torch.dtype | None = None,
    weights: Weights | None = None,
    storage: Storage | None = None,
) -> dict[str, float]:
    """Densities at which one more weight costs the same in every layer, by what its weights cost one by one (`weight_costs`).

    As `by_error`, with the sum of the smallest costs for a layer's error: what the other weights would make good is left out,
    and no layer is solved.
    """
    asked = 1 - next(iter(plan.values())).sparsity
    levels = levels_around(asked)
    curves: dict[str, tuple[int, list[float]]] = {}
    for name, costs in weight_costs(model, batches, plan, compute, weights, storage):
        size = costs.numel()
        lost = smallest_sums(costs, [round((1 - level) * size) for level in reversed(levels)])
        least = max(1e-12 * float(costs.sum()), torch.finfo(torch.float32).tiny)
        curves[name] = size, [max(some, least) for some in reversed(lost)]
    return cautious(balanced(curves, levels, asked), asked)


def _scores(
    model: PreTrainedModel,
    batches: Sequence[Tensor],
    plan: Plan,
    compute: torch.dtype | None,
    weights: Weights | None,
    storage: Storage | None,
) -> list[tuple[Block, list[str], list[Tensor]]]:
    """Wanda's scores of each block's planned layers, in the dense model."""
    found = []

    def look(block: Block, inputs: Activations) -> None:
        names = [name for name in block.layers if block.full_name(name) in plan]
        if names:
            moments = gather(block, inputs, dict.fromkeys(names, InputNorms), onward=True)
            problems = {name: problem_of(block, name, known) for name, known in moments.items()}
            scores = [problem.weight.abs() * problem.norms for problem in problems.values()]
            found.append((block, [block.full_name(name) for name in names], scores))

    for block, inputs in walk(model, batches, compute=compute, weights=weights, storage=storage):
        look(block, inputs)
    return found


def _spread(found: Mapping[int, tuple[list[str], float]], plan: Plan, spread: float) -> dict[str, float]:
    """Densities that rise with each block's figure, at most `spread` on either side of the one asked for."""
    asked = 1 - next(iter(plan.values())).sparsity
    figures = [figure for _, figure in found.values()]
    width = max(figures) - min(figures)
    spread = min(spread, asked / 2, (1 - asked) / 2)
    shares = {i: ((figure - min(figures)) / width if width > 0 else 0.5) for i, (_, figure) in found.items()}
    mean = sum(shares.values()) / len(shares)
    return {name: asked + 2 * spread * (shares[i] - mean) for i, (names, _) in found.items() for name in names}
