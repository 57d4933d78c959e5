"""Passes through pruned blocks with the kernel for pruned weights, against passes with dense products."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import nn

from sparsellm.activations.streams import CaptureRequest
from sparsellm.methods import BlockMethod, LayerResult
from sparsellm.methods.algorithm1 import Algorithm1
from sparsellm.methods.layerwise import LayerWise
from sparsellm.methods.sparsellm import SparseLLM, TrueSequential
from sparsellm.models import sparse_matmul
from sparsellm.models.blocks import blocks_of
from sparsellm.models.sparse_matmul import PrunedLayers, SparseMatmul, load_library
from sparsellm.solvers.sparsegpt import SparseGPT
from tests.core.integration.test_algorithm1 import batches, prune, tiny
from tests.pruning import walk

pytestmark = pytest.mark.skipif(load_library() is None, reason="the kernel is not compiled: python hatch_build.py")

METHODS: dict[str, tuple[BlockMethod, int]] = {
    "layer-wise": (LayerWise(SparseGPT()), 6),
    "true-sequential": (TrueSequential(SparseGPT()), 6),
    "Algorithm 1": (Algorithm1(SparseGPT(), epochs=2), 8),
    "default": (SparseLLM(SparseGPT(), rounds=1), 6),
}
"""Methods, and the number of weights of OPT of two blocks for which they use the kernel at least."""


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shapes of the weights for which the kernel is used, which is done for weights of any size."""
    shapes: list[tuple[int, ...]] = []
    build = SparseMatmul.__init__

    def recorded(product: SparseMatmul, weight: torch.Tensor) -> None:
        shapes.append(tuple(weight.shape))
        build(product, weight)

    monkeypatch.setattr(sparse_matmul, "MIN_WEIGHTS", 1)
    monkeypatch.setattr(sparse_matmul, "max_density", lambda _: sparse_matmul.MAX_DENSITY)  # whatever is faster here
    monkeypatch.setattr(SparseMatmul, "__init__", recorded)
    return shapes


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("family", ["opt", "llama"])
def test_methods_give_the_same_up_to_rounding(
    family: str, name: str, encoded: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The errors of the first block's layers, which change by rounding alone. Near ties in its masks change single weights by
    more, and with them what the second block is given."""
    method, least = METHODS[name]
    model, steps = prune(family, method)
    assert len(encoded) >= least
    count = len(encoded)
    monkeypatch.setattr(sparse_matmul, "load_library", lambda: None)
    _, wanted = prune(family, method)
    assert len(encoded) == count
    assert len(errors_of(wanted)) == len(list(blocks_of(model)[0].layers))
    assert errors_of(steps) == pytest.approx(errors_of(wanted), rel=0.02)


def errors_of(steps: Iterable[object]) -> dict[str, float]:
    """The error of each layer of the first block, by name."""
    return {step.name: step.error for step in steps if isinstance(step, LayerResult) and "layers.0." in step.name}


def test_a_pass_uses_the_weights_of_its_time(encoded: list[tuple[int, ...]]) -> None:
    """A dense block is passed densely, and after a change of its weights the next pass is with the new ones."""
    model = tiny("opt")
    for block, inputs in walk(model, batches(), stop=1):
        layers = {name: block.layer(name) for name in ("fc1", "fc2")}
        request = CaptureRequest(inputs=["fc2"], outputs=["fc2"])
        list(inputs.run(block, request))
        assert not encoded
        for density in (0.3, 0.2):
            with torch.no_grad():
                for layer in layers.values():
                    layer.weight.mul_(torch.rand_like(layer.weight) < density)
            encoded.clear()
            for captured in inputs.run(block, request):
                wanted = torch.nn.functional.linear(captured.inputs["fc2"], layers["fc2"].weight, layers["fc2"].bias)
                torch.testing.assert_close(captured.outputs["fc2"], wanted)
            assert sorted(encoded) == [(32, 64), (64, 32)]


def test_layers_are_restored(encoded: list[tuple[int, ...]]) -> None:
    block = blocks_of(tiny("opt"))[0]
    with torch.no_grad():
        block.layer("fc1").weight.fill_(0)
    x = torch.randn(2, 3, 32)
    with PrunedLayers(block).used():
        with torch.no_grad():
            assert torch.equal(block.module.fc1(x), block.module.fc1.bias.expand(2, 3, -1))
        block.module.fc1(x).sum().backward()  # with gradients the product is dense
    assert encoded == [(64, 32)]
    assert all("forward" not in vars(module) for module in block.module.modules() if isinstance(module, nn.Linear))
    assert block.module.fc1.weight.grad is not None
