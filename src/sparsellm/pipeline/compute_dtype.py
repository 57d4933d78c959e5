"""The dtype of matrix products in passes through the blocks, chosen by measuring the device."""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from sparsellm.models.contexts import product_dtype_context
from sparsellm.pipeline.preparation import Prepared
from sparsellm.runtime import devices
from sparsellm.runtime.autotuning import Computation, speedup

LEAST_GAIN = 1.5
"""Least gain in a layer's product for which `auto` takes bfloat16: all else in a block, a third of its time, gains nothing."""

NARROW = 512
"""Least width of a model that is pruned for which `auto` takes bfloat16. With `effort="fast"`, models 192 wide gain 3 % of the
time. Trainings of models of that width take half of the time."""

LAYER_TOKENS, LAYER_WIDTH = 256, 1024
"""Tokens and inputs of the layer that is timed; the gain is the same from 512 inputs on (2.1 with AVX-512 BF16)."""

BFLOAT16_IN_PASSES = "products in bfloat16"
"""Name of the comparison with products in float32."""


def choose_products(ready: Prepared) -> torch.dtype | None:
    """Choose the dtype of the matrix products of passes; None for the dtype that a model is computed in anyway.

    `auto` never rounds a float32 or float16 model: only a bfloat16 model on a CPU, which would be computed in float32, is
    computed with products in bfloat16, if the device is faster with them. On a GPU a model is computed in its own dtype, but
    trained in float32, so that recovery chooses there as on a CPU.
    """
    recipe, is_recovery = ready.recipe, ready.recipe.trains
    if not recipe.reads_text or recipe.in_float32:
        return None
    is_bf16 = ready.source.dtype(recipe.dtype) is torch.bfloat16
    if is_bf16 and not is_recovery and ready.device.type != "cpu":
        return None
    if recipe.compute_dtype == "bfloat16":
        return torch.bfloat16
    wide = is_recovery or int(ready.skeleton.config.get_text_config().hidden_size) >= NARROW
    return torch.bfloat16 if is_bf16 and wide and bf16_pass_speedup(ready.device) >= LEAST_GAIN else None


def bf16_pass_speedup(device: torch.device) -> float:
    """Return how many times as fast a linear layer is with a product in bfloat16, casts included, as in float32.

    Measured once on a machine, as `sparsellm.runtime.autotuning` does.
    """

    def make() -> tuple[Computation, Computation]:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(LAYER_TOKENS, LAYER_WIDTH, generator=generator).to(device)
        weight = torch.randn(LAYER_WIDTH, LAYER_WIDTH, generator=generator).to(device)

        def multiply(dtype: torch.dtype | None) -> None:
            with product_dtype_context(device, dtype):
                linear(inputs, weight)
            devices.synchronize(device)

        return lambda: multiply(None), lambda: multiply(torch.bfloat16)

    return speedup(BFLOAT16_IN_PASSES, make, None if device.type == "cpu" else devices.name_of(device))
