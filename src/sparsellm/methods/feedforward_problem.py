r"""A feed-forward part on what it reads in the pruned model, held against what it should write: its true error, and the
closed-form steps that lower it.

With the readers' weights $W_k$ and the writer's $V$, the part computes $V \varphi(W_1 x, \dots) + c$ and should write $t$.
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
"""By layer: the weight, (out, in), and the bias, (out,), or None where the layer has none; float32."""

HELD = 0.0625
"""The share of the tokens, the last, that judges a Gauss-Newton round and takes no part in it."""

SAMPLED, SAMPLED_WIDTHS = 8192, 4
"""How many tokens a Gauss-Newton step's curvature is taken from, usually at least, and at least how many widths. The gradient
is taken from all: it says where to go, the curvature only how far in each direction."""

METRIC_LIFT = 1e-3
"""Added to a metric's diagonal, as a share of its mean: a sample cannot tell what costs nothing from what costs little."""

NEWTON_RIDGE = 1e-2
"""Of a Gauss-Newton step, toward no change, as a share of each entry's own curvature: a step is only good near its start."""


def weights_of(block: Block, names: tuple[str, ...]) -> Weights:
    """The present weights and biases of a block's layers, as float32 copies."""
    found: Weights = {}
    for name in names:
        layer = block.layer(name)
        bias = None if layer.bias is None else layer.bias.detach().to(torch.float32, copy=True)
        found[name] = layer.weight.detach().to(torch.float32, copy=True), bias
    return found


