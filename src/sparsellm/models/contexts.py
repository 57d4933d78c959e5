"""Modules in another mode for a while: another dtype, evaluation, another forward, chosen gradients; then as before."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


@contextmanager
def compute_dtype_context(module: nn.Module, dtype: torch.dtype | None, without: Iterable[nn.Module] = ()) -> Iterator[None]:
    """Within the context the module computes in `dtype`; then every tensor goes back to the dtype it came in.

    A processor without 16-bit arithmetic is several times faster in float32, and the detour is exact: every bfloat16 and
    float16 number is a float32 number. dtype: None changes nothing. without: parts that stay as they are.
    """
    left = {id(t) for part in without for t in chain(part.parameters(), part.buffers())}
    every = chain(module.parameters(), module.buffers())
    tensors = [t for t in every if t.is_floating_point() and id(t) not in left]
    before = [tensor.dtype for tensor in tensors]
    try:
        for tensor in tensors if dtype else ():
            tensor.data = tensor.data.to(dtype)
        yield
    finally:
        for tensor, original in zip(tensors, before, strict=True):
            tensor.data = tensor.data.to(original)


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Within the context every module is in evaluation mode (no dropout); then each goes back to the mode it was in."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def gradient_checkpointing(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Within the context modules keep only their inputs for the backward pass, and run again when it reaches them."""

    def thrifty(forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments, **keywords: checkpoint(forward, *arguments, use_reentrant=False, **keywords)

    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(replace_forward(module, thrifty(module.forward)))
        yield


@contextmanager
def replace_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Within the context a module runs another function in place of its own forward."""
    before = module.__dict__.get("forward")  # set by libraries that wrap modules
    setattr(module, "forward", forward)  # noqa: B010  (mypy forbids the plain assignment)
    try:
        yield
    finally:
        delattr(module, "forward")
        if before is not None:
            setattr(module, "forward", before)  # noqa: B010


@contextmanager
def require_grad_only(module: nn.Module, trained: Iterable[nn.Parameter] = ()) -> Iterator[None]:
    """Within the context only these parameters ask for gradients, and have none yet; then all are as before."""
    before = [(parameter, parameter.requires_grad, parameter.grad) for parameter in module.parameters()]
    wanted = {id(parameter) for parameter in trained}
    try:
        for parameter, _, _ in before:
            parameter.requires_grad_(id(parameter) in wanted)
            parameter.grad = None
        yield
    finally:
        for parameter, asked, gradient in before:
            parameter.requires_grad_(asked)
            parameter.grad = gradient
