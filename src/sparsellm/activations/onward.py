"""A stream on its way through a block, batch by batch, and what is said where it stops being finite."""

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
    """A stream whose batches are replaced by what a block makes of them, as long as that is finite."""

    def __init__(self, stream: TensorList, block: Block) -> None:
        self._stream, self._block = stream, block
        self._finite: list[Tensor] = []

    def replace(self, number: int, hidden: Tensor, call: Call) -> None:
        """Put a batch's new hidden states in the place of those that it entered with. Raises NonFinite, naming the layer."""
        if devices.queued(hidden.device):
            self._finite.append(squares_finite(hidden))
        elif not squares_finite(hidden):
            raise non_finite_error(first_non_finite(self._block, self._stream[number], call), hidden, number)
        self._stream[number] = hidden

    def check_finite(self) -> None:
        """Raise NonFinite, naming the block, where a GPU was not waited for before."""
        if not self._finite:
            return
        for number, good in enumerate(devices.to_python(self._finite)):
            if not good:  # what entered is gone, and with it which layer was the first
                raise non_finite_error(self._block.name, self._stream[number], number)


def non_finite_error(what: str, hidden: Tensor, batch: int) -> NonFinite:
    """The error for an output of a block or a layer that is not finite, or whose squares are not."""
    state = "overflows float32 when squared" if all_finite(hidden) else "is not finite"
    return NonFinite(
        f"The output of {what} {state} ({hidden.dtype}, batch {batch}). Try --dtype float32, or more calibration tokens."
    )


def check_first_inputs(name: str, finite: Sequence[Tensor]) -> None:
    """Raise NonFinite unless the hidden states that enter the first block have finite squares: a tensor for each batch."""
    for number, good in enumerate(devices.to_python(finite)):
        if not good:
            raise NonFinite(
                f"The hidden states that enter {name} overflow float32 when squared (batch {number}), so that its norm would "
                "turn them into zeros. Look for weights before it that are far too large."
            )


def first_non_finite(block: Block, hidden: Tensor, call: Call) -> str:
    """The first layer of a block whose output is not finite, by its full name; the block's where it is none of its layers."""
    found: list[str] = []

    def hook_of(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if not all_finite(output):
                found.append(block.full_name(name))

        return hook

    hooks = [layer.register_forward_hook(hook_of(name)) for name, layer in block.layers.items()]
    try:
        with block.expose_layers(block.layers):
            block(hidden, call)
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else block.name
