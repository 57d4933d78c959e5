"""Runs that prune, train the whole model and round last: `effort` best with `values` or `bits`."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig, OPTConfig, PreTrainedModel

import sparsellm
from sparsellm.methods.rounding import Scales
from sparsellm.models.blocks import blocks_of
from sparsellm.solvers.quantization import round_compensated, round_to_nearest
from tests.integration.test_bit_allocation import packed_bits

COMMON = {"vocab_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 64}


def random_model(family: str) -> PreTrainedModel:
    """A random model of two blocks whose weights are large enough to matter."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"intermediate_size": 96, "num_key_value_heads": 1, "max_position_embeddings": 32}
    match family:
        case "opt":
            return AutoModelForCausalLM.from_config(OPTConfig(**COMMON, ffn_dim=96, max_position_embeddings=32, init_std=0.1))
        case "gpt2":
            config = GPT2Config(vocab_size=96, n_layer=2, n_embd=64, n_head=2, n_positions=32, initializer_range=0.1)
            return AutoModelForCausalLM.from_config(config)
        case "mixtral":
            experts = {"num_local_experts": 2, "num_experts_per_tok": 1}
            return AutoModelForCausalLM.from_config(MixtralConfig(**COMMON, **sizes, **experts, initializer_range=0.1))
    return AutoModelForCausalLM.from_config(LlamaConfig(**COMMON, **sizes, initializer_range=0.1))


def tokens() -> Tensor:
    """Sixteen random sequences."""
    return torch.randint(0, 96, (16, 32), generator=torch.Generator().manual_seed(0))


def pruned(family: str, **settings: Any) -> sparsellm.Result:
    """The result of a run with training."""
    shared: dict[str, Any] = {"calibration": tokens(), "effort": "best", "compute_dtype": "float32"}
    result = sparsellm.prune(random_model(family), **shared, **settings)
    assert isinstance(result, sparsellm.Result)
    return result


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """The weight of each layer of the blocks, (out, in)."""
    layers = itertools.chain.from_iterable([(b.full_name(n), x) for n, x in b.layers.items()] for b in blocks_of(model))
    return {name: layer.weight.detach().float() for name, layer in layers}


@pytest.mark.parametrize(
    ("family", "bits"),
    [
        ("llama", 4),
        ("opt", 3),
        pytest.param("gpt2", 4, marks=pytest.mark.long),
        pytest.param("mixtral", 8, marks=pytest.mark.long),
    ],
)
def test_trained_weights_are_rounded_on_their_zeros(family: str, bits: int, tmp_path: Path) -> None:
    """The zeros of the same run without rounding stay, and the report counts those of the rounded weights."""
    plain, rounded = (pruned(family, sparsity="50%", **x) for x in ({}, {"values": f"int{bits}"}))
    before, after = weights_of(plain.model), weights_of(rounded.model)
    assert not all(torch.equal(after[name], before[name]) for name in before)
    for layer in rounded.report.layers:
        assert (after[layer.name][before[layer.name] == 0] == 0).all(), layer.name
        assert layer.zeros == (after[layer.name] == 0).sum() >= (before[layer.name] == 0).sum() > 0, layer.name
        assert layer.bits == bits
    first, both = plain.report.recovered, rounded.report.recovered
    assert first is not None
    assert both is not None
    assert both.curve[: len(first.curve)] == first.curve
    assert both.after <= both.curve[len(first.curve)].held_out  # the loss of the rounded model
    rounded.save_pretrained(tmp_path / "pruned")
    assert sparsellm.verify(tmp_path / "pruned").layers == len(rounded.report.layers)


def test_integers_are_compensated_toward_the_trained_model() -> None:
    """Of the first layers, whose inputs do not change: the integers of a direct call, with less error than the nearest."""
    plain = pruned("llama", sparsity="50%")
    inputs: list[Tensor] = []
    plain.model.model.layers[0].self_attn.q_proj.register_forward_pre_hook(lambda _, given: inputs.append(given[0]))
    with torch.no_grad():
        plain.model(tokens())
    x = inputs[0].flatten(0, 1).double()
    gram = (x.T @ x / len(x)).float()
    result = pruned("llama", sparsity="50%", values="int3")
    scales = {name: scales for block in result.report.blocks for name, scales in block.scales.items()}
    for name in ("q_proj", "k_proj", "v_proj"):
        full_name = f"model.layers.0.self_attn.{name}"
        trained = weights_of(plain.model)[full_name]
        wanted = round_compensated(trained, gram, trained != 0, bits=3, group_size=0)
        nearest = round_to_nearest(trained, 3, 0, mask=trained != 0)
        found = Scales(scales[full_name], 3, 0).quantized(weights_of(result.model)[full_name])
        assert found is not None
        assert (found.integers == wanted.integers).float().mean() > 0.98
        errors = [((w.to_dense() - trained).double() @ x.T).square().sum() for w in (wanted, nearest)]
        assert errors[0] < 0.8 * errors[1]


@pytest.mark.parametrize("family", ["llama", pytest.param("gpt2", marks=pytest.mark.long)])
def test_budgets_hold(family: str, tmp_path: Path) -> None:
    """The masks are chosen for the budget, and rounding takes no more; weights that round to 0 save a little."""
    result = pruned(family, bits=3.0)
    result.save_pretrained(tmp_path / "pruned")
    stored = packed_bits(tmp_path / "pruned", tmp_path / "packed", result.report.layers)
    assert 0.9 * 3.0 < stored <= 3.0
    assert result.report.totals()["bits_of_pruned_layers"] == pytest.approx(stored, rel=5e-3)
