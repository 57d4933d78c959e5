"""Methods, each of which prunes one block at a time: the protocol, the plan and the result records.

Imports errors, runtime, solvers, models and activations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, NamedTuple, Protocol, runtime_checkable

import torch
from pydantic import Field, PlainSerializer, PlainValidator, TypeAdapter
from pydantic_core import PydanticCustomError
from torch import Tensor

from sparsellm.activations.walk import Activations
from sparsellm.models.blocks import Block
from sparsellm.models.feedforward import FeedForward
from sparsellm.runtime import collectives
from sparsellm.solvers.patterns import Pattern, stored_pattern
from sparsellm.solvers.problem import LayerProblem
from sparsellm.solvers.statistics import TokenCount

UNKNOWN_FAMILY = (
    "its layers were pruned one by one, since its model family is not known (docs/families.md says how to describe one)"
)
"""Note of SparseLLM for a block of a family that is not in the table."""

Plan = dict[str, Pattern]
"""The pattern of each layer, by the layer's full name. Layers that are not in the plan are not changed."""


def _read_pattern(value: Any) -> Pattern:
    """Read a pattern from its text in a file."""
    if isinstance(value, Pattern):
        return value
    if not isinstance(value, str):
        raise PydanticCustomError("string_type", "Input should be a valid string")
    return stored_pattern(value)


StoredPattern = Annotated[Pattern, PlainValidator(_read_pattern), PlainSerializer(str, return_type=str)]
"""A pattern that files hold as text."""


@dataclass(frozen=True)
class LayerResult:
    """The result of pruning one layer.

    Attributes:
        shape: (out, in).
        zeros: Number of weights that are zero.
        zeros_before: Number of weights that were zero already in the model that the run pruned.
        error: Squared output error over the calibration tokens, relative to the energy of the target: the dense layer's output,
            or for the default method the dense stream's, with a correction for the error that the stream has accumulated.
        known: Statistics that the error is computed from: "Gram" (exact), "InputRMS" (inputs taken as uncorrelated) or
            "TokenCount" (inputs taken as white).
        damping: The value used; None for solvers without damping.
        tokens: Number of tokens in the statistics.
        epoch: Epoch of Algorithm 1 that the weights come from; 1 for other methods.
        seconds: Time to solve the layer.
        routed_tokens: For a layer of an expert, the number of tokens that the router sends to the expert. Fewer than `tokens`
            where these were too few and others were added.
        bits: Bits of the integers that the kept weights were rounded to; None if they were not rounded.
        group_size: Columns that share a scale, 0 for whole rows; None if they were not rounded.
        bits_per_weight: Bits that a weight takes once it is packed, mask and scales included; None if they were not rounded.
    """

    name: str
    pattern: StoredPattern
    shape: tuple[Annotated[int, Field(gt=0)], Annotated[int, Field(gt=0)]]
    zeros: int
    error: float
    known: str
    damping: float | None
    tokens: int
    epoch: int
    seconds: float
    routed_tokens: int | None = None
    bits: int | None = None
    group_size: int | None = None
    bits_per_weight: Annotated[float, Field(ge=0, le=2**20)] | None = None
    zeros_before: int = 0

    @property
    def sparsity(self) -> float:
        """The fraction of weights that are zero."""
        return self.zeros / (self.shape[0] * self.shape[1])


@dataclass(frozen=True)
class EpochResult:
    """The true feed-forward error after one step of SparseLLM; for Algorithm 1 also its objective (eq. 5 or 6).

    Attributes:
        epoch: Number of the step among those of its kind, from 1.
        step: "published" for an epoch of Algorithm 1, "solve" for the first solve of the default, "newton" for a Gauss-Newton
            round, "round" for the rounding to integers.
        feed_forward_error: E‖t - FFN(x)‖² of the pruned part, relative to E‖t‖². The default measures all of its steps on the
            tokens that judge its rounds. Algorithm 1 takes 2,048 or more evenly spaced tokens, or with `keep_best` all.
        accepted: Whether the weights of this step were kept.
        after_weights: The objective with the new weights and the previous signals, mean over tokens.
    """

    block: str
    epoch: int
    step: str
    feed_forward_error: float
    accepted: bool
    after_weights: float | None = None


@dataclass(frozen=True)
class CurvePoint:
    """A validation during gradient steps.

    Attributes:
        step: Number of the last step before it; 0 for the initial weights.
        training: Mean loss of the steps since the validation before, each at the weights that it changes; None at step 0.
        held_out: Mean loss on the held-out sequences.
    """

    step: int
    training: float | None
    held_out: float


WHOLE_MODEL = "whole model"
"""Name of the training of the whole model, beside those of blocks."""


