r"""How much an error in a block's or a layer's outputs costs further down, to second order.

The distance of the pruned model's predictions from the dense model's, KL divergence, is to second order
$\frac12 E[\delta^\top F \delta]$ in an error $\delta$ of a block's output, with $F = E[g g^\top]$, $g$ the gradient of the
loss by that output when the label is drawn from the model itself (the Fisher information). Taken as independent of the error,
token by token, $F$ is one (model, model) matrix for a block, and through a block's own Jacobian $J$ it becomes
$S = E[J^\top F J]$ for each layer. The same matrices serve K-FAC (Martens & Grosse, ICML 2015).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sparsellm import devices, distributed
from sparsellm.activations import Activations, stream_bytes
from sparsellm.blocks import Block, blocks_of
from sparsellm.calls import Call
from sparsellm.errors import InvalidSetting, NonFinite
from sparsellm.linalg import all_finite, spectrum
from sparsellm.modes import computed_in, evaluating, only_trained
from sparsellm.moments import Gram
from sparsellm.stand_ins import predicting
from sparsellm.storage import Kept, Storage
from sparsellm.weights import InMemory, Weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENS = 16384
"""How many tokens are looked at, at most: some times the width of a stream, for matrices of full rank."""

DRAWN_ROWS = 32
"""Rows of running sums that are made at once: doubles for a whole window would be twice its logits."""

MANY = 2**32
"""More windows than there ever are: a block's number times this, and a window's, make a seed of their own."""


def output_sensitivities(
    model: PreTrainedModel,
    batches: Sequence[Tensor],
    compute: torch.dtype | None = None,
    weights: Weights | None = None,
    storage: Storage | None = None,
) -> list[Tensor]:
    """F for the output of each block, (model, model) float32, from one pass of the dense model and back, block by block.

    batches: token numbers, each (batch, seq); the windows of the first 16,384 tokens are used. compute, weights, storage: as
    for `walk`. Cost: two forward passes and a backward one; memory for the inputs of all blocks, which `storage` may keep in
    files, for the gradients within one block, and for the logits of one window. The same for the same model and windows, to
    rounding: labels are drawn window by window, each by its number.
    """
    return [found for _, found in each_sensitivity(model, batches, compute, weights, storage)][::-1]


@torch.no_grad()
def each_sensitivity(
    model: PreTrainedModel,
    batches: Sequence[Tensor],
    compute: torch.dtype | None = None,
    weights: Weights | None = None,
    storage: Storage | None = None,
) -> Iterator[tuple[int, Tensor]]:
    """As `output_sensitivities`, one by one with the block's number, the last block's first: to be kept elsewhere."""
    blocks, weights, storage = blocks_of(model), weights or InMemory(), storage or Storage()
    batches = _first(batches, TOKENS)
    tokens = sum(batch.numel() for batch in batches)

    def mean(total: Tensor) -> Tensor:
        distributed.sum_(total)
        return (total / tokens).float()

    size = stream_bytes(model, distributed.dealt(batches), compute)
    with evaluating(model), only_trained(model), storage.lists(len(blocks) + 1, size) as (gradients, *entering):
        with weights.ends():
            inputs = Activations.entering(model, blocks, batches, compute, entering[:1])
        for block, then, read, written in zip(blocks, blocks[1:], entering, entering[1:], strict=False):
            with weights.block(block, then), computed_in(block.module, compute):
                for hidden, call in zip(read, inputs.calls(block), strict=True):
                    written.append(block(hidden, call))
        last = _last_gradients(model, blocks, distributed.dealt(batches), inputs, entering[-1], gradients, compute, weights)
        yield blocks[-1].index, mean(last)
        for block, read in zip(reversed(blocks), reversed(entering), strict=True):
            if block.index == 0:
                break
            before = blocks[block.index - 1] if block.index > 1 else None
            with weights.block(block, before), computed_in(block.module, compute):
                for number, call in enumerate(inputs.calls(block)):
                    gradients[number] = _through(block, read[number], call, gradients[number])
            yield block.index - 1, mean(_second_moment(gradients))


def _last_gradients(
    model: PreTrainedModel,
    blocks: Sequence[Block],
    batches: Sequence[Tensor],
    inputs: Activations,
    entering: Kept,
    gradients: Kept,
    compute: torch.dtype | None,
    weights: Weights,
) -> Tensor:
    """Fill `gradients` with those of the loss by the last block's output, labels drawn from the model; their second moment."""
    generator, last = torch.Generator(device=entering[0].device), blocks[-1]
    with weights.block(last), computed_in(last.module, compute):
        for hidden, call in zip(entering, inputs.calls(last), strict=True):
            gradients.append(last(hidden, call))
    with weights.ends(), predicting(model, blocks, compute) as predict:
        for number, (batch, first) in enumerate(zip(batches, inputs.firsts, strict=True)):
            pieces: list[Tensor] = []
            output = gradients[number]
            for window, hidden in zip(batch.split(1), output.split(1), strict=True):
                generator.manual_seed(first + len(pieces))
                with torch.enable_grad():
                    start = hidden.detach().requires_grad_(True)
                    logits = predict(window, start).flatten(0, 1)
                if not all_finite(logits):
                    raise NonFinite(
                        "The dense model's logits are not finite. Look for NaN in its weights, or try --dtype float32."
                    )
                # By the logits, the gradient of -log p(label) is p less 1 at the label.
                slopes = logits.detach().float().softmax(-1)
                labels = drawn(slopes, generator).unsqueeze(1)
                slopes.scatter_add_(1, labels, slopes.new_full(labels.shape, -1))
                pieces += torch.autograd.grad(logits, start, slopes.to(logits.dtype))
            gradients[number] = torch.cat(pieces)
    return _second_moment(gradients)


