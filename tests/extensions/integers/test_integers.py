"""Formats of integers: their names, limits and groups, and what they take in a packed file."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparsellm.errors import InvalidSetting
from sparsellm.extensions.integers.formats import BITS_OF, GROUP_SIZES, WIDTHS, IntegerFormat
from sparsellm.extensions.integers.quantization import Scales, round_to_nearest
from sparsellm.extensions.packed.formats.bitmask import Bitmask
from sparsellm.extensions.packed.formats.encoding import encode


def sparse(rows: int, columns: int, density: float) -> Tensor:
    """A random weight with zeros."""
    generator = torch.Generator().manual_seed(rows)
    keep = torch.rand(rows, columns, generator=generator) < density
    return torch.randn(rows, columns, generator=generator) * keep


@pytest.mark.parametrize("name", BITS_OF)
def test_names_are_read_and_written(name: str) -> None:
    assert IntegerFormat.parse(name, 128, 0.5).name == name
    assert IntegerFormat.parse(name, None, 0.5) == IntegerFormat.default(BITS_OF[name], 0.5)
    assert str(IntegerFormat(BITS_OF[name], 0)) == f"{name} in whole rows"
    assert str(IntegerFormat(BITS_OF[name], 64)) == f"{name} in groups of 64 columns"


@pytest.mark.parametrize(("name", "group_size"), [("int5", None), ("int16", 0), ("int4", 63), ("int4", -64), ("int8", 2**31)])
def test_other_formats_are_refused(name: str, group_size: int | None) -> None:
    with pytest.raises(InvalidSetting, match="got"):
        IntegerFormat.parse(name, group_size, 1.0)


@pytest.mark.parametrize(("density", "group_size"), [(1.0, 128), (0.5, 256), (0.3, 512), (0.0, 2**17)])
def test_a_group_has_about_as_many_kept_weights_at_every_density(density: float, group_size: int) -> None:
    assert [IntegerFormat.default(bits, density).group_size for bits in WIDTHS] == [group_size, group_size, 0]
    assert group_size in GROUP_SIZES


def test_limits_are_those_of_the_bits_that_are_stored() -> None:
    assert [IntegerFormat(bits, 0).limits(1.0) for bits in WIDTHS] == [(-4, 3), (-8, 7), (-127, 127)]
    assert [IntegerFormat(bits, 0).limits(0.5) for bits in WIDTHS] == [(-4, 4), (-8, 7), (-127, 127)]


@pytest.mark.parametrize("bits", WIDTHS)
@pytest.mark.parametrize("density", [0.05, 0.3, 0.7, 1.0])
def test_bits_of_a_weight_are_those_that_it_takes(bits: int, density: float) -> None:
    """Of a file with its form, to the bit."""
    for rows, columns in ((3, 70), (64, 128), (33, 200)):
        weight = sparse(rows, columns, density)
        quantized = round_to_nearest(weight, IntegerFormat(bits, 64), mask=weight != 0)
        parts = encode(Bitmask.from_quantized(quantized, quantized.integers != 0))
        stored = 8 * sum(part.numel() for part in parts.values())
        assert quantized.format.packed_bits(quantized.to_dense()) * weight.numel() == pytest.approx(stored, abs=1e-6)


@pytest.mark.parametrize("shape", [(1, 2), (3, 2), (4, 1), (4, 3)], ids=str)
def test_scales_of_another_weight_are_none_of_a_weight(shape: tuple[int, int]) -> None:
    """One row or one group of them would have been repeated."""
    weight = torch.ones(4, 100)
    assert Scales(torch.ones(4, 2).bfloat16(), IntegerFormat(4, 64)).quantized(weight) is not None
    assert Scales(torch.ones(shape).bfloat16(), IntegerFormat(4, 64)).quantized(weight) is None
