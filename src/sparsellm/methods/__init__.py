"""Methods: each prunes a block. Here is what they share: the protocol, the plan, and the results."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from sparsellm.activations.streams import Activations
from sparsellm.models.blocks import Block
from sparsellm.solvers.patterns import Pattern
from sparsellm.solvers.statistics import TokenCount

Plan = dict[str, Pattern]
"""Which pattern each layer gets, by the layer's full name; layers that it lacks stay as they are."""


@dataclass(frozen=True)
class LayerResult:
    """What became of one layer.

    error: output error relative to what the layer aimed at, over the calibration tokens: the dense layer's own output, or for
    the default the dense stream's, with what the stream had lost. known: what that rests on: "Gram" (exact), "InputNorms"
    (inputs taken as uncorrelated), "NoInputs" (as white). damping: the value really used, None for
    solvers without. tokens: that it was solved on. epoch: which epoch's weights these are. seconds: of solving. routed: for a
    layer of an expert, how many tokens the router sends there; fewer than `tokens` where these were too few.
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
    routed_tokens: int | None = None

    @property
    def sparsity(self) -> float:
        """The fraction of weights that are zero."""
        return self.zeros / (self.shape[0] * self.shape[1])


@dataclass(frozen=True)
class EpochResult:
    """The true feed-forward error after one step of SparseLLM; for Algorithm 1 also its objective.

    The objective is eq. 5 or 6 of the paper, mean over tokens.

    step: "published" for an epoch of Algorithm 1; "solve" for the first solve of the default,
    "newton" for a Gauss-Newton round. epoch: which of its kind, from 1.
    feed_forward_error: E‖t - FFN(x)‖² of the pruned part itself, relative to E‖t‖². accepted: whether its weights were kept.
    after_weights: the objective with new weights and the signals as they were. after_signals: with new signals too;
    None in the last epoch, whose signals nobody needs.
    """

    block: str
    epoch: int
    step: str
    feed_forward_error: float
    accepted: bool
    after_weights: float | None = None
    after_signals: float | None = None


@dataclass(frozen=True)
class TrainingResult:
    """What gradient steps did. before, after: the loss on held-back groups of windows, relative where it is an error.

    steps: how many had been taken at the best look; 0 where none helped, and the weights are as they were. note: what went
    wrong, or nothing.
    """

    before: float
    after: float
    steps: int
    note: str = ""


@dataclass(frozen=True)
class BlockResult:
    """A finished block.

    note: what a reader of the report should know, or an empty string. refined: what gradient steps did, if there were any.
    moved: the biases and norms that the method changed besides the pruned weights, by their full names.
    """

    index: int
    name: str
    layers: tuple[LayerResult, ...]
    epochs: tuple[EpochResult, ...]
    seconds: float
    note: str = ""
    refined: TrainingResult | None = None
    changed_parameters: tuple[str, ...] = ()


@runtime_checkable
class BlockMethod(Protocol):
    """What it takes to be a method: a frozen record with these five."""

    @property
    def needs(self) -> type[TokenCount]:
        """The richest class of moments that it reads; with NoInputs no calibration text is needed."""
        ...

    @property
    def needs_dense_stream(self) -> bool:
        """Whether it reads the dense stream too, and the present block's teacher."""
        ...

    @property
    def needs_fisher(self) -> bool:
        """Whether it reads what errors of each block's output cost."""
        ...

    def note(self, block: Block, plan: Plan) -> str:
        """What a reader should know of how this block is pruned; mostly nothing."""
        ...

    def prune(self, block: Block, inputs: Activations, plan: Plan) -> Iterator[LayerResult | EpochResult | TrainingResult]:
        """Prune the planned layers of the block in place, yielding each result as it is known."""
        ...
