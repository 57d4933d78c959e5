"""Streaming statistics of a layer's inputs. Each class knows what the one before knows, and more.

A solver names the class that it needs, and the driver builds that one: ``NoInputs < InputNorms < Gram``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsellm import distributed


class NoInputs:
    """Only how many tokens went by."""

    def __init__(self, features: int, device: torch.device | str = "cpu") -> None:
        self.features = features
        self._tokens = torch.zeros((), dtype=torch.int64, device=device)

    @property
    def tokens(self) -> int:
        """How many tokens were seen."""
        return int(self._tokens)

    def update(self, inputs: Tensor) -> None:
        """Take in a batch of inputs, (..., in), of any floating dtype."""
        self._tokens += inputs.numel() // self.features

    def reduce(self) -> None:
        """Sum over all processes; nothing when alone."""
        distributed.sum_(self._tokens)


class InputNorms(NoInputs):
    """The size of every input."""

    def __init__(self, features: int, device: torch.device | str = "cpu") -> None:
        super().__init__(features, device)
        self._squares = torch.zeros(features, dtype=torch.float32, device=device)

    @property
    def norms(self) -> Tensor:
        """(in,) float32: the root mean square of each input over the tokens. Wanda's norm but for one common factor."""
        return (self._squares / max(self.tokens, 1)).sqrt()

    def update(self, inputs: Tensor) -> None:
        super().update(inputs)
        self._squares += inputs.reshape(-1, self.features).float().square().sum(0)

    def reduce(self) -> None:
        super().reduce()
        distributed.sum_(self._squares)


class Gram(InputNorms):
    r"""The second moments of the inputs, $G = E[x x^\top]$; the "Hessian" of the papers is $2G$.

    dtype: of the sums; float32 is enough for every solver here, float64 serves as a reference.
    """

    def __init__(self, features: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        super().__init__(features, device)
        self._products = torch.zeros(features, features, dtype=dtype, device=device)

    @property
    def matrix(self) -> Tensor:
        """(in, in), symmetric: the mean of x xᵀ over the tokens. A fresh tensor: the caller may write into it."""
        return self._products / max(self.tokens, 1)

    def update(self, inputs: Tensor) -> None:
        super().update(inputs)
        x = inputs.reshape(-1, self.features).to(self._products.dtype)
        self._products.addmm_(x.T, x)

    def reduce(self) -> None:
        super().reduce()
        distributed.sum_(self._products)


class Cross:
    r"""The products of a target signal with the inputs, $C = E[y x^\top]$, (out, in)."""

    def __init__(self, outputs: int, features: int, device: torch.device | str = "cpu") -> None:
        self._tokens = torch.zeros((), dtype=torch.int64, device=device)
        self._products = torch.zeros(outputs, features, dtype=torch.float32, device=device)

    @property
    def matrix(self) -> Tensor:
        """(out, in): the mean of y xᵀ over the tokens."""
        return self._products / self._tokens.clamp(min=1)

    def update(self, targets: Tensor, inputs: Tensor) -> None:
        """Take in a batch: targets (tokens, out) and inputs (tokens, in)."""
        self._tokens += len(inputs)
        self._products.addmm_(targets.float().T, inputs.float())

    def reduce(self) -> None:
        """Sum over all processes; nothing when alone."""
        distributed.sum_(self._tokens, self._products)
