"""The kernels against a loop over rows, for each instruction set of this machine."""

from __future__ import annotations

import math
import multiprocessing
import os
import shlex
import shutil
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from unittest import mock

import pytest
import torch
from torch import Tensor

from sparsellm.extensions.packed.formats import kernel_library, kernels
from sparsellm.extensions.packed.formats.bitmask import VALUES_PADDING, Bitmask
from sparsellm.runtime import native
from tests.guard_pages import before_guard_page

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
compiled = pytest.mark.skipif(kernels.instruction_set() is None, reason="the kernels are not compiled: python hatch_build.py")
SETS = kernels.instruction_sets() or [pytest.param("", marks=compiled)]


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    if kernels.instruction_set():
        kernels.load_kernels().is_chosen = False


def random_weight(rows: int, columns: int, dtype: torch.dtype, *, sparsity: float = 0.6, seed: int = 0) -> Tensor:
    """A matrix with zeros, of which row 1 is empty and row 2 full."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator).to(dtype)
    weight[torch.rand(rows, columns, generator=generator) < sparsity] = 0
    weight[1:2] = 0
    weight[2:3] = 1.5
    return weight


def random_tokens(tokens: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(tokens, columns, generator=torch.Generator().manual_seed(tokens)).to(dtype)


def slow_product(x: Tensor, weight: Tensor) -> Tensor:
    """Row by row and token by token, in float64."""
    rows = [[(token.double() * row.double()).sum() for row in weight] for token in x]
    return torch.tensor(rows, dtype=torch.float64).reshape(len(x), len(weight))


def check(result: Tensor, x: Tensor, weight: Tensor) -> None:
    """A float32 sum is off by less than its terms' sum times 2^-18; the result is rounded to x's dtype."""
    expected = slow_product(x, weight)
    terms = slow_product(x.abs(), weight.abs())
    assert result.dtype is x.dtype
    assert result.shape == expected.shape
    bound = terms * 2**-18 + expected.abs() * torch.finfo(x.dtype).eps + torch.finfo(x.dtype).tiny
    assert ((result.double() - expected).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETS)
@compiled
def test_products_equal_a_slow_loop(name: str, dtype: torch.dtype) -> None:
    """Odd widths, an empty row, a full row, each number of tokens, each type of x."""
    kernels.load_kernels().use(name)
    for rows, columns in ((1, 1), (3, 7), (6, 63), (5, 64), (4, 65), (9, 200)):
        weight = random_weight(rows, columns, dtype, seed=columns)
        packed = Bitmask.from_dense(weight)
        assert torch.equal(kernels.decode_rows(packed), weight)
        assert torch.equal(kernels.decode_rows(packed, 1, rows), weight[1:])
        for tokens in (*range(10), 16):
            for x_dtype in DTYPES:
                x = random_tokens(tokens, columns, x_dtype)
                check(kernels.packed_matmul(x, packed), x, weight)


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_tokens_are_multiplied_by_tiles(dtype: torch.dtype) -> None:
    """Also without the library, which is said once; tiles do not divide the rows."""
    weight = random_weight(11, 70, dtype)
    x = random_tokens(33, 70, torch.float32)
    bias = torch.randn(11)
    expected = slow_product(x, weight) + bias.double()
    for library in ("compiled", None):
        with (
            mock.patch.object(kernels, "TILE", 300),
            mock.patch.object(kernels, "load_kernels", kernels.load_kernels if library else lambda: None),
            warnings.catch_warnings(record=True) as messages,
        ):
            warnings.simplefilter("always")
            kernels.warn_missing.cache_clear()
            for tokens in (x, x[:2], x.view(3, 11, 70)):
                result = kernels.packed_matmul(tokens, Bitmask.from_dense(weight), bias)
                assert result.shape == (*tokens.shape[:-1], 11)
                torch.testing.assert_close(result.view(-1, 11).double(), expected[: result.numel() // 11], atol=1e-4, rtol=1e-4)
            assert library or len(messages) == 1
            assert library or "C compiler" in str(messages[0].message)


@pytest.mark.parametrize("name", SETS)
@compiled
def test_bias_is_added_before_rounding(name: str) -> None:
    kernels.load_kernels().use(name)
    for dtype in DTYPES:
        weight, x = torch.full((3, 64), 1.0).to(dtype), torch.full((1, 64), 4.0).to(dtype)
        bias = torch.tensor([1.0, 0.25, -256.0]).to(dtype)
        expected = torch.tensor([[257.0, 256.25, 0.0]]).to(dtype)
        assert torch.equal(kernels.packed_matmul(x, Bitmask.from_dense(weight), bias), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETS)
@compiled
def test_special_numbers_behave_as_in_a_dense_product(name: str, dtype: torch.dtype) -> None:
    """NaN and infinities spread as in the dense product, also through weights that are zero."""
    kernels.load_kernels().use(name)
    weight = random_weight(8, 130, dtype)
    weight[3, 5], weight[4, 129], weight[5, 64], weight[6, 0], weight[7] = math.nan, math.inf, -math.inf, -0.0, -0.0
    packed = Bitmask.from_dense(weight)
    assert packed.kept == int((weight != 0).sum()) + 131
    for x_dtype in DTYPES:
        x = random_tokens(4, 130, x_dtype)
        x[1, 70], x[2, 129], x[3, 0] = math.nan, -math.inf, math.inf
        result, expected = kernels.packed_matmul(x, packed), slow_product(x, weight)
        for kind in (torch.isnan, torch.isposinf, torch.isneginf):
            assert torch.equal(kind(result), kind(expected))
        assert torch.equal(kernels.decode_rows(packed).view(torch.uint8), weight.view(torch.uint8))


@pytest.fixture
def pool() -> Iterator[None]:
    """The library's own threads instead of OpenMP's."""
    library = native.load_library()
    library.sparsellm_use_openmp(None)
    yield
    library.sparsellm_use_openmp(kernel_library.openmp_start())


@compiled
def test_the_threads_are_those_of_torch() -> None:
    """Where torch's parallel backend is the OpenMP library of GCC."""
    if "parallel backend: OpenMP" not in torch.__config__.parallel_info():
        pytest.skip("this torch does not use OpenMP")
    assert kernel_library.openmp_start()
    code = "import os, torch; from sparsellm.extensions.packed.formats import kernels; "
    code += "from sparsellm.extensions.packed.formats.bitmask import Bitmask; "
    code += "torch.set_num_threads(3); torch.ones(10**6).exp(); x = Bitmask.from_dense(torch.ones(800, 256)); "
    code += "count = lambda: len(os.listdir('/proc/self/task')); "
    code += "before = count(); kernels.packed_matmul(torch.ones(1, 256), x); print(count() - before)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0"


