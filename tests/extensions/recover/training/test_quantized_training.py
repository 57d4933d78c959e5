"""Training of integers and scales: gradients against automatic differentiation, masks, and what reading back refuses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from sparsellm.errors import BadCheckpoint, NonFinite
from sparsellm.extensions.integers.formats import IntegerFormat
from sparsellm.extensions.integers.quantization import Quantized, Scales, expand_groups, round_to_nearest
from sparsellm.extensions.recover.training.distillation import adam_for
from sparsellm.extensions.recover.training.masked_training import MaskedAdam
from sparsellm.extensions.recover.training.quantized_training import (
    LEAST_SCALE,
    QuantizedParameters,
    RoundedLayer,
    nearest_kept,
    rounded_layers,
    store_scales,
)
from sparsellm.extensions.recover.training.trained_weights import trained_bytes
from sparsellm.models.blocks import Block, blocks_of
from tests.meter import Meter
from tests.training import pruned_model

families = pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
GROUPS = {3: 64, 4: 0, 8: 0}


def rounded(family: str, bits: int = 4, dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, Block, dict[str, Scales]]:
    """A pruned model, the first of its blocks, whose layers are rounded, and their scales."""
    model = pruned_model(family, dtype)
    block, scales = blocks_of(model)[0], {}
    for name, layer in block.layers.items():
        quantized = round_to_nearest(layer.weight.detach().float(), IntegerFormat(bits, GROUPS[bits]))
        block.write(name, quantized.to_dense())
        scales[block.full_name(name)] = Scales(quantized.scales, quantized.format)
    return model, block, scales


def parameters_of(block: Block) -> dict[str, torch.nn.Parameter]:
    """The parameters of a block by full name."""
    return {block.full_name(name): parameter for name, parameter in block.module.named_parameters()}


def weight_of(layer: RoundedLayer, initial: Tensor, factors: Tensor, latent: Tensor) -> Tensor:
    """The direct formula t s0 q(V), (out, in); derivatives of roundings are taken as 1, and as 0 where q is 0."""
    integers, group_size = layer.quantized.integers.double(), layer.quantized.format.group_size
    scales, factors = (expand_groups(x, group_size, integers.shape[1]) for x in (initial.double(), factors))
    values, scales = torch.where(integers == 0, 0, latent * layer.unit), factors * scales
    scales = scales + (scales.float().bfloat16().double() - scales).detach()
    return scales * (values + (integers - values).detach())


@families
@pytest.mark.parametrize("bits", [3, 4])
def test_gradients_are_sums_over_groups(family: str, bits: int) -> None:
    """A scale gets the sum over its group of the integers times the weights' gradients, and a kept weight its own."""
    _, block, scales = rounded(family, bits)
    parameters = parameters_of(block)
    layers = list(rounded_layers(block, scales, parameters))
    assert len(layers) == len(block.layers)
    training = QuantizedParameters(parameters, {}, layers)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name in (name for name in training.trained if name.endswith(".scales")):
            training.trained[name].uniform_(0.5, 2, generator=generator)
    training.apply()
    upstream = {name: torch.randn(x.shape, generator=generator) for name, x in parameters.items()}
    found = dict(zip(training.trained, training.gradients([gradient.clone() for gradient in upstream.values()]), strict=True))
    for layer in layers:
        names = [f"{layer.full_name}.{part}" for part in ("scales", "weight")]
        variables = [training.trained[name].detach().double().requires_grad_() for name in names]
        initial, part = scales[layer.full_name].scales, block.linear_view(layer.name, upstream[layer.parameter])
        wanted = torch.autograd.grad((weight_of(layer, initial, *variables) * part.double()).sum(), variables)
        for name, direct in zip(names, wanted, strict=True):
            gradient = found.pop(name)
            assert gradient is not None
            assert torch.allclose(gradient.double(), direct, rtol=1e-4, atol=1e-6), name
            assert bool(direct.any())
    assert all(torch.equal(gradient, upstream[name]) for name, gradient in found.items() if gradient is not None)
    assert found.keys() == {name for name in parameters if name.removeprefix(f"{block.name}.") in block.unpruned_parameters()}
    nothing = training.gradients([None] * len(parameters))
    assert nothing == [None] * len(training.trained)


