"""What travels from block to block: the hidden states of every calibration batch, and how each block is called."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sparsellm import devices
from sparsellm.blocks import Block, computed_in, replaced
from sparsellm.calls import Call, cast, same
from sparsellm.errors import NonFinite
from sparsellm.linalg import all_finite
from sparsellm.storage import Kept, Storage

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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


class Activations:
    """The hidden states that enter the present block, batch by batch, in one stream or two.

    pruned: what the pruned model computes, one (batch, seq, model) tensor for every batch. dense: what the dense model
    computes; None where no method asks. teacher: the present block as it was, where there is a dense stream.
    metrics: what errors of each block's output cost, where a method asks. storage: where a method may keep more of that kind.
    tokens: how many a stream has.
    """

    def __init__(
        self, pruned: Kept, calls: list[list[Call]], dense: Kept | None = None, storage: Storage | None = None
    ) -> None:
        self.pruned = pruned
        self.dense = dense
        self.teacher: Block | None = None
        self.metrics: Sequence[Tensor] = []
        self.storage = storage or Storage()
        self.tokens = 0
        self._calls = calls  # by block, then by batch

    @classmethod
    def entering(
        cls,
        model: PreTrainedModel,
        blocks: Sequence[Block],
        batches: Sequence[Tensor],
        dtype: torch.dtype | None = None,
        streams: Sequence[Kept] = (),
        storage: Storage | None = None,
    ) -> Activations:
        """Run the model as far as its first block, and learn how each block is called.

        batches: token numbers, each (batch, seq), without padding. dtype: what the model will be computed in, if not
        its own. streams: empty lists for the pruned stream, and for the dense one where it is to travel too; a list for the
        pruned one by default.

        Every block is called as the model itself calls it: blocks may differ in their keywords (an attention mask with or
        without a sliding window), so each block's are recorded, with the blocks themselves passing the hidden states through.
        """
        calls: list[list[Call]] = [[] for _ in blocks]
        body, (pruned, *dense) = model.base_model, streams or ([],)
        with computed_in(model, dtype, without=blocks):
            for batch in batches:
                entered: list[Tensor] = []
                with _recording(blocks, entered, calls):
                    body(input_ids=batch.to(home(model)), use_cache=False)
                for stream in (pruned, *dense):  # the same tensor: `advance` puts a new one in its place and writes into none
                    stream.append(cast(entered[0], dtype))
        distinct = {id(call): call for row in calls for call in row}  # cast each once: most blocks and batches share theirs
        again = {key: cast(call, dtype) for key, call in distinct.items()}
        recast = [[again[id(call)] for call in row] for row in calls]
        found = cls(pruned, recast, dense[0] if dense else None, storage)
        found.tokens = sum(batch.numel() for batch in batches)
        return found

    def calls(self, block: Block, dtype: torch.dtype | None = None) -> list[Call]:
        """How the block is called, batch by batch. dtype: of its floating tensors, if not their own."""
        distinct = {id(call): cast(call, dtype) for call in self._calls[block.index]}
        return [distinct[id(call)] for call in self._calls[block.index]]

    def metric(self, block: Block) -> Tensor:
        """F, (model, model): what errors of the block's output cost (`sparsellm.sensitivity`)."""
        return self.metrics[block.index]

    def arrive(self, block: Block) -> None:
        """Keep the block as it is now, to carry the dense stream; nothing where there is none."""
        self.teacher = block.copy() if self.dense is not None else None

    @torch.no_grad()
    def passes(self, block: Block, names: Sequence[str]) -> Iterator[Seen]:
        """Batch by batch through the block, as far as the last of the named layers; nothing travels on."""
        for hidden, call in zip(self.pruned, self.calls(block), strict=True):
            yield _look(block, names, hidden, call)

    @torch.no_grad()
    def pairs(self, block: Block, names: Sequence[str]) -> Iterator[tuple[Seen, Seen]]:
        """As `passes`, each batch twice: the pruned stream's pass through the block, the dense one's through its teacher."""
        if self.dense is None or self.teacher is None:
            raise TypeError("There is no dense stream: ask for one with teacher=True.")
        for pruned, dense, call in zip(self.pruned, self.dense, self.calls(block), strict=True):
            yield _look(block, names, pruned, call), _look(self.teacher, names, dense, call)

    @torch.no_grad()
    def watch(self, block: Block, reads: Looks, writes: Looks | None = None) -> None:
        """One pass of all batches through the block, as far as there is something to show; nothing travels on.

        reads: who is shown what layers read. writes: who is shown what they write.
        """
        wanted = [(name, False) for name in reads] + [(name, True) for name in writes or {}]
        missing = set(wanted)

        def shows(name: str, written: bool, many: Sequence[Look]) -> Callable[..., None]:
            def hook(layer: nn.Module, inputs: tuple[Tensor, ...], *output: Tensor) -> None:
                shown = (output[0] if written else inputs[0]).flatten(0, -2)
                for look in many:
                    look(shown)
                missing.discard((name, written))
                if not missing:
                    raise _Enough

            return hook

        hooks = [block.layer(name).register_forward_pre_hook(shows(name, False, many)) for name, many in reads.items()]
        hooks += [block.layer(name).register_forward_hook(shows(name, True, many)) for name, many in (writes or {}).items()]
        try:
            for hidden, call in zip(self.pruned, self._calls[block.index], strict=True):
                missing.update(wanted)
                with suppress(_Enough):
                    block(hidden, call)
        finally:
            for hook in hooks:
                hook.remove()

    @torch.no_grad()
    def advance(self, block: Block) -> None:
        """Pass every batch through the block, to become the input of the next. Raises NonFinite, naming the block."""
        self.advance_dense()
        self._advance(self.pruned, block)

    @torch.no_grad()
    def advance_dense(self) -> None:
        """Pass the dense stream alone through the present block's teacher, once; nothing where there is none."""
        if self.dense is not None and self.teacher is not None:
            self._advance(self.dense, self.teacher)
            self.teacher = None

    @torch.no_grad()
    def adds(self, writers: Sequence[str]) -> bool:
        """Whether the present block's output is its input plus what its writers write, so that these can mend the stream.

        Seen on the first batch of the dense stream: blocks that normalise after adding are not of that form.
        """
        if self.dense is None or self.teacher is None:
            return False
        hidden, call = self.dense[0], self.calls(self.teacher)[0]
        seen = _look(self.teacher, writers, hidden, call)
        expected = sum(seen.outputs.values(), seen.entering)
        found = self.teacher(hidden, call).flatten(0, -2)
        return float((found - expected).float().norm()) <= 0.02 * float(found.float().norm())  # bf16 rounds to 0.4 %

    def _advance(self, stream: Kept, block: Block) -> None:
        """Pass one stream through a block."""
        finite: list[Tensor] = []
        for number, call in enumerate(self.calls(block)):
            hidden = block(stream[number], call)
            if devices.queued(hidden.device):
                finite.append(hidden.isfinite().all())
            elif not all_finite(hidden):
                raise _not_finite(_first_not_finite(block, stream[number], call), hidden, number)
            stream[number] = hidden
        for number, good in enumerate(devices.read(finite)):
            if not good:  # what entered is gone, and with it which layer was the first
                raise _not_finite(block.name, stream[number], number)


