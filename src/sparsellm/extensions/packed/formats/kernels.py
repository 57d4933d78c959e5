"""Products with bitmask matrices on a CPU, by the compiled library or, without it, by decoding rows for torch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from sparsellm.errors import InvalidSetting, dtype_name, plural
from sparsellm.extensions.integers.formats import IntegerFormat
from sparsellm.extensions.packed.formats.bitmask import DTYPES, Bitmask, is_aligned
from sparsellm.extensions.packed.formats.kernel_library import INSTRUCTION_SETS, TYPES, Library, load_kernels, warn_missing
from sparsellm.runtime.autotuning import Computation, speedup

MAX_TOKENS = 16
"""Tokens up to which the kernels may multiply. From there on, torch's product with decoded rows takes less time."""

PACKED_TOKENS, DENSE_TOKENS = (1, 4, 8, MAX_TOKENS), (1, 4, 8)
"""Numbers of tokens with which the kernels are compared with torch's products. They read a matrix once for 8 tokens at most."""

MEASURED, SMALL = (1024, 2048), (512, 512)
"""Rows and columns of the matrix that is measured for this, and of the one that one thread multiplies, or all."""

CLEARLY = 1.1
"""Least speedup of another instruction set than the preferred one, so that noise does not decide the last bits."""

TILE = 2**20
"""Weights decoded at once: in 16 bits 2 MiB, which stay in a processor's cache for the product."""


def packed_matmul(x: Tensor, weight: Bitmask, bias: Tensor | None = None) -> Tensor:
    """Multiply tokens by a matrix that passed `Bitmask.check`: x Wᵀ + bias, with sums in float32.

    The bits of a product by the kernels do not depend on the number of threads; whether they multiply, and by which instruction
    set, may (`is_faster`, `fastest_kernels`). With AVX-512 BF16, subnormal bfloat16 numbers count as zero.

    Up to `MAX_TOKENS` tokens are multiplied by the integers of a quantized matrix, and their sums by its scales. With AVX-512
    or Arm's dot products, x is rounded for this to multiples of 2^-22 times a power of two above all numbers of the token:
    bfloat16 numbers stay as they are, unless they are 2^14 times smaller than the largest one. For more tokens, each product of
    a scale and an integer is rounded to x's dtype, as `sparsellm unpack` rounds to the model's.

    Within `torch.compile` this is the operator `sparsellm::packed_linear`; outside, the call saves torch's dispatch.

    Args:
        x: (..., in) float32, bfloat16 or float16.
        weight: The (out, in) matrix.
        bias: (out,).

    Returns:
        (..., out) of x's dtype.

    Raises:
        InvalidSetting: x or the bias do not fit the matrix, or its scales were cast in place since it was checked.
    """
    if torch.compiler.is_compiling():
        options = {"columns": weight.shape[1], "scales": weight.scales, "group_size": _group_size(weight), "bias": bias}
        result: Tensor = torch.ops.sparsellm.packed_linear(x, weight.mask, weight.values, weight.row_starts, **options)
        return result
    shape, (rows, columns) = x.shape, weight.shape
    if shape[-1] != columns or x.device != weight.mask.device or x.dtype not in DTYPES:
        raise InvalidSetting(
            f"x is {x.dtype} with {shape[-1]} columns on {x.device}; float32, bfloat16 or float16 with {columns} columns on "
            f"{weight.mask.device} is needed."
        )
    if weight.scales is not None and weight.scales.dtype is not torch.bfloat16:
        raise InvalidSetting(
            f"The scales of a packed matrix are {weight.scales.dtype}; torch.bfloat16 is needed. Load the weight again."
        )
    if bias is not None and (bias.shape != (rows,) or bias.device != x.device):
        raise InvalidSetting(f"The bias has the shape {tuple(bias.shape)} on {bias.device}; ({rows},) on {x.device} is needed.")
    tokens = shape.numel() // columns if columns else shape[:-1].numel()
    library = fastest_kernels() if 0 < tokens <= MAX_TOKENS and x.is_cpu else None
    # Integers stay with the kernel: the other way rounds their products with the scales.
    if library is None or (weight.scales is None and not is_faster(tokens, weight.values.dtype)):
        return _multiply_tiles(x, weight, bias)
    return _call_packed(library, x, weight, threads_for(rows * columns * tokens), bias=bias)


