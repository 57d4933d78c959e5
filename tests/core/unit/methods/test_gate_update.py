"""The gate's minimizer against a dense grid search."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparsellm.methods.gate_update import CACHED_ENTRIES, solve_gate
from sparsellm.models.feedforward import ACTIVATION_FUNCTIONS, SILU, ActivationFunction
from tests.conftest import long_unless

RATIOS = [0.01, 0.1, 1.0, 5.0, 10.0, 100.0]
SCALES = [0.1, 1.0, 3.0, 10.0]
CURVES = {id(curve): curve for curve in ACTIVATION_FUNCTIONS.values()}.values()
SLACK = 1e-4
"""How far above the grid's best cost the minimizer may lie, relative to 1 + cost."""


def cost(s: Tensor, m: Tensor, z: Tensor, p: Tensor, ratio: float, curve: ActivationFunction = SILU) -> Tensor:
    """The objective in float64, entry by entry."""
    s, m, z, p = (signal.double() for signal in (s, m, z, p))
    return (s - m).square() + ratio * (p - curve.value(s) * z).square()


def grid_best(m: Tensor, z: Tensor, p: Tensor, ratio: float, rounds: int = 2, curve: ActivationFunction = SILU) -> Tensor:
    """The best gate that a search finds, for flat arguments, in float64.

    A grid over [-30, 30] and a finer one around m, with m itself and the best linear answer, since beyond the first grid
    the curve is 0 or s; then `rounds` times twenty times finer around the five best places.
    """
    m, z, p = (signal.double()[:, None] for signal in (m, z, p))
    span = torch.linspace(-30, 30, 401, dtype=torch.float64)
    places = torch.cat([span.expand(len(m), -1), m + span / 3, m, (m + ratio * z * p) / (1 + ratio * z.square())], dim=1)
    width = float(span[1] - span[0])
    for _ in range(rounds + 1):
        best = places.gather(1, cost(places, m, z, p, ratio, curve).topk(5, dim=1, largest=False).indices)
        fine = torch.linspace(-width, width, 41, dtype=torch.float64)
        places = torch.cat([best, (best[:, :, None] + fine).flatten(1)], dim=1)
        width /= 20
    return places.gather(1, cost(places, m, z, p, ratio, curve).argmin(1, keepdim=True))[:, 0]


