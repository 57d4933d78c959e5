"""Experts stored as parameters: each matrix as a `LinearView`, and a forward function that runs layer by layer."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sparsellm.models.linear_views import LinearView
from sparsellm.runtime import collectives

Rows = Callable[[Tensor], Sequence[Tensor]]
"""Chooses the tokens that each expert runs on: from the routing mask, (tokens, experts), to token indices for each expert."""

ExpertLayer = Callable[..., LinearView]
"""Builds the view of one layer of one expert, from `expert`, its number, `experts`, their count, and `runs`, their module."""

GATED = ("gate_proj", "up_proj", "down_proj")
"""Names of the layers of a gated expert: input projections, output projection."""

PLAIN = ("up_proj", "down_proj")
"""Names of the layers of an expert without a gate."""


@dataclass(frozen=True)
class Experts:
    """A module that holds experts as parameters.

    Attributes:
        module: The module whose forward function runs the experts.
        layers: By layer name, the input projections, then the output projection: builds the view of one expert.
        activate: Maps the outputs of the input projections to the input of the output projection.
        known: Whether `activate` is that of a plain or gated feed-forward part.
        repeated: Whether the module is called with inputs scaled by the router, (experts * tokens, model), instead of tokens,
            their experts and the routing weights.
    """

    module: nn.Module
    count: int
    layers: Mapping[str, ExpertLayer]
    activate: Callable[..., Tensor]
    known: bool
    repeated: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the layers of an expert: input projections, output projection."""
        return tuple(self.layers)

    def views(self, path: str) -> dict[str, LinearView]:
        """Return the layers of every expert, by name within the block; `path` is the module's path there."""
        return {
            f"{path}.{expert}.{name}": layer(expert=expert, experts=self.count, runs=self.module)
            for expert in range(self.count)
            for name, layer in self.layers.items()
        }


def experts_of(module: nn.Module) -> Experts | None:
    """Return the experts that a module holds as parameters; None for no experts, or an unsupported form."""
    experts = _fused(module) or _plain(module) or _stacked(module)
    if experts is None:
        return None
    arguments = len(inspect.signature(type(module).forward).parameters) - 1  # without self
    if arguments == 1:
        return replace(experts, repeated=True)
    return experts if arguments == 3 else None  # tokens, their experts, the routing weights


def _fused(module: nn.Module) -> Experts | None:
    """Return experts with gate and up projections in one three-dimensional parameter, concatenated or interleaved."""
    fused, down = _expert_tensors(module, "gate_up_proj", "down_proj")
    if fused is None or down is None or len(fused) != len(down):
        return None
    transposed = fused.shape[1] == down.shape[2]
    outputs, hidden = fused.shape[2 if transposed else 1], down.shape[1 if transposed else 2]
    if outputs != 2 * hidden or fused.shape[1 if transposed else 2] != down.shape[2 if transposed else 1]:
        return None
    concatenated = bool(getattr(module, "is_concatenated", True))
    gate, up = (slice(0, hidden), slice(hidden, outputs)) if concatenated else (slice(0, None, 2), slice(1, None, 2))
    layers = {
        "gate_proj": partial(LinearView, module, "gate_up_proj", "gate_up_proj_bias", rows=gate, transposed=transposed),
        "up_proj": partial(LinearView, module, "gate_up_proj", "gate_up_proj_bias", rows=up, transposed=transposed),
        "down_proj": partial(LinearView, module, "down_proj", "down_proj_bias", transposed=transposed),
    }
    apply_gate = getattr(module, "_apply_gate", None)
    if apply_gate is None or apply_gate.__name__ == "_default_apply_gate":
        return _gated(module, len(down), layers, activation=getattr(module, "act_fn", None))

    def activate(gate: Tensor, up: Tensor) -> Tensor:
        gate_up = torch.cat((gate, up), -1) if concatenated else torch.stack((gate, up), -1).flatten(-2)
        activated: Tensor = apply_gate(gate_up)
        return activated

    return Experts(module, len(down), layers, activate, known=False)


def _stacked(module: nn.Module) -> Experts | None:
    """Return the experts of DBRX: the matrices of all experts stacked in two-dimensional parameters of a child module."""
    child = getattr(module, "mlp", None)
    if not isinstance(child, nn.Module) or type(module).__name__ != "DbrxExperts":
        return None
    layers = {
        "gate_proj": partial(LinearView, child, "w1", ""),
        "up_proj": partial(LinearView, child, "v1", ""),
        "down_proj": partial(LinearView, child, "w2", "", transposed=True),
    }
    count: Any = module.num_experts
    return _gated(module, count, layers, activation=getattr(child, "activation_fn", None))


def _plain(module: nn.Module) -> Experts | None:
    """Return experts without a gate, with one three-dimensional parameter for each of their two layers."""
    up, down = _expert_tensors(module, "up_proj", "down_proj")
    if up is None or down is None or hasattr(module, "gate_proj") or up.shape != down.transpose(1, 2).shape:
        return None
    transposed, activation = bool(getattr(module, "is_transposed", False)), getattr(module, "act_fn", None)
    layers = {name: partial(LinearView, module, name, f"{name}_bias", transposed=transposed) for name in PLAIN}
    return None if activation is None else Experts(module, len(up), layers, activation, known=True)


def _gated(
    module: nn.Module, count: int, layers: Mapping[str, ExpertLayer], *, activation: Callable[[Tensor], Tensor] | None
) -> Experts | None:
    """Return experts whose output projection reads activation(gate) * up; None without an activation function."""
    if activation is None:
        return None
    return Experts(module, count, layers, lambda gate, up: activation(gate) * up, known=True)


