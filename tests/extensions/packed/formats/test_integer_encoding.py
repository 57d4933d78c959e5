"""The stored form of quantized weights: every integer and scale survives, sizes are as computed, damaged parts are refused."""

from __future__ import annotations

import zlib
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparsellm.errors import BadCheckpoint
from sparsellm.extensions.integers.formats import IntegerFormat
from sparsellm.extensions.integers.quantization import Quantized, round_to_nearest
from sparsellm.extensions.packed.formats.bitmask import Bitmask
from sparsellm.extensions.packed.formats.encoding import PARTS, decode_parts, encode
from tests.extensions.packed.formats.test_encoding import mutate, size

SHAPES = [(1, 1), (1, 9), (3, 64), (7, 65), (16, 24), (5, 127), (33, 40), (2, 1000)]


def random_weight(random: Random) -> Bitmask:
    """A weight of any shape, format and density, with zeros among the kept integers, and rows that are empty or full."""
    shape, bits, group_size = random.choice(SHAPES), random.choice((8, 4, 3)), random.choice((0, 64, 128))
    generator = torch.Generator().manual_seed(random.randrange(2**32))
    least, largest = IntegerFormat(bits, 0).limits(random.choice((0, 1)))
    integers = torch.randint(least, largest + 1, shape, dtype=torch.int8, generator=generator)
    keep = torch.rand(shape, generator=generator) >= random.choice([0, 0, 0.3, 0.5, 0.7, 0.9, 0.99, 1])
    if random.random() < 0.3:
        keep[random.randrange(shape[0])] = random.choice([False, True])
    scales = torch.randn(shape[0], IntegerFormat(bits, group_size).groups(shape[1]), generator=generator).bfloat16()
    return Bitmask.from_quantized(Quantized(integers * keep, scales, IntegerFormat(bits, group_size)), keep=keep)


def decoded(parts: dict[str, Tensor], weight: Bitmask) -> Bitmask:
    """What the parts of a weight decode to."""
    return decode_parts(parts, weight.shape, torch.bfloat16, weight.format)


@settings(max_examples=500, derandomize=True, database=None, deadline=None)
@given(st.randoms(use_true_random=True))
def test_every_integer_and_scale_survives(random: Random) -> None:
    weight = random_weight(random)
    for archive in (False, True):
        parts = encode(weight, archive)
        assert all(part.dtype == torch.uint8 and part.dim() == 1 for part in parts.values())
        assert "weight" in parts
        assert set(parts) <= set(PARTS)
        again = decoded(parts, weight)
        assert torch.equal(again.to_integers(), weight.to_integers())
        assert torch.equal(again.scales, weight.scales)
        has_mask = not parts.keys().isdisjoint({"weight_mask", "weight_mask_deflated", "weight_groups"})
        assert has_mask or again.kept == weight.shape[0] * weight.shape[1]
        if has_mask and weight.format.bits == 3:
            assert again.kept == int(weight.to_integers().count_nonzero())
        elif has_mask:
            assert torch.equal(again.mask, weight.mask)


def test_parts_are_as_documented() -> None:
    """A small weight, encoded by hand."""
    integers = torch.zeros(2, 36, dtype=torch.int8)
    integers[0, 0], integers[0, 1], integers[1, 35] = 3, -3, -1
    keep = integers != 0
    keep[0, 3] = True
    scales = torch.tensor([[1.0], [-2.5]], dtype=torch.bfloat16)  # 0x3F80, 0xC020
    integers[0, 0] = 4
    expected = {
        8: [4, 256 - 3, 0, 255],
        4: [4 | 13 << 4, 0 | 15 << 4],
        3: [0b111, 0b101, 0b110],  # planes of 4 - 1, 5 and 7; the kept 0 is not stored
    }
    for bits, numbers in expected.items():
        weight = Bitmask.from_quantized(Quantized(integers, scales, IntegerFormat(bits, 0)), keep=keep)
        assert {name: part.tolist() for name, part in encode(weight).items()} == {
            "weight": numbers,
            "weight_groups": [1, 0, 2],
            "weight_mask": [(0b0011 if bits == 3 else 0b1011) | 0b1000 << 4],
            "weight_scales": [0x80, 0x20, 0x3F, 0xC0],
        }


@pytest.mark.parametrize("bits", [8, 4, 3])
@pytest.mark.parametrize("density", [1.0, 0.5, 0.3, 0.1])
def test_sizes_are_those_of_the_formula(bits: int, density: float) -> None:
    """Of a Gaussian matrix; an archive is never larger."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(256, 1024, generator=generator)
    keep = torch.rand(weight.shape, generator=generator) < density
    group_size = 0 if bits == 8 else 128
    rounded = round_to_nearest(weight, IntegerFormat(bits, group_size), mask=keep)
    if density < 1:
        keep = rounded.integers != 0
        density = float(keep.float().mean())
    quantized = Bitmask.from_quantized(rounded, keep=keep)
    stored = 8 * size(encode(quantized)) / weight.numel()
    assert stored == pytest.approx(rounded.format.bits_per_weight(density, 1024), rel=0.01)
    assert 8 * size(encode(quantized, archive=True)) / weight.numel() < stored


@settings(max_examples=500, derandomize=True, database=None, deadline=None)
@given(st.randoms(use_true_random=True))
def test_damaged_parts_are_refused_or_decode_to_a_weight(random: Random) -> None:
    """Nothing else is raised, and what is decoded has the shape and integers of its bits."""
    weight = random_weight(random)
    parts = mutate(encode(weight, random.random() < 0.5), random)
    try:
        again = decoded(parts, weight)
    except BadCheckpoint as error:
        text = str(error)
        assert text.endswith(".")
        assert "\n" not in text
    else:
        assert again.to_dense().shape == weight.shape
        assert -(2 ** (weight.format.bits - 1)) <= int(again.to_integers().min())
        assert int(again.to_integers().max()) <= 2 ** (weight.format.bits - 1) - (weight.format.bits != 3)


def deflated(*content: int) -> dict[str, list[int]]:
    """Integers as an archive holds them; only there can those of 3 bits, which take 4, be outside of their range."""
    return {"weight": [], "weight_deflated": list(zlib.compress(bytes(content)))}


@pytest.mark.parametrize(
    ("bits", "changes", "named"),
    [
        (4, {"weight": [1, 1]}, "^weight "),
        (4, {"weight_deflated": [1]}, "weight_deflated"),
        (4, {"weight_scales": [0x80, 0x80, 0x7F, 0x3F]}, "^weight_scales .*NaN"),
        (4, {"weight_scales": [0, 0]}, "^weight_scales "),
        (4, {"weight_mask": [255]}, "^weight_mask "),
        (8, {"weight": [128, 0]}, "^weight .*-127 to 127"),
        (3, deflated(0x45), "^weight .*-4 to 3"),
    ],
)
def test_damage_is_one_message(bits: int, changes: dict[str, list[int]], named: str) -> None:
    integers = torch.tensor([[1], [2]], dtype=torch.int8)
    weight = Bitmask.from_quantized(Quantized(integers, torch.ones(2, 1).bfloat16(), IntegerFormat(bits, 0)))
    parts = encode(weight) | {name: torch.tensor(part, dtype=torch.uint8) for name, part in changes.items()}
    with pytest.raises(BadCheckpoint, match=named):
        decoded(parts, weight)
