"""A decoder block, seen by the names of its parts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sparsellm.architectures import Architecture, architecture_of
from sparsellm.calls import Call
from sparsellm.errors import NonFinite, UnsupportedModel
from sparsellm.linalg import all_finite

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Block:
    """One decoder block of a model.

    index: from 0. name: its path in the model. module: what runs. architecture: the family's line of the table.
    dtypes: what each parameter is stored in, which may be less than what the block is computed in.
    """

    index: int
    name: str
    module: nn.Module
    architecture: Architecture
    dtypes: Mapping[str, torch.dtype]

    @property
    def layers(self) -> dict[str, nn.Linear]:
        """The linear layers by their name within the block, in running order."""
        return {name: self.layer(name) for group in self.architecture.groups for name in group}

    @property
    def device(self) -> torch.device:
        """Where the block computes."""
        return next(self.module.parameters()).device

    def layer(self, name: str) -> nn.Linear:
        """The layer of that name within the block; raises UnsupportedModel for anything but a plain linear layer."""
        layer = self.module.get_submodule(name)
        if type(layer) is not nn.Linear:
            raise UnsupportedModel(
                f"{self.full_name(name)} is a {type(layer).__name__}, not a torch.nn.Linear. "
                "Quantised and adapted models cannot be pruned: load the plain checkpoint, or merge its adapters."
            )
        return layer

    def write(self, name: str, weight: Tensor) -> None:
        """Put a weight, (out, in), into a layer, rounded to the dtype in which it will be stored.

        Raises NonFinite, naming the layer, where that dtype cannot hold it.
        """
        rounded = self.rounded(name, weight)
        if not all_finite(rounded):
            raise NonFinite(f"The pruned weight of {self.full_name(name)} overflows {rounded.dtype}. Try --dtype float32.")
        with torch.no_grad():
            self.layer(name).weight.copy_(rounded)

    def rounded(self, name: str, weight: Tensor) -> Tensor:
        """A weight in the dtype in which the layer's will be stored."""
        return weight.to(self.dtypes[f"{name}.weight"])

    def write_bias(self, name: str, bias: Tensor) -> None:
        """Put a bias, (out,), into a layer that has one, rounded as its weight is."""
        with torch.no_grad():
            self.layer(name).bias.copy_(bias.to(self.dtypes[f"{name}.bias"]))

    def settle(self) -> None:
        """Round every parameter to the dtype in which it will be stored, so that what travels on is what will be written."""
        with torch.no_grad():
            for name, tensor in self.module.named_parameters():
                tensor.copy_(tensor.to(self.dtypes[name]))

    def copy(self) -> Block:
        """The block as it stands, with weights of its own."""
        return replace(self, module=copy.deepcopy(self.module))

    def full_name(self, name: str) -> str:
        """The layer's path in the model."""
        return f"{self.name}.{name}"

    def __call__(self, hidden: Tensor, call: Call) -> Tensor:
        """The block's output for hidden states of (batch, seq, model)."""
        output: Tensor | tuple[Tensor, ...] = self.module(hidden, *call.arguments, **call.keywords)
        return output[0] if isinstance(output, tuple) else output


def blocks_of(model: PreTrainedModel) -> list[Block]:
    """All decoder blocks of a model, in order. Raises UnsupportedModel for a family that the table lacks."""
    architecture = architecture_of(model.config)
    try:
        modules = model.get_submodule(architecture.blocks)
    except AttributeError:
        raise UnsupportedModel(
            f"A {type(model).__name__} has no {architecture.blocks}. Load it with AutoModelForCausalLM."
        ) from None
    blocks = []
    for index, module in enumerate(modules.children()):
        dtypes = {name: tensor.dtype for name, tensor in module.named_parameters()}
        blocks.append(Block(index, f"{architecture.blocks}.{index}", module, architecture, dtypes))
    return blocks


@contextmanager
def computed_in(module: nn.Module, dtype: torch.dtype | None, without: Sequence[Block] = ()) -> Iterator[None]:
    """Within the context the module computes in `dtype`; then every tensor goes back to the dtype it came in.

    A processor without 16-bit arithmetic is several times faster in float32, and the detour is exact: every bfloat16 and
    float16 number is a float32 number. dtype: None changes nothing. without: blocks that stay as they are.
    """
    left = {id(t) for block in without for t in chain(block.module.parameters(), block.module.buffers())}
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
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within the context every module is in evaluation mode (no dropout); then each goes back to the mode it was in."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def checkpointed(blocks: Sequence[Block]) -> Iterator[None]:
    """Within the context blocks keep only their inputs for the backward pass, and run again when it reaches them."""

    def thrifty(forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arguments, **keywords: checkpoint(forward, *arguments, use_reentrant=False, **keywords)

    with replaced(blocks, lambda block: thrifty(block.module.forward)):
        yield


@contextmanager
def replaced(blocks: Sequence[Block], forward: Callable[[Block], Callable[..., Any]]) -> Iterator[None]:
    """Within the context each block runs another function in place of its own forward."""
    before = {block.index: block.module.__dict__.get("forward") for block in blocks}  # set by libraries that wrap modules
    for block in blocks:
        setattr(block.module, "forward", forward(block))  # noqa: B010  (mypy forbids the plain assignment)
    try:
        yield
    finally:
        for block in blocks:
            delattr(block.module, "forward")
            if before[block.index] is not None:
                setattr(block.module, "forward", before[block.index])  # noqa: B010


@contextmanager
def only_trained(module: nn.Module, trained: Iterable[nn.Parameter] = ()) -> Iterator[None]:
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
