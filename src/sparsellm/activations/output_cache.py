"""Caches the outputs of modules whose weights and inputs no longer change, so that later passes skip them."""

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
    """A module of a block whose output is that of one of its layers, such as attention, or a feed-forward's output projection.

    Attributes:
        name: The module's path within the block.
        writer: The layer's path within the block.
        others: Number of None values that the module returns after the output, in a tuple; None if it returns the tensor.
        skippable: Layers whose outputs only `writer` uses, so that they need not run either.
    """

    name: str
    writer: str
    others: int | None = None
    skippable: tuple[str, ...] = ()


class OutputCache:
    """The outputs of one module, recorded in its first full pass over the batches and replayed in later ones.

    Valid as long as neither the module's weights nor its inputs change, such as attention once its layers are pruned, while
    the feed-forward layers are being pruned. While the writer is not yet pruned (`pending`), its inputs are recorded instead,
    and `mark_final` turns them into outputs without another pass of the block. `close` frees the memory.

    Args:
        module: The module.
        storage: Stores the outputs.
        size: Bytes of the outputs, or of the writer's inputs if these are larger.
        pending: Whether the writer is still to be pruned.
    """

    def __init__(self, module: CacheableModule, storage: OffloadManager, size: int, pending: bool = False) -> None:
        self.module, self.pending, self._storage = module, pending, ExitStack()
        (self._tensors,) = self._storage.enter_context(storage.new_lists(1, size))

    def close(self) -> None:
        """Free the cached tensors."""
        self._storage.close()

    def record_input(self, inputs: Tensor) -> None:
        """Keep the writer's input for the next batch, (tokens, in), until `mark_final`. It must not be modified in place."""
        owns_storage = inputs.untyped_storage().nbytes() == inputs.nbytes
        self._tensors.append(inputs if owns_storage else inputs.clone())

    @torch.no_grad()
    def mark_final(self, block: Block, shapes: Sequence[tuple[int, int]]) -> None:
        """Replace the recorded inputs with the outputs of the pruned writer.

        Args:
            block: The block.
            shapes: (samples, tokens per sample) of each batch.
        """
        layer = block.module_of(self.module.writer)
        for number, shape in enumerate(shapes):
            self._tensors[number] = layer(self._tensors[number].view(*shape, -1))
        self.pending = False

    @contextmanager
    def replay_or_record(self, block: Block, number: int) -> Iterator[None]:
        """Replay the module's output for batch `number` within the context, or record it if there is none."""
        module, cached = block.module_of(self.module.name), self.module
        if self.pending:
            yield
            return
        if number < len(self._tensors):
            # Some families add to the output in place. An output with skippable layers is replayed only once.
            output = self._tensors[number] if cached.skippable else self._tensors[number].clone()

            def replay(*inputs: Tensor, **_: Any) -> Any:
                if cached.skippable:
                    return output.view(*inputs[0].shape[:-1], -1)
                return output if cached.others is None else (output, *[None] * cached.others)

            with ExitStack() as stack:
                stack.enter_context(replace_forward(module, replay))
                for name in cached.skippable:
                    stack.enter_context(replace_forward(block.module_of(name), empty_output))
                yield
            return

        def record(module: nn.Module, inputs: Any, output: Any) -> None:
            if number == len(self._tensors):  # batches come in order
                self._tensors.append(output_tensor(output).clone())

        handle = module.register_forward_hook(record)
        try:
            yield
        finally:
            handle.remove()


class OutputCaches:
    """The output caches of the current block, for the pruned stream and the dense stream.

    Args:
        storage: Stores the outputs.
    """

    def __init__(self, storage: OffloadManager) -> None:
        self._storage = storage
        self._caches: dict[bool, list[OutputCache]] = {False: [], True: []}  # by whether the stream is dense

    def store(self, module: CacheableModule, dense: bool, size: int, pending: bool = False) -> None:
        """Cache the outputs of a module from now on.

        Args:
            module: The module.
            dense: Whether in the dense stream.
            size: As for `OutputCache`.
            pending: Whether its writer is still to be pruned; the cache then takes effect at `mark_final`.
        """
        self.invalidate(dense, module.name)
        self._caches[dense].append(OutputCache(module, self._storage, size, pending))

    def record_inputs(self, inputs: Mapping[str, Tensor]) -> None:
        """Record the inputs of pending writers for the next batch of the pruned stream, by layer, (tokens, in)."""
        for cache in self._caches[False]:
            if cache.pending and cache.module.writer in inputs:
                cache.record_input(inputs[cache.module.writer])

    def mark_final(self, block: Block, names: Sequence[str], shapes: Sequence[tuple[int, int]]) -> None:
        """Compute the outputs of pending caches whose writers are pruned.

        Args:
            block: The current block.
            names: The layers that are pruned.
            shapes: (samples, tokens per sample) of each batch.
        """
        for cache in self._caches[False]:
            if cache.pending and cache.module.writer in names:
                cache.mark_final(block, shapes)

    def invalidate(self, dense: bool, name: str | None = None) -> None:
        """Discard the caches of one stream: that of module `name`, or all."""
        for cache in [cache for cache in self._caches[dense] if name in (None, cache.module.name)]:
            self._caches[dense].remove(cache)
            cache.close()

    def close(self) -> None:
        """Discard all caches."""
        for dense in self._caches:
            self.invalidate(dense)

    @contextmanager
    def replay_or_record(self, dense: bool, block: Block, number: int) -> Iterator[None]:
        """Replay or record the outputs of all cached modules of one stream for batch `number`, within the context."""
        with ExitStack() as stack:
            for cache in self._caches[dense]:
                stack.enter_context(cache.replay_or_record(block, number))
            yield


