"""Streaming statistics of a layer's inputs.

Each class extends the one before: ``TokenCount < InputRMS < Gram``. A solver names the class that it needs, and the driver
accumulates an instance of it.

Products of a batch are computed in float32 and accumulated in float64. The sums, rounded to float32, then do not depend on the
order of the batches or on their distribution over processes. If `unit` is the number of tokens of a sequence, each product
covers one sequence, and the sums do not depend on the batch size either.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsellm.runtime import collectives, devices

CONSTANT = 3e-5
"""Variance, as a fraction of the mean square, below which an input counts as constant; float32 products resolve no less."""

PANELS = 8
"""Number of row panels in which matrices are computed, stored, accumulated and read.

Panels of a symmetric matrix start at the diagonal, so that 9/16 of its entries are stored. A temporary is an eighth of the
matrix, whatever its size; memory estimates from a smaller model rely on that.
"""

MIN_PANEL_ROWS = 16
"""Minimum number of rows of a panel; products of fewer rows are accumulated token by token, at 20 times the rounding error."""

ASYNC_PANEL_ROWS = 512
"""Minimum number of rows of a panel on a GPU, to occupy the device; not measured."""

HALF = (torch.bfloat16, torch.float16)
"""Dtypes whose products are exact in float32."""


class TokenCount:
    """The number of tokens.

    Args:
        features: Number of inputs of the layer.
        device: Device of the sums.
        unit: Tokens that are multiplied and summed at a time in float32; None for all tokens of a batch.
    """

    def __init__(self, features: int, device: torch.device | str = "cpu", unit: int | None = None) -> None:
        self.features, self.unit = features, unit
        self._device = torch.device(device)
        self._tokens = 0  # a Python int: dividing by it needs no synchronisation
        self._reduction = collectives.AllReduce()

    @property
    def tokens(self) -> int:
        """Number of tokens accumulated."""
        return self._tokens

    def update(self, inputs: Tensor) -> None:
        """Add a batch of inputs, (..., in), of any floating dtype."""
        self._tokens += inputs.numel() // self.features

    def _rows(self, inputs: Tensor) -> tuple[Tensor, ...]:
        """Split a batch, (..., in), into the rows, (tokens, in), that are summed at a time."""
        rows = inputs.reshape(-1, self.features)
        return rows.split(self.unit) if self.unit else (rows,)

    def reduce(self) -> None:
        """Start the sum over all processes. Reading a statistic waits for it to complete."""
        self._tokens = collectives.all_reduce_count(self._tokens, self._device)

    def finalize(self) -> None:
        """Release the memory that only accumulation needs; no further update is possible."""


class InputRMS(TokenCount):
    """The root mean square of each input."""

    def __init__(self, features: int, device: torch.device | str = "cpu", unit: int | None = None) -> None:
        super().__init__(features, device, unit)
        self._squares = torch.zeros(features, dtype=devices.widest_float(self._device), device=device)

    @property
    def rms(self) -> Tensor:
        """(in,) float32: RMS of each input over the tokens; Wanda's norm divided by the root of the number of tokens."""
        self._reduction.wait()
        return (self._squares / max(self.tokens, 1)).sqrt().float()

    def update(self, inputs: Tensor) -> None:
        super().update(inputs)
        for rows in self._rows(inputs):
            self._squares += rows.float().square().sum(0)

    def reduce(self) -> None:
        super().reduce()
        self._reduction = collectives.AllReduce(self._squares)


