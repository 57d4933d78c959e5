"""The kernel for products of bfloat16 tokens against products in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparsellm.runtime import bf16_gram
from sparsellm.solvers.statistics import CrossMoment, Gram
from tests.guard_pages import before_guard_page
from tests.pairwise import pairwise

compiled = pytest.mark.skipif(
    bf16_gram.load_kernel() is None, reason="the kernel is not compiled (python hatch_build.py), or not for this processor"
)

ROUNDING = 128 * 2.0**-23
"""Bound of the error of a sum in float32 over 128 tokens, relative to the sum of the terms' sizes."""


def tokens(count: int, columns: int) -> Tensor:
    """(tokens, in) bfloat16 of very different sizes, with a mean."""
    generator = torch.Generator().manual_seed(count + columns)
    x = torch.randn(count, columns, generator=generator) + 0.5
    return (x * torch.logspace(-8, 8, columns)).bfloat16()


def computed(*parts: Tensor, unit: int | None = None) -> Tensor:
    """The upper triangle of x xᵀ summed by the kernel over batches, (in, in), from panels of 3, 40 and all other rows."""
    columns, first, panels = parts[0].shape[1], 0, []
    for height in (3, 40, columns):
        if first < columns:
            panels.append((first, torch.zeros(min(height, columns - first), columns - first, dtype=torch.float64)))
            first += height
    for x in parts:
        bf16_gram.add_gram(x, panels, unit)
    return torch.cat([torch.nn.functional.pad(sums, (start, 0)) for start, sums in panels])


@compiled
@pytest.mark.parametrize(
    ("count", "columns", "unit"),
    pairwise([0, 1, 2, 127, 128, 129, 300], [1, 15, 47, 48, 49, 97, 200], [None, 1, 7, 64, 129]),
)
def test_sums_equal_those_in_float64(count: int, columns: int, unit: int | None) -> None:
    x = tokens(count, columns)
    wide = x.double()
    error = (computed(x, unit=unit) - (wide.T @ wide).triu()).abs()
    assert bool((error <= ROUNDING * (wide.T.abs() @ wide.abs())).all())


