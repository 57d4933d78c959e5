"""Layer-wise pruning in running order: each layer on the inputs that the pruned layers before it in the block produce."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sparsellm.activations.output_cache import OutputCache, trace_dataflow
from sparsellm.activations.walk import Activations
from sparsellm.methods import EpochResult, LayerResult, Plan, planned_layers
from sparsellm.methods.layerwise import LayerWise
from sparsellm.models.blocks import Block


@dataclass(frozen=True)
class TrueSequential(LayerWise):
    """Prune each group of layers for its own output, after the groups before it, as an option of SparseGPT's code does.

    Passes reuse the outputs of pruned modules, so that all passes together cost about one pass through the block, if there is
    memory for the inputs of the feed-forward output projection.
    """

    def prune(self, block: Block, inputs: Activations, plan: Plan) -> Iterator[LayerResult | EpochResult]:
        cacheable = trace_dataflow(block, inputs.pruned[0], inputs.calls(block)[0]).cacheable
        cache = inputs.pruned.cache = OutputCache(inputs.storage, inputs.local_shapes, inputs.pruned[0])
        for names in stages_of(block, planned_layers(block, plan)):
            if names[0] in cacheable:
                cache.schedule(block, cacheable[names[0]], is_last=inputs.is_last(block))
            yield from self.prune_layers(block, inputs, names, plan)
            cache.mark_final(block, names)


def stages_of(block: Block, names: Sequence[str]) -> list[list[str]]:
    """The layers in running order, by stage: layers of one group, and the same layers of all experts, are pruned together."""
    stages: dict[str, list[str]] = {}
    for group in block.architecture.groups:
        planned = [name for name in group if name in names]
        view = block.views.get(group[0])
        expert = view is not None and view.expert is not None
        if planned:
            stages.setdefault(group[0].rpartition(".")[2] if expert else group[0], []).extend(planned)
    return list(stages.values())
