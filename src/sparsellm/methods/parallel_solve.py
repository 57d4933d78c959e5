"""Which of several processes solves a layer, and how its answer reaches the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from sparsellm.methods import LayerResult
from sparsellm.models.blocks import Block
from sparsellm.runtime import collectives


def assign_owners(block: Block, names: Sequence[str]) -> dict[str, int]:
    """Which of several processes solves which of these layers, by their cost: a factorisation and a pass over the weight."""
    layers = [block.layer(name) for name in names]
    costs = [float(layer.in_features**2 * (layer.in_features + layer.out_features)) for layer in layers]
    return dict(zip(names, collectives.balance_costs(costs), strict=True))


def solve_in_parallel(
    block: Block, names: Sequence[str], solve: Callable[[str], tuple[Tensor, Any]]
) -> Iterator[tuple[str, Tensor, Any]]:
    """By layer, a weight with plain data about it, each found by one of several processes and handed to all.

    solve: one layer's weight, (out, in) float32 on the block's device, and its data.
    """
    whose = assign_owners(block, names)
    local = {name: solve(name) for name, owner in whose.items() if owner == collectives.rank()}
    for name, owner in whose.items():
        layer = block.layer(name)
        weight, data = local.get(name) or (torch.empty(layer.weight.shape, device=layer.weight.device), None)
        yield name, collectives.broadcast(owner, weight), collectives.broadcast_object(data, owner)


def broadcast_results(block: Block, whose: Mapping[str, int], steps: Iterable[LayerResult]) -> Iterator[LayerResult]:
    """What became of all these layers, once each process has pruned its own and handed their weights to the others.

    whose: by layer, the process that prunes it. steps: this process's. Layers are then the same in all, to the bit.
    """
    if collectives.world() == 1:
        yield from steps
        return
    local = {step.name: step for step in steps}
    for name, owner in whose.items():
        block.assign(name, collectives.broadcast(owner, block.layer(name).weight.detach().contiguous()))
        step = local.get(block.full_name(name))
        yield step_from_dict(collectives.broadcast_object(None if step is None else asdict(step), owner))


def step_from_dict(data: Mapping[str, Any]) -> LayerResult:
    """A layer's result from plain data."""
    return LayerResult(**{**data, "shape": tuple(data["shape"])})
