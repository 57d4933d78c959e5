"""The stages of a run that change the model: sharing out, pruning block by block, training the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import overload

import torch
from torch import Tensor

from sparsellm.activations.sensitivity import iterate_output_sensitivities, output_sensitivities
from sparsellm.checkpoints.loaded_model import LoadedModel
from sparsellm.methods import BlockMethod, BlockResult, Plan
from sparsellm.models.blocks import Block, blocks_of
from sparsellm.pruning.allocation import allocate
from sparsellm.pruning.journal import Journal
from sparsellm.pruning.sequential import prune_blocks
from sparsellm.recovery.distillation import (
    Group,
    count_held_out,
    distill,
    generate_samples,
    group_batches,
    last_states,
    model_training,
)
from sparsellm.runs.events import (
    PRUNING,
    READING_PREDICTIONS,
    RECOVERING,
    SENSITIVITIES,
    SHARING,
    TRAINING,
    WRITING_WINDOWS,
    Observer,
    add_note,
    phase,
)
from sparsellm.runs.preparation import model_step, model_written
from sparsellm.runs.recipe import Recipe, RecoveryRecipe, RunRecipe
from sparsellm.runs.registry import ALLOCATIONS
from sparsellm.runs.report import Report
from sparsellm.solvers.linalg import count_zeros
from sparsellm.solvers.patterns import Unstructured


def prune_model(
    recipe: RunRecipe,
    loaded: LoadedModel,
    method: BlockMethod,
    plan: Plan,
    batches: Sequence[Tensor],
    report: Report,
    observer: Observer,
    journal: Journal | None,
    facts: AbstractContextManager[Journal | None] | None = None,
) -> None:
    """Share the sparsity out, prune or recover block by block, and train the whole model, as far as the recipe asks for each.

    facts: where what is found of the dense model is kept, or known already; None for the run's own journal.
    """
    model, compute, weights, storage = loaded.model, loaded.compute, loaded.weights, loaded.storage
    blocks = blocks_of(model)
    with facts or nullcontext(journal) as known:
        metrics, plan = _sense_and_allocate(recipe, loaded, method, plan, batches, report, observer, known)
    groups: list[Group] = []
    states: list[Group] = []
    back = 0
    if recipe.model_steps:
        windows = torch.cat(list(batches))
        with phase(WRITING_WINDOWS, report, observer):
            ours = windows[: -count_held_out(windows)] if len(windows) > 1 else windows
            more = generate_samples(model, ours, model_written(recipe, *windows.shape), recipe.seed, compute)
        with phase(READING_PREDICTIONS, report, observer):
            read = model_step(*windows.shape)
            groups, back = group_batches(windows, more, read, min(read, len(batches[0])))
            states = last_states(model, groups, compute)
    visited = sum(any(block.full_name(name) in plan for name in block.layers) for block in blocks)
    with phase(RECOVERING if isinstance(recipe, RecoveryRecipe) else PRUNING, report, observer, visited):
        for step in prune_blocks(model, batches, method, plan, compute, metrics, weights, storage, journal):
            observer(step)
            if isinstance(step, BlockResult):
                report.blocks.append(step)
    if recipe.model_steps:
        with phase(TRAINING, report, observer):
            report.recovered, moved = distill(model, groups, states, plan, model_training(model, recipe.model_steps), back)
            report.blocks = [_with_moved(done, blocks[done.index], moved) for done in report.blocks]
        observer(report.recovered)
        if report.recovered.note:
            add_note(f"{TRAINING}: {report.recovered.note}", report, observer)


def _sense_and_allocate(
    recipe: RunRecipe,
    loaded: LoadedModel,
    method: BlockMethod,
    plan: Plan,
    batches: Sequence[Tensor],
    report: Report,
    observer: Observer,
    known: Journal | None,
) -> tuple[Sequence[Tensor], Plan]:
    """What the dense model shows before it is pruned: what errors of each block's output cost, and the plan shared out."""
    model, compute, weights, storage = loaded.model, loaded.compute, loaded.weights, loaded.storage
    metrics: Sequence[Tensor] = []
    if method.needs_fisher:
        with phase(SENSITIVITIES, report, observer):
            if known is None:
                metrics = output_sensitivities(model, batches, compute, weights, storage)
            else:
                find = partial(iterate_output_sensitivities, model, batches, compute, weights, storage)
                metrics = _remembered(known, len(blocks_of(model)), find)
    if isinstance(recipe, Recipe) and recipe.sharing in ALLOCATIONS[1:]:
        with phase(f"{SHARING} {recipe.sharing}", report, observer):
            where = f"blocks {recipe.blocks}, include {recipe.include}, exclude {recipe.exclude}"
            asked = f"shares by {recipe.sharing} of {recipe.sparsity} within {recipe.bounds}, {where}"
            shares = known.fact(asked) if known else None
            if shares is None:
                plan = allocate(recipe.sharing, model, batches, plan, compute, recipe.bounds, weights, storage)
                if known:
                    known.note(asked, {name: pattern.sparsity for name, pattern in plan.items()})
            else:
                plan = {name: Unstructured(share) for name, share in shares.items()}
    return metrics, plan


class JournalTensors(Sequence[Tensor]):
    """Tensors in a journal, one for each number, read when they are asked for."""

    def __init__(self, journal: Journal, name: str, count: int) -> None:
        self._journal, self._name, self._count = journal, name, count

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | Sequence[Tensor]:
        if isinstance(index, slice):
            raise TypeError("They are read one by one.")
        number = range(self._count)[index]
        found = self._journal.tensors(f"{self._name}-{number}")
        if found is None:
            raise KeyError(f"{self._name} {number} is not in the journal.")
        return found["x"]


def _remembered(journal: Journal, count: int, find: Callable[[], Iterator[tuple[int, Tensor]]]) -> Sequence[Tensor]:
    """The sensitivities, by way of the journal: from there where a run that is resumed had found them all."""
    name = "sensitivity"
    if any(journal.fact(f"{name}-{number}") is None for number in range(count)):
        for number, found in find():
            journal.keep_tensors(f"{name}-{number}", {"x": found})
    return JournalTensors(journal, name, count)


def _with_moved(done: BlockResult, block: Block, moved: Sequence[str]) -> BlockResult:
    """A block's result after the whole model's stage: what else moved, and its zeros as they now are."""
    local = {name for name in moved if name.startswith(f"{done.name}.")}
    zeros = {block.full_name(name): count_zeros(layer.weight) for name, layer in block.layers.items()}
    layers = [replace(layer, zeros=zeros[layer.name]) for layer in done.layers]
    return replace(done, changed_parameters=tuple(sorted({*done.changed_parameters, *local})), layers=tuple(layers))
