"""Keys and values of the tokens so far, when a sequence of known length is generated."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from transformers.cache_utils import Cache, DynamicLayer


@cache
def preallocated_layer() -> type[DynamicLayer]:
    """The class of layers in memory for a number of tokens, defined on first use: transformers takes seconds to import."""
    from transformers.cache_utils import DynamicLayer

    class PreallocatedLayer(DynamicLayer):  # type: ignore[misc]
        """The keys and values of a layer, in memory for `length` tokens; `DynamicLayer` copies all for each new token."""

        def __init__(self, layer: DynamicLayer, length: int) -> None:
            super().__init__()
            self.lazy_initialization(layer.keys, layer.values)
            self._memory = [x.new_empty((*x.shape[:-2], length, x.shape[-1])) for x in (layer.keys, layer.values)]
            self.update(layer.keys, layer.values)

        def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
            """Add keys and values, (batch, heads, seq, head); return those of all tokens so far."""
            start = self.get_seq_length()
            end = start + key_states.shape[-2]
            for memory, states in zip(self._memory, (key_states, value_states), strict=True):
                memory[..., start:end, :] = states
            self.keys, self.values = (memory[..., :end, :] for memory in self._memory)
            return self.keys, self.values

    return PreallocatedLayer


def preallocate(cache: Cache, length: int) -> None:
    """Give the layers of a cache that grow with each token memory for `length` tokens, in place; other kinds are left."""
    from transformers.cache_utils import DynamicLayer

    layers = getattr(cache, "layers", [])
    for number, layer in enumerate(layers):
        if type(layer) is DynamicLayer and layer.is_initialized:
            layers[number] = preallocated_layer()(layer, length)
