r"""Sensitivity of the model's predictions to errors in the output of a block or a layer, to second order.

To second order, an error $\delta$ in a block's output changes the predictions by $\frac12 E[\delta^\top F \delta]$ nats of KL
divergence, with $F = E[g g^\top]$ the Fisher information: $g$ is the gradient of the loss with respect to that output, for a
label drawn from the model's own predictions. With $g$ assumed independent of $\delta$ and of the other tokens, $F$ is one
(model, model) matrix per block. The Jacobian $J$ of the block's output with respect to a layer's output turns it into
$S = E[J^\top F J]$ for that layer. K-FAC uses the same matrices (Martens & Grosse, ICML 2015).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparsellm.activations.backward import first_windows, gradient_hooks, run_backward
from sparsellm.errors import InvalidSetting
from sparsellm.models.blocks import Block, Call
from sparsellm.models.contexts import require_grad_only
from sparsellm.models.loaded_model import LoadedModel
from sparsellm.runtime import collectives, devices
from sparsellm.runtime.offload import TensorList
from sparsellm.runtime.products import matmul
from sparsellm.solvers.linalg import eigh
from sparsellm.solvers.statistics import Gram

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SENSITIVITY_TOKENS, TOKENS_PER_WIDTH = 4096, 4
"""Maximum number of tokens, and the same in multiples of the model's width, for matrices of full rank. The error of F falls
with the root of the number, but a model pruned with four times as many is no better."""

MANY = 2**32
"""Larger than any number of samples: block index * MANY + sample index is a distinct seed."""


def sampled_tokens(width: int) -> int:
    """The number of tokens that F and S are estimated from in a model of this width, if there are as many."""
    return max(SENSITIVITY_TOKENS, TOKENS_PER_WIDTH * width)


def output_fisher(model: PreTrainedModel | LoadedModel, batches: Sequence[Tensor]) -> list[Tensor]:
    """Compute F for the output of each block.

    Takes two forward passes and one backward pass, and memory for the inputs of all blocks (which may be kept in
    files), for the gradients within one block, and for the logits of one sample. Labels are drawn with a seed per sample, so
    that the result depends on the batch size by rounding only.

    Args:
        batches: Token ids, each (batch, seq). The first samples are used, with `sampled_tokens` tokens.

    Returns:
        One (model, model) float32 matrix per block.
    """
    return [fisher for _, fisher in iterate_output_fisher(model, batches)][::-1]


@torch.no_grad()
def iterate_output_fisher(model: PreTrainedModel | LoadedModel, batches: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """Yield each block's index and its F as in `output_fisher`, one at a time from the last block to the first."""
    loaded = LoadedModel.of(model)
    batches = first_windows(batches, sampled_tokens(loaded.model.config.get_text_config().hidden_size))
    tokens = sum(batch.numel() for batch in batches)

    def mean(gradients: TensorList) -> Tensor:
        total = _second_moment(gradients)
        collectives.all_reduce_(total)
        return (total / tokens).float()

    with run_backward(loaded, batches) as backward:
        yield backward.blocks[-1].index, mean(backward.gradients)
        for block in backward.iterate(stop=1):
            yield block.index - 1, mean(backward.gradients)


def _second_moment(gradients: TensorList) -> Tensor:
    """Return the sum over tokens of g gᵀ, (model, model), in float64 as in `sparsellm.solvers.statistics`."""
    total: Tensor | None = None
    for batch in gradients:
        for rows in batch:  # sample by sample, so that the sums do not depend on the batch size
            product = matmul(rows.float().T, rows.float()).to(devices.widest_float(rows.device))
            total = product if total is None else total.add_(product)
    if total is None:
        count = f"are fewer calibration batches than the {collectives.world()} processes"
        message = f"There {count if collectives.world() > 1 else 'is no calibration batch'}."
        raise InvalidSetting(f"{message} Pass token numbers of (samples, length), split into at least as many batches.")
    return total


def layer_curvatures(
    block: Block,
    hidden: Iterable[Tensor],
    calls: Iterable[Call],
    names: Sequence[str],
    *,
    fisher: Tensor,
    offsets: Iterable[tuple[int, int]],
    window: int | None = None,
) -> dict[str, Tensor]:
    r"""Estimate S = E[Jᵀ F J] for the outputs of layers, with J the Jacobian of the block's output.

    Takes one backward pass from random errors with covariance F, one per token.

    Args:
        hidden: The block's input in the dense model, (batch, seq, model) for each batch.
        calls: The block's call on each batch.
        fisher: F of the block's output, (model, model).
        offsets: For each batch, the index of its first sample among all samples, and of its first token among all tokens.
        window: Tokens summed at a time, so that the sums do not depend on the batch size; None sums a whole batch.

    Returns:
        S by layer, (out, out) float32.
    """
    if not names:
        return {}
    eigenvalues, vectors = eigh(fisher)
    root = matmul(vectors * eigenvalues.clamp(min=0).sqrt(), vectors.T)  # symmetric, so the signs of eigenvectors do not matter
    generator = torch.Generator(device=fisher.device)
    sums = {name: Gram(block.layer(name).out_features, fisher.device, window) for name in names}
    tokens, limit = 0, sampled_tokens(len(fisher))
    hooks = gradient_hooks(block, {name: gram.update for name, gram in sums.items()})
    with require_grad_only(block.module), hooks, torch.enable_grad():
        for batch, call, (first_sample, first_token) in zip(hidden, calls, offsets, strict=True):
            if first_token >= limit:
                break
            leaf = batch.detach().clone().requires_grad_(True)
            output = block(leaf, call)
            noise = torch.zeros(output.shape, device=fisher.device)
            for number, errors in enumerate(noise):  # a seed per sample: independent of the batch size
                if first_token + number * len(errors) < limit:
                    generator.manual_seed(block.index * MANY + first_sample + number)
                    errors.copy_(matmul(torch.randn(errors.shape, generator=generator, device=fisher.device), root))
                    tokens += len(errors)
            torch.autograd.grad(output, leaf, noise.to(output.dtype))
    count = collectives.all_reduce_count(tokens, fisher.device)
    for gram in sums.values():
        gram.reduce()
    # Samples without errors have zero gradients and are not in the count.
    return {name: gram.mean_over(count) for name, gram in sums.items()}
