"""Decoding speed of forms of one model, dense and packed, and the speed at which memory delivers the dense weights."""

from __future__ import annotations

import copy
import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from sparsellm.errors import plural
from sparsellm.extensions.packed.formats import kernels, memory_reads
from sparsellm.extensions.packed.formats.linear import DenseLinear, PackedLinear
from sparsellm.models.contexts import eval_mode

TORCH, KERNEL, PACKED, CEILING = "dense, torch", "dense, own kernel", "packed", "ceiling"
"""Forms of a model: transformers with torch's products, with this package's for bfloat16, and packed. The ceiling is no form:
it is the speed at which the dense weights are read from memory, and nothing else is done."""

DECODING_ROUNDS = 3
"""Measurements of each form, of which the median counts. The forms take turns, so that a slow minute of the machine slows
all of them. Each measurement continues the sequences of the one before."""


@dataclass(frozen=True)
class Speed:
    """The speed of a form with a number of threads and of sequences.

    Attributes:
        form: Name of the form; `CEILING` for the ceiling.
        threads: Threads of torch and of the kernels.
        batch: Sequences that are decoded together.
        decode: Tokens a second of all sequences together, one token of each at a time, with a cache of keys and values.
        prefill: Tokens of the prompts a second; None for the ceiling.
    """

    form: str
    threads: int
    batch: int
    decode: float
    prefill: float | None


def measure_speeds(
    models: Mapping[str, nn.Module],
    *,
    batches: Sequence[int],
    threads: Sequence[int],
    prompt: int,
    tokens: int,
    rounds: int = DECODING_ROUNDS,
    observe: Callable[[str], object] = lambda _: None,
) -> tuple[list[Speed], dict[int, float]]:
    """Measure how fast forms of one model decode, in turns, and how fast memory is read.

    Args:
        models: The forms by name. `TORCH` is the dense model, whose weights the ceiling reads.
        batches: Numbers of sequences.
        threads: Numbers of threads.
        prompt: Tokens of each prompt.
        tokens: Tokens to decode in a measurement.
        rounds: Measurements of each form.
        observe: Called with what is measured next.

    Returns:
        The speeds, and the bandwidth in bytes a second by number of threads.
    """
    weights = step_weights(models[TORCH])
    speeds, bandwidth = [], {}
    for count in threads:
        with _threads(count):
            reads: list[float] = []
            for batch in batches:
                observe(f"{plural(count, 'thread')}, {plural(batch, 'sequence')}")
                prompts = _prompts(models[TORCH], batch, prompt)
                for model in models.values():
                    _decode(model, _prefill(model, prompts[:, :1])[0], tokens=1)  # warms up
                started = {form: _prefill(model, prompts) for form, model in models.items()}
                outputs = {form: output for form, (output, _) in started.items()}
                seconds: dict[str, list[float]] = {form: [] for form in models}
                for _ in range(rounds):
                    for form, model in models.items():
                        outputs[form], elapsed = _decode(model, outputs[form], tokens)
                        seconds[form].append(elapsed)
                    reads.extend(memory_reads.read_seconds(weights) for _ in range(tokens))
                for form, (_, elapsed) in started.items():
                    decode = batch * tokens / median(seconds[form])
                    speeds.append(Speed(form, count, batch, decode, batch * prompt / elapsed))
                speeds.append(Speed(CEILING, count, batch, batch / median(reads[-rounds * tokens :]), None))
            bandwidth[count] = sum(weight.nbytes for weight in weights) / median(reads)
    return speeds, bandwidth


def step_weights(model: nn.Module) -> list[Tensor]:
    """The weights that decoding a token reads: all but those of embeddings, of which it reads a few rows."""
    rows = {id(x) for module in model.modules() if isinstance(module, nn.Embedding) for x in module.parameters(recurse=False)}
    heads = {id(x) for module in model.modules() if isinstance(module, nn.Linear) for x in module.parameters(recurse=False)}
    return [x for x in model.parameters() if id(x) not in rows - heads]


def weight_bytes(model: nn.Module) -> int:
    """Bytes of parameters and buffers, tied ones once."""
    return sum(tensor.nbytes for tensor in {id(x): x for x in chain(model.parameters(), model.buffers())}.values())


def unpacked(model: nn.Module) -> nn.Module:
    """Copy a packed model with its packed weights decoded. The copy shares all other tensors."""
    copied = sharing_copy(model)
    for name, module in list(copied.named_modules()):
        if isinstance(module, PackedLinear):
            dense = nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
            dense.weight = nn.Parameter(module.matrix(module.dtype), requires_grad=False)
            dense.register_parameter("bias", module.bias)
            copied.set_submodule(name, dense)
        elif isinstance(module, DenseLinear):
            module.__class__ = nn.Linear  # type: ignore[assignment]
    return copied


def with_own_kernel(model: nn.Module) -> nn.Module | None:
    """Copy a dense model, sharing its tensors, with this package's kernel for bfloat16; None if neither is there."""
    copied = sharing_copy(model)
    layers = [x for x in copied.modules() if isinstance(x, nn.Linear) and x.weight.dtype == torch.bfloat16]
    if not kernels.instruction_sets() or not layers:
        return None
    for layer in layers:
        layer.__class__ = DenseLinear
        layer.by_kernel = True  # type: ignore[assignment]
    return copied


def sharing_copy(model: nn.Module) -> nn.Module:
    """Copy the modules of a model, but not its tensors."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())})


@contextmanager
def _threads(count: int) -> Iterator[None]:
    """Context in which torch and the kernels use a number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _prompts(model: nn.Module, batch: int, length: int) -> Tensor:
    """Random token ids, (batch, length)."""
    vocabulary = min(module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding))
    return torch.randint(vocabulary, (batch, length), generator=torch.Generator().manual_seed(0))


def _prefill(model: nn.Module, prompts: Tensor) -> tuple[Any, float]:
    """Read prompts, (batch, prompt). Returns the model's output, with its cache, and the seconds."""
    last = {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}
    started = time.perf_counter()
    with torch.inference_mode(), eval_mode(model):
        return model(prompts, use_cache=True, **last), time.perf_counter() - started


def _decode(model: nn.Module, output: Any, tokens: int) -> tuple[Any, float]:
    """Decode the next `tokens` tokens of each sequence greedily. Returns the model's last output and the seconds."""
    started = time.perf_counter()
    with torch.inference_mode(), eval_mode(model):
        for _ in range(tokens):
            chosen = output.logits[:, -1:].argmax(-1)
            output = model(chosen, past_key_values=output.past_key_values, use_cache=True)
    return output, time.perf_counter() - started
