from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sparsellm.extensions.integers.formats import MASK_WORD, IntegerFormat
from sparsellm.extensions.integers.quantization import Quantized
from sparsellm.extensions.packed.formats.bitmask import VALUES_PADDING, Bitmask, pack_bits
from tests.pairwise import pairwise

BITS = (8, 4, 3)
SHAPES = [(1, 1), (3, 63), (4, 64), (5, 65), (7, 200), (2, 512)]


def integers_of(shape: tuple[int, int], *, bits: int, density: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random integers with zeros among the kept ones, and which are kept."""
    generator = torch.Generator().manual_seed(seed)
    least, largest = IntegerFormat(bits, 0).limits(density)
    integers = torch.randint(least, largest + 1, shape, dtype=torch.int8, generator=generator)
    keep = torch.rand(shape, generator=generator) < density
    return integers * keep, keep


def scales_of(shape: tuple[int, int], group_size: int) -> Tensor:
    groups = -(-shape[1] // group_size) if group_size else 1
    return torch.rand(shape[0], groups, generator=torch.Generator().manual_seed(1)).bfloat16()


def dense_by_loop(integers: Tensor, scales: Tensor, group_size: int) -> Tensor:
    """The weight, number by number."""
    dense = torch.zeros(integers.shape, dtype=torch.float64)
    for row in range(integers.shape[0]):
        for column in range(integers.shape[1]):
            group = column // group_size if group_size else 0
            dense[row, column] = float(scales[row, group]) * int(integers[row, column])
    return dense


@pytest.mark.parametrize(("shape", "bits", "density"), pairwise(SHAPES, BITS, [0.0, 0.3, 1.0]), ids=str)
def test_decoded_weight_is_scale_times_integer(shape: tuple[int, int], bits: int, density: float) -> None:
    for group_size in (0, 64, 128):
        integers, keep = integers_of(shape, bits=bits, density=density)
        scales = scales_of(shape, group_size)
        weight = Bitmask.from_quantized(Quantized(integers, scales, IntegerFormat(bits, group_size)), keep=keep)
        assert torch.equal(weight.to_integers(), integers)
        assert torch.equal(weight.to_dense().double(), dense_by_loop(integers, scales, group_size))
        assert torch.equal(weight.kept_values(), integers[keep])
        assert weight.kept == int(keep.sum())
        middle = shape[0] // 2
        assert torch.equal(weight.to_dense(middle, shape[0]), weight.to_dense()[middle:])


def test_each_word_of_halves_begins_with_a_byte() -> None:
    """The layout that kernels read, by a slow formula."""
    integers, keep = integers_of((6, 200), bits=4, density=0.5)
    weight = Bitmask.from_quantized(Quantized(integers, scales_of((6, 200), 64), IntegerFormat(4, 64)), keep=keep)
    expected: list[int] = []
    starts = [0]
    for row in range(6):
        for start in range(0, 200, MASK_WORD):
            word = slice(start, start + MASK_WORD)
            numbers = [int(x) & 15 for x in integers[row, word][keep[row, word]]]
            numbers += [0] * (len(numbers) % 2)
            expected += [low | high << 4 for low, high in zip(numbers[::2], numbers[1::2], strict=True)]
        starts.append(len(expected))
    assert weight.values.tolist() == expected + [0] * VALUES_PADDING
    assert weight.row_starts.tolist() == starts
    assert torch.equal(weight.mask, pack_bits(keep))


def test_eight_bits_take_a_byte_each() -> None:
    integers, keep = integers_of((3, 70), bits=8, density=0.5)
    weight = Bitmask.from_quantized(Quantized(integers, scales_of((3, 70), 0), IntegerFormat(8, 0)), keep=keep)
    assert weight.values.dtype is torch.int8
    assert weight.values.tolist() == [*integers[keep].tolist(), *[0] * VALUES_PADDING]
    assert weight.row_starts.tolist() == [0, *keep.sum(1).cumsum(0).tolist()]


@given(st.data())
def test_random_weights(data: Any) -> None:
    shape = data.draw(st.tuples(st.integers(1, 9), st.integers(1, 300)))
    bits, group_size = data.draw(st.sampled_from(BITS)), data.draw(st.sampled_from((0, 64, 192, 512)))
    integers, keep = integers_of(shape, bits=bits, density=data.draw(st.floats(0, 1)), seed=data.draw(st.integers(0, 99)))
    scales = scales_of(shape, group_size)
    weight = Bitmask.from_quantized(Quantized(integers, scales, IntegerFormat(bits, group_size)), keep=keep)
    assert torch.equal(weight.to_integers(), integers)
    again = Bitmask.from_parts(weight.mask, weight.kept_values(), shape[1], scales=scales, format=weight.format)
    assert torch.equal(again.values, weight.values)
