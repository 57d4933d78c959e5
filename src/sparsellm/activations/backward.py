"""Forward pass of the dense model over a few samples, and the backward pass through its blocks, one block at a time.

The labels of the loss are drawn from the model's own predictions, so that the second moments of its gradients are the Fisher
information.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from sparsellm.activations.walk import Activations
from sparsellm.errors import NonFinite, UnsupportedModel
from sparsellm.models.blocks import Block, Call, blocks_of
from sparsellm.models.contexts import compute_dtype_context, eval_mode, product_dtype_context, require_grad_only
from sparsellm.models.loaded_model import LoadedModel, stream_bytes
from sparsellm.models.output_head import prediction_head
from sparsellm.runtime import collectives, devices
from sparsellm.runtime.offload import TensorList
from sparsellm.solvers.linalg import all_finite

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TensorHook = Callable[[Tensor], None]
"""Called with a layer's input, or the gradient of its output, for one batch: (..., in) or (..., out)."""

DRAWN_ROWS = 32
"""Rows of cumulative sums computed at once: for a whole sample, they would take twice the memory of its logits."""


@dataclass(frozen=True, eq=False)
class BackwardPass:
    """A backward pass through a dense model after its forward pass.

    Attributes:
        entering: The inputs of each block, one (batch, seq, model) tensor per batch.
        gradients: Gradients of the loss with respect to the output of the next block to be processed, one (batch, seq, model)
            tensor per batch.
        inputs: The activations that hold each block's calls.
    """

    blocks: Sequence[Block]
    entering: Sequence[TensorList]
    gradients: TensorList
    inputs: Activations
    loaded: LoadedModel

    def iterate(
        self, stop: int = 0, watching: Callable[[Block], AbstractContextManager[object]] = nullcontext
    ) -> Iterator[Block]:
        """Yield the blocks from the last to `stop`, each after its backward pass.

        `gradients` is then with respect to the block's input.

        Args:
            stop: Index of the last block to yield.
            watching: Returns a context manager for the passes through a block, such as `gradient_hooks`.
        """
        for block, hidden in reversed(list(zip(self.blocks, self.entering, strict=True))[stop:]):
            previous = self.blocks[block.index - 1] if block.index > stop else None
            with self.loaded.weights.block(block, previous), compute_dtype_context(block.module, self.loaded.compute):
                with watching(block):
                    for number, call in enumerate(self.inputs.calls(block)):
                        self.gradients[number] = _input_gradient(block, hidden[number], call, self.gradients[number])
                yield block


@contextmanager
def run_backward(model: PreTrainedModel | LoadedModel, batches: Sequence[Tensor]) -> Iterator[BackwardPass]:
    """Run the dense model and compute the gradients of the loss with respect to the last block's output.

    The loss is -log p of labels drawn from the model's own predictions, with a seed per sample.

    Args:
        batches: Token ids, each (batch, seq). This process runs its share of them.

    Raises:
        UnsupportedModel: The hidden states between blocks are not (batch, seq, model).
        NonFinite: The logits hold NaN or infinity.
    """
    loaded = LoadedModel.of(model)
    model, size = loaded.model, stream_bytes(loaded, batches)
    blocks = [replace(block, products=loaded.products) for block in blocks_of(model)]
    with eval_mode(model), require_grad_only(model), loaded.storage.new_lists(len(blocks) + 1, size) as (gradients, *entering):
        inputs = Activations.from_model(loaded, blocks, batches, entering[:1])
        if entering[0] and entering[0][0].ndim != 3:
            raise UnsupportedModel(
                f"The blocks of a {type(model).__name__} pass on hidden states of shape {tuple(entering[0][0].shape)}, and the "
                "default's sensitivities need (batch, seq, model). Use a layer-wise method such as `method='alps'`."
            )
        for block, next_block, hidden_in, hidden_out in zip(blocks, blocks[1:], entering, entering[1:], strict=False):
            with loaded.weights.block(block, next_block), compute_dtype_context(block.module, loaded.compute):
                for hidden, call in zip(hidden_in, inputs.calls(block), strict=True):
                    hidden_out.append(block(hidden, call))
        backward = BackwardPass(blocks, entering, gradients, inputs, loaded)
        _add_last_gradients(backward, collectives.shard(batches))
        yield backward


