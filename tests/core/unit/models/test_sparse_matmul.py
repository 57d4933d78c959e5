"""The kernel for pruned weights against products in float64, and layers that use it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from sparsellm.models import sparse_matmul
from sparsellm.models.sparse_matmul import SparseMatmul, load_library, matmul_of, skips_zeros
from sparsellm.solvers.linalg import allclose_bf16
from tests.pairwise import pairwise

compiled = pytest.mark.skipif(load_library() is None, reason="the kernel is not compiled: python hatch_build.py")


def sparse(rows: int, columns: int, density: float) -> Tensor:
    """A random weight of which about `density` of the entries are not zero; some zeros are negative."""
    generator = torch.Generator().manual_seed(rows + columns)
    weight = torch.randn(rows, columns, generator=generator)
    return weight * (torch.rand(rows, columns, generator=generator) < density)


@compiled
@pytest.mark.parametrize(
    ("batch", "size", "density", "bias"),
    pairwise(
        [(1,), (16,), (63,), (64,), (2, 65), (3, 5, 17)],
        [(1, 1), (5, 95), (7, 96), (64, 97), (33, 500)],
        [0.0, 0.1, 0.5, 1.0],
        [True, False],
    ),
    ids=str,
)
def test_products_equal_dense_ones(batch: tuple[int, ...], size: tuple[int, int], density: float, bias: bool) -> None:
    weight, inputs = sparse(*size, density), torch.randn(*batch, size[1])
    offsets = torch.randn(size[0]) if bias else None
    wanted = linear(inputs.double(), weight.double(), None if offsets is None else offsets.double())
    result = SparseMatmul(weight)(inputs, offsets)
    assert result.dtype == torch.float32
    assert result.is_contiguous()
    torch.testing.assert_close(result.double(), wanted, rtol=1e-5, atol=2e-6 * size[1] ** 0.5)


@compiled
def test_a_token_does_not_depend_on_others_or_threads() -> None:
    product, inputs = SparseMatmul(sparse(40, 130, 0.4)), torch.randn(300, 130)
    whole, threads = product(inputs), torch.get_num_threads()
    assert torch.equal(torch.cat([product(part) for part in inputs.split(37)]), whole)
    assert torch.equal(product(inputs.T.contiguous().T), whole)  # another layout in memory
    try:
        torch.set_num_threads(3)
        assert torch.equal(product(inputs), whole)
    finally:
        torch.set_num_threads(threads)


@compiled
def test_infinities_reach_the_outputs_of_kept_weights_only() -> None:
    inputs = torch.tensor([[float("inf"), 1.0], [1.0, float("nan")]])
    assert SparseMatmul(torch.tensor([[2.0, 0.0]]))(inputs).tolist() == [[float("inf")], [2.0]]


@compiled
def test_only_large_sparse_float32_weights_are_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_matmul, "max_density", lambda _: 0.5)
    weight = sparse(512, 512, 0.3)
    assert skips_zeros(weight)
    assert isinstance(matmul_of(weight), SparseMatmul)
    for other in (weight[:511], weight.bfloat16(), sparse(512, 512, 0.6), weight.to("meta")):
        assert not skips_zeros(other)
    dense = torch.randn(4, 3)
    inputs = torch.randn(2, 3)
    assert torch.equal(matmul_of(dense)(inputs, dense[:, 0]), linear(inputs, dense, dense[:, 0]))


@compiled
@pytest.mark.parametrize("density", [0.1, 0.9])
def test_products_in_bfloat16_round_inputs_and_results(density: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the kernel for the sparser weight, else by a dense product."""
    monkeypatch.setattr(sparse_matmul, "max_density", lambda _: 0.5)
    weight, inputs, bias = sparse(512, 512, density), torch.randn(70, 512).bfloat16(), torch.randn(512)
    assert skips_zeros(weight, torch.bfloat16) == (density == 0.1)
    result = matmul_of(weight, torch.bfloat16)(inputs, bias)
    assert result.dtype == torch.bfloat16
    assert allclose_bf16(result.float(), linear(inputs.float(), weight, bias))


def test_without_the_library_products_are_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_matmul, "load_library", lambda: None)
    assert not skips_zeros(sparse(512, 512, 0.3))