class Gram(InputRMS):
    r"""The Gram matrix of the inputs, $G = E[x x^\top]$; the "Hessian" of the papers is $2G$.

    Cost: 9/16 in² float64 numbers, and as many multiply-adds per token.

    Args:
        features: Number of inputs of the layer.
        device: Device of the sums.
        unit: Tokens that are multiplied and summed at a time; None for all tokens of a batch.
        dtype: Dtype of the products. float32 is sufficient for all solvers; float64 serves as a reference.
    """

    def __init__(
        self,
        features: int,
        device: torch.device | str = "cpu",
        unit: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(features, device, unit)
        self._dtype, sum_dtype = dtype, devices.widest_float(self._device)
        self._panels = _panel_bounds(features, self._device)
        self._products = [
            torch.zeros(stop - start, features - start, dtype=sum_dtype, device=device) for start, stop in self._panels
        ]
        self._sums = torch.zeros(features, dtype=sum_dtype, device=device)
        self._final: tuple[Tensor, Tensor] | None = None  # the matrix and the RMS, after `finalize`
        self._centered: _CenteredGram | None = None

    @property
    def matrix(self) -> Tensor:
        """(in, in), exactly symmetric: the mean of x xᵀ over the tokens. A new tensor."""
        return symmetrize_(self._upper(None)) if self._final is None else self._final[0].clone()

    def mean_over(self, tokens: int) -> Tensor:
        """`matrix` divided by `tokens` instead of the number accumulated; not available after `finalize`."""
        return symmetrize_(self._upper(None, tokens))

    @property
    def view(self) -> Tensor:
        """`matrix` for reading only, without a copy after `finalize`."""
        return self.matrix if self._final is None else self._final[0]

    def _upper(self, centre: Tensor | None, tokens: int | None = None) -> Tensor:
        """(in, in), in the products' dtype: the mean of x xᵀ over `tokens` (by default all) minus centre centreᵀ.

        Entries below the diagonal are undefined.
        """
        self._reduction.wait()
        upper = torch.empty(self.features, self.features, dtype=self._dtype, device=self._device)
        for (start, stop), products in zip(self._panels, self._products, strict=True):  # one float64 panel at a time
            panel = products / max(self.tokens if tokens is None else tokens, 1)
            if centre is not None:
                panel -= centre[start:stop].outer(centre[start:])
            upper[start:stop, start:] = panel
        return upper

    @property
    def rms(self) -> Tensor:
        if self._final is not None:
            return self._final[1]
        self._reduction.wait()
        squares = torch.cat([products.diagonal() for products in self._products])
        return (squares / max(self.tokens, 1)).sqrt().float()

    @property
    def mean(self) -> Tensor:
        """(in,): the mean of each input over the tokens, in the products' dtype."""
        return self.centre.to(self._dtype)

    @property
    def centre(self) -> Tensor:
        """`mean` in the sums' dtype."""
        self._reduction.wait()
        return self._sums / max(self.tokens, 1)

    def update(self, inputs: Tensor) -> None:
        if self._final is not None:
            raise TypeError("A finalized or centred Gram matrix cannot be updated.")
        self._centered = None
        TokenCount.update(self, inputs)
        for rows in self._rows(inputs):
            x = _as_factor(rows, self._dtype)
            for (start, stop), products in zip(self._panels, self._products, strict=True):
                batch_products = _product(x[:, start:stop], x[:, start:], self._dtype)
                for first, last in _panel_bounds(len(batch_products), x.device):  # limits the temporary of the cast to float64
                    products[first:last] += batch_products[first:last]
            self._sums += x.sum(0, dtype=self._dtype)

    def reduce(self) -> None:
        TokenCount.reduce(self)
        self._centered = None
        self._reduction = collectives.AllReduce(*self._products, self._sums)

    def finalize(self) -> None:
        """Replace the sums by the matrix in the products' dtype; it can no longer be centred."""
        if self._final is None:
            self._final = self.matrix, self.rms
            self._products.clear()

    def centered(self) -> Gram:
        r"""The Gram matrix about the mean, $E[(x - \mu)(x - \mu)^\top]$, for layers whose bias is fitted.

        Cached until the next update, so that layers with the same inputs share it.

        Raises:
            TypeError: After `finalize`.
        """
        if self._final is not None:
            raise TypeError("A finalized Gram matrix cannot be centred, because its sums are released.")
        if self._centered is None:
            self._centered = _CenteredGram(self)
        return self._centered


class _CenteredGram(Gram):
    """A finalized Gram matrix about the mean."""

    def __init__(self, gram: Gram) -> None:
        super().__init__(0, gram._device, dtype=gram._dtype)
        self.features, self._tokens = gram.features, gram._tokens
        matrix = symmetrize_(gram._upper(gram.centre))
        # The variance of a constant input is a rounding error of either sign: treat the input as dead.
        dead = matrix.diagonal() <= CONSTANT * gram.rms.square()
        matrix[dead] = 0
        matrix[:, dead] = 0
        self._final = matrix, matrix.diagonal().sqrt().float()

    @property
    def mean(self) -> Tensor:
        return torch.zeros_like(self.rms, dtype=self._dtype)


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
        outputs: Number of targets.
        features: Number of inputs.
        device: Device of the sums.
        unit: Tokens that are multiplied and summed at a time in float32; None for all tokens of a batch.
    """

    def __init__(self, outputs: int, features: int, device: torch.device | str = "cpu", unit: int | None = None) -> None:
        self._device, self.unit = torch.device(device), unit
        self._tokens = 0
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
        if targets.dtype != inputs.dtype:
            targets, inputs = targets.float(), inputs.float()
        size = self.unit or max(len(inputs), 1)
        for target_rows, input_rows in zip(targets.split(size), inputs.split(size), strict=True):
            y, x = _as_factor(target_rows, torch.float32), _as_factor(input_rows, torch.float32)
            batch_products = _product(y, x, torch.float32)
            for start, stop in _panel_bounds(len(batch_products), self._device):
                self._products[start:stop] += batch_products[start:stop]

    def reduce(self) -> None:
        """Sum over all processes."""
        self._tokens = collectives.all_reduce_count(self._tokens, self._device)
        collectives.all_reduce_(self._products)


def _panel_bounds(rows: int, device: torch.device) -> list[tuple[int, int]]:
    """The first row and the end of each panel."""
    height = max(-(-rows // PANELS), ASYNC_PANEL_ROWS if devices.queued(device) else MIN_PANEL_ROWS)
    return [(start, min(start + height, rows)) for start in range(0, rows, height)]


def _as_factor(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast to `dtype` for a product; 16-bit numbers stay as they are if the device accumulates their products in float32."""
    exact = rows.dtype in HALF and dtype == torch.float32 and devices.mixed_products(rows.device)
    return rows if exact else rows.to(dtype)


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """leftᵀ right, accumulated in `dtype`."""
    return left.T @ right if left.dtype == dtype else torch.mm(left.T, right, out_dtype=dtype)
