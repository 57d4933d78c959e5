"""Captures the inputs and outputs of a block's layers during a pass of one batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparsellm.errors import NonFinite, UnsupportedModel
from sparsellm.models.blocks import Block, Call
from sparsellm.models.experts import Rows
from sparsellm.solvers.linalg import all_finite


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
        inputs: By layer, (tokens, in).
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
        block: The block.
        request: The tensors to capture.
        hidden: The block's input, (batch, seq, model).
        call: The block's other arguments.
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
            tensor = (output_tensor(output[0]) if is_output else inputs[0]).flatten(0, -2)
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


def _check_called(block: Block, names: Sequence[str]) -> None:
    """Raise UnsupportedModel for layers that were not called. Those in module lists may be experts without tokens."""
    idle = [name for name in names if not any(part.isdigit() for part in name.split("."))]
    if idle:
        skipped = idle[0].rpartition(".")[0] or idle[0]
        raise UnsupportedModel(
            f"{block.full_name(idle[0])} is not called when the model reads text, so nothing is known of its inputs. "
            f"Leave it dense with `exclude={f'{skipped}*'!r}`, or use `method='magnitude'`."
        )


def output_tensor(output: Any) -> Tensor:
    """Return the tensor of a module's output, the first item if that is a tuple."""
    tensor: Tensor = output[0] if isinstance(output, tuple) else output
    return tensor


def allclose_bf16(computed: Tensor, expected: Tensor) -> bool:
    """Return whether two tensors agree to 2 % in norm; the rounding error of bfloat16 is 0.4 %."""
    return float((computed - expected).float().norm()) <= 0.02 * float(computed.float().norm())


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
