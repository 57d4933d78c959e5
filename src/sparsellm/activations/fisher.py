r"""Cost of removing each weight, from the diagonal of the Fisher information.

To second order, setting one weight $W_{ij}$ to zero changes the predictions by
$\frac12 W_{ij}^2 E[g_i^2 x_j^2]$ nats of KL divergence (LeCun et al., Optimal brain damage, NIPS 1989). $x$ is the layer's
input, and $g$ the gradient of the loss with respect to its output, for a label drawn from the model's own predictions.
$E[g_i^2 x_j^2]$ is approximated by $E[g_i^2] E[x_j^2]$, the diagonals of K-FAC's two factors (Martens & Grosse, ICML 2015).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sparsellm.activations.backward import first_windows, gradient_hooks, run_backward
from sparsellm.models.blocks import Block
from sparsellm.models.loaded_model import LoadedModel
from sparsellm.solvers.statistics import InputRMS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENS, WINDOWS = 2048, 4
"""Minimum number of tokens, and of samples. Diagonals need few: a quarter of them gives almost the same allocation."""


@dataclass(frozen=True, eq=False)
class FisherFactors:
    """The diagonals of K-FAC's two factors for one layer, as root mean squares over all tokens.

    Attributes:
        gradients: (out,) float32, of the loss with respect to the layer's output.
        inputs: (in,) float32, of the layer's input.
    """

    gradients: Tensor
    inputs: Tensor

    def removal_cost(self, weight: Tensor, removed: Tensor) -> float:
        r"""The estimated KL divergence, in nats per token, of removing weights: $\frac12 \sum E[g_i^2] E[x_j^2] W_{ij}^2$.

        Args:
            weight: (out, in), the dense weight.
            removed: (out, in) bool, True for the removed weights.
        """
        squares, inputs = weight.float().square() * removed, self.inputs.to(weight.device).square()
        return 0.5 * float((squares @ inputs) @ self.gradients.to(weight.device).square())


@torch.no_grad()
def weight_costs(
    model: PreTrainedModel | LoadedModel,
    batches: Sequence[Tensor],
    planned: Collection[str],
    *,
    factors: dict[str, FisherFactors] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    r"""Yield twice the estimated cost of removing each weight of the planned layers alone, $E[g_i^2] E[x_j^2] W_{ij}^2$.

    Takes two forward passes and one backward pass of the samples.

    Args:
        model: The dense model.
        batches: Token ids, each (batch, seq). The samples with the first 2,048 tokens are used, and at least four, one by one,
            so that the result does not depend on the batch size.
        planned: Full names of the layers.
        factors: Receives the factors of each layer, by full name.

    Yields:
        The layer's full name and its costs, (out, in) float32, in nats per token. The last block's layers come first.
    """
    samples = [sample for batch in batches for sample in batch.split(1)]
    samples = first_windows(samples, max(TOKENS, WINDOWS * max((sample.shape[1] for sample in samples), default=0)))
    tokens = sum(sample.numel() for sample in samples)
    statistics: dict[str, tuple[InputRMS, InputRMS]] = {}

    def update_statistics(block: Block) -> AbstractContextManager[None]:
        statistics.clear()
        for name, layer in block.layers.items():
            if block.full_name(name) in planned:
                device = layer.weight.device
                statistics[name] = InputRMS(layer.out_features, device), InputRMS(layer.in_features, device)
        gradient_updates = {name: gradients.update for name, (gradients, _) in statistics.items()}
        return gradient_hooks(block, gradient_updates, {name: inputs.update for name, (_, inputs) in statistics.items()})

    with run_backward(model, samples) as backward:
        for block in backward.iterate(watching=update_statistics):
            for name, (gradients, inputs) in statistics.items():
                gradients.reduce()
                inputs.reduce()
                roots = block.layer(name).weight.detach().float() * gradients.rms.unsqueeze(1) * inputs.rms
                # The mean is over all tokens: those that are not routed to an expert contribute zero.
                share = inputs.tokens / tokens
                if factors is not None:
                    factors[block.full_name(name)] = FisherFactors(gradients.rms, inputs.rms * share**0.5)
                yield block.full_name(name), roots.square_().mul_(share)
