"""Kernels of compressed sparse rows against a dense product, by Triton's interpreter (see `tests`) or on a GPU if it exists."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from sparsellm.extensions.packed.formats import csr_triton
from sparsellm.extensions.packed.formats.bitmask import VALUES_PADDING, Bitmask
from sparsellm.extensions.packed.formats.csr_triton import GROUP, GROUPS, MAX_CSR_TOKENS, CompressedRows, csr_matmul
from tests.conftest import long_unless

BLOCK = GROUP * GROUPS
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

pytestmark = pytest.mark.skipif(csr_triton.triton is None, reason="Triton is not installed: it has wheels for Linux only")


def pruned(shape: tuple[int, int], sparsity: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """A random (out, in) weight with about this fraction of zeros; its first row is empty and its last one full."""
    generator = torch.Generator().manual_seed(shape[1])
    weight = torch.randn(shape, generator=generator)
    weight[torch.rand(shape, generator=generator) < sparsity] = 0
    weight[0] = 0
    weight[-1] = torch.rand(shape[1], generator=generator) + 1
    return weight.to(DEVICE, dtype)


def inputs(tokens: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(tokens, columns, generator=torch.Generator().manual_seed(tokens)).to(DEVICE, dtype)


def product(x: Tensor, weight: Tensor) -> Tensor:
    """The product of the kernel."""
    return csr_matmul(x, CompressedRows.from_bitmask(Bitmask.from_dense(weight)))


@pytest.mark.parametrize(
    ("shape", "tokens"),
    [
        long_unless(number % 3 == place, shape, tokens)
        for number, shape in enumerate([(1, 1), (5, 31), (6, 33), (9, BLOCK), (3, BLOCK + 1), (11, 2 * BLOCK + 65)])
        for place, tokens in enumerate((1, 3, MAX_CSR_TOKENS))
    ],
)
@pytest.mark.parametrize("sparsity", [0.5, 0.9])
def test_products_equal_those_of_the_decoded_weight(shape: tuple[int, int], tokens: int, sparsity: float) -> None:
    weight, x = pruned(shape, sparsity), inputs(tokens, shape[1])
    torch.testing.assert_close(product(x, weight), x @ Bitmask.from_dense(weight).to_dense().T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_products_are_summed_in_float32(dtype: torch.dtype) -> None:
    """Rounded once: the result is the nearest 16-bit number to a float64 sum, or one beside it."""
    weight, x = pruned((8, 3 * BLOCK), 0.5, dtype), inputs(2, 3 * BLOCK, dtype)
    y = product(x, weight)
    assert y.dtype == dtype
    exact = (x.double() @ weight.double().T).to(dtype)
    torch.testing.assert_close(y, exact, rtol=torch.finfo(dtype).eps, atol=1e-4)


def test_removed_weights_do_not_meet_infinite_inputs() -> None:
    """A kept weight does: infinite inputs and NaN weights reach only the outputs that read them."""
    weight = torch.tensor([[0.0, 1.0, 2.0], [3.0, 0.0, 0.0], [float("nan"), 0.0, 1.0]], device=DEVICE)
    y = product(torch.tensor([[float("inf"), 1.0, 1.0]], device=DEVICE), weight)
    assert y[0, :2].tolist() == [3.0, float("inf")]
    assert y[0, 2].isnan()


def test_more_tokens_than_the_kernel_takes_are_multiplied_densely(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x = pruned((4, 40), 0.5), inputs(MAX_CSR_TOKENS + 1, 40)
    monkeypatch.setattr(csr_triton, "_product_kernel", None)
    torch.testing.assert_close(product(x, weight), x @ weight.T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (5, 31), (3, BLOCK + 1), (11, 2 * BLOCK + 65)])
def test_decoded_weights_have_the_bits_they_had(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = pruned(shape, 0.6, dtype)
    weight[-1, 0] = -0.0
    packed = CompressedRows.from_bitmask(Bitmask.from_dense(weight))
    assert packed.to_dense().view(torch.uint8).equal(weight.view(torch.uint8))


@pytest.mark.parametrize(
    ("gap", "columns", "offsets", "first_columns"),
    [
        (200, 255, torch.uint8, torch.uint8),
        (255, 600, torch.uint8, torch.int16),
        (256, 600, torch.int16, torch.int16),
        (255, 50_000, torch.uint8, torch.int32),
        (40_000, 50_000, torch.int32, torch.int32),
    ],
)
def test_columns_take_one_byte_where_they_fit(
    gap: int, columns: int, offsets: torch.dtype, first_columns: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the columns of the weight itself, also if its rows are encoded one by one."""
    weight = torch.zeros(3, columns, device=DEVICE)
    weight[0, [1, 1 + gap]] = 1
    weight[2, : 3 * GROUP + 1] = 2
    one = CompressedRows.from_bitmask(Bitmask.from_dense(weight))
    assert (one.offsets.dtype, one.first_columns.dtype) == (offsets, first_columns)
    # The last row's first value is at position 2, so that its first group ends after GROUP - 2 values.
    assert one.first_columns.tolist() == [1, 0, GROUP - 2, 2 * GROUP - 2, 3 * GROUP - 2]
    assert one.group_starts.tolist() == [0, 1, 1]
    assert one.offsets.tolist() == [0, gap, *range(GROUP - 2), *range(GROUP), *range(GROUP), 0, 1, 2, *VALUES_PADDING * [0]]
    monkeypatch.setattr(csr_triton, "ENCODED_AT_ONCE", 1)
    other = CompressedRows.from_bitmask(Bitmask.from_dense(weight))
    assert all(torch.equal(a, b) for a, b in zip(one.parts, other.parts, strict=True))


