"""A module of a block that writes the same in every later pass: what it wrote is kept, and it need not run again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from sparsellm.blocks import Block
from sparsellm.calls import Call
from sparsellm.modes import instead
from sparsellm.storage import Storage


class Recall:
    """What a module wrote for each batch, from the first pass in which it ran to its end.

    Right for as long as neither the module changes nor what it reads, as attention once its own layers are pruned, while those
    of the feed-forward part are. Close it to give its room back.

    module: its path within the block; one that `within` gives. storage: where its outputs are kept. size: their bytes.
    """

    def __init__(self, module: str, storage: Storage, size: int) -> None:
        self._module, self._room = module, ExitStack()
        (self._kept,) = self._room.enter_context(storage.lists(1, size))
        self._others: int | None = None

    def close(self) -> None:
        """Give back what the outputs take."""
        self._room.close()

    @contextmanager
    def during(self, block: Block, number: int) -> Iterator[None]:
        """Within the context the block's module writes what it wrote for this batch, or runs and is listened to."""
        module = block.run(self._module)
        if number < len(self._kept):
            written = self._kept[number].clone()  # some families add to it in place
            again = written if self._others is None else (written, *[None] * self._others)
            with instead(module, lambda *_, **__: again):
                yield
            return

        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            if number == len(self._kept):  # batches come in order
                self._others = len(output) - 1 if isinstance(output, tuple) else None
                self._kept.append(written_by(output).clone())

        hook = module.register_forward_hook(keep)
        try:
            yield
        finally:
            hook.remove()


def written_by(output: Any) -> Tensor:
    """What a module writes, of all that it returns."""
    written: Tensor = output[0] if isinstance(output, tuple) else output
    return written


class Enough(Exception):
    """All that was asked for was seen: the rest of the block need not run."""


@torch.no_grad()
def within(block: Block, writer: str, hidden: Tensor, call: Call) -> str | None:
    """The module around a layer, such as attention, that can be recalled once the layers up to this one are pruned; or None.

    It returns what the layer writes and nothing else, and holds no later layer. Seen on one batch. Modules that hold layers as
    views are none: with hooks on these they do not compute the same to the bit.
    """
    around, _, _ = writer.rpartition(".")
    order = list(block.layers)
    inner = [name for name in order if name.startswith(f"{around}.")]
    if not around or inner[-1] != writer or any(name in block.views for name in inner):
        return None
    outputs: dict[str, Any] = {}

    def keeps(module: nn.Module, inputs: Any, output: Any) -> None:
        outputs[writer] = output

    def ends(module: nn.Module, inputs: Any, output: Any) -> None:
        outputs[around] = output
        raise Enough

    hooks = [block.run(writer).register_forward_hook(keeps), block.run(around).register_forward_hook(ends)]
    try:
        with suppress(Enough):
            block(hidden, call)
    finally:
        for hook in hooks:
            hook.remove()
    if len(outputs) < 2:
        return None
    one, other = (written_by(outputs[name]) for name in (around, writer))
    others = outputs[around][1:] if isinstance(outputs[around], tuple) else ()
    alike = one.shape == other.shape and torch.equal(one, other)
    return around if alike and all(some is None for some in others) else None


@torch.no_grad()
def additive(block: Block, writers: Sequence[str], hidden: Tensor, call: Call) -> bool:
    """Whether a block's output is its input plus what its writers write, layers or modules of it. Seen on one batch."""
    outputs: list[Tensor] = []

    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        outputs.append(written_by(output).flatten(0, -2).clone())  # some families add to it in place

    hooks = [block.run(name).register_forward_hook(hook) for name in writers]
    try:
        with block.opened(writers):
            found = block(hidden, call).flatten(0, -2)
    finally:
        for one in hooks:
            one.remove()
    expected = sum((output.view_as(found) for output in outputs), hidden.flatten(0, -2))
    return float((found - expected).float().norm()) <= 0.02 * float(found.float().norm())  # bf16 rounds to 0.4 %
