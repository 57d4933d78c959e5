"""What a model is worth: perplexity over windows of a text, with its standard error."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from sparsellm.activations.walk import walk
from sparsellm.checkpoints.block_loader import Weights
from sparsellm.checkpoints.loaded_model import LoadedModel
from sparsellm.checkpoints.loading import compute_dtype
from sparsellm.errors import InvalidSetting, NonFinite
from sparsellm.evaluation.measurements import Perplexity
from sparsellm.models.blocks import blocks_of
from sparsellm.models.contexts import compute_dtype_context, eval_mode
from sparsellm.models.partial_forward import prediction_head
from sparsellm.runtime import collectives
from sparsellm.runtime.offload import OffloadManager

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TOKENS = 4096  # in a batch, at most: beyond, attention scores leave the cache and a batch gets slower by the token
LOGITS_BYTES = 64 * 2**20  # what a batch's logits may take in float32: they outgrow all else in a forward pass

AMPLE = 2**30
"""Bytes of memory from which on a perplexity is measured on as many windows at a time as usual."""


def perplexity(
    model: PreTrainedModel,
    windows: Tensor,
    source: str = "",
    batch: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Perplexity:
    r"""The perplexity $\exp(\frac1n \sum_w \ell_w)$ of a model, $\ell_w$ the mean loss of window $w$'s length − 1 predictions.

    The protocol of SparseGPT, Wanda and SparseLLM; the standard error is, to first order, that of the mean loss times the
    value. The same for any `batch`, to rounding; the loss is computed in float32 whatever the model's dtype. The model's
    training mode is as it was afterwards.

    windows: (windows, length) int64, at least two tokens long, on any device.
    batch: windows at a time; None takes as many as keep the logits under 64 MiB and the tokens under 4,096. Of several
    processes, which must all call this, each measures its share. progress: called with the windows done and their total after
    each batch.
    Raises `InvalidSetting` for token numbers that the model does not know, `NonFinite` where the model gives NaN.
    """
    _check(model, windows)
    total, length = windows.shape
    batch = batch or default_batch_size(_vocabulary(model), length)
    started = time.perf_counter()
    found: list[list[float]] = []
    batches = torch.split(windows, batch)
    with eval_mode(model):
        for number, some in collectives.shard(list(enumerate(batches))):
            found.append(_losses(model, some, first=number * batch))
            if progress is not None:
                progress(min((number + 1) * batch, total), total)
    losses = [loss for some in collectives.all_gather(found) for loss in some]
    value, error = _to_perplexity(torch.tensor(losses, dtype=torch.float64))
    return Perplexity(value, error, total, length, source, time.perf_counter() - started)


@torch.no_grad()
def streamed_perplexity(
    model: PreTrainedModel,
    windows: Tensor,
    weights: Weights,
    storage: OffloadManager | None = None,
    compute: torch.dtype | None = None,
    source: str = "",
    batch: int | None = None,
) -> Perplexity:
    """As `perplexity`, all windows through one block before the next is read: for a model that is larger than memory.

    weights: where its tensors are. storage, compute: as for `walk`. Memory: one block, the hidden states of all windows (which
    `storage` may keep in files), and the logits of one batch.
    """
    _check(model, windows)
    total, length = windows.shape
    usual = default_batch_size(_vocabulary(model), length)
    batch = max(1, min(batch or usual, total // collectives.world()))
    batches = torch.split(windows, batch)
    started, blocks = time.perf_counter(), blocks_of(model)
    found: list[list[float]] = []
    for block, inputs in walk(model, batches, compute=compute, weights=weights, storage=storage):
        if block.index < len(blocks) - 1:
            continue
        inputs.advance(block)
        with weights.non_block(), prediction_head(model, blocks, compute) as predict:
            for (number, some), hidden in zip(collectives.shard(list(enumerate(batches))), inputs.pruned, strict=True):
                found.append(_window_losses(predict(some, hidden), some, first=number * batch))
    losses = [loss for some in collectives.all_gather(found) for loss in some]
    value, error = _to_perplexity(torch.tensor(losses, dtype=torch.float64))
    return Perplexity(value, error, total, length, source, time.perf_counter() - started)


def measure(loaded: LoadedModel, windows: Tensor, source: str = "", batch: int | None = None) -> Perplexity:
    """A loaded model's perplexity on windows. batch: windows at a time, by default as many as the memory lets be."""
    words = loaded.model.get_input_embeddings().num_embeddings
    batch = batch or batch_to_measure(words, windows.shape[1], loaded.memory)
    if not loaded.offloaded:
        return measured(loaded.model, windows, source, batch)
    return streamed_perplexity(loaded.model, windows, loaded.weights, loaded.storage, loaded.compute, source, batch)


