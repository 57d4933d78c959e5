"""Rounding of a model that was pruned and trained, with the zeros that it has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from sparsellm.methods import BlockResult, LayerResult, Plan
from sparsellm.methods.rounding import Values
from sparsellm.methods.sparsellm import SparseLLM
from sparsellm.models.loaded_model import LoadedModel
from sparsellm.pruning.sequential import prune_blocks
from sparsellm.runs.events import ROUNDING, Observer, phase
from sparsellm.runs.report import Report
from sparsellm.solvers.patterns import Unstructured


def round_pruned(
    loaded: LoadedModel, batches: Sequence[Tensor], values: Values, *, plan: Plan, report: Report, observer: Observer
) -> None:
    """Round the planned layers block by block, toward the outputs of the model as it is, and update the report's blocks.

    A killed run repeats this stage, which is short beside the training before it.

    Args:
        batches: Calibration token ids, each (batch, length) without padding.
        values: What the kept weights are rounded to.
    """
    method = SparseLLM(scope="none", keep_zeros=True, values=values)
    nothing_more: Plan = dict.fromkeys(plan, Unstructured(0))
    by_index = {result.index: number for number, result in enumerate(report.blocks)}
    with phase(ROUNDING, report, observer, unit="block") as advance:
        for step in prune_blocks(loaded, batches, method, nothing_more):
            if isinstance(step, BlockResult):
                number = by_index[step.index]
                report.blocks[number] = _with_integers(report.blocks[number], step)
                advance(number + 1, len(by_index))


def _with_integers(pruned: BlockResult, rounded: BlockResult) -> BlockResult:
    """A block's result with its zeros, integers and scales after rounding; the errors stay those of pruning."""
    after = {layer.name: layer for layer in rounded.layers}
    return replace(
        pruned,
        layers=tuple(_rounded_layer(layer, after[layer.name]) for layer in pruned.layers),
        changed_parameters=tuple(sorted({*pruned.changed_parameters, *rounded.changed_parameters})),
        scales=rounded.scales,
    )


def _rounded_layer(pruned: LayerResult, rounded: LayerResult) -> LayerResult:
    """A layer's result with what rounding set."""
    fields = ("zeros", "bits", "group_size", "bits_per_weight")
    return replace(pruned, **{name: getattr(rounded, name) for name in fields})
