"""Modules of a block that write the same in every later pass: what they wrote is kept, and they need not run again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparsellm.models.block_calls import Call
from sparsellm.models.blocks import Block
from sparsellm.models.contexts import replace_forward
from sparsellm.runtime.offload import OffloadManager


@dataclass(frozen=True)
class CacheableModule:
    """A module of a block that returns what one layer writes: all of attention, or a feed-forward's last layer itself.

    name: its path within the block. writer: that layer's. others: how many values that are None it returns after it in a tuple;
    None where it returns the tensor itself. spared: layers that nobody reads but the writer, which then need not run either.
    """

    name: str
    writer: str
    others: int | None = None
    skippable: tuple[str, ...] = ()


class OutputCache:
    """What a module writes for each batch, so that it need not run again: kept in the first pass in which it runs to its end.

    Right for as long as neither the module changes nor what it reads, as attention once its own layers are pruned, while those
    of the feed-forward part are. While its writer is still to be pruned, what that `reads` is kept, and turned into what it
    then `writes`: the module does not run even once more. Close it to give its room back.

    module: the module. storage: where its outputs are kept. size: their bytes, or those of what is read if these are more.
    pending: whether its writer is still to be pruned.
    """

    def __init__(self, module: CacheableModule, storage: OffloadManager, size: int, pending: bool = False) -> None:
        self.module, self.pending, self._room = module, pending, ExitStack()
        (self._kept,) = self._room.enter_context(storage.new_lists(1, size))

    def close(self) -> None:
        """Give back what the outputs take."""
        self._room.close()

    def record_input(self, inputs: Tensor) -> None:
        """Keep what the writer reads of the next batch, (tokens, in), until it `writes`. Nobody may write into it any more."""
        whole = inputs.untyped_storage().nbytes() == inputs.nbytes
        self._kept.append(inputs if whole else inputs.clone())

    @torch.no_grad()
    def mark_final(self, block: Block, shapes: Sequence[tuple[int, int]]) -> None:
        """The writer is as it will stay. shapes: (windows, tokens a window), batch by batch."""
        layer = block.module_of(self.module.writer)
        for number, shape in enumerate(shapes):
            self._kept[number] = layer(self._kept[number].view(*shape, -1))
        self.pending = False

    @contextmanager
    def replay_or_record(self, block: Block, number: int) -> Iterator[None]:
        """Within the context the block's module writes what it wrote for this batch, or runs and is listened to."""
        module, known = block.module_of(self.module.name), self.module
        if self.pending:
            yield
            return
        if number < len(self._kept):
            # Some families add to it in place, but what spares readers is recalled once, when the stream travels on.
            written = self._kept[number] if known.skippable else self._kept[number].clone()

            def again(*inputs: Tensor, **_: Any) -> Any:
                if known.skippable:
                    return written.view(*inputs[0].shape[:-1], -1)
                return written if known.others is None else (written, *[None] * known.others)

            with ExitStack() as stack:
                stack.enter_context(replace_forward(module, again))
                for name in known.skippable:
                    stack.enter_context(replace_forward(block.module_of(name), empty_output))
                yield
            return

        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            if number == len(self._kept):  # batches come in order
                self._kept.append(output_tensor(output).clone())

        hook = module.register_forward_hook(keep)
        try:
            yield
        finally:
            hook.remove()


class OutputCaches:
    """What need not be computed again in the present block, by stream: True for the dense one.

    storage: where what was written is kept.
    """

    def __init__(self, storage: OffloadManager) -> None:
        self._storage = storage
        self._known: dict[bool, list[OutputCache]] = {False: [], True: []}

    def store(self, module: CacheableModule, dense: bool, size: int, pending: bool = False) -> None:
        """From now on a module writes the same in every pass of a stream; or, if pending, from when its writer is `solved`."""
        self.invalidate(dense, module.name)
        self._known[dense].append(OutputCache(module, self._storage, size, pending))

    def record_inputs(self, inputs: Mapping[str, Tensor]) -> None:
        """What layers read of the next batch in the pruned stream, (tokens, in) by name."""
        for known in self._known[False]:
            if known.pending and known.module.writer in inputs:
                known.record_input(inputs[known.module.writer])

    def mark_final(self, block: Block, names: Sequence[str], shapes: Sequence[tuple[int, int]]) -> None:
        """These layers are pruned, and stay as they are. shapes: (windows, tokens a window), batch by batch."""
        for known in self._known[False]:
            if known.pending and known.module.writer in names:
                known.mark_final(block, shapes)

    def invalidate(self, dense: bool, name: str | None = None) -> None:
        """What a module wrote in one stream holds no longer, or is needed no longer. name: which; None for all."""
        for known in [some for some in self._known[dense] if name in (None, some.module.name)]:
            self._known[dense].remove(known)
            known.close()

    def close(self) -> None:
        """Forget all."""
        for dense in self._known:
            self.invalidate(dense)

    @contextmanager
    def replay_or_record(self, dense: bool, block: Block, number: int) -> Iterator[None]:
        """Within the context a batch's pass in one stream computes no more than it must."""
        with ExitStack() as stack:
            for known in self._known[dense]:
                stack.enter_context(known.replay_or_record(block, number))
            yield