@dataclass(frozen=True)
class TrainingResult:
    """The result of gradient steps.

    Attributes:
        before: Loss on the held-out sequences before training; relative if it is an error.
        after: The same loss after training.
        steps: Number of steps at the best validation. 0 if no step lowered the loss: the weights are then unchanged.
        note: Why the training ended early, or an empty string.
        curve: Every validation, in order; empty if there was no training.
    """

    before: float
    after: float
    steps: int
    note: str = ""
    curve: tuple[CurvePoint, ...] = ()

    def describe(self) -> str:
        """The held-out loss before and after the training, in a sentence; empty if there was no training."""
        if not self.curve:
            return ""
        if not self.steps:
            return f"No step lowered the held-out loss, {self.before:.4g}: training changed nothing."
        last = self.curve[-1].step
        steps = f"{self.steps} of {last}" if self.steps < last else str(last)
        return f"Held-out loss: {self.before:.4g} before training, {self.after:.4g} after step {steps}, which is kept."


@dataclass(frozen=True)
class BlockResult:
    """The result of pruning one block.

    Attributes:
        epochs: Results of the steps over its feed-forward part.
        note: A remark for the report, or an empty string.
        refined: Result of the gradient steps; None if there were none.
        changed_parameters: Full names of the biases and norm weights that the method changed besides the pruned weights.
        scales: By full name of a quantized layer, its scales, (out, groups) bfloat16; not part of the JSON data.
    """

    index: int
    name: str
    layers: tuple[LayerResult, ...]
    epochs: tuple[EpochResult, ...]
    seconds: float
    note: str = ""
    refined: TrainingResult | None = None
    changed_parameters: tuple[str, ...] = ()
    scales: Annotated[dict[str, Any], Field(exclude=True)] = field(default_factory=dict, compare=False, repr=False)


NOTABLE = 0.01
"""Least fraction of zeros before a run that is reported. Some weights of models that were never pruned are zero by chance."""


@dataclass(frozen=True)
class Totals:
    """Totals of a run.

    Attributes:
        sparsity_of_pruned_layers: The fraction of the pruned layers' weights that are zero.
        sparsity_before: The fraction of these weights that were zero before.
        bits_of_pruned_layers: Bits that a weight of these layers takes once it is packed; None unless all of them are rounded.
        parameters: Number of stored parameters.
        zeros: Number of stored parameters that are zero.
        weight_bytes: Bytes of these parameters as the run writes them; 0 if it is not known.
        packed_bytes: Bytes that they take packed, estimated from above.
    """

    pruned_layers: int
    sparsity_of_pruned_layers: float
    sparsity_before: float
    bits_of_pruned_layers: float | None
    parameters: int
    zeros: int
    weight_bytes: int
    packed_bytes: int

    @property
    def sparsity_of_model(self) -> float:
        """The fraction of the stored parameters that are zero."""
        return self.zeros / self.parameters if self.parameters else 0.0

    @property
    def before_and_after(self) -> str:
        """The zeros of the pruned layers before and after the run, in part of a sentence; empty if there were none before."""
        before, after = 100 * self.sparsity_before, 100 * self.sparsity_of_pruned_layers
        return f"{before:.2f} % were zero before and {after:.2f} % are now" if self.sparsity_before >= NOTABLE else ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, without entries that are absent."""
        optional = ("sparsity_before", "bits_of_pruned_layers")
        data = {name: value for name, value in asdict(self).items() if value or name not in optional}
        return data | {"sparsity_of_model": self.sparsity_of_model}


Step = LayerResult | EpochResult | TrainingResult | BlockResult
"""A result that `sparsellm.pipeline.sequential.prune_blocks` yields."""

LAYER_RESULT, BLOCK_RESULT = TypeAdapter(LayerResult), TypeAdapter(BlockResult)
"""Convert results to and from JSON-serializable data."""


class Memory(NamedTuple):
    """Bytes that a stage of a run takes; from a method's `block_memory`, beside the weights of the block."""

    peak: float  # without the lists
    lists: Sequence[float]  # of each list of hidden states, which may be in files
    state: float = 0.0  # of the durable state of a training


@dataclass(frozen=True)
class BlockShapes:
    """Sizes of the model, of the largest block that is pruned, and of the calibration sequences."""

    depth: int  # blocks
    vocabulary: int
    stored: int  # bytes of a number in the model
    itemsize: int  # and in computations; the fields below are of the block and of the sequences
    layers: Sequence[tuple[int, int]]  # (out, in) of each layer to prune
    inputs: Sequence[int]  # of each group of layers that share them
    parts: int  # coupled feed-forward parts
    projections: int  # input projections of a part, (hidden, width) each
    width: int  # of the hidden states
    hidden: int  # inputs of a part's output projection
    share: float  # fraction of the tokens that a part computes for
    parameters: int
    tokens: int
    length: int  # tokens per sequence
    batch: int  # tokens per batch
    is_head: bool = False  # whether the block is the output head, of which passes only read the inputs

    @property
    def stream(self) -> float:
        """Bytes of the hidden states of all tokens."""
        return self.itemsize * self.width * self.tokens

    @property
    def forward_bytes(self) -> float:
        """Bytes that a forward pass holds for each token at its peak: hidden signals, and some tensors of the width."""
        return self.itemsize * ((1 + self.projections) * self.hidden + (2 + self.projections) * self.width)


