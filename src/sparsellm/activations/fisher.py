r"""What removing each weight costs the model's predictions, by the diagonal of the Fisher information.

To second order, and while all others stay, setting $W_{ij}$ to zero moves the predictions by
$\frac12 W_{ij}^2 E[g_i^2 x_j^2]$ nats of KL divergence (LeCun et al., Optimal brain damage, NIPS 1989): $x$ is what the layer
reads, $g$ the gradient by what it writes, of the loss with a label drawn from the model itself. Here $E[g_i^2 x_j^2]$ is
taken as $E[g_i^2] E[x_j^2]$, the diagonals of K-FAC's two factors (Martens & Grosse, ICML 2015).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparsellm.activations.backward import first_windows, gradient_hooks, run_backward
from sparsellm.checkpoints.block_loader import Weights
from sparsellm.models.blocks import Block
from sparsellm.runtime.offload import OffloadManager
from sparsellm.solvers.statistics import InputRMS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENS, WINDOWS = 2048, 4
"""How many tokens are looked at, and windows at least. Diagonals need few: a quarter of them gives much the same shares."""


@torch.no_grad()
def weight_costs(
    model: PreTrainedModel,
    batches: Sequence[Tensor],
    planned: Collection[str],
    compute: torch.dtype | None = None,
    weights: Weights | None = None,
    storage: OffloadManager | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """By full name, twice what removing each weight of a planned layer alone costs, (out, in) float32, in nats a token.

    The last block's layers come first. batches: token numbers, each (batch, seq); the windows of the first 2,048 tokens are
    used, and four at least, one by one: the same however they are batched. planned: layers by full name. compute, weights,
    storage: as for `walk`.
    Cost: two forward passes of these windows and a backward one.
    """
    windows = [window for batch in batches for window in batch.split(1)]
    windows = first_windows(windows, max(TOKENS, WINDOWS * windows[0].shape[1] if windows else 0))
    every = sum(window.numel() for window in windows)
    sums: dict[str, tuple[InputRMS, InputRMS]] = {}

    def watching(block: Block) -> AbstractContextManager[None]:
        sums.clear()
        for name, layer in block.layers.items():
            if block.full_name(name) in planned:
                device = layer.weight.device
                sums[name] = InputRMS(layer.out_features, device), InputRMS(layer.in_features, device)
        gradients = {name: gradient.update for name, (gradient, _) in sums.items()}
        return gradient_hooks(block, gradients, {name: read.update for name, (_, read) in sums.items()})

    with run_backward(model, windows, compute, weights, storage) as descent:
        for block in descent.iterate(watching=watching):
            for name, (gradient, read) in sums.items():
                gradient.reduce()
                read.reduce()
                sizes = block.layer(name).weight.detach().float() * gradient.rms.unsqueeze(1) * read.rms
                # Tokens that an expert is not shown cost nothing.
                yield block.full_name(name), sizes.square_().mul_(read.tokens / every)
