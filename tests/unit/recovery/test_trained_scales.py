"""Training of scales: gradients against automatic differentiation, integers held, and what reading back refuses."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from sparsellm.errors import BadCheckpoint, NonFinite
from sparsellm.methods.rounding import Scales
from sparsellm.models.blocks import Block, blocks_of
from sparsellm.recovery.trained_scales import LEAST, RoundedLayer, TrainedScales, rounded_layers, store_scales
from sparsellm.solvers.quantization import expand_groups, round_to_nearest
from tests.training import pruned_model

families = pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
GROUPS = {3: 64, 4: 0, 8: 0}


def rounded(family: str, bits: int = 4, dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, Block, dict[str, Scales]]:
    """A pruned model, the first of its blocks, whose layers are rounded, and their scales."""
    model = pruned_model(family, dtype)
    block, scales = blocks_of(model)[0], {}
    for name, layer in block.layers.items():
        quantized = round_to_nearest(layer.weight.detach().float(), bits, GROUPS[bits])
        block.write(name, quantized.to_dense())
        scales[block.full_name(name)] = Scales(quantized.scales, bits, GROUPS[bits])
    return model, block, scales


def parameters_of(block: Block) -> dict[str, torch.nn.Parameter]:
    """The parameters of a block by full name."""
    return {block.full_name(name): parameter for name, parameter in block.module.named_parameters()}


def weights_of(layers: list[RoundedLayer], factors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The direct formula: integers times scales times factors, by full name of a layer."""
    weights = {}
    for layer in layers:
        integers, scales = layer.quantized.integers.double(), layer.quantized.scales.double()
        products = expand_groups(scales * factors[layer.full_name], layer.quantized.group_size, integers.shape[1])
        weights[layer.full_name] = integers * products
    return weights


@families
@pytest.mark.parametrize("bits", [3, 4])
def test_gradients_are_sums_over_groups(family: str, bits: int) -> None:
    """A scale gets the sum over its group of the integers times the weights' gradients; other parameters keep theirs."""
    _, block, scales = rounded(family, bits)
    parameters = parameters_of(block)
    layers = list(rounded_layers(block, scales, parameters))
    assert len(layers) == len(block.layers)
    training = TrainedScales(parameters, {}, layers)
    generator = torch.Generator().manual_seed(3)
    upstream = {name: torch.randn(x.shape, generator=generator) for name, x in parameters.items()}
    found = dict(zip(training.trained, training.gradients(list(upstream.values())), strict=True))
    factors = {
        layer.full_name: torch.ones(layer.quantized.scales.shape, dtype=torch.double).requires_grad_() for layer in layers
    }
    for name, weight in weights_of(layers, factors).items():
        local = name.removeprefix(f"{block.name}.")
        part = block.linear_view(local, upstream[block.full_name(block.parameter(local))])
        (wanted,) = torch.autograd.grad((weight * part.double()).sum(), factors[name])
        gradient = found.pop(f"{name}.scales")
        assert gradient is not None
        assert torch.allclose(gradient.double(), wanted, rtol=1e-4, atol=1e-6)
        assert bool(wanted.any())
    assert all(torch.equal(gradient, upstream[name]) for name, gradient in found.items() if gradient is not None)
    assert found.keys() == {name for name in parameters if name.removeprefix(f"{block.name}.") in block.unpruned_parameters()}
    assert all(x is None for x in training.gradients([None] * len(parameters)))


@families
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_the_held_integers_times_the_new_scales(family: str, dtype: torch.dtype) -> None:
    """Before a step every bit is the same. After one, scales are bfloat16, at least a sixteenth, and integers are equal."""
    _, block, scales = rounded(family, dtype=dtype)
    parameters = parameters_of(block)
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    layers = list(rounded_layers(block, scales, parameters))
    integers = [layer.quantized.integers.clone() for layer in layers]
    training = TrainedScales(parameters, {}, layers)
    training.apply()
    assert all(
        torch.equal(parameter.view(torch.uint8), before[name].view(torch.uint8)) for name, parameter in parameters.items()
    )
    with torch.no_grad():
        for factor in (factor for name, factor in training.trained.items() if name.endswith(".scales")):
            factor.uniform_(-0.2, 2, generator=torch.Generator().manual_seed(factor.numel()))
    training.apply()
    first = {name: x.scales.clone() for name, x in scales.items()}
    store_scales(scales, layers)
    for layer, held in zip(layers, integers, strict=True):
        weight, found = block.layer(layer.name).weight.detach(), scales[layer.full_name].scales
        ratio = found.float() / first[layer.full_name].float()
        assert found.dtype is torch.bfloat16
        assert float(ratio.min()) == pytest.approx(LEAST, rel=0.01) or float(ratio.min()) > LEAST
        assert not torch.equal(weight, block.linear_view(layer.name, before[layer.parameter]))
        assert torch.equal(layer.quantized.integers, held)
        assert torch.equal(weight == 0, held == 0)
        read = scales[layer.full_name].quantized(weight)
        assert read is not None
        assert torch.equal(read.integers, held)
        assert torch.equal(weight, (held.float() * expand_groups(found.float(), 0, held.shape[1])).to(dtype))


def test_other_parameters_keep_their_masks() -> None:
    """A layer without scales is trained with its zeros held."""
    _, block, scales = rounded("llama")
    left = block.full_name("mlp.up_proj")
    del scales[left]
    parameters = parameters_of(block)
    training = TrainedScales(
        parameters, {f"{left}.weight": block.layer("mlp.up_proj").weight != 0}, list(rounded_layers(block, scales, parameters))
    )
    zeros = parameters[f"{left}.weight"] == 0
    with torch.no_grad():
        training.trained[f"{left}.weight"].add_(1)
    training.apply()
    assert torch.equal(parameters[f"{left}.weight"] == 0, zeros)
    assert set(training.trained) >= {f"{left}.weight", f"{block.name}.input_layernorm.weight"}


def test_layers_of_parameters_that_are_not_trained_are_left_out() -> None:
    _, block, scales = rounded("llama")
    chosen = block.full_name("mlp.up_proj.weight")
    assert [layer.name for layer in rounded_layers(block, scales, {chosen})] == ["mlp.up_proj"]


def test_weights_that_are_not_their_scales_times_integers_are_refused() -> None:
    _, block, scales = rounded("llama")
    with torch.no_grad():
        block.layer("mlp.up_proj").weight[0] += 0.3 * scales[block.full_name("mlp.up_proj")].scales[0, 0].float()
    with pytest.raises(BadCheckpoint, match=r"up_proj is not its scales times integers"):
        list(rounded_layers(block, scales, parameters_of(block)))


def test_scales_that_a_dtype_cannot_hold_are_refused() -> None:
    """In float16 the smallest numbers have few bits: integers times a scale of that size cannot be read again."""
    _, block, scales = rounded("llama", 8, torch.float16)
    layers = list(rounded_layers(block, scales, parameters_of(block)))
    with torch.no_grad():
        for layer in layers:
            layer.quantized.scales.mul_(1e-5)
            block.assign(layer.name, block.rounded_to_storage(layer.name, layer.quantized.to_dense()))
    with pytest.raises(NonFinite, match=r"became too small for torch\.float16"):
        store_scales(scales, layers)
