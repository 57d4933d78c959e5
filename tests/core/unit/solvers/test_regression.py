"""Regressions from sums over tokens, against least squares on the tokens themselves."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sparsellm.errors import SingularGram
from sparsellm.solvers.alps import ALPS
from sparsellm.solvers.patterns import Unstructured
from sparsellm.solvers.regression import (
    FLOOR,
    MIN_RIDGE,
    LinearTargetRegression,
    PairedStatistics,
    Regression,
    TargetRegression,
    ridge_change,
)
from sparsellm.solvers.statistics import Gram
from tests.pairwise import pairwise
from tests.regressions import estimated_ridge, least_squares

TOKENS, FEATURES, OUTPUTS = 400, 16, 6
CONSTANT_INPUTS = [3, 11]

SPLITS = [[TOKENS], [1, 399], [0, 100, 0, 300], [1] * TOKENS, [150, 50, 200]]

every_form = pytest.mark.parametrize("affine", [True, False], ids=["affine", "linear"])
every_split = pytest.mark.parametrize("split", SPLITS, ids=lambda split: f"{len(split)}-batches")


def draw(*shape: int, seed: int) -> Tensor:
    """Standard normal draws in float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tokens(constant: bool = False) -> tuple[Tensor, Tensor]:
    """Inputs (tokens, in), correlated, of different sizes and means; targets (tokens, out), partly explained by them.

    constant: whether two inputs never change, at values whose sums of products are exact in float32.
    """
    x = draw(TOKENS, FEATURES, seed=0)
    x = (x + 0.6 * x.roll(1, 1)) * torch.logspace(-1, 1, FEATURES).double() + draw(FEATURES, seed=1)
    if constant:
        x[:, CONSTANT_INPUTS] = torch.tensor([2.5, 0.25]).double()
    y = torch.tanh(x @ draw(FEATURES, OUTPUTS, seed=2) / 4) + 0.3 * draw(TOKENS, OUTPUTS, seed=3) + draw(OUTPUTS, seed=4)
    return x.float(), y.float()


def summed(x: Tensor, y: Tensor, affine: bool, split: list[int] | None = None) -> Regression:
    """The regression of y on x, taken in batch by batch."""
    found = TargetRegression(Gram(x.shape[1]), y.shape[1], affine)
    for inputs, targets in zip(x.split(split or [len(x)]), y.split(split or [len(y)]), strict=True):
        found.inputs.update(inputs)
        found.update(targets, inputs)
    found.inputs.reduce()
    found.reduce()
    return found


def missed(x: Tensor, y: Tensor, weight: Tensor, affine: bool) -> tuple[float, Tensor]:
    """The mean of ‖y - W x - b‖² over the tokens in float64, and the best b there is (0 for none)."""
    residual = y.double() - x.double() @ weight.double().T
    bias = residual.mean(0) if affine else torch.zeros(len(weight)).double()
    return float((residual - bias).square().sum(1).mean()), bias


@every_form
@every_split
def test_errors_biases_and_power(split: list[int], affine: bool) -> None:
    """In any batches: E‖t - W x - b‖², the best bias and E‖t‖² are those of the tokens, for good weights and bad ones."""
    x, y = tokens()
    found = summed(x, y, affine, split)
    best = least_squares(x, y, torch.zeros(OUTPUTS, FEATURES), 0.0, affine).float()
    for weight in (best, best + 0.05 * draw(OUTPUTS, FEATURES, seed=5).float(), draw(OUTPUTS, FEATURES, seed=6).float()):
        wanted, bias = missed(x, y, weight, affine)
        assert found.error(weight) == pytest.approx(wanted, rel=2e-4)
        got = found.bias(weight)
        if affine:
            assert got is not None
            torch.testing.assert_close(got.double(), bias, rtol=1e-4, atol=1e-4)
        else:
            assert got is None
    nothing = torch.zeros(OUTPUTS, FEATURES)
    assert found.power == pytest.approx(missed(x, y, nothing, affine)[0], rel=1e-5)
    assert found.error(nothing) == pytest.approx(found.power)