def fastest_kernels() -> Library | None:
    """Return the kernels with the instruction set that multiplies fastest; None if they are not compiled.

    Measured once, as `sparsellm.runtime.autotuning` does, where a processor has several sets besides the portable code.
    """
    library = load_kernels()
    if library is not None and not library.is_chosen:
        library.use(_fastest_set(library))
    return library


def instruction_set() -> str | None:
    """Return the name of the instruction set in use; None without the compiled library."""
    library = fastest_kernels()
    return None if library is None else INSTRUCTION_SETS[library.number]


def instruction_sets() -> list[str]:
    """Return the names of the instruction sets that this processor and the library have, the preferred one last."""
    library = load_kernels()
    return [] if library is None else list(library.names)


def _fastest_set(library: Library) -> str:
    """Measure which instruction set multiplies a packed token fastest; the preferred one, unless another is clearly faster."""
    *others, best = [name for name in library.names if name != "portable"] or ["portable"]

    def make(*names: str) -> tuple[Computation, Computation]:
        x, weight = _drawn(torch.bfloat16, 1)
        other, preferred = copy.copy(library), copy.copy(library)  # another thread may multiply meanwhile
        for tried, name in zip((other, preferred), names, strict=True):
            tried.use(name)
        threads = torch.get_num_threads()
        return partial(_call_packed, preferred, x, weight, threads), partial(_call_packed, other, x, weight, threads)

    for name in reversed(others):
        if speedup(f"packed products by {name}, beside {best}", partial(make, name, best)) > CLEARLY:
            best = name
    return best


def is_faster(tokens: int, dtype: torch.dtype) -> bool:
    """Whether the kernels multiply so many tokens by packed values that are no integers faster than torch decoded rows.

    Measured once for each of `PACKED_TOKENS`, as `sparsellm.runtime.autotuning` does.

    Args:
        tokens: Number of tokens, of which the next larger one of `PACKED_TOKENS` is measured.
        dtype: Dtype of the packed values and of the tokens.
    """

    def make(library: Library, x: Tensor, weight: Bitmask) -> tuple[Computation, Computation]:
        return partial(_multiply_tiles, x, weight, None), partial(_call_packed, library, x, weight, torch.get_num_threads())

    return _is_faster("packed products", tokens, make, counts=PACKED_TOKENS, dtype=dtype)


def is_faster_dense(tokens: int) -> bool:
    """Whether `dense_matmul` multiplies so many bfloat16 tokens faster than torch.

    Measured once for each of `DENSE_TOKENS`, as `sparsellm.runtime.autotuning` does. torch has an algorithm of its own for a
    single token, so that this may hold for more tokens and not for one.
    """

    def make(library: Library, x: Tensor, packed: Bitmask) -> tuple[Computation, Computation]:
        weight = packed.to_dense()
        by_torch = partial(torch.nn.functional.linear, x, weight)
        return by_torch, partial(_call_dense, library, x, weight, torch.get_num_threads())

    return _is_faster("dense products", tokens, make, counts=DENSE_TOKENS, dtype=torch.bfloat16)


def _is_faster(
    kind: str,
    tokens: int,
    make: Callable[[Library, Tensor, Bitmask], tuple[Computation, Computation]],
    *,
    counts: tuple[int, ...],
    dtype: torch.dtype,
) -> bool:
    """Whether the second computation, by the kernels, is not slower than the first; False above the last count."""
    library = fastest_kernels()
    if library is None or tokens > counts[-1]:
        return False
    count = next(count for count in counts if count >= tokens)
    return speedup(_comparison(kind, count, dtype, instruction_set()), lambda: make(library, *_drawn(dtype, count))) >= 1


@cache
def _comparison(kind: str, count: int, dtype: torch.dtype, used: str | None) -> str:
    """Name of a comparison with torch's products."""
    return f"{kind} of {plural(count, 'token')}, {dtype_name(dtype)}, {used}"


def threads_for(products: int) -> int:
    """Return how many threads compute so many products of a token and a weight: torch's, or one where that takes less time."""
    return torch.get_num_threads() if products >= least_for_threads() else 1


