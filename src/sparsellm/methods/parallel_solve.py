"""Distribution of the layer problems of a block over processes, and broadcast of the results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sparsellm.methods import LAYER_RESULT, LayerResult
from sparsellm.models.blocks import Block
from sparsellm.runtime import collectives


def assign_owners(block: Block, names: Sequence[str]) -> dict[str, int]:
    """The rank that solves each layer, balanced by cost: a factorisation, (in, in), and a pass over the weight."""
    layers = [block.layer(name) for name in names]
    costs = [float(layer.in_features**2 * (layer.in_features + layer.out_features)) for layer in layers]
    return dict(zip(names, collectives.balance_costs(costs), strict=True))


def solve_in_parallel(
    block: Block, names: Sequence[str], solve: Callable[[str], tuple[Tensor, Any]]
) -> Iterator[tuple[str, Tensor, Any]]:
    """Solve each layer in one process and broadcast the solution to all.

    Args:
        block: The block that the layers belong to.
        names: The layers, by name within the block.
        solve: Returns a layer's weight, (out, in) float32 on the block's device, and plain data about it.

    Returns:
        Name, weight and data of each layer, the same in every process.
    """
    owners = assign_owners(block, names)
    local = {name: solve(name) for name, owner in owners.items() if owner == collectives.rank()}
    for name, owner in owners.items():
        layer = block.layer(name)
        weight, data = local.get(name) or (torch.empty(layer.weight.shape, device=layer.weight.device), None)
        yield name, collectives.broadcast(owner, weight), collectives.broadcast_object(data, owner)


def broadcast_results(block: Block, whose: Mapping[str, int], steps: Iterable[LayerResult]) -> Iterator[LayerResult]:
    """Prune the layers of this process, then broadcast weights and results, so that all processes hold the same bits.

    Args:
        block: The block that the layers belong to.
        whose: By layer, the rank that prunes it.
        steps: Prunes the layers of this process as it is consumed.

    Returns:
        The results of all layers.
    """
    if collectives.world() == 1:
        yield from steps
        return
    local = {step.name: step for step in steps}
    for name, owner in whose.items():
        block.assign(name, collectives.broadcast(owner, block.layer(name).weight.detach().contiguous()))
        step = local.get(block.full_name(name))
        result = None if step is None else LAYER_RESULT.dump_python(step, mode="json")
        yield LAYER_RESULT.validate_python(collectives.broadcast_object(result, owner))
