"""What each stage of a run takes, whether that fits into memory, and what would make it fit."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sparsellm.checkpoints.loading import Checkpoint, InMemoryModel
from sparsellm.errors import TooLarge
from sparsellm.methods import BlockMethod
from sparsellm.models.output_head import blocks_and_head
from sparsellm.pipeline.compute_dtype import bf16_speedup, choose_products
from sparsellm.pipeline.costs import Cost, Work, rates, work
from sparsellm.pipeline.early_checks import check_inputs
from sparsellm.pipeline.estimates import PeakEstimate, RunPlan, StageEstimate, check_disk, free_disk
from sparsellm.pipeline.events import RECOVERING, TRAINING, Event, Note, Observer
from sparsellm.pipeline.loading import SHARE, STREAMS_SHARE, Placement, choose_placement, open_model
from sparsellm.pipeline.preparation import Prepared, make_plan, prepare, recipe_layers
from sparsellm.pipeline.recipe import Recipe, RunRecipe
from sparsellm.pipeline.recovery import recovery_plan
from sparsellm.pipeline.recovery_recipe import RecoveryRecipe
from sparsellm.pipeline.report import Report
from sparsellm.pipeline.stage_costs import block_stage, stage_costs
from sparsellm.pipeline.token_sequences import window_length
from sparsellm.pipeline.training_costs import state_bytes
from sparsellm.runtime.memory import available, current_memory, human_bytes, release_free_memory
from sparsellm.texts.in_memory import Given

FREED_SHARE, FREED_BYTES = 0.4, 128 * 2**20
"""Freed memory that the processor's allocator keeps: this fraction of the data, at most so many bytes; measured on glibc."""

MOST_BITS = 62
"""By how many places an int64 can be shifted to the right."""


def plan_run(
    recipe: Recipe | RecoveryRecipe,
    output: str | Path | None = None,
    *,
    given: Given | None = None,
    source: InMemoryModel | None = None,
) -> RunPlan:
    """Estimate what `prune` or `recover` would take, without reading weights.

    Args:
        recipe: The run.
        output: The folder that it would write, for the free bytes of its disk.
        given: Data that replace the recipe's texts, in forms of `sparsellm.texts.in_memory`.
        source: Model in memory that replaces the recipe's.
    """
    folder, report, refusal = Path(output or "."), Report(recipe), ""
    notes: list[str] = []

    def observe(event: Event) -> None:
        """Keep the notes that the run would give before its work."""
        notes.extend([event.text] if isinstance(event, Note) else [])

    check_inputs(recipe, given=given, has_model=source is not None)
    opened = open_model(recipe, source)
    if "calibration" not in (given or {}) and recipe.reads_text and recipe.calibration == "demo":
        opened.source.tokenizer()  # raises the error of a model without one
        # Only the number of tokens counts, of sequences that differ, and this text is long enough for any model.
        places = torch.arange(window_length(recipe, opened.source.length)).clamp(max=MOST_BITS)
        given = {**(given or {}), "calibration": torch.arange(recipe.samples).unsqueeze(1) >> places & 1}
    method: BlockMethod
    if isinstance(recipe, RecoveryRecipe):
        method, plan, _ = recovery_plan(recipe, opened.source, verified=False)
    else:
        method, plan = make_plan(recipe, opened)
    ready = prepare(opened, method, plan, report=report, observer=observe, given=given)
    placement, batch = choose_placement(recipe, ready, files=True), ready.batch
    placement = replace(placement, products=choose_products(recipe, ready))
    if source:  # its weights are no longer part of the free memory
        placement = replace(placement, memory=placement.memory + placement.model)
    try:
        placement, batch = fit_to_memory(recipe, ready, placement, observer=observe, output=folder)
    except TooLarge as error:
        refusal = str(error)
    release_free_memory()  # what tokenising took
    estimated = estimate(recipe, ready, placement, batch=batch, output=folder, speed=rates(ready.device))
    each_layer, fits = recipe_layers(recipe, ready), estimated.fits and not refusal
    return replace(estimated, coverage=report.coverage, fits=fits, refusal=refusal, each_layer=each_layer, notes=tuple(notes))


