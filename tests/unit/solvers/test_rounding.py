"""Rounding to integers, against direct formulas."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparsellm.solvers.linalg import add_diagonal
from sparsellm.solvers.quantization import DAMPING, gptq, round_compensated, round_to_nearest


def problem(rows: int = 6, columns: int = 128) -> tuple[Tensor, Tensor, Tensor]:
    """A weight, a Gram matrix of correlated inputs, and a mask."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(400, columns, generator=generator) @ torch.randn(columns, columns, generator=generator)
    keep = torch.rand(rows, columns, generator=generator) > 0.5
    return torch.randn(rows, columns, generator=generator), inputs.T @ inputs / 400, keep


def error(weight: Tensor, target: Tensor, gram: Tensor) -> Tensor:
    """The error of each row."""
    return ((weight - target) @ gram * (weight - target)).sum(1)


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_gptq_equals_the_direct_formula(bits: int) -> None:
    """Column by column with the inverse of the Gram matrix of the columns that are left, computed anew for each."""
    weight, gram, _ = problem()
    gram = add_diagonal(gram, DAMPING).double()
    rounded = gptq(weight, gram.float(), bits, 64)
    current, largest = weight.double(), 2 ** (bits - 1) - 1
    for j in range(weight.shape[1]):
        scale = rounded.scales[:, j // 64].double()
        value = (current[:, j] / scale).round().clamp(-largest, largest) * scale
        inverse = torch.linalg.inv(gram[j:, j:])
        current[:, j:] -= (current[:, j] - value).unsqueeze(1) * inverse[0] / inverse[0, 0]
    torch.testing.assert_close(rounded.to_dense().double(), current, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bits", [3, 4, 8])
def test_no_single_integer_lowers_the_error(bits: int) -> None:
    weight, gram, keep = problem()
    rounded = round_compensated(weight, gram, keep, bits=bits, group_size=64)
    gram = add_diagonal(gram, DAMPING)
    least, largest = error(rounded.to_dense(), weight, gram), 2 ** (bits - 1) - 1
    steps = rounded.scales.float().repeat_interleave(64, 1)
    for j in range(weight.shape[1]):
        for sign in (-1, 1):
            changed = rounded.to_dense()
            changed[:, j] += sign * steps[:, j]
            allowed = keep[:, j] & ((rounded.integers[:, j] + sign).abs() <= largest)
            assert bool((error(changed, weight, gram) >= least * 0.995)[allowed].all())


def test_removed_weights_stay_zero_and_errors_are_lower_than_of_nearest() -> None:
    weight, gram, keep = problem()
    rounded = round_compensated(weight, gram, keep, bits=4, group_size=64)
    nearest = round_to_nearest(weight, 4, 64, mask=keep)
    assert not rounded.integers[~keep].any()
    assert bool((error(rounded.to_dense(), weight, gram) < error(nearest.to_dense(), weight, gram)).all())
