"""SparseLLM: matches each layer to the dense model's output, weighted by its effect on the final predictions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from sparsellm.activations.sensitivity import TOKENS, layer_sensitivities
from sparsellm.activations.walk import Activations
from sparsellm.methods import EpochResult, LayerResult, Plan
from sparsellm.methods.block_solver import NEWTON_STEPS, WRITER_STEPS, BlockSolver
from sparsellm.methods.feedforward_problem import HELD, SAMPLED_WIDTHS
from sparsellm.methods.layerwise import UNKNOWN, coupled_parts, planned_layers, unplanned_layers
from sparsellm.methods.settings import Settings
from sparsellm.models.blocks import Block
from sparsellm.runtime.costs import GRAM, PASSES, SUMS, BlockCost, BlockShapes, Work, work
from sparsellm.solvers.statistics import Gram, TokenCount


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

    Output errors are weighted by their effect on the loss: S for a layer, F for a block (`sparsellm.activations.sensitivity`).

    Attributes:
        solver: Any layer solver.
        gauss_newton_steps: Number of Gauss-Newton rounds.
        sampled: Least number of tokens for their curvature, if there are as many.
        scope: Layers that form one problem: "none" (no step 2 and no S) or "feedforward".
        ridge: Regularisation of the regressions toward the dense weight, relative to the mean diagonal of the Gram matrix.
        keep_zeros: Whether weights that are already zero stay zero.
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
            return "its layers were pruned one by one, since its activation function is not supported"
        excluded = unplanned_layers(block, plan)
        return (
            f"its feed-forward layers were pruned one by one, since the plan excludes {', '.join(excluded)}" if excluded else ""
        )

    def cost(self, shapes: BlockShapes) -> BlockCost:
        """Return the cost of a block: fits to the dense stream, then the Gauss-Newton steps of each feed-forward part."""
        curved, tokens, width = self.needs_fisher, shapes.tokens, shapes.width
        curvatures = 4 * curved * sum(outputs**2 for outputs, _ in shapes.alone)
        widest = max(shapes.grams)
        # A Gram, and the sums toward the targets: of two more matrices of the width, or of (width, widest).
        sums = SUMS * widest**2 + max((8 + SUMS) * width**2, 8 * width * widest)
        solved = 4 * widest**2 + shapes.solve_bytes(self.solver, shapes.layers, curved)
        memory = max(sums + shapes.batch * shapes.forward_bytes, solved)
        done = 1.3 * shapes.forward(tokens) + shapes.solves(self.solver, shapes.layers, 3.5, curved)
        for features in shapes.grams:
            done = done + (4 if features == width else 2) * shapes.gram(features)
        lists = [2 * shapes.stream, shapes.stream, shapes.stream]  # the hidden states, and what attention writes
        if curved:
            seen = min(tokens, TOKENS)
            done = done + 2 * shapes.forward(seen) + work(seen * GRAM * sum(outputs**2 for outputs, _ in shapes.alone))
        if shapes.parts and self.scope != "none":
            part_memory, part_done = self._part_cost(shapes)
            memory = max(memory + 4 * curved * shapes.readers * shapes.hidden**2, part_memory)
            done = done + shapes.parts * part_done
            lists.append(shapes.parts * 2 * 4 * shapes.share * tokens * width)
        return BlockCost(shapes.number * shapes.parameters + curvatures + memory, lists, done)

    def _part_cost(self, shapes: BlockShapes) -> tuple[float, Work]:
        """Return the peak bytes of one feed-forward part, and its work without the solves."""
        width, hidden, readers, tokens = shapes.width, shapes.hidden, shapes.readers, shapes.share * shapes.tokens
        sampled = min(tokens * (1 - HELD), max(self.sampled, SAMPLED_WIDTHS * width))
        # Slopes of the sample; the readers' weights a dozen times; hidden signals of a window; curvatures.
        stack, signals = 4 * readers * width * hidden, 4 * 4 * shapes.length * readers * hidden
        memory = 4 * sampled * readers * hidden + 12 * stack + signals + 4 * self.needs_fisher * readers * hidden**2
        product = 2 * width * hidden  # operations of one layer for a token
        once = tokens * (product * (3 * readers + 2) + self.needs_fisher * readers * GRAM * hidden**2)
        steps = sampled * product * NEWTON_STEPS * (2 * readers + 2)
        writer = WRITER_STEPS * 2 * width * hidden * (hidden + self.needs_fisher * width)
        numbers = 4 * readers * hidden * (4 * tokens + 2 * NEWTON_STEPS * sampled)
        rounds = work(tokens * product * (4 * readers + 5) + steps + writer, hidden**3 / 3, passes=PASSES * numbers)
        return memory, work(once) + self.gauss_newton_steps * (rounds + shapes.gram(hidden))

    def prune(self, block: Block, inputs: Activations, plan: Plan) -> Iterator[LayerResult | EpochResult]:
        names = planned_layers(block, plan)
        output_fisher = inputs.output_fisher(block) if self.scope != "none" else None  # F, (model, model)
        parts = [] if output_fisher is None else coupled_parts(block, plan)
        coupled = {name for part in parts for name in (*part.in_proj, part.out_proj)}
        separate = [name for name in names if name not in coupled]  # `FeedForwardProblem` computes S of the others exactly
        sensitivities = {} if output_fisher is None else _sensitivities(inputs, block, separate, output_fisher)
        solver = BlockSolver(self, block, inputs, plan, sensitivities)
        groups = [[name for name in group if name in separate] for group in block.architecture.groups]
        groups = [group for group in groups if group]
        for number, group in enumerate(groups, 1):
            solver.solve_group(group, last=number == len(groups) and not parts)
        if output_fisher is not None and parts:
            single = parts == [block.architecture.feed_forward]  # else the parts are experts
            yield from (solver.solve_part(parts[0], output_fisher) if single else solver.solve_experts(parts, output_fisher))
        block.round_to_storage_dtype()
        yield from solver.results()


def _sensitivities(inputs: Activations, block: Block, names: Sequence[str], output_fisher: Tensor) -> dict[str, Tensor]:
    """S of the named layers, (out, out) each, of the dense block on the dense stream."""
    stream, dense_block = inputs.dense_pair()
    return layer_sensitivities(
        dense_block,
        stream,
        inputs.calls(block),
        names,
        metric=output_fisher,
        sample_offsets=inputs.sample_offsets,
        window=inputs.window,
    )
