"""Streaming statistics of a layer's inputs.

Each class extends the one before and has the next `rank`: ``TokenCount < InputRMS < Gram``. A solver names the class that it
needs, and `methods.layerwise.collect_statistics` accumulates the one of highest rank that any layer with these inputs needs.

Products of a batch are computed in float32 and accumulated in float64; those of bfloat16 numbers on a CPU by a kernel.
The sums, rounded to float32, then do not depend on the order of the batches or on their distribution over processes. If `unit`
is the number of tokens of a sequence, each product covers one sequence, and the sums do not depend on the batch size either.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from sparsellm.runtime import bf16_gram, collectives, devices

CONSTANT = 3e-5
"""Variance, as a fraction of the mean square, below which an input counts as constant; float32 products resolve no less."""

PANELS = 8
"""Number of row panels in which matrices are computed, stored, accumulated and read.

Panels of a symmetric matrix start at the diagonal. A temporary is an eighth of the matrix, whatever its size; memory estimates
from a smaller model rely on that."""

STORED = (PANELS + 1) / (2 * PANELS)
"""Fraction of the entries of a symmetric matrix that is stored: 9/16."""

MIN_PANEL_ROWS = 16
"""Minimum number of rows of a panel; products of fewer rows are accumulated token by token, at 20 times the rounding error."""

ASYNC_PANEL_ROWS = 512
"""Minimum number of rows of a panel on a GPU, to occupy the device; not measured."""


class TokenCount:
    """The number of tokens.

    Args:
        unit: Tokens that are summed at a time in float32; None for all tokens of a batch.
    """

    rank: ClassVar[int] = 0
    """Place in the order of the classes: statistics serve every solver that needs a class of their rank or a lower one."""

    def __init__(self, features: int, device: torch.device | str = "cpu", unit: int | None = None) -> None:
        self.features, self.unit, self._device = features, unit, torch.device(device)
        self._tokens = 0  # a Python int: dividing by it needs no synchronisation

    @property
    def tokens(self) -> int:
        """Number of tokens accumulated."""
        return self._tokens

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The tensors that hold the statistics."""
        return ()

    def update(self, inputs: Tensor) -> None:
        """Add a batch of inputs, (..., in), of any floating dtype."""
        self._tokens += inputs.numel() // self.features

    def reduce(self) -> None:
        """Start the sum over all processes. Reading a statistic waits for it to complete."""
        self._tokens = collectives.all_reduce_count(self._tokens, self._device)

    def finalize(self) -> None:
        """Release the memory that only accumulation needs; no further update is possible."""


class InputRMS(TokenCount):
    """The root mean square of each input."""

    rank = 1

    def __init__(self, features: int, device: torch.device | str = "cpu", unit: int | None = None) -> None:
        super().__init__(features, device, unit)
        self._reduction = collectives.AllReduce()
        self._sums = self._zero_sums(devices.widest_float(self._device))

    @property
    def rms(self) -> Tensor:
        """(in,) float32: RMS of each input over the tokens; Wanda's norm divided by the root of the number of tokens."""
        self._reduction.wait()
        return (self._squares() / max(self.tokens, 1)).sqrt().float()

    @property
    def tensors(self) -> Sequence[Tensor]:
        self._reduction.wait()  # which fills them
        return self._sums

    def update(self, inputs: Tensor) -> None:
        super().update(inputs)
        self._accumulate(inputs.reshape(-1, self.features))

    def reduce(self) -> None:
        super().reduce()
        self._reduction = collectives.AllReduce(*self._sums)

    def _zero_sums(self, dtype: torch.dtype) -> list[Tensor]:
        """The tensors that `_accumulate` adds to and that are summed over processes."""
        return [torch.zeros(self.features, dtype=dtype, device=self._device)]

    def _accumulate(self, rows: Tensor) -> None:
        """Add inputs, (tokens, in), to the sums."""
        for part in self._units(rows):
            self._sums[0] += part.float().square().sum(0)

    def _units(self, rows: Tensor) -> Sequence[Tensor]:
        """The parts of inputs that are summed in float32 each."""
        return rows.split(self.unit) if self.unit else (rows,)

    def _squares(self) -> Tensor:
        """(in,): the sum of the squares of each input."""
        return self._sums[0]


