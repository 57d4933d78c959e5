"""Context managers that change a module and restore it: dtype, evaluation mode, forward function, trained parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from sparsellm.runtime.products import fast_linear_layers


@contextmanager
def compute_dtype_context(module: nn.Module, dtype: torch.dtype | None, without: Iterable[nn.Module] = ()) -> Iterator[None]:
    """Cast a module's parameters and buffers to `dtype` within the context, and back to their own dtypes after it.

    A CPU without 16-bit arithmetic is several times faster in float32, and the casts are exact: every bfloat16 and float16
    number is a float32 number. What a module names in its attribute `keeps_dtype` is not cast: packed layers have buffers that
    kernels read in one dtype.

    Args:
        dtype: The dtype to compute in; None changes nothing.
        without: Submodules that keep their dtype.
    """
    excluded = {id(tensor) for part in without for tensor in chain(part.parameters(), part.buffers())}
    excluded |= {id(getattr(part, name)) for part in module.modules() for name in getattr(part, "keeps_dtype", ())}
    candidates = chain(module.parameters(), module.buffers())
    tensors = [tensor for tensor in candidates if tensor.is_floating_point() and id(tensor) not in excluded]
    dtypes = [tensor.dtype for tensor in tensors]
    buffers = {id(buffer): buffer.data for buffer in module.buffers()}  # which no pass changes, and a cast may round
    try:
        for tensor in tensors if dtype else ():
            tensor.data = tensor.data.to(dtype)
        yield
    finally:
        for tensor, original in zip(tensors, dtypes, strict=True):
            tensor.data = buffers.get(id(tensor), tensor.data).to(original)


def product_dtype_context(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    """Context in which matrix products round their factors and results to `dtype`, with float32 sums.

    All else keeps its dtype: the residual stream, norms, parameters. The gradients of these products use the same dtype.

    Args:
        device: The device of the products.
        dtype: A 16-bit dtype. None rounds nothing; on a CPU, linear layers in float32 are computed by the faster library.
    """
    if dtype is not None:
        return torch.autocast(device.type, dtype)
    return fast_linear_layers() if device.type == "cpu" else nullcontext()


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Set a model to evaluation mode (no dropout) within the context; restore the mode of every module after it."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def gradient_checkpointing(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Store only the inputs of modules for the backward pass within the context, and recompute their activations from these.

    The modules compute linear layers by the faster library in both passes: activations that are recomputed by another function
    than in the forward pass are refused by torch, and the backward pass may run outside of the caller's contexts.
    """

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return fast_linear_layers(), fast_linear_layers()

    with ExitStack() as stack:
        for module in modules:
            recomputed = partial(checkpoint, module.forward, use_reentrant=False, context_fn=contexts)
            stack.enter_context(replace_forward(module, recomputed))
        yield


@contextmanager
def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace a module's forward function within the context."""
    previous = module.__dict__.get("forward")  # set by libraries that wrap modules
    setattr(module, "forward", forward)  # noqa: B010  (mypy forbids the plain assignment)
    try:
        yield
    finally:
        delattr(module, "forward")
        if previous is not None:
            setattr(module, "forward", previous)  # noqa: B010


@contextmanager
def require_grad_only(module: nn.Module, trained: Iterable[nn.Parameter] = ()) -> Iterator[None]:
    """Make only `trained` require gradients within the context, starting from none; restore flags and gradients after it."""
    states = [(parameter, parameter.requires_grad, parameter.grad) for parameter in module.parameters()]
    trained_ids = {id(parameter) for parameter in trained}
    try:
        for parameter, _, _ in states:
            parameter.requires_grad_(id(parameter) in trained_ids)
            parameter.grad = None
        yield
    finally:
        for parameter, requires_grad, gradient in states:
            parameter.requires_grad_(requires_grad)
            parameter.grad = gradient
