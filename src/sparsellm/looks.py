"""What one batch shows on its way through a block."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from torch import Tensor, nn

from sparsellm.blocks import Block
from sparsellm.calls import Call
from sparsellm.errors import NonFinite
from sparsellm.linalg import all_finite
from sparsellm.views import Rows

Look = Callable[[Tensor], None]
"""Shown what a layer reads or writes, batch by batch, flattened to (tokens, in) or (tokens, out)."""

Looks = Mapping[str, Sequence[Look]]
"""By layer, who is shown."""


@dataclass
class Seen:
    """What one batch showed on its way through a block.

    entering: the hidden states, (tokens, model). inputs, outputs: by layer, (tokens, in) and (tokens, out).
    """

    entering: Tensor
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]


class Enough(Exception):
    """All that was asked for was seen: the rest of the block need not run."""


def glimpse(block: Block, names: Sequence[str], hidden: Tensor, call: Call, rows: Rows | None = None) -> Seen:
    """One batch through a block, as far as the last of the named layers."""
    seen = Seen(hidden.flatten(0, -2), {}, {})

    def shows(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            seen.inputs[name], seen.outputs[name] = inputs[0].flatten(0, -2), output.flatten(0, -2)
            if len(seen.inputs) == len(set(names)):
                raise Enough

        return hook

    hooks = [block.layer(name).register_forward_hook(shows(name)) for name in names]
    try:
        with block.opened(names, rows), suppress(Enough):
            block(hidden, call)
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def not_finite(what: str, hidden: Tensor, batch: int) -> NonFinite:
    """That the output of a block or a layer is not finite."""
    return NonFinite(
        f"The output of {what} is not finite ({hidden.dtype}, batch {batch}). Try --dtype float32, or more calibration tokens."
    )


def first_not_finite(block: Block, hidden: Tensor, call: Call) -> str:
    """The first layer of a block whose output is not finite, by its full name; the block's where it is none of its layers."""
    found: list[str] = []

    def hook_of(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if not all_finite(output):
                found.append(block.full_name(name))

        return hook

    hooks = [layer.register_forward_hook(hook_of(name)) for name, layer in block.layers.items()]
    try:
        with block.opened(block.layers):
            block(hidden, call)
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else block.name