class Gram(InputRMS):
    r"""The Gram matrix of the inputs, $G = E[x x^\top]$; the "Hessian" of the papers is $2G$.

    Cost: 9/16 in² float64 numbers, and as many multiply-adds per token.

    Args:
        unit: Tokens that are multiplied and summed at a time; None for all tokens of a batch.
        dtype: Dtype of the products. float32 is sufficient for all solvers; float64 serves as a reference.
    """

    rank = 2

    def __init__(
        self, features: int, device: torch.device | str = "cpu", unit: int | None = None, *, dtype: torch.dtype = torch.float32
    ) -> None:
        super().__init__(features, device, unit)
        self._dtype = dtype
        self._final: tuple[Tensor, Tensor] | None = None  # the matrix and the RMS, after `finalize`
        self._centered: Gram | None = None

    @property
    def matrix(self) -> Tensor:
        """(in, in), exactly symmetric: the mean of x xᵀ over the tokens. A new tensor."""
        return symmetrize_(self._upper()) if self._final is None else self._final[0].clone()

    def mean_over(self, tokens: int) -> Tensor:
        """`matrix` divided by `tokens` instead of the number accumulated; not available after `finalize`."""
        return symmetrize_(self._upper(tokens=tokens))

    @property
    def view(self) -> Tensor:
        """`matrix` for reading only, without a copy after `finalize`."""
        return self.matrix if self._final is None else self._final[0]

    @property
    def rms(self) -> Tensor:
        return super().rms if self._final is None else self._final[1]

    @property
    def tensors(self) -> Sequence[Tensor]:
        return (*super().tensors, *(self._final or ()))

    @property
    def mean(self) -> Tensor:
        """(in,): the mean of each input over the tokens, in the products' dtype."""
        return self.center.to(self._dtype)

    @property
    def center(self) -> Tensor:
        """`mean` in the sums' dtype."""
        self._reduction.wait()
        return self._sums[-1] / max(self.tokens, 1)

    def update(self, inputs: Tensor) -> None:
        self._centered = None
        super().update(inputs)

    def reduce(self) -> None:
        super().reduce()
        self._centered = None

    def finalize(self) -> None:
        """Replace the sums by the matrix in the products' dtype; it can no longer be centered."""
        if self._final is None:
            self._final = self.matrix, self.rms
            del self._sums[:-1]

    def centered(self) -> Gram:
        r"""The Gram matrix about the mean, $E[(x - \mu)(x - \mu)^\top]$, for layers whose bias is fitted.

        It is finalized, and cached until the next update, so that layers with the same inputs share it.
        """
        if self._centered is None:
            matrix = symmetrize_(self._upper(self.center))
            # The variance of a constant input is a rounding error of either sign: treat the input as dead.
            dead = matrix.diagonal() <= CONSTANT * self.rms.square()
            matrix[dead] = 0
            matrix[:, dead] = 0
            self._centered = copy.copy(self)
            self._centered._sums = [torch.zeros_like(self._sums[-1])]
            self._centered._final = matrix, matrix.diagonal().sqrt().float()
        return self._centered

    def _zero_sums(self, dtype: torch.dtype) -> list[Tensor]:
        """A panel of products for each of `_panel_bounds`, and the sum of the inputs."""
        shapes = [(stop - start, self.features - start) for start, stop in _panel_bounds(self.features, self._device)]
        return [torch.zeros(shape, dtype=dtype, device=self._device) for shape in (*shapes, (self.features,))]

    def _accumulate(self, rows: Tensor) -> None:
        if by_kernel := self._dtype == torch.float32 and bf16_gram.supports(rows):
            bf16_gram.add_gram(rows, [(start, products) for (start, _), products in self._panels()], self.unit)
        for part in self._units(rows):
            x = part if by_kernel else devices.as_factor(part, self._dtype)
            for (start, stop), products in () if by_kernel else self._panels():
                _add_by_panel(products, devices.product(x[:, start:stop], x[:, start:], self._dtype))
            self._sums[-1] += x.sum(0, dtype=self._dtype)

    def _squares(self) -> Tensor:
        return torch.cat([products.diagonal() for _, products in self._panels()])

    def _panels(self) -> Iterator[tuple[tuple[int, int], Tensor]]:
        """The first row and the end of each panel, and its products."""
        return zip(_panel_bounds(self.features, self._device), self._sums[:-1], strict=True)

    def _upper(self, center: Tensor | None = None, tokens: int | None = None) -> Tensor:
        """(in, in), in the products' dtype: the mean of x xᵀ over `tokens` (by default all) minus center centerᵀ.

        Entries below the diagonal are undefined.
        """
        self._reduction.wait()
        upper = torch.empty(self.features, self.features, dtype=self._dtype, device=self._device)
        for (start, stop), products in self._panels():  # one float64 panel at a time
            panel = products / max(self.tokens if tokens is None else tokens, 1)
            if center is not None:
                panel -= center[start:stop].outer(center[start:])
            upper[start:stop, start:] = panel
        return upper


