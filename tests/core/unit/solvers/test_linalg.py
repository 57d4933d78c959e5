"""Damping, factorizations and conjugate gradients against dense float64 algebra."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparsellm.errors import SingularGram
from sparsellm.solvers import linalg
from sparsellm.solvers.linalg import (
    add_diagonal,
    all_finite,
    cholesky_,
    conjugate_gradient_refit,
    count_zeros,
    dead_inputs,
    dot_float64,
    eigh,
    inverse_factor_,
    quadratic_form,
)
from tests.pairwise import pairwise

DTYPES = [torch.float32, torch.float64]


def gram_of(size: int, seed: int = 0, tokens: int | None = None, dtype: torch.dtype = torch.float64) -> Tensor:
    """(in, in): the Gram of correlated inputs of different sizes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens or 4 * size, size, generator=generator, dtype=torch.float64)
    x = x + 0.7 * x.roll(1, dims=1) + torch.randn(len(x), 1, generator=generator, dtype=torch.float64)
    x = x * torch.linspace(0.3, 3, size, dtype=torch.float64)
    return (x.T @ x / len(x)).to(dtype)


def random(rows: int, columns: int, seed: int = 5, dtype: torch.dtype = torch.float64) -> Tensor:
    """Standard normal draws."""
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def energy(weight: Tensor, target: Tensor, gram: Tensor) -> Tensor:
    """(out,): each row's error, in float64."""
    change = (weight - target).double()
    return ((change @ gram.double()) * change).sum(1)


