"""Methods: each prunes a block. Here is what they share: the protocol, the plan, and the results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from sparsellm.activations import Activations
from sparsellm.blocks import Block
from sparsellm.moments import NoInputs
from sparsellm.patterns import Pattern

Plan = dict[str, Pattern]
"""Which pattern each layer gets, by the layer's full name; layers that it lacks stay as they are."""


@dataclass(frozen=True)
class LayerResult:
    """What became of one layer.

    error: output error relative to the dense layer's output, over the calibration tokens. known: what that rests on: "Gram"
    (exact), "InputNorms" (inputs taken as uncorrelated), "NoInputs" (as white). damping: the value really used, None for
    solvers without. epoch: which epoch's weights these are. seconds: of solving.
    """

    name: str
    pattern: str
    shape: tuple[int, int]
    zeros: int
    error: float
    known: str
    damping: float | None
    tokens: int
    epoch: int
    seconds: float

    @property
    def sparsity(self) -> float:
        """The fraction of weights that are zero."""
        return self.zeros / (self.shape[0] * self.shape[1])


@dataclass(frozen=True)
class EpochResult:
    """SparseLLM's objective (paper eq. 5 or 6, mean over tokens) and the true feed-forward error after one epoch.

    after_weights: the objective with new weights and the signals as they were. after_signals: with new signals too.
    feed_forward_error: E‖y - FFN(x)‖² of the pruned feed-forward part itself, relative to E‖y‖², y
    without the writer's bias.
    """

    block: str
    epoch: int
    after_weights: float
    after_signals: float
    feed_forward_error: float


@dataclass(frozen=True)
class BlockResult:
    """A finished block. note: what a reader of the report should know, or an empty string."""

    index: int
    name: str
    layers: tuple[LayerResult, ...]
    epochs: tuple[EpochResult, ...]
    seconds: float
    note: str = ""


@runtime_checkable
class BlockMethod(Protocol):
    """What it takes to be a method: a frozen record with these three."""

    @property
    def needs(self) -> type[NoInputs]:
        """The richest class of moments that it reads; with NoInputs no calibration text is needed."""
        ...

    def note(self, block: Block, plan: Plan) -> str:
        """What a reader should know of how this block is pruned; mostly nothing."""
        ...

    def prune(self, block: Block, inputs: Activations, plan: Plan) -> Iterator[LayerResult | EpochResult]:
        """Prune the planned layers of the block in place, yielding each result as it is known."""
        ...
