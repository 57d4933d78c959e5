"""What one batch shows on its way through a block."""

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
"""Shown what a layer reads or writes, batch by batch, flattened to (tokens, in) or (tokens, out)."""

Hooks = Mapping[str, Sequence[Hook]]
"""By layer, who is shown."""


class BlockForward(Protocol):
    """Passes one batch through a block, and gives what comes out, or None where the pass ended before."""

    def __call__(self, hidden: Tensor, call: Call, beyond: bool = False) -> Tensor | None:
        """beyond: whether someone else ends this pass, later than the last look."""


@dataclass(frozen=True)
class CaptureRequest:
    """What a stream's passes through a block are to show. reads: layers whose inputs. writes: layers or modules whose outputs.

    whole: whether the stream travels on with the same pass, so that it must not end before the block does.
    """

    inputs: Sequence[str] = ()
    outputs: Sequence[str] = ()
    whole: bool = False


@dataclass
class Capture:
    """What one batch showed on its way through a block.

    entering: the hidden states, (tokens, model). inputs, outputs: by layer, (tokens, in) and (tokens, out); fewer tokens, or
    none, of a layer that is called with those that are routed to it.
    leaving: the block's output, (batch, seq, model), where the pass was a whole one.
    """

    block_input: Tensor
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    block_output: Tensor | None = None


@contextmanager
def capture_hooks(
    block: Block, reads: Hooks, writes: Hooks, rows: Rows | None = None, whole: bool = False
) -> Iterator[BlockForward]:
    """Within the context a way to pass one batch through the block, as far as there is something to show.

    It gives the block's output, or None where it ended before; a layer whose inputs alone are asked for does not run, if it is
    the last. rows: which tokens experts are shown, if not those that are routed to them. whole: to pass all of the block.
    A pass raises UnsupportedModel where a layer is asked for that the block does not call.
    """
    further = False
    wanted = {(name, False) for name in reads} | {(name, True) for name in writes}
    missing: set[tuple[str, bool]] = set()

    def shows(name: str, written: bool, many: Sequence[Hook]) -> Callable[..., None]:
        def hook(layer: nn.Module, inputs: tuple[Tensor, ...], *output: Tensor) -> None:
            shown = (output_tensor(output[0]) if written else inputs[0]).flatten(0, -2)
            for look in many:
                look(shown)
            missing.discard((name, written))
            if not missing and not whole and not further:
                raise StopForward

        return hook

    def through(hidden: Tensor, call: Call, beyond: bool = False) -> Tensor | None:
        nonlocal further
        further = beyond
        missing.update(wanted)
        with suppress(StopForward):
            left = block(hidden, call)
            _check_called(block, sorted({name for name, _ in missing}))
            return left
        return None

    hooks = [block.layer(name).register_forward_pre_hook(shows(name, False, many)) for name, many in reads.items()]
    hooks += [block.module_of(name).register_forward_hook(shows(name, True, many)) for name, many in writes.items()]
    try:
        with block.expose_layers([*reads, *writes], rows):
            yield through
    finally:
        for hook in hooks:
            hook.remove()


def _check_called(block: Block, names: Sequence[str]) -> None:
    """Raise UnsupportedModel for layers that a whole pass did not call, but for those in lists: experts without a token."""
    idle = [name for name in names if not any(part.isdigit() for part in name.split("."))]
    if idle:
        skipped = idle[0].rpartition(".")[0] or idle[0]
        raise UnsupportedModel(
            f"{block.full_name(idle[0])} is not called when the model reads text, so nothing is known of its inputs. "
            f"Leave it dense with --exclude '{skipped}*', or use --method magnitude."
        )


def capture(block: Block, asked: CaptureRequest, hidden: Tensor, call: Call, rows: Rows | None = None) -> Capture:
    """What one batch shows on its way through a block. rows: as for `looking`."""
    seen = Capture(hidden.flatten(0, -2), {}, {})
    if not (asked.inputs or asked.outputs or asked.whole):
        return seen
    reads = {name: [partial(seen.inputs.__setitem__, name)] for name in asked.inputs}
    writes = {name: [partial(seen.outputs.__setitem__, name)] for name in asked.outputs}
    with capture_hooks(block, reads, writes, rows, asked.whole) as through:
        left = through(hidden, call)
    for name in asked.inputs:  # a layer that the block does not call on this batch, as an expert that no token is routed to
        seen.inputs.setdefault(name, seen.block_input.new_empty(0, block.layer(name).in_features))
    for name in (name for name in asked.outputs if name in block.layers):
        seen.outputs.setdefault(name, seen.block_input.new_empty(0, block.layer(name).out_features))
    seen.block_output = left if asked.whole else None
    return seen
