"""What computations take, by the shapes of their matrices: memory, operations, and this machine's rates."""

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
"""Operations of matrix products, of triangular factors and of eigendecompositions, and the bytes that all else reads and
writes; or as much of each a second."""

SUMS, GRAM, GRAM_PASSES = 4.5, 9 / 8, 12
"""Of a Gram, for each entry of (in, in): bytes of its running sums, operations for a token, bytes that go by for a window."""

PASSES = 4.5
"""How often each number that a forward pass holds at its peak is read or written in all. Counted on Llama and OPT forms."""

EIGEN = 9
"""Operations of an eigendecomposition of a symmetric (n, n) matrix, in n³: the textbooks' count."""


class SolverCost(NamedTuple):
    """What a solve takes, from a solver's `cost(curved)`; the defaults are SparseGPT's, also for a solver without this method.

    out_in, square: float32 matrices of (out, in) and (in, in) at the peak, beside weight and Gram. products: of (out, in) by
    (in, in). factors: of Cholesky, of (in, in); an inverse from one is two. spectra: eigendecompositions. passes: how often
    (out, in) is read or written. With a curvature (`curved`) each (in, in) stands for an (out, out) too.
    """

    out_in: float = 2.6
    square: float = 1.8
    products: float = 0.8
    factors: float = 1.0
    spectra: float = 0.0
    passes: float = 60.0


class BlockCost(NamedTuple):
    """What pruning a block takes, from a method's `cost(shapes)`: bytes at the peak beside the block's own weights, bytes of
    each list of hidden states, and the work without the pass to the next block."""

    memory: float
    lists: Sequence[float]
    work: Work


@dataclass(frozen=True)
class BlockShapes:
    """Sizes of a run's largest block, and of the calibration windows that go through it.

    layers, alone: (out, in) of the layers to prune, and of those that are in no coupled part. grams: the inputs of each group.
    parts: how many coupled parts, each of `readers` layers of (hidden, width) and one of (width, hidden). share: of the tokens,
    how many a part computes for. parameters, active: of the block; those that compute for a token. number: bytes of a number
    that is computed with. batch: tokens at a time.
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
        """For a token, the most bytes that a forward pass holds: the feed-forward's hidden signals and some of the width."""
        return self.number * ((1 + self.readers) * self.hidden + (2 + self.readers) * self.width)

    def forward(self, tokens: float) -> Work:
        """Tokens through the block."""
        return work(tokens * (2 * self.active + 4 * self.length * self.width), passes=PASSES * tokens * self.forward_bytes)

    def gram(self, features: int) -> Work:
        """The Gram of one group's inputs."""
        return features**2 * self.tokens * work(GRAM, passes=GRAM_PASSES / self.length)

    def solve_bytes(self, solver: object, shapes: Iterable[tuple[int, int]], curved: bool = False) -> float:
        """The most that one of these layers' solves holds: with its weight, without its Gram and curvature."""
        cost = cost_of(solver, curved)
        return max(4 * ((1 + cost.out_in) * o * i + cost.square * (i**2 + curved * o**2)) for o, i in shapes)

    def solves(self, solver: object, shapes: Iterable[tuple[int, int]], extra: float, curved: bool = False) -> Work:
        """The solves of these layers. extra: products of (out, in) by (in, in) besides, as for the reported error."""
        cost, total = cost_of(solver, curved), work()
        for o, i in shapes:
            products, cubes = 2 * o * i * (i + curved * o), i**3 + curved * o**3
            total += work((cost.products + extra) * products, cost.factors * cubes / 3, EIGEN * cost.spectra * cubes)
            total += work(passes=4 * cost.passes * o * i)
        return total


def work(products: float = 0, factors: float = 0, spectra: float = 0, passes: float = 0) -> Work:
    """So much of each kind of work."""
    return np.array([products, factors, spectra, passes], dtype=float)


def cost_of(solver: object, curved: bool) -> SolverCost:
    """What a solver's own `cost` says; without one, the default."""
    cost: Callable[[bool], SolverCost] | None = getattr(solver, "cost", None)
    return cost(curved) if cost else SolverCost()


def rates(device: torch.device, seconds: float = 0.1) -> Work:
    """What this machine does in a second of each kind of work, each measured for about so many seconds."""
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
