r"""Gauss-Newton steps of the input projections of a feed-forward part, with fixed masks and a fixed output projection.

With the symbols of `sparsellm.methods.feedforward_problem`, a step minimizes

$$E\lVert t - V(p + \sum_k \varphi'_k \circ \Delta_k x) - c \rVert_F^2$$

over the changes $\Delta_k$ of the projections' weights. The "stack" of a gradient or step is one matrix for all input
projections: their weights, (hidden, in) each, one above another, with their biases as a last column if they have any.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from sparsellm.methods.feedforward_problem import FeedForwardProblem, PartWeights
from sparsellm.runtime import collectives, devices
from sparsellm.runtime.products import linear, matmul
from sparsellm.solvers.linalg import dot_float64

RIDGE = 1e-2
"""Penalty on a step, relative to the curvature of each entry: the quadratic model only holds near the start."""

SLOPES = torch.bfloat16
"""Dtype of the activation's derivatives in the curvature: half of the memory, for a change of less than 1 %."""

PRODUCT_ROWS = 2048
"""Rows of a product over tokens that are computed at a time, in float32, and added to float64 sums."""


def gauss_newton_changes(
    problem: FeedForwardProblem, weights: PartWeights, keep: Mapping[str, Tensor], steps: int
) -> Iterator[PartWeights]:
    """The changes of a Gauss-Newton round, by conjugate gradients with a diagonal preconditioner, on a sample of the tokens.

    Args:
        problem: The part with the tokens of the gradient.
        weights: Current weights and biases of all layers.
        keep: By layer, True where a weight stays.
        steps: Number of conjugate gradient steps; each multiplies by the Jacobian and its transpose once.

    Yields:
        The changes of weights and biases after each step, by input projection: each longer than the one before.
    """
    sample, in_proj = problem.sampled(), problem.feed_forward.in_proj
    stack = torch.cat([_with_bias(*weights[name]) for name in in_proj])
    mask = torch.cat([_with_bias(keep[name], weights[name][1]) for name in in_proj])
    residual, rows, columns = _gradient(problem, weights, stack)
    slopes = [_slopes(sample, _with_ones(x, stack), stack) for x, _ in sample.batches()]
    change = stack.zero_()
    del stack  # else this one is held beside the changes that follow
    residual *= mask
    direction = _precondition(residual, rows, columns)
    energy = dot_float64(residual, direction)
    for _ in range(steps):
        if not energy > 0:
            return
        product = _curvature_product(sample, weights, slopes, direction)
        for part, direction_part, row_part in devices.row_chunks(product, direction, rows):
            part.addcmul_(direction_part * columns, row_part, value=RIDGE)
        product *= mask
        length = energy / max(dot_float64(direction, product), 1e-30)
        change = change.add(direction, alpha=length)  # not in place: the caller may keep the one before
        residual.add_(product, alpha=-length)
        del product  # lowers the peak memory of the caller
        yield _by_layer(change, weights, in_proj)
        preconditioned = _precondition(residual, rows, columns)
        new_energy = dot_float64(residual, preconditioned)
        direction.mul_(new_energy / energy).add_(preconditioned)
        energy = new_energy
        del preconditioned