def _add_last_gradients(backward: BackwardPass, batches: Sequence[Tensor]) -> None:
    """Append the gradients of the loss with respect to the last block's output, for each of this process's batches."""
    last, loaded, inputs, gradients = backward.blocks[-1], backward.loaded, backward.inputs, backward.gradients
    with loaded.weights.block(last), compute_dtype_context(last.module, loaded.compute):
        for hidden, call in zip(backward.entering[-1], inputs.calls(last), strict=True):
            gradients.append(last(hidden, call))
    with loaded.weights.non_block(), prediction_head(loaded.model, backward.blocks, loaded.compute) as predict:
        for number, (batch, (offset, _)) in enumerate(zip(batches, inputs.offsets, strict=True)):
            sample_gradients: list[Tensor] = []
            output = gradients[number]
            generator = torch.Generator(device=output.device)
            for sample, hidden in zip(batch.split(1), output.split(1), strict=True):
                generator.manual_seed(offset + len(sample_gradients))
                with torch.enable_grad(), product_dtype_context(output.device, loaded.products):
                    leaf = hidden.detach().requires_grad_(True)
                    logits = predict(sample, leaf).flatten(0, 1)
                if not all_finite(logits):
                    raise NonFinite(
                        "The dense model's logits are not finite. Look for NaN in its weights, or try `dtype='float32'`."
                    )
                # The gradient of -log p(label) with respect to the logits is p - onehot(label).
                logit_gradients = logits.detach().float().softmax(-1)
                labels = sample_labels(logit_gradients, generator).unsqueeze(1)
                logit_gradients.scatter_add_(1, labels, logit_gradients.new_full(labels.shape, -1))
                sample_gradients += torch.autograd.grad(logits, leaf, logit_gradients.to(logits.dtype))
            gradients[number] = torch.cat(sample_gradients)


def sample_labels(shares: Tensor, generator: torch.Generator) -> Tensor:
    """Draw one class per row by inverting the cumulative distribution, with one uniform number per row.

    `torch.multinomial` draws n numbers per row, which for a vocabulary takes as long as the matrix products.

    Args:
        shares: (rows, n) probabilities; each row sums to 1.
        generator: Source of the uniform numbers, on the device of `shares`.

    Returns:
        (rows,) class indices.
    """
    wide = devices.widest_float(shares.device)
    uniform = torch.rand(len(shares), 1, generator=generator, device=shares.device, dtype=wide)
    labels: list[Tensor] = []
    for rows, draws in zip(shares.split(DRAWN_ROWS), uniform.split(DRAWN_ROWS), strict=True):
        cumulative = rows.cumsum(1, dtype=wide)
        labels.append(torch.searchsorted(cumulative, draws * cumulative[:, -1:], right=True).squeeze(1))
    return torch.cat(labels).clamp_(max=shares.shape[1] - 1)


def _input_gradient(block: Block, hidden: Tensor, call: Call, gradient: Tensor) -> Tensor:
    """Return the gradient with respect to a block's input, given that with respect to its output."""
    with torch.enable_grad():
        leaf = hidden.detach().requires_grad_(True)
        (input_gradient,) = torch.autograd.grad(block(leaf, call), leaf, gradient)
    return input_gradient


@contextmanager
def gradient_hooks(
    block: Block, gradients: Mapping[str, TensorHook], inputs: Mapping[str, TensorHook] | None = None
) -> Iterator[None]:
    """Call hooks on the gradients, and optionally the inputs, of a block's layers within the context.

    Args:
        gradients: By layer, the hook for the gradient with respect to the layer's output, (..., out).
        inputs: By layer, the hook for the layer's input, (..., in), called in the forward pass. The same layers.

    Raises:
        UnsupportedModel: A pass runs a layer whose output has no gradient.
    """

    def make_hook(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: tuple[Tensor, ...], output: Tensor) -> None:
            if inputs:
                inputs[name](arguments[0].detach())
            if not output.requires_grad:
                raise UnsupportedModel(
                    f"What the model predicts has no gradient by {block.full_name(name)}, which the default's sensitivities "
                    f"need. Leave it dense with `exclude={name!r}`, or use a layer-wise method such as `method='alps'`."
                )
            output.register_hook(gradients[name])

        return hook

    with ExitStack() as stack:
        stack.enter_context(block.expose_layers(gradients))
        for name in gradients:
            stack.callback(block.layer(name).register_forward_hook(make_hook(name)).remove)
        yield


def first_windows(batches: Sequence[Tensor], tokens: int) -> list[Tensor]:
    """Return the samples that hold the first `tokens` tokens, in batches of (batch, seq)."""
    selected: list[Tensor] = []
    for batch in batches:
        missing = tokens - sum(samples.numel() for samples in selected)
        if missing > 0:
            selected.append(batch[: -(-missing // batch.shape[1])])
    return selected
