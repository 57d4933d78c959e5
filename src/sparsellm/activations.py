"""What travels from block to block: the hidden states of every calibration batch, and how each block is called."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sparsellm.blocks import Block, Call
from sparsellm.errors import NonFinite

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Look = Callable[[Tensor, Tensor], None]
"""Shown a layer's inputs and outputs, batch by batch, flattened to (tokens, in) and (tokens, out)."""


class Activations:
    """The hidden states that enter the present block, batch by batch, as the pruned model computes them.

    pruned: one (batch, seq, model) tensor for every batch.
    """

    def __init__(self, pruned: list[Tensor], calls: list[list[Call]]) -> None:
        self.pruned = pruned
        self._calls = calls  # by block, then by batch

    @classmethod
    def entering(
        cls, model: PreTrainedModel, blocks: Sequence[Block], batches: Sequence[Tensor], dtype: torch.dtype | None = None
    ) -> Activations:
        """Run the model as far as its first block, and learn how each block is called.

        batches: token numbers, each (batch, seq), without padding. dtype: what the blocks will be computed in, if not
        their own.

        Every block is called as the model itself calls it: blocks may differ in their keywords (an attention mask with or
        without a sliding window), so each block's are recorded, with the blocks themselves passing the hidden states through.
        """
        entered: list[Tensor] = []
        calls: list[list[Call]] = [[] for _ in blocks]
        body = model.base_model
        with _recording(blocks, entered, calls):
            for batch in batches:
                body(input_ids=batch.to(model.device), use_cache=False)
        distinct = {id(call): call for row in calls for call in row}  # cast each once: most blocks and batches share theirs
        cast = {key: _cast(call, dtype) for key, call in distinct.items()}
        return cls([_cast(hidden, dtype) for hidden in entered], [[cast[id(call)] for call in row] for row in calls])

    @torch.no_grad()
    def watch(self, block: Block, looks: Mapping[str, Sequence[Look]]) -> None:
        """One pass of all batches through the block, showing the layers named in `looks`; nothing travels on."""
        hooks = [block.layer(name).register_forward_hook(_shows(look)) for name, many in looks.items() for look in many]
        try:
            for hidden, call in zip(self.pruned, self._calls[block.index], strict=True):
                block(hidden, call)
        finally:
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def advance(self, block: Block) -> None:
        """Pass every batch through the block, to become the input of the next. Raises NonFinite, naming the block."""
        for number, call in enumerate(self._calls[block.index]):
            hidden = block(self.pruned[number], call)
            if not bool(hidden.isfinite().all()):
                raise NonFinite(
                    f"The output of {block.name} is not finite ({hidden.dtype}, batch {number}). "
                    "Try --dtype float32, or more calibration tokens."
                )
            self.pruned[number] = hidden


def _shows(look: Look) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
    """A forward hook that shows a layer's inputs and outputs, flattened."""

    def hook(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        look(inputs[0].flatten(0, -2), output.flatten(0, -2))

    return hook


@contextmanager
def _recording(blocks: Sequence[Block], entered: list[Tensor], calls: list[list[Call]]) -> Iterator[None]:
    """Blocks that record how they are called and pass the hidden states through, within the context."""

    def recorder(block: Block) -> Callable[..., Tensor]:
        def forward(hidden: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
            if block.index == 0:
                entered.append(hidden)
            call = Call(arguments, keywords)
            seen = [*calls[block.index][-1:], *(calls[block.index - 1][-1:] if block.index else [])]
            calls[block.index].append(next((other for other in seen if _same(other, call)), call))
            return hidden

        return forward

    replaced = {block.index: block.module.__dict__.get("forward") for block in blocks}  # set by libraries that wrap modules
    for block in blocks:
        setattr(block.module, "forward", recorder(block))  # noqa: B010  (mypy forbids the plain assignment)
    try:
        yield
    finally:
        for block in blocks:
            delattr(block.module, "forward")
            if replaced[block.index] is not None:
                setattr(block.module, "forward", replaced[block.index])  # noqa: B010


def _cast(value: Any, dtype: torch.dtype | None) -> Any:
    """The same value with its floating tensors in `dtype`."""
    if dtype is None:
        return value
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Call):
        return Call(_cast(value.arguments, dtype), _cast(value.keywords, dtype))
    if isinstance(value, (tuple, list)):
        items = [_cast(item, dtype) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: _cast(item, dtype) for key, item in value.items()}
    return value


def _same(one: Any, other: Any) -> bool:
    """Whether two calls hold equal values, so that one can stand for both: masks are large and mostly alike."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one is other or (one.device == other.device and one.dtype == other.dtype and torch.equal(one, other))
    if isinstance(one, Call) and isinstance(other, Call):
        return _same(one.arguments, other.arguments) and _same(one.keywords, other.keywords)
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(map(_same, one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return one is other or (isinstance(one, (int, float, str, bool)) and one == other)
