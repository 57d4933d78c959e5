"""The bitmask form against a loop over weights."""

from __future__ import annotations

import math

import pytest
import torch

from sparsellm.extensions.packed.formats.bitmask import VALUES_PADDING, Bitmask


def bits(tensor: torch.Tensor) -> list[list[int]]:
    """The bits of each number, by row."""
    return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int16).tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("columns", [1, 7, 63, 64, 65, 200])
def test_bits_survive(dtype: torch.dtype, columns: int) -> None:
    """Every number comes back bit by bit, at its place; only +0.0 is left out."""
    weight = torch.randn(5, columns, generator=torch.Generator().manual_seed(columns)).to(dtype)
    weight[torch.rand(5, columns, generator=torch.Generator().manual_seed(1)) < 0.6] = 0
    weight[0] = 0
    weight[1] = 1
    weight[2, 0], weight[3, 0], weight[4, 0] = -0.0, math.nan, -math.inf
    packed = Bitmask.from_dense(weight)
    assert bits(packed.to_dense()) == bits(weight)
    assert bits(packed.to_dense(1, 3)) == bits(weight[1:3])
    kept = [(row, column) for row, numbers in enumerate(bits(weight)) for column, number in enumerate(numbers) if number]
    assert packed.kept == len(kept)
    assert packed.row_starts.tolist() == [sum(row < start for row, _ in kept) for start in range(6)]
    assert bits(packed.values[None, :-VALUES_PADDING]) == [[bits(weight)[row][column] for row, column in kept]]
    for row in range(5):
        number = int.from_bytes(bytes(packed.mask[row].tolist()), "little")
        assert [column for column in range(columns + 64) if number >> column & 1] == [c for r, c in kept if r == row]
