r"""How much an error in a block's or a layer's outputs costs further down, to second order.

The distance of the pruned model's predictions from the dense model's, KL divergence, is to second order
$\frac12 E[\delta^\top F \delta]$ in an error $\delta$ of a block's output, with $F = E[g g^\top]$, $g$ the gradient of the
loss by that output when the label is drawn from the model itself (the Fisher information). Taken as independent of the error,
token by token, $F$ is one (model, model) matrix for a block, and through a block's own Jacobian $J$ it becomes
$S = E[J^\top F J]$ for each layer. The same matrices serve K-FAC (Martens & Grosse, ICML 2015).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparsellm.activations.backward import first_windows, gradient_hooks, run_backward
from sparsellm.checkpoints.block_loader import Weights
from sparsellm.errors import InvalidSetting
from sparsellm.models.block_calls import Call
from sparsellm.models.blocks import Block
from sparsellm.models.contexts import require_grad_only
from sparsellm.runtime import collectives, devices
from sparsellm.runtime.offload import OffloadManager, TensorList
from sparsellm.solvers.linalg import eigh
from sparsellm.solvers.statistics import Gram

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENS = 16384
"""How many tokens are looked at, at most: some times the width of a stream, for matrices of full rank."""

MANY = 2**32
"""More windows than there ever are: a block's number times this, and a window's, make a seed of their own."""


def output_sensitivities(
    model: PreTrainedModel,
    batches: Sequence[Tensor],
    compute: torch.dtype | None = None,
    weights: Weights | None = None,
    storage: OffloadManager | None = None,
) -> list[Tensor]:
    """F for the output of each block, (model, model) float32, from one pass of the dense model and back, block by block.

    batches: token numbers, each (batch, seq); the windows of the first 16,384 tokens are used. compute, weights, storage: as
    for `walk`. Cost: two forward passes and a backward one; memory for the inputs of all blocks, which `storage` may keep in
    files, for the gradients within one block, and for the logits of one window. The same for the same model and windows, to
    rounding: labels are drawn window by window, each by its number.
    """
    return [found for _, found in iterate_output_sensitivities(model, batches, compute, weights, storage)][::-1]


@torch.no_grad()
def iterate_output_sensitivities(
    model: PreTrainedModel,
    batches: Sequence[Tensor],
    compute: torch.dtype | None = None,
    weights: Weights | None = None,
    storage: OffloadManager | None = None,
) -> Iterator[tuple[int, Tensor]]:
    """As `output_sensitivities`, one by one with the block's number, the last block's first: to be kept elsewhere."""
    batches = first_windows(batches, TOKENS)
    tokens = sum(batch.numel() for batch in batches)

    def mean(gradients: TensorList) -> Tensor:
        total = _second_moment(gradients)
        collectives.all_reduce_(total)
        return (total / tokens).float()

    with run_backward(model, batches, compute, weights, storage) as descent:
        yield descent.blocks[-1].index, mean(descent.gradients)
        for block in descent.iterate(stop=1):
            yield block.index - 1, mean(descent.gradients)


def _second_moment(gradients: TensorList) -> Tensor:
    """The sum over tokens of g gᵀ, (model, model), in float64 as in `sparsellm.solvers.statistics`."""
    total: Tensor | None = None
    for some in gradients:
        for rows in some:  # window by window: the same sums however windows are batched
            product = (rows.float().T @ rows.float()).to(devices.widest_float(rows.device))
            total = product if total is None else total.add_(product)
    if total is None:
        few = f"are fewer calibration batches than the {collectives.world()} processes"
        message = f"There {few if collectives.world() > 1 else 'is no calibration batch'}."
        raise InvalidSetting(f"{message} Pass token numbers of (samples, length), split into at least as many batches.")
    return total


def layer_sensitivities(
    block: Block,
    hidden: Iterable[Tensor],
    calls: Iterable[Call],
    names: Sequence[str],
    metric: Tensor,
    sample_offsets: Iterable[int],
    window: int | None = None,
) -> dict[str, Tensor]:
    r"""S = E[Jᵀ F J] for the outputs of the named layers, (out, out) float32, J the block's own Jacobian.

    One backward pass from random errors of covariance F, one for each token.

    block: a dense one. hidden: what enters it in the dense model, (batch, seq, model) for each batch. calls: how it is called
    on each. metric: F, (model, model), of the block's output. sample_offsets: each batch's first sample, counted over all.
    window: tokens that are summed at a time, whatever the batch; None sums all of a batch.
    """
    if not names:
        return {}
    heights, vectors = eigh(metric)
    root = (vectors * heights.clamp(min=0).sqrt()) @ vectors.T  # the symmetric one: eigenvectors flip their sign by rounding
    generator = torch.Generator(device=metric.device)
    sums = {name: Gram(block.layer(name).out_features, metric.device, window) for name in names}
    tokens = 0
    watching = gradient_hooks(block, {name: some.update for name, some in sums.items()})
    with require_grad_only(block.module), watching, torch.enable_grad():
        for entering, call, first in zip(hidden, calls, sample_offsets, strict=True):
            if first * entering.shape[1] >= TOKENS:
                break
            start = entering.detach().clone().requires_grad_(True)
            output = block(start, call)
            noise = torch.zeros(output.shape, device=metric.device)
            for number, errors in enumerate(noise, first):  # each by its number: the same however windows are batched
                if number * len(errors) < TOKENS:
                    generator.manual_seed(block.index * MANY + number)
                    errors.copy_(torch.randn(errors.shape, generator=generator, device=metric.device) @ root)
                    tokens += len(errors)
            torch.autograd.grad(output, start, noise.to(output.dtype))
    count = collectives.all_reduce_count(tokens, metric.device)
    for some in sums.values():
        some.reduce()
    # Of the last windows' tokens some had no error: what they sent back is zero, and they do not count.
    return {name: some.mean_over(count) for name, some in sums.items()}