@pytest.mark.parametrize("threads_of", ["OpenMP", "pool"])
@pytest.mark.parametrize("name", SETS)
@compiled
def test_bits_do_not_depend_on_threads(name: str, threads_of: str, request: pytest.FixtureRequest) -> None:
    """Nor on a call from another thread at the same time, which then works alone."""
    if threads_of == "pool":
        request.getfixturevalue("pool")
    kernels.load_kernels().use(name)
    packed = Bitmask.from_dense(random_weight(401, 320, torch.bfloat16))
    x = random_tokens(3, 320, torch.bfloat16)
    torch.set_num_threads(1)
    expected = {dtype: kernels.packed_matmul(x.to(dtype), packed) for dtype in DTYPES}
    results: list[tuple[torch.dtype, Tensor]] = []

    def repeat() -> None:
        results.extend((dtype, kernels.packed_matmul(x.to(dtype), packed)) for dtype in DTYPES * 10)

    for count in (2, 3):
        torch.set_num_threads(count)
        callers = [Thread(target=repeat) for _ in range(2)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        assert torch.equal(kernels.decode_rows(packed), packed.to_dense())
    assert len(results) == 120
    assert all(torch.equal(result, expected[dtype]) for dtype, result in results)


@compiled
def test_forked_processes_have_their_own_threads() -> None:
    torch.set_num_threads(2)
    packed = Bitmask.from_dense(random_weight(800, 256, torch.bfloat16))
    x = random_tokens(1, 256, torch.bfloat16)
    expected = kernels.packed_matmul(x, packed)
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()

    def child() -> None:
        queue.put([torch.equal(kernels.packed_matmul(x, packed), expected) for _ in range(3)])

    process = context.Process(target=child)
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert queue.get() == [True] * 3
    assert torch.equal(kernels.packed_matmul(x, packed), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", SETS)
@compiled
def test_nothing_behind_the_buffers_is_read(name: str, dtype: torch.dtype) -> None:
    kernels.load_kernels().use(name)
    for rows, columns, sparsity in ((1, 1, 0.0), (5, 64, 0.0), (7, 100, 0.5), (9, 333, 0.95), (4, 4096, 0.0)):
        weight = random_weight(rows, columns, dtype, sparsity=sparsity)
        parts = Bitmask.from_dense(weight)
        packed = Bitmask(parts.shape, *(before_guard_page(part) for part in (parts.mask, parts.values, parts.row_starts)))
        assert torch.equal(kernels.decode_rows(packed), weight)
        for tokens in (1, 3, 8):
            x = before_guard_page(random_tokens(tokens, columns, dtype))
            bias = before_guard_page(torch.zeros(rows, dtype=dtype))
            check(kernels.packed_matmul(x, packed, bias), x, weight)
        if dtype is torch.bfloat16:
            dense = before_guard_page(weight)
            x = before_guard_page(random_tokens(2, columns, dtype))
            check(kernels.dense_matmul(x, dense), x, weight)


@pytest.mark.parametrize("name", SETS)
@compiled
def test_dense_products_equal_a_slow_loop(name: str) -> None:
    kernels.load_kernels().use(name)
    for rows, columns in ((1, 1), (6, 63), (5, 64), (9, 200)):
        weight = random_weight(rows, columns, torch.bfloat16, sparsity=0)
        for tokens in (1, 2, 3, 8):
            for dtype in DTYPES:
                x = random_tokens(tokens, columns, dtype)
                check(kernels.dense_matmul(x, weight), x, weight)


@pytest.mark.parametrize("name", SETS)
@compiled
def test_operator_is_what_compiled_code_calls(name: str) -> None:
    """torch checks the operator's schema and its results without data."""
    kernels.load_kernels().use(name)
    weight = random_weight(6, 130, torch.bfloat16)
    packed = Bitmask.from_dense(weight)
    x = random_tokens(3, 130, torch.bfloat16).view(3, 1, 130)
    arguments = (x, packed.mask, packed.values, packed.row_starts)
    operator = torch.ops.sparsellm.packed_linear
    torch.library.opcheck(operator, arguments, {"columns": 130, "bias": x[0, 0, :6]})
    compiled_function = torch.compile(lambda x: kernels.packed_matmul(x * 2, packed) + 1, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled_function(x), kernels.packed_matmul(x * 2, packed) + 1)


@compiled
def test_library_of_another_version_is_not_used() -> None:
    def forget() -> None:
        native.load_library.cache_clear()
        kernels.load_kernels.cache_clear()

    with mock.patch.object(native, "LIBRARY_VERSION", 0):
        forget()
        assert kernels.instruction_set() is None
    forget()
    assert kernels.instruction_set() in kernels.instruction_sets()


def test_values_are_padded_for_the_widest_read() -> None:
    """A kernel reads 64 bytes at once."""
    assert VALUES_PADDING * 2 >= 64


@pytest.mark.long
@pytest.mark.parametrize(
    ("compiler", "flags", "emulator", "expected"),
    [
        ("gcc", ["-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"], "", ()),
        ("aarch64-linux-gnu-gcc", ["-static"], "qemu-aarch64 -cpu cortex-a53", ("portable", "neon")),
        ("aarch64-linux-gnu-gcc", ["-static"], "qemu-aarch64 -cpu max", ("portable", "neon", "neon_dotprod")),
    ],
    ids=["sanitizers", "neon", "neon_dotprod"],
)
def test_program_without_python_agrees_with_a_loop(
    compiler: str, flags: list[str], emulator: str, expected: tuple[str, ...], tmp_path: Path
) -> None:
    """With checks of addresses and undefined behavior on this processor, and on others that are emulated."""
    emulation = shlex.split(emulator)
    for program in (compiler, *emulation[:1]):
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}")
    program, source = tmp_path / "check", Path(__file__).with_name("kernels_check.c")
    folder = native.LIBRARY.parent
    if not emulator:
        flags = [*flags, *shlex.split(os.environ.get("CFLAGS", ""))]  # as hatch_build.py: the same instruction sets
    command = [compiler, "-O1", "-Wall", "-Werror", *flags, f"-I{folder}", "-pthread", "-o", str(program), str(source), "-lm"]
    subprocess.run(command, check=True)
    done = subprocess.run([*emulation, program], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    names = done.stdout.split()
    assert names == ([*expected] or [*kernels.instruction_sets()] or names)
