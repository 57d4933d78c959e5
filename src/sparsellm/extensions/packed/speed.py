"""`bench`: decoding speeds of a packed model and of dense forms beside it, and how fast memory delivers the dense weights."""

from __future__ import annotations

import copy
import inspect
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from sparsellm.checkpoints.files import checkpoint_name, find_checkpoint
from sparsellm.checkpoints.loading import context_length, open_checkpoint
from sparsellm.errors import InvalidSetting, dtype_name, plural
from sparsellm.extensions.packed.formats import kernel_library, kernels
from sparsellm.extensions.packed.formats.linear import DenseLinear, PackedLinear
from sparsellm.extensions.packed.formats.packed_experts import PackedExperts, decode_layers
from sparsellm.extensions.packed.record import CEILING, KERNEL, PACKED, TORCH, Bench, Speed
from sparsellm.models.contexts import eval_mode
from sparsellm.models.experts import experts_of
from sparsellm.outputs.fingerprint import environment
from sparsellm.recipes.fields import MOST
from sparsellm.runtime import memory

PROMPT_TOKENS = 128
"""Tokens of a prompt, where the model's context has room for them."""

DECODING_ROUNDS = 3
"""Measurements of each form, of which the median counts. The forms take turns, so that a slow minute of the machine slows
all of them. Each measurement continues the sequences of the one before."""


def measure_bench(
    packed: str | Path,
    against: str | Path | None,
    *,
    batches: Sequence[int],
    threads: Sequence[int],
    tokens: int,
    observe: Callable[[str], object] = lambda _: None,
) -> Bench:
    """Measure a packed model; `sparsellm.bench` describes the arguments. observe: called with what is done next."""
    from sparsellm.extensions.packed.formats.transformers import load  # imports transformers

    _check_counts("batch", batches, largest=MOST)
    _check_counts("threads", threads, largest=os.cpu_count() or 1)
    if against:
        find_checkpoint(str(against))  # before the packed model is loaded
    observe(f"loading {packed}")
    model = load(packed)
    length = context_length(model.config)
    most = (length - 1) // DECODING_ROUNDS
    if not 1 <= tokens <= most:
        limit = f"the model's context of {length} has room for {DECODING_ROUNDS} turns of {most}"
        raise InvalidSetting(f"`tokens` got {tokens}, and {limit}. Pass a number from 1 to {most}.")
    observe(f"loading {against}" if against else "decoding the packed weights")
    dense = _dense_form(model, packed, against)
    forms = {TORCH: dense, KERNEL: with_own_kernel(dense), PACKED: model}
    measured = {name: form for name, form in forms.items() if form is not None}
    prompt = min(PROMPT_TOKENS, length - DECODING_ROUNDS * tokens)
    speeds, bandwidth = measure_speeds(
        measured, batches=batches, threads=threads, prompt=prompt, tokens=tokens, observe=observe
    )
    kernel = kernels.instruction_set()
    notes = (
        []
        if kernel
        else ["no kernel is installed, so that packed weights are decoded for every token: sparsellm info says why"]
    )
    if any(experts_of(module) is not None for module in dense.modules()):
        notes.append("the ceiling is too low: it counts all experts, and a token reads only some of them")
    return Bench(
        model=str(packed),
        disk_bytes=sum(file.stat().st_size for file in Path(packed).glob("*.safetensors")),
        memory_bytes={name: weight_bytes(form) for name, form in measured.items()},
        step_bytes=sum(weight.nbytes for weight in step_weights(dense)),
        bandwidth=bandwidth,
        prompt=prompt,
        tokens=tokens,
        speeds=speeds,
        notes=notes,
        environment=environment(torch.device("cpu")) | {"kernel": kernel or "none"},
        cache_bytes=memory.cache_bytes(),
    )


def _check_counts(name: str, counts: Sequence[int], largest: int) -> None:
    """Check numbers of sequences or of threads."""
    if not counts or min(counts) < 1 or max(counts) > largest:
        limit = f"from 1 to {largest:,}{', the cores of this machine' if name == 'threads' else ''}"
        raise InvalidSetting(f"`{name}` got {','.join(map(str, counts)) or 'nothing'}: pass numbers {limit}.")


def _dense_form(model: nn.Module, packed: str | Path, against: str | Path | None) -> nn.Module:
    """The dense model: the packed one decoded, or another one of the same shape and dtype."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, PackedLinear)}
    dtypes = {layer.dtype for layer in layers.values()}
    needed = sum(layer.in_features * layer.out_features * layer.dtype.itemsize for layer in layers.values())
    memory.check_fits(needed, torch.device("cpu"), stage="The dense model", advice="Measure on a machine with more memory.")
    if against is None:
        return unpacked(model)
    of_experts = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, PackedExperts))
    dense: nn.Module = open_checkpoint(checkpoint_name(against)).load(dtype_name(dtypes.pop()))
    for name, layer in layers.items():
        if name.startswith(of_experts):
            continue  # part of another parameter there
        shape = (layer.out_features, layer.in_features)
        other = dict(dense.named_parameters()).get(f"{name}.weight")
        if other is None or shape not in (other.shape, other.shape[::-1]):
            found = "is missing" if other is None else f"is {tuple(other.shape)}"
            raise InvalidSetting(
                f"{packed} was not made from {against}: {name} is {shape} in the one and {found} in the other."
            )
    return dense


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
                    reads.extend(kernel_library.read_seconds(weights) for _ in range(tokens))
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
    decode_layers(copied)
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
