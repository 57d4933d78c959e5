"""Trains small language models, for `python benchmarks/train_demo_models.py` and `python benchmarks/larger_model.py`."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from sparsellm.errors import BadText

BOS, PAD, EOS = "<s>", "<pad>", "</s>"  # token ids 0, 1, 2
SPECIAL_TOKENS = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}

SPEED_KNOWN = 0.03
"""Fraction of the training after which its speed tells how many tokens it will see."""


@dataclass(frozen=True, kw_only=True)
class Training:
    """Training settings.

    Attributes:
        minutes: Training ends at `steps` or `minutes`, and the schedule follows whichever is closer to its end.
        batch: Sequences per step.
        length: Tokens per sequence.
        peak: Highest learning rate.
        warmup: Fraction of the training over which the rate rises.
        dropout: On the outputs of attention and feed-forward that are added to the residual stream.
        check_every: Steps between evaluations of the validation loss.
        bfloat16: Whether matrix products are computed in bfloat16; weights and optimizer stay float32.
        repeats: How often the training may see the text at most; None for any number.
    """

    steps: float = math.inf
    minutes: float = math.inf
    seed: int = 0
    batch: int = 4
    length: int = 256
    peak: float = 2.5e-3
    warmup: float = 0.03
    weight_decay: float = 0.1
    dropout: float = 0.0
    check_every: int = 250
    bfloat16: bool = False
    repeats: float | None = None


@dataclass
class Progress:
    """Training progress."""

    step: int = 0
    minutes: float = 0.0
    best_step: int = 0
    best_validation: float = math.inf


def fit(model: PreTrainedModel, ids: Tensor, checks: Tensor, training: Training) -> Iterator[Progress]:
    """Train `model` in place on its device; yields the progress after each evaluation of the validation loss.

    Args:
        ids: Token ids of the text, (tokens,), of any integer type.
        checks: Token ids for validation, (sequences, length).

    Raises:
        BadText: The text is shorter than a sequence, or would be seen more often than `training.repeats`.
    """
    if len(ids) < training.length:
        raise BadText(f"The text has {len(ids):,} tokens, and a sequence {training.length:,}. Give more text.")
    weights = dict(model.named_parameters())
    positions = [weight for name, weight in weights.items() if "embed_positions" in name]
    matrices = [weight for name, weight in weights.items() if weight.ndim == 2 and "embed_positions" not in name]
    groups = [
        {"params": matrices, "weight_decay": training.weight_decay, "pace": 1.0},
        {"params": [weight for weight in weights.values() if weight.ndim != 2], "weight_decay": 0.0, "pace": 1.0},
        {"params": positions, "weight_decay": 0.0, "pace": 0.1},  # noisy gradients: one token per sequence
    ]
    optimizer = torch.optim.AdamW([group for group in groups if group["params"]], lr=training.peak, betas=(0.9, 0.95))
    generator = torch.Generator().manual_seed(training.seed)
    progress, start, share, loss_sum = Progress(), time.monotonic(), 0.0, 0.0
    drop_out_residuals(model, training.dropout)
    model.train()
    while share < 1:
        for group in optimizer.param_groups:
            group["lr"] = training.peak * group["pace"] * schedule(share, training.warmup)
        offsets = torch.randint(len(ids) - training.length + 1, (training.batch, 1), generator=generator)
        batch = ids[offsets + torch.arange(training.length)].long()
        # One sequence in eight starts with the BOS token, so that the model can generate with and without it.
        batch[torch.rand(training.batch, generator=generator) < 1 / 8, 0] = 0
        batch = batch.to(model.device)
        with torch.autocast(model.device.type, torch.bfloat16, enabled=training.bfloat16):
            loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

        progress.step += 1
        loss_sum += loss.item()
        progress.minutes = (time.monotonic() - start) / 60
        before, share = share, max(progress.step / training.steps, progress.minutes / training.minutes)
        if before < SPEED_KNOWN <= share:
            _check_repeats(progress.step / share * training.batch * training.length, len(ids), training)
        if progress.step % training.check_every and share < 1:
            continue
        validation, steps = mean_loss(model, checks), (progress.step - 1) % training.check_every + 1
        if validation < progress.best_validation:
            progress.best_step, progress.best_validation = progress.step, validation
        observer(
            f"step {progress.step}, {progress.minutes:.1f} min, {share:.0%}: "
            f"loss {loss_sum / steps:.4f}, validation {validation:.4f}"
        )
        loss_sum = 0.0
        yield progress


def _check_repeats(tokens: float, text: int, training: Training) -> None:
    """Refuse a text that the training would see too often."""
    if training.repeats and tokens > training.repeats * text:
        raise BadText(
            f"The text has {text:,} tokens, and {training.minutes:g} minutes train on about {tokens:,.0f}: more than "
            f"{training.repeats:g} times each. Give more text, or less time."
        )


def schedule(share: float, warmup: float) -> float:
    """Learning rate relative to its peak after a `share` of the training: linear warm-up, then cosine decay."""
    if share < warmup:
        return (share + 1e-3) / (warmup + 1e-3)
    return 0.5 * (1 + math.cos(math.pi * (share - warmup) / (1 - warmup)))


def build_tokenizer(texts: Iterable[str], vocabulary: int, length: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE tokenizer with `vocabulary` entries; it does not add special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=[BOS, PAD, EOS], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD, model_max_length=length
    )


@torch.no_grad()
def tell_positions_from_tokens(tokens: Tensor, positions: Tensor) -> None:
    """Initialize OPT's embeddings: position embeddings as sinusoids of a smaller scale than the token embeddings.

    At equal scale and a high learning rate, the noise of the position embeddings dominates the token embeddings, and the loss
    stays above that of a bigram model for a thousand steps. Wavelengths range from 6 tokens to six sequences of 256.
    """
    count, width = positions.shape
    angles = torch.arange(count)[:, None] * 256.0 ** -torch.linspace(0, 1, width // 2)
    positions.copy_(0.04 * torch.cat([angles.sin(), angles.cos()], dim=1))
    tokens.normal_(std=0.1)


def drop_out_residuals(model: PreTrainedModel, probability: float) -> None:
    """Apply dropout to every layer output that is added to the residual stream; Llama has no dropout of its own."""

    def drop(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return nn.functional.dropout(output, probability, module.training)

    for name, module in model.named_modules() if probability else ():
        if name.endswith((".out_proj", ".fc2", ".o_proj", ".down_proj")):
            module.register_forward_hook(drop)


def windows(ids: Tensor, length: int) -> Tensor:
    """Split ids into `(sequences, length)`; a shorter remainder is dropped."""
    return ids[: len(ids) // length * length].view(-1, length)


@torch.no_grad()
def sequence_losses(model: PreTrainedModel, sequences: Tensor, batch: int = 16) -> Tensor:
    """Mean negative log-likelihood of each sequence, in nats a token given the tokens before it, `(sequences,)` float64."""
    training = model.training
    model.eval()
    losses = []
    for ids in sequences.split(batch):
        tokens = ids.long().to(model.device)
        logits = model(input_ids=tokens, use_cache=False).logits[:, :-1].float()
        losses.append(cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none").double().mean(1).cpu())
    model.train(training)
    return torch.cat(losses)


def mean_loss(model: PreTrainedModel, sequences: Tensor) -> float:
    """Mean negative log-likelihood per token given the previous tokens of its sequence, in nats."""
    return float(sequence_losses(model, sequences).mean())


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, output: Path) -> None:
    """Save the model in bfloat16 and its tokenizer, overwriting the previous checkpoint of the run."""
    copy = type(model)(model.config)
    copy.load_state_dict(model.state_dict())
    copy.to(torch.bfloat16).save_pretrained(output)
    tokenizer.save_pretrained(output)


def observer(line: str) -> None:
    """Print a line of progress to stderr."""
    print(line, file=sys.stderr, flush=True)