@families
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", [3, 4])
def test_weights_are_the_nearest_integers_times_the_new_scales(family: str, dtype: torch.dtype, bits: int) -> None:
    """Before a step every bit is the same. After one, each kept weight has the nearest integer of its range that is not 0."""
    _, block, scales = rounded(family, bits, dtype)
    parameters = parameters_of(block)
    before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    layers = list(rounded_layers(block, scales, parameters))
    first = [layer.quantized.integers.clone() for layer in layers]
    training = QuantizedParameters(parameters, {}, layers)
    training.apply()
    assert all(
        torch.equal(parameter.view(torch.uint8), before[name].view(torch.uint8)) for name, parameter in parameters.items()
    )
    generator = torch.Generator().manual_seed(bits)
    with torch.no_grad():
        for name, tensor in training.trained.items():
            if name.endswith(".scales"):
                tensor.uniform_(-0.2, 2, generator=generator)
        for layer in layers:
            latent = training.trained[f"{layer.full_name}.weight"]
            latent.add_(torch.randn(latent.shape, generator=generator) * latent.abs().mean())
    training.apply()
    initial = {name: x.scales.float() for name, x in scales.items()}
    store_scales(scales, layers)
    for layer, integers in zip(layers, first, strict=True):
        found, size = layer.quantized.integers, layer.quantized.format.group_size
        latent = training.trained[f"{layer.full_name}.weight"] * layer.unit
        low, high = layer.quantized.format.limits(float((integers != 0).float().mean()))
        allowed = torch.tensor([float(x) for x in range(low, high + 1) if x])
        distances = (latent[integers != 0].unsqueeze(1) - allowed).abs()
        chosen = (found[integers != 0].unsqueeze(1) == allowed).nonzero()[:, 1]
        assert torch.allclose(distances.gather(1, chosen.unsqueeze(1)).squeeze(1), distances.amin(1), atol=1e-5)
        assert torch.equal(found == 0, integers == 0)
        assert 0.1 < (found != integers)[integers != 0].float().mean() < 0.9
        weight, stored = block.layer(layer.name).weight.detach(), scales[layer.full_name]
        ratio = stored.scales.float() / initial[layer.full_name]
        assert stored.scales.dtype is torch.bfloat16
        assert float(ratio.min()) == pytest.approx(LEAST_SCALE, rel=0.01) or float(ratio.min()) > LEAST_SCALE
        assert torch.equal(weight == 0, integers == 0)
        read = stored.quantized(weight)
        assert read is not None
        assert torch.equal(read.integers, found)
        assert torch.equal(weight, (found.float() * expand_groups(stored.scales.float(), size, found.shape[1])).to(dtype))


@pytest.mark.parametrize("width", [64, 256, 1024, 4096])
def test_integers_can_change_at_every_width(width: int) -> None:
    """Steps of Adam, each as long as the rate, all in one direction, move the integers of a model of any width."""
    config = LlamaConfig(vocab_size=8, hidden_size=width, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    config.num_key_value_heads, config.head_dim = 1, 8
    model = AutoModelForCausalLM.from_config(config)
    (block,) = blocks_of(model)
    quantized = round_to_nearest(block.layer("mlp.up_proj").weight.detach(), IntegerFormat(4, 0))
    block.write("mlp.up_proj", quantized.to_dense())
    scales = {block.full_name("mlp.up_proj"): Scales(quantized.scales, quantized.format)}
    layers = list(rounded_layers(block, scales, {block.full_name("mlp.up_proj.weight")}))
    training = QuantizedParameters({layers[0].parameter: block.layer("mlp.up_proj").weight}, {}, layers)
    adam = adam_for(model, 300)
    before = layers[0].quantized.integers.clone()
    with torch.no_grad():
        training.trained[f"{layers[0].full_name}.weight"] += adam.steps * adam.rate / 2  # the mean rate is half of the first
    training.apply()
    inner = (before > -8) & (before < -1)  # which neither end nor 0 holds
    assert bool((layers[0].quantized.integers > before)[inner].all())


def test_no_kept_weight_becomes_zero() -> None:
    """A weight that is trained to 0, from either side, has the integer 1 or -1 of its side."""
    quantized = Quantized(
        torch.tensor([[3, -3, 0, 2]], dtype=torch.int8), torch.tensor([[0.5]]).bfloat16(), IntegerFormat(4, 0)
    )
    assert nearest_kept(torch.tensor([[0.01, -0.01, 9.0, 0.0]]), quantized).tolist() == [[1, -1, 0, 1]]


def test_memory_is_what_is_said() -> None:
    """Training holds no more than is said, but for what the loss itself makes, which is small here."""
    config = LlamaConfig(vocab_size=8, hidden_size=256, intermediate_size=512, num_hidden_layers=1, num_attention_heads=2)
    (block,) = blocks_of(AutoModelForCausalLM.from_config(config))
    scales = {}
    for name, layer in block.layers.items():
        quantized = round_to_nearest(layer.weight.detach(), IntegerFormat(4, 0))
        block.write(name, quantized.to_dense())
        scales[block.full_name(name)] = Scales(quantized.scales, quantized.format)
    parameters = parameters_of(block)
    layers = list(rounded_layers(block, scales, parameters))

    def loss(number: int) -> Iterator[Tensor]:
        for _ in range(3):
            yield sum((parameter.square().sum() for parameter in parameters.values()), torch.zeros(()))

    with Meter() as meter:
        meter.hold([*parameters.values(), *(layer.quantized.integers for layer in layers)])
        MaskedAdam(3, 1e-3).run(parameters, {}, loss, groups=4, seed=0, rounded=layers)
    assert meter.peak["cpu"] == pytest.approx(trained_bytes(block, rounded=True), rel=0.1)


def test_other_parameters_keep_their_masks() -> None:
    """A layer without scales is trained with its zeros held."""
    _, block, scales = rounded("llama")
    left = block.full_name("mlp.up_proj")
    del scales[left]
    parameters = parameters_of(block)
    training = QuantizedParameters(
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
    with pytest.raises(BadCheckpoint, match=r"up_proj .*scales"):
        list(rounded_layers(block, scales, parameters_of(block)))


def test_scales_that_a_dtype_cannot_hold_are_refused() -> None:
    """In float16 the smallest numbers have few bits: integers times a scale of that size cannot be read again."""
    _, block, scales = rounded("llama", 8, torch.float16)
    layers = list(rounded_layers(block, scales, parameters_of(block)))
    with torch.no_grad():
        for layer in layers:
            layer.quantized.scales.mul_(1e-5)
            block.assign(layer.name, block.rounded_to_storage(layer.name, layer.quantized.to_dense()))
    with pytest.raises(NonFinite, match="float16"):
        store_scales(scales, layers)
