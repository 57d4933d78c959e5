"""The kernels of quantized matrices against a loop over rows, for each instruction set of this machine."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor

from sparsellm.extensions.integers.formats import IntegerFormat
from sparsellm.extensions.integers.quantization import Quantized
from sparsellm.extensions.packed.formats import kernels
from sparsellm.extensions.packed.formats.bitmask import VALUES_PADDING, Bitmask, unpack_bits
from sparsellm.solvers.linalg import count_negative_zeros
from tests.extensions.packed.formats.test_kernels import DTYPES, SETS, compiled, random_tokens, slow_product
from tests.guard_pages import before_guard_page

FORMATS = ((8, 0), (8, 64), (4, 0), (4, 128), (3, 192))
"""Bits and group sizes."""


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    if kernels.instruction_set():
        kernels.load_kernels().is_chosen = False


def random_weight(rows: int, columns: int, bits: int, group_size: int, *, density: float = 0.4) -> Bitmask:
    """A matrix of which row 1 is empty and row 2 full, with zeros among the kept integers."""
    generator = torch.Generator().manual_seed(rows * columns)
    least, largest = IntegerFormat(bits, 0).limits(density)
    integers = torch.randint(least, largest + 1, (rows, columns), generator=generator, dtype=torch.int8)
    keep = torch.rand(rows, columns, generator=generator) < density
    keep[1:2], keep[2:3] = False, True
    scales = torch.rand(rows, -(-columns // group_size) if group_size else 1, generator=generator).sub(0.3).bfloat16()
    return Bitmask.from_quantized(Quantized(integers * keep, scales, IntegerFormat(bits, group_size)), keep=keep)


def check(result: Tensor, x: Tensor, weight: Bitmask) -> None:
    """As for other matrices; x may be off by its largest number times 2^-22."""
    dense = weight.to_dense()
    expected, terms = slow_product(x, dense), slow_product(x.abs(), dense.abs())
    rounding = x.double().abs().amax(1, keepdim=True) * dense.double().abs().sum(1) * 2**-22
    assert result.dtype is x.dtype
    assert result.shape == expected.shape
    bound = terms * 2**-18 + rounding + expected.abs() * torch.finfo(x.dtype).eps + torch.finfo(x.dtype).tiny
    assert ((result.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize(("bits", "group_size"), FORMATS)
@pytest.mark.parametrize("name", SETS)
@compiled
def test_products_equal_a_slow_loop(name: str, bits: int, group_size: int) -> None:
    """Odd widths, an empty row, a full row, each number of tokens, each type of x."""
    kernels.load_kernels().use(name)
    for rows, columns in ((1, 1), (3, 7), (6, 63), (5, 64), (4, 65), (9, 330)):
        weight = random_weight(rows, columns, bits, group_size)
        for tokens in (*range(6), 8, 9, 16):
            for dtype in DTYPES:
                x = random_tokens(tokens, columns, dtype)
                check(kernels.packed_matmul(x, weight), x, weight)


@pytest.mark.parametrize(("bits", "group_size"), FORMATS)
@pytest.mark.parametrize("name", SETS)
@compiled
def test_rows_are_decoded_as_by_torch(name: str, bits: int, group_size: int) -> None:
    """Bit by bit, also where float16 has subnormal numbers, no numbers, or ties between two."""
    kernels.load_kernels().use(name)
    for rows, columns in ((1, 1), (6, 63), (9, 330)):
        weight = random_weight(rows, columns, bits, group_size)
        for factor in (1.0, 2.0**-20, 2.0**-126, 2.0**12, 2.0**120, math.nan):
            scaled = replace(weight, scales=weight.scales * factor)
            for dtype in DTYPES:
                expected, result = scaled.to_dense(dtype=dtype), kernels.decode_rows(scaled, dtype=dtype)
                assert torch.equal(result.nan_to_num(7), expected.nan_to_num(7))
                assert torch.equal(result.isnan(), expected.isnan())
                assert count_negative_zeros(kernels.decode_rows(weight, dtype=dtype)) == 0
                assert torch.equal(kernels.decode_rows(scaled, 1, rows, dtype=dtype).nan_to_num(7), expected[1:].nan_to_num(7))


@compiled
def test_every_product_is_rounded_as_by_torch() -> None:
    """All products of an integer and one of many scales."""
    integers = torch.arange(-127, 128, dtype=torch.int8).expand(512, -1)
    scales = torch.arange(0, 2**15, 64, dtype=torch.int16).view(torch.bfloat16)[:, None]
    weight = Bitmask.from_quantized(Quantized(integers, scales, IntegerFormat(8, 0)))
    for name in kernels.instruction_sets():
        kernels.load_kernels().use(name)
        for dtype in DTYPES:
            result, expected = kernels.decode_rows(weight, dtype=dtype), weight.to_dense(dtype=dtype)
            assert torch.equal(result.nan_to_num(7), expected.nan_to_num(7))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("name", SETS)
@compiled
def test_a_single_product_is_rounded_once(name: str, bits: int) -> None:
    """With x between -2^21 and 2^21: no bit of x is lost."""
    kernels.load_kernels().use(name)
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-(2**21), 2**21, (3, 300), generator=generator)
    least, largest = IntegerFormat(bits, 0).limits(1)
    numbers = torch.randint(least, largest + 1, (300,), generator=generator)
    weight = Bitmask.from_quantized(
        Quantized(numbers.diag().to(torch.int8), torch.ones(300, 1).bfloat16(), IntegerFormat(bits, 0)),
        keep=torch.eye(300).bool(),
    )
    assert torch.equal(kernels.packed_matmul(x.float(), weight), (x * numbers).float())


@pytest.mark.parametrize("columns", [30_000, 2**20 + 70])
@compiled
def test_long_rows_do_not_overflow(columns: int) -> None:
    """Sums of 32 bits hold a scale's columns even if all products have one sign; beyond, x is multiplied in float32."""
    for bits, number in ((8, 127), (8, -127), (4, 7), (4, -8)):
        integers = torch.full((1, columns), number, dtype=torch.int8)
        weight = Bitmask.from_quantized(Quantized(integers, torch.ones(1, 1).bfloat16(), IntegerFormat(bits, 0)))
        for value in (1.9921875, -1.9921875, 1 - 2.0**-22):
            result = kernels.packed_matmul(torch.full((1, columns), value), weight)
            assert math.isclose(float(result), columns * number * value, rel_tol=1e-3)


