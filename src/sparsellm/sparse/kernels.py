"""Products with bitmask matrices on a CPU, by the compiled library `_kernels` or, without it, by decoding rows for torch."""

from __future__ import annotations

import ctypes
import time
import warnings
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

from sparsellm.errors import InvalidSetting
from sparsellm.runtime.memory import available as available_memory
from sparsellm.sparse.bitmask import Bitmask

MAX_TOKENS = 16
"""Tokens up to which the kernels multiply, in passes of 8. From there on, torch's product with decoded rows takes less time."""

TILE = 2**20
"""Weights decoded at once: in 16 bits 2 MiB, which stay in a processor's cache for the product."""

PIECE = 2**24
"""Bytes that are read for one measurement of the bandwidth: less than a millisecond, in which few programs are interrupted."""

PAGE = 4096
"""Bytes of a page, as in kernels.c: reads are of whole pages."""

INSTRUCTION_SETS = ("portable", "neon", "avx2", "avx512", "avx512_bf16")
"""In ascending order of preference; numbered as in kernels.c. avx512 needs VBMI2."""

LIBRARY = Path(__file__).with_name("_kernels.so")

_VERSION = 2
_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

MISSING = (
    "The kernels for packed models are not compiled, so these run slower than dense ones. "
    "Install a C compiler (gcc or clang), then sparsellm again; sparsellm doctor prints the command."
)


class _Library:
    """The compiled functions, and the number of the instruction set in use."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path))
        if library.sparsellm_version() != _VERSION:
            raise OSError(f"{path} was compiled from another version")
        present = library.sparsellm_instruction_sets()
        self.names = [name for number, name in enumerate(INSTRUCTION_SETS) if present >> number & 1]
        self.number = INSTRUCTION_SETS.index(self.names[-1])
        library.sparsellm_use_openmp(_openmp())
        number, count, pointer = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p
        self.matmul = library.sparsellm_matmul
        self.matmul.argtypes = [number, number, pointer, number, count, pointer, pointer, number]
        self.matmul.argtypes += [pointer, count, count, pointer, pointer]
        self.decode = library.sparsellm_decode
        self.decode.argtypes = [number, number, pointer, pointer, number, pointer, count, count, count, pointer]
        self.decode.restype = None
        self.read = library.sparsellm_read
        self.read.argtypes = [number, number, pointer, count]
        self.read.restype = None


def _openmp() -> ctypes.c_void_p | None:
    """The function that starts the threads of torch's OpenMP library; None if torch has another one, or none."""
    try:
        return ctypes.cast(ctypes.CDLL(torch._C.__file__).GOMP_parallel, ctypes.c_void_p)
    except (OSError, AttributeError):
        return None


@cache
def _library() -> _Library | None:
    """The library beside this file; None if it is missing or of another version."""
    try:
        return _Library(LIBRARY)
    except (OSError, AttributeError):
        return None


@cache
def _warn() -> None:
    """Warn once that the kernels are missing."""
    warnings.warn(MISSING, RuntimeWarning, stacklevel=3)


def available() -> str | None:
    """Return the name of the instruction set in use; None without the compiled library."""
    library = _library()
    return None if library is None else INSTRUCTION_SETS[library.number]


def instruction_sets() -> list[str]:
    """Return the names of the instruction sets that this processor and the library have, the preferred one last."""
    library = _library()
    return [] if library is None else list(library.names)


def set_instruction_set(name: str | None) -> None:
    """Use another instruction set than the preferred one, for comparisons and tests.

    Args:
        name: One of `instruction_sets()`; None for the preferred one.

    Raises:
        InvalidSetting: This processor or the library does not have it.
    """
    library = _library()
    names = instruction_sets()
    if library is None or name not in (None, *names):
        raise InvalidSetting(f"instruction set got {name!r}; this machine has {', '.join(names) or 'no compiled kernels'}.")
    library.number = INSTRUCTION_SETS.index(name or names[-1])


