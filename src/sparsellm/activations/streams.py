"""The hidden states of all calibration batches on their way from block to block, and the arguments of each block's call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparsellm.activations.expert_routing import ExpertSamples, sample_expert_tokens
from sparsellm.activations.hooks import BlockForward, Capture, CaptureRequest, Hooks, capture, capture_hooks
from sparsellm.activations.onward import StreamUpdate, check_first_inputs
from sparsellm.activations.output_cache import (
    CacheableModule,
    OutputCaches,
    find_cacheable,
    find_enclosing,
    find_skippable,
    is_enclosed,
    is_residual_sum,
)
from sparsellm.models.block_calls import Call, cast, equal_calls
from sparsellm.models.blocks import Block
from sparsellm.models.contexts import compute_dtype_context
from sparsellm.models.partial_forward import block_inputs
from sparsellm.runtime import collectives
from sparsellm.runtime.offload import OffloadManager, TensorList
from sparsellm.solvers.linalg import squares_finite

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Activations:
    """The hidden states that enter the current block, in one stream or two, and the calls of each block.

    The pruned stream is computed by the pruned model, the dense stream by the dense model. With several processes, each holds
    its share of the batches.

    Attributes:
        pruned: The pruned stream, one (batch, seq, model) tensor per batch.
        dense: The dense stream; None if no method needs it.
        teacher: The dense copy of the current block; None if there is no dense stream.
        metrics: For each block, F of its output (`output_sensitivities`), if a method needs it.
        storage: Stores cached outputs and what a method keeps per batch.
        shapes: (samples, tokens per sample) of each batch, over all processes.
        window: Tokens per sample.
    """

    def __init__(
        self,
        pruned: TensorList,
        calls: list[list[Call]],
        dense: TensorList | None = None,
        storage: OffloadManager | None = None,
        shapes: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.pruned = pruned
        self.dense = dense
        self.teacher: Block | None = None
        self.metrics: Sequence[Tensor] = []
        self.storage = storage or OffloadManager()
        self.shapes, self.window = shapes, shapes[0][1] if shapes else None
        self._calls = calls  # by block, then by batch
        self._expert_samples: tuple[int, ExpertSamples] | None = None  # with the index of their block
        self._caches = OutputCaches(self.storage)
        self._advanced: int | None = None  # the block whose outputs the pruned stream already holds

    @classmethod
    def from_model(
        cls,
        model: PreTrainedModel,
        blocks: Sequence[Block],
        batches: Sequence[Tensor],
        dtype: torch.dtype | None = None,
        streams: Sequence[TensorList] = (),
        storage: OffloadManager | None = None,
    ) -> Activations:
        """Run the model up to its first block, and record the call of each block.

        Blocks may differ in their arguments, such as an attention mask with or without a sliding window. Each block's are
        recorded in a forward pass of the model in which the blocks return their inputs.

        Args:
            model: The model.
            blocks: Its blocks.
            batches: Token ids, each (batch, seq), without padding. This process runs its share of them.
            dtype: Dtype of the computation; None for the model's own.
            streams: Empty lists for the pruned stream and, optionally, the dense stream; by default one list for the pruned.
            storage: As for `walk`.

        Raises:
            NonFinite: The squares of the hidden states that enter the first block are not finite.
        """
        calls: list[list[Call]] = [[] for _ in blocks]
        finite: list[Tensor] = []
        pruned, *dense = streams or ([],)
        with compute_dtype_context(model, dtype, without=[block.module for block in blocks]):
            for batch in collectives.shard(batches):
                inputs = block_inputs(model, blocks, batch)
                finite.append(squares_finite(inputs[0][0]))
                for index, (_, call) in enumerate(inputs):
                    candidates = [*calls[index][-1:], *(calls[index - 1][-1:] if index else [])]
                    calls[index].append(next((previous for previous in candidates if equal_calls(previous, call)), call))
                for stream in (pruned, *dense):  # both hold one tensor: `advance` replaces it and never writes into it
                    stream.append(cast(inputs[0][0], dtype))
        check_first_inputs(blocks[0].name, finite)
        distinct = {id(call): call for row in calls for call in row}  # cast each once: most blocks and batches share theirs
        cast_calls = {key: cast(call, dtype) for key, call in distinct.items()}
        calls_by_block = [[cast_calls[id(call)] for call in row] for row in calls]
        shapes = [(len(batch), batch.shape[1]) for batch in batches]
        return cls(pruned, calls_by_block, dense[0] if dense else None, storage, shapes)

    @property
    def tokens(self) -> int:
        """Number of tokens of a stream in this process."""
        return sum(samples * length for samples, length in collectives.shard(self.shapes))

    @property
    def sample_offsets(self) -> list[int]:
        """For each batch of this process, the index of its first sample among all samples."""
        return collectives.shard(list(accumulate((samples for samples, _ in self.shapes[:-1]), initial=0)))

    def calls(self, block: Block, dtype: torch.dtype | None = None) -> list[Call]:
        """Return the block's call on each batch, with floating-point tensors converted to `dtype`, if given."""
        distinct = {id(call): cast(call, dtype) for call in self._calls[block.index]}
        return [distinct[id(call)] for call in self._calls[block.index]]

    def output_fisher(self, block: Block) -> Tensor:
        """Return F of the block's output, (model, model); see `sparsellm.activations.sensitivity`."""
        return self.metrics[block.index]

    def begin_block(self, block: Block) -> None:
        """Make `block` the current block, and copy it if there is a dense stream."""
        self.close()
        self.teacher = block.copy() if self.dense is not None else None

    def expert_tokens(self, block: Block, name: str) -> int | None:
        """Return the number of tokens routed to a layer's expert; None if it has no expert, or the number is unknown."""
        view = block.views.get(name)
        if view is None or view.expert is None or self._expert_samples is None or self._expert_samples[0] != block.index:
            return None
        return int(self._expert_samples[1].counts[view.expert])

    @torch.no_grad()
    def expert_samples(self, block: Block, names: Sequence[str]) -> ExpertSamples | None:
        """Return the selection of tokens for the experts of these layers; None if no layer belongs to an expert.

        Computed once per block, in a pass of its own at the first call, when layers before the experts may be pruned already.
        """
        views = [block.views[name] for name in names if name in block.views and block.views[name].expert is not None]
        if not views:
            return None
        if self._expert_samples is None or self._expert_samples[0] != block.index:
            tokens = [samples * length for samples, length in self.shapes]
            self._expert_samples = (
                block.index,
                sample_expert_tokens(block, zip(self.pruned, self._calls[block.index], strict=True), tokens),
            )
        selection = self._expert_samples[1]
        selection.restart()
        return selection

    @torch.no_grad()
    def paired_batches(
        self, block: Block, pruned: CaptureRequest, dense: CaptureRequest, last: str = ""
    ) -> Iterator[tuple[Capture, Capture]]:
        """Capture tensors from both streams, batch by batch.

        Experts get the same tokens in both streams, chosen by the pruned stream's router. If the request for the dense stream
        is for the whole pass, the stream advances with it, and the dense block is discarded at the end. This does not apply to
        blocks with views, whose forward layer by layer differs from the original in rounding.

        Args:
            block: The current block.
            pruned: The tensors to capture from `block` on the pruned stream.
            dense: The tensors to capture from the dense block on the dense stream.
            last: The feed-forward's output projection, if it is pruned next, and alone.

        Yields:
            The captures of the pruned and of the dense stream.

        Raises:
            NonFinite: The dense stream is not finite after the block.
        """
        if self.dense is None or self.teacher is None:
            raise TypeError("There is no dense stream: ask for one with teacher=True.")
        dense = replace(dense, whole=dense.whole and not block.views)
        selection = self.expert_samples(block, [*pruned.inputs, *pruned.outputs])
        pruned_rows, dense_rows = (selection.choose, selection.repeat) if selection else (None, None)
        teacher, update = self.teacher, StreamUpdate(self.dense, self.teacher)
        for number, call in enumerate(self.calls(block)):
            check = find_skippable(block, last if number == 0 else "")
            with self._caches.replay_or_record(False, block, number), check as modules:
                pruned_capture = capture(block, pruned, self.pruned[number], call, pruned_rows)
            self.schedule_cache(block, *modules)
            self._caches.record_inputs(pruned_capture.inputs)
            with self._caches.replay_or_record(True, teacher, number):
                dense_capture = capture(teacher, dense, self.dense[number], call, dense_rows)
            yield pruned_capture, dense_capture
            if dense_capture.block_output is not None:
                update.replace(number, dense_capture.block_output, call)
        update.check_finite()
        if dense.whole:
            self._finish_dense()

    @torch.no_grad()
    def run_with_hooks(
        self, block: Block, reads: Hooks, writes: Hooks | None = None, advance: bool = False, last: str | None = None
    ) -> None:
        """Pass all batches of the pruned stream through the block, up to its last hook.

        Args:
            block: The current block.
            reads: Hooks for the inputs of layers.
            writes: Hooks for the outputs of layers or modules.
            advance: Whether the block is final, so that this pass can also advance the stream. The method `advance` then has
                nothing to do.
            last: The layer among `reads` that is pruned next. If a module ends with it, that module's output is cached once
                the layer is final (`mark_final`).

        Raises:
            NonFinite: The stream is not finite after the block.
        """
        selection = self.expert_samples(block, [*reads, *(writes or {})])
        # Views: as in `paired_batches`. The last block's outputs are not used.
        whole = advance and not block.views and block.index + 1 < len(self._calls)
        update = StreamUpdate(self.pruned, block)
        last_inputs: dict[str, Tensor] = {}
        extra: Hooks = {} if last is None else {last: [*reads[last], partial(last_inputs.__setitem__, last)]}
        rows = selection.choose if selection else None
        with capture_hooks(block, {**reads, **extra}, writes or {}, rows, whole) as forward:
            for number, call in enumerate(self._calls[block.index]):
                with self._caches.replay_or_record(False, block, number):
                    if last is not None and number == 0:
                        hidden = self._run_first_batch(block, last, forward, call)
                    else:
                        hidden = forward(self.pruned[number], call)
                self._caches.record_inputs(last_inputs)
                if whole and hidden is not None:
                    update.replace(number, hidden, call)
        update.check_finite()
        self._advanced = block.index if whole else None

    @torch.no_grad()
    def advance(self, block: Block) -> None:
        """Replace the streams with the block's outputs, the inputs of the next block. Raises NonFinite, naming the block."""
        self.advance_dense()
        if self._advanced != block.index:
            self._advance(self.pruned, block)
        self._advanced = None
        self.close()

    @torch.no_grad()
    def advance_dense(self) -> None:
        """Replace the dense stream with the dense block's outputs, unless that is done or there is no dense stream."""
        if self.dense is not None and self.teacher is not None:
            self._advance(self.dense, self.teacher, dense=True)
            self._finish_dense()

    def _finish_dense(self) -> None:
        """Discard the dense block and its caches once the dense stream has passed through it."""
        self.teacher = None
        self.invalidate_cache(dense=True)

    def cache_output(self, module: CacheableModule, dense: bool) -> None:
        """Cache the outputs of a module of the current block from now on.

        Args:
            module: A result of `cacheable_module`.
            dense: Whether in the dense stream.
        """
        hidden = (self.dense if dense and self.dense is not None else self.pruned)[0]
        self._caches.store(module, dense, self.tokens * hidden[0, 0].nbytes)

    def schedule_cache(self, block: Block, *modules: CacheableModule) -> None:
        """Cache the outputs of modules in the pruned stream from when their writers, which are pruned next, are final.

        The next pass that captures a writer's inputs records them. Those of a feed-forward's output projection take more
        memory than the stream, and are recorded only if they fit on the device.
        """
        for module in modules:
            layer, last = block.layer(module.writer), block.index + 1 == len(self._calls)  # the last block's output is not used
            size = self.tokens * max(layer.in_features, layer.out_features) * self.pruned[0].element_size()
            if not module.skippable or (self.storage.fits_on_device(size) and not last):
                self._caches.store(module, False, size, pending=True)

    def _run_first_batch(self, block: Block, writer: str, forward: BlockForward, call: Call) -> Tensor | None:
        """Pass the first batch, and schedule a cache for the module that ends with `writer`."""
        part = block.architecture.feed_forward
        enclosed = is_enclosed(block, writer) and (part is None or part.out_proj != writer)
        with find_enclosing(block, writer) if enclosed else find_skippable(block, writer) as modules:
            hidden = forward(self.pruned[0], call, beyond=enclosed)
        self.schedule_cache(block, *modules)
        return hidden

    def mark_final(self, block: Block, names: Sequence[str]) -> None:
        """Declare that these layers are pruned and no longer change."""
        self._caches.mark_final(block, names, collectives.shard(self.shapes))

    def invalidate_cache(self, dense: bool) -> None:
        """Discard the cached outputs of one stream."""
        self._caches.invalidate(dense)

    def close(self) -> None:
        """Free the memory of all caches."""
        self._caches.close()

    def cacheable_module(self, writer: str) -> CacheableModule | None:
        """Return the module around a layer of the current block, such as attention, if it can be cached; otherwise None."""
        if self.dense is None or self.teacher is None:
            return None
        module = find_cacheable(self.teacher, writer, self.dense[0], self.calls(self.teacher)[0])
        fields = collectives.broadcast_object(module and asdict(module))
        return fields and CacheableModule(fields["name"], fields["writer"], fields["others"])

    @torch.no_grad()
    def is_residual_sum(self, writers: Sequence[str]) -> bool:
        """Return whether the current block's output is its input plus the outputs of `writers`.

        If so, an error in the block's output can be corrected in the outputs of `writers`. Checked on the first batch of the
        dense stream. False for blocks that normalise or scale before the addition.

        Args:
            writers: Layers or modules of the block.
        """
        if self.dense is None or self.teacher is None or not writers:
            return False
        return bool(
            collectives.broadcast_object(is_residual_sum(self.teacher, writers, self.dense[0], self.calls(self.teacher)[0]))
        )

    def _advance(self, stream: TensorList, block: Block, dense: bool = False) -> None:
        """Pass one stream, the dense one if `dense`, through a block."""
        update = StreamUpdate(stream, block)
        for number, call in enumerate(self.calls(block)):
            with self._caches.replay_or_record(dense, block, number):
                hidden = block(stream[number], call)
            update.replace(number, hidden, call)
        update.check_finite()


def stream_bytes(model: PreTrainedModel, batches: Sequence[Tensor], dtype: torch.dtype | None = None) -> int:
    """Return the bytes of a stream: the hidden states of all batches, in `dtype` or the dtype of the embeddings."""
    embedding = model.get_input_embeddings().weight
    width: int = model.config.get_text_config().hidden_size
    return sum(batch.numel() for batch in batches) * width * (dtype or embedding.dtype).itemsize
