"""Experts held as parameters: how a module holds them, each matrix as a layer, and their forward layer by layer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from sparsellm.models.linear_views import LinearView

Rows = Callable[[Tensor], Sequence[Tensor]]
"""From which tokens are routed to each expert, (tokens, experts), to the numbers of the tokens that each expert is shown."""

GATED = ("gate_proj", "up_proj", "down_proj")
"""What the layers of a gated expert are called here: its readers, and its writer."""

PLAIN = ("up_proj", "down_proj")
"""What the layers of an expert without a gate are called."""


@dataclass(frozen=True)
class ExpertParameter:
    """Where the matrices of one layer of all experts are. owner: the module that holds the parameter.

    parameter, bias: their names; no bias where it is empty or the owner has none. rows: which of the outputs are this layer's;
    None for all. transposed: whether a matrix is (in, out).
    """

    owner: nn.Module
    parameter: str
    bias: str = ""
    rows: slice | None = None
    transposed: bool = False


@dataclass(frozen=True)
class Experts:
    """A module that holds experts, and how it runs them.

    module: what is called. count: how many experts. layers: by name, the readers and then the writer. activate: from what the
    readers write to what the writer reads. known: whether that is the activation of the configuration, times the other reader
    where there are two. repeated: whether the module is called with all tokens once for each expert, scaled by the router, in
    place of tokens, the experts of each, and their weights.
    """

    module: nn.Module
    count: int
    layers: dict[str, ExpertParameter]
    activate: Callable[..., Tensor]
    known: bool
    repeated: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """What the layers of an expert are called: its readers, and its writer."""
        return tuple(self.layers)

    def views(self, path: str) -> dict[str, LinearView]:
        """By name, the layers of each expert, the module being at that path."""
        found: dict[str, LinearView] = {}
        for number in range(self.count):
            for name, at in self.layers.items():
                place = LinearView(at.owner, at.parameter, at.bias, at.rows, at.transposed, number, self.count, self.module)
                found[f"{path}.{number}.{name}"] = place
        return found


def experts_of(module: nn.Module) -> Experts | None:
    """The experts that a module holds as parameters; None where it holds none, or in a form that is not known."""
    found = _fused(module) or _plain(module) or _stacked(module)
    if found is None:
        return None
    arguments = len(inspect.signature(type(module).forward).parameters) - 1  # the first is the module
    if arguments == 1:
        return replace(found, repeated=True)
    return found if arguments == 3 else None  # tokens, the experts of each, their weights


def _fused(module: nn.Module) -> Experts | None:
    """Gate and up in one three-dimensional parameter, one above the other or in turns."""
    fused, down = _tensors(module, "gate_up_proj", "down_proj")
    if fused is None or down is None or len(fused) != len(down):
        return None
    transposed = fused.shape[1] == down.shape[2]
    wide, hidden = fused.shape[2 if transposed else 1], down.shape[1 if transposed else 2]
    if wide != 2 * hidden or fused.shape[1 if transposed else 2] != down.shape[2 if transposed else 1]:
        return None
    together = bool(getattr(module, "is_concatenated", True))
    gate, up = (slice(0, hidden), slice(hidden, wide)) if together else (slice(0, None, 2), slice(1, None, 2))
    reader = "gate_up_proj", "gate_up_proj_bias"
    layers = {
        "gate_proj": ExpertParameter(module, *reader, gate, transposed),
        "up_proj": ExpertParameter(module, *reader, up, transposed),
        "down_proj": ExpertParameter(module, "down_proj", "down_proj_bias", None, transposed),
    }
    own = getattr(module, "_apply_gate", None)
    if own is None or own.__name__ == "_default_apply_gate":
        return _gated(module, len(down), layers, getattr(module, "act_fn", None))

    def activate(gate: Tensor, up: Tensor) -> Tensor:
        pair = torch.cat((gate, up), -1) if together else torch.stack((gate, up), -1).flatten(-2)
        written: Tensor = own(pair)
        return written

    return Experts(module, len(down), layers, activate, known=False)


def _stacked(module: nn.Module) -> Experts | None:
    """As in DBRX: the matrices of all experts one above the other, in two-dimensional parameters of a child."""
    held = getattr(module, "mlp", None)
    if not isinstance(held, nn.Module) or type(module).__name__ != "DbrxExperts":
        return None
    layers = {
        "gate_proj": ExpertParameter(held, "w1"),
        "up_proj": ExpertParameter(held, "v1"),
        "down_proj": ExpertParameter(held, "w2", transposed=True),
    }
    count: Any = module.num_experts
    return _gated(module, count, layers, getattr(held, "activation_fn", None))


def _plain(module: nn.Module) -> Experts | None:
    """A reader and a writer, each a three-dimensional parameter."""
    up, down = _tensors(module, "up_proj", "down_proj")
    if up is None or down is None or hasattr(module, "gate_proj") or up.shape != down.transpose(1, 2).shape:
        return None
    transposed, activation = bool(getattr(module, "is_transposed", False)), getattr(module, "act_fn", None)
    layers = {name: ExpertParameter(module, name, f"{name}_bias", None, transposed) for name in PLAIN}
    return None if activation is None else Experts(module, len(up), layers, activation, known=True)


def _gated(
    module: nn.Module, count: int, layers: dict[str, ExpertParameter], activation: Callable[[Tensor], Tensor] | None
) -> Experts | None:
    """Experts whose writer reads the gate's activation times what the other reader writes."""
    if activation is None:
        return None
    return Experts(module, count, layers, lambda gate, up: activation(gate) * up, known=True)


