"""Perplexity on sequences of a text, with its standard error."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from sparsellm.activations.streams import CaptureRequest, cast
from sparsellm.activations.walk import walk
from sparsellm.checkpoints.loading import compute_dtype
from sparsellm.checkpoints.remarks import remark
from sparsellm.errors import InvalidSetting, NonFinite, dtype_name
from sparsellm.evaluation.differences import Parts
from sparsellm.evaluation.results import Perplexity
from sparsellm.models.blocks import Block, blocks_of
from sparsellm.models.contexts import compute_dtype_context, eval_mode
from sparsellm.models.loaded_model import LoadedModel, check_in_memory, input_device, model_errors
from sparsellm.models.output_head import check_causal, other_last_token, prediction_head
from sparsellm.runtime import collectives, devices
from sparsellm.runtime.products import fast_linear_layers
from sparsellm.solvers.linalg import all_finite
from sparsellm.texts.padding import count_tokens, sequence_lengths, token_digest, unpadded_batches

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MEASURED_TOKENS = 4096  # maximum per batch: beyond, attention scores exceed the CPU cache and the time per token grows
LOGITS_MEMORY = 64 * 2**20  # maximum size of a batch's float32 logits, the largest tensor of a forward pass

ON_IDS = "on token ids"
"""How a model is run, in errors."""

TRIED_SEQUENCES, TRIED_TOKENS = 4, 128
"""Sequences on which a model is tried, and most tokens of each: from their starts, where activations are largest (Sun et al.,
Massive activations in large language models, COLM 2024)."""

AMPLE = 2**30
"""Bytes of memory below which `batch_to_measure` reduces the batch size."""


def token_perplexity(
    model: PreTrainedModel,
    windows: Tensor,
    source: str = "",
    *,
    batch: int | None = None,
    progress: Callable[[float, int], None] | None = None,
) -> Perplexity:
    r"""Compute the perplexity, the exponential of the mean loss of all predictions: of each sequence's length − 1.

    This is the protocol of SparseGPT, Wanda and SparseLLM. With $n_i$ the predictions of sequence $i$ and $\ell_i$ their mean
    loss, the mean is $m = \sum_i n_i \ell_i / \sum_i n_i$. Its standard error is that of a ratio estimator over sequences,
    $\sqrt{\frac{k}{k-1} \sum_i n_i^2 (\ell_i - m)^2} / \sum_i n_i$ for $k$ sequences (Cochran, Sampling techniques, 1977,
    chapter 6), times the perplexity for that of the perplexity (first order). The loss is computed in float32 for any model
    dtype. The model's training mode is restored. In a distributed run, every process must call this function; each evaluates a
    shard of the batches.

    Args:
        model: The model.
        windows: Token ids, (sequences, length) int64 with length at least 2, on any device; `PADDING` after the end of shorter
            sequences, which are each a batch.
        source: Name of the text, for the result.
        batch: Sequences per batch, which changes the result by rounding only; None for the largest number with at most 64 MiB
            of logits and 4,096 tokens.
        progress: Called after each batch with the number of evaluated sequences and their total.

    Raises:
        InvalidSetting: If the shape is invalid or a token id exceeds the model's vocabulary.
        NonFinite: If the model's logits contain NaN.
    """
    _check_resident(model, windows)
    total, length = windows.shape
    batch = batch or batch_to_measure(_vocabulary(model), length)
    started = time.perf_counter()
    local: list[list[float]] = []
    batches = unpadded_batches(windows, batch)
    batch = len(batches[0])
    with eval_mode(model):
        for number, sequences in collectives.shard(list(enumerate(batches))):
            local.append(_losses(model, sequences, first=number * batch))
            if progress is not None:
                progress(min((number + 1) * batch, total), total)
    return _gather(local, windows, source, started=started)


@torch.no_grad()
def streamed_perplexity(
    loaded: LoadedModel,
    windows: Tensor,
    source: str = "",
    *,
    batch: int | None = None,
    progress: Callable[[float, int], None] | None = None,
) -> Perplexity:
    """Compute the perplexity block by block, for a model that is larger than memory.

    All sequences pass through a block before the next one is loaded. Memory holds one block, the hidden states of all
    sequences (which the model's storage may offload) and the logits of one batch.

    Args:
        loaded: The model, with or without its weights in memory.
        windows: Token ids as for `token_perplexity`.
        batch: Maximum number of sequences per batch; None as for `token_perplexity`.
        progress: As for `token_perplexity`; a sequence counts as done in part after each block.
    """
    model = loaded.model
    _check(model, windows)
    total, length = windows.shape
    batch = batch or batch_to_measure(_vocabulary(model), length)
    batch = max(1, min(batch, total // collectives.world()))
    batches = unpadded_batches(windows, batch)
    batch = len(batches[0])
    started, blocks = time.perf_counter(), blocks_of(model)
    local: list[list[float]] = []
    starts = _starts(model, windows)
    others = other_last_token(starts)
    tried = [x for x in (starts, others) for _ in range(collectives.world())]  # a pass of their own would read all blocks again
    own, finite = _narrow_dtype(model, loaded.compute), True

    def report(part: int, index: int) -> None:
        passed = min((index * collectives.world() + 1) * batch, total)
        if progress is not None:
            progress((part * total + passed) / (len(blocks) + 1), total)  # the prediction head counts as a block

    for block, inputs in walk(replace(loaded, products=None), [*batches, *tried]):  # texts are measured in `compute`
        outputs = inputs.pruned
        if own and finite:
            hidden, call = outputs[len(outputs) - 2], inputs.calls(block)[-2]
            with _stored_dtype(block, own):
                finite = _is_finite(partial(block, cast(hidden, own), cast(call, own)))
        for index, _ in enumerate(outputs.run(block, CaptureRequest(), advance=True)):
            report(block.index, index)
        if block.index < len(blocks) - 1:
            continue
        last, other = (outputs[len(outputs) - place] for place in (2, 1))
        with loaded.weights.non_block():
            with prediction_head(model, blocks, loaded.compute) as predict:
                check_causal(model, predict(starts, last), predict(others, other), dtype=loaded.computed_in)
                for (number, sequences), hidden in zip(collectives.shard(list(enumerate(batches))), outputs, strict=False):
                    local.append(_sequence_losses(predict(sequences, hidden), sequences, first=number * batch))
                    report(len(blocks), len(local) - 1)
            if own and finite:
                with prediction_head(model, blocks) as predict:
                    finite = _is_finite(partial(predict, starts, cast(last, own)))
    if not finite:
        _remark_overflow(model, source)
    return _gather(local, windows, source, started=started)


def measure_perplexity(
    model: PreTrainedModel | LoadedModel,
    windows: Tensor,
    source: str = "",
    *,
    batch: int | None = None,
    progress: Callable[[float, int], None] | None = None,
) -> Perplexity:
    """Compute the perplexity of a model, in its device's fast compute dtype and block by block if it is offloaded.

    Args:
        model: The model, with its weights in memory if it is none that this package has loaded.
        windows: Token ids, (sequences, length) int64.
        batch: Sequences per batch; None for a number that fits into the model's memory budget.
        progress: As for `token_perplexity`.
    """
    loaded = LoadedModel.of(model)
    vocabulary = loaded.model.get_input_embeddings().num_embeddings
    batch = batch or batch_to_measure(vocabulary, windows.shape[1], loaded.memory)
    if loaded.weights.on_disk:
        return streamed_perplexity(loaded, windows, source, batch=batch, progress=progress)
    with compute_dtype_context(loaded.model, compute_dtype(loaded.model)), fast_linear_layers():
        result = token_perplexity(loaded.model, windows, source, batch=batch, progress=progress)
    remark_overflow(loaded.model, windows, source)
    return result


def _starts(model: PreTrainedModel, windows: Tensor) -> Tensor:
    """The starts of some longer sequences, (sequences, tokens), to try a model on; with logits as small as a batch's."""
    lengths = sequence_lengths(windows)
    rows = (lengths >= lengths.median()).nonzero().flatten()
    rows = rows[:: -(-len(rows) // TRIED_SEQUENCES)]
    room = LOGITS_MEMORY // (8 * len(rows) * _vocabulary(model))
    return windows[rows, : max(2, min(TRIED_TOKENS, room, int(lengths[rows].min())))]


@torch.no_grad()
def refuse_unless_causal(model: PreTrainedModel, windows: Tensor) -> None:
    """Raise UnsupportedModel for a model that is not causal on sequences of token ids, (sequences, length)."""
    _check_resident(model, windows)
    starts = _starts(model, windows).to(input_device(model))
    with eval_mode(model), model_errors(model, ON_IDS):
        logits = [model(input_ids=x, use_cache=False).logits for x in (starts, other_last_token(starts))]
    check_causal(model, *logits, dtype=model.dtype)


def _narrow_dtype(model: PreTrainedModel, compute: torch.dtype | None) -> torch.dtype | None:
    """The model's own dtype, if it has a smaller range than that of the computation, as float16; otherwise None."""
    own = model.dtype
    return own if compute and torch.finfo(own).tiny > torch.finfo(compute).tiny else None


def _is_finite(run: Callable[[], Tensor]) -> bool:
    """Whether a pass gives finite numbers. It is taken to do so where the device cannot compute in that dtype."""
    try:
        return all_finite(run())
    except RuntimeError as error:
        if devices.is_out_of_memory(error):
            raise
        return True


@contextmanager
def _stored_dtype(block: Block, dtype: torch.dtype) -> Iterator[None]:
    """Within the context, a block computes with the parameters that are stored in `dtype` as they are stored."""
    parameters = [x for name, x in block.module.named_parameters() if block.dtypes[name] == dtype]
    values = [x.data for x in parameters]  # kept, so that a block read block by block is not cast twice
    try:
        for parameter in parameters:
            parameter.data = parameter.data.to(dtype)
        yield
    finally:
        for parameter, value in zip(parameters, values, strict=True):
            parameter.data = value


@torch.no_grad()
def remark_overflow(model: PreTrainedModel, windows: Tensor, source: str) -> None:
    """Remark that a model whose figures are computed in float32 gives none in its own dtype, if so at the start of a text.

    A pass in that dtype tells it of all operations, within blocks too, but for what the model itself computes in float32.

    Args:
        windows: Token ids, (sequences, length).
        source: What is measured.
    """
    if _narrow_dtype(model, compute_dtype(model)):
        tokens = _starts(model, windows).to(input_device(model))
        with eval_mode(model):
            if not _is_finite(lambda: model(input_ids=tokens, use_cache=False).logits):
                _remark_overflow(model, source)


def _remark_overflow(model: PreTrainedModel, source: str) -> None:
    """Make that remark."""
    name = PurePath(model.config.name_or_path).name or type(model).__name__
    text = f"the figures on {source} are computed in float32: in {dtype_name(model.dtype)}, its own dtype, {name} overflows"
    remark(f"{text} to infinity or NaN", (name, source))


def batch_to_measure(vocabulary: int, length: int, memory: float = AMPLE) -> int:
    """Sequences per batch: the largest number with at most 64 MiB of logits and 4,096 tokens, fewer below 1 GiB of `memory`."""
    return max(1, int(min(1.0, memory / AMPLE) * min(LOGITS_MEMORY // (length * vocabulary * 4), MEASURED_TOKENS // length)))


@torch.no_grad()
def _losses(model: PreTrainedModel, windows: Tensor, first: int) -> list[float]:
    """Mean loss of each sequence. A function of its own, so that the logits are freed before those of the next batch."""
    with model_errors(model, ON_IDS):
        windows = windows.to(model.get_input_embeddings().weight.device)
        return _sequence_losses(model(input_ids=windows, use_cache=False).logits, windows, first)


def _sequence_losses(logits: Tensor, windows: Tensor, first: int) -> list[float]:
    """Mean float32 loss of each sequence from logits, (batch, seq, vocabulary)."""
    targets = windows[:, 1:].to(logits.device)
    # One sequence at a time, to limit the size of the float32 copy.
    pairs = zip(logits[:, :-1], targets, strict=True)
    losses = torch.stack([cross_entropy(scores.float(), target) for scores, target in pairs]).tolist()
    for number, loss in enumerate(losses, first):
        if math.isnan(loss):
            raise NonFinite(
                f"The model's logits are not finite in window {number}: its perplexity does not exist. "
                "Look for NaN or infinity in its weights, or run it in bfloat16 or float32 if this is float16."
            )
    return [float(loss) for loss in losses]


def _gather(local: list[list[float]], windows: Tensor, source: str, *, started: float) -> Perplexity:
    """The perplexity from this process's losses of the sequences of each batch, with those of all processes."""
    losses = [loss for batch in collectives.all_gather(local) for loss in batch]
    predictions = (sequence_lengths(windows).cpu() - 1).tolist()
    mean = math.fsum(map(math.prod, zip(predictions, losses, strict=True))) / sum(predictions)
    value = float(torch.tensor(mean, dtype=torch.float64).exp())  # infinite past a loss of 709, where math.exp would raise
    parts = Parts.of(token_digest(windows), losses, predictions)
    deviations = parts.deviations
    error = value * deviations.error if deviations and math.isfinite(value) else None
    seconds = time.perf_counter() - started
    return Perplexity(value, error, len(losses), windows.shape[1], count_tokens(windows), source, seconds, parts)


def _check_resident(model: PreTrainedModel, windows: Tensor) -> None:
    """`_check` for a model that must be in memory."""
    with model_errors(model, ON_IDS):
        check_in_memory(model, hooks=True)
        _check(model, windows)


def _check(model: PreTrainedModel, windows: Tensor) -> None:
    """Raise InvalidSetting for an invalid shape or for token ids beyond the vocabulary."""
    if windows.ndim != 2 or windows.shape[0] < 1 or windows.shape[1] < 2:
        raise InvalidSetting(f"`windows` must be (windows, length) with length at least 2, got {tuple(windows.shape)}.")
    vocabulary = len(model.get_input_embeddings().weight)
    if int(windows.max()) >= vocabulary:
        raise InvalidSetting(
            f"`windows` hold token {int(windows.max())}, but the model knows {vocabulary:,} tokens. "
            "Use the tokenizer that the model was trained with."
        )


def _vocabulary(model: PreTrainedModel) -> int:
    """Number of logits per token."""
    return int(model.config.get_text_config().vocab_size)
