r"""A feed-forward part as one problem: its true error in the pruned model, and the closed-form steps that lower it.

With the input projections' weights $W_k$ and the output projection's $V$, the part computes $V \varphi(W_1 x, \dots) + c$. Its
target is $t$. The "stack" of a gradient or step is one matrix for all input projections: their weights, (hidden, in) each, one
above another, with their biases as a last column if they have any.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.nn.functional import linear

from sparsellm.models.blocks import Block
from sparsellm.models.feedforward import FeedForward
from sparsellm.runtime import collectives, devices
from sparsellm.runtime.offload import RowSubset, Tensors, lengths
from sparsellm.solvers.linalg import add_curvature_diagonal
from sparsellm.solvers.regression import Regression, TargetRegression
from sparsellm.solvers.statistics import Gram

Weights = dict[str, tuple[Tensor, Tensor | None]]
"""By layer: the weight, (out, in), and the bias, (out,), or None if the layer has none; float32."""

HELD = 0.0625
"""The fraction of tokens, the last ones, that is held out to evaluate Gauss-Newton rounds."""

SAMPLED, SAMPLED_WIDTHS = 4096, 4
"""Least number of tokens for the curvature of a Gauss-Newton step, by default, and the same in multiples of the model width.
The gradient uses all tokens: it sets the direction, the curvature only the step length in each direction."""

METRIC_LIFT = 1e-3
"""Added to the diagonal of F, relative to its mean: F is estimated from a sample, which cannot tell small costs from zero."""

NEWTON_RIDGE = 1e-2
"""Penalty on a Gauss-Newton step, relative to the curvature of each entry: the quadratic model only holds near the start."""


def weights_of(block: Block, names: tuple[str, ...]) -> Weights:
    """The current weights and biases of a block's layers, as float32 copies."""
    weights: Weights = {}
    for name in names:
        layer = block.layer(name)
        bias = None if layer.bias is None else layer.bias.detach().to(torch.float32, copy=True)
        weights[name] = layer.weight.detach().to(torch.float32, copy=True), bias
    return weights


