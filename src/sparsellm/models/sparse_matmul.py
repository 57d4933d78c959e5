"""Products of pruned weights with many tokens on a CPU, by a kernel that skips the zeros."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from sparsellm.models.blocks import Block
from sparsellm.models.contexts import replace_forward
from sparsellm.runtime import devices
from sparsellm.runtime.autotuning import Computation, speedup
from sparsellm.runtime.native import load_library
from sparsellm.runtime.products import linear

MIN_WEIGHTS, TOKEN_BLOCK = 2**18, 64
"""Number of weights from which the kernel is used, and the tokens that it multiplies at once (`TOKENS` in sparse_matmul.c)."""

MAX_DENSITY = 0.5
"""Largest fraction of nonzero weights with which the kernel is used on any processor."""

MEASURED_DENSITY, LOW_DENSITY, MARGIN = 0.25, 0.05, 1.1
"""Fractions of nonzero weights with which the kernel is compared with dense products, and the speedup that it must have.

Its time has a part that grows with that fraction and one that does not: reading inputs, writing results and, beside bfloat16,
converting both. One thread of an AMD EPYC (Zen 4) takes 1.5 times as long by a dense product in float32 at 50 % zeros, 2.4
times at 70 % and 4 to 5 times at 90 %, with AVX2 as with AVX-512 (weights of 768 x 768 to 3,072 x 768, 2,048 tokens). Two
threads with AMX are done with a dense product in bfloat16 before the kernel has converted its inputs (`benchmarks/choices.py`).
"""

SPARSE_TOKENS, SPARSE_WIDTH = 512, 768
"""Size of the product that is measured, which takes a dense one 2 to 10 milliseconds."""

SKIPPING_ZEROS = "float32 products that skip zeros"
"""Name of the comparison with dense products, in float32 or in bfloat16."""

MatMul = Callable[[Tensor, Tensor | None], Tensor]
"""A function of inputs, (..., in), and a bias, (out,) or None, that returns (..., out)."""


class SparseMatmul:
    """Multiplies inputs by a weight of which most entries are zero.

    The result of a token does not depend on the other tokens of a call, nor on the number of threads. It differs from a dense
    product in the order of the sums.

    Args:
        weight: (out, in) float32 on the CPU. It is copied.
    """

    def __init__(self, weight: Tensor) -> None:
        library = load_library()
        assert library is not None
        self._library, weight = library, weight.detach().contiguous()
        self.rows, self.columns = weight.shape
        chunks, count = -(-self.columns // library.sparsellm_chunk()), int(weight.count_nonzero())
        self._starts = torch.empty(chunks * self.rows + 1, dtype=torch.int32)
        self._places, self._values = torch.empty(count + 1, dtype=torch.uint8), torch.empty(count + 1)
        entries = _pointers(self._starts, self._places, self._values)
        library.sparsellm_encode(weight.data_ptr(), self.rows, self.columns, *entries)

    def __call__(self, inputs: Tensor, bias: Tensor | None = None) -> Tensor:
        """`inputs` (..., in) float32 times the transposed weight, plus a bias (out,): (..., out)."""
        x = inputs.reshape(-1, self.columns).contiguous()
        out = torch.empty(*inputs.shape[:-1], self.rows)
        y, bias = out.view(-1, self.rows), None if bias is None else bias.detach().contiguous()
        blocks = -(-len(x) // TOKEN_BLOCK)
        threads = max(1, min(torch.get_num_threads(), blocks))
        size = -(-blocks // threads) * TOKEN_BLOCK
        parts = [(x[start : start + size], y[start : start + size]) for start in range(0, len(x), size)]

        def multiply(part: tuple[Tensor, Tensor]) -> int:
            (rows, target), entries = part, (self._starts, self._places, self._values)
            status: int = self._library.sparsellm_sparse_matmul(
                rows.data_ptr(),
                len(rows),
                self.columns,
                *_pointers(*entries),
                self.rows,
                None if bias is None else bias.data_ptr(),
                target.data_ptr(),
            )
            return status

        if any(devices.map_threads(multiply, parts)):
            raise MemoryError(f"A product with {self.rows} outputs needs {256 * self.rows:,} bytes of memory for each thread.")
        return out


def _may_support(weight: Tensor) -> bool:
    """Whether a weight has the dtype, device and size for the kernel."""
    is_float = weight.dtype == torch.float32 and weight.device.type == "cpu"
    return is_float and MIN_WEIGHTS <= weight.numel() < 2**31 and load_library() is not None


def skips_zeros(weight: Tensor, products: torch.dtype | None = None) -> bool:
    """Whether the kernel is compiled and faster than a dense product for a weight, (out, in), which is read for this.

    Args:
        weight: The weight.
        products: Dtype of the dense product, as in `product_dtype_context`; None for float32.
    """
    return _may_support(weight) and 0 < max_density(products) >= int(weight.count_nonzero()) / weight.numel()


def max_density(products: torch.dtype | None = None) -> float:
    """Return the fraction of nonzero weights up to which the kernel is faster than a dense product on this machine.

    Measured once, as `sparsellm.runtime.autotuning` does; 0 where the kernel is not compiled, or not faster with any weights.
    """
    if load_library() is None:
        return 0.0
    name = SKIPPING_ZEROS if products is None else f"{SKIPPING_ZEROS}, beside {products}"
    gain = speedup(name, lambda: _computations(MEASURED_DENSITY, products))
    if gain >= MARGIN:  # in proportion, which leaves a margin, since a part of the time does not grow
        return min(MAX_DENSITY, MEASURED_DENSITY * gain / MARGIN)
    low_gain = speedup(f"{name}, {LOW_DENSITY:.0%} nonzero", lambda: _computations(LOW_DENSITY, products))
    slope = max((1 / gain - 1 / low_gain) / (MEASURED_DENSITY - LOW_DENSITY), 1e-9)
    return min(MEASURED_DENSITY, max(0.0, LOW_DENSITY + (1 / MARGIN - 1 / low_gain) / slope))


def _computations(density: float, products: torch.dtype | None) -> tuple[Computation, Computation]:
    """A dense product, and the same by the kernel, of a weight with a fraction `density` of nonzero entries."""
    generator = torch.Generator().manual_seed(0)
    inputs, weight = (
        torch.randn(SPARSE_TOKENS, SPARSE_WIDTH, generator=generator),
        torch.randn(SPARSE_WIDTH, SPARSE_WIDTH, generator=generator),
    )
    weight *= torch.rand(SPARSE_WIDTH, SPARSE_WIDTH, generator=generator) < density
    kernel = SparseMatmul(weight)
    if products is None:
        return lambda: linear(inputs, weight), lambda: kernel(inputs)
    rounded, inputs = weight.to(products), inputs.to(products)
    return lambda: linear(inputs, rounded), lambda: kernel(inputs.float()).to(products)


def matmul_of(weight: Tensor, products: torch.dtype | None = None) -> MatMul:
    """The function that multiplies inputs, (..., in), by a weight that does not change and adds a bias or None.

    Args:
        weight: (out, in) float32.
        products: Dtype of the inputs and of the results, if it is not float32; the kernel does not round the weight to it.
    """
    if not skips_zeros(weight, products):
        rounded = weight.to(products or weight.dtype)
        return lambda inputs, bias: linear(inputs, rounded, None if bias is None else bias.to(rounded.dtype))
    kernel = SparseMatmul(weight)
    return kernel if products is None else lambda inputs, bias: kernel(inputs.float(), bias).to(products)


class PrunedLayers:
    """The kernels of a block's layers, for passes between which no weight changes.

    Layers that are part of a parameter, such as fused ones, are multiplied densely. In a pass with 16-bit products the kernels
    round their results as dense products do, but not their factors.
    """

    def __init__(self, block: Block) -> None:
        modules = [block.module_of(name) for name in block.layers if name not in block.views]
        self._products = block.products
        self._modules = [module for module in modules if isinstance(module, nn.Linear) and _may_support(module.weight)]
        self._kernels: dict[nn.Linear, SparseMatmul | None] = {}

    @contextmanager
    def used(self) -> Iterator[None]:
        """Multiply by the kernels within the context; a weight is read when its layer is first called."""
        with ExitStack() as stack:
            for module in self._modules:
                stack.enter_context(replace_forward(module, self._forward(module)))
            yield

    def _forward(self, module: nn.Linear) -> Callable[[Tensor], Tensor]:
        """The forward function of a layer, by its kernel if that is faster."""
        previous = module.forward

        def forward(inputs: Tensor) -> Tensor:
            if module not in self._kernels:
                is_faster = skips_zeros(module.weight, self._products)
                self._kernels[module] = SparseMatmul(module.weight) if is_faster else None
            kernel = self._kernels[module]
            if kernel is None or inputs.dtype not in (torch.float32, self._products) or torch.is_grad_enabled():
                return previous(inputs)
            return kernel(inputs.float(), module.bias).to(self._products or torch.float32)

        return forward


def _pointers(*tensors: Tensor) -> list[int]:
    """Addresses of contiguous tensors."""
    return [tensor.data_ptr() for tensor in tensors]