def matmul(x: Tensor, weight: Bitmask, bias: Tensor | None = None) -> Tensor:
    """Multiply tokens by a matrix: x Wᵀ + bias, with sums in float32.

    The bits of the result do not depend on the number of threads. With AVX-512 BF16, subnormal bfloat16 numbers count as zero.

    Args:
        x: (tokens, in) float32, bfloat16 or float16.
        weight: The (out, in) matrix.
        bias: (out,) of x's dtype.

    Returns:
        (tokens, out) of x's dtype.

    Raises:
        InvalidSetting: Shapes do not match, or a gradient is asked for.
    """
    return packed_linear(x, weight.mask, weight.values, weight.row_starts, columns=weight.shape[1], bias=bias)


def packed_linear(
    x: Tensor, mask: Tensor, values: Tensor, row_starts: Tensor, *, columns: int, bias: Tensor | None = None
) -> Tensor:
    """Multiply tokens by a matrix that is given by its parts, as `matmul` does with them together.

    Within `torch.compile` this is the operator `sparsellm::packed_linear`; outside, the call saves torch's dispatch.

    Args:
        x: (..., in) float32, bfloat16 or float16.
        mask: The bits of a `Bitmask`.
        values: Its values.
        row_starts: The positions of its rows.
        columns: in.
        bias: (out,) of x's dtype.

    Returns:
        (..., out) of x's dtype.
    """
    if torch.compiler.is_compiling():
        result: Tensor = torch.ops.sparsellm.packed_linear(x, mask, values, row_starts, columns=columns, bias=bias)
        return result
    shape = x.shape
    if shape[-1] != columns:
        raise InvalidSetting(f"x has {shape[-1]} columns, and the packed matrix {columns}.")
    if x.requires_grad and torch.is_grad_enabled():
        raise InvalidSetting("Packed matrices have no gradients: use torch.no_grad(), or train the unpacked model.")
    rows = len(row_starts) - 1
    tokens = shape.numel() // columns if columns else shape[:-1].numel()
    library = _library()
    if library is None or not 0 < tokens <= MAX_TOKENS or not x.is_cpu:
        return _multiply_tiles(x, Bitmask((rows, columns), mask, values, row_starts), bias)
    parts = (mask.data_ptr(), values.data_ptr(), _DTYPES[values.dtype], row_starts.data_ptr())
    return _call(library, x, parts, shape=(rows, columns), bias=bias)


def dense_matmul(x: Tensor, weight: Tensor) -> Tensor:
    """Multiply tokens by a dense bfloat16 matrix on a CPU, for comparison with packed ones: x Wᵀ, with sums in float32.

    Args:
        x: (tokens, in) float32, bfloat16 or float16, at most `MAX_TOKENS` tokens; more are multiplied by torch.
        weight: (out, in) bfloat16, contiguous.

    Returns:
        (tokens, out) of x's dtype.
    """
    library = _library()
    rows, columns = weight.shape
    if library is None or len(x) > MAX_TOKENS:
        return (x @ weight.to(x.dtype).T).to(x.dtype)
    if weight.dtype is not torch.bfloat16 or not weight.is_contiguous() or x.shape[-1] != weight.shape[1]:
        raise InvalidSetting(
            f"A contiguous bfloat16 weight of {x.shape[-1]} columns is needed, got {weight.dtype}, {weight.shape}."
        )
    return _call(library, x, (None, weight.data_ptr(), _DTYPES[weight.dtype], None), shape=(rows, columns))


