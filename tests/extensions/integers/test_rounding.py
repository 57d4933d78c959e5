"""Rounding to integers, against direct formulas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparsellm.extensions.integers.formats import IntegerFormat
from sparsellm.extensions.integers.quantization import CLIPS, DAMPING, gptq, round_compensated, round_to_nearest
from sparsellm.solvers.linalg import add_diagonal, count_negative_zeros

RANGES = {
    (8, False): (-127, 127),
    (8, True): (-127, 127),
    (4, False): (-8, 7),
    (4, True): (-8, 7),
    (3, False): (-4, 3),
    (3, True): (-4, 4),
}
"""Least and largest integer, by bits and whether half of the weights are removed."""


def problem(rows: int = 6, columns: int = 128) -> tuple[Tensor, Tensor, Tensor]:
    """A weight, a Gram matrix of correlated inputs, and a mask."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(400, columns, generator=generator) @ torch.randn(columns, columns, generator=generator)
    keep = torch.rand(rows, columns, generator=generator) > 0.5
    return torch.randn(rows, columns, generator=generator), inputs.T @ inputs / 400, keep


def error(weight: Tensor, target: Tensor, gram: Tensor) -> Tensor:
    """The error of each row."""
    return ((weight - target) @ gram * (weight - target)).sum(1)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_gptq_equals_the_direct_formula(bits: int, sparse: bool) -> None:
    """Largest inputs first, with the inverse of the Gram matrix of the columns that are left, computed anew for each."""
    weight, gram, keep = problem()
    keep = keep if sparse else torch.ones_like(keep)
    gram = add_diagonal(gram, DAMPING).double()
    rounded = gptq(weight, gram.float(), IntegerFormat(bits, 64), mask=keep)
    current, remaining = weight.double(), list(range(weight.shape[1]))
    for j in sorted(remaining, key=lambda j: -float(gram[j, j])):
        scale = rounded.scales[:, j // 64].double()
        value = (current[:, j] / scale).round().clamp(*RANGES[bits, sparse]) * scale * keep[:, j]
        inverse, at = torch.linalg.inv(gram[remaining][:, remaining]), remaining.index(j)
        difference = current[:, j] * keep[:, j] - value
        current[:, remaining] -= difference.unsqueeze(1) * inverse[at] / inverse[at, at]
        current[:, j] = value
        remaining.remove(j)
    torch.testing.assert_close(rounded.to_dense().double(), current, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_no_single_integer_lowers_the_error(bits: int, sparse: bool) -> None:
    weight, gram, keep = problem()
    keep = keep if sparse else torch.ones_like(keep)
    rounded = round_compensated(weight, gram, keep, format=IntegerFormat(bits, 64))
    gram = add_diagonal(gram, DAMPING)
    least, (lowest, largest) = error(rounded.to_dense(), weight, gram), RANGES[bits, sparse]
    assert lowest <= int(rounded.integers.min()) < int(rounded.integers.max()) <= largest
    steps = rounded.scales.float().repeat_interleave(64, 1)
    for j in range(weight.shape[1]):
        for sign in (-1, 1):
            changed = rounded.to_dense()
            changed[:, j] += sign * steps[:, j]
            integers = rounded.integers[:, j] + sign
            allowed = keep[:, j] & (integers >= lowest) & (integers <= largest)
            assert bool((error(changed, weight, gram) >= least * 0.995)[allowed].all())


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("bits", [3, 4, 8])
def test_every_integer_of_the_range_is_used(bits: int, sparse: bool) -> None:
    """Weights that are multiples of a number are kept exactly, whichever sign the integer without an opposite has."""
    lowest, largest = RANGES[bits, sparse]
    generator = torch.Generator().manual_seed(0)
    integers = torch.randint(lowest, largest + 1, (8, 256), generator=generator)
    integers[:, ::64], integers[:, 1::64] = lowest, largest
    scales = torch.tensor([0.75, -0.75, 3, -3, 1.5, -1.5, 1, -1])
    keep = torch.rand(8, 256, generator=generator) < (0.5 if sparse else 1.0)
    keep[:, ::64] = keep[:, 1::64] = True
    weight = integers * scales[:, None] * keep
    for rounded in (
        round_to_nearest(weight, IntegerFormat(bits, 64), mask=keep),
        gptq(weight, torch.eye(256), IntegerFormat(bits, 64), mask=keep),
        round_compensated(weight, torch.eye(256), keep, format=IntegerFormat(bits, 64)),
    ):
        assert torch.equal(rounded.to_dense(), weight)
        assert count_negative_zeros(rounded.to_dense()) == 0


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_the_scale_is_the_best_of_those_tried(bits: int) -> None:
    weight, importance = torch.randn(5, 128, generator=torch.Generator().manual_seed(1)), torch.rand(128)
    rounded = round_to_nearest(weight, IntegerFormat(bits, 64), importance=importance)
    lowest, largest = RANGES[bits, False]
    for row in range(5):
        for group in range(2):
            part, weights = (x[..., 64 * group : 64 * group + 64].double() for x in (weight[row], importance))
            errors = {}
            for sign in (1, -1):
                for clip in CLIPS:
                    scale = float((weight[row, 64 * group :][:64].abs().max() / largest * (sign * clip)).bfloat16())
                    difference = (part / scale).round().clamp(lowest, largest) * scale - part
                    errors[scale] = float((weights * difference.square()).sum())
            assert errors[float(rounded.scales[row, group])] == pytest.approx(min(errors.values()), rel=1e-5)


def test_removed_weights_stay_zero_and_errors_are_lower_than_of_nearest() -> None:
    weight, gram, keep = problem()
    rounded = round_compensated(weight, gram, keep, format=IntegerFormat(4, 64))
    nearest = round_to_nearest(weight, IntegerFormat(4, 64), mask=keep)
    assert not rounded.integers[~keep].any()
    assert bool((error(rounded.to_dense(), weight, gram) < error(nearest.to_dense(), weight, gram)).all())
