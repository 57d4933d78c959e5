"""The stored form of a weight: every bit survives, sizes are as computed by hand, and damaged parts are refused."""

from __future__ import annotations

import math
import zlib
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparsellm.checkpoints.tensor_index import TensorDigest
from sparsellm.errors import BadCheckpoint
from sparsellm.extensions.packed.formats.bitmask import DTYPES, VALUES_PADDING, Bitmask, bits_of
from sparsellm.extensions.packed.formats.encoding import PARTS, decode_parts, encode
from sparsellm.extensions.packed.formats.packed_tensors import decode_matrix, dense_tensor
from sparsellm.extensions.packed.packed_files import NUMBERS_A_BYTE, PackedEntry, can_hold
from sparsellm.extensions.packed.packing import _Form
from sparsellm.outputs.sizes import estimated_bytes
from tests.meter import start_peak, status_of

SPECIAL = {
    2: [0x8000, 0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x0001, 0x8001, 0x7C00, 0x7C01, 0xFC00, 0x3C00, 0x3F80],
    4: [1 << 31, 0x7F800000, 0xFF800000, 0x7FC00001, 0xFFFFFFFF, 1, 0x80000001, 0x3F800000],
}
"""Bits of -0.0, infinities, NaN with payloads, subnormal numbers and 1, by the bytes of a number."""


def random_weight(random: Random) -> Tensor:
    """A weight of any shape, dtype, density and range, with special numbers and rows that are empty or full."""
    rows, columns = random.choice([(1, 1), (1, 9), (3, 64), (7, 65), (16, 24), (5, 127), (33, 40), (2, 1000)])
    dtype = random.choice(DTYPES)
    generator = torch.Generator().manual_seed(random.randrange(2**32))
    weight = torch.randn(rows, columns, generator=generator) * 10.0 ** random.randint(-6, 4)
    kind = random.choice(["normal", "constant", "bits"])
    if kind == "constant":
        weight[:] = weight[0, 0]
    weight = weight.to(random.choice(DTYPES)).to(dtype)  # float32 that holds 16-bit numbers, too
    bits = bits_of(weight)
    if kind == "bits":
        limits = torch.iinfo(bits.dtype)
        bits.copy_(torch.randint(limits.min, limits.max + 1, bits.shape, generator=generator))
    for number in random.sample(SPECIAL[weight.element_size()], random.randint(0, 4)):
        signed = number - (1 << 8 * weight.element_size()) if number >> 8 * weight.element_size() - 1 else number
        bits[random.randrange(rows), random.randrange(columns)] = signed
    weight[torch.rand(rows, columns, generator=generator) < random.choice([0, 0.3, 0.5, 0.7, 0.9, 0.99, 1])] = 0
    if random.random() < 0.2:
        weight[random.randrange(rows)] = random.choice([0, 1])
    return weight


def size(parts: dict[str, Tensor]) -> int:
    """Bytes of all parts."""
    return sum(part.numel() for part in parts.values())


@settings(max_examples=1000, derandomize=True, database=None, deadline=None)
@given(st.randoms(use_true_random=True))
def test_every_bit_of_a_thousand_weights_survives(random: Random) -> None:
    """What is decoded from both forms has the bits of the weight, and is the bitmask form of it."""
    weight = random_weight(random)
    expected = Bitmask.from_dense(weight)
    for archive in (False, True):
        parts = encode(weight, archive)
        assert all(part.dtype == torch.uint8 and part.dim() == 1 for part in parts.values())
        assert "weight" in parts
        assert set(parts) <= set(PARTS)
        decoded = decode_parts(parts, (weight.shape[0], weight.shape[1]), weight.dtype)
        assert torch.equal(bits_of(decoded.to_dense()), bits_of(weight))
        assert decoded.shape == expected.shape
        assert torch.equal(decoded.mask, expected.mask)
        assert torch.equal(decoded.row_starts, expected.row_starts)
        assert torch.equal(bits_of(decoded.values), bits_of(expected.values))
        assert len(decoded.values) == expected.kept + VALUES_PADDING


def test_large_weights_are_decoded_across_chunks() -> None:
    """More kept numbers than are decoded at a time, with escapes in each chunk."""
    generator = torch.Generator().manual_seed(0)
    for dtype in DTYPES:
        weight = (torch.randn(700, 701, generator=generator) * torch.logspace(-6, 3, 701)).to(dtype)
        weight[torch.rand(weight.shape, generator=generator) < 0.2] = 0
        parts = encode(weight)
        assert "weight_exponents" in parts
        assert torch.equal(bits_of(decode_parts(parts, (700, 701), dtype).to_dense()), bits_of(weight))