def home(model: PreTrainedModel) -> torch.device:
    """Where a model takes its token numbers: the device of its embedding."""
    return model.get_input_embeddings().weight.device  # type: ignore[no-any-return]


def stream_bytes(model: PreTrainedModel, batches: Sequence[Tensor], dtype: torch.dtype | None = None) -> int:
    """How much memory a stream takes: the hidden states of all batches."""
    embedding = model.get_input_embeddings().weight
    width: int = model.config.get_text_config().hidden_size
    return sum(batch.numel() for batch in batches) * width * (dtype or embedding.dtype).itemsize


@contextmanager
def predicting(
    model: PreTrainedModel, blocks: Sequence[Block], dtype: torch.dtype | None = None
) -> Iterator[Callable[[Tensor, Tensor], Tensor]]:
    """Within the context, a function from token numbers (batch, seq) and the last block's output (batch, seq, model) to logits.

    It runs the model as it is, with blocks that do nothing but the last, which gives the output that it was told; so whatever
    stands behind the blocks in this family is done. dtype: what that is computed in, if not its own.
    """
    given: list[Tensor] = []

    def stands_in(block: Block) -> Callable[..., Tensor]:
        return lambda hidden, *arguments, **keywords: given[0] if block is blocks[-1] else hidden

    def predict(tokens: Tensor, output: Tensor) -> Tensor:
        given[:] = [output]
        return model(input_ids=tokens.to(output.device), use_cache=False).logits  # type: ignore[no-any-return]

    with computed_in(model, dtype, without=blocks), replaced(blocks, stands_in):
        yield predict


class _Enough(Exception):
    """All that was asked for was seen: the rest of the block need not run."""


def _look(block: Block, names: Sequence[str], hidden: Tensor, call: Call) -> Seen:
    """One batch through a block, as far as the last of the named layers."""
    seen = Seen(hidden.flatten(0, -2), {}, {})

    def shows(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            seen.inputs[name], seen.outputs[name] = inputs[0].flatten(0, -2), output.flatten(0, -2)
            if len(seen.inputs) == len(set(names)):
                raise _Enough

        return hook

    hooks = [block.layer(name).register_forward_hook(shows(name)) for name in names]
    try:
        block(hidden, call)
    except _Enough:
        pass
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def _not_finite(what: str, hidden: Tensor, batch: int) -> NonFinite:
    """That the output of a block or a layer is not finite."""
    return NonFinite(
        f"The output of {what} is not finite ({hidden.dtype}, batch {batch}). Try --dtype float32, or more calibration tokens."
    )


def _first_not_finite(block: Block, hidden: Tensor, call: Call) -> str:
    """The first layer of a block whose output is not finite, by its full name; the block's where it is none of its layers."""
    found: list[str] = []

    def hook_of(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if not all_finite(output):
                found.append(block.full_name(name))

        return hook

    hooks = [layer.register_forward_hook(hook_of(name)) for name, layer in block.layers.items()]
    try:
        block(hidden, call)
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else block.name


@contextmanager
def _recording(blocks: Sequence[Block], entered: list[Tensor], calls: list[list[Call]]) -> Iterator[None]:
    """Blocks that record how they are called and pass the hidden states through, within the context."""

    def recorder(block: Block) -> Callable[..., Tensor]:
        def forward(hidden: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
            if block.index == 0:
                entered.append(hidden)
            call = Call(arguments, keywords)
            seen = [*calls[block.index][-1:], *(calls[block.index - 1][-1:] if block.index else [])]
            calls[block.index].append(next((other for other in seen if same(other, call)), call))
            return hidden

        return forward

    with replaced(blocks, recorder):
        yield