@compiled
def test_sums_are_rounded_as_little_as_those_of_torch() -> None:
    """The bound is for the worst case. For random inputs the error has the size of that of products in float32."""
    x = torch.randn(2000, 300, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = (x.double().T @ x.double()).triu()
    error = (computed(x, unit=500) - exact).norm()
    torch_error = (sum((part.float().T @ part.float()).double() for part in x.split(500)).triu() - exact).norm()
    assert 0 < error <= 1.5 * torch_error


@compiled
def test_sums_are_the_same_bits_for_any_threads_layout_and_batch() -> None:
    x, threads = tokens(5001, 150), torch.get_num_threads()
    whole = computed(x, unit=33)
    strided = torch.empty(5001, 301, dtype=torch.bfloat16)[:, 1::2].copy_(x)
    assert torch.equal(computed(strided, unit=33), whole)
    assert torch.equal(computed(x.T.contiguous().T, unit=33), whole)
    assert torch.equal(computed(*x.split(33 * 40), unit=33), whole)
    try:
        for number in (2, 3, 7):
            torch.set_num_threads(number)
            assert torch.equal(computed(x, unit=33), whole)
    finally:
        torch.set_num_threads(threads)


@compiled
@pytest.mark.parametrize(
    ("count", "columns", "outputs", "unit"), pairwise([0, 1, 129, 300], [1, 48, 130], [1, 47, 49, 200], [None, 1, 7, 129])
)
def test_products_of_two_factors_equal_those_in_float64(count: int, columns: int, outputs: int, unit: int | None) -> None:
    y, x = tokens(count, outputs) + 1, tokens(count, columns)
    sums = torch.ones(outputs, columns, dtype=torch.float64)
    bf16_gram.add_products(y, x, sums, unit)
    error = (sums - 1 - y.double().T @ x.double()).abs()
    assert bool((error <= ROUNDING * (1 + y.double().T.abs() @ x.double().abs())).all())


@compiled
def test_products_of_two_factors_are_the_same_bits_for_any_threads_and_batch() -> None:
    y, x, threads = tokens(5001, 70), tokens(5001, 150), torch.get_num_threads()

    def computed(batch: int) -> Tensor:
        sums = torch.zeros(70, 150, dtype=torch.float64)
        for left, right in zip(y.split(batch), x.split(batch), strict=True):
            bf16_gram.add_products(left, right, sums, 33)
        return sums

    whole = computed(5001)
    assert torch.equal(computed(33 * 40), whole)
    try:
        for number in (2, 3, 7):
            torch.set_num_threads(number)
            assert torch.equal(computed(5001), whole)
    finally:
        torch.set_num_threads(threads)


@compiled
@pytest.mark.parametrize("unit", [None, 50])
def test_cross_moments_equal_those_of_float32_copies(unit: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    y, x = tokens(512, 60) / 1000, tokens(512, 130) / 1000
    moments = [CrossMoment(60, 130, unit=unit) for _ in range(3)]
    moments[0].update(y, x)
    moments[1].update(y.float(), x)
    monkeypatch.setattr(bf16_gram, "load_kernel", lambda: None)
    moments[2].update(y, x)
    by_kernel, by_torch, without = (moment.matrix for moment in moments)
    scale = (y.float().square().mean(0).outer(x.float().square().mean(0))).sqrt()
    assert 0 < float(((by_kernel - by_torch).abs() / scale).max()) < 2 * ROUNDING
    assert torch.equal(without, by_torch)


@compiled
def test_nothing_is_written_below_the_diagonal() -> None:
    sums = torch.full((100, 100), 7.0, dtype=torch.float64)
    bf16_gram.add_gram(tokens(50, 100), [(0, sums)], None)
    assert bool((sums.tril(-1) == torch.full_like(sums, 7).tril(-1)).all())
    assert bool((sums.diagonal() > 7).all())


@compiled
def test_values_that_are_not_finite_reach_their_products_only() -> None:
    x = tokens(65, 60)
    x[3, 5], x[64, 50], x[10, 59] = float("nan"), float("inf"), -float("inf")
    x[20, 59], x[64, 1] = 0, 0  # inf times zero
    wide = x.double()
    wanted = (wide.T @ wide).triu()
    result = computed(x)
    assert torch.equal(result.isnan(), wanted.isnan())
    assert torch.equal(result.isposinf(), wanted.isposinf())
    assert torch.equal(result.isneginf(), wanted.isneginf())
    assert bool(result[:5, :5].isfinite().all())


@compiled
@pytest.mark.parametrize(("count", "columns", "unit"), pairwise([1, 6, 131], [1, 33, 48, 95, 143], [5, 200]))
def test_nothing_behind_the_buffers_is_used(count: int, columns: int, unit: int) -> None:
    library = bf16_gram.load_kernel()
    x, blocks = before_guard_page(tokens(count, columns)), -(-columns // 48)
    pairs = count // unit * -(-unit // 2) + -(-(count % unit) // 2)
    packed = before_guard_page(torch.empty(blocks * 48 * pairs, dtype=torch.int32))
    sums = before_guard_page(torch.zeros(columns, columns, dtype=torch.float64))
    rows = before_guard_page(sums.data_ptr() + torch.arange(columns) * 8 * columns)
    library.sparsellm_bf16_pack(x.data_ptr(), count, columns, unit, 0, 1, packed.data_ptr())
    library.sparsellm_bf16_add_products(
        packed.data_ptr(), columns, packed.data_ptr(), columns, count, unit, 0, 1, rows.data_ptr()
    )
    assert torch.equal(sums, computed(x, unit=unit))


@compiled
@pytest.mark.parametrize("unit", [None, 50])
def test_statistics_equal_those_of_float32_copies(unit: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    x = tokens(512, 130) / 1000
    by_kernel, by_torch = Gram(130, unit=unit), Gram(130, unit=unit)
    for batch in x.view(4, 128, 130):
        by_kernel.update(batch)
        by_torch.update(batch.float())
    scale = by_torch.rms.outer(by_torch.rms)
    assert 0 < float(((by_kernel.matrix - by_torch.matrix).abs() / scale).max()) < 2 * ROUNDING
    assert torch.equal(by_kernel.matrix, by_kernel.matrix.T)
    torch.testing.assert_close(by_kernel.rms, by_torch.rms)
    torch.testing.assert_close(by_kernel.mean, by_torch.mean)
    torch.testing.assert_close(
        by_kernel.centered().matrix / scale, by_torch.centered().matrix / scale, rtol=0, atol=2 * ROUNDING
    )
    monkeypatch.setattr(bf16_gram, "load_kernel", lambda: None)
    without = Gram(130, unit=unit)
    for batch in x.view(4, 128, 130):
        without.update(batch)
    assert torch.equal(without.matrix, by_torch.matrix)


def test_only_bfloat16_on_the_cpu_is_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    x = tokens(2, 3)
    assert bf16_gram.supports(x) == (bf16_gram.load_kernel() is not None)
    for other in (x.float(), x.half(), x.to("meta")):
        assert not bf16_gram.supports(other)
        assert not bf16_gram.supports(x, other)
    monkeypatch.setattr(bf16_gram, "load_kernel", lambda: None)
    assert not bf16_gram.supports(x)
