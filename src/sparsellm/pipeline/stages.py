"""Stages that pruning and recovery share: output sensitivities, and gradient steps over the whole model."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

from torch import Tensor, nn

from sparsellm.activations.sensitivity import iterate_output_fisher
from sparsellm.methods import BlockResult, Plan, TrainingResult
from sparsellm.models.blocks import Block, blocks_of
from sparsellm.models.loaded_model import LoadedModel
from sparsellm.models.output_head import blocks_and_head
from sparsellm.pipeline.events import GENERATING, PREDICTING, SENSITIVITIES, TRAINING, Advance, Observer, add_note, run_stage
from sparsellm.pipeline.journal import Journal
from sparsellm.pipeline.preparation import Prepared
from sparsellm.pipeline.report import Report
from sparsellm.pipeline.training import ModelTraining, model_step
from sparsellm.pipeline.training_outcome import WHOLE_MODEL
from sparsellm.pipeline.work_directory import TRAINING_STATE
from sparsellm.runtime import collectives
from sparsellm.solvers.integers import IntegerFormat
from sparsellm.solvers.linalg import count_zeros
from sparsellm.solvers.quantization import Scales
from sparsellm.training.distillation import Group, adam_for, distill, group_batches, last_states
from sparsellm.training.generation import generate_samples

STORING_SHARE = 0.1
"""Largest fraction of the time of a training that storing its states takes, after the first one."""


def estimate_fisher(
    loaded: LoadedModel, batches: Sequence[Tensor], *, report: Report, observer: Observer, cache: Journal | None
) -> Sequence[Tensor]:
    """The sensitivities by block, as `output_fisher`, from the cache or computed and stored there."""
    with run_stage(SENSITIVITIES, report, observer, unit="block") as advance:
        return _cached_fisher(loaded, batches, cache, advance)


def train_model(
    loaded: LoadedModel,
    training: ModelTraining,
    data: TrainingData,
    *,
    plan: Plan,
    report: Report,
    observer: Observer,
    journal: Journal | None,
    why_unchanged: Callable[[TrainingResult], str],
) -> None:
    """Train the whole model, of rounded layers the integers and scales, and set the report's result.

    Args:
        data: What was computed with the dense model.
        plan: The layers whose zeros are kept.
        why_unchanged: Says of a training of which no step lowered the loss why, and what to change.
    """
    blocks = blocks_and_head(loaded.model, plan)
    scales = {
        layer.name: Scales(block.scales[layer.name], format)
        for block in report.blocks
        for layer in block.layers
        if layer.name in block.scales and (format := IntegerFormat.of(layer))
    }
    adam = adam_for(loaded.model, training.steps, train=training.train, rank=training.rank, patience=training.patience)
    with run_stage(TRAINING, report, observer, unit="step") as advance:
        result, changed = distill(
            loaded.model,
            data.groups,
            data.states,
            plan=plan,
            adam=adam,
            train=training.train,
            targets=training.targets,
            scales=scales,
            products=loaded.products,
            outside=training.trains_outside,
            progress=advance,
            store=JournalStore(journal).begin(WHOLE_MODEL) if journal else None,
            head=data.head,
            held_out=data.held_out,
        )
        report.blocks = [_update_zeros(block, blocks[block.index]) for block in report.blocks]
        report.add_changes(changed)
    observer(result)
    if result.note:
        add_note(f"{TRAINING}: {result.note}", report, observer)
    elif result.steps == 0 and result.curve:
        add_note(f"{TRAINING}: {why_unchanged(result)}", report, observer)
    report.recovered = result


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
        self._journal.store_latest(TRAINING_STATE, on_cpu, {"training": self._training, "state": dict(values)})
        self._last = time.monotonic()
        self._seconds = self._last - began

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The stored state of this training, or None."""
        fact = self._journal.fact(TRAINING_STATE)
        stored = self._journal.latest(TRAINING_STATE) if fact and fact["value"]["training"] == self._training else None
        return (stored[0], stored[1]["state"]) if stored else None


@dataclass(frozen=True, eq=False)
class TrainingData:
    """The arguments of `distill`, which trains the whole model, that are made with the dense model."""

    groups: list[Group]
    states: list[Group]
    held_out: int
    head: nn.Module | None


def training_data(
    loaded: LoadedModel,
    ready: Prepared,
    training: ModelTraining,
    batches: Sequence[Tensor],
    *,
    report: Report,
    observer: Observer,
    cache: Journal | None,
    copies_head: bool,
) -> TrainingData:
    """Generate sequences with the dense model, and compute its last hidden states on these and on the calibration sequences."""
    windows, seed = ready.windows, ready.recipe.seed
    with run_stage(GENERATING, report, observer, unit="sequence") as advance:
        count = training.count_generated(*windows.shape)
        generated = cached_samples(loaded, windows, count, seed=seed, cache=cache, advance=advance)
    per_step = model_step(*windows.shape)
    groups, held_out = group_batches(windows, generated, per_step, min(per_step, max(map(len, batches))))
    with run_stage(PREDICTING, report, observer) as advance:
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
        cache.store_tensors(name, {"x": generated.contiguous()})
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


def _cached_fisher(loaded: LoadedModel, batches: Sequence[Tensor], cache: Journal | None, advance: Advance) -> Sequence[Tensor]:
    """The sensitivities by block, from the cache; computed and stored there unless all are present."""
    name, count = "sensitivity", len(blocks_of(loaded.model))
    computed: dict[int, Tensor] = {}
    if cache is None or any(cache.fact(f"{name}-{number}") is None for number in range(count)):
        for number, sensitivity in iterate_output_fisher(loaded, batches):
            if cache is None:
                computed[number] = sensitivity
            else:
                cache.store_tensors(f"{name}-{number}", {"x": sensitivity})
            advance(count - number, count)
    return JournalTensors(cache, name, count) if cache else [computed[number] for number in range(count)]


def _update_zeros(result: BlockResult, block: Block) -> BlockResult:
    """A block's result with the zeros after whole-model training."""
    zeros = {block.full_name(name): count_zeros(layer.weight) for name, layer in block.layers.items()}
    return replace(result, layers=tuple(replace(layer, zeros=zeros[layer.name]) for layer in result.layers))
