"""Train a demo model: `python benchmarks/train_demo_models.py opt OUTPUT_DIR`.

This script trained the bundled models, whose `training.json` files record the settings and the duration. The defaults take
about half an hour on one core. During training, the folder contains the best checkpoint so far. `mixtral`, a mixture of
experts, is not bundled: `tokens.py` measures it.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from training import (
    SPECIAL_TOKENS,
    Progress,
    Training,
    build_tokenizer,
    fit,
    mean_loss,
    observer,
    save,
    tell_positions_from_tokens,
    windows,
)
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from sparsellm.errors import OutputExists, SparseLLMError
from sparsellm.texts.demo import FAMILIES, named_documents

WINDOW = 256  # tokens per sequence, in training and evaluation


@dataclass(frozen=True)
class DemoTraining(Training):
    """Training settings; those of the bundled models differ in `minutes` only."""

    family: str
    steps: float = field(default=5000, kw_only=True)
    dropout: float = field(default=0.1, kw_only=True)
    vocabulary: int = 2048
    validation_windows: int = 96


def train(training: DemoTraining, output: Path) -> dict[str, object]:
    """Train a model, save it to `output`, and return the contents of `training.json`.

    Raises:
        OutputExists: If `output` exists.
    """
    if output.exists():
        raise OutputExists(f"{output} exists. Name a new folder; nothing is overwritten.")
    torch.manual_seed(training.seed)
    texts = named_documents("train")
    tokenizer = build_tokenizer(list(texts.values()), training.vocabulary, WINDOW)
    # Validation texts come from the train split: the held-out split is used for the final evaluation only.
    validation = {name: text for name, text in texts.items() if is_validation(name)}
    remaining = {name: text for name, text in texts.items() if name not in validation}
    ids = encode(tokenizer, remaining.values())
    checks = windows(encode(tokenizer, validation.values()), WINDOW)[: training.validation_windows]
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
        "held_out_perplexity": measure(best, windows(encode(tokenizer, named_documents("held-out").values()), WINDOW)),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    (output / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    return record


def build_model(training: DemoTraining) -> PreTrainedModel:
    """Initialize a model of four blocks of width 192, two million parameters: one per character of the text.

    The mixture has three blocks of width 96 and, in each, eight experts, of which a token passes through two.
    """
    if training.family == "opt":
        model = OPTForCausalLM(OPTConfig(
            vocab_size=training.vocabulary, hidden_size=192, word_embed_proj_dim=192, num_hidden_layers=4, ffn_dim=768,
            num_attention_heads=4, max_position_embeddings=WINDOW, dropout=0.0, tie_word_embeddings=True, **SPECIAL_TOKENS,
        ))  # fmt: skip
        decoder = model.model.decoder
        tell_positions_from_tokens(decoder.embed_tokens.weight, decoder.embed_positions.weight)
        return model
    if training.family == "mixtral":
        return MixtralForCausalLM(MixtralConfig(
            vocab_size=training.vocabulary, hidden_size=96, num_hidden_layers=3, intermediate_size=192, num_attention_heads=4,
            num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=WINDOW,
            tie_word_embeddings=True, **SPECIAL_TOKENS,
        ))  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=training.vocabulary, hidden_size=192, num_hidden_layers=4, intermediate_size=576,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=WINDOW, tie_word_embeddings=True,
        **SPECIAL_TOKENS,
    ))  # fmt: skip


def is_validation(name: str) -> bool:
    """Whether a document of the train split is used for validation, about one in twenty."""
    return zlib.crc32(name.encode()) // 10 % 20 == 0  # the last digit determines the split


def encode(tokenizer: PreTrainedTokenizerFast, texts: Iterable[str]) -> Tensor:
    """Token ids of `texts` joined by empty lines, `(tokens,)`."""
    return torch.tensor(tokenizer("\n\n".join(texts), verbose=False)["input_ids"])


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


def main(words: list[str] | None = None) -> None:
    """Parse the command line, train, and print the contents of `training.json`."""
    parser = argparse.ArgumentParser(prog="python benchmarks/train_demo_models.py", description=__doc__)
    parser.add_argument("family", choices=(*FAMILIES, "mixtral"))
    parser.add_argument("output", type=Path, metavar="OUTPUT_DIR", help="a new folder")
    parser.add_argument("--steps", type=int, default=DemoTraining.steps)
    parser.add_argument(
        "--minutes", type=float, default=DemoTraining.minutes, help="time limit; training may end before --steps"
    )
    parser.add_argument("--seed", type=int, default=DemoTraining.seed)
    parser.add_argument("--peak", type=float, default=DemoTraining.peak, help="highest learning rate")
    parser.add_argument("--weight-decay", type=float, default=DemoTraining.weight_decay)
    parser.add_argument("--dropout", type=float, default=DemoTraining.dropout)
    parser.add_argument("--threads", type=int, default=1)
    options = vars(parser.parse_args(words))
    torch.set_num_threads(options.pop("threads"))
    output = options.pop("output")
    try:
        print(json.dumps(train(DemoTraining(**options), output), indent=2))
    except SparseLLMError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
