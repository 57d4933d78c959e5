"""Experts of packed models: packed layers in place of the three-dimensional parameters that transformers has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from sparsellm.extensions.integers.formats import IntegerFormat
from sparsellm.extensions.packed.formats.encoding import PARTS
from sparsellm.extensions.packed.formats.linear import DenseLinear, PackedLinear
from sparsellm.models.experts import GATED, experts_of

FUSED = {"gate_up_proj": GATED[:2], "down_proj": GATED[2:]}
"""The parameters of gated experts, and the layers whose rows each of them holds one after the other."""

NUMBERS = torch.uint64
"""Dtype of the numbers that stand for layers while transformers finds names of stored tensors; no model has others of it."""


class PackedExperts(nn.Module):
    """Gated experts whose layers are packed. Only the experts that a token is routed to are multiplied.

    A module of transformers becomes one in `become_packed`, so that it keeps its other attributes.

    Attributes:
        original: The class that it had.
        expert_count: Number of experts.
        activate: Maps the outputs of the gate and up projections to the input of the down projection.
    """

    original: type[nn.Module]
    expert_count: int
    activate: Any

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Map hidden states, (..., model), with the numbers and weights of their experts, (tokens, top_k), to (..., model)."""
        tokens = hidden_states.flatten(0, -2)
        routed, weights, out = top_k_index.flatten(0, -2), top_k_weights.flatten(0, -2), torch.zeros_like(tokens)
        for number in (x for x in routed.unique().tolist() if x < self.expert_count):
            gate, up, down = (self.get_submodule(f"{number}.{name}") for name in GATED)
            rows, places = torch.where(routed == number)
            x = tokens[rows]
            output = down(self.activate(gate(x), up(x))) * weights[rows, places, None]
            out = out.index_add(0, rows, output.to(out.dtype))
        return out.view_as(hidden_states)

    def weight_formats(self) -> dict[str, IntegerFormat]:
        """The formats of the integers of the parameters, as `PackedLinear.weight_formats`."""
        layers = [(parameter, layer) for parameter in FUSED for _, layer in self.layers(parameter)]
        return {parameter: layer.format for parameter, layer in layers if layer.format}

    def layers(self, parameter: str) -> Iterator[tuple[str, Any]]:
        """Iterate over the layers that one of the parameters was made of, expert by expert, with their paths."""
        for number in range(self.expert_count):
            for name in FUSED[parameter]:
                yield f"{number}.{name}", self.get_submodule(f"{number}.{name}")

    @property
    def gate_up_proj(self) -> Tensor:
        """The parameter of transformers, decoded at each access."""
        return self._decoded("gate_up_proj")

    @property
    def down_proj(self) -> Tensor:
        """The parameter of transformers, decoded at each access."""
        return self._decoded("down_proj")

    def _decoded(self, parameter: str, dtype: torch.dtype | None = None) -> Tensor:
        """One of the parameters that the layers were made of."""
        rows, count = [layer.weight.to(dtype) for _, layer in self.layers(parameter)], len(FUSED[parameter])
        return torch.stack([torch.cat(rows[start : start + count]) for start in range(0, len(rows), count)])

    def become_dense(self, dtype: torch.dtype | None = None) -> None:
        """Take back the class and the parameters of transformers."""
        decoded = {parameter: self._decoded(parameter, dtype) for parameter in FUSED}
        for number in range(self.expert_count):
            delattr(self, str(number))
        self.__class__ = self.original  # type: ignore[assignment]
        for parameter, tensor in decoded.items():
            self.register_parameter(parameter, nn.Parameter(tensor))


def decode_layers(model: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Replace packed layers by dense ones of a dtype, by default their own, which torch multiplies as in any model."""
    for module in [module for module in model.modules() if isinstance(module, PackedExperts)]:
        module.become_dense(dtype)
    for path, module in list(model.named_modules()):
        if isinstance(module, DenseLinear):
            module.__class__ = nn.Linear  # type: ignore[assignment]
        elif isinstance(module, PackedLinear):
            model.set_submodule(path, module.to_dense(dtype))


def can_be_packed(module: nn.Module) -> bool:
    """Whether the experts of a module, if it holds some, can become `PackedExperts`."""
    experts = experts_of(module)
    if experts is None or experts.repeated or experts.names != GATED or hasattr(module, "post_expert_norm"):
        return False
    if {name for name, _ in module.named_parameters()} != {*FUSED} or not getattr(module, "is_concatenated", True):
        return False
    fused, down = (module.get_parameter(name) for name in FUSED)
    return fused.shape == (experts.count, 2 * down.shape[2], down.shape[1])


def become_packed(module: nn.Module, layers: Mapping[str, PackedLinear]) -> None:
    """Replace the parameters of experts by packed layers.

    Args:
        module: Experts that `can_be_packed` accepts.
        layers: Every layer of every expert, by its path in the module.
    """
    experts = experts_of(module)
    assert experts is not None
    for parameter in FUSED:
        delattr(module, parameter)
    for number in range(experts.count):
        module.add_module(str(number), nn.ModuleDict({name: layers[f"{number}.{name}"] for name in GATED}))
    original = type(module)
    # Of no class of transformers any more, which would initialize the parameters of experts.
    module.__class__ = PackedExperts
    packed = cast(PackedExperts, module)
    packed.original, packed.expert_count, packed.activate = original, experts.count, experts.activate


def number_layers(model: nn.Module, state: MutableMapping[str, Tensor]) -> list[tuple[PackedLinear, dict[str, Tensor]]]:
    """Replace the layers of packed experts in a state by the parameters of transformers, with numbers for the weights.

    Args:
        model: The model.
        state: Its state, which is changed.

    Returns:
        The layers by number, each with the parts of its stored form by name.
    """
    found: list[tuple[PackedLinear, dict[str, Tensor]]] = []
    for path, module in [(path, module) for path, module in model.named_modules() if isinstance(module, PackedExperts)]:
        for parameter, names in FUSED.items():
            start = len(found)
            for name, layer in module.layers(parameter):
                stored = {part: f"{path}.{name}.{part}" for part in PARTS}
                found.append((layer, {part: state.pop(key) for part, key in stored.items() if key in state}))
            numbers = torch.arange(start, len(found)).to(NUMBERS)
            state[f"{path}.{parameter}"] = numbers.view(-1, len(names), 1)
    return found