def estimate(
    recipe: RunRecipe,
    ready: Prepared,
    placement: Placement,
    *,
    batch: int,
    output: Path | None = None,
    speed: Work | None = None,
) -> RunPlan:
    """Estimate what a run takes, with the arguments of `fit_to_memory`; its time needs `speed`, this machine's `rates`."""
    costs, device = dict(stage_costs(recipe, ready, placement, batch=batch)), ready.device.type
    stages = [_estimate_stage(name, cost, device=device, placement=placement, speed=speed) for name, cost in costs.items()]
    peak = max(stages, key=lambda stage: stage.memory[device])
    host, libraries = max(stage.memory["cpu"] for stage in stages), current_memory()
    held = isinstance(ready.source, InMemoryModel)
    resident = libraries - placement.model * (held and device == "cpu") + host + min(int(FREED_SHARE * host), FREED_BYTES)
    written = placement.model * (1 if placement.streamed or held else 2)  # finished blocks, and the output
    written += ready.source.stamps.document_bytes if isinstance(ready.source, Checkpoint) else 0
    state, disk_free = state_bytes(recipe, ready), free_disk(output or Path())
    # While a new state of the training is written, the one before is there; the last one is still there with the output.
    files = max(stage.files for stage in stages)
    disk = max(written + files, written + state, placement.model + files + 2 * state)
    streams, room = sum(costs[block_stage(recipe)].lists), max(disk_free - written, STREAMS_SHARE * placement.memory)
    planned = blocks_and_head(ready.skeleton, ready.plan)
    layers = [(block.full_name(name), layer) for block in planned for name, layer in block.layers.items()]
    shapes = {name: (layer.out_features, layer.in_features) for name, layer in layers}
    return RunPlan(
        recipe=recipe,
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
    recipe: RunRecipe, ready: Prepared, placement: Placement, *, observer: Observer, output: Path | None = None
) -> tuple[Placement, int]:
    """Choose where the model is held and the batch size, so that the run keeps within its memory.

    If the run does not fit as it is, the model is read block by block, and then batches become smaller, as far as the recipe
    leaves either open.

    Args:
        recipe: The run.
        ready: Its method, plan and sequences, before weights are read.
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
    attempt = partial(estimate, recipe, ready, output=output)
    plan = attempt(placement, batch=ready.batch)
    if not isinstance(recipe, Recipe):  # `check_memory` refuses a recovery that does not fit
        if output:
            check_disk(output, plan.peak.disk_bytes, plan.disk_free_bytes)
        return placement, ready.batch
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
    if speed is not None and name in (RECOVERING, TRAINING):
        speed = training_rates(speed, placement, torch.device(device))
    seconds = float("nan") if speed is None else cost.seconds + float((cost.work / speed).sum())
    return StageEstimate(name, memory, files, float(cost.work[:3].sum()), seconds)


def training_rates(speed: Work, placement: Placement, device: torch.device) -> Work:
    """The rates of gradient steps on a machine with rates `speed`: products in bfloat16 gain what `bf16_speedup` measured."""
    gain = 1.0 if placement.products is None else bf16_speedup(device)
    return speed * work(gain, factors=1, spectra=1, passes=1)


def _streamed(plan: RunPlan, ready: Prepared, files: bool) -> Placement:
    """The placement of a run that does not fit although its model does: block by block, if possible."""
    try:
        placement = choose_placement(plan.recipe.model_copy(update={"offload": True}), ready, files=files)
    except TooLarge:
        return plan.placement
    needed = f"{plan.peak.stage} would need {human_bytes(plan.peak.data_bytes)}"
    note = f"{placement.note}: {needed}, and {human_bytes(placement.memory)} may be taken"
    return replace(placement, note=note) if placement.streamed else plan.placement


def _refusal(plan: RunPlan, ready: Prepared) -> str:
    """Why a run is refused, and the first change of its settings with which it would fit."""
    recipe, placement, data = plan.recipe, plan.placement, plan.peak.data_bytes
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
        shortened = replace(ready, length=length, windows=ready.windows[:, :length])
        held = replace(placement, streamed=placement.streamed or "offload" in change, ahead=False)
        if estimate(changed, shortened, held, batch=changed.batch_size or 1).fits:
            ((name, value),) = change.items()
            return f"{message} Pass `{name}={value!r}`."
    if recipe.max_memory is not None and data <= SHARE * plan.free_bytes:
        return f"{message} Pass `max_memory='{-(-data // 10**6)}MB'`."
    return f"{message} Use a machine with more memory, or `method='wanda'` or `method='magnitude'`, which need least."
