"""Passes with products in bfloat16 and the kernel that skips zeros, on models wide enough for both."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import transformers
from torch import Tensor

from sparsellm.activations.walk import walk
from sparsellm.methods import BlockMethod, EpochResult
from sparsellm.methods.algorithm1 import Algorithm1
from sparsellm.methods.auxiliary_signals import AuxiliarySignals
from sparsellm.methods.layerwise import LayerWise, collect_statistics
from sparsellm.methods.sparsellm import TrueSequential
from sparsellm.models import sparse_matmul
from sparsellm.models.blocks import Block, blocks_of
from sparsellm.models.loaded_model import LoadedModel, ResidentWeights
from sparsellm.models.sparse_matmul import SparseMatmul, load_library
from sparsellm.pipeline.sequential import prune_blocks
from sparsellm.recipes.plan import uniform_plan
from sparsellm.solvers.linalg import allclose_bf16
from sparsellm.solvers.patterns import parse_pattern
from sparsellm.solvers.sparsegpt import SparseGPT
from sparsellm.solvers.statistics import Gram
from tests.conftest import long_unless

pytestmark = pytest.mark.skipif(load_library() is None, reason="the kernel is not compiled: python hatch_build.py")

SHARED = {
    "vocab_size": 260,
    "hidden_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "max_position_embeddings": 64,
}
GATED = {**SHARED, "intermediate_size": 768, "num_key_value_heads": 8}
CONFIGS = {
    "OPT": {**SHARED, "ffn_dim": 1024, "word_embed_proj_dim": 512},
    "Llama": GATED,
    "GPTNeoX": {**SHARED, "intermediate_size": 1024},
    "Mixtral": {**GATED, "intermediate_size": 512, "num_local_experts": 2},
}
METHODS: dict[str, BlockMethod] = {"sdpa": LayerWise(SparseGPT()), "eager": TrueSequential(SparseGPT())}
"""By kind of attention, the method that is run with it."""

LARGE = {"OPT": 6, "Llama": 7, "GPTNeoX": 3, "Mixtral": 4}
"""Layers of a block with 2^18 weights or more that are not part of a larger parameter."""

each_model = [
    pytest.mark.parametrize("attention", ["sdpa", "eager"]),
    pytest.mark.parametrize("family", CONFIGS),
]


def both(test: Callable[..., None]) -> Callable[..., None]:
    """Each family with each kind of attention."""
    for mark in each_model:
        test = mark(test)
    return test


def wide(family: str, attention: str) -> LoadedModel:
    """A random model of two blocks that multiplies in bfloat16."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**CONFIGS[family])
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.bfloat16)
    model = model.float().eval()
    return LoadedModel(model, ResidentWeights(model), products=torch.bfloat16)


def batches() -> list[Tensor]:
    """Two batches of different sizes, 240 tokens."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 250, shape, generator=generator) for shape in ((3, 60), (1, 60))]


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the weights that are multiplied by the kernel."""
    shapes: list[tuple[int, ...]] = []
    build = SparseMatmul.__init__

    def recorded(product: SparseMatmul, weight: Tensor) -> None:
        shapes.append(tuple(weight.shape))
        build(product, weight)

    monkeypatch.setattr(sparse_matmul, "max_density", lambda _: sparse_matmul.MAX_DENSITY)  # whatever is faster here
    monkeypatch.setattr(SparseMatmul, "__init__", recorded)
    return shapes


