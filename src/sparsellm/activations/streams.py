"""What travels from block to block: the hidden states of every calibration batch, and how each block is called."""

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
    """The hidden states that enter the present block, batch by batch, in one stream or two.

    pruned: what the pruned model computes, one (batch, seq, model) tensor for every batch. dense: what the dense model
    computes; None where no method asks. teacher: the present block as it was, where there is a dense stream.
    metrics: what errors of each block's output cost, where a method asks. storage: where a method may keep more of that kind.

    Of several processes each has the batches dealt to it. shapes: (windows, tokens a window) of each of all batches.
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
        self._routes: tuple[int, ExpertSamples] | None = None  # of the block that was asked about last
        self._recalls = OutputCaches(self.storage)
        self._behind: int | None = None  # the block that the pruned stream is behind already

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
        """Run the model as far as its first block, and learn how each block is called.

        batches: token numbers, each (batch, seq), without padding, of which this process takes its share. dtype: what the model
        will be computed in, if not its own. streams: empty lists for the pruned stream, and for the dense one where it is to
        travel too; a list for the pruned one by default.

        Every block is called as the model itself calls it: blocks may differ in their keywords (an attention mask with or
        without a sliding window), so each block's are recorded, with the blocks themselves passing the hidden states through.
        """
        calls: list[list[Call]] = [[] for _ in blocks]
        finite: list[Tensor] = []
        pruned, *dense = streams or ([],)
        with compute_dtype_context(model, dtype, without=[block.module for block in blocks]):
            for batch in collectives.shard(batches):
                found = block_inputs(model, blocks, batch)
                finite.append(squares_finite(found[0][0]))
                for index, (_, call) in enumerate(found):
                    alike = [*calls[index][-1:], *(calls[index - 1][-1:] if index else [])]
                    calls[index].append(next((other for other in alike if equal_calls(other, call)), call))
                for stream in (pruned, *dense):  # the same tensor: `advance` puts a new one in its place and writes into none
                    stream.append(cast(found[0][0], dtype))
        check_first_inputs(blocks[0].name, finite)
        distinct = {id(call): call for row in calls for call in row}  # cast each once: most blocks and batches share theirs
        again = {key: cast(call, dtype) for key, call in distinct.items()}
        recast = [[again[id(call)] for call in row] for row in calls]
        shapes = [(len(batch), batch.shape[1]) for batch in batches]
        return cls(pruned, recast, dense[0] if dense else None, storage, shapes)

    @property
    def tokens(self) -> int:
        """How many a stream has, in this process."""
        return sum(windows * length for windows, length in collectives.shard(self.shapes))

    @property
    def sample_offsets(self) -> list[int]:
        """The number of the first window of each batch of this process, among all windows."""
        return collectives.shard(list(accumulate((windows for windows, _ in self.shapes[:-1]), initial=0)))

    def calls(self, block: Block, dtype: torch.dtype | None = None) -> list[Call]:
        """How the block is called, batch by batch. dtype: of its floating tensors, if not their own."""
        distinct = {id(call): cast(call, dtype) for call in self._calls[block.index]}
        return [distinct[id(call)] for call in self._calls[block.index]]

    def output_fisher(self, block: Block) -> Tensor:
        """F, (model, model): what errors of the block's output cost (`sparsellm.activations.sensitivity`)."""
        return self.metrics[block.index]

    def begin_block(self, block: Block) -> None:
        """Keep the block as it is now, to carry the dense stream; nothing where there is none."""
        self.close()
        self.teacher = block.copy() if self.dense is not None else None

    def expert_tokens(self, block: Block, name: str) -> int | None:
        """How many tokens the router sends to the expert that a layer belongs to; None for a layer of no expert, or unknown."""
        view = block.views.get(name)
        if view is None or view.expert is None or self._routes is None or self._routes[0] != block.index:
            return None
        return int(self._routes[1].counts[view.expert])

    @torch.no_grad()
    def expert_samples(self, block: Block, names: Sequence[str]) -> ExpertSamples | None:
        """Which tokens the experts are shown that these layers belong to, from a pass of its own; None where there are none.

        Found once for a block, when it is first asked for: by then the layers before its experts may be pruned.
        """
        views = [block.views[name] for name in names if name in block.views and block.views[name].expert is not None]
        if not views:
            return None
        if self._routes is None or self._routes[0] != block.index:
            tokens = [windows * length for windows, length in self.shapes]
            self._routes = (
                block.index,
                sample_expert_tokens(block, zip(self.pruned, self._calls[block.index], strict=True), tokens),
            )
        found = self._routes[1]
        found.restart()
        return found

    @torch.no_grad()
    def paired_batches(
        self, block: Block, pruned: CaptureRequest, dense: CaptureRequest, last: str = ""
    ) -> Iterator[tuple[Capture, Capture]]:
        """Batch by batch, what the pruned stream shows in the block, and the dense one in its teacher.

        Experts see the same tokens in both: those that the pruned stream's router sends them. Where all of the dense stream's
        pass is asked for, it travels on with it, and there is no teacher afterwards; but not through a block with views, which
        by pieces compute the same, but not to the bit. last: the feed-forward's writer, if it is pruned next, and by itself.
        """
        if self.dense is None or self.teacher is None:
            raise TypeError("There is no dense stream: ask for one with teacher=True.")
        dense = replace(dense, whole=dense.whole and not block.views)
        routes = self.expert_samples(block, [*pruned.inputs, *pruned.outputs])
        first, second = (routes.choose, routes.repeat) if routes else (None, None)
        teacher, onward = self.teacher, StreamUpdate(self.dense, self.teacher)
        for number, call in enumerate(self.calls(block)):
            seeing = find_skippable(block, last if number == 0 else "")
            with self._recalls.replay_or_record(False, block, number), seeing as found:
                here = capture(block, pruned, self.pruned[number], call, first)
            self.schedule_cache(block, *found)
            self._recalls.record_inputs(here.inputs)
            with self._recalls.replay_or_record(True, teacher, number):
                there = capture(teacher, dense, self.dense[number], call, second)
            yield here, there
            if there.block_output is not None:
                onward.replace(number, there.block_output, call)
        onward.check_finite()
        if dense.whole:
            self._finish_dense()

    @torch.no_grad()
    def run_with_hooks(
        self, block: Block, reads: Hooks, writes: Hooks | None = None, advance: bool = False, last: str | None = None
    ) -> None:
        """One pass of all batches through the block, as far as there is something to show.

        reads: who is shown what layers read. writes: who is shown what they write. onward: whether the block will stay as it
        is, so that the stream travels on with the same pass; `advance` then has nothing to do. last: of the layers that are
        looked at the one to be pruned next. If it ends a module, that need not run again once it is `solved`.
        """
        routes = self.expert_samples(block, [*reads, *(writes or {})])
        # Views: see `pairs`. What the last block writes nobody reads.
        whole = advance and not block.views and block.index + 1 < len(self._calls)
        stream = StreamUpdate(self.pruned, block)
        shown: dict[str, Tensor] = {}
        more: Hooks = {} if last is None else {last: [*reads[last], partial(shown.__setitem__, last)]}
        with capture_hooks(block, {**reads, **more}, writes or {}, routes.choose if routes else None, whole) as through:
            for number, call in enumerate(self._calls[block.index]):
                with self._recalls.replay_or_record(False, block, number):
                    if last is not None and number == 0:
                        hidden = self._first(block, last, through, call)
                    else:
                        hidden = through(self.pruned[number], call)
                self._recalls.record_inputs(shown)
                if whole and hidden is not None:
                    stream.replace(number, hidden, call)
        stream.check_finite()
        self._behind = block.index if whole else None

    @torch.no_grad()
    def advance(self, block: Block) -> None:
        """Pass every batch through the block, to become the input of the next. Raises NonFinite, naming the block."""
        self.advance_dense()
        if self._behind != block.index:
            self._advance(self.pruned, block)
        self._behind = None
        self.close()

    @torch.no_grad()
    def advance_dense(self) -> None:
        """Pass the dense stream alone through the present block's teacher, once; nothing where there is none."""
        if self.dense is not None and self.teacher is not None:
            self._advance(self.dense, self.teacher, dense=True)
            self._finish_dense()

    def _finish_dense(self) -> None:
        """The dense stream is behind the present block: its teacher is not asked any more."""
        self.teacher = None
        self.invalidate_cache(dense=True)

    def cache_output(self, module: CacheableModule, dense: bool) -> None:
        """From now on a module of the present block writes the same in every pass of one stream: it need run once only.

        module: one that `alone` finds. dense: which stream.
        """
        first = (self.dense if dense and self.dense is not None else self.pruned)[0]
        self._recalls.store(module, dense, self.tokens * first[0, 0].nbytes)

    def schedule_cache(self, block: Block, *modules: CacheableModule) -> None:
        """These modules' writers are what will be pruned next, on the pruned stream: once that is `solved`, they need not run.

        The next pass that shows what a writer reads keeps it; but not more than the stream itself takes, unless there is memory
        for it.
        """
        for module in modules:
            layer, last = block.layer(module.writer), block.index + 1 == len(self._calls)  # whose outputs nobody reads
            size = self.tokens * max(layer.in_features, layer.out_features) * self.pruned[0].element_size()
            if not module.skippable or (self.storage.fits_on_device(size) and not last):
                self._recalls.store(module, False, size, pending=True)

    def _first(self, block: Block, writer: str, through: BlockForward, call: Call) -> Tensor | None:
        """Pass the first batch, and see on it what need not run again once the writer is pruned."""
        part = block.architecture.feed_forward
        around = is_enclosed(block, writer) and (part is None or part.out_proj != writer)
        with find_enclosing(block, writer) if around else find_skippable(block, writer) as found:
            hidden = through(self.pruned[0], call, beyond=around)
        self.schedule_cache(block, *found)
        return hidden

    def mark_final(self, block: Block, names: Sequence[str]) -> None:
        """These layers are pruned, and stay as they are."""
        self._recalls.mark_final(block, names, collectives.shard(self.shapes))

    def invalidate_cache(self, dense: bool) -> None:
        """What modules wrote in one stream holds no longer, or is not needed."""
        self._recalls.invalidate(dense)

    def close(self) -> None:
        """Give back what is kept beside the streams."""
        self._recalls.close()

    def cacheable_module(self, writer: str) -> CacheableModule | None:
        """The module around a layer of the present block, such as attention, that can be remembered; None if there is none."""
        if self.dense is None or self.teacher is None:
            return None
        found = find_cacheable(self.teacher, writer, self.dense[0], self.calls(self.teacher)[0])
        fields = collectives.broadcast_object(found and asdict(found))
        return fields and CacheableModule(fields["name"], fields["writer"], fields["others"])

    @torch.no_grad()
    def is_residual_sum(self, writers: Sequence[str]) -> bool:
        """Whether the present block's output is its input plus what its writers write, so that these can mend the stream.

        writers: layers or modules of the block. Seen on the first batch of the dense stream: blocks that normalise or scale
        before adding are not of that form.
        """
        if self.dense is None or self.teacher is None or not writers:
            return False
        return bool(
            collectives.broadcast_object(is_residual_sum(self.teacher, writers, self.dense[0], self.calls(self.teacher)[0]))
        )

    def _advance(self, stream: TensorList, block: Block, dense: bool = False) -> None:
        """Pass one stream through a block. dense: which."""
        onward = StreamUpdate(stream, block)
        for number, call in enumerate(self.calls(block)):
            with self._recalls.replay_or_record(dense, block, number):
                hidden = block(stream[number], call)
            onward.replace(number, hidden, call)
        onward.check_finite()


def stream_bytes(model: PreTrainedModel, batches: Sequence[Tensor], dtype: torch.dtype | None = None) -> int:
    """How much memory a stream takes: the hidden states of all batches."""
    embedding = model.get_input_embeddings().weight
    width: int = model.config.get_text_config().hidden_size
    return sum(batch.numel() for batch in batches) * width * (dtype or embedding.dtype).itemsize