def batch_to_measure(vocabulary: int, length: int, memory: int) -> int:
    """Windows at a time when a perplexity is measured: fewer than usual where there is less than a GiB of memory."""
    return default_batch_size(vocabulary, length, min(1.0, memory / AMPLE))


def measured(model: PreTrainedModel, windows: Tensor, source: str = "", batch: int | None = None) -> Perplexity:
    """A model's perplexity on windows, computed in the dtype that is fast on its device; its own dtype stays."""
    with compute_dtype_context(model, compute_dtype(model)):
        return perplexity(model, windows, source, batch)


def default_batch_size(vocabulary: int, length: int, share: float = 1.0) -> int:
    """Windows at a time: as many as keep the logits under 64 MiB and the tokens under 4,096, or a share of both."""
    return max(1, int(share * min(LOGITS_BYTES // (length * vocabulary * 4), TOKENS // length)))


@torch.no_grad()
def _losses(model: PreTrainedModel, windows: Tensor, first: int) -> list[float]:
    """The mean loss of each window, in float32; `first` is the number of the first one, for the message."""
    windows = windows.to(model.get_input_embeddings().weight.device)
    return _window_losses(model(input_ids=windows, use_cache=False).logits, windows, first)


def _window_losses(logits: Tensor, windows: Tensor, first: int) -> list[float]:
    """The mean loss of each window from logits of (batch, seq, vocabulary), in float32; `first` is the number of the first."""
    targets = windows[:, 1:].to(logits.device)
    # One window at a time, so that the float32 copy is of one window only.
    pairs = zip(logits[:, :-1], targets, strict=True)
    losses = torch.stack([cross_entropy(scores.float(), target) for scores, target in pairs]).tolist()
    for number, loss in enumerate(losses, first):
        if math.isnan(loss):
            raise NonFinite(
                f"The model's logits are not finite in window {number}: its perplexity does not exist. "
                "Look for NaN or infinity in its weights, or run it in bfloat16 or float32 if this is float16."
            )
    return [float(loss) for loss in losses]


def _to_perplexity(losses: Tensor) -> tuple[float, float | None]:
    """exp of the mean loss, and its standard error: by the delta method, exp(mean) times the mean's standard error."""
    value = float(losses.mean().exp())  # infinite past a loss of 709, where math.exp would raise
    if len(losses) == 1 or math.isinf(value):
        return value, None
    return value, value * float(losses.std(correction=1)) / math.sqrt(len(losses))


def _check(model: PreTrainedModel, windows: Tensor) -> None:
    """That there is something to predict, and that the model knows its tokens."""
    if windows.ndim != 2 or windows.shape[0] < 1 or windows.shape[1] < 2:
        raise InvalidSetting(f"`windows` must be (windows, length) with length at least 2, got {tuple(windows.shape)}.")
    known = len(model.get_input_embeddings().weight)
    if int(windows.max()) >= known:
        raise InvalidSetting(
            f"`windows` hold token {int(windows.max())}, but the model knows {known:,} tokens. "
            "Use the tokenizer that the model was trained with."
        )


def _vocabulary(model: PreTrainedModel) -> int:
    """How many logits a token gets."""
    return int(model.config.get_text_config().vocab_size)
