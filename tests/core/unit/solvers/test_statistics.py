"""Streaming moments against the same sums taken at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparsellm.runtime import collectives
from sparsellm.solvers.statistics import CrossMoment, Gram, InputRMS, TokenCount

TOKENS, FEATURES, OUTPUTS = 600, 24, 10

SPLITS = [[TOKENS], [300, 300], [1, 599], [7, 93, 250, 250], [0, 100, 0, 500], [1] * TOKENS]


def inputs(dtype: torch.dtype = torch.float32) -> Tensor:
    """(tokens, in): correlated inputs of very different sizes, with a mean and one dead input."""
    generator = torch.Generator().manual_seed(0)
    mix = torch.randn(FEATURES, FEATURES, generator=generator, dtype=torch.float64) / FEATURES**0.5
    x = torch.randn(TOKENS, FEATURES, generator=generator, dtype=torch.float64) @ mix + 0.5
    x = x * torch.logspace(-2, 2, FEATURES, dtype=torch.float64)
    x[:, 5] = 0
    return x.to(dtype)


def targets(dtype: torch.dtype = torch.float32) -> Tensor:
    """(tokens, out)."""
    return torch.randn(TOKENS, OUTPUTS, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def close(got: Tensor, wanted: Tensor, rounding: float) -> bool:
    """Whether Grams agree, each entry relative to the sizes of its two inputs; dead inputs exactly."""
    root = wanted.diagonal().sqrt()
    return bool(((got.double() - wanted).abs() <= rounding * root.outer(root)).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_settled_moments_are_the_same(dtype: torch.dtype) -> None:
    """The same bits from half the memory; each reader still gets its own."""
    gram = Gram(FEATURES, dtype=dtype)
    gram.update(inputs())
    before = gram.matrix, gram.rms, gram.mean
    for _ in range(2):
        gram.finalize()
        gram.matrix.zero_()
        assert all(torch.equal(one, other) for one, other in zip(before, (gram.matrix, gram.rms, gram.mean), strict=True))
        assert gram.tokens == TOKENS
    assert len(gram._sums) == 1


@pytest.mark.parametrize("split", SPLITS, ids=lambda split: f"{len(split)}-batches")
def test_any_split_gives_the_direct_moments(split: list[int]) -> None:
    """Tokens, norms, Gram and cross products do not depend on the batches, but for float32 rounding."""
    x, y = inputs(), targets()
    gram, cross = Gram(FEATURES), CrossMoment(OUTPUTS, FEATURES)
    for batch, signal in zip(x.split(split), y.split(split), strict=True):
        gram.update(batch)
        cross.update(signal, batch)
    exact = x.double()
    assert gram.tokens == TOKENS
    assert close(gram.matrix, exact.T @ exact / TOKENS, 2e-6)
    torch.testing.assert_close(gram.rms.double(), exact.square().mean(0).sqrt(), rtol=1e-5, atol=0)
    wanted = y.double().T @ exact / TOKENS
    spread = y.double().square().mean(0).sqrt().outer(exact.square().mean(0).sqrt())
    assert bool(((cross.matrix.double() - wanted).abs() <= 2e-6 * spread).all())


def test_float64_is_a_reference() -> None:
    """Sums in float64 agree with direct ones to float64 rounding, and float32 sums to float32 rounding."""
    x = inputs(torch.float64)
    single, double = Gram(FEATURES), Gram(FEATURES, dtype=torch.float64)
    for batch in x.split(37):
        single.update(batch)
        double.update(batch)
    direct = x.T @ x / TOKENS
    assert double.matrix.dtype == torch.float64
    assert single.matrix.dtype == torch.float32
    torch.testing.assert_close(double.matrix, direct, rtol=1e-11, atol=1e-11)
    root = direct.diagonal().sqrt()
    error = (single.matrix.double() - direct).abs() / root.outer(root).clamp(min=1e-300)
    assert 0 < float(error.nan_to_num().max()) < 2e-6
    assert not torch.equal(single.matrix.double(), double.matrix)


def test_batches_of_any_shape_flatten() -> None:
    """(batch, seq, in), (seq, in) and a single (in,) all count their tokens and give the same sums."""
    x = inputs().view(10, 60, FEATURES)
    whole, rows, single = Gram(FEATURES), Gram(FEATURES), Gram(FEATURES)
    whole.update(x)
    rows.update(x.flatten(0, 1))
    assert torch.equal(whole.matrix, rows.matrix)
    assert whole.tokens == TOKENS
    single.update(x[0, 0])
    assert single.tokens == 1
    torch.testing.assert_close(single.matrix, x[0, 0].outer(x[0, 0]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_coarse_inputs_are_summed_in_float32(dtype: torch.dtype) -> None:
    """Inputs in 16 bits are widened before they are multiplied: only their own rounding remains."""
    x = (inputs() / 30).to(dtype)
    gram = Gram(FEATURES)
    gram.update(x)
    exact = x.double()
    assert gram.matrix.dtype == gram.rms.dtype == torch.float32
    assert close(gram.matrix, exact.T @ exact / TOKENS, 2e-6)
    torch.testing.assert_close(gram.rms.double(), exact.square().mean(0).sqrt(), rtol=1e-5, atol=0)


def test_sums_do_not_depend_on_the_windows_of_a_batch() -> None:
    """Multiplied and summed window by window, they are the same to the bit; batch by batch they are not."""

    def found(windows: int, unit: int | None) -> list[Tensor]:
        norms, gram, cross = InputRMS(96, unit=unit), Gram(96, unit=unit), CrossMoment(96, 96, unit=unit)
        for batch in tokens.split(64 * windows):
            norms.update(batch)
            gram.update(batch)
            cross.update(batch, batch)
        return [norms.rms, gram.matrix, gram.mean, cross.matrix]

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(12 * 64, 96, generator=generator) * torch.rand(96, generator=generator) + 0.3
    for windows in (3, 4, 5, 12):
        assert all(map(torch.equal, found(1, 64), found(windows, 64)))
    assert not torch.equal(found(1, None)[1], found(12, None)[1])


def test_each_class_knows_what_the_one_before_knows() -> None:
    """TokenCount < InputRMS < Gram, and the RMS is the root of the Gram's diagonal."""
    assert issubclass(Gram, InputRMS)
    assert issubclass(InputRMS, TokenCount)
    assert TokenCount.rank < InputRMS.rank < Gram.rank
    every = [kind(FEATURES) for kind in (TokenCount, InputRMS, Gram)]
    for moments in every:
        moments.update(inputs())
    assert [moments.tokens for moments in every] == [TOKENS] * 3
    norms, gram = every[1], every[2]
    assert isinstance(norms, InputRMS)
    assert isinstance(gram, Gram)
    assert torch.allclose(norms.rms, gram.rms, rtol=1e-5, atol=0)
    torch.testing.assert_close(gram.matrix.diagonal().sqrt(), gram.rms, rtol=1e-5, atol=0)
    assert float(gram.rms[5]) == 0
    assert not bool(gram.matrix[5].any())
    assert not bool(gram.matrix[:, 5].any())


