"""The dense model run to its end on some windows, and the way back: what a change of each block's output does to the loss.

The loss is that of labels drawn from the model itself, so that second moments of its gradients are the Fisher information.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sparsellm.activations.hooks import Hook
from sparsellm.activations.streams import Activations, stream_bytes
from sparsellm.checkpoints.block_loader import ResidentWeights, Weights
from sparsellm.errors import NonFinite, UnsupportedModel
from sparsellm.models.block_calls import Call
from sparsellm.models.blocks import Block, blocks_of
from sparsellm.models.contexts import compute_dtype_context, eval_mode, require_grad_only
from sparsellm.models.partial_forward import prediction_head
from sparsellm.runtime import collectives, devices
from sparsellm.runtime.offload import OffloadManager, TensorList
from sparsellm.solvers.linalg import all_finite

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DRAWN_ROWS = 32
"""Rows of running sums that are made at once: doubles for a whole window would be twice its logits."""


@dataclass(frozen=True, eq=False)
class BackwardPass:
    """The way back through a dense model that has been run to its end.

    gradients: those of the loss, by the output of the block that is reached next, (batch, seq, model) for each batch.
    entering: by block and batch, what entered it. inputs: how blocks are called.
    """

    blocks: Sequence[Block]
    entering: Sequence[TensorList]
    gradients: TensorList
    inputs: Activations
    compute: torch.dtype | None
    weights: Weights

    def iterate(
        self, stop: int = 0, watching: Callable[[Block], AbstractContextManager[object]] = nullcontext
    ) -> Iterator[Block]:
        """Each block from the last to `stop`, once the gradients have come through it: they are now those by its input.

        watching: a context for the passes through each block.
        """
        for block, read in reversed(list(zip(self.blocks, self.entering, strict=True))[stop:]):
            before = self.blocks[block.index - 1] if block.index > stop else None
            with self.weights.block(block, before), compute_dtype_context(block.module, self.compute):
                with watching(block):
                    for number, call in enumerate(self.inputs.calls(block)):
                        self.gradients[number] = _input_gradient(block, read[number], call, self.gradients[number])
                yield block


@contextmanager
def run_backward(
    model: PreTrainedModel,
    batches: Sequence[Tensor],
    compute: torch.dtype | None = None,
    weights: Weights | None = None,
    storage: OffloadManager | None = None,
) -> Iterator[BackwardPass]:
    """Within the context the dense model has been run, and the gradients by its last block's output are known.

    The loss is -log p of labels that are drawn from the model itself, window by window, each by its number. batches: token
    numbers, each (batch, seq), of which this process takes its share. compute, weights, storage: as for `walk`.
    """
    blocks, weights, storage = blocks_of(model), weights or ResidentWeights(), storage or OffloadManager()
    size = stream_bytes(model, collectives.shard(batches), compute)
    with eval_mode(model), require_grad_only(model), storage.new_lists(len(blocks) + 1, size) as (gradients, *entering):
        with weights.non_block():
            inputs = Activations.from_model(model, blocks, batches, compute, entering[:1])
        if entering[0] and entering[0][0].ndim != 3:
            raise UnsupportedModel(
                f"The blocks of a {type(model).__name__} pass on hidden states of shape {tuple(entering[0][0].shape)}, and the "
                "default's sensitivities need (batch, seq, model). Use a layer-wise method such as --method alps."
            )
        for block, next_block, read, written in zip(blocks, blocks[1:], entering, entering[1:], strict=False):
            with weights.block(block, next_block), compute_dtype_context(block.module, compute):
                for hidden, call in zip(read, inputs.calls(block), strict=True):
                    written.append(block(hidden, call))
        _last_gradients(model, blocks, collectives.shard(batches), inputs, entering[-1], gradients, compute, weights)
        yield BackwardPass(blocks, entering, gradients, inputs, compute, weights)


def _last_gradients(
    model: PreTrainedModel,
    blocks: Sequence[Block],
    batches: Sequence[Tensor],
    inputs: Activations,
    entering: TensorList,
    gradients: TensorList,
    compute: torch.dtype | None,
    weights: Weights,
) -> None:
    """Fill `gradients` with those of the loss by the last block's output, labels drawn from the model."""
    last = blocks[-1]
    with weights.block(last), compute_dtype_context(last.module, compute):
        for hidden, call in zip(entering, inputs.calls(last), strict=True):
            gradients.append(last(hidden, call))
    with weights.non_block(), prediction_head(model, blocks, compute) as predict:
        for number, (batch, first) in enumerate(zip(batches, inputs.sample_offsets, strict=True)):
            pieces: list[Tensor] = []
            output = gradients[number]
            generator = torch.Generator(device=output.device)
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
                labels = sample_labels(slopes, generator).unsqueeze(1)
                slopes.scatter_add_(1, labels, slopes.new_full(labels.shape, -1))
                pieces += torch.autograd.grad(logits, start, slopes.to(logits.dtype))
            gradients[number] = torch.cat(pieces)


def sample_labels(shares: Tensor, generator: torch.Generator) -> Tensor:
    """One number for each row of (rows, n) shares that sum to 1, each as likely as its share: (rows,).

    By one random number for a row and the shares' running sums, in double precision: `torch.multinomial` draws n for each,
    which for a vocabulary takes as long as the products.
    """
    wide = devices.widest_float(shares.device)
    places = torch.rand(len(shares), 1, generator=generator, device=shares.device, dtype=wide)
    found: list[Tensor] = []
    for some, place in zip(shares.split(DRAWN_ROWS), places.split(DRAWN_ROWS), strict=True):
        sums = some.cumsum(1, dtype=wide)
        found.append(torch.searchsorted(sums, place * sums[:, -1:], right=True).squeeze(1))
    return torch.cat(found).clamp_(max=shares.shape[1] - 1)


def _input_gradient(block: Block, hidden: Tensor, call: Call, gradient: Tensor) -> Tensor:
    """The gradient by a block's input, from that by its output."""
    with torch.enable_grad():
        start = hidden.detach().requires_grad_(True)
        (found,) = torch.autograd.grad(block(start, call), start, gradient)
    return found


@contextmanager
def gradient_hooks(block: Block, gradients: Mapping[str, Hook], reads: Mapping[str, Hook] | None = None) -> Iterator[None]:
    """Within the context, whatever goes back through the block is shown: by layer, the gradient by what it writes, (..., out).

    reads: who is shown what these layers read on the way there, (..., in).
    """

    def shows(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if reads:
                reads[name](inputs[0].detach())
            if not output.requires_grad:
                raise UnsupportedModel(
                    f"What the model predicts has no gradient by {block.full_name(name)}, which the default's sensitivities "
                    f"need. Leave it dense with --exclude '{name}', or use a layer-wise method such as --method alps."
                )
            output.register_hook(gradients[name])

        return hook

    with ExitStack() as stack:
        stack.enter_context(block.expose_layers(gradients))
        for name in gradients:
            stack.callback(block.layer(name).register_forward_hook(shows(name)).remove)
        yield


def first_windows(batches: Sequence[Tensor], tokens: int) -> list[Tensor]:
    """The windows that the first so many tokens are in."""
    found: list[Tensor] = []
    for batch in batches:
        missing = tokens - sum(some.numel() for some in found)
        if missing > 0:
            found.append(batch[: -(-missing // batch.shape[1])])
    return found
