"""Linear layers that are part of a parameter: pieces of fused layers, transposed layers, single experts.

The module that holds such layers computes them together. `forward_by_views`, and `forward_by_expert` for experts
(`sparsellm.models.experts`), replace its forward function by one that calls layer by layer, so that hooks on each layer run.
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

    The view looks the parameter up by name at each use, so the parameter may be replaced, moved or cast at any time.

    Args:
        owner: The module that holds the parameter.
        weight: Name of the parameter in the owner.
        bias: Name of the bias in the owner; the layer has no bias if the owner has none of that name.
        rows: The layer's outputs among those of a fused layer; None for all.
        transposed: Whether the parameter is (in, out), as in GPT-2.
        expert: Index of the layer's matrix among those of the parameter; None for a parameter that is one matrix.
        experts: Number of matrices in the parameter.
        runs: The module that computes with the parameter; the owner by default.

    Attributes:
        stored: Name of the parameter in the owner.
        stored_bias: Name of the bias in the owner.
    """

    def __init__(
        self,
        owner: nn.Module,
        weight: str = "weight",
        bias: str = "bias",
        *,
        rows: slice | Tensor | None = None,
        transposed: bool = False,
        expert: int | None = None,
        experts: int = 0,
        runs: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self._linked = (owner, runs or owner)  # a tuple, as modules in attributes would become children
        self.stored, self.stored_bias = weight, bias
        self.rows, self.transposed, self.expert, self._experts = rows, transposed, expert, experts

    @property
    def owner(self) -> nn.Module:
        """The module that holds the parameter."""
        return self._linked[0]

    @property
    def module(self) -> nn.Module:
        """The module that computes with the parameter."""
        return self._linked[1]

    @property
    def weight(self) -> Tensor:
        """The current weight, (out, in). It may be a copy: use `assign` to write."""
        return self.slice_of(getattr(self.owner, self.stored))

    @property
    def bias(self) -> Tensor | None:
        """The current bias, (out,), or None."""
        bias: Tensor | None = getattr(self.owner, self.stored_bias, None)
        if bias is None:
            return None
        bias = bias if self.expert is None else bias[self.expert]
        return bias if self.rows is None else bias[self.rows]

    @property
    def in_features(self) -> int:
        """Number of inputs."""
        return int(self.weight.shape[1])

    @property
    def out_features(self) -> int:
        """Number of outputs."""
        return int(self.weight.shape[0])

    def slice_of(self, parameter: Tensor) -> Tensor:
        """Return this layer's entries, (out, in), of a tensor shaped like the parameter."""
        matrix = self._matrix(parameter)
        return matrix if self.rows is None else matrix[self.rows]

    def assign(self, parameter: Tensor, part: Tensor) -> None:
        """Write this layer's entries, (out, in), into a tensor shaped like the parameter."""
        self._matrix(parameter)[slice(None) if self.rows is None else self.rows] = part.to(parameter.dtype)

    def assign_bias(self, bias: Tensor) -> None:
        """Write the layer's bias, (out,), into the owner's bias."""
        stored = getattr(self.owner, self.stored_bias)
        stored = stored if self.expert is None else stored[self.expert]
        stored[slice(None) if self.rows is None else self.rows] = bias.to(stored.dtype)

    def forward(self, inputs: Tensor) -> Tensor:
        return linear(inputs, self.weight, self.bias)

    def _matrix(self, parameter: Tensor) -> Tensor:
        """Return the matrix with the layer's rows, (outputs, in), as a view of a tensor shaped like the parameter."""
        if self.expert is not None:  # a three-dimensional parameter, or stacked matrices
            parameter = (parameter if parameter.ndim == 3 else parameter.unflatten(0, (self._experts, -1)))[self.expert]
        return parameter.T if self.transposed else parameter


Layer = nn.Linear | LinearView
"""A layer that can be pruned: a module with `weight`, `bias`, `in_features` and `out_features`."""


def piece_rows(total: int, shares: Sequence[int], repeated: int) -> list[slice | Tensor]:
    """Return the rows of each piece of a fused layer (see `Split`).

    Args:
        total: Number of outputs of the fused layer.
        shares: Relative number of outputs of each piece.
        repeated: Number of runs of the pieces.

    Raises:
        ValueError: The outputs do not divide evenly.
    """
    unit, remainder = divmod(total, sum(shares))
    if remainder or any(unit * share % repeated for share in shares):
        raise ValueError(f"{total} outputs do not divide into {tuple(shares)}, {repeated} times over")
    sizes = [unit * share // repeated for share in shares]
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    if repeated == 1:
        return [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]
    runs = torch.arange(total, device="cpu").view(repeated, sum(sizes))
    return [runs[:, start : start + size].flatten() for start, size in zip(starts, sizes, strict=True)]


def forward_by_views(views: Sequence[LinearView]) -> Callable[[Tensor], Tensor]:
    """Return a forward function for a fused layer that calls all of its views."""
    first = views[0]
    if first.rows is None:
        return first.__call__  # not the view itself: a module set as an attribute would become a child
    device = first.weight.device
    total = sum(view.out_features for view in views)
    order = torch.cat([torch.arange(total, device="cpu")[view.rows] for view in views])
    inverse = order.argsort().to(device)

    def forward(inputs: Tensor) -> Tensor:
        return torch.cat([view(inputs) for view in views], -1)[..., inverse]

    return forward


class RouteMatmulThroughLayers(TorchFunctionMode):
    """Context that turns a product W X with the weight of a linear layer into layer(Xᵀ)ᵀ, so that the layer's hooks run.

    State-space models multiply by the weight outside the layer and add the bias later, so the bias is subtracted from the
    layer's output.
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
        output = layer(args[1].mT)
        return (output if layer.bias is None else output - layer.bias).mT


PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__)
"""Functions that multiply a weight by its inputs."""
