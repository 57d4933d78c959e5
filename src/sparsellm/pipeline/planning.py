"""What each stage of a run takes, whether that fits into memory, and what would make it fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sparsellm.checkpoints.loading import Checkpoint, InMemoryModel
from sparsellm.errors import TooLarge
from sparsellm.models.output_head import blocks_and_head
from sparsellm.pipeline.block_recovery import recovery_plan
from sparsellm.pipeline.compute_dtype import bf16_pass_speedup, choose_products
from sparsellm.pipeline.costs import Cost, Work, rates, work
from sparsellm.pipeline.estimates import PeakEstimate, RunPlan, StageEstimate, check_disk, free_disk
from sparsellm.pipeline.events import GENERATING, MEASURING, MEASURING_CHECKPOINT, PREDICTING, Event, Note, Observer
from sparsellm.pipeline.input_digests import check_inputs
from sparsellm.pipeline.loading import SHARE, STREAMS_SHARE, Placement, choose_placement, open_model
from sparsellm.pipeline.preparation import (
    Prepared,
    PreparedPruning,
    PreparedRecovery,
    make_plan,
    prepare_pruning,
    prepare_recovery,
    pruning_layers,
    recovery_layers,
)
from sparsellm.pipeline.recipe import Recipe
from sparsellm.pipeline.recovery_recipe import RecoveryRecipe
from sparsellm.pipeline.report import Report
from sparsellm.pipeline.stage_costs import pruning_costs, recovery_costs
from sparsellm.runtime.memory import available, current_memory, human_bytes, release_free_memory
from sparsellm.texts.in_memory import Given

FREED_SHARE, FREED_BYTES = 0.4, 128 * 2**20
"""Freed memory that the processor's allocator keeps: this fraction of the data, at most so many bytes; measured on glibc."""

Costs = Callable[[Any, Placement, int], Iterator[tuple[str, Cost]]]
"""What each stage of a prepared run takes with a placement and a number of sequences per batch: see `stage_costs`."""


def plan_pruning(
    recipe: Recipe, output: str | Path | None = None, *, given: Given | None = None, source: InMemoryModel | None = None
) -> RunPlan:
    """Estimate what `prune` would take, without reading weights.

    Args:
        recipe: The run.
        output: The folder that it would write, for the free bytes of its disk.
        given: Data that replace the recipe's texts, in forms of `sparsellm.texts.in_memory`.
        source: Model in memory that replaces the recipe's.
    """
    check_inputs(recipe, given)
    opened = open_model(recipe, source)
    report, notes, observe = Report(recipe), *_noted()
    method, plan = make_plan(recipe, opened)
    ready = prepare_pruning(opened, recipe, method, plan, report=report, observer=observe, given=given)
    folder, refusal = Path(output or "."), ""
    placement, batch = _placement(ready), ready.batch
    try:
        placement, batch = fit_to_memory(ready, placement, observer=observe, output=folder)
    except TooLarge as error:
        refusal = str(error)
    estimated = _estimate(ready, pruning_costs, placement, batch=batch, output=folder, report=report, notes=notes)
    return replace(estimated, fits=estimated.fits and not refusal, refusal=refusal, each_layer=pruning_layers(ready))


def plan_recovery(
    recipe: RecoveryRecipe, output: str | Path | None = None, *, given: Given | None = None, source: InMemoryModel | None = None
) -> RunPlan:
    """Estimate what `recover` would take, as `plan_pruning` does."""
    check_inputs(recipe, given)
    opened = open_model(recipe, source)
    report, notes, observe = Report(recipe), *_noted()
    method, plan, _ = recovery_plan(recipe, opened.source, verified=False)
    ready = prepare_recovery(opened, recipe, method, plan, report=report, observer=observe, given=given)
    folder, refusal, placement = Path(output or "."), "", _placement(ready)
    try:
        fit_to_disk(ready, placement, observer=observe, output=folder)
    except TooLarge as error:
        refusal = str(error)
    estimated = _estimate(ready, recovery_costs, placement, batch=ready.batch, output=folder, report=report, notes=notes)
    return replace(estimated, fits=estimated.fits and not refusal, refusal=refusal, each_layer=recovery_layers(ready))


def _noted() -> tuple[list[str], Observer]:
    """A list, and an observer that adds the notes to it that a run would give before its work."""
    notes: list[str] = []

    def observe(event: Event) -> None:
        notes.extend([event.text] if isinstance(event, Note) else [])

    return notes, observe


def _placement(ready: Prepared) -> Placement:
    """Where the model would be held, before anything is changed to make it fit."""
    placement = choose_placement(ready.recipe, ready, files=True)
    placement = replace(placement, products=choose_products(ready))
    if isinstance(ready.source, InMemoryModel):  # its weights are no longer part of the free memory
        placement = replace(placement, memory=placement.memory + placement.model)
    return placement