@pytest.mark.parametrize(("noise", "count", "split", "affine"), pairwise([0, 1, 30], [24, TOKENS], SPLITS, [True, False]))
def test_targets_by_least_squares(noise: float, count: int, split: list[int], affine: bool) -> None:
    """The problem's target is the ridge regression on the tokens, pulled toward the prior; with a bias, about the means."""
    x, y = (signal[:count] for signal in tokens())
    y, prior = y + noise * draw(count, OUTPUTS, seed=25).float(), draw(OUTPUTS, FEATURES, seed=7).float()
    problem = summed(x, y, affine, split if count == TOKENS else None).problem(prior)
    ridge = estimated_ridge(x, y, prior, affine)
    wanted = least_squares(x, y, prior, ridge, affine)
    moved = float((wanted - prior.double()).norm())
    assert moved > 1e-3 * float(prior.norm())
    assert float((problem.weight.double() - wanted).norm()) < 2e-3 * moved
    seen = x.double() - x.double().mean(0) if affine else x.double()
    gram = seen.T @ seen / count
    torch.testing.assert_close(problem.inputs.matrix.double(), gram, rtol=1e-4, atol=1e-4)


@every_form
@pytest.mark.parametrize("count", [6, 24, TOKENS])
def test_a_gram_shrinks_as_in_scikit_learn(count: int, affine: bool) -> None:
    x, y = (signal[:count] for signal in tokens())
    covariance = pytest.importorskip("sklearn.covariance")
    wanted, shrinkage = covariance.oas(x.double().numpy(), assume_centered=not affine)
    problem = summed(x, y, affine).problem(torch.zeros(OUTPUTS, FEATURES))
    assert problem.shrinkage == pytest.approx(shrinkage, rel=1e-4)
    torch.testing.assert_close(problem.gram.double(), torch.from_numpy(wanted).double(), rtol=1e-3, atol=1e-3)


def test_a_constant_input_stays_dead_when_a_gram_shrinks() -> None:
    x, y = (signal[:24] for signal in tokens(constant=True))
    alive = [number for number in range(FEATURES) if number not in CONSTANT_INPUTS]
    problem, other = summed(x, y, True).problem(torch.zeros(OUTPUTS, FEATURES)), summed(x[:, alive], y, True)
    assert problem.shrinkage > 0.01
    assert not bool(problem.gram[CONSTANT_INPUTS].any())
    torch.testing.assert_close(problem.gram[alive][:, alive], other.problem(torch.zeros(OUTPUTS, len(alive))).gram)


@pytest.mark.parametrize("change", [0.0, 0.05, 0.5], ids=lambda size: f"changes of {size}")
@pytest.mark.parametrize("count", [20, 60, 200, 2000])
def test_the_ridge_is_nearly_the_best_one(count: int, change: float) -> None:
    """On other tokens, the mean excess over 20 draws is at most 1.1 times that of the best ridge of a grid for all of them."""
    features, outputs = 40, 30
    mixing = draw(features, features, seed=30) / features**0.5
    covariance = mixing @ mixing.T + 0.1 * torch.eye(features).double()
    root, grid = torch.linalg.cholesky(covariance), torch.logspace(-3, 4, 29).tolist()
    excesses = torch.zeros(len(grid) + 1).double()
    for number in range(20):
        prior = draw(outputs, features, seed=100 + number)
        truth = prior + change * draw(outputs, features, seed=200 + number)
        x = draw(count, features, seed=300 + number) @ root.T
        y = x @ truth.T + draw(count, outputs, seed=400 + number)
        fits = [least_squares(x, y, prior, ridge, False) for ridge in grid]
        fits.append(summed(x.float(), y.float(), False).problem(prior.float()).weight.double())
        excesses += torch.stack([((fit - truth) @ root).square().sum() for fit in fits])
    noise = 20 * outputs * min(1, features / count)  # about the excess without a ridge
    assert float(excesses[-1]) < 1.1 * float(excesses[:-1].min()) + 0.02 * noise


@every_form
def test_many_tokens_tell_changes_where_inputs_vary_little(affine: bool) -> None:
    """On other tokens nearly all of such a change is found, though the moments of residuals and inputs are mostly noise."""
    features, outputs, count = 40, 30, 8000
    shared = torch.ones(features, features).double() / features  # nearly all of the variance has one direction
    root = 6 * shared + 0.1 * torch.eye(features)
    prior = draw(outputs, features, seed=40)
    change = draw(outputs, features, seed=41)
    change -= change @ shared
    x = draw(count, features, seed=42) @ root
    y = x @ (prior + change).T + draw(count, outputs, seed=43)
    found = summed(x.float(), y.float(), affine).problem(prior.float()).weight.double() - prior
    missing = (found - change) @ root
    assert float(missing.square().sum()) < 0.1 * float((change @ root).square().sum())


