"""A stream of hidden states, those of all calibration batches, and what is captured while it passes through a block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sparsellm.errors import NonFinite, UnsupportedModel
from sparsellm.models.blocks import Block, Call, output_tensor
from sparsellm.models.contexts import replace_forward
from sparsellm.models.experts import ExpertSamples, Rows, expert_members, experts_of, forward_by_expert
from sparsellm.models.sparse_matmul import PrunedLayers
from sparsellm.runtime import collectives, devices
from sparsellm.runtime.offload import TensorList
from sparsellm.solvers.linalg import all_finite, allclose_bf16, squares_finite

if TYPE_CHECKING:
    from sparsellm.activations.output_cache import OutputCache

ExpertRows = Callable[[int, Tensor], Sequence[Tensor]]
"""Chooses the tokens of each expert: from the number of a batch and its routing mask, (tokens, experts), to token indices."""


class StopForward(Exception):
    """Ends a block's forward pass once all requested tensors are captured."""


@dataclass(frozen=True)
class CaptureRequest:
    """The tensors to capture in passes through a block.

    Attributes:
        inputs: Layers whose inputs to capture.
        outputs: Layers or modules whose outputs to capture.
    """

    inputs: Sequence[str] = ()
    outputs: Sequence[str] = ()

    def __bool__(self) -> bool:
        return bool(self.inputs or self.outputs)


@dataclass
class Capture:
    """The tensors captured from one batch. A layer of an expert has the tokens of that expert only, possibly none.

    Attributes:
        block_input: The hidden states that enter the block, (tokens, model).
        inputs: By layer, (tokens, in), as its product takes them.
        outputs: By layer or module, (tokens, out).
        block_output: The block's output, (batch, seq, model); None if the pass ended before it.
    """

    block_input: Tensor
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    block_output: Tensor | None = None


def capture(
    block: Block, request: CaptureRequest, hidden: Tensor, call: Call, *, rows: Rows | None = None, whole: bool = False
) -> Capture:
    """Pass one batch through a block and return the requested tensors.

    The pass ends after the last requested tensor, so that a layer of which only the input is requested does not run.

    Args:
        hidden: The block's input, (batch, seq, model).
        rows: Selects the tokens of each expert; by default those that are routed to it.
        whole: Whether to run the block to its end and capture its output too.

    Raises:
        UnsupportedModel: A whole pass does not call one of the layers.
    """
    result = Capture(hidden.flatten(0, -2), {}, {})
    if not request and not whole:
        return result
    missing = {(name, False) for name in request.inputs} | {(name, True) for name in request.outputs}

    def make_hook(name: str, is_output: bool) -> Callable[..., None]:
        captured = result.outputs if is_output else result.inputs

        def hook(layer: nn.Module, inputs: tuple[Tensor, ...], *output: Tensor) -> None:
            tensor = (output_tensor(output[0]) if is_output else _as_multiplied(inputs[0])).flatten(0, -2)
            captured[name] = torch.cat([captured[name], tensor]) if name in captured else tensor
            missing.discard((name, is_output))
            if not missing and not whole:
                raise StopForward

        return hook

    with ExitStack() as stack:
        for name in request.inputs:
            stack.callback(block.layer(name).register_forward_pre_hook(make_hook(name, False)).remove)
        for name in request.outputs:
            stack.callback(block.module_of(name).register_forward_hook(make_hook(name, True)).remove)
        if request:
            stack.enter_context(block.expose_layers([*request.inputs, *request.outputs], rows))
        stack.enter_context(suppress(StopForward))
        output = block(hidden, call)
        _check_called(block, sorted({name for name, _ in missing}))
        result.block_output = output
    for name in request.inputs:  # layers not called on this batch: experts without tokens
        result.inputs.setdefault(name, result.block_input.new_empty(0, block.layer(name).in_features))
    for name in (name for name in request.outputs if name in block.layers):
        result.outputs.setdefault(name, result.block_input.new_empty(0, block.layer(name).out_features))
    return result


def _as_multiplied(inputs: Tensor) -> Tensor:
    """A layer's inputs in the dtype of its product; that rounds them where products have 16 bits."""
    kind = inputs.device.type
    return inputs.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else inputs


def _check_called(block: Block, names: Sequence[str]) -> None:
    """Raise UnsupportedModel for layers that were not called. Those in module lists may be experts without tokens."""
    idle = [name for name in names if not any(part.isdigit() for part in name.split("."))]
    if idle:
        skipped = idle[0].rpartition(".")[0] or idle[0]
        raise UnsupportedModel(
            f"{block.full_name(idle[0])} is not called when the model reads text, so nothing is known of its inputs. "
            f"Leave it dense with `exclude={f'{skipped}*'!r}`, or use `method='magnitude'`."
        )


def non_finite_error(what: str, hidden: Tensor, batch: int) -> NonFinite:
    """Return the error for an output of a block or layer that is not finite, or whose squares are not."""
    state = "overflows float32 when squared" if all_finite(hidden) else "is not finite"
    return NonFinite(
        f"The output of {what} {state} ({hidden.dtype}, batch {batch}). Try `dtype='float32'`, or more calibration tokens."
    )


def first_non_finite(block: Block, hidden: Tensor, call: Call) -> str:
    """Return the full name of the first layer with a non-finite output on a batch, or the block's name if there is none."""
    outputs = capture(block, CaptureRequest(outputs=list(block.layers)), hidden, call).outputs
    return next((block.full_name(name) for name, output in outputs.items() if not all_finite(output)), block.name)


