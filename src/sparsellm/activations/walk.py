"""The walk through a model, block by block, with the hidden states that enter each."""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparsellm.activations.streams import Capture, CaptureRequest, Stream, cast, cast_calls, sample_expert_tokens
from sparsellm.errors import InvalidSetting, NonFinite
from sparsellm.models.blocks import Block, Call
from sparsellm.models.contexts import compute_dtype_context, eval_mode
from sparsellm.models.experts import ExpertSamples
from sparsellm.models.loaded_model import LoadedModel, block_inputs, equal_calls, stream_bytes
from sparsellm.models.output_head import blocks_and_head, head_inputs
from sparsellm.runtime import collectives, devices
from sparsellm.runtime.offload import OffloadManager, TensorList
from sparsellm.solvers.linalg import squares_finite

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Activations:
    """The streams that enter the current block, and what passes through it need.

    The pruned stream is computed by the pruned model, the dense stream by the dense model. With several processes, each holds
    its share of the batches.

    Args:
        pruned: The pruned stream, one (batch, seq, model) tensor per batch.
        calls: By block and batch, the other arguments of the block.
        dense: The dense stream; None if no method needs it.
        storage: Stores what methods keep per batch.
        shapes: (samples, tokens per sample) of each batch, over all processes.

    Attributes:
        pruned: The pruned stream.
        dense: The dense stream, or None.
        dense_block: The dense copy of the current block, until the dense stream has passed through it.
        fisher: For each block, F of its output (`output_fisher`), if a method needs it.
        window: Tokens of the longest sample.
    """

    def __init__(
        self,
        pruned: TensorList,
        calls: Sequence[Sequence[Call]],
        *,
        dense: TensorList | None = None,
        storage: OffloadManager | None = None,
        shapes: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.pruned = Stream(pruned, calls)
        self.dense = None if dense is None else Stream(dense, calls)
        self.dense_block: Block | None = None
        self.fisher: Sequence[Tensor] = []
        self.storage = storage or OffloadManager()
        self.shapes, self.window = shapes, max((length for _, length in shapes), default=None)
        self._calls, self._is_final = calls, False
        self._expert_samples: tuple[int, ExpertSamples] | None = None  # with the index of their block

    @classmethod
    def from_model(
        cls,
        model: PreTrainedModel | LoadedModel,
        blocks: Sequence[Block],
        batches: Sequence[Tensor],
        streams: Sequence[TensorList] = (),
    ) -> Activations:
        """Run the model up to its first block, and record the call of each block.

        Blocks may differ in their arguments, such as an attention mask with or without a sliding window. Each block's are
        recorded in a forward pass of the model in which the blocks return their inputs.

        Args:
            model: The model.
            blocks: Its blocks, the output head among them if it is visited.
            batches: Token ids, each (batch, seq), without padding; seq may differ. This process runs its share of them.
            streams: Empty lists for the pruned stream and, optionally, the dense stream; by default one list for the pruned.

        Raises:
            NonFinite: The squares of the hidden states that enter the first block are not finite.
        """
        loaded = LoadedModel.of(model)
        calls: list[list[Call]] = [[] for _ in blocks]
        finite: list[Tensor] = []
        pruned, *dense = streams or ([],)
        decoder = [block for block in blocks if not block.is_head]
        with (
            loaded.weights.non_block(),
            compute_dtype_context(loaded.model, loaded.compute, without=[block.module for block in blocks]),
        ):
            for batch in collectives.shard(batches):
                inputs = block_inputs(loaded.model, decoder, batch)
                inputs += [(inputs[0][0], Call((), {}))] * (len(blocks) - len(decoder))
                finite.append(squares_finite(inputs[0][0]))
                for index, (_, call) in enumerate(inputs):
                    candidates = [*calls[index][-1:], *(calls[index - 1][-1:] if index else [])]
                    calls[index].append(next((previous for previous in candidates if equal_calls(previous, call)), call))
                for stream in (pruned, *dense):  # both hold one tensor: advancing replaces it and never writes into it
                    stream.append(cast(inputs[0][0], loaded.compute))
        for number, is_finite in enumerate(devices.to_python(finite)):
            if not is_finite:
                raise NonFinite(
                    f"The hidden states that enter {blocks[0].name} overflow float32 when squared (batch {number}), so that "
                    "its norm would turn them into zeros. Look for weights before it that are far too large."
                )
        shapes = [(len(batch), batch.shape[1]) for batch in batches]
        calls = cast_calls(calls, loaded.compute)
        return cls(pruned, calls, dense=dense[0] if dense else None, storage=loaded.storage, shapes=shapes)

    @property
    def local_shapes(self) -> list[tuple[int, int]]:
        """(samples, tokens per sample) of each batch of this process."""
        return collectives.shard(self.shapes)

    @property
    def tokens(self) -> int:
        """Number of tokens of a stream in this process."""
        return sum(samples * length for samples, length in self.local_shapes)

    @property
    def offsets(self) -> list[tuple[int, int]]:
        """For each batch of this process, the index of its first sample and of its first token, both among all batches."""
        samples = accumulate((samples for samples, _ in self.shapes[:-1]), initial=0)
        tokens = accumulate((samples * length for samples, length in self.shapes[:-1]), initial=0)
        return collectives.shard(list(zip(samples, tokens, strict=True)))

    def calls(self, block: Block, dtype: torch.dtype | None = None) -> list[Call]:
        """Return the block's call on each batch, with floating-point tensors converted to `dtype`, if given."""
        return cast_calls([self._calls[block.index]], dtype)[0]

    def is_last(self, block: Block) -> bool:
        """Whether a block is the last one of the model."""
        return block.index + 1 == len(self._calls)

    def output_fisher(self, block: Block) -> Tensor | None:
        """Return F of the block's output, (model, model); see `sparsellm.activations.sensitivity`. None for the head."""
        return None if block.is_head else self.fisher[block.index].to(block.device)  # what a journal keeps is on the CPU

    def dense_pair(self) -> tuple[Stream, Block]:
        """Return the dense stream and the dense copy of the current block.

        Raises:
            TypeError: There is no dense stream, or it has passed the block.
        """
        if self.dense is None or self.dense_block is None:
            raise TypeError("There is no dense stream: ask for one with needs_dense_stream=True.")
        return self.dense, self.dense_block

    def begin_block(self, block: Block, *, is_final: bool = False) -> None:
        """Make `block` the current block, and copy it if there is a dense stream. After a final one no stream advances."""
        self.dense_block, self._is_final = block.copy() if self.dense is not None else None, is_final

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
        if not any(name in block.views and block.views[name].expert is not None for name in names):
            return None
        if self._expert_samples is None or self._expert_samples[0] != block.index:
            tokens = [samples * length for samples, length in self.shapes]
            entered = zip(self.pruned, self._calls[block.index], strict=True)
            self._expert_samples = block.index, sample_expert_tokens(block, entered, tokens)
        return self._expert_samples[1]

    @torch.no_grad()
    def run(self, block: Block, request: CaptureRequest, *, advance: bool = False) -> Iterator[Capture]:
        """Pass the pruned stream through the block, and yield what is captured from each batch.

        Experts get the tokens that `expert_samples` selects. Arguments as for `Stream.run`.
        """
        samples = self.expert_samples(block, [*request.inputs, *request.outputs])
        yield from self.pruned.run(block, request, rows=samples.choose if samples else None, advance=advance)

    @torch.no_grad()
    def run_paired(
        self, block: Block, pruned: CaptureRequest, dense: CaptureRequest, *, advance_dense: bool = False
    ) -> Iterator[tuple[Capture, Capture]]:
        """Pass both streams through the block and its dense copy, and yield what is captured from each batch of both.

        Experts get the same tokens in both streams, chosen by the pruned stream's router.

        Args:
            block: The current block.
            pruned: The tensors to capture from `block` on the pruned stream.
            dense: The tensors to capture from the dense block on the dense stream.
            advance_dense: Whether the dense stream advances in this pass, where `Stream.run` can; the dense block is then
                discarded.
        """
        stream, dense_block = self.dense_pair()
        samples = self.expert_samples(block, [*pruned.inputs, *pruned.outputs])
        chosen: Sequence[Tensor] = ()

        def choose(number: int, member: Tensor) -> Sequence[Tensor]:
            nonlocal chosen
            assert samples is not None
            chosen = samples.choose(number, member)
            return chosen

        def repeat(number: int, member: Tensor) -> Sequence[Tensor]:
            return chosen

        dense_captures = stream.run(dense_block, dense, rows=repeat if samples else None, advance=advance_dense)
        for captured in self.pruned.run(block, pruned, rows=choose if samples else None):
            yield captured, next(dense_captures)
            del captured
        next(dense_captures, None)  # advances the last batch
        if stream.position > block.index or (advance_dense and self._is_final):
            self.dense_block = None

    @torch.no_grad()
    def advance_dense(self) -> None:
        """Replace the dense stream with the dense block's outputs, unless that is done or there is no dense stream."""
        if self.dense is not None and self.dense_block is not None:
            self.dense.advance(self.dense_block)
            self.dense_block = None

    def enter_head(self, loaded: LoadedModel, blocks: Sequence[Block], batches: Sequence[Tensor]) -> None:
        """Replace the streams, the outputs of the last of `blocks`, with what the model makes of them for its head."""
        with loaded.weights.non_block(), head_inputs(loaded.model, blocks, loaded.compute) as inputs:
            for stream in [self.pruned] if self.dense is None else [self.pruned, self.dense]:
                for number, batch in enumerate(collectives.shard(batches)):
                    stream[number] = inputs(batch, stream[number])

    @torch.no_grad()
    def advance(self, block: Block) -> None:
        """Replace the streams with the block's outputs, the inputs of the next block. Raises NonFinite, naming the block."""
        self.advance_dense()
        self.pruned.advance(block)

    def close(self) -> None:
        """Free the memory of all caches."""
        for stream in (self.pruned, self.dense):
            if stream is not None:
                stream.close()


@torch.no_grad()  # as a decorator, it applies only while the generator runs, not in the caller's loop
def walk(
    model: PreTrainedModel | LoadedModel,
    batches: Sequence[Tensor],
    *,
    stop: int | None = None,
    layers: Collection[str] = (),
    needs_dense_stream: bool = False,
    fisher: Sequence[Tensor] = (),
) -> Generator[tuple[Block, Activations], None, None]:
    """Yield each block with the activations that enter it, and advance the activations when the caller continues.

    Changes that the caller makes to a block affect the inputs of the blocks after it.

    Args:
        model: The model.
        batches: Token ids, each (batch, seq), without padding; seq may differ. Each process walks with its share of them.
        stop: Index of the first block not to visit; None visits all.
        layers: Full names of layers, such as a plan; the output head is visited after the blocks if it is among them.
        needs_dense_stream: Whether to carry the dense stream too, through a copy of each block.
        fisher: F of each block's output from `output_fisher`, for methods that need it.

    Raises:
        InvalidSetting: There are fewer batches than processes.
    """
    loaded = LoadedModel.of(model)
    blocks = [replace(block, products=loaded.products) for block in blocks_and_head(loaded.model, layers)]
    visited = blocks[:stop]
    if len(batches) < collectives.world():
        count = f"are {len(batches)} calibration batches for {collectives.world()} processes"
        message = f"There {count if batches else 'is no calibration batch'}."
        raise InvalidSetting(f"{message} Pass token numbers of (samples, length), split into at least as many batches.")
    size = stream_bytes(loaded, batches)
    with eval_mode(loaded.model), loaded.storage.new_lists(1 + needs_dense_stream, size) as streams:
        activations = Activations.from_model(loaded, blocks, batches, streams)
        activations.fisher = fisher
        with closing(activations):
            for block, next_block in zip(visited, [*visited[1:], None], strict=True):
                if block.is_head:
                    activations.enter_head(loaded, blocks[:-1], batches)
                with loaded.weights.block(block, next_block), compute_dtype_context(block.module, loaded.compute):
                    activations.begin_block(block, is_final=block is visited[-1])
                    yield block, activations
                    if block is not visited[-1]:
                        activations.advance(block)
