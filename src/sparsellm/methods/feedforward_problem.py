r"""A feed-forward part as one problem: its true error in the pruned model, and the statistics of its layers' problems.

With the input projections' weights $W_k$ and the output projection's $V$, the part computes $p = \varphi(W_1 x, \dots)$ and
$V p + c$. Its target is $t$.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from sparsellm.methods import BlockShapes
from sparsellm.models.blocks import Block
from sparsellm.models.feedforward import FeedForward
from sparsellm.runtime import collectives, devices
from sparsellm.runtime.offload import RowSubset, Tensors, lengths
from sparsellm.runtime.products import linear, matmul
from sparsellm.solvers.linalg import add_curvature_diagonal
from sparsellm.solvers.regression import Regression, TargetRegression
from sparsellm.solvers.statistics import Gram

PartWeights = dict[str, tuple[Tensor, Tensor | None]]
"""By layer: the weight, (out, in), and the bias, (out,), or None if the layer has none; float32."""

HELD = 0.0625
"""The fraction of tokens, the last ones, that is held out to evaluate Gauss-Newton rounds."""

SAMPLED, SAMPLED_WIDTHS = 4096, 4
"""Least number of tokens for the curvature of a Gauss-Newton step, by default, and the same in multiples of the model width.
The gradient uses all tokens: it sets the direction, the curvature only the step length in each direction."""

FISHER_LIFT = 1e-3
"""Added to the diagonal of F, relative to its mean: F is estimated from a sample, which cannot tell small costs from zero."""


def part_bytes(shapes: BlockShapes, least: int) -> float:
    """Bytes that the Gauss-Newton rounds of one part hold at the peak, with the `least` number of sampled tokens."""
    tokens = shapes.share * shapes.tokens
    sampled = tokens / max(1, tokens // max(least, SAMPLED_WIDTHS * shapes.width))
    # The sample's slopes; nine matrices of the input projections' size; hidden signals of a sequence; curvatures.
    return 4 * shapes.projections * shapes.hidden * (sampled + 9 * shapes.width + 4 * shapes.length + shapes.hidden)


def weights_of(block: Block, names: tuple[str, ...]) -> PartWeights:
    """The current weights and biases of a block's layers, as float32 copies."""
    weights: PartWeights = {}
    for name in names:
        layer = block.layer(name)
        bias = None if layer.bias is None else layer.bias.detach().to(torch.float32, copy=True)
        weights[name] = layer.weight.detach().to(torch.float32, copy=True), bias
    return weights


def moved(weights: PartWeights, change: PartWeights, length: float = 1.0) -> PartWeights:
    """Weights and biases plus `length` times a change of some of them."""
    result = dict(weights)
    for name, (step, bias_step) in change.items():
        weight, bias = weights[name]
        result[name] = weight + length * step, None if bias is None or bias_step is None else bias + length * bias_step
    return result


