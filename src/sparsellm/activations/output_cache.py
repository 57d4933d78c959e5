"""Caches the outputs of modules whose weights and inputs no longer change, so that later passes skip them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparsellm.models.blocks import Block, Call, output_tensor
from sparsellm.models.contexts import product_dtype_context, replace_forward
from sparsellm.models.sparse_matmul import PrunedLayers
from sparsellm.runtime import collectives
from sparsellm.runtime.offload import OffloadManager, TensorList
from sparsellm.solvers.linalg import allclose_bf16


@dataclass(frozen=True)
class CacheableModule:
    """A module of a block whose output is that of one of its layers, such as attention, or a feed-forward's output projection.

    Attributes:
        others: Number of None values that the module returns after the output, in a tuple; None if it returns the tensor.
        skippable: Layers whose outputs only `writer` uses, so that they need not run either.
    """

    name: str
    writer: str
    others: int | None = None
    skippable: tuple[str, ...] = ()


@dataclass(frozen=True)
class BlockDataflow:
    """How a block combines the outputs of its layers, as seen in a pass of one batch.

    Attributes:
        cacheable: By layer, the module whose output that layer computes.
        residual_sum: Whether the block's output is its input plus the outputs of the architecture's residual writers. If so, an
            error in the block's output can be corrected in these outputs. False for blocks that normalize or scale before the
            addition.
    """

    cacheable: Mapping[str, CacheableModule]
    residual_sum: bool


@torch.no_grad()
def trace_dataflow(block: Block, hidden: Tensor, call: Call) -> BlockDataflow:
    """Find out in a pass of one batch how a block combines the outputs of its layers; the same answer on all processes.

    Modules that hold layers as views are not cacheable: with hooks on the views, their results differ in rounding.

    Args:
        hidden: The block's input, (batch, seq, model).
    """
    if block.is_head:  # nothing to find, and the pass would compute logits
        return BlockDataflow({}, residual_sum=False)
    cacheable: dict[str, CacheableModule] = {}
    residuals: dict[str, Tensor] = {}
    writers = block.architecture.residual_writers or ()

    def record_residual(name: str) -> Callable[..., None]:  # cloned, since some families add to it in place
        return lambda _, __, output: residuals.__setitem__(name, output_tensor(output).flatten(0, -2).clone())

    with ExitStack() as stack:
        for name in writers:
            stack.callback(block.module_of(name).register_forward_hook(record_residual(name)).remove)
        for name in block.layers:
            stack.enter_context(_find_enclosing(block, name, cacheable))
        stack.enter_context(_find_skippable(block, cacheable))
        stack.enter_context(block.expose_layers(writers))
        output = block(hidden, call).flatten(0, -2)
    residual_sum = len(residuals) == len(writers) > 0 and allclose_bf16(
        output, sum((residuals[name].view_as(output) for name in writers), hidden.flatten(0, -2))
    )
    fields = [[name, module.name, module.writer, module.others, module.skippable] for name, module in cacheable.items()]
    fields, residual_sum = collectives.broadcast_object([fields, residual_sum])
    modules = {layer: CacheableModule(name, writer, others, tuple(skip)) for layer, name, writer, others, skip in fields}
    return BlockDataflow(modules, residual_sum)


@contextmanager
def _find_enclosing(block: Block, writer: str, cacheable: dict[str, CacheableModule]) -> Iterator[None]:
    """Add the module around a layer if, in a pass within the context, it returns the layer's output and nothing else."""
    enclosing, _, _ = writer.rpartition(".")
    names = [name for name in block.layers if name.startswith(f"{enclosing}.")]
    part = block.architecture.feed_forward
    if not enclosing or names[-1] != writer or any(name in block.views for name in names) or (part and part.out_proj == writer):
        yield
        return
    outputs: list[Tensor] = []

    def record(module: nn.Module, inputs: Any, output: Any) -> None:
        outputs.append(output_tensor(output))

    def compare(module: nn.Module, inputs: Any, output: Any) -> None:
        tensor = output_tensor(output)
        others = output[1:] if isinstance(output, tuple) else ()
        equal = len(outputs) == 1 and tensor.ndim == 3 and tensor.shape == outputs[0].shape and torch.equal(tensor, outputs[0])
        if equal and all(value is None for value in others):
            cacheable[writer] = CacheableModule(enclosing, writer, len(others) if isinstance(output, tuple) else None)

    with ExitStack() as stack:
        stack.callback(block.module_of(writer).register_forward_hook(record).remove)
        stack.callback(block.module_of(enclosing).register_forward_hook(compare).remove)
        yield