def test_parts_are_as_documented() -> None:
    """A small weight, encoded by hand: mask, groups, dictionary, codes, escapes, and sign with mantissa."""
    weight = torch.zeros(2, 36, dtype=torch.bfloat16)
    weight[0, 0], weight[0, 1], weight[0, 3], weight[1, 35] = 1.0, -1.5, 1.75, 1.25  # exponent 127
    parts = {name: part.tolist() for name, part in encode(weight).items()}
    assert parts == {
        "weight": [0, 0x80 | 64, 96, 32],
        "weight_groups": [1, 0, 2],  # groups 0 and 17 of 18
        "weight_mask": [0b1011 | 0b1000 << 4],
        "weight_dictionary": [127],
        "weight_codes": [0],
    }
    weight[1, 1] = 2.0**-100
    parts = {name: part.tolist() for name, part in encode(weight).items()}
    assert parts["weight_codes"] == [0b1000]  # the fourth of five kept numbers has another exponent
    assert parts["weight_exponents"] == [27]
    assert parts["weight"] == [0, 0x80 | 64, 96, 0, 32]


def test_float32_that_holds_shorter_numbers_is_stored_in_fewer_planes() -> None:
    """bfloat16 numbers in float32 take one byte beside the exponent, float16 numbers two, others three."""
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    for dtype, planes in [(torch.bfloat16, 1), (torch.float16, 2), (torch.float32, 3)]:
        assert encode(weight.to(dtype).float())["weight"].numel() == 64 * 64 * planes


def entropy(counts: Tensor) -> float:
    """Bits that each of many things takes at least, from how often each occurs."""
    shares = counts[counts > 0].double() / counts.sum()
    return float(-(shares * shares.log2()).sum())


