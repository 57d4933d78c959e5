"""Products by oneDNN against torch's own, in both directions, and where they are not used."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from sparsellm.models.contexts import gradient_checkpointing
from sparsellm.runtime import products

needs_kernel = pytest.mark.skipif(products._kernel() is None, reason="torch's own products are as fast on this processor")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces the kernel, on any processor, by torch's product in float64; returns a list that gets an item for each call."""
    made: list[str] = []

    def kernel(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        assert all(x.is_contiguous() or x.T.is_contiguous() for x in (inputs, weight))
        made.append("product")
        return nn.functional.linear(inputs.double(), weight.double(), None if bias is None else bias.double()).float()

    monkeypatch.setattr(products, "_kernel", lambda: kernel)
    return made


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: x.contiguous(),
    "columns": lambda x: x.T.contiguous().T,
    "slice": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "slice of columns": lambda x: torch.cat([x, x]).T.contiguous().T[: len(x)],
}


@needs_kernel
@pytest.mark.parametrize("left", LAYOUTS)
def test_matmul_of_every_layout(left: str) -> None:
    for right in LAYOUTS.values():
        one, other = LAYOUTS[left](normal(160, 192)), right(normal(192, 144, seed=1))
        expected = (one.double() @ other.double()).float()
        got = products.matmul(one, other)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        assert got.is_contiguous()


@needs_kernel
def test_kernel_is_used_and_differs_from_torch_in_rounding_only() -> None:
    one, other = normal(256, 512), normal(512, 256, seed=1)
    expected = one.double() @ other.double()
    errors = [float((got - expected).norm() / expected.norm()) for got in (products.matmul(one, other), one @ other)]
    assert errors[0] != errors[1]
    assert errors[0] < 2 * errors[1] + 1e-7


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(192,), (2, 96)], ids=["tokens", "batch"])
def test_linear_has_the_gradients_of_torch(bias: bool, shape: tuple[int, ...], calls: list[str]) -> None:
    layer, x = nn.Linear(160, 144, bias=bias), normal(*shape, 160)
    gradient = normal(*shape, 144, seed=2)
    wanted = []
    for function in (nn.functional.linear, products.linear):
        leaf = x.clone().requires_grad_()
        result = function(leaf, layer.weight, layer.bias)
        assert result.shape == (*shape, 144)
        wanted.append([result.detach(), *torch.autograd.grad(result, [leaf, *layer.parameters()], gradient)])
    assert len(calls) == 3
    for expected, got in zip(*wanted, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


@needs_kernel
@pytest.mark.parametrize(
    "bias",
    [normal(144, 3)[:, 1], normal(1).expand(144), normal(1), normal(192, 144), normal(144)],
    ids=["strided", "expanded", "one number", "of each token", "plain"],
)
def test_every_bias_of_torch(bias: Tensor) -> None:
    inputs, weight = normal(192, 160), normal(144, 160, seed=1)
    expected = inputs.double() @ weight.double().T + bias.double()
    torch.testing.assert_close(products.linear(inputs, weight, bias), expected.float(), rtol=1e-4, atol=1e-4)


def test_only_gradients_that_are_needed(calls: list[str]) -> None:
    layer, x = nn.Linear(160, 144).requires_grad_(False), normal(192, 160).requires_grad_()
    with products.fast_linear_layers():
        result = layer(x)
    assert calls == ["product"]
    (gradient,) = torch.autograd.grad(result.sum(), x)
    assert len(calls) == 2
    torch.testing.assert_close(gradient, layer.weight.sum(0).expand(192, 160), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("forward", [products.fast_linear_layers, nullcontext], ids=["within", "outside"])
def test_checkpointed_modules_recompute_by_the_same_products(
    forward: Callable[[], AbstractContextManager[Any]], calls: list[str]
) -> None:
    """The backward pass runs outside of the context of the forward pass."""
    model, x = nn.Sequential(nn.Linear(160, 144), nn.ReLU(), nn.Linear(144, 160)), normal(192, 160)
    expected = torch.autograd.grad(model(x).square().sum(), [*model.parameters()])
    assert not calls
    with gradient_checkpointing([model]):
        with forward():
            loss = model(x).square().sum()
        got = torch.autograd.grad(loss, [*model.parameters()])
    assert len(calls) == 2 * 2 + 3  # forward, recomputed, and the gradients of two weights and of the inputs of the second
    for one, other in zip(expected, got, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layer", [nn.Linear(160, 144), Conv1D(144, 160)], ids=["Linear", "Conv1D"])
def test_modules_only_within_the_context(layer: nn.Module, calls: list[str]) -> None:
    x = normal(2, 96, 160)
    expected = layer(x)
    assert not calls
    with products.fast_linear_layers():
        got = layer(x)
    assert calls
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    del calls[:]
    layer(x)
    assert not calls


def test_other_dtypes_small_products_and_gradients_are_torch_s(calls: list[str]) -> None:
    one, other = normal(192, 160), normal(160, 144, seed=1)
    for dtype in (torch.float64, torch.bfloat16):
        assert torch.equal(products.matmul(one.to(dtype), other.to(dtype)), one.to(dtype) @ other.to(dtype))
        assert torch.equal(
            products.linear(one.to(dtype), other.T.to(dtype)), nn.functional.linear(one.to(dtype), other.T.to(dtype))
        )
    assert torch.equal(products.matmul(one[:8], other), one[:8] @ other)
    assert products.linear(one[0], other.T).shape == (144,)
    assert products.matmul(one.requires_grad_(), other).requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        assert products.linear(one.detach(), other.T).dtype == torch.bfloat16
    assert not calls


def test_by_columns_keeps_the_numbers(calls: list[str]) -> None:
    x = normal(160, 144)
    assert torch.equal(products.by_columns(x), x)
    assert products.by_columns(x).T.is_contiguous()
    assert products.by_columns(x[:4]).is_contiguous()


def test_a_kernel_that_is_wrong_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another torch may give the operator other arguments, or another meaning."""

    def wrong(inputs: Tensor, weight: Tensor, bias: Tensor, *_: object) -> Tensor:
        return nn.functional.linear(inputs, weight)  # without the bias

    def refusing(*_: object) -> Tensor:
        raise RuntimeError("expected 7 arguments")

    for operator in (wrong, refusing, None):
        monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", operator, raising=False)
        assert products._onednn.__wrapped__() is None