@contextmanager
def _find_skippable(block: Block, cacheable: dict[str, CacheableModule]) -> Iterator[None]:
    """Add the feed-forward's output projection if, in a pass within the context, it reads its input projections' activation.

    Once it is pruned, neither it nor the input projections need to run.
    """
    part = block.architecture.feed_forward
    if part is None or any(name in block.views for name in (*part.in_proj, part.out_proj)):
        yield
        return
    outputs: dict[str, Tensor] = {}

    def record(name: str) -> Callable[..., None]:
        return lambda _, __, output: outputs.__setitem__(name, output)

    def compare(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if len(outputs) == len(part.in_proj):
            expected = part.activate(*(outputs[name] for name in part.in_proj))
            if allclose_bf16(inputs[0], expected):
                cacheable[part.out_proj] = CacheableModule(part.out_proj, part.out_proj, skippable=part.in_proj)

    with ExitStack() as stack:
        for name in part.in_proj:
            stack.callback(block.module_of(name).register_forward_hook(record(name)).remove)
        stack.callback(block.module_of(part.out_proj).register_forward_pre_hook(compare).remove)
        yield


class OutputCache:
    """Outputs of modules of one block, recorded in a pass of one stream over the batches and replayed in later passes.

    Valid as long as neither the modules' weights nor their inputs change, such as attention once its layers are pruned, while
    the feed-forward layers are being pruned. Passes with and without a cache capture the same bits.

    Args:
        shapes: (samples, tokens per sample) of each batch of this process.
        hidden: The block's input on one batch, (batch, seq, model).
    """

    def __init__(self, storage: OffloadManager, shapes: Sequence[tuple[int, int]], hidden: Tensor) -> None:
        self._storage, self._shapes, self._hidden = storage, shapes, hidden[0, 0]
        self._tokens = sum(samples * length for samples, length in shapes)
        self._entries: dict[str, _Entry] = {}  # by module

    def record(self, module: CacheableModule) -> None:
        """Cache the outputs of a module from the next pass on."""
        self._add(module, self._tokens * self._hidden.nbytes, pending=False)

    def schedule(self, block: Block, module: CacheableModule, *, is_last: bool) -> None:
        """Cache the outputs of a module from when its writer, which is pruned next, is final (`mark_final`).

        The next pass that captures the writer's inputs records them. Those of a feed-forward's output projection take more
        memory than the stream, and are recorded only if they fit on the device.

        Args:
            is_last: Whether this is the last block of the model, whose outputs are not used.
        """
        layer = block.layer(module.writer)
        size = self._tokens * max(layer.in_features, layer.out_features) * self._hidden.element_size()
        if not module.skippable or (self._storage.fits_on_device(size) and not is_last):
            self._add(module, size, pending=True)

    def record_inputs(self, inputs: Mapping[str, Tensor]) -> None:
        """Record the inputs of pending writers for the next batch, by layer, (tokens, in), which nobody may modify in place."""
        for entry in self._entries.values():
            if entry.pending and entry.module.writer in inputs:
                tensor = inputs[entry.module.writer]
                owns_storage = tensor.untyped_storage().nbytes() == tensor.nbytes
                entry.tensors.append(tensor if owns_storage else tensor.clone())

    @torch.no_grad()
    def mark_final(self, block: Block, names: Sequence[str]) -> None:
        """Replace the recorded inputs of pruned writers with their outputs.

        Args:
            names: The layers that are pruned and no longer change.
        """
        for entry in self._entries.values():
            if entry.pending and entry.module.writer in names:
                layer = block.module_of(entry.module.writer)
                with PrunedLayers(block).used(), product_dtype_context(block.device, block.products):
                    for number, shape in enumerate(self._shapes):
                        entry.tensors[number] = layer(entry.tensors[number].view(*shape, -1))
                entry.pending = False

    @contextmanager
    def replay_or_record(self, block: Block, number: int) -> Iterator[None]:
        """Replay the outputs of all cached modules for batch `number` within the context, or record those that are missing."""
        with ExitStack() as stack:
            for entry in self._entries.values():
                if not entry.pending:
                    replay_or_record = entry.replay if number < len(entry.tensors) else entry.record
                    stack.enter_context(replay_or_record(block, number))
            yield

    def close(self) -> None:
        """Discard all outputs and free their memory."""
        for entry in self._entries.values():
            entry.storage.close()
        self._entries.clear()

    def _add(self, module: CacheableModule, size: int, *, pending: bool) -> None:
        """Make room for the outputs of a module, instead of those that it may have."""
        if module.name in self._entries:
            self._entries.pop(module.name).storage.close()
        storage = ExitStack()
        (tensors,) = storage.enter_context(self._storage.new_lists(1, size))
        self._entries[module.name] = _Entry(module, tensors, storage, pending)


@dataclass
class _Entry:
    """The cached tensors of one module: inputs of its writer while that is pending, else outputs."""

    module: CacheableModule
    tensors: TensorList
    storage: ExitStack
    pending: bool

    @contextmanager
    def replay(self, block: Block, number: int) -> Iterator[None]:
        """Replace the forward function of the module, and of the layers that need not run, within the context."""
        # Some families add to the output in place. An output with skippable layers is replayed only once.
        output = self.tensors[number] if self.module.skippable else self.tensors[number].clone()

        def replayed(*inputs: Tensor, **_: Any) -> Any:
            if self.module.skippable:
                return output.view(*inputs[0].shape[:-1], -1)
            return output if self.module.others is None else (output, *[None] * self.module.others)

        with ExitStack() as stack:
            stack.enter_context(replace_forward(block.module_of(self.module.name), replayed))
            for name in self.module.skippable:
                stack.enter_context(replace_forward(block.module_of(name), lambda x: x.new_empty(*x.shape[:-1], 0)))
            yield

    @contextmanager
    def record(self, block: Block, number: int) -> Iterator[None]:
        """Append the module's output for batch `number` within the context, if a pass got there for all batches before it."""

        def append(module: nn.Module, inputs: Any, output: Any) -> None:
            if number == len(self.tensors):
                self.tensors.append(output_tensor(output).clone())

        handle = block.module_of(self.module.name).register_forward_hook(append)
        try:
            yield
        finally:
            handle.remove()