def test_it_keeps_the_values_of_the_bitmask() -> None:
    """A layer on a GPU has them once; columns take 1.25 bytes a value."""
    bitmask = Bitmask.from_dense(pruned((16, 512), 0.5, torch.bfloat16))
    packed = CompressedRows.from_bitmask(bitmask)
    assert packed.values is bitmask.values
    columns = packed.first_columns.nbytes + packed.offsets.nbytes
    assert columns == pytest.approx(1.25 * bitmask.kept, rel=0.1)


def test_it_is_tried_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels that cannot be compiled, or that answer wrongly, are not used."""
    assert csr_triton.passes_self_test(torch.device(DEVICE))
    assert not csr_triton.is_available(torch.device("cpu"))
    for broken in (lambda *_: 1 / 0, lambda x, *_: x):
        with monkeypatch.context() as patch:
            patch.setattr(csr_triton, "csr_matmul", broken)
            assert not csr_triton.passes_self_test(torch.device(DEVICE))
    monkeypatch.setattr(CompressedRows, "to_dense", lambda self: self.values.new_zeros(self.shape))
    assert not csr_triton.passes_self_test(torch.device(DEVICE))


COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from sparsellm.extensions.packed.formats.csr_triton import GROUP, GROUPS, MAX_CSR_TOKENS, WARPS, _dense_kernel, _product_kernel
for kernel, own in ((_product_kernel, dict(TOKENS=MAX_CSR_TOKENS)), (_dense_kernel, {})):
    for dtype in ("*bf16", "*fp16", "*fp32"):
        for columns, offsets in (("*i16", "*u8"), ("*u8", "*i16"), ("*i32", "*i32")):
            types = dict.fromkeys(("x", "values", "y", "dense"), dtype) | dict.fromkeys(("outputs", "columns", "tokens"), "i32")
            types |= dict(row_starts="*i64", group_starts="*i32", first_columns=columns, offsets=offsets)
            fixed = dict(GROUP=GROUP, GROUPS=GROUPS) | own
            types |= dict.fromkeys(fixed, "constexpr")
            source = ASTSource(kernel, {name: types[name] for name in kernel.arg_names}, fixed)
            made = triton.compile(source, target=GPUTarget("cuda", 80, 32), options={"num_warps": WARPS})
            print(len(made.asm["cubin"]) > 0)
"""


@pytest.mark.long
def test_the_kernels_compile_for_a_gpu() -> None:
    """For a GPU of compute capability 8.0, which need not be there."""
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run([sys.executable, "-c", COMPILED], env=plain, check=True, capture_output=True, text=True)
    assert ran.stdout.split() == 18 * ["True"]