def test_a_gram_that_is_not_positive_definite() -> None:
    """A larger ridge makes up for rounding; no ridge makes up for a value that is no number."""
    gram, residual = torch.ones(4, 4), torch.ones(3, 4)
    gram[0, 1] = gram[1, 0] = 1.2
    assert torch.linalg.eigvalsh(gram + FLOOR * torch.eye(4)).min() < 0
    change = ridge_change(residual, gram, 1.0, MIN_RIDGE, features=4, tokens=1000)
    assert bool(change.isfinite().all())
    assert bool(change.any())
    assert bool(ridge_change(residual * math.nan, gram, math.nan, MIN_RIDGE, features=4, tokens=1000).isnan().any())
    gram[2, 3] = gram[3, 2] = math.nan
    with pytest.raises(SingularGram):
        ridge_change(residual, gram, 1.0, MIN_RIDGE, features=4, tokens=1000)


@every_form
def test_the_problem_says_what_a_weight_costs_more(affine: bool) -> None:
    """E‖t - W x - b‖² of any weight is that of the best one plus the problem's energy between them, without shrinkage."""
    x, y = tokens()
    found = summed(x, y, affine)
    best = least_squares(x, y, torch.zeros(OUTPUTS, FEATURES), 0.0, affine).float()
    problem = replace(found.problem(best), weight=best, shrinkage=0.0)
    for seed in (8, 9):
        weight = problem.weight + 0.2 * draw(OUTPUTS, FEATURES, seed=seed).float()
        more = missed(x, y, weight, affine)[0] - missed(x, y, problem.weight, affine)[0]
        assert float(problem.energy(weight - problem.weight)) == pytest.approx(more, rel=1e-3)


def test_with_a_bias_shifts_change_nothing() -> None:
    """Inputs and targets moved by constants leave weight, error and power; the bias follows. Without one all change."""
    x, y = tokens()
    by, up = draw(FEATURES, seed=10).float(), draw(OUTPUTS, seed=11).float()
    prior = draw(OUTPUTS, FEATURES, seed=7).float()
    here, there = summed(x, y, True), summed(x + by, y + up, True)
    one, other = here.problem(prior).weight, there.problem(prior).weight
    torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)
    assert here.error(one) == pytest.approx(there.error(one), rel=1e-3)
    assert here.power == pytest.approx(there.power, rel=1e-4)
    biases = here.bias(one), there.bias(one)
    assert biases[0] is not None
    assert biases[1] is not None
    torch.testing.assert_close(biases[1], biases[0] + up - one @ by, rtol=1e-3, atol=1e-3)
    assert summed(x, y, False).error(one) > 1.05 * here.error(one)