def decode(weight: Bitmask, start: int = 0, stop: int | None = None, *, out: Tensor | None = None) -> Tensor:
    """Decode rows `start` to `stop` of a matrix, as `Bitmask.to_dense` does: (stop - start, in), into `out` if it is given."""
    library = _library()
    stop = weight.shape[0] if stop is None else stop
    if library is None or not weight.values.is_cpu:
        return weight.to_dense(start, stop)
    dense = weight.values.new_empty((stop - start, weight.shape[1])) if out is None else out
    library.decode(
        library.number,
        torch.get_num_threads(),
        weight.mask.data_ptr(),
        weight.values.data_ptr(),
        weight.values.element_size(),
        weight.row_starts.data_ptr(),
        start,
        stop,
        weight.shape[1],
        dense.data_ptr(),
    )
    return dense


def read_seconds(tensors: Iterable[Tensor]) -> float:
    """Seconds that all threads together take to read contiguous tensors once, as fast as memory delivers them."""
    library, threads = _library(), torch.get_num_threads()
    started = time.perf_counter()
    for tensor in tensors:
        if library is None:
            tensor.sum()
        else:
            library.read(library.number, threads, tensor.data_ptr(), tensor.nbytes // PAGE)
    return time.perf_counter() - started


def stream_bandwidth() -> float:
    """Measure how fast all threads together read memory, in bytes per second, in about a tenth of a second."""
    size = max(PIECE, min(2**28, available_memory(torch.device("cpu")) // 4) // PIECE * PIECE)  # larger than caches
    pieces = torch.ones(size // 4).split(PIECE // 4)
    return PIECE / median(read_seconds([piece]) for piece in pieces * 4)


def _call(
    library: _Library, x: Tensor, parts: tuple[int | None, ...], *, shape: tuple[int, int], bias: Tensor | None = None
) -> Tensor:
    """Multiply at most `MAX_TOKENS` tokens by a matrix of a shape: its mask, values, their type and its rows' positions."""
    dtype = x.dtype
    if dtype is torch.float16:
        x, bias = x.float(), None if bias is None else bias.float()
    elif dtype not in _DTYPES:
        raise InvalidSetting(f"x is {dtype}; float32, bfloat16 or float16 is needed.")
    if bias is not None and bias.dtype is not x.dtype:
        raise InvalidSetting(f"The bias is {bias.dtype}, and x {dtype}.")
    x = x.contiguous()
    rows, columns = shape
    out = x.new_empty((*x.shape[:-1], rows))
    tokens = x.shape[:-1].numel()
    failed = library.matmul(
        library.number,
        torch.get_num_threads(),
        x.data_ptr(),
        _DTYPES[x.dtype],
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


def _multiply_tiles(x: Tensor, weight: Bitmask, bias: Tensor | None) -> Tensor:
    """Multiply tokens by decoded rows, a tile at a time."""
    if _library() is None and x.is_cpu:
        _warn()
    rows, columns = weight.shape
    step = max(1, TILE // max(columns, 1))
    tokens = x.reshape(-1, columns)
    dtype = torch.promote_types(x.dtype, weight.values.dtype)
    out = x.new_empty((len(tokens), rows))
    tokens = tokens.to(dtype)
    tile = weight.values.new_empty((min(step, rows), columns))  # reused: new memory costs more than decoding
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        part = None if bias is None else bias[start:stop].to(dtype)
        dense = decode(weight, start, stop, out=tile[: stop - start]).to(dtype)
        out[:, start:stop] = torch.nn.functional.linear(tokens, dense, part)
    return out.view(*x.shape[:-1], rows)


def _packed_linear_shape(
    x: Tensor, mask: Tensor, values: Tensor, row_starts: Tensor, *, columns: int, bias: Tensor | None = None
) -> Tensor:
    """The result of `packed_linear` without its numbers, for tracing."""
    return x.new_empty((*x.shape[:-1], row_starts.shape[0] - 1))


torch.library.define(
    "sparsellm::packed_linear",
    "(Tensor x, Tensor mask, Tensor values, Tensor row_starts, *, SymInt columns, Tensor? bias=None) -> Tensor",
)
torch.library.impl("sparsellm::packed_linear", "default", packed_linear)
torch.library.register_fake("sparsellm::packed_linear", _packed_linear_shape)
