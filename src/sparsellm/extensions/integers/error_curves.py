r"""Error curves: what removing and rounding weights costs in each layer, measured on the inputs of the dense model.

A layer's error is about :math:`\tfrac12 \sum_i E[g_i^2] \, \Delta_i G \Delta_i^\top` nats, where :math:`\Delta` is the change
of its weight, :math:`G` the Gram matrix of its inputs and :math:`g` the gradient with respect to its outputs. The errors of
pruning and of rounding add up, since pruned weights are the best ones on their mask.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from sparsellm.activations.backward import first_windows
from sparsellm.activations.fisher_diagonal import FisherFactors
from sparsellm.activations.walk import walk
from sparsellm.extensions.integers.formats import WIDTHS, IntegerFormat
from sparsellm.extensions.integers.quantization import DAMPING, gptq, round_to_nearest
from sparsellm.methods import Plan, assign_owners, planned_layers
from sparsellm.methods.layerwise import collect_statistics, solve
from sparsellm.models.blocks import Block
from sparsellm.models.loaded_model import LoadedModel
from sparsellm.runtime import collectives, devices
from sparsellm.solvers.fast_admm import FastADMM
from sparsellm.solvers.linalg import add_diagonal
from sparsellm.solvers.patterns import Unstructured
from sparsellm.solvers.problem import LayerProblem
from sparsellm.solvers.statistics import Gram, TokenCount

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DENSITIES = (0.05, 0.1, 0.2, 0.3, 0.5, 0.65, 0.8, 1.0)
"""Densities at which errors are measured, in increasing order."""

ROUNDED = (1, 3, 5, 7)
"""Positions in `DENSITIES` of those at which rounding is measured, which takes longer; errors are interpolated between."""

CURVE_TOKENS = 16384
"""Maximum number of tokens of the layers' Gram matrices."""

MEASURED_ROWS = 64
"""Rows of each layer on which errors are measured."""

DESCENT = 0.75
"""Error of `round_compensated` relative to that of `gptq`, which is measured since it takes a seventh of the time: 0.71 to 0.79
in most layers of demo:opt."""


ErrorCurve = list[list[float]]
"""For each of `WIDTHS`, the error of a layer at each of `DENSITIES`, in nats per token."""


@torch.no_grad()
def measure_errors(
    model: PreTrainedModel | LoadedModel, batches: Sequence[Tensor], plan: Plan, factors: Mapping[str, FisherFactors]
) -> dict[str, ErrorCurve]:
    """Measure the error curve of each planned layer.

    Takes one pass of at most 16,384 tokens through the model, and for each layer a solve of `MEASURED_ROWS` rows at each of
    `DENSITIES`.

    Args:
        batches: Calibration batches of token ids, each (batch, seq).
        plan: The layers; their patterns are ignored.
        factors: Of every layer, from `sparsellm.activations.fisher_diagonal.weight_costs`.
    """
    curves: dict[str, ErrorCurve] = {}
    for block, inputs in walk(model, first_windows(batches, CURVE_TOKENS)):
        if names := planned_layers(block, plan):
            statistics = collect_statistics(block, inputs, dict.fromkeys(names, Gram), advance=True)
            for name, owner in assign_owners(block, names).items():
                curve: ErrorCurve = []
                if owner == collectives.rank():
                    statistics[name].finalize()
                    curve = _measure_layer(block, name, statistics[name], factors[block.full_name(name)])
                curves[block.full_name(name)] = collectives.broadcast_object(curve, owner)
    return curves


def _measure_layer(block: Block, name: str, statistics: TokenCount, factors: FisherFactors) -> ErrorCurve:
    """Measure the error curve of one layer on evenly spaced rows."""
    dense = block.layer(name).weight.detach()
    rows = torch.linspace(0, len(dense) - 1, min(MEASURED_ROWS, len(dense)), device=dense.device).round().long()
    # Rows scaled by what their errors cost have errors in nats, and compete for weights as in the whole layer.
    scale = factors.gradients.to(dense.device)[rows] * math.sqrt(0.5 * factors.routed * len(dense) / len(rows))
    problem = LayerProblem(dense[rows].float() * scale.unsqueeze(1), statistics)
    pruning: list[Tensor] = []
    rounding: list[Tensor] = []  # at each of `ROUNDED` and each of `WIDTHS`
    for number, density in enumerate(DENSITIES):
        pruned, _ = solve(FastADMM(), problem, Unstructured(1 - density), name=block.full_name(name))
        pruning.append(problem.energy(pruned - problem.weight, problem.gram))
        if number in ROUNDED and statistics.tokens:
            mask = pruned != 0 if density < 1 else torch.ones_like(pruned, dtype=torch.bool)
            rounding += [_rounding_error(problem, pruned, mask, bits) for bits in WIDTHS]
    measured = devices.to_python(rounding) or [0.0] * len(ROUNDED) * len(WIDTHS)
    return _sums(devices.to_python(pruning), measured)


def _rounding_error(problem: LayerProblem, pruned: Tensor, mask: Tensor, bits: int) -> Tensor:
    """Error of rounding the kept weights, (): the smaller one of two fast ways, and less for the longer way of the run."""
    format, gram = IntegerFormat.default(bits, float(mask.float().mean())), problem.gram
    nearest = round_to_nearest(pruned, format, mask=mask, importance=gram.diagonal())
    error = problem.energy(nearest.to_dense() - pruned, gram)
    if bits != WIDTHS[-1]:  # whose error is so small that it never decides
        passed_on = gptq(pruned, add_diagonal(gram, DAMPING), format, mask=mask)
        error = torch.minimum(error, problem.energy(passed_on.to_dense() - pruned, gram))
    return DESCENT * error


def _sums(pruning: list[float], rounding: list[float]) -> ErrorCurve:
    """Add rounding errors, by density and width, to pruning errors, by density; logarithms are interpolated between them."""
    at, known = np.log(DENSITIES), np.log([DENSITIES[number] for number in ROUNDED])
    curve = []
    for number in range(len(WIDTHS)):
        logs = np.log(np.maximum(rounding[number :: len(WIDTHS)], np.finfo(np.float32).tiny))
        curve.append((np.maximum(pruning, 0.0) + np.exp(np.interp(at, known, logs))).tolist())
    return curve