class AfterSolve(Protocol):
    """A projection of each solved weight before it is written, such as rounding to few bits."""

    def project(self, block: Block, name: str, weight: Tensor, problem: LayerProblem) -> Tensor:
        """Project a layer's solved weight; what goes with the result, such as scales, is kept in `block.scales`.

        Args:
            block: The block.
            name: The layer, by its name within the block.
            weight: The solved weight, (out, in).
            problem: The problem that it solves.

        Returns:
            The projected weight, (out, in) float32, zero where the solved one is.
        """
        ...

    def broadcast(self, block: Block, name: str, owner: int) -> None:
        """Send what goes with the projected weight from the process of this rank, which projected it, to all."""
        ...

    def fields_of(self, full_name: str, weight: Tensor) -> dict[str, Any]:
        """The fields of `LayerResult` that describe the projection of the layer of this full name."""
        ...


@runtime_checkable
class BlockMethod(Protocol):
    """Protocol of a pruning method: a frozen dataclass with these five members.

    A method may also have `block_memory`, which takes `BlockShapes` and returns a `Memory`; without it, runs are planned as if
    it were layer-wise pruning by SparseGPT.
    """

    @property
    def needs(self) -> type[TokenCount]:
        """The richest class of statistics that the method reads. With `TokenCount` it needs no calibration text."""
        ...

    @property
    def needs_dense_stream(self) -> bool:
        """Whether the method reads the dense stream and the dense copy of the current block."""
        ...

    @property
    def needs_fisher(self) -> bool:
        """Whether the method weights errors of each block's output by their effect on the loss."""
        ...

    def note(self, block: Block, plan: Plan) -> str:
        """A remark for the report on how this block is pruned; usually an empty string."""
        ...

    def prune(self, block: Block, inputs: Activations, plan: Plan) -> Iterator[LayerResult | EpochResult | TrainingResult]:
        """Prune the planned layers of the block in place, yielding each result as soon as it is available."""
        ...


def planned_layers(block: Block, plan: Plan) -> list[str]:
    """The block's layers that are in the plan, in running order."""
    return [name for name in block.layers if block.full_name(name) in plan]


def coupled_parts(block: Block, plan: Plan) -> list[FeedForward]:
    """The block's feed-forward parts whose layers are all planned, so that they can be pruned as one problem."""
    planned = set(planned_layers(block, plan))
    return [part for part in block.architecture.feed_forward_parts if {*part.in_proj, part.out_proj} <= planned]


def unplanned_layers(block: Block, plan: Plan) -> list[str]:
    """The layers missing from the plan in feed-forward parts that are only partly planned."""
    planned = set(planned_layers(block, plan))
    parts = [{*part.in_proj, part.out_proj} for part in block.architecture.feed_forward_parts]
    return sorted(set().union(*(names - planned for names in parts if names & planned)))


def assign_owners(block: Block, names: Sequence[str]) -> dict[str, int]:
    """The rank that solves each layer, balanced by cost: a factorization, (in, in), and a pass over the weight."""
    layers = [block.layer(name) for name in names]
    costs = [float(layer.in_features**2 * (layer.in_features + layer.out_features)) for layer in layers]
    return dict(zip(names, collectives.balance_costs(costs), strict=True))


def solve_in_parallel(
    block: Block, names: Sequence[str], solve: Callable[[str], tuple[Tensor, Any]]
) -> Iterator[tuple[str, Tensor, Any]]:
    """Solve each layer in one process and broadcast the solution to all.

    Args:
        names: The layers, by name within the block.
        solve: Returns a layer's weight, (out, in) float32 on the block's device, and plain data about it.

    Returns:
        Name, weight and data of each layer, the same in every process.
    """
    if collectives.world() == 1:
        yield from ((name, *solve(name)) for name in names)
        return
    owners = assign_owners(block, names)
    local = {name: solve(name) for name, owner in owners.items() if owner == collectives.rank()}
    for name, owner in owners.items():
        layer = block.layer(name)
        weight, data = local.get(name) or (torch.empty(layer.weight.shape, device=layer.weight.device), None)
        yield name, collectives.broadcast(owner, weight), collectives.broadcast_object(data, owner)


def broadcast_results(block: Block, owners: Mapping[str, int], results: Iterable[LayerResult]) -> Iterator[LayerResult]:
    """Prune the layers of this process, then broadcast weights and results, so that all processes hold the same bits.

    Args:
        owners: By layer, the rank that prunes it.
        results: Prunes the layers of this process as it is consumed.
    """
    if collectives.world() == 1:
        yield from results
        return
    local = {result.name: result for result in results}
    for name, owner in owners.items():
        block.assign(name, collectives.broadcast(owner, block.layer(name).weight.detach().contiguous()))
        result = local.get(block.full_name(name))
        fields = None if result is None else LAYER_RESULT.dump_python(result, mode="json")
        yield LAYER_RESULT.validate_python(collectives.broadcast_object(fields, owner))
