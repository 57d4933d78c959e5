"""The stages of a run that change the model: allocation, pruning block by block, and training of the whole model."""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, overload

from torch import Tensor, nn

from sparsellm.activations.fisher import FisherFactors
from sparsellm.activations.sensitivity import iterate_output_sensitivities
from sparsellm.checkpoints.loading import Checkpoint
from sparsellm.methods import BlockResult, Plan
from sparsellm.methods.rounding import IntegerValues
from sparsellm.models.blocks import Block, blocks_of
from sparsellm.models.loaded_model import LoadedModel
from sparsellm.models.output_head import blocks_and_head
from sparsellm.pipeline.cached_allocation import Allocated, cached_allocation
from sparsellm.pipeline.events import (
    ALLOCATION,
    ANSWERING,
    CONTINUING,
    GENERATING,
    LAYERS,
    LOADING,
    MEASURING,
    MEASURING_CHECKPOINT,
    PREDICTING,
    PRUNING,
    RECOVERING,
    SENSITIVITIES,
    TRAINING,
    Advance,
    Observer,
    add_note,
    phase,
)
from sparsellm.pipeline.journal import Journal
from sparsellm.pipeline.preparation import Prepared
from sparsellm.pipeline.recipe import Recipe, RunRecipe
from sparsellm.pipeline.recipe_fields import RULES
from sparsellm.pipeline.recipe_methods import integer_values
from sparsellm.pipeline.recovery import BlockRecovery
from sparsellm.pipeline.recovery_recipe import RecoveryRecipe
from sparsellm.pipeline.report import Report
from sparsellm.pipeline.sequential import prune_blocks
from sparsellm.pipeline.training import count_generated, model_step, trains_outside
from sparsellm.pipeline.training_outcome import WHOLE_MODEL, why_unchanged
from sparsellm.pipeline.workspace import TRAINING_STATE
from sparsellm.runtime import collectives
from sparsellm.solvers.integers import IntegerFormat
from sparsellm.solvers.linalg import count_zeros
from sparsellm.solvers.quantization import Scales
from sparsellm.training.distillation import (
    Group,
    distill,
    group_batches,
    last_states,
    model_training,
)
from sparsellm.training.generation import generate_samples


def stage_names(recipe: RunRecipe, ready: Prepared, *, streamed: bool) -> tuple[str, ...]:
    """Names of the stages of a run from the loading of the model to the last measurement, in running order.

    Args:
        recipe: The run.
        ready: Its method, plan and sequences.
        streamed: Whether the model is read block by block.
    """
    is_recovery, has_head = isinstance(recipe, RecoveryRecipe), blocks_and_head(ready.skeleton, ready.plan)[-1].is_head
    measured = [MEASURING] * len(ready.tests) + [ANSWERING] * bool(recipe.task)
    prompts = [CONTINUING] * len(recipe.prompt)
    layers = recipe.allocation_rule == "fisher" and ready.tests and isinstance(ready.source, Checkpoint)
    costs = [LAYERS] * bool(layers and not streamed and not has_head)
    names = [MEASURING_CHECKPOINT] * bool(is_recovery and ready.tests) + [LOADING]
    names += [f"{name} dense" for name in measured] + prompts + costs
    names += [SENSITIVITIES] * ready.method.needs_fisher
    if recipe.allocation_rule in RULES[1:]:
        names.append(f"{ALLOCATION} ({recipe.allocation_rule})")
    names += [GENERATING, PREDICTING] if recipe.model_steps else []
    names.append(RECOVERING if is_recovery else PRUNING)
    names += [TRAINING] if recipe.model_steps else []
    names += [f"{name} pruned" for name in measured] + prompts + costs
    return tuple(names)


STORING_SHARE = 0.1
"""Largest fraction of the time of a training that storing its states takes, after the first one."""