def empty_output(inputs: Tensor) -> Tensor:
    """Return the output of a skipped layer: (..., 0) for inputs of (..., in)."""
    return inputs.new_empty(*inputs.shape[:-1], 0)


def output_tensor(output: Any) -> Tensor:
    """Return the tensor of a module's output, the first item if that is a tuple."""
    tensor: Tensor = output[0] if isinstance(output, tuple) else output
    return tensor


class StopForward(Exception):
    """Ends a block's forward pass once all requested tensors are captured."""


def is_enclosed(block: Block, writer: str) -> bool:
    """Return whether a layer is the last one of a module in the block, whose output might be cached.

    Modules that hold layers as views are excluded: with hooks on the views, their results differ in rounding.
    """
    enclosing, _, _ = writer.rpartition(".")
    names = [name for name in block.layers if name.startswith(f"{enclosing}.")]
    return bool(enclosing) and names[-1] == writer and not any(name in block.views for name in names)


@contextmanager
def find_enclosing(block: Block, writer: str) -> Iterator[list[CacheableModule]]:
    """Check the module around a layer in a pass of one batch within the context. The pass ends after that module.

    Args:
        block: The block.
        writer: A layer for which `is_enclosed` holds.

    Yields:
        A list, to which the pass adds the module if it returns the layer's output and nothing else.
    """
    enclosing, _, _ = writer.rpartition(".")
    modules: list[CacheableModule] = []
    writer_outputs: list[Tensor] = []

    def record(module: nn.Module, inputs: Any, output: Any) -> None:
        writer_outputs.append(output_tensor(output))

    def compare(module: nn.Module, inputs: Any, output: Any) -> None:
        tensor = output_tensor(output)
        others = output[1:] if isinstance(output, tuple) else ()
        equal = (
            len(writer_outputs) == 1
            and tensor.ndim == 3
            and tensor.shape == writer_outputs[0].shape
            and torch.equal(tensor, writer_outputs[0])
        )
        if equal and all(value is None for value in others):
            modules.append(CacheableModule(enclosing, writer, len(others) if isinstance(output, tuple) else None))
        raise StopForward

    handles = [
        block.module_of(writer).register_forward_hook(record),
        block.module_of(enclosing).register_forward_hook(compare),
    ]
    try:
        with suppress(StopForward):
            yield modules
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def find_skippable(block: Block, writer: str) -> Iterator[list[CacheableModule]]:
    """Check in a pass of one batch whether a feed-forward's output projection uses only its input projections' outputs.

    Args:
        block: The block.
        writer: The output projection; the check does nothing for other layers.

    Yields:
        A list, to which the pass adds the output projection if its input is the activation of the input projections' outputs.
        Once it is pruned, neither it nor the input projections need to run.
    """
    part = block.architecture.feed_forward
    modules: list[CacheableModule] = []
    if part is None or part.out_proj != writer or any(name in block.views for name in (*part.in_proj, writer)):
        yield modules
        return
    outputs: dict[str, Tensor] = {}

    def record(name: str) -> Callable[..., None]:
        return lambda _, __, output: outputs.__setitem__(name, output)

    def compare(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if len(outputs) == len(part.in_proj):
            expected = part.activate(*(outputs[name] for name in part.in_proj))
            if allclose_bf16(inputs[0], expected):
                modules.append(CacheableModule(writer, writer, skippable=part.in_proj))

    handles = [block.module_of(name).register_forward_hook(record(name)) for name in part.in_proj]
    handles.append(block.module_of(writer).register_forward_pre_hook(compare, prepend=True))  # before a hook that ends the pass
    try:
        yield modules
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def find_cacheable(block: Block, writer: str, hidden: Tensor, call: Call) -> CacheableModule | None:
    """Return the module around a layer, such as attention, if its output is the layer's; otherwise None.

    Args:
        block: The block.
        writer: The layer.
        hidden: The block's input on the batch that is used for the check, (batch, seq, model).
        call: The block's other arguments on that batch.
    """
    if not is_enclosed(block, writer):
        return None
    with find_enclosing(block, writer) as modules:
        block(hidden, call)
    return modules[0] if modules else None


@torch.no_grad()
def is_residual_sum(block: Block, writers: Sequence[str], hidden: Tensor, call: Call) -> bool:
    """Return whether the block's output is its input plus the outputs of `writers`, checked on one batch.

    Args:
        block: The block.
        writers: Layers or modules of the block.
        hidden: The block's input, (batch, seq, model).
        call: The block's other arguments.
    """
    outputs: list[Tensor] = []

    def record(module: nn.Module, inputs: Any, output: Any) -> None:
        outputs.append(output_tensor(output).flatten(0, -2).clone())  # some families add to it in place

    handles = [block.module_of(name).register_forward_hook(record) for name in writers]
    try:
        with block.expose_layers(writers):
            result = block(hidden, call).flatten(0, -2)
    finally:
        for handle in handles:
            handle.remove()
    return allclose_bf16(result, sum((output.view_as(result) for output in outputs), hidden.flatten(0, -2)))


def allclose_bf16(found: Tensor, expected: Tensor) -> bool:
    """Return whether two tensors agree to 2 % in norm; the rounding error of bfloat16 is 0.4 %."""
    return float((found - expected).float().norm()) <= 0.02 * float(found.float().norm())