@pytest.mark.parametrize(("bits", "group_size"), [(8, 0), (4, 128)])
@pytest.mark.parametrize("name", SETS)
@compiled
def test_tokens_do_not_depend_on_each_other(name: str, bits: int, group_size: int) -> None:
    """Each has its own power of two: tiny tokens beside large ones, and zeros."""
    kernels.load_kernels().use(name)
    weight = random_weight(7, 200, bits, group_size)
    x = random_tokens(5, 200, torch.float32) * torch.tensor([1.0, 1e30, 1e-30, 0, 1e-38])[:, None]
    result = kernels.packed_matmul(x, weight)
    check(result[:4], x[:4], weight)
    assert torch.equal(result[3], torch.zeros(7))
    assert all(torch.allclose(result[i], kernels.packed_matmul(x[i : i + 1], weight)[0], rtol=1e-5, atol=0) for i in range(5))


@pytest.mark.parametrize("name", SETS)
@compiled
def test_sums_of_large_numbers_do_not_overflow(name: str) -> None:
    """Where the sums of integers would, and their products with the scales do not; also beside small numbers."""
    kernels.load_kernels().use(name)
    for bits, group_size in FORMATS:
        weight = random_weight(7, 330, bits, group_size)
        weight = replace(weight, scales=weight.scales * 2.0**-20)
        for dtype in (torch.float32, torch.bfloat16):
            for power in (60, 64, 66, 100, 126):
                x = random_tokens(3, 330, dtype).clamp(-1.9, 1.9) * 2.0**power
                x[1, ::3], x[2] = 1.0, x[2] * 2.0**-power
                result = kernels.packed_matmul(x, weight)
                assert result.isfinite().all()
                check(result, x, weight)


@pytest.mark.parametrize("name", SETS)
@compiled
def test_a_row_does_not_depend_on_the_rows_beside_it(name: str) -> None:
    """Some rows are taken two or four at once, others alone."""
    kernels.load_kernels().use(name)
    for bits, group_size in FORMATS:
        whole = random_weight(9, 330, bits, group_size)
        integers, keep = whole.to_integers(), unpack_bits(whole.mask, 330)
        for tokens in (1, 2, 4, 8):
            x = random_tokens(tokens, 330, torch.float32)
            result = kernels.packed_matmul(x, whole)
            for row in range(9):
                part = slice(row, row + 1)
                alone = Bitmask.from_quantized(
                    Quantized(integers[part], whole.scales[part], IntegerFormat(bits, group_size)), keep=keep[part]
                )
                assert torch.equal(kernels.packed_matmul(x, alone), result[:, part])


@pytest.mark.parametrize("name", SETS)
@compiled
def test_special_numbers_spread_to_all_rows(name: str) -> None:
    """As in a dense product, also through weights that are zero."""
    kernels.load_kernels().use(name)
    for bits, group_size in FORMATS:
        weight = random_weight(8, 130, bits, group_size)
        for dtype in DTYPES:
            x = random_tokens(4, 130, dtype)
            x[1, 70], x[2, 129], x[3, 0] = math.nan, -math.inf, math.inf
            result, expected = kernels.packed_matmul(x, weight), slow_product(x, weight.to_dense())
            for kind in (torch.isnan, torch.isposinf, torch.isneginf):
                assert torch.equal(kind(result), kind(expected))