@dataclass
class FeedForwardProblem:
    """One block's feed-forward part with its batches.

    feed_forward: where readers and writer are. metric: F, (model, model): what errors of the output cost.
    inputs: x, (tokens, model) for each batch of this process. targets: t, (tokens, model) for each. least: tokens for a
    curvature, if there are as many. window: tokens that are summed at a time, whatever the batch; None sums all of a batch.
    """

    feed_forward: FeedForward
    metric: Tensor
    inputs: Tensors
    targets: Tensors
    least: int = SAMPLED
    window: int | None = None

    def __post_init__(self) -> None:
        self._first, self._step = 0, 1  # which tokens these are, of all that there are
        self._width, self._device = self.inputs[0].shape[-1], self.inputs[0].device
        # How many tokens stand before each batch, and how many there are, those of the other processes among them.
        before = list(accumulate(collectives.all_gather(lengths(self.inputs)), initial=0))
        self._starts, self._tokens = collectives.shard(before[:-1]), before[-1]
        # With F = L Lᵀ, errors of V p weigh as plain errors of Lᵀ V p.
        self._root: Tensor = torch.linalg.cholesky(add_curvature_diagonal(self.metric, METRIC_LIFT))

    @property
    def names(self) -> tuple[str, ...]:
        """Readers, then the writer."""
        return (*self.feed_forward.in_proj, self.feed_forward.out_proj)

    def split(self) -> tuple[FeedForwardProblem, FeedForwardProblem]:
        """What to fit on, and a sixteenth of the tokens, the last, held back to judge by; the same for both where there are too
        few. Where one batch ends and the next begins makes no difference."""
        back = round(HELD * self._tokens)
        if back == 0:
            return self, self
        return self._rows(slice(0, self._tokens - back)), self._rows(slice(self._tokens - back, self._tokens))

    def sampled(self) -> FeedForwardProblem:
        """Every so-manieth token: as many as a curvature needs."""
        wanted = max(self.least, SAMPLED_WIDTHS * self._width)
        return self._rows(slice(0, self._tokens, max(1, self._tokens // wanted)))

    def _rows(self, wanted: slice) -> FeedForwardProblem:
        """The part with some of its tokens, counted over all batches; batches without any are left out."""
        part, inputs = copy(self), RowSubset(self.inputs, wanted, self._starts)
        part.inputs, part.targets = inputs, RowSubset(self.targets, wanted, self._starts)
        part._starts, part._tokens = inputs.starts, len(range(self._tokens)[wanted])
        part._first, part._step = self._first + self._step * wanted.start, self._step * (wanted.step or 1)
        return part

    def hidden(self, weights: Weights, x: Tensor) -> tuple[Tensor, ...]:
        """The readers' outputs, each (tokens, hidden)."""
        return tuple(linear(x, *weights[name]) for name in self.feed_forward.in_proj)

    def error(self, weights: Weights) -> float:
        """E‖t - FFN(x)‖² in the metric, mean over tokens."""
        missed = torch.zeros(2, dtype=devices.widest_float(self._device), device=self._device)
        for x, t in self._batches():
            activated = self.feed_forward.activate(*self.hidden(weights, x))
            residual = self._weighted(t - linear(activated, *weights[self.feed_forward.out_proj]))
            missed += torch.stack([residual.square().sum(), torch.tensor(float(len(x)), device=x.device)]).to(missed.dtype)
        collectives.all_reduce_(missed)
        return float(missed[0] / missed[1].clamp(min=1))

    def target_energy(self) -> float:
        """E‖t‖² in the metric: what the error is relative to."""
        had = torch.zeros(2, dtype=devices.widest_float(self._device), device=self._device)
        for _, t in self._batches():
            had += torch.stack([self._weighted(t).square().sum(), torch.tensor(float(len(t)), device=t.device)])
        collectives.all_reduce_(had)
        return float(had[0] / had[1].clamp(min=1))

    def regression(self, weights: Weights) -> Regression:
        """The writer's: from the activations that these readers really give, toward t."""
        (out, features), bias = weights[self.feed_forward.out_proj][0].shape, weights[self.feed_forward.out_proj][1]
        gram = Gram(features, self._device)
        found = TargetRegression(gram, out, affine=bias is not None)
        for x, t in self._batches():
            activated = self.feed_forward.activate(*self.hidden(weights, x))
            gram.update(activated)
            found.update(t, activated)
        gram.reduce()
        found.reduce()
        return found

    def curvatures(self, dense: Weights) -> dict[str, Tensor]:
        r"""S for each reader, (hidden, hidden): $(V^\top F V) \circ E[\varphi'_k \varphi'^{\top}_k]$, at the dense weights."""
        readers, writer = self.feed_forward.in_proj, self._writer(dense)
        slopes = {name: Gram(writer.shape[1], writer.device) for name in readers}
        for x, _ in self._batches():
            for name, slope in zip(readers, self.feed_forward.slopes(*self.hidden(dense, x)), strict=True):
                slopes[name].update(slope)
        for gram in slopes.values():
            gram.reduce()
        return {name: (writer.T @ writer) * gram.matrix for name, gram in slopes.items()}

    def gauss_newton_step(self, weights: Weights, keep: Mapping[str, Tensor], steps: int) -> Weights:
        r"""The change of the readers that a Gauss-Newton step proposes, masks and writer held.

        Conjugate gradients on $E\lVert t - V(p + \sum_k \varphi'_k \circ \Delta_k x) - c \rVert_F^2$, preconditioned by the
        diagonal; a product with the Jacobian and one with its transpose for each of the `steps`, on a sample of the tokens.
        """
        sample, stack = self.sampled(), self._stack(weights)
        held = torch.cat([_with_bias(keep[name], weights[name][1]) for name in self.feed_forward.in_proj])
        change = torch.zeros_like(stack)
        residual, curvature = self._gradient(weights, stack)
        slopes = [sample._slopes(_widened(x, stack), stack) for x, _ in sample._batches()]
        scale = held / (curvature + curvature.mean() * 1e-3)
        ridge = NEWTON_RIDGE * curvature
        residual = residual * held
        direction = residual * scale
        energy = float((residual * direction).sum())
        for _ in range(steps):
            if not energy > 0:
                break
            product = (sample._gauss_newton_product(weights, slopes, direction) + ridge * direction) * held
            length = energy / max(float((direction * product).sum()), 1e-30)
            change += length * direction
            residual -= length * product
            fresh = float((residual * residual * scale).sum())
            direction = residual * scale + fresh / energy * direction
            energy = fresh
        return self._unstack(change, weights)

    def _gradient(self, weights: Weights, stack: Tensor) -> tuple[Tensor, Tensor]:
        """Jᵀ of what the part misses, mean over tokens, and the diagonal of Jᵀ J as if the slopes did not depend on the inputs:
        ‖v‖² E[φ'²] E[x²], all that a preconditioner needs. Both of the stack's shape."""
        writer, readers = self._writer(weights), len(self.feed_forward.in_proj)
        wide = devices.widest_float(stack.device)  # see `sparsellm.solvers.statistics`
        found, powers, widths = (torch.zeros_like(some, dtype=wide) for some in (stack, stack[:, 0], stack[0]))
        tokens = torch.zeros((), dtype=wide, device=stack.device)
        for x, t in self._batches():
            inputs = _widened(x, stack)
            hidden = (inputs @ stack.T).chunk(readers, 1)
            slopes = torch.cat(self.feed_forward.slopes(*hidden), 1)
            missed = self._weighted(t - linear(self.feed_forward.activate(*hidden), *weights[self.feed_forward.out_proj]))
            found += (missed @ writer).repeat(1, readers).mul_(slopes).T @ inputs
            powers += slopes.square().sum(0)
            widths += inputs.square().sum(0)
            tokens += len(x)
        collectives.all_reduce_(found, powers, widths, tokens)
        heights = writer.square().sum(0).repeat(readers) * (powers / tokens).float()
        return (found / tokens).float(), heights.outer((widths / tokens).float())

    def _slopes(self, inputs: Tensor, stack: Tensor) -> Tensor:
        """The activation's derivatives by each reader's output, side by side: (tokens, readers x hidden)."""
        return torch.cat(self.feed_forward.slopes(*(inputs @ stack.T).chunk(len(self.feed_forward.in_proj), 1)), 1)

    def _gauss_newton_product(self, weights: Weights, slopes: Sequence[Tensor], direction: Tensor) -> Tensor:
        """Jᵀ J times a direction of the stack's shape, mean over tokens. slopes: as `_slopes`, for each batch."""
        writer, readers = self._writer(weights), len(self.feed_forward.in_proj)
        wide = devices.widest_float(direction.device)
        found, tokens = torch.zeros_like(direction, dtype=wide), torch.zeros((), dtype=wide, device=direction.device)
        for (x, _), slope in zip(self._batches(), slopes, strict=True):
            inputs = _widened(x, direction)
            moved = (inputs @ direction.T).mul_(slope)
            out = sum(moved.chunk(readers, 1), torch.zeros(())) @ writer.T
            found += (out @ writer).repeat(1, readers).mul_(slope).T @ inputs
            tokens += len(x)
        collectives.all_reduce_(found, tokens)
        return (found / tokens).float()

    def _stack(self, weights: Weights) -> Tensor:
        """The readers' weights one above the other, with their biases as a last column where there are any."""
        return torch.cat([_with_bias(*weights[name]) for name in self.feed_forward.in_proj])

    def _unstack(self, stack: Tensor, weights: Weights) -> Weights:
        """The inverse of `_stack`."""
        parts = stack.chunk(len(self.feed_forward.in_proj))
        found: Weights = {}
        for name, some in zip(self.feed_forward.in_proj, parts, strict=True):
            affine = weights[name][1] is not None
            found[name] = (some[:, :-1].contiguous(), some[:, -1].contiguous()) if affine else (some, None)
        return found

    def _writer(self, weights: Weights) -> Tensor:
        """The writer's weight as it counts: Lᵀ V, (model, hidden)."""
        return self._root.T @ weights[self.feed_forward.out_proj][0]

    def _weighted(self, errors: Tensor) -> Tensor:
        """Errors of the output as they count: (tokens, model) times L."""
        return errors @ self._root

    def _batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs and targets in float32, window by window or, where windows are not known, batch by batch."""
        for x, t, start in zip(self.inputs, self.targets, self._starts, strict=True):
            sizes = self._sizes(start, len(x))
            yield from zip(x.float().split(sizes), t.float().split(sizes), strict=True)

    def _sizes(self, start: int, count: int) -> list[int]:
        """So many tokens from one on, cut where windows begin: how many are of each window."""
        if self.window is None:
            return [count]
        numbers = range(self._first + self._step * start, self._first + self._step * (start + count), self._step)
        ends = range(numbers[0] // self.window + 1, numbers[-1] // self.window + 2)
        cuts = [0, *(min(count, -(-(end * self.window - numbers[0]) // self._step)) for end in ends)]
        return [stop - begin for begin, stop in pairwise(cuts) if stop > begin]


def _widened(x: Tensor, stack: Tensor) -> Tensor:
    """Inputs, (tokens, in), with a last column of ones where the stack has one for biases."""
    return x if stack.shape[1] == x.shape[1] else torch.cat([x, torch.ones_like(x[:, :1])], 1)


def _with_bias(weight: Tensor, bias: Tensor | None) -> Tensor:
    """A weight or a mask with the bias (or, for a mask, True) as its last column; as it is where there is no bias."""
    if bias is None:
        return weight
    last = torch.ones_like(weight[:, :1]) if weight.dtype is torch.bool else bias.unsqueeze(1)
    return torch.cat([weight, last], 1)