def test_before_any_token() -> None:
    """Nothing seen is zero, not NaN."""
    gram, cross = Gram(3), CrossMoment(2, 3)
    assert gram.tokens == 0
    assert torch.equal(gram.matrix, torch.zeros(3, 3))
    assert torch.equal(gram.rms, torch.zeros(3))
    assert torch.equal(cross.matrix, torch.zeros(2, 3))


def test_what_is_handed_out_is_fresh() -> None:
    """Writing into a matrix or norms that were handed out changes nothing inside; updates leave the inputs alone."""
    x, y = inputs(), targets()
    gram, cross = Gram(FEATURES), CrossMoment(OUTPUTS, FEATURES)
    gram.update(x)
    cross.update(y, x)
    assert torch.equal(x, inputs())
    assert torch.equal(y, targets())
    matrix, norms, products = gram.matrix, gram.rms, cross.matrix
    for handed_out in (gram.matrix, gram.rms, cross.matrix):
        handed_out.fill_(7)
    assert torch.equal(gram.matrix, matrix)
    assert torch.equal(gram.rms, norms)
    assert torch.equal(cross.matrix, products)


def test_alone_reduce_changes_nothing() -> None:
    """Without a process group the sum over processes is the identity."""
    gram, cross = Gram(FEATURES), CrossMoment(OUTPUTS, FEATURES)
    gram.update(inputs())
    cross.update(targets(), inputs())
    before = gram.tokens, gram.matrix, gram.rms, cross.matrix
    gram.reduce()
    cross.reduce()
    assert gram.tokens == before[0]
    assert torch.equal(gram.matrix, before[1])
    assert torch.equal(gram.rms, before[2])
    assert torch.equal(cross.matrix, before[3])


def test_symmetric() -> None:
    """The Gram is symmetric, as Cholesky expects it, to the last bits."""
    gram = Gram(FEATURES)
    for batch in inputs().split(50):
        gram.update(batch)
    root = gram.matrix.diagonal().sqrt()
    difference = (gram.matrix - gram.matrix.T).abs() / root.outer(root).clamp(min=1e-30)
    assert float(difference.max()) < 1e-6


@pytest.mark.parametrize("features", [1, 127, 128, 129, 300])
def test_panels(features: int) -> None:
    """However many panels the product takes: symmetric to the bit, and within float32 rounding of one product in float64."""
    x = torch.randn(1000, features, generator=torch.Generator().manual_seed(0)) + 0.5
    gram = Gram(features)
    for some in x.split(300):
        gram.update(some)
    found, wanted = gram.matrix, x.double().T @ x.double() / 1000
    assert torch.equal(found, found.T)
    assert float((found - wanted).abs().max()) <= 1e-6 * float(wanted.max())
    assert torch.allclose(gram.centered().matrix.double(), torch.cov(x.double().T, correction=0), atol=1e-5)


class Done:
    """An exchange that is over."""

    def wait(self) -> None:
        """At once."""


def doubled(tensor: Tensor, async_op: bool) -> Done:
    """As if another process had the same."""
    tensor.mul_(2)
    return Done()


def test_moments_of_two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens and sums of both count: another process that saw the same doubles the sums and leaves the means."""
    x, y = inputs(), targets()
    gram, cross, norms = Gram(FEATURES), CrossMoment(OUTPUTS, FEATURES), InputRMS(FEATURES)
    gram.update(x)
    cross.update(y, x)
    norms.update(x)
    alone = gram.matrix, cross.matrix, norms.rms
    monkeypatch.setattr(collectives, "world", lambda: 2)
    monkeypatch.setattr(torch.distributed, "all_reduce", doubled)
    for some in (gram, cross, norms):
        some.reduce()
    assert gram.tokens == norms.tokens == 2 * TOKENS
    assert all(torch.equal(a, b) for a, b in zip(alone, (gram.matrix, cross.matrix, norms.rms), strict=True))
