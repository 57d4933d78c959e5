"""SparseLLM: every layer on what it really reads, toward what the dense model wrote, for what that is worth further down."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from sparsellm.activations.sensitivity import layer_sensitivities
from sparsellm.activations.streams import Activations
from sparsellm.methods import EpochResult, LayerResult, Plan
from sparsellm.methods.block_solver import BlockSolver
from sparsellm.methods.layerwise import UNKNOWN, coupled_parts, planned_layers, unplanned_layers
from sparsellm.methods.settings import Settings
from sparsellm.models.blocks import Block
from sparsellm.solvers.statistics import Gram, TokenCount


@dataclass(frozen=True)
class SparseLLM(Settings):
    r"""Prune a block's layers in the order in which they run, and its feed-forward part as one problem.

    Two streams travel through the network: the pruned model's, whose hidden states the layers will really read, and the dense
    model's, which says what they should write. In a block, one group of layers after the other:

    1. Attention's readers, then its writer, then the feed-forward's readers and writer: each by the solver, on its inputs
       $\hat x$ in the pruned stream, toward the dense model's outputs, $C = E[t \hat x^\top]$; the two writers aim at $t$
       plus what the stream they add to has already lost.
    2. Gauss-Newton rounds with masks held, the writer refitted after each. A round stays if the error fell.

    Errors of outputs count by what they cost further down: S for a layer, F for a block (`sparsellm.activations.sensitivity`).

    solver: any layer solver. newton: Gauss-Newton rounds. sampled: tokens that their curvature is taken from, at least if there
    are as many. couple: whose layers form one problem: "none" (no step 2, no S) or "feedforward". ridge: of the regressions,
    toward the dense weight, as a share of the Gram's mean diagonal. keep_zeros: weights that are zero already stay zero.
    """

    @property
    def needs(self) -> type[TokenCount]:
        return Gram

    @property
    def needs_dense_stream(self) -> bool:
        return True

    @property
    def needs_fisher(self) -> bool:
        return self.scope != "none"

    def note(self, block: Block, plan: Plan) -> str:
        if not planned_layers(block, plan):
            return ""
        if not block.architecture.known:
            return UNKNOWN
        if self.scope == "none":
            return ""
        if not block.architecture.feed_forward_parts:
            return "its layers were pruned one by one, since its activation is none that is coupled"
        left = unplanned_layers(block, plan)
        return f"its feed-forward layers were pruned one by one, since {', '.join(left)} stays dense" if left else ""

    def prune(self, block: Block, inputs: Activations, plan: Plan) -> Iterator[LayerResult | EpochResult]:
        names = planned_layers(block, plan)
        metric = inputs.output_fisher(block) if self.scope != "none" else None
        parts = [] if metric is None else coupled_parts(block, plan)
        together = {name for part in parts for name in (*part.in_proj, part.out_proj)}
        weighed = [name for name in names if name not in together]  # the parts find their own, exactly
        sensitivities = {} if metric is None else _sensitivities(inputs, block, weighed, metric)
        run = BlockSolver(self, block, inputs, plan, metric, sensitivities)
        groups = [[name for name in group if name in weighed] for group in block.architecture.groups]
        alone = [group for group in groups if group]
        for number, group in enumerate(alone, 1):
            run.solve_group(group, last=number == len(alone) and not parts)
        if metric is not None and parts:
            whole = parts == [block.architecture.feed_forward]
            yield from run.solve_part(parts[0], metric) if whole else run.solve_experts(parts, metric)
        block.round_to_storage_dtype()
        yield from run.results()


def _sensitivities(inputs: Activations, block: Block, names: Sequence[str], metric: Tensor) -> dict[str, Tensor]:
    """S of the named layers, of the block as it was and on the dense stream."""
    if inputs.dense is None or inputs.teacher is None:
        raise TypeError("There is no dense stream: ask for one with teacher=True.")
    calls = inputs.calls(block)
    return layer_sensitivities(inputs.teacher, inputs.dense, calls, names, metric, inputs.sample_offsets, inputs.window)
