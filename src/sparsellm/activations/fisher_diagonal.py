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
from sparsellm.models.blocks import Block, blocks_of
from sparsellm.models.loaded_model import LoadedModel
from sparsellm.solvers.statistics import InputRMS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FISHER_TOKENS, WINDOWS = 2048, 4
"""Minimum number of tokens, and of samples. Diagonals need few: a quarter of them gives almost the same allocation."""


@dataclass(frozen=True, eq=False)
class FisherFactors:
    """The diagonals of K-FAC's two factors for one layer, as root mean squares. They do not depend on what is pruned.

    Attributes:
        gradients: (out,) float32, of the loss with respect to the layer's output.
        inputs: (in,) float32, of the layer's input, over the tokens that it receives.
        routed: Fraction of all tokens that the layer receives; less than 1 for experts.
    """

    gradients: Tensor
    inputs: Tensor
    routed: float

    def weight_costs(self, weight: Tensor) -> Tensor:
        """Twice the cost of removing each weight of the layer's weight, (out, in), alone."""
        gradients, inputs = self.gradients.to(weight.device), self.inputs.to(weight.device)
        roots = weight.detach().float() * gradients.unsqueeze(1) * inputs
        # The mean is over all tokens: those that are not routed to an expert contribute zero.
        return roots.square_().mul_(self.routed)


@torch.no_grad()
def weight_costs(
    model: PreTrainedModel | LoadedModel,
    batches: Sequence[Tensor],
    planned: Collection[str],
    *,
    factors: dict[str, FisherFactors] | None = None,
) -> Iterator[tuple[str, Tensor]]:
    r"""Yield twice the estimated cost of removing each weight of the planned layers alone, $E[g_i^2] E[x_j^2] W_{ij}^2$.

    Takes two forward passes and one backward pass of the samples, or only reads the weights if the factors are known.

    Args:
        batches: Token ids, each (batch, seq). The samples with the first 2,048 tokens are used, and at least four, one by one,
            so that the result does not depend on the batch size.
        factors: The factors of all planned layers from an earlier call, or an empty mapping that receives them.

    Yields:
        The layer's full name and its costs, (out, in) float32, in nats per token. The last block's layers come first.
    """
    loaded, factors = LoadedModel.of(model), {} if factors is None else factors
    if not factors:
        for block, name, found in _fisher_factors(loaded, batches, planned):
            factors[block.full_name(name)] = found
            yield block.full_name(name), found.weight_costs(block.layer(name).weight)
        return
    for block in reversed(blocks_of(loaded.model)):
        with loaded.weights.block(block):
            for name in block.layers:
                if (full_name := block.full_name(name)) in planned:
                    yield full_name, factors[full_name].weight_costs(block.layer(name).weight)


def _fisher_factors(
    loaded: LoadedModel, batches: Sequence[Tensor], planned: Collection[str]
) -> Iterator[tuple[Block, str, FisherFactors]]:
    """The factors of each planned layer, with its block and its name in it, while the block's weights are loaded."""
    samples = [sample for batch in batches for sample in batch.split(1)]
    samples = first_windows(samples, max(FISHER_TOKENS, WINDOWS * max((sample.shape[1] for sample in samples), default=0)))
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

    with run_backward(loaded, samples) as backward:
        for block in backward.iterate(watching=update_statistics):
            for name, (gradients, inputs) in statistics.items():
                gradients.reduce()
                inputs.reduce()
                yield block, name, FisherFactors(gradients.rms, inputs.rms, inputs.tokens / tokens)