def _gradient(problem: FeedForwardProblem, weights: PartWeights, stack: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Jᵀ of the residual, mean over tokens, of the stack's shape, and the factors of an approximate diagonal of Jᵀ J.

    The diagonal is ‖v‖² E[φ'²] E[x²], as if slopes and inputs were independent: a factor for each row, (rows, 1), and one for
    each column.
    """
    feed_forward, out_proj = problem.feed_forward, problem.weighted_out_proj(weights)
    projections = len(feed_forward.in_proj)
    wide = devices.widest_float(stack.device)  # see `sparsellm.solvers.statistics`
    gradient, slope_squares, input_squares = (torch.zeros_like(like, dtype=wide) for like in (stack, stack[:, 0], stack[0]))
    tokens = torch.zeros((), dtype=wide, device=stack.device)
    for x, t in problem.batches():
        inputs = _with_ones(x, stack)
        hidden = matmul(inputs, stack.T).chunk(projections, 1)
        slopes = torch.cat(feed_forward.slopes(*hidden), 1)
        residual = problem.weighted(t - linear(feed_forward.activate(*hidden), *weights[feed_forward.out_proj]))
        _add_products(gradient, matmul(residual, out_proj).repeat(1, projections).mul_(slopes), inputs)
        slope_squares += slopes.square().sum(0)
        input_squares += inputs.square().sum(0)
        tokens += len(x)
    collectives.all_reduce_(gradient, slope_squares, input_squares, tokens)
    row_curvatures = out_proj.square().sum(0).repeat(projections) * (slope_squares / tokens).float()
    return gradient.div_(tokens).float(), row_curvatures.unsqueeze(1), (input_squares / tokens).float()


def _slopes(problem: FeedForwardProblem, inputs: Tensor, stack: Tensor) -> Tensor:
    """The activation's derivatives by the output of each input projection: (tokens, projections × hidden)."""
    feed_forward = problem.feed_forward
    hidden = matmul(inputs, stack.T).chunk(len(feed_forward.in_proj), 1)
    return torch.cat([slopes.to(SLOPES) for slopes in feed_forward.slopes(*hidden)], 1)


def _curvature_product(
    problem: FeedForwardProblem, weights: PartWeights, slopes: Sequence[Tensor], direction: Tensor
) -> Tensor:
    """Jᵀ J times a direction of the stack's shape, mean over tokens. `slopes`: see `_slopes`, for each batch."""
    out_proj, projections = problem.weighted_out_proj(weights), len(problem.feed_forward.in_proj)
    wide = devices.widest_float(direction.device)
    product, tokens = torch.zeros_like(direction, dtype=wide), torch.zeros((), dtype=wide, device=direction.device)
    for (x, _), batch_slopes in zip(problem.batches(), slopes, strict=True):
        inputs = _with_ones(x, direction)
        change = matmul(inputs, direction.T).mul_(batch_slopes)
        output = matmul(sum(change.chunk(projections, 1), torch.zeros(())), out_proj.T)
        _add_products(product, matmul(output, out_proj).repeat(1, projections).mul_(batch_slopes), inputs)
        tokens += len(x)
    collectives.all_reduce_(product, tokens)
    return product.div_(tokens).float()


def _precondition(residual: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Divide by a diagonal that is given by its factors, (rows, 1) and (in,), plus a little, since some entries are zero."""
    result, lift = torch.empty_like(residual), 1e-3 * rows.mean() * columns.mean()
    for numerator, quotient, row in devices.row_chunks(residual, result, rows):
        torch.div(numerator, torch.addcmul(lift, row, columns), out=quotient)
    return result


def _add_products(sums: Tensor, signals: Tensor, inputs: Tensor) -> None:
    """Add signalsᵀ inputs, over (tokens, rows) and (tokens, in), to sums, (rows, in), a few rows at a time."""
    for part, columns in zip(sums.split(PRODUCT_ROWS), signals.split(PRODUCT_ROWS, 1), strict=True):
        part.add_(matmul(columns.T, inputs))


def _by_layer(stack: Tensor, weights: PartWeights, in_proj: Sequence[str]) -> PartWeights:
    """The weights and biases of a stack by input projection."""
    changes: PartWeights = {}
    for name, chunk in zip(in_proj, stack.chunk(len(in_proj)), strict=True):
        affine = weights[name][1] is not None
        changes[name] = (chunk[:, :-1].contiguous(), chunk[:, -1].contiguous()) if affine else (chunk, None)
    return changes


def _with_ones(x: Tensor, stack: Tensor) -> Tensor:
    """Inputs, (tokens, in), with a last column of ones if the stack has a column of biases."""
    return x if stack.shape[1] == x.shape[1] else torch.cat([x, torch.ones_like(x[:, :1])], 1)


def _with_bias(weight: Tensor, bias: Tensor | None) -> Tensor:
    """A weight with its bias as last column, or a mask with a column of True; unchanged if there is no bias."""
    if bias is None:
        return weight
    column = torch.ones_like(weight[:, :1]) if weight.dtype is torch.bool else bias.unsqueeze(1)
    return torch.cat([weight, column], 1)
