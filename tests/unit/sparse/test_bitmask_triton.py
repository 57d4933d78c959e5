"""The kernel of the bitmask form against a dense product, by Triton's interpreter (see `tests`) or on a GPU if there is one."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor

from sparsellm.sparse import bitmask_triton
from sparsellm.sparse.bitmask import Bitmask
from sparsellm.sparse.bitmask_triton import MAX_TOKENS, SEGMENT, matmul, segment_starts
from tests.conftest import long_unless

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

pytestmark = pytest.mark.skipif(bitmask_triton.triton is None, reason="Triton is not installed: it has wheels for Linux only")


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
    packed = Bitmask.from_dense(weight)
    return matmul(x, packed, segment_starts(packed))


@pytest.mark.parametrize(
    ("shape", "tokens"),
    [
        long_unless(number % 3 == place, shape, tokens)
        for number, shape in enumerate([(1, 1), (5, 31), (6, 33), (9, SEGMENT), (3, SEGMENT + 1), (11, 2 * SEGMENT + 65)])
        for place, tokens in enumerate((1, 3, MAX_TOKENS))
    ],
)
@pytest.mark.parametrize("sparsity", [0.5, 0.9])
def test_products_equal_those_of_the_decoded_weight(shape: tuple[int, int], tokens: int, sparsity: float) -> None:
    weight, x = pruned(shape, sparsity), inputs(tokens, shape[1])
    torch.testing.assert_close(product(x, weight), x @ Bitmask.from_dense(weight).to_dense().T, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bit_products_are_summed_in_float32(dtype: torch.dtype) -> None:
    """Rounded once: the result is the nearest 16-bit number to a float64 sum, or one beside it."""
    weight, x = pruned((8, 3 * SEGMENT), 0.5, dtype), inputs(2, 3 * SEGMENT, dtype)
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
    weight, x = pruned((4, 40), 0.5), inputs(MAX_TOKENS + 1, 40)
    monkeypatch.setattr(bitmask_triton, "_kernel", None)
    torch.testing.assert_close(product(x, weight), x @ weight.T)


def test_segments_start_after_the_values_before_them() -> None:
    weight = pruned((7, 2 * SEGMENT + 3), 0.6)
    counts = [[int((row[:stop] != 0).sum()) for stop in (0, SEGMENT, 2 * SEGMENT)] for row in weight]
    assert segment_starts(Bitmask.from_dense(weight)).tolist() == counts


def test_it_is_tried_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that cannot be compiled, or that answers wrongly, is not used."""
    assert bitmask_triton.passes_self_test(torch.device(DEVICE))
    assert not bitmask_triton.is_available(torch.device("cpu"))
    for broken in (lambda *_: 1 / 0, lambda x, *_: x):
        monkeypatch.setattr(bitmask_triton, "matmul", broken)
        assert not bitmask_triton.passes_self_test(torch.device(DEVICE))


COMPILED = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from sparsellm.sparse.bitmask_triton import MAX_TOKENS, ROWS_PER_PROGRAM, SEGMENT, _kernel
counts = ("outputs", "columns", "words_per_row", "segments", "tokens")
for dtype in ("*bf16", "*fp16", "*fp32"):
    types = dict.fromkeys(("x", "values", "y"), dtype) | dict.fromkeys(("words", "segment_starts"), "*i32")
    types |= {"row_starts": "*i64"} | dict.fromkeys(counts, "i32")
    fixed = dict(TOKENS=MAX_TOKENS, ROWS=ROWS_PER_PROGRAM, COLUMNS=SEGMENT)
    source = ASTSource(_kernel, {name: (types | dict.fromkeys(fixed, "constexpr"))[name] for name in _kernel.arg_names}, fixed)
    made = triton.compile(source, target=GPUTarget("cuda", 80, 32))
    print(len(made.asm["cubin"]) > 0)
"""


@pytest.mark.long
def test_the_kernel_compiles_for_a_gpu() -> None:
    """For a GPU of compute capability 8.0, which need not be there."""
    plain = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run([sys.executable, "-c", COMPILED], env=plain, check=True, capture_output=True, text=True)
    assert ran.stdout.split() == ["True", "True", "True"]
