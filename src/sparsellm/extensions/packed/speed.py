"""`bench`: a packed model measured beside the dense one, with sizes."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import nn

from sparsellm.checkpoints.files import checkpoint_name, find_checkpoint
from sparsellm.checkpoints.loading import context_length, open_checkpoint
from sparsellm.errors import InvalidSetting, dtype_name
from sparsellm.extensions.packed.decoding_speed import (
    DECODING_ROUNDS,
    KERNEL,
    PACKED,
    TORCH,
    measure_speeds,
    step_weights,
    unpacked,
    weight_bytes,
    with_own_kernel,
)
from sparsellm.extensions.packed.formats import kernels
from sparsellm.extensions.packed.formats.linear import PackedLinear
from sparsellm.extensions.packed.formats.packed_experts import PackedExperts
from sparsellm.extensions.packed.speed_record import Bench
from sparsellm.models.experts import experts_of
from sparsellm.outputs.fingerprint import environment
from sparsellm.recipes.fields import MOST
from sparsellm.runtime import memory

PROMPT_TOKENS = 128
"""Tokens of a prompt, where the model's context has room for them."""


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
        notes.append("a token reads only some of the experts: the ceiling counts them all, and is too low")
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


def _packed_layers(model: nn.Module) -> dict[str, PackedLinear]:
    """The packed layers by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, PackedLinear)}


def _dense_form(model: nn.Module, packed: str | Path, against: str | Path | None) -> nn.Module:
    """The dense model: the packed one decoded, or another one of the same shape and dtype."""
    dense: nn.Module
    layers = _packed_layers(model)
    dtypes = {layer.dtype for layer in layers.values()}
    needed = sum(layer.in_features * layer.out_features * layer.dtype.itemsize for layer in layers.values())
    memory.check_fits(needed, torch.device("cpu"), stage="The dense model", advice="Measure on a machine with more memory.")
    if against is None:
        dense = unpacked(model)
        for module in [module for module in dense.modules() if isinstance(module, PackedExperts)]:
            module.become_dense()  # which transformers computes in its own way
        return dense
    of_experts = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, PackedExperts))
    dense = open_checkpoint(checkpoint_name(against)).load(dtype_name(dtypes.pop()))
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