def drawn(shares: Tensor, generator: torch.Generator) -> Tensor:
    """One number for each row of (rows, n) shares that sum to 1, each as likely as its share: (rows,).

    By one random number for a row and the shares' running sums, in double precision: `torch.multinomial` draws n for each,
    which for a vocabulary takes as long as the products.
    """
    wide = devices.widest(shares.device)
    places = torch.rand(len(shares), 1, generator=generator, device=shares.device, dtype=wide)
    found: list[Tensor] = []
    for some, place in zip(shares.split(DRAWN_ROWS), places.split(DRAWN_ROWS), strict=True):
        sums = some.cumsum(1, dtype=wide)
        found.append(torch.searchsorted(sums, place * sums[:, -1:], right=True).squeeze(1))
    return torch.cat(found).clamp_(max=shares.shape[1] - 1)


def _through(block: Block, hidden: Tensor, call: Call, gradient: Tensor) -> Tensor:
    """The gradient by a block's input, from that by its output."""
    with torch.enable_grad():
        start = hidden.detach().requires_grad_(True)
        (found,) = torch.autograd.grad(block(start, call), start, gradient)
    return found


def _second_moment(gradients: Kept) -> Tensor:
    """The sum over tokens of g gᵀ, (model, model), in float64 as in `sparsellm.moments`."""
    total: Tensor | None = None
    for some in gradients:
        rows = some.flatten(0, -2).float()
        product = (rows.T @ rows).to(devices.widest(rows.device))
        total = product if total is None else total.add_(product)
    if total is None:
        few = f"are fewer calibration batches than the {distributed.world()} processes"
        told = f"There {few if distributed.world() > 1 else 'is no calibration batch'}."
        raise InvalidSetting(f"{told} Pass token numbers of (samples, length), split into at least as many batches.")
    return total


def _first(batches: Sequence[Tensor], tokens: int) -> list[Tensor]:
    """The windows that the first so many tokens are in."""
    found: list[Tensor] = []
    for batch in batches:
        missing = tokens - sum(some.numel() for some in found)
        if missing > 0:
            found.append(batch[: -(-missing // batch.shape[1])])
    return found


def layer_sensitivities(
    block: Block,
    hidden: Iterable[Tensor],
    calls: Iterable[Call],
    names: Sequence[str],
    metric: Tensor,
    firsts: Iterable[int],
) -> dict[str, Tensor]:
    r"""S = E[Jᵀ F J] for the outputs of the named layers, (out, out) float32, J the block's own Jacobian.

    One backward pass from random errors of covariance F, one for each token.

    block: a dense one. hidden: what enters it in the dense model, (batch, seq, model) for each batch. calls: how it is called
    on each. metric: F, (model, model), of the block's output. firsts: the number of each batch's first window among all.
    """
    if not names:
        return {}
    heights, vectors = spectrum(metric)
    root = (vectors * heights.clamp(min=0).sqrt()) @ vectors.T  # the symmetric one: eigenvectors flip their sign by rounding
    generator = torch.Generator(device=metric.device)
    sums = {name: Gram(block.layer(name).out_features, metric.device) for name in names}
    tokens = 0

    def keeps(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: Any, output: Tensor) -> None:
            output.register_hook(sums[name].update)

        return hook

    hooks = [block.layer(name).register_forward_hook(keeps(name)) for name in names]
    try:
        with only_trained(block.module), block.opened(names), torch.enable_grad():
            for entering, call, first in zip(hidden, calls, firsts, strict=True):
                if first * entering.shape[1] >= TOKENS:
                    break
                start = entering.detach().clone().requires_grad_(True)
                output = block(start, call)
                noise = torch.zeros(output.shape, device=metric.device)
                for number, window in enumerate(noise, first):  # each by its number: the same however windows are batched
                    if number * len(window) < TOKENS:
                        generator.manual_seed(block.index * MANY + number)
                        window.copy_(torch.randn(window.shape, generator=generator, device=metric.device))
                        tokens += len(window)
                torch.autograd.grad(output, start, (noise @ root).to(output.dtype))
    finally:
        for one in hooks:
            one.remove()
    count = distributed.total(tokens, metric.device)
    for some in sums.values():
        some.reduce()
    # Of the last windows' tokens some had no error: what they sent back is zero, and they do not count.
    return {name: some.matrix * (some.tokens / count) for name, some in sums.items()}