@torch.no_grad()
def sample_expert_tokens(block: Block, entered: Iterable[tuple[Tensor, Call]], tokens: Sequence[int]) -> ExpertSamples:
    """Count the tokens routed to each expert of a block, in passes that end at the experts.

    Args:
        entered: The block's input, (batch, seq, model), and its call, for each batch of this process.
        tokens: Number of tokens in each batch of all processes.

    Raises:
        UnsupportedModel: The experts' forward differs from the one computed from their parameters.
    """
    views = [view for view in block.views.values() if view.expert is not None]
    module = views[0].module
    experts, forward = experts_of(module), module.forward
    assert experts is not None
    counts: list[list[int]] = []

    def count(*inputs: Tensor) -> Tensor:
        if not counts and not allclose_bf16(forward_by_expert(experts, views)(*inputs), forward(*inputs)):
            raise UnsupportedModel(
                f"The experts of {block.name}, a {type(module).__name__}, compute something else than their parameters' names "
                "say. They cannot be pruned."
            )
        counts.append(expert_members(experts, *inputs).sum(0).tolist())
        raise StopForward

    with replace_forward(module, count):
        for hidden, call in entered:
            with suppress(StopForward):
                block(hidden, call)
    return ExpertSamples(
        torch.tensor(collectives.all_gather(counts)), tokens, max(view.in_features for view in views[: len(experts.names)])
    )


class Stream:
    """The hidden states of all batches of this process, as they enter one block. A sequence of (batch, seq, model) tensors.

    A pass changes nothing unless it is asked to advance the stream.

    Args:
        calls: By block and batch, the other arguments of the block.

    Attributes:
        position: Index of the block that the hidden states enter.
        cache: Outputs that passes through the current block reuse instead of computing them, with the same bits as result. A
            method may set it; it is closed when the stream advances.
        progress: Called in each pass with the batches that are done, and their number.
    """

    def __init__(self, hidden: TensorList, calls: Sequence[Sequence[Call]]) -> None:
        self._hidden, self._calls = hidden, calls
        self.position = 0
        self.cache: OutputCache | None = None
        self.progress: Callable[[float, int], None] = lambda *_: None

    def __len__(self) -> int:
        return len(self._hidden)

    def __getitem__(self, number: int) -> Tensor:
        return self._hidden[number]

    def __setitem__(self, number: int, hidden: Tensor) -> None:
        self._hidden[number] = hidden

    def __iter__(self) -> Iterator[Tensor]:
        return iter(self._hidden)

    def run(
        self, block: Block, request: CaptureRequest, *, rows: ExpertRows | None = None, advance: bool = False
    ) -> Iterator[Capture]:
        """Pass all batches through the block and yield what is captured from each.

        Args:
            rows: Chooses the tokens of each expert; by default those that are routed to it.
            advance: Whether the block is final, so that the pass may also replace the hidden states by its outputs. It does
                not where tensors are captured from a block with views, whose forward layer by layer differs from the original
                in rounding, nor at the last block, whose outputs only `advance` computes.

        Raises:
            NonFinite: The stream advances and is not finite after the block.
        """
        advance = advance and not (request and (block.views or block.index + 1 == len(self._calls)))
        finite: list[Tensor] = []
        kernels = PrunedLayers(block)
        for number, call in enumerate(self._calls[block.index]):
            with kernels.used(), self.cache.replay_or_record(block, number) if self.cache else nullcontext():
                batch_rows = partial(rows, number) if rows else None
                captured = capture(block, request, self._hidden[number], call, rows=batch_rows, whole=advance)
            if self.cache:
                self.cache.record_inputs(captured.inputs)
            yield captured
            self.progress(number + 1, len(self))
            output = captured.block_output
            del captured  # its memory serves the next batch
            if output is not None and advance:
                finite.append(self._replace(block, number, output))
            del output
        if advance:
            # On a GPU the checks are read together, since each read waits for the device.
            for number, is_finite in enumerate(devices.to_python(finite)):
                if not is_finite:
                    raise non_finite_error(block.name, self._hidden[number], number)
            self.position = block.index + 1
            self.close()

    def advance(self, block: Block) -> None:
        """Replace the hidden states by the block's outputs, unless an earlier pass did so.

        Raises:
            NonFinite: The outputs or their squares are not finite.
        """
        if self.position == block.index:
            for _ in self.run(block, CaptureRequest(), advance=True):
                pass

    def close(self) -> None:
        """Free the memory of the cache."""
        if self.cache:
            self.cache.close()
        self.cache = None

    def _replace(self, block: Block, number: int, output: Tensor) -> Tensor:
        """Replace the hidden states of one batch; returns whether their squares are finite, which is checked on a CPU."""
        finite = squares_finite(output)
        if not devices.queued(output.device) and not finite:
            layer = first_non_finite(block, self._hidden[number], self._calls[block.index][number])
            raise non_finite_error(layer, output, number)
        self._hidden[number] = output
        return finite


def cast(value: Any, dtype: torch.dtype | None) -> Any:
    """Cast the floating-point tensors in a value, a container or a `Call` to `dtype`; None leaves the value as it is."""
    if dtype is None:
        return value
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, Call):
        return Call(cast(value.arguments, dtype), cast(value.keywords, dtype))
    if isinstance(value, (tuple, list)):
        items = [cast(item, dtype) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        return {key: cast(item, dtype) for key, item in value.items()}
    return value


def cast_calls(calls: Sequence[Sequence[Call]], dtype: torch.dtype | None) -> list[list[Call]]:
    """Cast the calls of blocks on batches, each distinct one once: most blocks and batches share theirs."""
    distinct = {id(call): cast(call, dtype) for row in calls for call in row}
    return [[distinct[id(call)] for call in row] for row in calls]
