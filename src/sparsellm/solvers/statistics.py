"""Streaming statistics of a layer's inputs. Each class knows what the one before knows, and more.

A solver names the class that it needs, and the driver builds that one: ``NoInputs < InputNorms < Gram``.

A batch's products are made in float32 and added up in float64: the sums, rounded to float32, are then the same in whatever
order batches come, and however they are dealt to processes. With `unit`, the tokens of a window, the products are a window's,
and the sums the same however many windows a batch has.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsellm.runtime import collectives, devices

CONSTANT = 3e-5
"""The share of an input's power, as its variance, below which the input counts as constant: float32 sums know no better."""

PANELS = 8
"""In how many panels of rows matrices are made, kept, added up and read. Of a symmetric one each panel begins at the diagonal:
9/16 of it remains, and what lives for a moment is an eighth, also in the miniature by which a run is foreseen."""

MIN_PANEL_ROWS = 16
"""Rows of a panel at least: a product of fewer is added up token by token, with twenty times the rounding."""

ASYNC_PANEL_ROWS = 512
"""The same on a GPU, which fewer rows would not fill; not measured."""

HALF = (torch.bfloat16, torch.float16)
"""Dtypes whose products are exact in float32."""


class TokenCount:
    """Only how many tokens went by."""

    def __init__(self, features: int, device: torch.device | str = "cpu", unit: int | None = None) -> None:
        """unit: how many tokens are multiplied and summed at a time in float32; None takes all of a batch."""
        self.features, self.unit = features, unit
        self._device = torch.device(device)
        self._tokens = 0  # not on the device: whoever divides by it would wait
        self._sum = collectives.AllReduce()

    @property
    def tokens(self) -> int:
        """How many tokens were seen."""
        return self._tokens

    def update(self, inputs: Tensor) -> None:
        """Take in a batch of inputs, (..., in), of any floating dtype."""
        self._tokens += inputs.numel() // self.features

    def _rows(self, inputs: Tensor) -> tuple[Tensor, ...]:
        """A batch, (..., in), as the rows that are summed at a time."""
        rows = inputs.reshape(-1, self.features)
        return rows.split(self.unit) if self.unit else (rows,)

    def reduce(self) -> None:
        """Sum over all processes, nothing when alone. What is read of it waits for the sums; other work need not."""
        self._tokens = collectives.all_reduce_count(self._tokens, self._device)

    def finalize(self) -> None:
        """All is summed: keep no more than what will be read. It takes in nothing from then on."""


class InputRMS(TokenCount):
    """The size of every input."""

    def __init__(self, features: int, device: torch.device | str = "cpu", unit: int | None = None) -> None:
        super().__init__(features, device, unit)
        self._squares = torch.zeros(features, dtype=devices.widest_float(self._device), device=device)

    @property
    def rms(self) -> Tensor:
        """(in,) float32: the root mean square of each input over the tokens. Wanda's norm but for one common factor."""
        self._sum.wait()
        return (self._squares / max(self.tokens, 1)).sqrt().float()

    def update(self, inputs: Tensor) -> None:
        super().update(inputs)
        for rows in self._rows(inputs):
            self._squares += rows.float().square().sum(0)

    def reduce(self) -> None:
        super().reduce()
        self._sum = collectives.AllReduce(self._squares)


