"""Runs that prune, round, and train integers and scales: `effort` best with `values` or `bits`."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig, OPTConfig, PreTrainedModel

import sparsellm
from sparsellm.extensions.integers.formats import IntegerFormat
from sparsellm.extensions.integers.quantization import Scales
from sparsellm.extensions.recover.recipe import SCOPE_STEPS
from sparsellm.models.blocks import blocks_of
from tests.extensions.integers.test_bit_allocation import packed_bits

COMMON = {"vocab_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 64}


@pytest.fixture(autouse=True)
def fewer_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quarter of the default's gradient steps, which are enough for models of this size."""
    monkeypatch.setitem(SCOPE_STEPS, "model", 300)


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
    """The result of a run."""
    shared: dict[str, Any] = {"calibration": tokens(), "compute_dtype": "float32"}
    result = sparsellm.prune(random_model(family), **shared, **settings)
    assert isinstance(result, sparsellm.Result)
    return result


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """The weight of each layer of the blocks, (out, in)."""
    layers = itertools.chain.from_iterable([(b.full_name(n), x) for n, x in b.layers.items()] for b in blocks_of(model))
    return {name: layer.weight.detach().float() for name, layer in layers}


def kl_divergence(wanted: Tensor, found: Tensor) -> float:
    """The mean over positions, of log probabilities."""
    return float((wanted.exp() * (wanted - found)).sum(-1).mean())


@pytest.mark.parametrize(
    ("family", "bits"),
    [
        ("opt", 3),
        pytest.param("llama", 4, marks=pytest.mark.long),
        pytest.param("gpt2", 4, marks=pytest.mark.long),
        pytest.param("mixtral", 8, marks=pytest.mark.long),
    ],
)
def test_integers_are_trained_on_their_mask(family: str, bits: int, tmp_path: Path) -> None:
    """The mask is that of the same run without training, and the predictions come closer to the dense model's."""
    settings = {"sparsity": "50%", "values": f"int{bits}"}
    plain, trained = (pruned(family, effort=effort, **settings) for effort in ("standard", "best"))
    before, after = weights_of(plain.model), weights_of(trained.model)
    scales = {name: scales for block in trained.report.blocks for name, scales in block.scales.items()}
    for layer in trained.report.layers:
        found = Scales(scales[layer.name], IntegerFormat(layer.bits or 0, layer.group_size or 0)).quantized(after[layer.name])
        assert found is not None, layer.name
        assert layer.bits == bits
        assert layer.zeros == (after[layer.name] == 0).sum() > 0, layer.name
        assert torch.equal(after[layer.name] == 0, before[layer.name] == 0), layer.name
    assert not all(torch.equal(after[name], before[name]) for name in before)
    assert trained.report.recovered is not None
    assert trained.report.recovered.after < trained.report.recovered.before
    dense = random_model(family)
    torch.manual_seed(1)
    with torch.no_grad():
        text = dense.generate(torch.arange(64).unsqueeze(1), do_sample=True, top_k=0, max_length=32, eos_token_id=None)
        wanted = dense(text).logits.log_softmax(-1)
        found = [result.model(text).logits.log_softmax(-1) for result in (trained, plain)]
    assert kl_divergence(wanted, found[0]) < kl_divergence(wanted, found[1])
    trained.save_pretrained(tmp_path / "pruned")
    assert sparsellm.verify(tmp_path / "pruned").layers == len(trained.report.layers)


@pytest.mark.long
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_budgets_hold(family: str, tmp_path: Path) -> None:
    """Training takes no bits: what is packed is the budget, or a little less."""
    result = pruned(family, bits=3.0, effort="best")
    result.save_pretrained(tmp_path / "pruned")
    stored = packed_bits(tmp_path / "pruned", tmp_path / "packed", result.report.layers)
    assert 0.98 * 3.0 < stored <= 3.0
    assert result.report.totals.bits_of_pruned_layers == pytest.approx(stored, rel=5e-3)
