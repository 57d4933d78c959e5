"""SparseLLM: every layer on what it really reads, toward what the dense model wrote, for what that is worth further down."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor

from sparsellm.activations.sensitivity import TOKENS, layer_sensitivities
from sparsellm.activations.streams import Activations
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

    def cost(self, shapes: BlockShapes) -> BlockCost:
        """What a block takes: each layer toward the dense stream, then each feed-forward part with its Gauss-Newton rounds."""
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
        """Bytes that one coupled part takes at its peak, and its work besides the solves."""
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
