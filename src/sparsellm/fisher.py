r"""What removing each weight costs the model's predictions, by the diagonal of the Fisher information.

To second order, and while all others stay, setting $W_{ij}$ to zero moves the predictions by
$\frac12 W_{ij}^2 E[g_i^2 x_j^2]$ nats of KL divergence (LeCun et al., Optimal brain damage, NIPS 1989): $x$ is what the layer
reads, $g$ the gradient by what it writes, of the loss with a label drawn from the model itself. Here $E[g_i^2 x_j^2]$ is
taken as $E[g_i^2] E[x_j^2]$, the diagonals of K-FAC's two factors (Martens & Grosse, ICML 2015).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sparsellm import devices, distributed
from sparsellm.blocks import Block
from sparsellm.descent import descending, first_windows
from sparsellm.storage import Storage
from sparsellm.views import View
from sparsellm.weights import Weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENS, WINDOWS = 2048, 4
"""How many tokens are looked at, and windows at least. Diagonals need few: a quarter of them gives much the same shares."""


class Squares:
    """Sums of squares of what a layer reads, (in,), and of the gradients by what it writes, (out,), over so many tokens."""

    def __init__(self, layer: nn.Linear | View) -> None:
        device, wide = layer.weight.device, devices.widest(layer.weight.device)
        self.inputs = torch.zeros(layer.in_features, dtype=wide, device=device)
        self.gradients = torch.zeros(layer.out_features, dtype=wide, device=device)
        self.tokens = torch.zeros((), dtype=wide, device=device)

    def watch(self, module: nn.Module, arguments: Any, output: Tensor) -> None:
        """A forward hook: counts what is read now, and what comes back for it later."""
        read = arguments[0].detach().flatten(0, -2).float()
        self.inputs += read.square().sum(0)
        self.tokens += len(read)
        output.register_hook(self._came_back)

    def _came_back(self, gradient: Tensor) -> None:
        self.gradients += gradient.flatten(0, -2).float().square().sum(0)

    def reduce(self) -> None:
        """Of several processes, all that they saw."""
        distributed.sum_(self.inputs, self.gradients, self.tokens)

    def costs(self, weight: Tensor, every: int) -> Tensor:
        """W² E[g²] E[x²], (out, in) float32, of `every` tokens: those that an expert is not shown cost nothing."""
        scale = every * self.tokens.clamp(min=1)
        return weight.detach().float().square() * (self.gradients / scale).float().unsqueeze(1) * self.inputs.float()


@torch.no_grad()
def weight_costs(
    model: PreTrainedModel,
    batches: Sequence[Tensor],
    planned: Collection[str],
    compute: torch.dtype | None = None,
    weights: Weights | None = None,
    storage: Storage | None = None,
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
    squares: dict[str, Squares] = {}

    @contextmanager
    def watching(block: Block) -> Iterator[None]:
        names = [name for name in block.layers if block.full_name(name) in planned]
        squares.clear()
        squares.update({name: Squares(block.layer(name)) for name in names})
        with ExitStack() as stack:
            stack.enter_context(block.opened(names))
            for name in names:
                stack.callback(block.layer(name).register_forward_hook(squares[name].watch).remove)
            yield

    with descending(model, windows, compute, weights, storage) as descent:
        for block in descent.back(watching=watching):
            for name, some in squares.items():
                some.reduce()
                yield block.full_name(name), some.costs(block.layer(name).weight, every)
