r"""How much an error in a block's or a layer's outputs costs further down, to second order.

The distance of the pruned model's predictions from the dense model's, KL divergence, is to second order
$\frac12 E[\delta^\top F \delta]$ in an error $\delta$ of a block's output, with $F = E[g g^\top]$, $g$ the gradient of the
loss by that output when the label is drawn from the model itself (the Fisher information). Taken as independent of the error,
token by token, $F$ is one (model, model) matrix for a block, and through a block's own Jacobian $J$ it becomes
$S = E[J^\top F J]$ for each layer. The same matrices serve K-FAC (Martens & Grosse, ICML 2015).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sparsellm import distributed
from sparsellm.activations import Activations
from sparsellm.blocks import Block, blocks_of, checkpointed, computed_in, evaluating, only_trained
from sparsellm.errors import NonFinite

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENS = 16384
"""How many tokens are looked at, at most: some times the width of a stream, for matrices of full rank."""


def output_sensitivities(model: PreTrainedModel, batches: Sequence[Tensor], compute: torch.dtype | None = None) -> list[Tensor]:
    """F for the output of each block, (model, model) float32, from one backward pass of the dense model, block by block.

    batches: token numbers, each (batch, seq); the first 16,384 tokens are used. compute: as for `walk`.
    Cost: three forward passes and a backward one; memory for the gradients within one block and for the logits of one window.
    The same for the same model and batches: labels are drawn with a fixed seed.
    """
    blocks = blocks_of(model)
    width = 0
    found: list[Tensor | None] = [None] * len(blocks)
    generator = torch.Generator(device=model.device).manual_seed(0)

    def keeps(number: int) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Tensor | tuple[Tensor, ...]) -> None:
            def take(gradient: Tensor) -> None:
                rows = gradient.flatten(0, -2).float()
                product = rows.T @ rows
                before = found[number]
                found[number] = product if before is None else before.add_(product)

            (output[0] if isinstance(output, tuple) else output).register_hook(take)

        return hook

    def opens(module: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        (arguments[0] if arguments else keywords["hidden_states"]).requires_grad_(True)

    hooks = [block.module.register_forward_hook(keeps(block.index)) for block in blocks]
    hooks.append(blocks[0].module.register_forward_pre_hook(opens, with_kwargs=True))
    try:
        with evaluating(model), computed_in(model, compute), only_trained(model), checkpointed(blocks), torch.enable_grad():
            for window in (window for batch in batches for window in batch.split(1)):
                if width >= TOKENS:
                    break
                width += window.numel()
                logits = model(input_ids=window.to(model.device), use_cache=False).logits.flatten(0, 1).float()
                if not bool(logits.isfinite().all()):
                    raise NonFinite(
                        "The dense model's logits are not finite. Look for NaN in its weights, or try --dtype float32."
                    )
                labels = torch.multinomial(logits.detach().softmax(-1), 1, generator=generator).squeeze(1)
                cross_entropy(logits, labels, reduction="sum").backward()
    finally:
        for one in hooks:
            one.remove()
    sums = [some for some in found if some is not None]
    tokens = torch.tensor(float(width), device=sums[0].device)
    distributed.sum_(tokens, *sums)
    return [some / tokens for some in sums]


def layer_sensitivities(inputs: Activations, block: Block, names: Sequence[str], metric: Tensor) -> dict[str, Tensor]:
    r"""S = E[Jᵀ F J] for the outputs of the named layers, (out, out) float32, J the block's own Jacobian on the dense stream.

    One backward pass of the dense block from random errors of covariance F, one for each token.

    inputs: where the block's teacher and the dense stream are. metric: F, (model, model), of the block's output.
    """
    if inputs.dense is None or inputs.teacher is None:
        raise TypeError("There is no dense stream: ask for one with teacher=True.")
    if not names:
        return {}
    teacher = inputs.teacher
    heights, vectors = torch.linalg.eigh(metric)
    root = vectors * heights.clamp(min=0).sqrt()
    generator = torch.Generator(device=metric.device).manual_seed(block.index)
    sums: dict[str, Tensor] = {}
    tokens = 0

    def keeps(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: Any, output: Tensor) -> None:
            def take(gradient: Tensor) -> None:
                rows = gradient.flatten(0, -2).float()
                sums[name] = rows.T @ rows + sums.get(name, 0)

            output.register_hook(take)

        return hook

    hooks = [teacher.layer(name).register_forward_hook(keeps(name)) for name in names]
    try:
        with only_trained(teacher.module), torch.enable_grad():
            for hidden, call in zip(inputs.dense, inputs.calls(block), strict=True):
                if tokens >= TOKENS:
                    break
                start = hidden.detach().clone().requires_grad_(True)
                output = teacher(start, call)
                noise = torch.zeros(output.shape, device=metric.device)
                for window in noise:  # drawn one by one, up to the limit: the same however windows are batched
                    if tokens < TOKENS:
                        window.copy_(torch.randn(window.shape, generator=generator, device=metric.device))
                        tokens += len(window)
                torch.autograd.grad(output, start, (noise @ root.T).to(output.dtype))
    finally:
        for one in hooks:
            one.remove()
    count = torch.tensor(float(tokens), device=metric.device)
    distributed.sum_(count, *sums.values())
    return {name: some / count for name, some in sums.items()}