def symmetrize_(matrix: Tensor) -> Tensor:
    """Copy the upper triangle of a square matrix to the lower one, in place."""
    for start, stop in _panel_bounds(len(matrix), matrix.device):  # limits the temporaries
        matrix[start:stop, :start] = matrix[:start, start:stop].T
        block = matrix[start:stop, start:stop]
        block.copy_(block.triu() + block.triu(1).T)
    return matrix


class CrossMoment:
    r"""The products of targets with inputs, $C = E[y x^\top]$, (out, in).

    Args:
        unit: Tokens that are multiplied and summed at a time in float32; None for all tokens of a batch.
    """

    def __init__(self, outputs: int, features: int, device: torch.device | str = "cpu", *, unit: int | None = None) -> None:
        self.unit, self._device, self._tokens = unit, torch.device(device), 0
        self._products = torch.zeros(outputs, features, dtype=devices.widest_float(self._device), device=device)

    @property
    def matrix(self) -> Tensor:
        """(out, in) float32: the mean of y xᵀ over the tokens."""
        return self.centered_matrix(None, None)

    def centered_matrix(self, outputs: Tensor | None, inputs: Tensor | None) -> Tensor:
        """(out, in) float32: the mean of y xᵀ over the tokens, minus the outer product of two means.

        Args:
            outputs: (out,), the mean of y; None for no centring.
            inputs: (in,), the mean of x; None for no centring.
        """
        matrix = torch.empty(self._products.shape, device=self._device)
        for start, stop in _panel_bounds(len(matrix), self._device):
            panel = self._products[start:stop] / max(self._tokens, 1)
            if outputs is not None and inputs is not None:
                panel -= outputs[start:stop].outer(inputs)
            matrix[start:stop] = panel
        return matrix

    def update(self, targets: Tensor, inputs: Tensor) -> None:
        """Add a batch of targets (tokens, out) and inputs (tokens, in)."""
        self._tokens += len(inputs)
        if bf16_gram.supports(targets, inputs):
            bf16_gram.add_products(targets, inputs, self._products, self.unit)
            return
        if targets.dtype != inputs.dtype:
            targets, inputs = targets.float(), inputs.float()
        for rows in zip(*(tokens.split(self.unit or max(len(tokens), 1)) for tokens in (targets, inputs)), strict=True):
            y, x = (devices.as_factor(part, torch.float32) for part in rows)
            _add_by_panel(self._products, devices.product(y, x, torch.float32))

    def reduce(self) -> None:
        """Sum over all processes."""
        self._tokens = collectives.all_reduce_count(self._tokens, self._device)
        collectives.all_reduce_(self._products)


def _panel_bounds(rows: int, device: torch.device) -> list[tuple[int, int]]:
    """The first row and the end of each panel."""
    height = max(-(-rows // PANELS), ASYNC_PANEL_ROWS if devices.queued(device) else MIN_PANEL_ROWS)
    return [(start, min(start + height, rows)) for start in range(0, rows, height)]


def _add_by_panel(sums: Tensor, products: Tensor) -> None:
    """Add a batch's products to their sums, panel by panel, which limits the temporary of the cast to float64."""
    for start, stop in _panel_bounds(len(products), products.device):
        sums[start:stop] += products[start:stop]
