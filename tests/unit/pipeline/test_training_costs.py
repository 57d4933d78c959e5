"""What a plan counts for a gradient step, against what the step does."""

from __future__ import annotations

import torch

from sparsellm.models.blocks import blocks_of
from sparsellm.pipeline.stage_costs import _step_work
from sparsellm.training.trained_weights import MaskedLoRA
from tests.meter import Meter
from tests.training import pruned_model


def test_products_of_low_rank_factors_are_counted() -> None:
    """A step with two batches: the factors' gradients of each, and the weights that are formed once."""
    block, rank = blocks_of(pruned_model())[0], 3
    weights = {name: layer.weight for name, layer in block.layers.items()}
    keep = {name: weight != 0 for name, weight in weights.items()}
    factors = MaskedLoRA(weights, keep, rank=rank, seed=0)
    with Meter() as meter:
        for _ in range(2):
            factors.gradients([torch.ones_like(weight) for weight in weights.values()])
        factors.apply()
    planned = _step_work([block], "lora", rank, batches=2)
    assert planned[1] == meter.operations > 0  # products of layers
    assert planned[-1] > _step_work([block], "lora", rank, batches=1)[-1] > _step_work([block], "full", 0, batches=1)[-1]