def least_for_threads() -> float:
    """Return with how many elements of a matrix all threads multiply a token faster than one.

    Where one thread takes t seconds, n threads take o + t / n. o is measured once for each n, as
    `sparsellm.runtime.autotuning` does, as a share of the time of a matrix of `SMALL`; t is proportional to the elements.
    """
    threads = torch.get_num_threads()
    library = fastest_kernels()
    if threads == 1 or library is None:
        return 0

    def make() -> tuple[Computation, Computation]:
        x, weight = _drawn(torch.bfloat16, 1, SMALL)
        return partial(_call_packed, library, x, weight, 1), partial(_call_packed, library, x, weight, threads)

    gain = speedup(f"packed products by {threads} threads, {instruction_set()}", make)
    return SMALL[0] * SMALL[1] * (1 / gain - 1 / threads) / (1 - 1 / threads)


def _drawn(dtype: torch.dtype, tokens: int, shape: tuple[int, int] = MEASURED) -> tuple[Tensor, Bitmask]:
    """Draw tokens and a matrix of which one half is zero, to be measured."""
    generator = torch.Generator().manual_seed(0)
    x, dense = (torch.randn(size, shape[1], generator=generator).to(dtype) for size in (tokens, shape[0]))
    return x, Bitmask.from_dense(dense.where(dense > 0, 0.0))


def dense_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply tokens by a dense bfloat16 matrix on a CPU, for comparison with packed ones: x Wᵀ, with sums in float32.

    Args:
        x: (tokens, in) float32, bfloat16 or float16, at most `MAX_TOKENS` tokens; more are multiplied by torch.
        weight: (out, in) bfloat16. One that the kernel cannot read, such as a transposed one, is multiplied by torch.

    Returns:
        (tokens, out) of x's dtype.
    """
    library = fastest_kernels()
    rows, columns = weight.shape
    fits = x.dtype in DTYPES and x.is_cpu and len(x) <= MAX_TOKENS and x.shape[-1] == columns
    is_readable = weight.dtype is torch.bfloat16 and weight.is_cpu and weight.is_contiguous() and is_aligned(weight)
    if library is None or not (fits and is_readable):
        return x @ weight.to(x.dtype).T
    return _call_dense(library, x, weight, threads_for(rows * columns * len(x)))


def decode_rows(
    weight: Bitmask,
    start: int = 0,
    stop: int | None = None,
    *,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Decode rows of a matrix that passed `Bitmask.check`, as its `to_dense` does.

    Args:
        weight: The (out, in) matrix.
        start: The first row.
        stop: The row behind the last one; None for all.
        dtype: The dtype to which scales times integers are rounded, float32 by default. Other values have their own.
        out: (stop - start, in) of that dtype, contiguous, to write to.

    Returns:
        (stop - start, in).
    """
    library = fastest_kernels() if weight.values.is_cpu else None
    stop = weight.shape[0] if stop is None else stop
    dtype = weight.values.dtype if weight.scales is None else dtype or torch.float32
    dense = weight.mask.new_empty((stop - start, weight.shape[1]), dtype=dtype) if out is None else out
    if library is None:
        return _decode_tiles(weight, start, dense)
    library.decode(
        library.number,
        threads_for((stop - start) * weight.shape[1]),
        *_addresses(weight),
        start,
        stop,
        weight.shape[1],
        TYPES[dtype],
        dense.data_ptr(),
    )
    return dense


