"""Captures the inputs and outputs of a block's layers during a pass of one batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from torch import Tensor, nn

from sparsellm.activations.output_cache import StopForward, output_tensor
from sparsellm.errors import UnsupportedModel
from sparsellm.models.block_calls import Call
from sparsellm.models.blocks import Block
from sparsellm.models.experts import Rows

Hook = Callable[[Tensor], None]
"""Called with a layer's input or output for one batch, flattened to (tokens, in) or (tokens, out)."""

Hooks = Mapping[str, Sequence[Hook]]
"""Hooks by layer."""


class BlockForward(Protocol):
    """Passes one batch through a block."""

    def __call__(self, hidden: Tensor, call: Call, beyond: bool = False) -> Tensor | None:
        """Return the block's output, or None if the pass ended early.

        Args:
            hidden: The block's input, (batch, seq, model).
            call: The block's other arguments.
            beyond: Whether to continue after the last hook, because the caller ends this pass.
        """


@dataclass(frozen=True)
class CaptureRequest:
    """The tensors to capture in passes through a block.

    Attributes:
        inputs: Layers whose inputs to capture.
        outputs: Layers or modules whose outputs to capture.
        whole: Whether to capture the block's output, so that the pass must run to the end of the block.
    """

    inputs: Sequence[str] = ()
    outputs: Sequence[str] = ()
    whole: bool = False


@dataclass
class Capture:
    """The tensors captured from one batch. A layer of an expert has the tokens of that expert only, possibly none.

    Attributes:
        block_input: The hidden states that enter the block, (tokens, model).
        inputs: By layer, (tokens, in).
        outputs: By layer, (tokens, out).
        block_output: The block's output, (batch, seq, model), if the request was for the whole pass.
    """

    block_input: Tensor
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    block_output: Tensor | None = None


@contextmanager
def capture_hooks(
    block: Block, reads: Hooks, writes: Hooks, rows: Rows | None = None, whole: bool = False
) -> Iterator[BlockForward]:
    """Install hooks on a block's layers, and yield a function that passes one batch through the block.

    A pass ends after its last hook, so that a layer at the end does not run if only its input is requested.

    Args:
        block: The block.
        reads: Hooks for the inputs of layers.
        writes: Hooks for the outputs of layers or modules.
        rows: Selects the tokens of each expert; by default those that are routed to it.
        whole: Whether passes run to the end of the block.

    Raises:
        UnsupportedModel: A pass does not call one of the layers.
    """
    past_last_hook = False
    requested = {(name, False) for name in reads} | {(name, True) for name in writes}
    missing: set[tuple[str, bool]] = set()

    def make_hook(name: str, is_output: bool, hooks: Sequence[Hook]) -> Callable[..., None]:
        def hook(layer: nn.Module, inputs: tuple[Tensor, ...], *output: Tensor) -> None:
            tensor = (output_tensor(output[0]) if is_output else inputs[0]).flatten(0, -2)
            for callback in hooks:
                callback(tensor)
            missing.discard((name, is_output))
            if not missing and not whole and not past_last_hook:
                raise StopForward

        return hook

    def forward(hidden: Tensor, call: Call, beyond: bool = False) -> Tensor | None:
        nonlocal past_last_hook
        past_last_hook = beyond
        missing.update(requested)
        with suppress(StopForward):
            output = block(hidden, call)
            _check_called(block, sorted({name for name, _ in missing}))
            return output
        return None

    handles = [block.layer(name).register_forward_pre_hook(make_hook(name, False, hooks)) for name, hooks in reads.items()]
    handles += [block.module_of(name).register_forward_hook(make_hook(name, True, hooks)) for name, hooks in writes.items()]
    try:
        with block.expose_layers([*reads, *writes], rows):
            yield forward
    finally:
        for handle in handles:
            handle.remove()


def _check_called(block: Block, names: Sequence[str]) -> None:
    """Raise UnsupportedModel for layers that were not called. Those in module lists may be experts without tokens."""
    idle = [name for name in names if not any(part.isdigit() for part in name.split("."))]
    if idle:
        skipped = idle[0].rpartition(".")[0] or idle[0]
        raise UnsupportedModel(
            f"{block.full_name(idle[0])} is not called when the model reads text, so nothing is known of its inputs. "
            f"Leave it dense with --exclude '{skipped}*', or use --method magnitude."
        )


def capture(block: Block, asked: CaptureRequest, hidden: Tensor, call: Call, rows: Rows | None = None) -> Capture:
    """Pass one batch through a block and return the requested tensors.

    Args:
        block: The block.
        asked: The tensors to capture.
        hidden: The block's input, (batch, seq, model).
        call: The block's other arguments.
        rows: As for `capture_hooks`.
    """
    result = Capture(hidden.flatten(0, -2), {}, {})
    if not (asked.inputs or asked.outputs or asked.whole):
        return result
    reads = {name: [partial(result.inputs.__setitem__, name)] for name in asked.inputs}
    writes = {name: [partial(result.outputs.__setitem__, name)] for name in asked.outputs}
    with capture_hooks(block, reads, writes, rows, asked.whole) as forward:
        output = forward(hidden, call)
    for name in asked.inputs:  # layers not called on this batch: experts without tokens
        result.inputs.setdefault(name, result.block_input.new_empty(0, block.layer(name).in_features))
    for name in (name for name in asked.outputs if name in block.layers):
        result.outputs.setdefault(name, result.block_input.new_empty(0, block.layer(name).out_features))
    result.block_output = output if asked.whole else None
    return result