def prune_model(
    loaded: LoadedModel,
    ready: Prepared,
    batches: Sequence[Tensor],
    *,
    report: Report,
    observer: Observer,
    journal: Journal | None,
    facts: AbstractContextManager[Journal | None] | None = None,
) -> None:
    """Allocate sparsity, prune or recover block by block, and train the whole model, each if the recipe says so.

    Args:
        ready: The method, and the pattern of each layer to prune; an allocation rule replaces the patterns.
        batches: Calibration token ids, each (batch, length) without padding.
        journal: Stores finished blocks; None for a run that cannot be resumed.
        facts: Opens the journal that caches results on the dense model. Default: `journal`.
    """
    recipe, plan, method = report.recipe, ready.plan, ready.method
    blocks = blocks_and_head(loaded.model, plan)
    metrics: Sequence[Tensor] = []
    factors: Mapping[str, FisherFactors] = {}
    allocated: Allocated | None = None
    values: IntegerValues | None = integer_values(recipe) if isinstance(recipe, Recipe) else None
    with facts or nullcontext(journal) as cache:
        if ready.method.needs_fisher:
            with phase(SENSITIVITIES, report, observer, unit="block") as advance:
                metrics = _cached_sensitivities(loaded, batches, cache, advance)
        if isinstance(recipe, Recipe) and recipe.allocation_rule in RULES[1:]:
            with phase(f"{ALLOCATION} ({recipe.allocation_rule})", report, observer) as advance:
                allocated = cached_allocation(recipe, loaded, batches, plan=plan, cache=cache)
                plan, factors, values = allocated.plan, allocated.factors, allocated.values or values
                advance(1, 1)
        training = None
        if recipe.model_steps:
            is_changed = isinstance(method, BlockRecovery) and bool(method.outside)  # by an earlier recovery
            copies_head = blocks[-1].is_head or is_changed or trains_outside(recipe, method)
            training = _training_data(
                loaded, ready.windows, batches, report=report, observer=observer, cache=cache, copies_head=copies_head
            )
    if values:
        method = replace(method, values=values)  # type: ignore[type-var]
    if journal and isinstance(method, BlockRecovery):
        method = replace(method, store=JournalStore(journal).begin)
    visited = sum(any(block.full_name(name) in plan for name in block.layers) for block in blocks)
    name = RECOVERING if isinstance(recipe, RecoveryRecipe) else PRUNING
    with phase(name, report, observer, blocks=visited, layers=len(plan)):
        for step in prune_blocks(loaded, batches, method, plan, metrics=metrics, factors=factors, journal=journal):
            observer(step)
            if isinstance(step, BlockResult):
                report.blocks.append(step)
                if allocated:
                    allocated.spend(step, blocks[step.index])
    if isinstance(method, BlockRecovery) and method.outside:
        method.copy_outside(loaded, journal)
        report.changed_outside = method.outside
    if training:
        _train(loaded, ready, training, plan=plan, report=report, observer=observer, journal=journal)


def _train(
    loaded: LoadedModel,
    ready: Prepared,
    training: TrainingData,
    *,
    plan: Plan,
    report: Report,
    observer: Observer,
    journal: Journal | None,
) -> None:
    """Train the whole model, of rounded layers the integers and scales, and set the report's result."""
    blocks = blocks_and_head(loaded.model, plan)
    with phase(TRAINING, report, observer, unit="step") as advance:
        store = JournalStore(journal).begin(WHOLE_MODEL) if journal else None
        settings = _training_settings(report, loaded, ready)
        result, changed = distill(loaded.model, plan=plan, progress=advance, store=store, **settings, **vars(training))
        report.blocks = [_update_zeros(block, blocks[block.index]) for block in report.blocks]
        report.add_changes(changed)
    observer(result)
    if result.note:
        add_note(f"{TRAINING}: {result.note}", report, observer)
    elif result.steps == 0 and result.curve:
        add_note(f"{TRAINING}: {why_unchanged(result, report.recipe)}", report, observer)
    report.recovered = result


def _training_settings(report: Report, loaded: LoadedModel, ready: Prepared) -> dict[str, Any]:
    """The arguments of `distill` that the recipe and the results so far set."""
    recipe = report.recipe
    scales = {
        layer.name: Scales(block.scales[layer.name], format)
        for block in report.blocks
        for layer in block.layers
        if layer.name in block.scales and (format := IntegerFormat.of(layer))
    }
    outside = trains_outside(recipe, ready.method)
    settings: dict[str, Any] = {"scales": scales, "products": loaded.products, "outside": outside}
    adam_of = partial(model_training, loaded.model, recipe.model_steps)
    if not isinstance(recipe, RecoveryRecipe):
        return {**settings, "adam": adam_of()}
    targets = ready.method.targets if isinstance(ready.method, BlockRecovery) else None
    adam = adam_of(train=recipe.train, rank=recipe.lora_rank, patience=recipe.patience)
    return {**settings, "adam": adam, "train": recipe.train, "targets": targets}


