"""A pruned, packed model that drafts for its own dense model, by transformers' assisted generation: docs/deploying.md.

    python benchmarks/assisted.py measure    # about ten minutes, on a machine that does nothing else
    python benchmarks/assisted.py table

Two things are measured. The bundled models, which are trained, show how many drafted tokens the dense model accepts when it
decodes greedily, and that the text is the one that it writes alone. That is in float32: in bfloat16, logits of several
tokens at once are rounded otherwise than those of one, and near ties fall otherwise. These models fit in a cache, so that
their speeds say nothing. A model of TinyLlama's shape with random weights, and copies of it pruned by magnitude, show what
a step of each takes: one token of a draft, and the dense model's look at several tokens. Both give the tokens a second of
assisted generation.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import decode
import torch
from measuring import MEASURED, markdown_table, measure_or_show, read_figures, record
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import sparsellm
from sparsellm.checkpoints.loading import open_checkpoint
from sparsellm.extensions.packed.record import KERNEL, TORCH
from sparsellm.texts.texts import read_text

FILE = MEASURED / "assisted.json"
MODELS = {"demo:llama": "Llama", "demo:opt": "OPT"}
SPARSITIES = (0.5, 0.7, 0.8)
DRAFTED = (2, 3, 5)
"""Tokens that a draft proposes before the dense model looks at them."""

PROMPTS, PROMPT, NEW = 16, 64, 64
"""Prompts from the held-out text, their tokens, and the tokens of each continuation."""

STEPS, ROUNDS = 8, 4


def measure() -> None:
    """Measure the accepted shares that are not known, then the steps."""
    torch.set_num_threads(1)
    for model in MODELS:
        with tempfile.TemporaryDirectory() as place:
            for sparsity in SPARSITIES:
                if f"{model} | {sparsity:.0%}" in read_figures(FILE):
                    continue
                record(FILE, f"{model} | {sparsity:.0%}", accepted(model, sparsity, Path(place)))
    forms = decode.make_forms(decode.SHAPES[decode.RACED], SPARSITIES)
    for threads in (1, 2):
        record(FILE, f"steps | {threads}", step_seconds(forms, threads))
    print("\n".join(table()))


def accepted(name: str, sparsity: float, place: Path) -> dict[str, Any]:
    """The share of drafted tokens that are accepted, by their number, and how many texts are those of the dense model alone."""
    source = open_checkpoint(name)
    pruned, packed = place / f"pruned-{sparsity}", place / f"packed-{sparsity}"
    sparsellm.prune(name, sparsity=sparsity, calibration="demo", device="cpu").save_pretrained(pruned)
    sparsellm.pack(pruned, packed)
    dense, draft = AutoModelForCausalLM.from_pretrained(source.folder, dtype=torch.float32), sparsellm.load(packed)
    for model in (dense, draft):
        model.generation_config.eos_token_id = None  # every continuation has the same length
    figures: dict[str, Any] = {"sparsity": sparsity}
    for count in DRAFTED:
        settings = draft.generation_config
        settings.num_assistant_tokens, settings.num_assistant_tokens_schedule = count, "constant"
        settings.assistant_confidence_threshold = 0.0  # a draft always has this length
        looks, tokens, equal = 0, 0, 0
        for prompt in prompts(source.folder):
            alone = continuation(dense, prompt)
            with Calls(dense) as calls:
                assisted = continuation(dense, prompt, assistant_model=draft)
            looks, tokens = looks + calls.number, tokens + assisted.shape[1] - PROMPT
            equal += int(torch.equal(alone, assisted))
        figures[str(count)] = {"accepted": (tokens / looks - 1) / count, "tokens a look": tokens / looks, "equal": equal}
    return figures


def prompts(folder: Path) -> list[Tensor]:
    """Token ids, (1, tokens), at even distances in the held-out text."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("\n\n".join(read_text("demo", "test").documents), return_tensors="pt", verbose=False).input_ids[0]
    return [ids[None, start : start + PROMPT] for start in range(0, len(ids) - PROMPT, len(ids) // PROMPTS)][:PROMPTS]


def continuation(model: nn.Module, prompt: Tensor, **options: Any) -> Tensor:
    """The prompt and what the model continues it with, greedily and to the same length."""
    generate: Any = model.generate
    mask = torch.ones_like(prompt)
    ids: Tensor = generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=NEW, **options)
    return ids


class Calls:
    """Context that counts the forward passes of a model."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self.number = model, 0

    def __enter__(self) -> Calls:
        self._hook = self._model.register_forward_pre_hook(self._count)
        return self

    def _count(self, *_: object) -> None:
        self.number += 1

    def __exit__(self, *_: object) -> None:
        self._hook.remove()


@torch.inference_mode()
def step_seconds(forms: dict[str, nn.Module], threads: int) -> dict[str, float]:
    """Seconds of a step by form and number of tokens: the shortest average over rounds, in which the forms take turns."""
    torch.set_num_threads(threads)
    wanted = [(form, 1) for form in forms if form.endswith("dense head")]
    wanted += [(form, count) for form in (TORCH, KERNEL) if form in forms for count in (1, *(each + 1 for each in DRAFTED))]
    best: dict[str, float] = {}
    for _ in range(ROUNDS):
        for form, count in wanted:
            model: Any = forms[form]
            cache = model(torch.zeros(1, PROMPT, dtype=torch.long), use_cache=True).past_key_values
            tokens = torch.ones(1, count, dtype=torch.long)
            started = time.perf_counter()
            for _ in range(STEPS):
                model(tokens, past_key_values=cache, use_cache=True)
            seconds = (time.perf_counter() - started) / STEPS
            key = f"{form} | {count}"
            best[key] = min(best.get(key, seconds), seconds)
    return best


def table() -> list[str]:
    """The accepted shares, and by number of threads the tokens a second of the best draft, in Markdown."""
    figures = read_figures(FILE)
    if "steps | 1" not in figures:
        return []
    head = ["", "sparsity", *(f"{count} drafted" for count in DRAFTED), "same text"]
    rows = []
    for model, name in MODELS.items():
        for sparsity in SPARSITIES:
            cell = figures[f"{model} | {sparsity:.0%}"]
            shares = [f"{cell[str(count)]['accepted']:.2f}" for count in DRAFTED]
            equal = sum(cell[str(count)]["equal"] for count in DRAFTED)
            rows.append([name, f"{sparsity:.0%}", *shares, f"{equal} of {len(DRAFTED) * PROMPTS}"])
    lines = [*markdown_table(head, rows), ""]
    rows = []
    for threads in (1, 2):
        steps = figures[f"steps | {threads}"]
        for form in (TORCH, KERNEL):
            if f"{form} | 1" not in steps:
                continue
            for sparsity in SPARSITIES:
                row = [str(threads), form, f"{sparsity:.0%}", f"{1 / steps[f'{form} | 1']:.1f}"]
                for model in MODELS:
                    speeds = {count: speed(figures, steps, form, sparsity, model, count) for count in DRAFTED}
                    count = max(speeds, key=lambda each: speeds[each])
                    row.append(f"{speeds[count]:.1f} ({speeds[count] * steps[f'{form} | 1']:.2f}, {count} drafted)")
                rows.append(row)
    accepts = [f"as {name} accepts" for name in MODELS.values()]
    lines += markdown_table(["threads", "dense model", "draft", "alone, tokens a second", *accepts], rows, left=(1,))
    return [
        *lines,
        "",
        f"{figures['machine'].split(',')[0]}; in brackets, times the speed alone with the best number of drafted tokens.",
    ]


def speed(figures: dict[str, Any], steps: dict[str, float], form: str, sparsity: float, model: str, count: int) -> float:
    """Tokens a second of assisted generation: those of one look, over the time of the draft and of the look."""
    drafting = count * steps[f"{decode.packed_name(sparsity)} | 1"]
    tokens: float = figures[f"{model} | {sparsity:.0%}"][str(count)]["tokens a look"]
    return tokens / (drafting + steps[f"{form} | {count + 1}"])


if __name__ == "__main__":
    measure_or_show(__doc__, measure, table)