@dataclass
class FeedForwardProblem:
    """The feed-forward part of one block, with its inputs and targets.

    Attributes:
        fisher: F, (model, model), positive semi-definite: an output error e counts as eᵀ F e.
        inputs: x, (tokens, model) for each batch of this process.
        targets: t, (tokens, model) for each batch of this process.
        least: Least number of tokens for the curvature, if there are as many.
        window: Number of tokens that are summed at a time, independent of the batch size; None sums each batch at once.
    """

    feed_forward: FeedForward
    fisher: Tensor
    inputs: Tensors
    targets: Tensors
    least: int = SAMPLED
    window: int | None = None

    def __post_init__(self) -> None:
        self._first, self._step = 0, 1  # the tokens of this problem are first, first + step, ... of the calibration tokens
        self._width, self._device = self.inputs[0].shape[-1], self.inputs[0].device
        # Number of the first token of each batch, and the total, both over all processes.
        offsets = list(accumulate(collectives.all_gather(lengths(self.inputs)), initial=0))
        self._starts, self._tokens = collectives.shard(offsets[:-1]), offsets[-1]
        # With F = L Lᵀ, the weighted error of V p is the plain error of Lᵀ V p.
        self._root: Tensor = torch.linalg.cholesky(add_curvature_diagonal(self.fisher, FISHER_LIFT))

    @property
    def names(self) -> tuple[str, ...]:
        """The input projections, then the output projection."""
        return (*self.feed_forward.in_proj, self.feed_forward.out_proj)

    def split(self) -> tuple[FeedForwardProblem, FeedForwardProblem]:
        """A problem to fit on and one of held-out tokens, the last sixteenth; twice the whole problem if there are too few.

        The split does not depend on the batch size.
        """
        held_out = round(HELD * self._tokens)
        if held_out == 0:
            return self, self
        return self._rows(slice(0, self._tokens - held_out)), self._rows(slice(self._tokens - held_out, self._tokens))

    def sampled(self) -> FeedForwardProblem:
        """The problem with evenly spaced tokens, as many as the curvature needs."""
        count = max(self.least, SAMPLED_WIDTHS * self._width)
        return self._rows(slice(0, self._tokens, max(1, self._tokens // count)))

    def _rows(self, rows: slice) -> FeedForwardProblem:
        """The problem with some of its tokens, numbered over all batches; batches without any are left out."""
        subset, inputs = copy(self), RowSubset(self.inputs, rows, self._starts)
        subset.inputs, subset.targets = inputs, RowSubset(self.targets, rows, self._starts)
        subset._starts, subset._tokens = inputs.starts, len(range(self._tokens)[rows])
        subset._first, subset._step = self._first + self._step * rows.start, self._step * (rows.step or 1)
        return subset

    def hidden(self, weights: PartWeights, x: Tensor) -> tuple[Tensor, ...]:
        """The outputs of the input projections, each (tokens, hidden)."""
        return tuple(linear(x, *weights[name]) for name in self.feed_forward.in_proj)

    def error(self, weights: PartWeights) -> float:
        """E‖t - FFN(x)‖² weighted by F, mean over tokens."""
        sums = torch.zeros(2, dtype=devices.widest_float(self._device), device=self._device)  # squared error, tokens
        for x, t in self.batches():
            activated = self.feed_forward.activate(*self.hidden(weights, x))
            residual = self.weighted(t - linear(activated, *weights[self.feed_forward.out_proj]))
            sums += torch.stack([residual.square().sum(), torch.tensor(float(len(x)), device=x.device)]).to(sums.dtype)
        collectives.all_reduce_(sums)
        return float(sums[0] / sums[1].clamp(min=1))

    def target_energy(self) -> float:
        """E‖t‖² weighted by F, the denominator of the relative error."""
        sums = torch.zeros(2, dtype=devices.widest_float(self._device), device=self._device)  # energy, tokens
        for _, t in self.batches():
            sums += torch.stack([self.weighted(t).square().sum(), torch.tensor(float(len(t)), device=t.device)])
        collectives.all_reduce_(sums)
        return float(sums[0] / sums[1].clamp(min=1))

    def regression(self, weights: PartWeights) -> Regression:
        """The regression of the output projection: from the activations with these input projections toward t."""
        (out, features), bias = weights[self.feed_forward.out_proj][0].shape, weights[self.feed_forward.out_proj][1]
        gram = Gram(features, self._device)
        regression = TargetRegression(gram, out, affine=bias is not None)
        for x, t in self.batches():
            activated = self.feed_forward.activate(*self.hidden(weights, x))
            gram.update(activated)
            regression.update(t, activated)
        gram.reduce()
        regression.reduce()
        if bias is None:  # else the matrix about the mean is computed from the sums
            gram.finalize()
        return regression

    def curvatures(self, dense: PartWeights) -> dict[str, Tensor]:
        r"""S of each input projection on a sample, (hidden, hidden): $(V^\top F V) \circ E[\varphi'_k \varphi'^{\top}_k]$."""
        in_proj, out_proj = self.feed_forward.in_proj, self.weighted_out_proj(dense)
        grams = {name: Gram(out_proj.shape[1], out_proj.device) for name in in_proj}
        for x, _ in self.sampled().batches():
            for name, slopes in zip(in_proj, self.feed_forward.slopes(*self.hidden(dense, x)), strict=True):
                grams[name].update(slopes)
        for gram in grams.values():
            gram.reduce()
        squares = matmul(out_proj.T, out_proj)
        return {name: grams.pop(name).matrix.mul_(squares) for name in in_proj}  # one Gram matrix's sums less each time

    def weighted_out_proj(self, weights: PartWeights) -> Tensor:
        """The output projection weighted by F: Lᵀ V, (model, hidden)."""
        return matmul(self._root.T, weights[self.feed_forward.out_proj][0])

    def weighted(self, errors: Tensor) -> Tensor:
        """Output errors weighted by F: (tokens, model) times L."""
        return matmul(errors, self._root)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and targets in float32, in pieces of at most `window` tokens, or by batch if it is None."""
        for x, t, start in zip(self.inputs, self.targets, self._starts, strict=True):
            sizes = self._sizes(start, len(x))
            yield from zip(x.float().split(sizes), t.float().split(sizes), strict=True)

    def _sizes(self, start: int, count: int) -> list[int]:
        """Sizes of the pieces of `count` tokens from token `start` of this problem on, cut at multiples of `window`."""
        if self.window is None or count == 0:  # an expert may have no token in a batch
            return [count]
        numbers = range(self._first + self._step * start, self._first + self._step * (start + count), self._step)
        ends = range(numbers[0] // self.window + 1, numbers[-1] // self.window + 2)  # in multiples of `window`
        cuts = [0, *(min(count, -(-(end * self.window - numbers[0]) // self._step)) for end in ends)]
        return [stop - begin for begin, stop in pairwise(cuts) if stop > begin]