@every_split
def test_centered(split: list[int]) -> None:
    """The centered Gram is the covariance, the norms are the standard deviations; the Gram that it came from stays."""
    x = tokens(constant=True)[0]
    gram = Gram(FEATURES)
    for batch in x.split(split):
        gram.update(batch)
    before, centered = gram.matrix, gram.centered()
    exact = x.double() - x.double().mean(0)
    spread = exact.square().mean(0).sqrt()
    raw = x.double().square().mean(0).sqrt()
    allowed = 5e-6 * raw.outer(raw)  # float32 sums of the raw products
    assert bool(((centered.matrix.double() - exact.T @ exact / TOKENS).abs() <= allowed).all())
    torch.testing.assert_close(centered.rms.double(), spread, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(gram.mean.double(), x.double().mean(0), rtol=1e-4, atol=1e-5)
    assert (centered.tokens, centered.features) == (TOKENS, FEATURES)
    centered.matrix.fill_(7)
    assert torch.equal(gram.matrix, before)
    assert float(centered.matrix.abs().max()) != 7


def test_constant_inputs_are_dead() -> None:
    """An input that never changes has exactly zero moments, however large it is; one that moves a little is alive."""
    x = tokens(constant=True)[0]
    x[:, 5] = 1024.0
    x[:, 6] = 1 + 0.01 * draw(TOKENS, seed=12).float()
    gram = Gram(FEATURES)
    gram.update(x)
    matrix = gram.centered().matrix
    dead = sorted([*CONSTANT_INPUTS, 5])
    assert (matrix.diagonal() == 0).nonzero().flatten().tolist() == dead
    assert not bool(matrix[dead].any())
    assert not bool(matrix[:, dead].any())
    assert float(matrix[6, 6]) == pytest.approx(1e-4, rel=0.15)


def test_constant_inputs_of_any_value_are_dead() -> None:
    """Values whose sums of products are rounded are dead too when they never change, over many tokens."""
    gram, values = Gram(64), 0.01 + 3 * torch.rand(64, generator=torch.Generator().manual_seed(0))
    for _ in range(16):
        gram.update(values.expand(4096, 64))
    assert not bool(gram.centered().matrix.any())


def test_the_bias_stands_in_for_constant_inputs() -> None:
    """With a bias the weights of constant inputs go first and cost nothing: the fitted bias says what they said."""
    x, y = tokens(constant=True)
    found = summed(x, y, True)
    full = found.problem(torch.randn(OUTPUTS, FEATURES, generator=torch.Generator().manual_seed(3)))
    share = len(CONSTANT_INPUTS) / FEATURES
    weight = ALPS().solve(full, Unstructured(share))
    assert not bool(weight[:, CONSTANT_INPUTS].any())
    assert bool(full.weight[:, CONSTANT_INPUTS].abs().min() > 0)
    assert found.error(weight) == pytest.approx(found.error(full.weight), rel=1e-4)
    for some in (weight, full.weight):
        wanted, bias = missed(x, y, some, True)
        assert found.error(some) == pytest.approx(wanted, rel=1e-3)
        got = found.bias(some)
        assert got is not None
        torch.testing.assert_close(got.double(), bias, rtol=1e-3, atol=1e-3)


@every_form
def test_curvature_comes_along(affine: bool) -> None:
    """What is said of the outputs' costs stands in the problem and does not move its target."""
    x, y = tokens()
    prior, found = torch.zeros(OUTPUTS, FEATURES), summed(x, y, affine)
    curvature = torch.eye(OUTPUTS)
    problem = found.problem(prior, curvature)
    assert problem.curvature is curvature
    assert torch.equal(problem.weight, found.problem(prior).weight)


@every_form
def test_layers_share_a_gram(affine: bool) -> None:
    """Two regressions on one Gram, which is updated once a batch, are each what they would be alone."""
    x, y = tokens()
    gram = Gram(FEATURES)
    both = [TargetRegression(gram, 4, affine), TargetRegression(gram, 2, affine)]
    for inputs, targets in zip(x.split(150), y.split(150), strict=True):
        gram.update(inputs)
        for regression, some in zip(both, targets.split([4, 2], 1), strict=True):
            regression.update(some, inputs)
    weight = draw(OUTPUTS, FEATURES, seed=13).float()
    for regression, some, rows in zip(both, y.split([4, 2], 1), weight.split([4, 2]), strict=True):
        assert regression.error(rows) == pytest.approx(missed(x, some, rows, affine)[0], rel=1e-4)


@every_form
def test_before_any_token(affine: bool) -> None:
    """Nothing seen is zero, not NaN, and the target is the prior."""
    found = TargetRegression(Gram(3), 2, affine)
    weight = torch.ones(2, 3)
    assert (found.power, found.error(weight)) == (0, 0)
    assert torch.equal(found.problem(weight).weight, weight)
    bias = found.bias(weight)
    assert bias is None or torch.equal(bias, torch.zeros(2))


@every_form
@pytest.mark.parametrize("constant", [False, True], ids=["", "constant"])
def test_targets_that_are_never_made(affine: bool, constant: bool) -> None:
    """Targets A z + a, from the sums of z and x alone: the errors, biases and problems that the targets themselves give."""
    x, _ = tokens(constant)
    z = (x + 0.4 * draw(*x.shape, seed=20).float()).roll(1, 1)
    offset = draw(OUTPUTS, seed=22).float() if affine else None
    layer = draw(OUTPUTS, FEATURES, seed=21).float()
    targets = z @ layer.T if offset is None else z @ layer.T + offset
    twins = PairedStatistics(Gram(FEATURES))
    for here, there in zip(x.split(150), z.split(150), strict=True):
        twins.inputs.update(here)
        twins.update(here, there)
    twins.inputs.reduce()
    twins.reduce()
    found, wanted = LinearTargetRegression(twins, layer, offset), summed(x, targets, affine)
    assert found.affine == affine
    assert found.power == pytest.approx(wanted.power, rel=1e-5)
    prior = layer + 0.1 * draw(OUTPUTS, FEATURES, seed=23).float()
    torch.testing.assert_close(found.problem(prior).weight, wanted.problem(prior).weight, rtol=1e-3, atol=1e-4)
    for weight in (prior, draw(OUTPUTS, FEATURES, seed=24).float()):
        lost, best = missed(x, targets, weight, affine)
        assert found.error(weight) == pytest.approx(lost, rel=2e-4, abs=1e-5 * found.power)
        bias = found.bias(weight)
        assert (bias is None) == (not affine)
        if bias is not None:
            torch.testing.assert_close(bias.double(), best, rtol=1e-4, atol=1e-4)