def _expert_tensors(module: nn.Module, *names: str) -> tuple[nn.Parameter | None, ...]:
    """Return the module's three-dimensional parameters of these names; None for each that is missing."""
    values = (getattr(module, name, None) for name in names)
    return tuple(value if isinstance(value, nn.Parameter) and value.ndim == 3 else None for value in values)


def expert_members(experts: Experts, *inputs: Tensor) -> Tensor:
    """Return the routing mask, (tokens, experts), True where a token is routed to an expert."""
    if experts.repeated:
        return (_inputs_by_expert(experts, inputs[0]) != 0).any(-1).T
    numbers = torch.arange(experts.count, device=inputs[1].device)
    return (inputs[1].flatten(0, -2).unsqueeze(-1) == numbers).any(1)


def routed_tokens(mask: Tensor) -> list[Tensor]:
    """Return the indices of the tokens that are routed to each expert, from the routing mask, (tokens, experts)."""
    return [torch.where(column)[0] for column in mask.T]


def forward_by_expert(experts: Experts, views: Sequence[LinearView], rows: Rows | None = None) -> Callable[..., Tensor]:
    """Return a forward function that calls every layer of every expert, also of experts without tokens.

    Args:
        views: Their layers, expert by expert.
        rows: Chooses the tokens that each expert runs on; the tokens routed to it by default. Tokens that are not routed to an
            expert do not change the output.
    """
    size = len(experts.names)
    post_norm: nn.Module | None = getattr(experts.module, "post_expert_norm", None)

    def run_expert(number: int, x: Tensor) -> Tensor:
        *in_proj, out_proj = views[size * number : size * (number + 1)]
        output: Tensor = out_proj(experts.activate(*(layer(x) for layer in in_proj)))
        return post_norm(output) if post_norm is not None else output

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        member = expert_members(experts, hidden_states, top_k_index)
        tokens = hidden_states.flatten(0, -2)
        routed, weights = top_k_index.flatten(0, -2), top_k_weights.flatten(0, -2)
        out = torch.zeros_like(tokens)
        for number, indices in enumerate(rows(member) if rows else routed_tokens(member)):
            output = run_expert(number, tokens[indices])
            weight = (weights[indices] * (routed[indices] == number)).sum(-1, keepdim=True)
            out = out.index_add(0, indices, (output * weight).to(out.dtype))
        return out.view_as(hidden_states)

    def forward_repeated(hidden_states: Tensor) -> Tensor:
        scaled, member = _inputs_by_expert(experts, hidden_states), expert_members(experts, hidden_states)
        # The inputs of tokens routed to other experts are scaled to zero here: use the mean input of their own experts.
        unrouted = scaled.sum(0) / member.sum(1, keepdim=True).clamp(min=1)
        out = []
        for number, indices in enumerate(rows(member) if rows else routed_tokens(member)):
            is_routed = member[indices, number].unsqueeze(1)
            output = run_expert(number, torch.where(is_routed, scaled[number, indices], unrouted[indices]))
            out.append(torch.zeros_like(unrouted).index_add(0, indices, output * is_routed))
        return torch.cat(out)

    return forward_repeated if experts.repeated else forward


def _inputs_by_expert(experts: Experts, repeated: Tensor) -> Tensor:
    """Reshape repeated inputs, (experts * tokens, model), to (experts, tokens, model)."""
    return repeated.view(experts.count, -1, repeated.shape[-1])


class ExpertSamples:
    """Selects the tokens from which each expert's statistics are computed: those routed to it, plus others if too few.

    The Gram matrix of an expert with fewer tokens than its layers have inputs is singular. Such an expert also gets tokens
    that are not routed to it, evenly spaced over all batches, until it has `least` tokens. Its Gram matrix then contains a
    share of the whole layer's.

    Args:
        routed: (batches, experts), the number of tokens routed to each expert, over all processes.
        tokens: Number of tokens in each of these batches.
        least: Minimum number of tokens per expert, where the batches hold that many.

    Attributes:
        counts: (experts,), the number of tokens routed to each expert, over all batches.
    """

    def __init__(self, routed: Tensor, tokens: Sequence[int], least: int) -> None:
        self.counts = routed.sum(0)
        unrouted = torch.tensor(tokens).unsqueeze(1) - routed
        self._unrouted_before = collectives.shard((unrouted.cumsum(0) - unrouted).tolist())  # in earlier batches
        self._unrouted: list[int] = unrouted.sum(0).tolist()
        missing = [max(0, least - int(count)) for count in self.counts]
        self._extra = [min(count, available) for count, available in zip(missing, self._unrouted, strict=True)]

    @property
    def max_tokens(self) -> int:
        """Largest number of tokens of an expert."""
        return max(int(count) + extra for count, extra in zip(self.counts, self._extra, strict=True))

    def choose(self, number: int, member: Tensor) -> list[Tensor]:
        """Choose each expert's tokens from a batch.

        Args:
            number: Index of the batch in this process.
            member: (tokens, experts), True where a token is routed to an expert.

        Returns:
            For each expert, the indices of its tokens, in ascending order.
        """
        chosen, before = [], self._unrouted_before[number]
        for expert, indices in enumerate(routed_tokens(member)):
            extra, unrouted = self._extra[expert], self._unrouted[expert]
            if extra:
                (candidates,) = torch.where(~member[:, expert])
                position = torch.arange(len(candidates), device=candidates.device) + before[expert]
                added = candidates[(position + 1) * extra // unrouted > position * extra // unrouted]
                indices = torch.cat([indices, added]).sort().values  # noqa: PLW2901  (in the order of the tokens)
            chosen.append(indices)
        return chosen