def _decode_tiles(weight: Bitmask, start: int, out: Tensor) -> Tensor:
    """Decode rows from a first one on by torch, a tile at a time: on the way a number takes several times its size."""
    step = max(1, TILE // weight.mask.shape[1] // 8) if weight.mask.shape[1] else len(out) or 1
    for first in range(0, len(out), step):
        stop = min(first + step, len(out))
        out[first:stop] = weight.to_dense(start + first, start + stop, dtype=out.dtype)
    return out


def _group_size(weight: Bitmask) -> int:
    """Columns that share a scale; 0 for whole rows, and without integers."""
    return weight.format.group_size if weight.format else 0


def _addresses(weight: Bitmask) -> tuple[int | None, ...]:
    """Return what the kernels take of a matrix: where mask and values are, their type, and where its rows and scales are."""
    mask, values, row_starts = (part.data_ptr() for part in (weight.mask, weight.values, weight.row_starts))
    scales = None if weight.scales is None else weight.scales.data_ptr()
    return mask, values, TYPES[weight.values.dtype], row_starts, scales, _group_size(weight)


def _call_packed(library: Library, x: Tensor, weight: Bitmask, threads: int, *, bias: Tensor | None = None) -> Tensor:
    """Multiply at most `MAX_TOKENS` tokens by a packed matrix."""
    return _call(library, x, _addresses(weight), shape=weight.shape, threads=threads, bias=bias)


def _call_dense(library: Library, x: Tensor, weight: Tensor, threads: int) -> Tensor:
    """Multiply at most `MAX_TOKENS` tokens by a dense bfloat16 matrix, (out, in)."""
    rows, columns = weight.shape
    parts = None, weight.data_ptr(), TYPES[weight.dtype], None, None, 0
    return _call(library, x, parts, shape=(rows, columns), threads=threads)


def _call(
    library: Library,
    x: Tensor,
    parts: tuple[int | None, ...],
    *,
    shape: tuple[int, int],
    threads: int,
    bias: Tensor | None = None,
) -> Tensor:
    """Multiply at most `MAX_TOKENS` tokens by a matrix of a shape: its mask, values, their type and its rows' positions."""
    dtype = x.dtype
    if dtype is torch.float16:
        x = x.float()
    x, bias = _readable(x), None if bias is None else _readable(bias.to(x.dtype))
    rows, columns = shape
    out = x.new_empty((*x.shape[:-1], rows))
    tokens = x.shape[:-1].numel()
    failed = library.matmul(
        library.number,
        threads,
        x.data_ptr(),
        TYPES[x.dtype],
        tokens,
        *parts,
        rows,
        columns,
        None if bias is None else bias.data_ptr(),
        out.data_ptr(),
    )
    if failed:
        raise MemoryError(f"no memory for {tokens} tokens of {columns} numbers")
    return out if dtype is x.dtype else out.to(dtype)


def _readable(tensor: Tensor) -> Tensor:
    """Return the numbers as kernels read them. Those of a mapped file may be at any address, and torch keeps them there."""
    tensor = tensor.contiguous()
    return tensor if is_aligned(tensor) else tensor.clone()


def _multiply_tiles(x: Tensor, weight: Bitmask, bias: Tensor | None) -> Tensor:
    """Multiply tokens by decoded rows, a tile at a time."""
    if load_kernels() is None and x.is_cpu:
        warn_missing()
    rows, columns = weight.shape
    step = max(1, TILE // max(columns, 1))
    tokens = x.reshape(-1, columns)
    stored = weight.values.dtype if weight.scales is None else x.dtype
    dtype = torch.promote_types(x.dtype, stored)
    out = x.new_empty((len(tokens), rows))
    tokens = tokens.to(dtype)
    tile = x.new_empty((min(step, rows), columns), dtype=stored)  # reused: new memory costs more than decoding
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        part = None if bias is None else bias[start:stop].to(dtype)
        dense = decode_rows(weight, start, stop, dtype=stored, out=tile[: stop - start]).to(dtype)
        out[:, start:stop] = torch.nn.functional.linear(tokens, dense, part)
    return out.view(*x.shape[:-1], rows)


def _packed_linear(
    x: Tensor,
    mask: Tensor,
    values: Tensor,
    row_starts: Tensor,
    *,
    columns: int,
    scales: Tensor | None = None,
    group_size: int = 0,
    bias: Tensor | None = None,
) -> Tensor:
    """The operator: `packed_matmul` by a matrix that is given by its parts."""
    format = None if scales is None else IntegerFormat(8 if values.dtype is torch.int8 else 4, group_size)
    return packed_matmul(x, Bitmask((len(mask), columns), mask, values, row_starts, scales, format), bias)


def _packed_linear_shape(x: Tensor, mask: Tensor, values: Tensor, row_starts: Tensor, **options: Any) -> Tensor:
    """The result of the operator without its numbers, for tracing."""
    return x.new_empty((*x.shape[:-1], row_starts.shape[0] - 1))


torch.library.define(
    "sparsellm::packed_linear",
    "(Tensor x, Tensor mask, Tensor values, Tensor row_starts, *, SymInt columns, Tensor? scales=None, SymInt group_size=0, "
    "Tensor? bias=None) -> Tensor",
)
torch.library.impl("sparsellm::packed_linear", "default", _packed_linear)
torch.library.register_fake("sparsellm::packed_linear", _packed_linear_shape)