def _estimate(
    ready: Prepared,
    costs: Costs,
    placement: Placement,
    *,
    batch: int,
    output: Path,
    report: Report,
    notes: Sequence[str],
) -> RunPlan:
    """Estimate a run with the time of its stages, what of the model is pruned, and the notes before its work."""
    release_free_memory()  # what tokenizing took
    estimated = estimate(ready, costs, placement, batch=batch, output=output, speed=rates(ready.device))
    return replace(estimated, coverage=report.coverage, notes=tuple(notes))


def estimate(
    ready: Prepared,
    costs: Costs,
    placement: Placement,
    *,
    batch: int,
    output: Path | None = None,
    speed: Work | None = None,
) -> RunPlan:
    """Estimate what a run takes. Its time needs `speed`, this machine's `rates`."""
    by_stage, device = dict(costs(ready, placement, batch)), ready.device.type
    speeds = {name: None if speed is None else _layer_rates(speed, ready, placement, name) for name in by_stage}
    stages = [
        _estimate_stage(name, cost, device=device, placement=placement, speed=speeds[name]) for name, cost in by_stage.items()
    ]
    peak = max(stages, key=lambda stage: stage.memory[device])
    host, libraries = max(stage.memory["cpu"] for stage in stages), current_memory()
    held = isinstance(ready.source, InMemoryModel)
    resident = libraries - placement.model * (held and device == "cpu") + host + min(int(FREED_SHARE * host), FREED_BYTES)
    written = placement.model * (1 if placement.streamed or held else 2)  # finished blocks, and the output
    written += ready.source.stamps.document_bytes if isinstance(ready.source, Checkpoint) else 0
    state, disk_free = int(max(cost.state for cost in by_stage.values())), free_disk(output or Path())
    # While a new state of the training is written, the one before is there; the last one is still there with the output.
    files = max(stage.files for stage in stages)
    disk = max(written + files, written + state, placement.model + files + 2 * state)
    streams, room = sum(by_stage[ready.stage].lists), max(disk_free - written, STREAMS_SHARE * placement.memory)
    planned = blocks_and_head(ready.skeleton, ready.plan)
    layers = [(block.full_name(name), layer) for block in planned for name, layer in block.layers.items()]
    shapes = {name: (layer.out_features, layer.in_features) for name, layer in layers}
    return RunPlan(
        recipe=ready.recipe,
        blocks=len(ready.blocks),
        layers=Counter((str(ready.plan[name]), shape) for name, shape in shapes.items() if name in ready.plan),
        samples=len(ready.windows),
        length=ready.length,
        batch=batch,
        device=device,
        placement=placement,
        free_bytes=available(ready.device),
        disk_free_bytes=disk_free,
        stages=stages,
        peak=PeakEstimate(peak.name, peak.memory[device], libraries, resident, disk),
        seconds=sum(stage.seconds for stage in stages),
        most_samples=int(room * len(ready.windows) / streams) if streams else None,
        fits=peak.memory[device] <= placement.memory,
    )