def remove(block: Block, zeros: float) -> None:
    """Set a random part of each layer's weights to zero."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name in block.layers:
            weight = block.layer(name).weight
            block.assign(name, weight * (torch.rand(weight.shape, generator=generator) > zeros))


@torch.no_grad()
@both
def test_statistics_are_those_of_dense_products_up_to_rounding(
    family: str, attention: str, encoded: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layers of experts are left out, since a rounding may send a token to another expert."""
    block, inputs = next(walk(wide(family, attention), batches()))
    remove(block, 0.9)
    names = [name for name in block.layers if name not in block.views]
    by_kernel = collect_statistics(block, inputs, dict.fromkeys(names, Gram))
    assert len(encoded) == LARGE[family] - 1  # the pass ends at the last layer's input
    monkeypatch.setattr(sparse_matmul, "load_library", lambda: None)
    dense = collect_statistics(block, inputs, dict.fromkeys(names, Gram))
    differences = set()
    for name in names:
        one, other = by_kernel[name], dense[name]
        assert isinstance(one, Gram)
        assert isinstance(other, Gram)
        assert one.tokens == other.tokens
        assert allclose_bf16(one.matrix, other.matrix), name
        differences.add(torch.equal(one.matrix, other.matrix))
    assert False in differences  # some layers' inputs come from the kernel


@pytest.mark.parametrize(
    ("family", "attention"),
    [
        long_unless(place % 2 == number, family, attention)
        for place, family in enumerate(CONFIGS)
        for number, attention in enumerate(METHODS)
    ],
)
def test_sparsegpt_prunes_alike_with_and_without_the_kernel(
    family: str, attention: str, encoded: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparse_matmul, "max_density", lambda products: 0.25)

    def errors() -> dict[str, float]:
        model = wide(family, attention)
        plan = uniform_plan(blocks_of(model.model), parse_pattern("80%"))
        layers = {}
        for step in prune_blocks(model, batches(), METHODS[attention], plan):
            for layer in getattr(step, "layers", ()):
                assert layer.zeros == round(0.8 * layer.shape[0] * layer.shape[1])
                layers[layer.name] = layer.error
        return layers

    by_kernel = errors()
    assert encoded
    count = len(encoded)
    monkeypatch.setattr(sparse_matmul, "load_library", lambda: None)
    dense = errors()
    assert len(encoded) == count
    assert by_kernel.keys() == dense.keys()
    assert len(dense) >= 2 * LARGE[family]
    assert allclose_bf16(torch.tensor(list(by_kernel.values())), torch.tensor(list(dense.values())))


def test_the_kernel_is_not_used_where_16_bit_products_are_faster(
    encoded: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sparse_matmul, "max_density", lambda products: 0.15)
    block, inputs = next(walk(wide("OPT", "sdpa"), batches()))
    remove(block, 0.8)
    with torch.no_grad():
        collect_statistics(block, inputs, dict.fromkeys(block.layers, Gram))
    assert not encoded


@pytest.mark.parametrize("family", ["OPT", pytest.param("Llama", marks=pytest.mark.long)])
def test_algorithm_1_with_signals_in_bfloat16(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each epoch has the errors of float32 signals, and the regressions are those of the rounded signals."""
    method, kept = Algorithm1(epochs=3), list[torch.dtype]()
    tokens = torch.randint(3, 250, (32, 64), generator=torch.Generator().manual_seed(1)).split(8)
    refit = AuxiliarySignals.refit

    def recorded(signals: AuxiliarySignals, weights: dict[str, Tensor]) -> float:
        before = signals.objective(weights)
        error = refit(signals, weights)
        kept.extend(signal.dtype for hidden in signals._hidden for signal in hidden)
        assert 0 <= signals.objective(weights) <= before * 1.01
        return error

    monkeypatch.setattr(AuxiliarySignals, "refit", recorded)

    def errors(model: LoadedModel) -> Tensor:
        steps = prune_blocks(model, tokens, method, uniform_plan(blocks_of(model.model), parse_pattern("70%")))
        return torch.tensor([step.feed_forward_error for step in steps if isinstance(step, EpochResult)])

    low = errors(wide(family, "sdpa"))
    assert set(kept) == {torch.bfloat16}
    kept.clear()
    full = errors(replace(wide(family, "sdpa"), products=None))
    assert set(kept) == {torch.float32}
    assert len(low) == 2 * method.epochs
    assert allclose_bf16(low, full)