def _tensors(module: nn.Module, *names: str) -> tuple[nn.Parameter | None, ...]:
    """The module's own parameters of these names; None for one that is not three-dimensional."""
    own = (getattr(module, name, None) for name in names)
    return tuple(one if isinstance(one, nn.Parameter) and one.ndim == 3 else None for one in own)


def expert_members(experts: Experts, *given: Tensor) -> Tensor:
    """Which tokens are routed to each expert, (tokens, experts). given: what the module is called with."""
    if experts.repeated:
        return (_of_each(experts, given[0]) != 0).any(-1).T
    numbers = torch.arange(experts.count, device=given[1].device)
    return (given[1].flatten(0, -2).unsqueeze(-1) == numbers).any(1)


def routed_tokens(member: Tensor) -> list[Tensor]:
    """The numbers of the tokens that go to each expert. member: (tokens, experts)."""
    return [torch.where(column)[0] for column in member.T]


def forward_by_expert(experts: Experts, views: Sequence[LinearView], rows: Rows | None = None) -> Callable[..., Tensor]:
    """The experts' forward, expert by expert, layer by layer; every expert's layers are called, if only with no tokens.

    views: the layers of each expert in turn. rows: which tokens each is shown, instead of those that are routed to it: a token
    that is not routed to an expert adds nothing to the output.
    """
    size = len(experts.names)
    after: nn.Module | None = getattr(experts.module, "post_expert_norm", None)

    def run(number: int, x: Tensor) -> Tensor:
        *readers, writer = views[size * number : size * (number + 1)]
        written: Tensor = writer(experts.activate(*(reader(x) for reader in readers)))
        return after(written) if after is not None else written

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        member = expert_members(experts, hidden_states, top_k_index)
        tokens = hidden_states.flatten(0, -2)
        chosen, weights = top_k_index.flatten(0, -2), top_k_weights.flatten(0, -2)
        out = torch.zeros_like(tokens)
        for number, local in enumerate(rows(member) if rows else routed_tokens(member)):
            written = run(number, tokens[local])
            share = (weights[local] * (chosen[local] == number)).sum(-1, keepdim=True)
            out = out.index_add(0, local, (written * share).to(out.dtype))
        return out.view_as(hidden_states)

    def forward_repeated(hidden_states: Tensor) -> Tensor:
        scaled, member = _of_each(experts, hidden_states), expert_members(experts, hidden_states)
        # A token that is routed elsewhere is shown as its own experts read it: scaled for this one it is zero.
        elsewhere = scaled.sum(0) / member.sum(1, keepdim=True).clamp(min=1)
        out = []
        for number, local in enumerate(rows(member) if rows else routed_tokens(member)):
            own = member[local, number].unsqueeze(1)
            written = run(number, torch.where(own, scaled[number, local], elsewhere[local]))
            out.append(torch.zeros_like(elsewhere).index_add(0, local, written * own))
        return torch.cat(out)

    return forward_repeated if experts.repeated else forward


def _of_each(experts: Experts, repeated: Tensor) -> Tensor:
    """(experts, tokens, model): what each expert of a module that is called with repeated tokens reads."""
    return repeated.view(experts.count, -1, repeated.shape[-1])