def empty_output(inputs: Tensor) -> Tensor:
    """What a layer writes that need not run: no numbers, in the shape of what it reads."""
    return inputs.new_empty(*inputs.shape[:-1], 0)


def output_tensor(output: Any) -> Tensor:
    """What a module writes, of all that it returns."""
    written: Tensor = output[0] if isinstance(output, tuple) else output
    return written


class StopForward(Exception):
    """All that was asked for was seen: the rest of the block need not run."""


def is_enclosed(block: Block, writer: str) -> bool:
    """Whether a layer is the last one in a module of the block, so that this might be recalled.

    Modules that hold layers as views are out: with hooks on these they do not compute the same to the bit.
    """
    around, _, _ = writer.rpartition(".")
    inner = [name for name in block.layers if name.startswith(f"{around}.")]
    return bool(around) and inner[-1] == writer and not any(name in block.views for name in inner)


@contextmanager
def find_enclosing(block: Block, writer: str) -> Iterator[list[CacheableModule]]:
    """Within the context a pass of one batch ends with the module around a layer, one that is `enclosed`.

    The list then has the module in it, if it returned what the layer wrote and nothing else.
    """
    around, _, _ = writer.rpartition(".")
    found: list[CacheableModule] = []
    wrote: list[Tensor] = []

    def keeps(module: nn.Module, inputs: Any, output: Any) -> None:
        wrote.append(output_tensor(output))

    def ends(module: nn.Module, inputs: Any, output: Any) -> None:
        one = output_tensor(output)
        others = output[1:] if isinstance(output, tuple) else ()
        alike = len(wrote) == 1 and one.ndim == 3 and one.shape == wrote[0].shape and torch.equal(one, wrote[0])
        if alike and all(some is None for some in others):
            found.append(CacheableModule(around, writer, len(others) if isinstance(output, tuple) else None))
        raise StopForward

    hooks = [block.module_of(writer).register_forward_hook(keeps), block.module_of(around).register_forward_hook(ends)]
    try:
        with suppress(StopForward):
            yield found
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def find_skippable(block: Block, writer: str) -> Iterator[list[CacheableModule]]:
    """Within the context a pass of one batch shows whether a feed-forward's writer reads what the table says, from its readers.

    The list then has the writer in it: once it is pruned, neither it nor its readers need run.
    """
    part = block.architecture.feed_forward
    found: list[CacheableModule] = []
    if part is None or part.out_proj != writer or any(name in block.views for name in (*part.in_proj, writer)):
        yield found
        return
    wrote: dict[str, Tensor] = {}

    def keeps(name: str) -> Callable[..., None]:
        return lambda _, __, output: wrote.__setitem__(name, output)

    def reads(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if len(wrote) == len(part.in_proj):
            expected = part.activate(*(wrote[name] for name in part.in_proj))
            if allclose_bf16(inputs[0], expected):
                found.append(CacheableModule(writer, writer, skippable=part.in_proj))

    hooks = [block.module_of(name).register_forward_hook(keeps(name)) for name in part.in_proj]
    hooks.append(block.module_of(writer).register_forward_pre_hook(reads, prepend=True))  # before the one that ends the pass
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def find_cacheable(block: Block, writer: str, hidden: Tensor, call: Call) -> CacheableModule | None:
    """The module around a layer, such as attention, that can be recalled once the layers up to this one are pruned; or None.

    Seen on one batch.
    """
    if not is_enclosed(block, writer):
        return None
    with find_enclosing(block, writer) as found:
        block(hidden, call)
    return found[0] if found else None


@torch.no_grad()
def is_residual_sum(block: Block, writers: Sequence[str], hidden: Tensor, call: Call) -> bool:
    """Whether a block's output is its input plus what its writers write, layers or modules of it. Seen on one batch."""
    outputs: list[Tensor] = []

    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        outputs.append(output_tensor(output).flatten(0, -2).clone())  # some families add to it in place

    hooks = [block.module_of(name).register_forward_hook(hook) for name in writers]
    try:
        with block.expose_layers(writers):
            found = block(hidden, call).flatten(0, -2)
    finally:
        for one in hooks:
            one.remove()
    return allclose_bf16(found, sum((output.view_as(found) for output in outputs), hidden.flatten(0, -2)))


def allclose_bf16(found: Tensor, expected: Tensor) -> bool:
    """Whether two tensors differ by rounding alone: that of bf16 is 0.4 %."""
    return float((found - expected).float().norm()) <= 0.02 * float(found.float().norm())