@pytest.mark.parametrize(("bits", "group_size"), [(8, 0), (4, 128)])
@pytest.mark.parametrize("name", SETS)
@compiled
def test_bits_do_not_depend_on_threads(name: str, bits: int, group_size: int) -> None:
    kernels.load_kernels().use(name)
    weight = random_weight(211, 320, bits, group_size)
    dense = weight.to_dense()
    for tokens in (1, 2, 3, 8):
        x = random_tokens(tokens, 320, torch.bfloat16)
        torch.set_num_threads(1)
        expected = kernels.packed_matmul(x, weight)
        for count in (2, 3):
            torch.set_num_threads(count)
            assert torch.equal(kernels.packed_matmul(x, weight), expected)
            assert torch.equal(kernels.decode_rows(weight), dense)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETS)
@compiled
def test_nothing_behind_the_buffers_is_read(name: str, dtype: torch.dtype) -> None:
    kernels.load_kernels().use(name)
    for bits, group_size in FORMATS:
        for rows, columns, density in ((1, 1, 1.0), (5, 64, 1.0), (7, 100, 0.5), (9, 333, 0.05), (4, 2048, 1.0)):
            weight = random_weight(rows, columns, bits, group_size, density=density)
            parts = {name: before_guard_page(getattr(weight, name)) for name in ("mask", "values", "row_starts", "scales")}
            guarded = replace(weight, **parts)
            assert torch.equal(kernels.decode_rows(guarded, dtype=dtype), weight.to_dense(dtype=dtype))
            for tokens in (1, 3, 8):
                x = before_guard_page(random_tokens(tokens, columns, dtype))
                check(kernels.packed_matmul(x, guarded, before_guard_page(torch.zeros(rows, dtype=dtype))), x, weight)


@pytest.mark.parametrize(("bits", "group_size"), [(8, 0), (4, 128)])
def test_many_tokens_are_multiplied_by_tiles(bits: int, group_size: int) -> None:
    """By weights that are rounded to x's dtype; also without the library."""
    weight, bias = random_weight(11, 140, bits, group_size), torch.randn(11)
    for library in ("compiled", None):
        with (
            mock.patch.object(kernels, "TILE", 300),
            mock.patch.object(kernels, "load_kernels", kernels.load_kernels if library else lambda: None),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 2**-7)):
                for tokens in (2, 33):
                    x = random_tokens(tokens, 140, dtype)
                    result = kernels.packed_matmul(x, weight, bias.to(dtype)).double()
                    expected = slow_product(x, weight.to_dense()) + bias.to(dtype).double()
                    terms = slow_product(x.abs(), weight.to_dense().abs())
                    assert ((result - expected).abs() <= tolerance * (terms + expected.abs() + 1)).all()
            assert torch.equal(
                kernels.decode_rows(weight, 2, 5, dtype=torch.float16), weight.to_dense(2, 5, dtype=torch.float16)
            )
            out = torch.empty(3, 140)
            assert kernels.decode_rows(weight, 2, 5, out=out) is out


@pytest.mark.parametrize(("bits", "group_size"), [(8, 0), (4, 128)])
@compiled
def test_operator_is_what_compiled_code_calls(bits: int, group_size: int) -> None:
    weight = random_weight(6, 130, bits, group_size)
    x = random_tokens(3, 130, torch.bfloat16).view(3, 1, 130)
    options = {"columns": 130, "scales": weight.scales, "group_size": group_size, "bias": x[0, 0, :6]}
    operator = torch.ops.sparsellm.packed_linear
    torch.library.opcheck(operator, (x, weight.mask, weight.values, weight.row_starts), options)
    compiled_function = torch.compile(lambda x: kernels.packed_matmul(x * 2, weight) + 1, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled_function(x), kernels.packed_matmul(x * 2, weight) + 1)


def test_integers_and_their_scales_equal_a_dense_matrix() -> None:
    """The same numbers as a `Bitmask` of float32 values."""
    weight, x = random_weight(9, 200, 8, 64), random_tokens(4, 200, torch.float32)
    dense = Bitmask.from_dense(weight.to_dense())
    torch.testing.assert_close(kernels.packed_matmul(x, weight), kernels.packed_matmul(x, dense), rtol=1e-4, atol=1e-4)


def test_values_are_padded_for_the_widest_read() -> None:
    """A kernel reads 64 bytes at once."""
    assert VALUES_PADDING >= 64
