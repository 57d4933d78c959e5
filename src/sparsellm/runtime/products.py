"""Matrix products in float32 on a CPU, by oneDNN where torch's own are slower; and whether products in bfloat16 are faster.

On x86, torch calls MKL, which uses the 256-bit vectors of AVX2 on AMD processors. oneDNN, which is a part of torch and is what
its bfloat16 products call, uses AVX-512 on any processor. On Zen 5 it is about twice as fast. Sums are of float32 in both.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode

from sparsellm.extension import find
from sparsellm.runtime.autotuning import Computation, speedup

MIN_MULTIPLICATIONS = 1 << 21
"""Multiplications of a product from which oneDNN is used, those of 128 x 128 matrices. A call takes it 12 microseconds."""

LEAST_SPEEDUP = 1.2
"""Least speedup for which oneDNN is used. Between 1 and this it hangs on the shapes of matrices which one is faster."""

ONEDNN_PRODUCTS = "float32 products by oneDNN"
"""Name of the comparison with torch's."""

LEAST_BFLOAT16_SPEEDUP, BFLOAT16_IN_SOLVERS = 1.2, "matrix products in bfloat16"
"""Least speedup for which solvers multiply in bfloat16 on a CPU, and the name of that comparison with float32."""

PRODUCT_TOKENS, PRODUCT_WIDTH = 256, 512
"""Size of the product that is measured, which takes a thread 1 to 3 milliseconds."""

Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""A function of inputs (tokens, in), a weight (out, in) and a bias (out,) or None, to (tokens, out); all float32 on the CPU."""


def matmul(left: Tensor, right: Tensor) -> Tensor:
    """The product of two matrices, (m, k) and (k, n)."""
    has_gradient = torch.is_grad_enabled() and (left.requires_grad or right.requires_grad)
    if not has_gradient and (brought := _brought(left.device.type)) is not None:
        return brought(left, right)
    if has_gradient or not _is_large(left, right) or (kernel := _kernel()) is None:
        return left @ right
    return kernel(_plain(left), _plain(right.T), None)


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`, with gradients."""
    rows = inputs.flatten(0, -2) if inputs.dim() > 1 else inputs.unsqueeze(0)
    usual = weight.dim() != 2 or not _is_large(rows, weight.T) or torch.is_autocast_enabled("cpu")
    other_bias = bias is not None and (bias.dtype != torch.float32 or bias.shape != weight.shape[:1])
    if usual or other_bias or _kernel() is None:
        return nn.functional.linear(inputs, weight, bias)
    result: Tensor = _Linear.apply(rows, weight, bias)  # type: ignore[no-untyped-call]
    return result.view(*inputs.shape[:-1], len(weight))


def by_columns(matrix: Tensor) -> Tensor:
    """A matrix whose columns are contiguous where products of some of them are faster so; else the matrix itself."""
    return matrix.T.contiguous().T if _is_large(matrix.T, matrix) and _kernel() is not None else matrix


def fast_linear_layers() -> AbstractContextManager[Any]:
    """Context in which modules compute linear layers by `linear`."""
    return nullcontext() if _kernel() is None else _LinearMode()


class _LinearMode(TorchFunctionMode):
    """Calls `linear` for `torch.nn.functional.linear`, and for `torch.addmm` as transformers' `Conv1D` calls it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.addmm and len(args) == 3 and not kwargs and args[0].dim() == 1:
            bias, inputs, weight = args
            return linear(inputs, weight.T, bias)
        return (linear if func is nn.functional.linear else func)(*args, **(kwargs or {}))


class _Linear(torch.autograd.Function):
    """A linear layer on (tokens, in) by oneDNN, whose gradients are products by oneDNN."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        kernel = _kernel()
        assert kernel is not None
        return kernel(_plain(inputs), _plain(weight), None if bias is None else bias.contiguous())  # strides are ignored

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight = ctx.saved_tensors
        of_inputs, of_weight, of_bias = ctx.needs_input_grad
        return (
            matmul(gradient, weight) if of_inputs else None,
            matmul(gradient.T, inputs) if of_weight else None,
            gradient.sum(0) if of_bias else None,
        )


@cache
def _brought(device: str) -> Callable[[Tensor, Tensor], Tensor] | None:
    """The function that an extension brings for products on a type of device."""
    found: Callable[[Tensor, Tensor], Tensor] | None = find("products", device)
    return found


def _is_large(left: Tensor, right: Tensor) -> bool:
    """Whether the product of two matrices is in float32 on the CPU, and large."""
    (rows, inner), columns = left.shape, right.shape[1]
    on_cpu = left.dtype is right.dtype is torch.float32 and left.device.type == right.device.type == "cpu"
    return on_cpu and rows * inner * columns >= MIN_MULTIPLICATIONS


def _plain(matrix: Tensor) -> Tensor:
    """The matrix if its rows or its columns are contiguous, otherwise a copy: oneDNN is very slow with other strides."""
    return matrix if matrix.is_contiguous() or matrix.T.is_contiguous() else matrix.contiguous()


def onednn_speedup() -> float:
    """How many times as fast as torch's products those of oneDNN are on this machine; 0 where they are missing or wrong."""
    if (kernel := _onednn()) is None:
        return 0.0

    def make() -> tuple[Computation, Computation]:
        generator = torch.Generator().manual_seed(0)
        inputs, weight = (
            torch.randn(PRODUCT_TOKENS, PRODUCT_WIDTH, generator=generator),
            torch.randn(PRODUCT_WIDTH, PRODUCT_WIDTH, generator=generator),
        )
        return lambda: inputs @ weight.T, lambda: kernel(inputs, weight, None)

    return speedup(ONEDNN_PRODUCTS, make)


def bf16_solver_speedup() -> float:
    """How many times as fast a product of matrices is in bfloat16 as in float32 on this machine, one matrix being converted.

    Processors without such units take many times as long, and so do others where torch or oneDNN may not use them.
    """

    def make() -> tuple[Computation, Computation]:
        generator = torch.Generator().manual_seed(0)
        left, right = (
            torch.randn(PRODUCT_TOKENS, PRODUCT_WIDTH, generator=generator),
            torch.randn(PRODUCT_WIDTH, PRODUCT_WIDTH, generator=generator),
        )
        rounded = right.bfloat16()
        return lambda: left @ right, lambda: torch.mm(left.bfloat16(), rounded).to(left.dtype)

    return speedup(BFLOAT16_IN_SOLVERS, make)


def uses_onednn() -> bool:
    """Whether large products in float32 are computed by oneDNN."""
    return _kernel() is not None


def _kernel() -> Linear | None:
    """oneDNN's linear layer; None where torch's own products are as fast, or where it is missing or wrong."""
    return _onednn() if onednn_speedup() >= LEAST_SPEEDUP else None


@cache
def _onednn() -> Linear | None:
    """oneDNN's linear layer; None where it is missing or wrong."""
    operator: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)  # also what torch.compile calls

    def kernel(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        result: Tensor = operator(inputs, weight, bias, "none", [], "")
        return result

    generator = torch.Generator().manual_seed(0)
    inputs, weight, bias = (torch.randn(shape, generator=generator) for shape in ((8, 16), (4, 16), (4,)))
    try:
        is_right = torch.allclose(kernel(inputs, weight, bias), nn.functional.linear(inputs, weight, bias), atol=1e-4)
    except (RuntimeError, TypeError, AttributeError):  # another signature, or torch without oneDNN
        return None
    return kernel if is_right else None