class Gram(InputRMS):
    r"""The second moments of the inputs, $G = E[x x^\top]$; the "Hessian" of the papers is $2G$.

    dtype: of the products; float32 is enough for every solver here, float64 serves as a reference.
    Cost: 9/16 in² doubles, and as many multiply-adds for every token.
    """

    def __init__(
        self,
        features: int,
        device: torch.device | str = "cpu",
        unit: int | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(features, device, unit)
        self._dtype, wide = dtype, devices.widest_float(self._device)
        self._places = _panels(features, self._device)
        self._products = [
            torch.zeros(stop - start, features - start, dtype=wide, device=device) for start, stop in self._places
        ]
        self._sums = torch.zeros(features, dtype=wide, device=device)
        self._settled: tuple[Tensor, Tensor] | None = None  # the matrix and the norms, once they are all that is kept
        self._central: _CenteredGram | None = None

    @property
    def matrix(self) -> Tensor:
        """(in, in), symmetric to the bit: the mean of x xᵀ over the tokens. A fresh tensor: the caller may write into it."""
        return symmetrize_(self._upper(None)) if self._settled is None else self._settled[0].clone()

    def mean_over(self, tokens: int) -> Tensor:
        """The same over so many tokens, where all others are zeros; not of a Gram that is settled."""
        return symmetrize_(self._upper(None, tokens))

    @property
    def view(self) -> Tensor:
        """The same for reading only: no fresh one once it is settled."""
        return self.matrix if self._settled is None else self._settled[0]

    def _upper(self, centre: Tensor | None, tokens: int | None = None) -> Tensor:
        """(in, in) float32, or as the products: the mean of x xᵀ, less centre centreᵀ; below the diagonal anything.

        tokens: that the mean is over, if not all that were seen.
        """
        self._sum.wait()
        found = torch.empty(self.features, self.features, dtype=self._dtype, device=self._device)
        for (start, stop), products in zip(self._places, self._products, strict=True):  # the doubles stay few
            panel = products / max(self.tokens if tokens is None else tokens, 1)
            if centre is not None:
                panel -= centre[start:stop].outer(centre[start:])
            found[start:stop, start:] = panel
        return found

    @property
    def rms(self) -> Tensor:
        if self._settled is not None:
            return self._settled[1]
        self._sum.wait()
        squares = torch.cat([products.diagonal() for products in self._products])
        return (squares / max(self.tokens, 1)).sqrt().float()

    @property
    def mean(self) -> Tensor:
        """(in,): the mean of every input over the tokens, in the products' dtype."""
        return self.centre.to(self._dtype)

    @property
    def centre(self) -> Tensor:
        """The same in the sums' dtype."""
        self._sum.wait()
        return self._sums / max(self.tokens, 1)

    def update(self, inputs: Tensor) -> None:
        if self._settled is not None:
            raise TypeError("A Gram that is settled, or centred, takes in nothing more.")
        self._central = None
        TokenCount.update(self, inputs)
        for rows in self._rows(inputs):
            x = _multiplied_as(rows, self._dtype)
            for (start, stop), products in zip(self._places, self._products, strict=True):
                made = _product(x[:, start:stop], x[:, start:], self._dtype)
                for first, last in _panels(len(made), x.device):  # added bit by bit: what is cast for it stays small
                    products[first:last] += made[first:last]
            self._sums += x.sum(0, dtype=self._dtype)

    def reduce(self) -> None:
        TokenCount.reduce(self)
        self._central = None
        self._sum = collectives.AllReduce(*self._products, self._sums)

    def finalize(self) -> None:
        """Keep the matrix in the products' dtype, half of what its sums take; it can no longer be centred."""
        if self._settled is None:
            self._settled = self.matrix, self.rms
            self._products.clear()

    def centered(self) -> Gram:
        r"""The second moments about the mean, $E[(x - \mu)(x - \mu)^\top]$: what a layer sees whose bias is fitted too.

        Kept until more is taken in: layers that share their inputs share this too.
        """
        if self._settled is not None:
            raise TypeError("A settled Gram cannot be centred: its sums are gone.")
        if self._central is None:
            self._central = _CenteredGram(self)
        return self._central


class _CenteredGram(Gram):
    """A Gram about the mean, settled from the start."""

    def __init__(self, gram: Gram) -> None:
        super().__init__(0, gram._device, dtype=gram._dtype)
        self.features, self._tokens = gram.features, gram._tokens
        moments = symmetrize_(gram._upper(gram.centre))
        # What is left of an input that never changes is rounding, of either sign: it is dead.
        dead = moments.diagonal() <= CONSTANT * gram.rms.square()
        moments[dead] = 0
        moments[:, dead] = 0
        self._settled = moments, moments.diagonal().sqrt().float()

    @property
    def mean(self) -> Tensor:
        return torch.zeros_like(self.rms, dtype=self._dtype)


def symmetrize_(matrix: Tensor) -> Tensor:
    """A square matrix with its upper half below the diagonal too; in place."""
    for start, stop in _panels(len(matrix), matrix.device):  # the temporaries stay small
        matrix[start:stop, :start] = matrix[:start, start:stop].T
        block = matrix[start:stop, start:stop]
        block.copy_(block.triu() + block.triu(1).T)
    return matrix


class CrossMoment:
    r"""The products of a target signal with the inputs, $C = E[y x^\top]$, (out, in)."""

    def __init__(self, outputs: int, features: int, device: torch.device | str = "cpu", unit: int | None = None) -> None:
        """unit: as for `NoInputs`."""
        self._device, self.unit = torch.device(device), unit
        self._tokens = 0
        self._products = torch.zeros(outputs, features, dtype=devices.widest_float(self._device), device=device)

    @property
    def matrix(self) -> Tensor:
        """(out, in) float32: the mean of y xᵀ over the tokens."""
        return self.centered_matrix(None, None)

    def centered_matrix(self, outputs: Tensor | None, inputs: Tensor | None) -> Tensor:
        """(out, in) float32: the mean of y xᵀ over the tokens, less an outer product of doubles."""
        found = torch.empty(self._products.shape, device=self._device)
        for start, stop in _panels(len(found), self._device):
            panel = self._products[start:stop] / max(self._tokens, 1)
            if outputs is not None and inputs is not None:
                panel -= outputs[start:stop].outer(inputs)
            found[start:stop] = panel
        return found

    def update(self, targets: Tensor, inputs: Tensor) -> None:
        """Take in a batch: targets (tokens, out) and inputs (tokens, in)."""
        self._tokens += len(inputs)
        if targets.dtype != inputs.dtype:
            targets, inputs = targets.float(), inputs.float()
        size = self.unit or max(len(inputs), 1)
        for rows, columns in zip(targets.split(size), inputs.split(size), strict=True):
            y, x = (_multiplied_as(some, torch.float32) for some in (rows, columns))
            made = _product(y, x, torch.float32)
            for start, stop in _panels(len(made), self._device):
                self._products[start:stop] += made[start:stop]

    def reduce(self) -> None:
        """Sum over all processes; nothing when alone."""
        self._tokens = collectives.all_reduce_count(self._tokens, self._device)
        collectives.all_reduce_(self._products)


def _panels(rows: int, device: torch.device) -> list[tuple[int, int]]:
    """From which row to which each panel goes."""
    height = max(-(-rows // PANELS), ASYNC_PANEL_ROWS if devices.queued(device) else MIN_PANEL_ROWS)
    return [(start, min(start + height, rows)) for start in range(0, rows, height)]


def _multiplied_as(some: Tensor, dtype: torch.dtype) -> Tensor:
    """What is multiplied for sums in `dtype`: 16-bit numbers as they are, where the device adds them up in float32."""
    exact = some.dtype in HALF and dtype == torch.float32 and devices.mixed_products(some.device)
    return some if exact else some.to(dtype)


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """leftᵀ right, added up in this dtype."""
    return left.T @ right if left.dtype == dtype else torch.mm(left.T, right, out_dtype=dtype)