def fit_to_memory(
    ready: PreparedPruning, placement: Placement, *, observer: Observer, output: Path | None = None
) -> tuple[Placement, int]:
    """Choose where the model is held and the batch size, so that pruning keeps within the memory.

    If the run does not fit as it is, the model is read block by block, and then batches become smaller, as far as the recipe
    leaves either open.

    Args:
        ready: The run, before weights are read.
        placement: Where the model would be held.
        observer: Told of a smaller batch; the placement's note tells of reading block by block.
        output: The folder that the run writes.

    Returns:
        The placement, and the number of sequences per batch.

    Raises:
        TooLarge: If nothing fits; the message says what would.
    """
    if isinstance(ready.source, InMemoryModel):
        return placement, ready.batch  # a model that is in memory is pruned whatever the memory
    recipe, attempt = ready.recipe, partial(estimate, ready, pruning_costs, output=output)
    plan = attempt(placement, batch=ready.batch)
    if not plan.fits and recipe.offload is None and not placement.streamed:
        plan = attempt(_streamed(plan, ready, files=output is not None), batch=plan.batch)
    if not plan.fits and plan.placement.ahead:
        plan = attempt(replace(plan.placement, ahead=False), batch=plan.batch)
    while not plan.fits and plan.batch > 1 and recipe.batch_size is None:
        plan = attempt(plan.placement, batch=plan.batch // 2)
    if not plan.fits:
        raise TooLarge(_refusal(plan, ready))
    if output:
        check_disk(output, plan.peak.disk_bytes, plan.disk_free_bytes)
    if plan.batch < ready.batch:
        observer(Note(f"{plan.batch} windows at a time, where {ready.batch} are usual: more would not fit the memory"))
    # Holes in the processor's heap can be as large as the data. A run that has little memory returns freed memory at once.
    tight = plan.placement.streamed or 2 * plan.peak.data_bytes > placement.memory
    return replace(plan.placement, tight=tight and plan.device == "cpu"), plan.batch


def fit_to_disk(
    ready: PreparedRecovery, placement: Placement, *, observer: Observer, output: Path | None = None
) -> tuple[Placement, int]:
    """Check that a recovery fits on the disk, as `fit_to_memory`; `prepare_recovery` refuses one that needs more memory."""
    if output and not isinstance(ready.source, InMemoryModel):
        plan = estimate(ready, recovery_costs, placement, batch=ready.batch, output=output)
        check_disk(output, plan.peak.disk_bytes, plan.disk_free_bytes)
    return placement, ready.batch


def _estimate_stage(name: str, cost: Cost, *, device: str, placement: Placement, speed: Work | None) -> StageEstimate:
    """Place a stage's lists as `OffloadManager` does: on the device while there is room, then on its host, then in files."""
    memory, files = {"cpu": 0, device: int(cost.memory)}, 0
    room = {device: STREAMS_SHARE * placement.memory}
    if device != "cpu":
        room["cpu"] = STREAMS_SHARE * SHARE * available(torch.device("cpu"))
    for size in map(int, cost.lists):
        where = next((where for where, free in room.items() if size <= free), None)
        if where is None:
            files += size
        else:
            room[where] -= size
            memory[where] += size
    seconds = float("nan") if speed is None else cost.seconds + float((cost.work / speed).sum())
    return StageEstimate(name, memory, files, float(cost.work[:-1].sum()), seconds)


WITHOUT_PRODUCTS = (MEASURING, MEASURING_CHECKPOINT, PREDICTING, GENERATING)
"""Stages whose passes are not in the dtype of `compute_dtype`."""


def _layer_rates(speed: Work, ready: Prepared, placement: Placement, stage: str) -> Work:
    """The rates `speed` of a machine, with that of a stage's products of layers where these are in 16 bits."""
    stored = ready.source.dtype(ready.recipe.dtype).itemsize
    native = ready.device.type != "cpu" and stored == 2 and not ready.recipe.in_float32
    chosen = placement.products is not None and stage not in WITHOUT_PRODUCTS
    gain = bf16_pass_speedup(ready.device) if native or chosen else 1.0
    return speed * work(1, layers=gain, factors=1, spectra=1, passes=1)


def _streamed(plan: RunPlan, ready: Prepared, files: bool) -> Placement:
    """The placement of a run that does not fit although its model does: block by block, if possible."""
    try:
        placement = choose_placement(plan.recipe.model_copy(update={"offload": True}), ready, files=files)
    except TooLarge:
        return plan.placement
    needed = f"{plan.peak.stage} would need {human_bytes(plan.peak.data_bytes)}"
    note = f"{placement.note}: {needed}, and {human_bytes(placement.memory)} may be taken"
    return replace(placement, note=note) if placement.streamed else plan.placement


def _refusal(plan: RunPlan, ready: PreparedPruning) -> str:
    """Why a run is refused, and the first change of its settings with which it would fit."""
    recipe, placement, data = ready.recipe, plan.placement, plan.peak.data_bytes
    fewer = ", with one window at a time" if plan.batch < ready.batch else ""
    needed = f"{plan.peak.stage.capitalize()} needs {human_bytes(data)} of memory on {ready.device}{fewer}"
    message = f"{needed}, and {human_bytes(placement.memory)} may be taken."
    changes: list[dict[str, Any]] = []
    if not placement.streamed and recipe.offload is False and not recipe.model_steps:
        changes.append({"offload": True})
    if recipe.batch_size is not None and recipe.batch_size > 1:
        changes.append({"batch_size": 1})
    changes += [{"sequence_length": n} for n in (ready.length // 2, ready.length // 4) if n >= 128]
    for change in changes:
        changed, length = recipe.model_copy(update=change), change.get("sequence_length", ready.length)
        shortened = replace(ready, recipe=changed, length=length, windows=ready.windows[:, :length])
        held = replace(placement, streamed=placement.streamed or "offload" in change, ahead=False)
        if estimate(shortened, pruning_costs, held, batch=changed.batch_size or 1).fits:
            ((name, value),) = change.items()
            return f"{message} Pass `{name}={value!r}`."
    if recipe.max_memory is not None and data <= SHARE * plan.free_bytes:
        return f"{message} Pass `max_memory='{-(-data // 10**6)}MB'`."
    return f"{message} Use a machine with more memory, or `method='wanda'` or `method='magnitude'`, which need least."