def moved(weights: Weights, change: Weights, length: float = 1.0) -> Weights:
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
        metric: F, (model, model), positive semi-definite: an output error e counts as eᵀ F e.
        inputs: x, (tokens, model) for each batch of this process.
        targets: t, (tokens, model) for each batch of this process.
        least: Least number of tokens for the curvature, if there are as many.
        window: Number of tokens that are summed at a time, independent of the batch size; None sums each batch at once.
    """

    feed_forward: FeedForward
    metric: Tensor
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
        self._root: Tensor = torch.linalg.cholesky(add_curvature_diagonal(self.metric, METRIC_LIFT))

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

    def hidden(self, weights: Weights, x: Tensor) -> tuple[Tensor, ...]:
        """The outputs of the input projections, each (tokens, hidden)."""
        return tuple(linear(x, *weights[name]) for name in self.feed_forward.in_proj)

    def error(self, weights: Weights) -> float:
        """E‖t - FFN(x)‖² in the metric, mean over tokens."""
        sums = torch.zeros(2, dtype=devices.widest_float(self._device), device=self._device)  # squared error, tokens
        for x, t in self._batches():
            activated = self.feed_forward.activate(*self.hidden(weights, x))
            residual = self._weighted(t - linear(activated, *weights[self.feed_forward.out_proj]))
            sums += torch.stack([residual.square().sum(), torch.tensor(float(len(x)), device=x.device)]).to(sums.dtype)
        collectives.all_reduce_(sums)
        return float(sums[0] / sums[1].clamp(min=1))

    def target_energy(self) -> float:
        """E‖t‖² in the metric, the denominator of the relative error."""
        sums = torch.zeros(2, dtype=devices.widest_float(self._device), device=self._device)  # energy, tokens
        for _, t in self._batches():
            sums += torch.stack([self._weighted(t).square().sum(), torch.tensor(float(len(t)), device=t.device)])
        collectives.all_reduce_(sums)
        return float(sums[0] / sums[1].clamp(min=1))

    def regression(self, weights: Weights) -> Regression:
        """The regression of the output projection: from the activations with these input projections toward t."""
        (out, features), bias = weights[self.feed_forward.out_proj][0].shape, weights[self.feed_forward.out_proj][1]
        gram = Gram(features, self._device)
        regression = TargetRegression(gram, out, affine=bias is not None)
        for x, t in self._batches():
            activated = self.feed_forward.activate(*self.hidden(weights, x))
            gram.update(activated)
            regression.update(t, activated)
        gram.reduce()
        regression.reduce()
        return regression

    def curvatures(self, dense: Weights) -> dict[str, Tensor]:
        r"""S of each input projection on a sample, (hidden, hidden): $(V^\top F V) \circ E[\varphi'_k \varphi'^{\top}_k]$."""
        in_proj, out_proj = self.feed_forward.in_proj, self._weighted_out_proj(dense)
        grams = {name: Gram(out_proj.shape[1], out_proj.device) for name in in_proj}
        for x, _ in self.sampled()._batches():
            for name, slopes in zip(in_proj, self.feed_forward.slopes(*self.hidden(dense, x)), strict=True):
                grams[name].update(slopes)
        for gram in grams.values():
            gram.reduce()
        squares = out_proj.T @ out_proj
        return {name: grams.pop(name).matrix.mul_(squares) for name in in_proj}  # one Gram matrix's sums less each time

    def gauss_newton_changes(self, weights: Weights, keep: Mapping[str, Tensor], steps: int) -> Iterator[Weights]:
        r"""The changes of a Gauss-Newton step of the input projections, with fixed masks and a fixed output projection.

        Minimises $E\lVert t - V(p + \sum_k \varphi'_k \circ \Delta_k x) - c \rVert_F^2$ over $\Delta$ by conjugate gradients
        with a diagonal preconditioner, on a sample of the tokens.

        Args:
            weights: Current weights and biases of all layers.
            keep: By layer, True where a weight stays.
            steps: Number of conjugate gradient steps; each multiplies by the Jacobian and its transpose once.

        Yields:
            The changes of weights and biases after each step, by input projection: each longer than the one before.
        """
        sample, stack = self.sampled(), self._stack(weights)
        mask = torch.cat([_with_bias(keep[name], weights[name][1]) for name in self.feed_forward.in_proj])
        residual, curvature = self._gradient(weights, stack)
        slopes = [sample._slopes(_with_ones(x, stack), stack) for x, _ in sample._batches()]
        change = stack.zero_()
        preconditioner = mask / (curvature + curvature.mean() * 1e-3)
        ridge = curvature.mul_(NEWTON_RIDGE)
        residual *= mask
        direction = residual * preconditioner
        energy = float((residual * direction).sum())
        for _ in range(steps):
            if not energy > 0:
                return
            product = (sample._gauss_newton_product(weights, slopes, direction) + ridge * direction) * mask
            length = energy / max(float((direction * product).sum()), 1e-30)
            change = change + length * direction
            residual -= length * product
            del product
            yield self._unstack(change, weights)
            new_energy = float((residual * residual * preconditioner).sum())
            direction = residual * preconditioner + new_energy / energy * direction
            energy = new_energy

    def _gradient(self, weights: Weights, stack: Tensor) -> tuple[Tensor, Tensor]:
        """Jᵀ of the residual, mean over tokens, and an approximate diagonal of Jᵀ J, both of the stack's shape.

        The diagonal is ‖v‖² E[φ'²] E[x²], as if slopes and inputs were independent; it serves as a preconditioner.
        """
        out_proj, projections = self._weighted_out_proj(weights), len(self.feed_forward.in_proj)
        wide = devices.widest_float(stack.device)  # see `sparsellm.solvers.statistics`
        gradient, slope_squares, input_squares = (torch.zeros_like(like, dtype=wide) for like in (stack, stack[:, 0], stack[0]))
        tokens = torch.zeros((), dtype=wide, device=stack.device)
        for x, t in self._batches():
            inputs = _with_ones(x, stack)
            hidden = (inputs @ stack.T).chunk(projections, 1)
            slopes = torch.cat(self.feed_forward.slopes(*hidden), 1)
            residual = self._weighted(t - linear(self.feed_forward.activate(*hidden), *weights[self.feed_forward.out_proj]))
            gradient += (residual @ out_proj).repeat(1, projections).mul_(slopes).T @ inputs
            slope_squares += slopes.square().sum(0)
            input_squares += inputs.square().sum(0)
            tokens += len(x)
        collectives.all_reduce_(gradient, slope_squares, input_squares, tokens)
        row_curvatures = out_proj.square().sum(0).repeat(projections) * (slope_squares / tokens).float()
        return (gradient / tokens).float(), row_curvatures.outer((input_squares / tokens).float())

    def _slopes(self, inputs: Tensor, stack: Tensor) -> Tensor:
        """The activation's derivatives by the output of each input projection: (tokens, projections × hidden)."""
        return torch.cat(self.feed_forward.slopes(*(inputs @ stack.T).chunk(len(self.feed_forward.in_proj), 1)), 1)

    def _gauss_newton_product(self, weights: Weights, slopes: Sequence[Tensor], direction: Tensor) -> Tensor:
        """Jᵀ J times a direction of the stack's shape, mean over tokens. `slopes`: see `_slopes`, for each batch."""
        out_proj, projections = self._weighted_out_proj(weights), len(self.feed_forward.in_proj)
        wide = devices.widest_float(direction.device)
        product, tokens = torch.zeros_like(direction, dtype=wide), torch.zeros((), dtype=wide, device=direction.device)
        for (x, _), batch_slopes in zip(self._batches(), slopes, strict=True):
            inputs = _with_ones(x, direction)
            change = (inputs @ direction.T).mul_(batch_slopes)
            output = sum(change.chunk(projections, 1), torch.zeros(())) @ out_proj.T
            product += (output @ out_proj).repeat(1, projections).mul_(batch_slopes).T @ inputs
            tokens += len(x)
        collectives.all_reduce_(product, tokens)
        return (product / tokens).float()

    def _stack(self, weights: Weights) -> Tensor:
        """The stack: (projections × hidden, in), or one column more with biases."""
        return torch.cat([_with_bias(*weights[name]) for name in self.feed_forward.in_proj])

    def _unstack(self, stack: Tensor, weights: Weights) -> Weights:
        """The inverse of `_stack`."""
        chunks = stack.chunk(len(self.feed_forward.in_proj))
        changes: Weights = {}
        for name, chunk in zip(self.feed_forward.in_proj, chunks, strict=True):
            affine = weights[name][1] is not None
            changes[name] = (chunk[:, :-1].contiguous(), chunk[:, -1].contiguous()) if affine else (chunk, None)
        return changes

    def _weighted_out_proj(self, weights: Weights) -> Tensor:
        """The output projection in the metric: Lᵀ V, (model, hidden)."""
        return self._root.T @ weights[self.feed_forward.out_proj][0]

    def _weighted(self, errors: Tensor) -> Tensor:
        """Output errors in the metric: (tokens, model) times L."""
        return errors @ self._root

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
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


def _with_ones(x: Tensor, stack: Tensor) -> Tensor:
    """Inputs, (tokens, in), with a last column of ones if the stack has a column of biases."""
    return x if stack.shape[1] == x.shape[1] else torch.cat([x, torch.ones_like(x[:, :1])], 1)


def _with_bias(weight: Tensor, bias: Tensor | None) -> Tensor:
    """A weight with its bias as last column, or a mask with a column of True; unchanged if there is no bias."""
    if bias is None:
        return weight
    column = torch.ones_like(weight[:, :1]) if weight.dtype is torch.bool else bias.unsqueeze(1)
    return torch.cat([weight, column], 1)
