"""Part of a parameter seen as a linear layer of its own: pieces of fused layers, transposed layers, single experts.

A module that holds such layers computes them together. `by_pieces` is its forward written layer by layer, so that hooks on each
see what it reads and writes; `by_experts` (`sparsellm.models.experts`) that of experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.overrides import TorchFunctionMode


class LinearView(nn.Module):
    """A linear layer whose weight is part of another module's parameter.

    owner: the module that holds the parameter. weight, bias: what it calls them; no bias where it has none of that name.
    rows: which of the fused outputs are this layer's; None for all. transposed: whether the parameter is (in, out), as in
    GPT-2. expert: which of the parameter's matrices it is, of how many (experts). runs: the module that computes with the
    parameter, if not the owner.

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
        experts: int = 0,
        runs: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self._held = (owner, runs or owner)  # in a tuple: a module in a field of its own would become a child
        self.stored, self.stored_bias = weight, bias
        self.rows, self.transposed, self.expert, self._experts = rows, transposed, expert, experts

    @property
    def owner(self) -> nn.Module:
        """The module that holds the parameter."""
        return self._held[0]

    @property
    def module(self) -> nn.Module:
        """The module that computes with the parameter."""
        return self._held[1]

    @property
    def weight(self) -> Tensor:
        """(out, in), as it now is. To write, use `put`: this may be a copy."""
        return self.slice_of(getattr(self.owner, self.stored))

    @property
    def bias(self) -> Tensor | None:
        """(out,), as it now is; None where the owner has none."""
        found: Tensor | None = getattr(self.owner, self.stored_bias, None)
        if found is None:
            return None
        found = found if self.expert is None else found[self.expert]
        return found if self.rows is None else found[self.rows]

    @property
    def in_features(self) -> int:
        """How many inputs it has."""
        return int(self.weight.shape[1])

    @property
    def out_features(self) -> int:
        """How many outputs it has."""
        return int(self.weight.shape[0])

    def slice_of(self, whole: Tensor) -> Tensor:
        """This layer's part, (out, in), of a tensor shaped as the parameter."""
        matrix = self._matrix(whole)
        return matrix if self.rows is None else matrix[self.rows]

    def assign(self, whole: Tensor, part: Tensor) -> None:
        """Write this layer's part, (out, in), into a tensor shaped as the parameter."""
        self._matrix(whole)[slice(None) if self.rows is None else self.rows] = part.to(whole.dtype)

    def assign_bias(self, bias: Tensor) -> None:
        """Write the bias, (out,)."""
        whole = getattr(self.owner, self.stored_bias)
        whole = whole if self.expert is None else whole[self.expert]
        whole[slice(None) if self.rows is None else self.rows] = bias.to(whole.dtype)

    def forward(self, inputs: Tensor) -> Tensor:
        return linear(inputs, self.weight, self.bias)

    def _matrix(self, whole: Tensor) -> Tensor:
        """The (out, in) matrix that the part is cut from, as a view."""
        if self.expert is None:
            matrix = whole
        else:  # a three-dimensional parameter, or matrices one above the other
            matrix = (whole if whole.ndim == 3 else whole.unflatten(0, (self._experts, -1)))[self.expert]
        return matrix.T if self.transposed else matrix


Layer = nn.Linear | LinearView
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


def forward_by_views(views: Sequence[LinearView]) -> Callable[[Tensor], Tensor]:
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


class RouteMatmulThroughLayers(TorchFunctionMode):
    """Within the context a linear layer is called wherever its weight is multiplied outside of it: W X becomes layer(Xᵀ)ᵀ.

    State-space models do that, to add the bias later; hooks on the layer are called as on any other, and the bias that it adds
    is taken off again.
    """

    def __init__(self, layers: Iterable[nn.Linear]) -> None:
        super().__init__()
        self._layers = {id(layer.weight): layer for layer in layers}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        layer = self._layers.get(id(args[0])) if func in PRODUCTS and len(args) == 2 else None
        if layer is None:
            return func(*args, **(kwargs or {}))
        written = layer(args[1].mT)
        return (written if layer.bias is None else written - layer.bias).mT


PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__)
"""The ways to write a product of a weight and what it reads."""