def exact_refit(target: Tensor, gram: Tensor, keep: Tensor) -> Tensor:
    """Each row's least squares on its support, by a dense float64 solve."""
    gram, products = gram.double(), target.double() @ gram.double()
    answer = torch.zeros_like(products)
    for row, support in enumerate(keep):
        if bool(support.any()):
            answer[row, support] = torch.linalg.solve(gram[support][:, support], products[row, support])
    return answer


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 2, 7, 40, 129])
def test_inverse_factor_is_the_upper_factor_of_the_inverse(size: int, dtype: torch.dtype) -> None:
    """U is upper triangular with a positive diagonal, and UᵀU is the inverse."""
    gram = gram_of(size, dtype=dtype)
    matrix = gram.clone()
    upper, pivot = inverse_factor_(matrix)
    assert int(pivot) == 0
    assert upper.dtype == dtype
    assert upper.data_ptr() == matrix.data_ptr()
    assert torch.equal(upper, upper.triu())
    assert bool((upper.diagonal() > 0).all())
    rounding = 1e-12 if dtype == torch.float64 else 1e-4
    product = upper.double().T @ upper.double() @ gram.double()
    assert float((product - torch.eye(size, dtype=torch.float64)).abs().max()) < rounding * size
    torch.testing.assert_close(
        upper.double(), torch.linalg.cholesky(torch.linalg.inv(gram.double())).T, rtol=100 * rounding, atol=rounding
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("by_columns", [False, True])
def test_factors_are_those_of_torch_in_place(by_columns: bool, dtype: torch.dtype) -> None:
    """The same bits, in the matrix's memory, whichever way it is stored."""
    gram = gram_of(129, dtype=dtype)
    gram = (gram + gram.T) / 2
    matrix = gram.T.clone(memory_format=torch.contiguous_format).T if by_columns else gram.clone()
    assert matrix.is_contiguous() != by_columns
    lower = cholesky_(matrix, 0.0)
    assert lower.data_ptr() == matrix.data_ptr()
    assert torch.equal(lower, torch.linalg.cholesky(gram))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("by_columns", [False, True])
def test_eigenvectors_are_those_of_torch_in_place(by_columns: bool, dtype: torch.dtype) -> None:
    """The same bits; the matrix is overwritten only if asked."""
    gram = gram_of(65, dtype=dtype)
    gram = (gram + gram.T) / 2
    matrix = gram.T.clone(memory_format=torch.contiguous_format).T if by_columns else gram.clone()
    wanted = torch.linalg.eigh(gram)
    assert all(map(torch.equal, linalg.eigh(matrix), wanted))
    assert torch.equal(matrix, gram)
    values, vectors = linalg.eigh(matrix, overwrite=True)
    assert torch.equal(values, wanted[0])
    assert torch.equal(vectors, wanted[1])
    assert vectors.data_ptr() == matrix.data_ptr()


@pytest.mark.parametrize("at_once", [1, 2, 3, 100])
def test_reversed_in_place(at_once: int) -> None:
    for size in (0, 1, 2, 5, 6, 7):
        entries = torch.arange(size)
        linalg._reverse_(entries, at_once)
        assert entries.tolist() == list(range(size))[::-1]


def test_damping_adds_a_share_of_the_mean() -> None:
    """Off the diagonal nothing changes; on it the share of the mean is added; the argument is not written to."""
    gram = gram_of(12)
    before = gram.clone()
    result = add_diagonal(gram, 0.03)
    assert torch.equal(gram, before)
    torch.testing.assert_close(result - gram, 0.03 * gram.diagonal().mean() * torch.eye(12, dtype=torch.float64))
    assert torch.equal(add_diagonal(gram, 0.0), gram)


@pytest.mark.parametrize("scale", [2.0**-40, 0.25, 4.0, 2.0**30])
def test_damping_scales_with_the_gram(scale: float) -> None:
    """Scaling the Gram by a power of two scales the damped one exactly, dead inputs included."""
    gram = gram_of(12)
    gram[3] = gram[:, 3] = 0
    assert torch.equal(add_diagonal(scale * gram, 0.01), scale * add_diagonal(gram, 0.01))


def test_dead_inputs_get_the_mean_and_couple_to_nothing() -> None:
    """A dead input's diagonal is the mean of the diagonal; its row and column stay zero; the factor exists undamped."""
    gram = gram_of(10)
    for dead in (0, 4, 9):
        gram[dead] = gram[:, dead] = 0
    assert dead_inputs(gram).nonzero().flatten().tolist() == [0, 4, 9]
    result = add_diagonal(gram, 0.0)
    mean = gram.diagonal().mean()
    torch.testing.assert_close(result.diagonal()[[0, 4, 9]], mean.expand(3), rtol=0, atol=0)
    off = result - result.diagonal().diag()
    assert not bool(off[[0, 4, 9]].any())
    live = [1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(result[live][:, live], gram[live][:, live])
    factor, _ = inverse_factor_(result)
    assert bool(factor.isfinite().all())
    assert not bool((factor - factor.diagonal().diag())[[0, 4, 9]].any())


def test_all_inputs_dead_is_the_identity() -> None:
    """With nothing seen the damped Gram is the identity: nothing is divided by zero."""
    assert torch.equal(add_diagonal(torch.zeros(5, 5), 0.01), torch.eye(5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_singular_matrices_raise(dtype: torch.dtype) -> None:
    """Fewer tokens than inputs and no damping: SingularGram names the size and the damping; with damping it works."""
    gram = torch.zeros(8, 8, dtype=dtype)
    gram[:3, :3] = gram_of(3, dtype=dtype)
    gram[5, 5] = -1
    with pytest.raises(SingularGram, match=r"damping=0\.25.*`damping`"):
        cholesky_(gram, 0.25)
    with pytest.raises(ArithmeticError):
        cholesky_(-torch.eye(4, dtype=dtype), 0)
    assert int(inverse_factor_(-torch.eye(4, dtype=dtype))[1]) == 1
    low_rank = gram_of(16, tokens=5, dtype=dtype)
    lower = cholesky_(add_diagonal(low_rank, 0.01), 0.01)
    torch.testing.assert_close(lower @ lower.T, add_diagonal(low_rank, 0.01), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_matrices_raise(bad: float) -> None:
    """NaN and infinity are refused as singular, never factored into NaN."""
    matrix = torch.eye(4)
    matrix[2, 2] = bad
    with pytest.raises(SingularGram):
        cholesky_(matrix, 0.01)
    assert int(inverse_factor_(matrix)[1]) > 0


@pytest.mark.parametrize(("start", "rows", "dtype"), pairwise(["zero", "masked", "random"], [1, 2, 33], DTYPES), ids=str)
def test_refit_never_worse_and_on_the_support(start: str, rows: int, dtype: torch.dtype) -> None:
    """After any number of steps: zero outside the support, no row worse than at the start, arguments untouched."""
    size = 40
    gram, target = gram_of(size, dtype=dtype), random(rows, size, dtype=dtype)
    keep = random(rows, size, seed=6) > 0.3
    first = {"zero": target * 0, "masked": target * keep, "random": random(rows, size, seed=7, dtype=dtype) * keep}[start]
    copies = [tensor.clone() for tensor in (first, target, gram, keep)]
    initial = last = energy(first, target, gram)
    for steps in (0, 1, 2, 5, 10, 40):
        weight = conjugate_gradient_refit(first, target, gram, keep=keep, steps=steps)
        assert weight is not first
        assert weight.dtype == dtype
        assert not bool(weight[~keep].any())
        now = energy(weight, target, gram)
        assert bool((now <= last + 1e-5 * initial).all()), f"{steps} steps made a row worse"
        last = now
    assert torch.equal(conjugate_gradient_refit(first, target, gram, keep=keep, steps=0), first)
    assert bool((last < 0.9 * initial).all())
    for tensor, copy in zip((first, target, gram, keep), copies, strict=True):
        assert torch.equal(tensor, copy)


@pytest.mark.parametrize("rows", [1, 5, 33])
@pytest.mark.parametrize(("dtype", "tolerance", "rounding"), [(torch.float32, 1e-6, 1e-3), (torch.float64, 1e-12, 1e-8)])
def test_refit_converges_to_least_squares(dtype: torch.dtype, tolerance: float, rounding: float, rows: int) -> None:
    """Given many steps every row reaches its exact least squares on its own support, empty and full supports too."""
    size = 40
    gram, target = gram_of(size, dtype=dtype), random(rows, size, dtype=dtype)
    keep = random(rows, size, seed=6) > 0.0
    keep[0] = rows == 1
    keep[-1] = True
    weight = conjugate_gradient_refit(target * keep, target, gram, keep=keep, steps=400, tolerance=tolerance)
    exact = exact_refit(target, gram, keep)
    torch.testing.assert_close(weight.double(), exact, rtol=rounding, atol=rounding)
    assert bool((energy(weight, target, gram) <= energy(exact, target, gram) * (1 + 1e-4) + 1e-8).all())


def test_refit_rows_do_not_depend_on_each_other() -> None:
    """A row that is long done stays put while a hard one moves on, and equals the row refitted alone."""
    size = 32
    gram, target = gram_of(size), random(3, size)
    keep = random(3, size, seed=6) > 0
    start = target * keep
    start[0] = exact_refit(target, gram, keep)[0]
    together = conjugate_gradient_refit(start, target, gram, keep=keep, steps=25)
    for row in range(3):
        alone = conjugate_gradient_refit(start[row : row + 1], target[row : row + 1], gram, keep=keep[row : row + 1], steps=25)
        torch.testing.assert_close(together[row : row + 1], alone, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(together[0], start[0], rtol=0, atol=1e-9)
    assert not torch.allclose(together[1], start[1])


def test_a_few_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fits, quadratic forms and inner products of 3 rows at a time are those of all rows; with a curvature a fit takes all."""
    gram, target, curvature = gram_of(40), random(20, 40), gram_of(20, seed=1)
    keep = random(20, 40, seed=6) > 0

    def found() -> list[Tensor]:
        fits = [
            conjugate_gradient_refit(target * keep, target, gram, keep=keep, steps=3, curvature=s) for s in (None, curvature)
        ]
        return [*fits, quadratic_form(curvature @ target, gram, target), torch.tensor(dot_float64(target, curvature @ target))]

    whole = found()
    monkeypatch.setattr("sparsellm.solvers.linalg.PRODUCT_ENTRIES", 3 * 40)
    monkeypatch.setattr("sparsellm.runtime.devices.CACHED_ENTRIES", 3 * 40)
    for part, wanted in zip(found(), whole, strict=True):
        torch.testing.assert_close(part, wanted, rtol=1e-9, atol=1e-9)


def test_refit_stays_where_it_is_solved() -> None:
    """A start with nothing to gain is returned to the bit: no division of zero by zero."""
    gram, target = gram_of(8), random(2, 8)
    keep = torch.ones(2, 8, dtype=torch.bool)
    assert torch.equal(conjugate_gradient_refit(target, target, gram, keep=keep, steps=10), target)
    nothing = torch.zeros(2, 8, dtype=torch.bool)
    assert torch.equal(
        conjugate_gradient_refit(torch.zeros_like(target), target, gram, keep=nothing, steps=10), torch.zeros_like(target)
    )


@pytest.mark.parametrize("curved", [False, True], ids=["plain", "curvature"])
@pytest.mark.parametrize("features", [1, 384, 385, 900])
def test_a_quadratic_form(features: int, curved: bool) -> None:
    """Half of the matrix gives tr S W G Wᵀ, to float32 rounding."""
    generator = torch.Generator().manual_seed(0)
    weight, x, root = (torch.randn(shape, generator=generator) for shape in ((7, features), (features, 50), (7, 7)))
    gram, curvature = x @ x.T / 50, root @ root.T if curved else torch.eye(7)
    wanted = ((curvature.double() @ weight.double() @ gram.double()) * weight.double()).sum()
    assert float(quadratic_form(curvature @ weight, gram, weight)) == pytest.approx(float(wanted), rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_all_finite(dtype: torch.dtype) -> None:
    """One infinity or NaN among many is seen, also where two cancel; numbers whose sum overflows are finite all the same."""
    largest = torch.finfo(dtype).max
    sound = torch.full((40, 50), largest, dtype=dtype)
    assert all_finite(torch.randn(40, 50).to(dtype))
    assert all_finite(sound)
    for bad in (float("inf"), -float("inf"), float("nan")):
        sound[3, 7] = bad
        assert not all_finite(sound)
        sound[5, 1] = -bad
        assert not all_finite(sound)
        sound[5, 1] = 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_zeros_in(dtype: torch.dtype) -> None:
    """Zeros of either sign count, the smallest other number does not; of a view, only its own."""
    weight = torch.full((6, 8), torch.finfo(dtype).smallest_normal, dtype=dtype)
    assert count_zeros(weight) == 0
    weight[1, :3], weight[4, 0] = 0.0, -0.0
    assert count_zeros(weight) == 4
    assert count_zeros(weight[:, 1:]) == 2


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int64, torch.bool])
def test_zeros_in_integers(dtype: torch.dtype) -> None:
    """torch does not count in those without a sign."""
    numbers = torch.tensor([[0, 1, 1], [1, 1, 0]]).to(dtype)
    assert count_zeros(numbers) == 2
    assert count_zeros(numbers[:, 1:]) == 1


def test_where_there_is_no_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device without float64 sums of products are made on the processor, as precisely; spectra are those of torch."""
    one, other = random(30, 40, dtype=torch.float32) + 1e4, random(30, 40, 6, torch.float32) - 1e4
    wanted = float((one.double() * other.double()).sum())
    assert dot_float64(one, other) == wanted
    monkeypatch.setattr("sparsellm.runtime.devices.widest_float", lambda device: torch.float32)
    assert dot_float64(one, other) == wanted
    assert abs(float((one * other).sum()) - wanted) > 1e-9 * abs(wanted)
    gram = gram_of(12)
    values, vectors = eigh(gram)
    torch.testing.assert_close((vectors * values) @ vectors.T, gram)