def draws(count: int, scales: tuple[float, float, float], seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """m, z and p: normal draws of the given sizes."""
    generator = torch.Generator().manual_seed(seed)
    return [(scale * torch.randn(count, generator=generator, dtype=torch.float64)).to(dtype) for scale in scales]


def assert_minimal(s: Tensor, m: Tensor, z: Tensor, p: Tensor, ratio: float, curve: ActivationFunction = SILU) -> None:
    """s is finite, of m's shape and dtype, and costs at most the grid's best and SLACK."""
    assert s.shape == m.shape
    assert s.dtype == m.dtype
    assert bool(s.isfinite().all())
    s, m, z, p = (signal.flatten() for signal in (s, m, z, p))
    found, wanted = cost(s, m, z, p, ratio, curve), cost(grid_best(m, z, p, ratio, curve=curve), m, z, p, ratio, curve)
    excess = found - wanted - SLACK * (1 + wanted)
    worst = int(excess.argmax())
    assert float(excess[worst]) <= 0, (
        f"m={float(m[worst])} z={float(z[worst])} p={float(p[worst])} ratio={ratio}: "
        f"s={float(s[worst])} costs {float(found[worst])}, the grid finds {float(wanted[worst])}"
    )


@pytest.mark.parametrize(
    ("curve", "ratio"),
    [
        long_unless((place + number) % 2 == 0, curve, ratio)
        for place, curve in enumerate(CURVES)
        for number, ratio in enumerate((0.1, 1.0, 10.0, 100.0))
    ],
)
def test_every_curve_against_a_grid(curve: ActivationFunction, ratio: float) -> None:
    """Gated at every size, plain (z = 1), and where both sides of the lowest place compete."""
    sizes = [draws(150, (2 * size, size, size * size), dtype=torch.float32) for size in SCALES]
    m, z, p = (torch.cat(signals) for signals in zip(*sizes, strict=True))
    m, z, p = m.repeat(2), torch.cat([z, torch.ones_like(z)]), p.repeat(2)
    assert_minimal(solve_gate(m, z, p, ratio=ratio, curve=curve), m, z, p, ratio, curve)
    m, z, share = torch.meshgrid(
        torch.linspace(-8, 1, 10, dtype=torch.float64),
        torch.tensor([-10.0, -1.0, 0.3, 1.0, 4.0], dtype=torch.float64),
        torch.tensor([1.2, 1.0, 0.97, 0.7, 0.3, 0.03, 1e-3, -0.2, -5.0], dtype=torch.float64),
        indexing="ij",
    )
    p = share * curve.floor * z
    assert_minimal(solve_gate(m, z, p, ratio=ratio, curve=curve), m, z, p, ratio, curve)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ratio", RATIOS)
def test_against_a_grid(ratio: float, dtype: torch.dtype) -> None:
    """Over all sizes of m, z and p: as good as the grid."""
    every = [draws(12, (a, b, c), seed=17, dtype=dtype) for a in SCALES for b in SCALES for c in SCALES]
    m, z, p = (torch.cat(signals) for signals in zip(*every, strict=True))
    assert_minimal(solve_gate(m, z, p, ratio=ratio), m, z, p, ratio)


@pytest.mark.parametrize("ratio", [0.1, 5.0, 100.0])
def test_around_the_two_valleys(ratio: float) -> None:
    """The hard entries: m left of silu's minimum, p / z within its range or just below, so that both sides compete."""
    m, z, fraction = torch.meshgrid(
        torch.linspace(-12, 1, 14, dtype=torch.float64),
        torch.tensor([-10.0, -1.0, 0.3, 1.0, 4.0, 10.0], dtype=torch.float64),
        torch.tensor([-0.35, -0.2784, -0.27, -0.2, -0.1, -0.01, -1e-4, 0.05, 0.5, 3.0], dtype=torch.float64),
        indexing="ij",
    )
    p = fraction * z
    for dtype in (torch.float32, torch.float64):
        signals = m.to(dtype), z.to(dtype), p.to(dtype)
        assert_minimal(solve_gate(*signals, ratio=ratio), *signals, ratio)


def test_flat_valleys_are_followed_to_the_bottom() -> None:
    """Entries found by a search, where Newton steps creep along a flat, crooked valley: they end at its bottom too.

    Handed the bottom as the present gate, the result is no worse than it.
    """
    for m, z, p, ratio in (
        (-1.2652462790227175, -1.62101181963879, 0.21500965709448838, 10.441475868225098),
        (-1.2677500379395346, -0.5916852832237995, 0.07204792646734655, 72.67037963867188),
        (-1.249478745018881, -1.3919317685266925, 0.13360124775498294, 10.711005210876465),
    ):
        signals = [torch.tensor([value], dtype=torch.float64) for value in (m, z, p)]
        bottom = grid_best(*signals, ratio, rounds=5)
        s = solve_gate(*signals, ratio=ratio, present=bottom)
        assert float(cost(s, *signals, ratio)) <= float(cost(bottom, *signals, ratio)) * (1 + 1e-12)
        assert_minimal(solve_gate(*signals, ratio=ratio), *signals, ratio)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ratio", RATIOS)
def test_minimizer_where_arguments_are_zero(ratio: float, dtype: torch.dtype) -> None:
    """With z = 0 the answer is m; with p = 0, or everything 0, it is still the minimizer."""
    m, z, p = draws(300, (5, 5, 5), dtype=dtype)
    zero = torch.zeros_like(m)
    assert torch.equal(solve_gate(m, zero, p, ratio=ratio), m)
    assert torch.equal(solve_gate(m, zero, zero, ratio=ratio), m)
    assert torch.equal(solve_gate(zero, zero, zero, ratio=ratio), zero)
    assert_minimal(solve_gate(m, z, zero, ratio=ratio), m, z, zero, ratio)
    assert_minimal(solve_gate(zero, z, p, ratio=ratio), zero, z, p, ratio)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("ratio", [0.01, 1.0, 100.0])
def test_huge_and_tiny_values(ratio: float, dtype: torch.dtype) -> None:
    """Sizes from 1e-6 to 1e4 in every mixture give no NaN, and nothing worse than m, `present` or the grid."""
    sizes = torch.tensor([-1e4, -100, -1, -1e-6, 0, 1e-6, 1, 100, 1e4], dtype=dtype)
    m, z, p = (signal.contiguous() for signal in torch.meshgrid(sizes, sizes, sizes, indexing="ij"))
    s = solve_gate(m, z, p, ratio=ratio)
    assert_minimal(s, m, z, p, ratio)
    for other in (m, torch.full_like(m, -2), torch.full_like(m, 1.5)):
        s = solve_gate(m, z, p, ratio=ratio, present=other)
        assert bool(s.isfinite().all())
        there = cost(other, m, z, p, ratio)
        assert bool((cost(s, m, z, p, ratio) <= there * (1 + 1e-5) + 1e-12).all())


@pytest.mark.parametrize(
    ("scale", "ratio"),
    [
        long_unless((place + number) % 2 == 0, scale, ratio)
        for place, scale in enumerate(SCALES)
        for number, ratio in enumerate(RATIOS)
    ],
)
def test_never_worse_than_present(scale: float, ratio: float) -> None:
    """In float64, whatever the present gate, the result costs no more; starting from the result changes nothing."""
    m, z, p = draws(300, (scale, scale, scale), seed=3)
    p[:100] = -0.2 * z[:100]  # where valleys compete
    for present in (*draws(300, (scale, 3 * scale, 0.1), seed=4), m, grid_best(m, z, p, ratio, rounds=5)):
        s = solve_gate(m, z, p, ratio=ratio, present=present)
        assert bool((cost(s, m, z, p, ratio) <= cost(present, m, z, p, ratio) * (1 + 1e-12)).all())
        again = solve_gate(m, z, p, ratio=ratio, present=s)
        assert bool((cost(again, m, z, p, ratio) <= cost(s, m, z, p, ratio) * (1 + 1e-12)).all())


def test_gradient_vanishes_at_the_minimizer() -> None:
    """Where the answer is found in float64 the gradient vanishes, compared with the curvature's scale."""
    for ratio in (0.1, 1.0, 10.0):
        m, z, p = draws(2000, (2, 1, 1), seed=5)
        s = solve_gate(m, z, p, ratio=ratio).requires_grad_()
        (gradient,) = torch.autograd.grad(cost(s, m, z, p, ratio).sum(), s)
        assert float((gradient.abs() / (1 + ratio * z.square())).max()) < 1e-4


@pytest.mark.parametrize("ratio", RATIOS)
def test_float32_is_as_good_as_float64(ratio: float) -> None:
    """Both dtypes reach the same cost to rounding, on arguments that both hold exactly."""
    m, z, p = draws(3000, (3, 2, 2), seed=6, dtype=torch.float32)
    single = cost(solve_gate(m, z, p, ratio=ratio), m, z, p, ratio)
    double = cost(solve_gate(m.double(), z.double(), p.double(), ratio=ratio), m, z, p, ratio)
    assert bool(((single - double).abs() <= 1e-4 * (1 + double)).all())


@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 3, 4), (0,), (0, 7)])
def test_shapes_are_kept(shape: tuple[int, ...]) -> None:
    """Any shape comes back, empty ones and views that are not contiguous too; the arguments are not written to."""
    m, z, p = (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
    copies = [signal.clone() for signal in (m, z, p)]
    s = solve_gate(m, z, p, ratio=1.0, present=z)
    assert s.shape == shape
    for signal, copy in zip((m, z, p), copies, strict=True):
        assert torch.equal(signal, copy)
    turned = solve_gate(m.mT, z.mT, p.mT, ratio=1.0, present=z.mT) if m.dim() > 1 else s
    assert torch.allclose(turned.mT if m.dim() > 1 else turned, s, rtol=1e-6, atol=1e-6)


def test_chunks_do_not_matter() -> None:
    """Entries are solved one by one: more than a chunk of them equal the same entries in pieces."""
    m, z, p = draws(CACHED_ENTRIES + 1000, (2, 1, 1), seed=7, dtype=torch.float32)
    whole = solve_gate(m, z, p, ratio=1.0)
    tail = solve_gate(m[CACHED_ENTRIES - 500 :], z[CACHED_ENTRIES - 500 :], p[CACHED_ENTRIES - 500 :], ratio=1.0)
    assert torch.allclose(whole[CACHED_ENTRIES - 500 :], tail, rtol=1e-5, atol=1e-5)


number = st.floats(-20, 20, allow_nan=False, width=32)


@settings(deadline=None, derandomize=True, max_examples=20, database=None)
@given(
    entries=st.lists(st.tuples(number, number, number), min_size=1, max_size=40),
    ratio=st.sampled_from(RATIOS),
    double=st.booleans(),
)
def test_any_entries_reach_the_grid(entries: list[tuple[float, float, float]], ratio: float, double: bool) -> None:
    """Whatever hypothesis thinks of: as good as the grid."""
    m, z, p = torch.tensor(entries, dtype=torch.float64 if double else torch.float32).unbind(1)
    assert_minimal(solve_gate(m, z, p, ratio=ratio), m, z, p, ratio)