class JournalStore:
    """A `TrainingStore` in the journal of a run, for one training after the other; the last state of the last one is kept.

    A state is left out if it comes so soon after the one before that storing takes more than `STORING_SHARE` of the time.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal, self._training = journal, ""
        self._last, self._seconds = time.monotonic(), 0.0

    def begin(self, training: str) -> JournalStore:
        """Store the states of the training of this name from now on; returns the store."""
        self._training, self._last = training, time.monotonic()
        return self

    def save(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Replace the stored state."""
        began = time.monotonic()
        if not collectives.broadcast_object(began - self._last >= self._seconds / STORING_SHARE):
            return
        on_cpu = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
        self._journal.replace(TRAINING_STATE, on_cpu, {"training": self._training, "state": dict(values)})
        self._last = time.monotonic()
        self._seconds = self._last - began

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The stored state of this training, or None."""
        fact = self._journal.fact(TRAINING_STATE)
        stored = self._journal.latest(TRAINING_STATE) if fact and fact["value"]["training"] == self._training else None
        return (stored[0], stored[1]["state"]) if stored else None


@dataclass(frozen=True, eq=False)
class TrainingData:
    """What whole-model training reads: the arguments of `distill` that are made with the dense model."""

    groups: list[Group]
    states: list[Group]
    held_out: int
    head: nn.Module | None


def _training_data(
    loaded: LoadedModel,
    windows: Tensor,
    batches: Sequence[Tensor],
    *,
    report: Report,
    observer: Observer,
    cache: Journal | None,
    copies_head: bool,
) -> TrainingData:
    """Generate sequences with the dense model, and compute its last hidden states on these and on the calibration sequences."""
    recipe = report.recipe
    with phase(GENERATING, report, observer, unit="sequence") as advance:
        count = count_generated(recipe, *windows.shape)
        generated = cached_samples(loaded, windows, count, seed=recipe.seed, cache=cache, advance=advance)
    per_step = model_step(*windows.shape)
    groups, held_out = group_batches(windows, generated, per_step, min(per_step, max(map(len, batches))))
    with phase(PREDICTING, report, observer) as advance:
        states = last_states(loaded.model, groups, loaded.compute)
        head = copy.deepcopy(loaded.model.get_output_embeddings()) if copies_head else None
        advance(1, 1)
        return TrainingData(groups, states, held_out, head)


def cached_samples(
    loaded: LoadedModel, windows: Tensor, count: int, *, seed: int, cache: Journal | None, advance: Advance
) -> Tensor:
    """Sequences that the dense model generates, (count, seq), from the cache or computed and stored there."""
    name = f"generated-{count}-{len(windows)}-{seed}"
    stored = cache.tensors(name) if cache else None
    if stored is not None:
        return stored["x"]
    generated = generate_samples(loaded.model, windows, count, seed=seed, compute=loaded.compute, progress=advance)
    if cache:
        cache.keep_tensors(name, {"x": generated.contiguous()})
    return generated


class JournalTensors(Sequence[Tensor]):
    """Numbered tensors of a journal, read on access."""

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
            raise TypeError("The tensors are read one by one: slices are not supported.")
        number = range(self._count)[index]
        tensors = self._journal.tensors(f"{self._name}-{number}")
        if tensors is None:
            raise KeyError(f"{self._name} {number} is not in the journal.")
        return tensors["x"]


def _cached_sensitivities(
    loaded: LoadedModel, batches: Sequence[Tensor], cache: Journal | None, advance: Advance
) -> Sequence[Tensor]:
    """The sensitivities by block, from the cache; computed and stored there unless all are present."""
    name, count = "sensitivity", len(blocks_of(loaded.model))
    computed: dict[int, Tensor] = {}
    if cache is None or any(cache.fact(f"{name}-{number}") is None for number in range(count)):
        for number, sensitivity in iterate_output_sensitivities(loaded, batches):
            if cache is None:
                computed[number] = sensitivity
            else:
                cache.keep_tensors(f"{name}-{number}", {"x": sensitivity})
            advance(count - number, count)
    return JournalTensors(cache, name, count) if cache else [computed[number] for number in range(count)]


def _update_zeros(result: BlockResult, block: Block) -> BlockResult:
    """A block's result with the zeros after whole-model training."""
    zeros = {block.full_name(name): count_zeros(layer.weight) for name, layer in block.layers.items()}
    return replace(result, layers=tuple(replace(layer, zeros=zeros[layer.name]) for layer in result.layers))
