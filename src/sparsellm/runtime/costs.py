"""Costs of computations from the shapes of their matrices: memory, operations, and this machine's rates."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from sparsellm.runtime import devices

Work = NDArray[np.float64]
"""Four amounts, or rates per second: operations of matrix products, of Cholesky factorisations and of eigendecompositions, and
the bytes that all other operations read and write."""

SUMS, GRAM, GRAM_PASSES = 4.5, 9 / 8, 12
"""For each entry of a Gram matrix, (in, in): bytes of its sums, operations per token, bytes read and written per sequence."""

PASSES = 4.5
"""Reads and writes of each number that a forward pass holds at its peak; counted on models of the Llama and OPT forms."""

EIGEN = 9
"""Operations of an eigendecomposition of a symmetric (n, n) matrix, divided by n³; the textbook value."""


class SolverCost(NamedTuple):
    """Cost of one solve, as returned by a solver's `cost(curved)`.

    The defaults are SparseGPT's, and also used for solvers without `cost`. With a curvature (`curved`), each (in, in) matrix
    counts for an (out, out) matrix too.

    Attributes:
        out_in: Number of float32 matrices of (out, in) at the peak, besides the weight.
        square: Number of float32 matrices of (in, in) at the peak, besides the Gram matrix.
        products: Number of products of (out, in) by (in, in).
        factors: Number of Cholesky factorisations of (in, in); an inverse from a factor counts as two.
        spectra: Number of eigendecompositions of (in, in).
        passes: Number of times that an (out, in) matrix is read or written.
    """

    out_in: float = 2.6
    square: float = 1.8
    products: float = 0.8
    factors: float = 1.0
    spectra: float = 0.0
    passes: float = 60.0


class BlockCost(NamedTuple):
    """Cost of pruning a block, as returned by a method's `cost(shapes)`.

    Attributes:
        memory: Bytes at the peak, besides the block's own weights.
        lists: Bytes of each list of hidden states.
        work: The operations, without the forward pass to the next block.
    """

    memory: float
    lists: Sequence[float]
    work: Work


@dataclass(frozen=True)
class BlockShapes:
    """Sizes of a run's largest block, and of the calibration sequences that pass through it.

    Attributes:
        layers: (out, in) of each layer to prune.
        alone: (out, in) of those outside feed-forward parts that are solved as one problem.
        grams: Number of inputs of each group of layers.
        parts: Number of feed-forward parts that are solved as one problem.
        readers: Number of input projections of a part, (hidden, width) each; its output projection is (width, hidden).
        width: Size of the hidden states.
        hidden: Number of inputs of an output projection.
        share: Fraction of the tokens that a part computes for.
        parameters: Number of parameters of the block.
        active: Number of parameters that compute for a token.
        number: Bytes per number in computations.
        tokens: Number of calibration tokens.
        length: Tokens per sequence.
        batch: Tokens per batch.
    """

    layers: Sequence[tuple[int, int]]
    alone: Sequence[tuple[int, int]]
    grams: Sequence[int]
    parts: int
    readers: int
    width: int
    hidden: int
    share: float
    parameters: int
    active: float
    number: float
    tokens: int
    length: int
    batch: int

    @property
    def stream(self) -> float:
        """Bytes of the hidden states of all tokens."""
        return self.number * self.width * self.tokens

    @property
    def forward_bytes(self) -> float:
        """Peak bytes of a forward pass per token: the hidden activations of the feed-forward part, and some hidden states."""
        return self.number * ((1 + self.readers) * self.hidden + (2 + self.readers) * self.width)

    def forward(self, tokens: float) -> Work:
        """Work of passing tokens through the block."""
        return work(tokens * (2 * self.active + 4 * self.length * self.width), passes=PASSES * tokens * self.forward_bytes)

    def gram(self, features: int) -> Work:
        """Work of the Gram matrix of one group's inputs."""
        return features**2 * self.tokens * work(GRAM, passes=GRAM_PASSES / self.length)

    def solve_bytes(self, solver: object, shapes: Iterable[tuple[int, int]], curved: bool = False) -> float:
        """Peak bytes of the largest of these solves, with its weight, without its Gram matrix and curvature."""
        cost = cost_of(solver, curved)
        return max(4 * ((1 + cost.out_in) * o * i + cost.square * (i**2 + curved * o**2)) for o, i in shapes)

    def solves(self, solver: object, shapes: Iterable[tuple[int, int]], extra: float, curved: bool = False) -> Work:
        """Work of the solves of these layers. extra: further products of (out, in) by (in, in), as for the reported error."""
        cost, total = cost_of(solver, curved), work()
        for o, i in shapes:
            products, cubes = 2 * o * i * (i + curved * o), i**3 + curved * o**3
            total += work((cost.products + extra) * products, cost.factors * cubes / 3, EIGEN * cost.spectra * cubes)
            total += work(passes=4 * cost.passes * o * i)
        return total


def work(products: float = 0, factors: float = 0, spectra: float = 0, passes: float = 0) -> Work:
    """Return these amounts as an array."""
    return np.array([products, factors, spectra, passes], dtype=float)


def cost_of(solver: object, curved: bool) -> SolverCost:
    """Return the cost stated by a solver, or the default for a solver without `cost`."""
    cost: Callable[[bool], SolverCost] | None = getattr(solver, "cost", None)
    return cost(curved) if cost else SolverCost()


def rates(device: torch.device, seconds: float = 0.1) -> Work:
    """Measure this machine's rate for each kind of work, for about `seconds` each."""
    wide, square, long = (torch.ones(shape, device=device) for shape in ((1024, 1024), (512, 512), (2**22,)))
    definite = square + 512 * torch.eye(512, device=device)

    def rate(amount: float, act: Callable[[], object]) -> float:
        best, started = float("inf"), time.perf_counter()
        while time.perf_counter() - started < seconds:
            begun = time.perf_counter()
            act()
            devices.synchronize(device)
            best = min(best, time.perf_counter() - begun)
        return amount / best

    return work(
        rate(2 * 1024**3, lambda: wide @ wide),
        rate(512**3 / 3, lambda: torch.linalg.cholesky_ex(definite)),
        rate(EIGEN * 512**3, lambda: torch.linalg.eigh(definite)),
        rate(2 * 4 * 2**22, lambda: long * 2.0),
    )
