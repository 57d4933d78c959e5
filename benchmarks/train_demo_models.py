"""Train a demo model: `python dev/train_demo_models.py opt OUTPUT_DIR`.

This script trained the bundled models, whose `training.json` files record the settings and the duration. The defaults take
about half an hour on one core. During training, the folder contains the best checkpoint so far.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from sparsellm.data.demo import FAMILIES, named_documents
from sparsellm.errors import OutputExists, SparseLLMError

WINDOW = 256  # tokens per sequence, in training and evaluation
BOS, PAD, EOS = "<s>", "<pad>", "</s>"  # token ids 0, 1, 2


@dataclass(frozen=True)
class Training:
    """Training settings; those of the bundled models differ in `minutes` only."""

    family: str
    steps: int = 5000
    minutes: float = math.inf  # training ends at `steps` or `minutes`, and the schedule follows whichever is closer to its end
    seed: int = 0
    batch: int = 4  # sequences per step
    peak: float = 2.5e-3  # highest learning rate
    warmup: float = 0.03  # fraction of the training
    weight_decay: float = 0.1
    dropout: float = 0.1  # on the outputs of attention and feed-forward that are added to the residual stream
    vocabulary: int = 2048
    check_every: int = 250  # steps between evaluations of the validation loss
    validation_windows: int = 96


@dataclass
class Progress:
    """Training progress."""

    step: int = 0
    minutes: float = 0.0
    best_step: int = 0
    best_validation: float = math.inf


def train(training: Training, output: Path) -> dict[str, object]:
    """Train a model, save it to `output`, and return the contents of `training.json`.

    Raises:
        OutputExists: If `output` exists.
    """
    if output.exists():
        raise OutputExists(f"{output} exists. Name a new folder; nothing is overwritten.")
    torch.manual_seed(training.seed)
    texts = named_documents("train")
    tokenizer = build_tokenizer(list(texts.values()), training.vocabulary)
    # Validation texts come from the train split: the held-out split is used for the final evaluation only.
    validation = {name: text for name, text in texts.items() if is_validation(name)}
    remaining = {name: text for name, text in texts.items() if name not in validation}
    ids = encode(tokenizer, remaining.values())
    checks = windows(encode(tokenizer, validation.values()))[: training.validation_windows]
    model = build_model(training)
    size = sum(weight.numel() for weight in model.parameters())
    observer(f"{training.family}: {size:,} parameters, {len(ids):,} tokens to train on, {len(checks) * WINDOW:,} to validate")

    progress = Progress()
    for progress in fit(model, ids, checks, training):
        if progress.best_step == progress.step:
            save(model, tokenizer, output)
    best = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
    record = {
        **asdict(training),
        "minutes": round(progress.minutes, 1),
        "stopped_at": progress.step,
        "best_step": progress.best_step,
        "tokens_seen": progress.best_step * training.batch * WINDOW,
        "tokens_in_text": len(ids),
        "parameters": size,
        "validation_loss": round(progress.best_validation, 4),
        "held_out_perplexity": measure(best, windows(encode(tokenizer, named_documents("held-out").values()))),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    (output / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    return record


def fit(model: PreTrainedModel, ids: Tensor, checks: Tensor, training: Training) -> Iterator[Progress]:
    """Train `model` in place; yields the progress after each evaluation of the validation loss."""
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
    while share < 1:
        for group in optimizer.param_groups:
            group["lr"] = training.peak * group["pace"] * schedule(share, training.warmup)
        offsets = torch.randint(len(ids) - WINDOW + 1, (training.batch, 1), generator=generator)
        batch = ids[offsets + torch.arange(WINDOW)]
        # One sequence in eight starts with the BOS token, so that the model can generate with and without it.
        batch[torch.rand(training.batch, generator=generator) < 1 / 8, 0] = 0
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

        progress.step += 1
        progress.minutes = (time.monotonic() - start) / 60
        share = max(progress.step / training.steps, progress.minutes / training.minutes)
        loss_sum += loss.item()
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


def schedule(share: float, warmup: float) -> float:
    """Learning rate relative to its peak after a `share` of the training: linear warm-up, then cosine decay."""
    if share < warmup:
        return (share + 1e-3) / (warmup + 1e-3)
    return 0.5 * (1 + math.cos(math.pi * (share - warmup) / (1 - warmup)))


def build_tokenizer(texts: list[str], vocabulary: int) -> PreTrainedTokenizerFast:
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
        tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD, model_max_length=WINDOW
    )


def build_model(training: Training) -> PreTrainedModel:
    """Initialise a model of four blocks of width 192, two million parameters: one per character of the text."""
    special = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
    if training.family == "opt":
        model = OPTForCausalLM(OPTConfig(
            vocab_size=training.vocabulary, hidden_size=192, word_embed_proj_dim=192, num_hidden_layers=4, ffn_dim=768,
            num_attention_heads=4, max_position_embeddings=WINDOW, dropout=0.0, tie_word_embeddings=True, **special,
        ))  # fmt: skip
        decoder = model.model.decoder
        tell_positions_from_tokens(decoder.embed_tokens.weight, decoder.embed_positions.weight)
        return model
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=training.vocabulary, hidden_size=192, num_hidden_layers=4, intermediate_size=576,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=WINDOW, tie_word_embeddings=True, **special,
    ))  # fmt: skip


@torch.no_grad()
def tell_positions_from_tokens(tokens: Tensor, positions: Tensor) -> None:
    """Initialise OPT's embeddings: position embeddings as sinusoids of a smaller scale than the token embeddings.

    At equal scale and a high learning rate, the noise of the position embeddings dominates the token embeddings, and the loss
    stays above that of a bigram model for a thousand steps. Wavelengths range from 6 tokens to six sequences.
    """
    count, width = positions.shape
    angles = torch.arange(count)[:, None] * WINDOW ** -torch.linspace(0, 1, width // 2)
    positions.copy_(0.04 * torch.cat([angles.sin(), angles.cos()], dim=1))
    tokens.normal_(std=0.1)


def drop_out_residuals(model: PreTrainedModel, probability: float) -> None:
    """Apply dropout to every layer output that is added to the residual stream; Llama has no dropout of its own."""

    def drop(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        return nn.functional.dropout(output, probability, module.training)

    for name, module in model.named_modules():
        if name.endswith((".out_proj", ".fc2", ".o_proj", ".down_proj")):
            module.register_forward_hook(drop)


def is_validation(name: str) -> bool:
    """Whether a document of the train split is used for validation, about one in twenty."""
    return zlib.crc32(name.encode()) // 10 % 20 == 0  # the last digit determines the split


def encode(tokenizer: PreTrainedTokenizerFast, texts: Iterable[str]) -> Tensor:
    """Token ids of `texts` joined by empty lines, `(tokens,)`."""
    return torch.tensor(tokenizer("\n\n".join(texts), verbose=False)["input_ids"])


def windows(ids: Tensor) -> Tensor:
    """Split ids into `(sequences, WINDOW)`; a shorter remainder is dropped."""
    return ids[: len(ids) // WINDOW * WINDOW].view(-1, WINDOW)


@torch.no_grad()
def mean_loss(model: PreTrainedModel, sequences: Tensor) -> float:
    """Mean negative log-likelihood per token given the previous tokens of its sequence, in nats."""
    training = model.training
    model.eval()
    losses = [float(model(input_ids=batch, labels=batch).loss) * len(batch) for batch in sequences.split(16)]
    model.train(training)
    return sum(losses) / len(sequences)


def measure(model: PreTrainedModel, sequences: Tensor) -> dict[str, float]:
    """Perplexity of the dense model and after magnitude pruning to 50 % and 80 %, which changes `model` in place."""
    perplexities = {"dense": math.exp(mean_loss(model, sequences))}
    for percent in (50, 80):
        prune_by_magnitude(model, percent / 100)
        perplexities[f"magnitude {percent}%"] = math.exp(mean_loss(model, sequences))
    return {name: round(value, 3) for name, value in perplexities.items()}


@torch.no_grad()
def prune_by_magnitude(model: PreTrainedModel, sparsity: float) -> None:
    """Zero the smallest weights of each linear layer except the head, without the package's solvers."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            smallest = module.weight.abs().flatten().argsort()[: round(sparsity * module.weight.numel())]
            module.weight.view(-1)[smallest] = 0


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, output: Path) -> None:
    """Save the model in bfloat16 and its tokenizer, overwriting the previous checkpoint of the run."""
    copy = type(model)(model.config)
    copy.load_state_dict(model.state_dict())
    copy.to(torch.bfloat16).save_pretrained(output)
    tokenizer.save_pretrained(output)


def observer(line: str) -> None:
    """Print a line of progress to stderr."""
    print(line, file=sys.stderr, flush=True)


def main(words: list[str] | None = None) -> None:
    """Parse the command line, train, and print the contents of `training.json`."""
    parser = argparse.ArgumentParser(prog="python dev/train_demo_models.py", description=__doc__)
    parser.add_argument("family", choices=FAMILIES)
    parser.add_argument("output", type=Path, metavar="OUTPUT_DIR", help="a new folder")
    parser.add_argument("--steps", type=int, default=Training.steps)
    parser.add_argument("--minutes", type=float, default=Training.minutes, help="time limit; training may end before --steps")
    parser.add_argument("--seed", type=int, default=Training.seed)
    parser.add_argument("--peak", type=float, default=Training.peak, help="highest learning rate")
    parser.add_argument("--weight-decay", type=float, default=Training.weight_decay)
    parser.add_argument("--dropout", type=float, default=Training.dropout)
    parser.add_argument("--threads", type=int, default=1)
    options = vars(parser.parse_args(words))
    torch.set_num_threads(options.pop("threads"))
    output = options.pop("output")
    try:
        print(json.dumps(train(Training(**options), output), indent=2))
    except SparseLLMError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