@pytest.mark.parametrize("by_magnitude", [True, False])
@pytest.mark.parametrize(("sparsity", "most"), [(0.5, 7.0), (0.7, 4.6), (0.9, 2.2)])
def test_sizes_of_gaussian_weights(sparsity: float, most: float, by_magnitude: bool) -> None:
    """The plain form keeps to its bits a weight, and the archive form is near the entropy of mask, exponents and 8 bits."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(1024, 512, generator=generator) * 0.02
    scores = weight.abs() if by_magnitude else torch.rand(weight.shape, generator=generator)
    weight[scores < scores.flatten().kthvalue(int(sparsity * weight.numel())).values] = 0
    weight = weight.bfloat16()
    bits = bits_of(weight).int()
    kept = bits[bits != 0]
    density = len(kept) / bits.numel()
    mask = entropy(torch.tensor([len(kept), bits.numel() - len(kept)]))
    bound = mask + density * (8 + entropy(torch.bincount(kept >> 7 & 0xFF)))
    assert 8 * size(encode(weight)) / weight.numel() < most
    assert 8 * size(encode(weight, archive=True)) / weight.numel() < 1.03 * bound


@pytest.mark.parametrize("dtype", DTYPES)
def test_sizes_are_estimated_from_above(dtype: torch.dtype) -> None:
    """Of weights that are removed by their size, within 15 %."""
    for sparsity in (0.0, 0.1, 0.3, 0.5, 0.7, 0.8, 0.9):
        weight = torch.randn(512, 512, generator=torch.Generator().manual_seed(1)) * 0.02
        removed = math.ceil(sparsity * weight.numel())
        if removed:
            weight[weight.abs() <= weight.abs().flatten().kthvalue(removed).values] = 0
        stored = size(encode(weight.to(dtype))) if sparsity else weight.to(dtype).nbytes
        estimated = estimated_bytes(weight.numel(), removed, str(dtype).removeprefix("torch."))
        assert stored <= estimated < 1.15 * stored, sparsity


def mutate(parts: dict[str, Tensor], random: Random) -> dict[str, Tensor]:
    """The parts with one to three changes: bytes, lengths, dtypes, names, and parts that are missing or swapped."""
    parts = {name: part.clone() for name, part in parts.items()}
    for _ in range(random.randint(1, 3)):
        name = random.choice(sorted(parts))
        part = parts[name]
        kind = random.randrange(8)
        if kind <= 2 and part.dtype == torch.uint8 and part.numel():
            part.reshape(-1)[random.randrange(part.numel())] = random.randrange(256)
        elif kind == 3:
            parts[name] = part.reshape(-1)[: random.randrange(part.numel() + 1)]
        elif kind == 4:
            more = torch.randint(0, 256, (random.randint(1, 300),), generator=torch.Generator().manual_seed(0))
            parts[name] = torch.cat([part.reshape(-1), more.to(part.dtype)])
        elif kind == 5:
            parts[random.choice(PARTS)] = parts.pop(name)
        elif kind == 6:
            parts[random.choice([*PARTS, "weight_rows"])] = part
        else:
            change = random.choice([lambda x: x.long(), lambda x: x[None], lambda x: x.to(torch.int8), lambda x: x.bool()])
            parts[name] = change(part)
    return parts


@settings(max_examples=600, derandomize=True, database=None, deadline=None)
@given(st.randoms(use_true_random=True))
def test_damaged_parts_are_refused_in_one_sentence(random: Random) -> None:
    """Decoding raises nothing but BadCheckpoint; what it accepts is a sound bitmask of that shape."""
    weight = random_weight(random)
    shape = (weight.shape[0], weight.shape[1])
    parts = mutate(encode(weight, random.random() < 0.5), random)
    if random.random() < 0.2:
        shape = random.choice([(shape[0] + 1, shape[1]), shape[::-1], (1, 1)])
    try:
        decoded = decode_parts(parts, shape, random.choice([weight.dtype, torch.float32]))
    except BadCheckpoint as error:
        text = str(error)
        assert text.endswith(".")
        assert "\n" not in text
        assert len(text) < 300
    else:
        assert decoded.to_dense().shape == shape
        assert int(np.bitwise_count(decoded.mask.numpy()).sum()) == decoded.kept == int(decoded.row_starts[-1])


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"weight": torch.zeros(3, dtype=torch.uint8)}, "^weight "),
        ({"weight_mask": torch.zeros(2, dtype=torch.uint8)}, "^weight_mask "),
        ({"weight_mask": torch.tensor([0xFB], dtype=torch.uint8)}, "^weight "),
        ({"weight_dictionary": torch.zeros(2, dtype=torch.uint8)}, "^weight_dictionary "),
        ({"weight_exponents": torch.zeros(1, dtype=torch.uint8)}, "^weight_exponents "),
        ({"weight": torch.zeros(2, 2)}, "^weight .*float32"),
        ({"weight_rows": torch.zeros(1, dtype=torch.uint8)}, "^weight_rows "),
        ({"weight_codes_deflated": torch.zeros(9, dtype=torch.uint8)}, "^weight_codes_deflated "),
    ],
)
def test_messages_of_damaged_parts(change: dict[str, Tensor], named: str) -> None:
    """Each check says which part is wrong."""
    weight = torch.zeros(2, 36, dtype=torch.bfloat16)
    weight[0, 0], weight[0, 1], weight[0, 3], weight[1, 35] = 1.0, -1.5, 1.75, math.pi / 3
    with pytest.raises(BadCheckpoint, match=named):
        decode_parts(encode(weight) | change, (2, 36), torch.bfloat16)


def test_decompression_is_bounded() -> None:
    """A small zlib stream of many zeros, which is no Huffman code of so many bits, is refused before they are allocated."""
    bomb = torch.frombuffer(bytearray(zlib.compress(bytes(10**8), 9)), dtype=torch.uint8)
    with pytest.raises(BadCheckpoint, match="weight_mask_deflated"):
        decode_parts({"weight": torch.zeros(0, dtype=torch.uint8), "weight_mask_deflated": bomb}, (2, 36), torch.bfloat16)


@pytest.mark.parametrize("archive", [False, True])
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.99, 1.0])
def test_stored_bytes_bound_the_numbers(archive: bool, sparsity: float) -> None:
    """No weight has more numbers for its bytes than are accepted, not even one without any kept number."""
    weight = torch.randn(64, 4096, generator=torch.Generator().manual_seed(1))
    weight[torch.rand(weight.shape, generator=torch.Generator().manual_seed(2)) < sparsity] = 0
    parts = encode(weight, archive)
    assert weight.numel() <= NUMBERS_A_BYTE * size(parts)
    assert torch.equal(decode_parts(parts, (64, 4096), weight.dtype).to_dense(), weight)


@pytest.mark.parametrize("columns", [1, 3, 63, 65])
def test_rows_that_decoding_widens_are_bounded_by_the_bytes(columns: int) -> None:
    """Rows become whole groups of 64 columns: of few stored numbers, so many rows would take far more than the tensor."""
    most = (2**25 + 8 * 100_000) // (-columns % 64)
    if most * columns <= 64 * 100_000:
        assert can_hold(100_000, (most, columns))
    assert not can_hold(100_000, (max(most, 64 * 100_000 // columns) + 1, columns))
    assert can_hold(columns * 10**7, (10**7, columns)) == (columns > 7)  # a byte for each number
    assert can_hold(100_000, (64 * 100_000 // 64, 64))


def test_what_could_not_be_read_again_is_not_packed() -> None:
    """A column of a million numbers, all of them removed, which an archive would hold in 16 KiB."""
    tensor = torch.zeros(2**20, 1)
    digest = TensorDigest("float32", tuple(tensor.shape), "", True, 2**20, 0)
    form = _Form(True, False, False, values={}, digests={"x": digest}, vocabulary=None)
    assert form.encode("x", tensor) == ({"x": tensor}, None)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux, which says what was held at most")
@pytest.mark.parametrize("shape", [(500_000, 1), (100_000, 3), (1, 4_000_000), (60_000, 65)])
@pytest.mark.parametrize("bits", [None, 4])
def test_decoding_takes_little_more_than_the_tensor(bits: int | None, shape: tuple[int, int]) -> None:
    """Whatever its rows are, from 70 KiB of parts."""
    rows = shape[0]
    parts = encode(torch.zeros(shape, dtype=torch.bfloat16), archive=True)
    more = torch.zeros(2 * rows, dtype=torch.uint8) if bits else torch.zeros(0, dtype=torch.uint8)
    if bits:
        parts = {"weight": parts["weight"], "weight_mask_deflated": parts["weight_mask_deflated"], "weight_scales": more}
    entry = PackedEntry(shape, "bfloat16", "", bits)
    before = start_peak()
    tensor = dense_tensor(decode_matrix(parts, entry), entry)
    taken = status_of("VmHWM") - before - more.nbytes
    assert not tensor.any()
    assert taken <= tensor.nbytes + 48 * 2**20
