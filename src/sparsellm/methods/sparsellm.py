"""Methods that prune the layers of a block in running order: SparseLLM, and layer-wise pruning that is true-sequential."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from sparsellm.activations.output_cache import OutputCache, trace_dataflow
from sparsellm.activations.sensitivity import layer_curvatures
from sparsellm.activations.walk import Activations
from sparsellm.methods import (
    UNKNOWN_FAMILY,
    BlockShapes,
    EpochResult,
    LayerResult,
    Memory,
    Plan,
    coupled_parts,
    planned_layers,
    unplanned_layers,
)
from sparsellm.methods.block_solver import BlockSolver, Settings
from sparsellm.methods.feedforward_problem import part_bytes
from sparsellm.methods.layerwise import LayerWise
from sparsellm.models.blocks import Block
from sparsellm.solvers.problem import solve_bytes
from sparsellm.solvers.statistics import STORED, Gram, TokenCount


@dataclass(frozen=True)
class SparseLLM(Settings):
    r"""Prune a block's layers in running order, and its feed-forward part as one problem.

    Two streams of hidden states pass through the network: the pruned model's, which the pruned layers read at inference, and
    the dense model's, which supplies the targets. The groups of layers of a block are pruned one after another:

    1. The input and output projections of attention, then those of the feed-forward part.
       The solver prunes each on its inputs $\hat x$ in the pruned stream, toward the dense outputs $t$: $C = E[t \hat x^\top]$.
       The targets of the two output projections also correct the error that the residual stream has accumulated.
    2. Gauss-Newton rounds with fixed masks, with a refit of the output projection after each. A round is kept if it lowers the
       error on held-out tokens.
    3. With `after_solve`, the layers of step 1 outside the feed-forward part are projected as they are solved. The input
       projections are projected after step 2, then the output projection is refitted to what they give, and projected.

    Output errors are weighted by their effect on the loss: S for a layer, F for a block (`sparsellm.activations.sensitivity`).

    Attributes:
        solver: Any layer solver.
        rounds: Most Gauss-Newton rounds; None for 3, or for none with the scope "none".
        sampled: Least number of tokens for their curvature, if there are as many.
        scope: Layers that form one problem: "none" (no step 2 and no S) or "feedforward".
        keep_zeros: Whether weights that are already zero stay zero.
        after_solve: What is done to each solved weight before it is written; None for nothing.
    """

    needs: ClassVar[type[TokenCount]] = Gram
    needs_dense_stream: ClassVar[bool] = True
    least_tokens: ClassVar[float] = 1 / 8
    """Different calibration tokens for each input of the widest layer; with fewer, magnitude pruning is better."""

    @property
    def needs_fisher(self) -> bool:
        return self.scope != "none"

    def note(self, block: Block, plan: Plan) -> str:
        if not planned_layers(block, plan) or block.is_head:
            return ""
        if not block.architecture.known:
            return UNKNOWN_FAMILY
        if self.scope == "none":
            return ""
        if not block.architecture.feed_forward_parts:
            return "its layers were pruned one by one, since its activation function is not supported"
        excluded = unplanned_layers(block, plan)
        return (
            f"its feed-forward layers were pruned one by one, since the plan excludes {', '.join(excluded)}" if excluded else ""
        )

    def prune(self, block: Block, inputs: Activations, plan: Plan) -> Iterator[LayerResult | EpochResult]:
        names = planned_layers(block, plan)
        output_fisher = inputs.output_fisher(block) if self.scope != "none" else None  # F, (model, model)
        parts = [] if output_fisher is None else coupled_parts(block, plan)
        coupled = {name for part in parts for name in (*part.in_proj, part.out_proj)}
        separate = [name for name in names if name not in coupled]  # `FeedForwardProblem` computes S of the others exactly
        curvatures = {} if output_fisher is None else _curvatures(inputs, block, separate, output_fisher)
        solver = BlockSolver(self, block, inputs, plan=plan, curvatures=curvatures)
        groups = [[name for name in group if name in separate] for group in block.architecture.groups]
        groups = [group for group in groups if group]
        for number, group in enumerate(groups, 1):
            solver.solve_group(group, last=number == len(groups) and not parts)
        if output_fisher is not None and parts:
            single = parts == [block.architecture.feed_forward]  # else the parts are experts
            yield from (solver.solve_part(parts[0], output_fisher) if single else solver.solve_experts(parts, output_fisher))
        block.round_to_storage_dtype()
        yield from solver.results()

    def block_memory(self, shapes: BlockShapes) -> Memory:
        """Each layer toward the dense stream, then the Gauss-Newton rounds of each feed-forward part."""
        curved, width, widest = self.needs_fisher and not shapes.is_head, shapes.width, max(shapes.inputs)
        coupled = shapes.parts * (shapes.projections * shapes.hidden**2 + width**2)  # a part's curvatures are made one by one
        curvatures = curved * (sum(outputs**2 for outputs, _ in shapes.layers) - coupled)
        # A Gram matrix, and sums toward the targets: two more matrices of the width, or one of (width, widest).
        sums = 8 * STORED * widest**2 + max((8 + 8 * STORED) * width**2, 8 * width * widest)
        solved = 4 * widest**2 + solve_bytes(self.solver, shapes.layers, curved=curved)
        held = max(sums + shapes.batch * shapes.forward_bytes, solved)
        lists = [2 * shapes.stream, shapes.stream, shapes.stream]  # the two streams, and what attention writes in each
        if shapes.parts and self.scope != "none":
            held = max(held + 4 * shapes.projections * shapes.hidden**2, part_bytes(shapes, self.sampled))
            lists.append(shapes.parts * 2 * 4 * shapes.share * shapes.tokens * width)
        return Memory(shapes.itemsize * shapes.parameters + 4 * curvatures + held, lists)


def _curvatures(inputs: Activations, block: Block, names: Sequence[str], output_fisher: Tensor) -> dict[str, Tensor]:
    """S of the named layers, (out, out) each, of the dense block on the dense stream."""
    stream, dense_block = inputs.dense_pair()
    return layer_curvatures(
        dense_block,
        stream,
        inputs.calls(block),
        names,
        fisher=output_fisher,
        offsets=inputs.offsets,
        window=inputs.window,
    )


@dataclass(frozen=True)
class TrueSequential(LayerWise):
    """Prune each group of layers for its own output, after the groups before it, as an option of SparseGPT's code does.

    Passes reuse the outputs of pruned modules, so that all passes together cost about one pass through the block, if there is
    memory for the inputs of the feed-forward output projection.
    """

    def prune(self, block: Block, inputs: Activations, plan: Plan) -> Iterator[LayerResult | EpochResult]:
        cacheable = trace_dataflow(block, inputs.pruned[0], inputs.calls(block)[0]).cacheable
        cache = inputs.pruned.cache = OutputCache(inputs.storage, inputs.local_shapes, inputs.pruned[0])
        for names in stages_of(block, planned_layers(block, plan)):
            if names[0] in cacheable:
                cache.schedule(block, cacheable[names[0]], is_last=inputs.is_last(block))
            yield from self.prune_layers(block, inputs, names, plan)
            cache.mark_final(block, names)


def stages_of(block: Block, names: Sequence[str]) -> list[list[str]]:
    """The layers in running order, by stage: layers of one group, and the same layers of all experts, are pruned together."""
    stages: dict[str, list[str]] = {}
    for group in block.architecture.groups:
        planned = [name for name in group if name in names]
        view = block.views.get(group[0])
        expert = view is not None and view.expert is not None
        if planned:
            stages.setdefault(group[0].rpartition(".")[2] if expert else group[0], []).extend(planned)
    return list(stages.values())
