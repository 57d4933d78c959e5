"""Replaces a stream's hidden states with a block's outputs, and checks that they stay finite."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from sparsellm.errors import NonFinite
from sparsellm.models.block_calls import Call
from sparsellm.models.blocks import Block
from sparsellm.runtime import devices
from sparsellm.runtime.offload import TensorList
from sparsellm.solvers.linalg import all_finite, squares_finite


class StreamUpdate:
    """Replaces the batches of a stream, the inputs of a block, with the block's outputs.

    A batch on the CPU is checked at once. On a GPU the check is deferred to `check_finite`, which avoids a device
    synchronisation per batch.

    Args:
        stream: One (batch, seq, model) tensor per batch, replaced in place.
        block: The block that computes the new hidden states.
    """

    def __init__(self, stream: TensorList, block: Block) -> None:
        self._stream, self._block = stream, block
        self._finite: list[Tensor] = []

    def replace(self, number: int, hidden: Tensor, call: Call) -> None:
        """Replace the hidden states of one batch.

        Args:
            number: Index of the batch in this process.
            hidden: The new hidden states, (batch, seq, model).
            call: The block's call on this batch, to find the layer at fault.

        Raises:
            NonFinite: The hidden states or their squares are not finite. Names the layer.
        """
        if devices.queued(hidden.device):
            self._finite.append(squares_finite(hidden))
        elif not squares_finite(hidden):
            raise non_finite_error(first_non_finite(self._block, self._stream[number], call), hidden, number)
        self._stream[number] = hidden

    def check_finite(self) -> None:
        """Raise NonFinite, naming the block, if a deferred check failed."""
        if not self._finite:
            return
        for number, finite in enumerate(devices.to_python(self._finite)):
            if not finite:  # the block's input is already replaced, so the first such layer cannot be found
                raise non_finite_error(self._block.name, self._stream[number], number)


def non_finite_error(what: str, hidden: Tensor, batch: int) -> NonFinite:
    """Return the error for an output of a block or layer that is not finite, or whose squares are not."""
    state = "overflows float32 when squared" if all_finite(hidden) else "is not finite"
    return NonFinite(
        f"The output of {what} {state} ({hidden.dtype}, batch {batch}). Try --dtype float32, or more calibration tokens."
    )


def check_first_inputs(name: str, finite: Sequence[Tensor]) -> None:
    """Raise NonFinite unless the squares of the first block's inputs are finite.

    Args:
        name: The first block's name.
        finite: For each batch, a boolean scalar: whether the squares are finite.
    """
    for number, good in enumerate(devices.to_python(finite)):
        if not good:
            raise NonFinite(
                f"The hidden states that enter {name} overflow float32 when squared (batch {number}), so that its norm would "
                "turn them into zeros. Look for weights before it that are far too large."
            )


def first_non_finite(block: Block, hidden: Tensor, call: Call) -> str:
    """Return the full name of the first layer with a non-finite output, or the block's name if there is none."""
    names: list[str] = []

    def make_hook(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if not all_finite(output):
                names.append(block.full_name(name))

        return hook

    handles = [layer.register_forward_hook(make_hook(name)) for name, layer in block.layers.items()]
    try:
        with block.expose_layers(block.layers):
            block(hidden, call)
    finally:
        for handle in handles:
            handle.remove()
    return names[0] if names else block.name
