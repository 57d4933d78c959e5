"""Part of a parameter seen as a linear layer of its own: pieces of fused layers, transposed layers, single experts.

A module that holds such layers computes them together. `by_pieces` and `by_experts` are its forward written layer by layer, so
that hooks on each see what it reads and writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

Rows = Callable[[Tensor], Sequence[Tensor]]
"""From the experts chosen for each token, (tokens, top-k), to the numbers of the tokens that each expert is shown."""


class View(nn.Module):
    """A linear layer whose weight is part of another module's parameter.

    owner: the module that holds the parameter. weight, bias: what it calls them; no bias where it has none of that name.
    rows: which of the fused outputs are this layer's; None for all. transposed: whether the parameter is (in, out), as in
    GPT-2. expert: which of a three-dimensional parameter's matrices it is.

    stored: what the owner calls the parameter. Nothing of it is kept here: it may be replaced, moved or cast at any time.
    """

    def __init__(
        self,
        owner: nn.Module,
        weight: str = "weight",
        bias: str = "bias",
        rows: slice | Tensor | None = None,
        transposed: bool = False,
        expert: int | None = None,
    ) -> None:
        super().__init__()
        self._held = (owner,)  # in a tuple: a module in a field of its own would become a child
        self.stored, self._bias = weight, bias
        self.rows, self.transposed, self.expert = rows, transposed, expert

    @property
    def owner(self) -> nn.Module:
        """The module that holds the parameter."""
        return self._held[0]

    @property
    def weight(self) -> Tensor:
        """(out, in), as it now is. To write, use `put`: this may be a copy."""
        return self.seen(getattr(self.owner, self.stored))

    @property
    def bias(self) -> Tensor | None:
        """(out,), as it now is; None where the owner has none."""
        found: Tensor | None = getattr(self.owner, self._bias, None)
        return found if found is None or self.rows is None else found[self.rows]

    @property
    def in_features(self) -> int:
        """How many inputs it has."""
        return int(self.weight.shape[1])

    @property
    def out_features(self) -> int:
        """How many outputs it has."""
        return int(self.weight.shape[0])

    def seen(self, whole: Tensor) -> Tensor:
        """This layer's part, (out, in), of a tensor shaped as the parameter."""
        matrix = self._matrix(whole)
        return matrix if self.rows is None else matrix[self.rows]

    def put(self, whole: Tensor, part: Tensor) -> None:
        """Write this layer's part, (out, in), into a tensor shaped as the parameter."""
        self._matrix(whole)[slice(None) if self.rows is None else self.rows] = part.to(whole.dtype)

    def put_bias(self, bias: Tensor) -> None:
        """Write the bias, (out,)."""
        whole = getattr(self.owner, self._bias)
        whole[slice(None) if self.rows is None else self.rows] = bias.to(whole.dtype)

    def forward(self, inputs: Tensor) -> Tensor:
        return linear(inputs, self.weight, self.bias)

    def _matrix(self, whole: Tensor) -> Tensor:
        """The (out, in) matrix that the part is cut from, as a view."""
        matrix = whole if self.expert is None else whole[self.expert]
        return matrix.T if self.transposed else matrix


Layer = nn.Linear | View
"""What methods prune: has `weight`, `bias`, `in_features`, `out_features`, can be called and hooked."""


def piece_rows(total: int, shares: Sequence[int], repeated: int) -> list[slice | Tensor]:
    """Which of `total` fused outputs belong to each piece, where these take turns `repeated` times in proportion of `shares`.

    Raises ValueError where that does not come out even.
    """
    unit, left = divmod(total, sum(shares))
    if left or any(unit * share % repeated for share in shares):
        raise ValueError(f"{total} outputs do not divide into {tuple(shares)}, {repeated} times over")
    sizes = [unit * share // repeated for share in shares]
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    if repeated == 1:
        return [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    turns = torch.arange(repeated, device="cpu").unsqueeze(1) * sum(sizes)
    return [
        (turns + torch.arange(start, start + size, device="cpu")).flatten() for start, size in zip(starts, sizes, strict=True)
    ]


def is_experts(module: nn.Module) -> bool:
    """Whether a module holds gated experts as three-dimensional tensors, in the usual form: gate above up, and no biases."""
    fused, down = (getattr(module, name, None) for name in ("gate_up_proj", "down_proj"))
    if not (isinstance(fused, nn.Parameter) and isinstance(down, nn.Parameter) and fused.ndim == down.ndim == 3):
        return False
    gate = getattr(type(module), "_apply_gate", None)
    usual = gate is None or gate.__name__ == "_default_apply_gate"
    plain = not (getattr(module, "has_bias", False) or getattr(module, "has_post_expert_norm", False))
    return usual and plain and getattr(module, "is_concatenated", True) and callable(getattr(module, "act_fn", None))


EXPERT = ("gate_proj", "up_proj", "down_proj")
"""What the layers of an expert are called here: its readers, and its writer."""


def expert_views(experts: nn.Module, path: str) -> dict[str, View]:
    """By name, the three layers of each expert of a module for which `is_experts` holds."""
    found: dict[str, View] = {}
    transposed = bool(getattr(experts, "is_transposed", False))
    fused = experts.get_parameter("gate_up_proj")
    hidden = fused.shape[2 if transposed else 1] // 2
    halves = {"gate_proj": slice(0, hidden), "up_proj": slice(hidden, 2 * hidden)}
    for number in range(len(fused)):
        for name in EXPERT:
            whole = "gate_up_proj" if name in halves else "down_proj"
            found[f"{path}.{number}.{name}"] = View(experts, whole, "", halves.get(name), transposed, number)
    return found


def by_pieces(views: Sequence[View]) -> Callable[[Tensor], Tensor]:
    """A fused layer's forward, piece by piece. views: all that it holds."""
    first = views[0]
    if first.rows is None:
        return first.__call__  # not the view itself: a module that is set on another becomes its child
    device = first.weight.device
    total = sum(view.out_features for view in views)
    order = torch.cat([torch.arange(total, device="cpu")[view.rows] for view in views])
    back = order.argsort().to(device)

    def forward(inputs: Tensor) -> Tensor:
        return torch.cat([view(inputs) for view in views], -1)[..., back]

    return forward


def routed(chosen: Tensor, experts: int) -> list[Tensor]:
    """The tokens that go to each expert, from the experts chosen for each token, (tokens, top-k)."""
    return [torch.where((chosen == number).any(-1))[0] for number in range(experts)]


def by_experts(views: Sequence[View], rows: Rows | None = None) -> Callable[..., Tensor]:
    """The experts' forward, expert by expert, layer by layer; every expert's layers are called, if only with no tokens.

    views: gate, up and writer of each expert in turn. rows: which tokens each is shown, instead of those that are routed to it:
    a token that is not routed to an expert adds nothing to the output.
    """
    activate: Any = views[0].owner.act_fn

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        shown = rows(top_k_index) if rows else routed(top_k_index, len(views) // 3)
        out = torch.zeros_like(hidden_states)
        for number, mine in enumerate(shown):
            gate, up, writer = views[3 * number : 3 * number + 3]
            x = hidden_states[mine]
            written = writer(activate(gate(x)) * up(x))
            share = (top_k_weights[mine] * (top_k_index[mine] == number)).sum(-1, keepdim=True)
            out = out.index_add(0, mine, (written * share).to(out.dtype))
        return out

    return forward
