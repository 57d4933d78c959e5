"""The memory and disk space that a run takes, whether it fits, and what would make it fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sparsellm.checkpoints.loading import Checkpoint, InMemoryModel
from sparsellm.errors import TooLarge
from sparsellm.methods import Memory
from sparsellm.models.output_head import blocks_and_head
from sparsellm.observers.events import Note, Observer
from sparsellm.outputs.folder import free_disk
from sparsellm.pipeline.loading import SHARE, STREAMS_SHARE, Placement, choose_placement
from sparsellm.pipeline.preparation import Prepared, PreparedPruning
from sparsellm.pipeline.stage_memory import pruning_memory
from sparsellm.recipes.recipe import RunRecipe
from sparsellm.runtime.memory import available, current_memory, human_bytes

FREED_SHARE, FREED_BYTES = 0.4, 128 * 2**20
"""Freed memory that the processor's allocator keeps: this fraction of the data, at most so many bytes; measured on glibc."""

StageMemory = Callable[[Any, Placement, int], Iterator[tuple[str, Memory]]]
"""The memory of each stage of a prepared run, by placement and number of sequences per batch: see `stage_memory`."""


@dataclass(frozen=True)
class StageEstimate:
    """Estimates for one stage."""

    name: str  # as in the run's events
    memory: Mapping[str, int]  # bytes of data at the peak, by device type
    files: int  # bytes of hidden states in files


@dataclass(frozen=True)
class PeakEstimate:
    """Estimates for the moment at which most memory is held."""

    stage: str
    data_bytes: int  # on the device that computes
    libraries_bytes: int  # resident in this process, before the run
    resident_bytes: int  # of the run's process
    disk_bytes: int  # with the output and, block by block, the finished blocks


@dataclass(frozen=True, repr=False)
class Estimate:
    """Estimates for a run, from the shapes of its largest block; all blocks are taken to be like it."""

    recipe: RunRecipe
    blocks: int
    layers: Counter[tuple[str, tuple[int, int]]]  # to prune, by pattern and (out, in)
    samples: int
    length: int  # tokens per sequence
    batch: int  # sequences per batch
    device: str
    placement: Placement
    free_bytes: int  # on the device
    disk_free_bytes: int
    stages: list[StageEstimate]
    peak: PeakEstimate
    most_samples: int | None  # whose hidden states fit into memory or on the disk; None for a run without any
    fits: bool


def estimate(ready: Prepared, needed: StageMemory, placement: Placement, *, batch: int, output: Path | None = None) -> Estimate:
    """Estimate the memory and disk space that a run takes."""
    by_stage, device = dict(needed(ready, placement, batch)), ready.device.type
    stages = [_estimate_stage(name, taken, device=device, placement=placement) for name, taken in by_stage.items()]
    peak = max(stages, key=lambda stage: stage.memory[device])
    host, libraries = max(stage.memory["cpu"] for stage in stages), current_memory()
    held = isinstance(ready.source, InMemoryModel)
    resident = libraries - placement.model * (held and device == "cpu") + host + min(int(FREED_SHARE * host), FREED_BYTES)
    written = placement.model * (1 if placement.streamed or held else 2)  # finished blocks, and the output
    written += ready.source.stamps.document_bytes if isinstance(ready.source, Checkpoint) else 0
    state, disk_free = int(max(taken.state for taken in by_stage.values())), free_disk(output or Path())
    # While a new state of the training is written, the one before is there; the last one is still there with the output.
    files = max(stage.files for stage in stages)
    disk = max(written + files, written + state, placement.model + files + 2 * state)
    streams, room = sum(by_stage[ready.recipe.stage].lists), max(disk_free - written, STREAMS_SHARE * placement.memory)
    planned = blocks_and_head(ready.skeleton, ready.plan)
    layers = [(block.full_name(name), layer) for block in planned for name, layer in block.layers.items()]
    shapes = {name: (layer.out_features, layer.in_features) for name, layer in layers}
    return Estimate(
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
    recipe, attempt = ready.recipe, partial(estimate, ready, pruning_memory, output=output)
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


def _estimate_stage(name: str, taken: Memory, *, device: str, placement: Placement) -> StageEstimate:
    """Place a stage's lists as `OffloadManager` does: on the device while there is room, then on its host, then in files."""
    memory, files = {"cpu": 0, device: int(taken.peak)}, 0
    room = {device: STREAMS_SHARE * placement.memory}
    if device != "cpu":
        room["cpu"] = STREAMS_SHARE * SHARE * available(torch.device("cpu"))
    for size in map(int, taken.lists):
        where = next((where for where, free in room.items() if size <= free), None)
        if where is None:
            files += size
        else:
            room[where] -= size
            memory[where] += size
    return StageEstimate(name, memory, files)


def _streamed(plan: Estimate, ready: Prepared, files: bool) -> Placement:
    """The placement of a run that does not fit although its model does: block by block, if possible."""
    try:
        placement = choose_placement(plan.recipe.model_copy(update={"offload": True}), ready, files=files)
    except TooLarge:
        return plan.placement
    needed = f"{plan.peak.stage} would need {human_bytes(plan.peak.data_bytes)}"
    note = f"{placement.note}: {needed}, and {human_bytes(placement.memory)} may be taken"
    return replace(placement, note=note) if placement.streamed else plan.placement


def _refusal(plan: Estimate, ready: PreparedPruning) -> str:
    """Why a run is refused, and the first change of its settings with which it would fit."""
    recipe, placement, data = ready.recipe, plan.placement, plan.peak.data_bytes
    fewer = ", with one window at a time" if plan.batch < ready.batch else ""
    needed = f"{plan.peak.stage.capitalize()} needs {human_bytes(data)} of memory on {ready.device}{fewer}"
    message = f"{needed}, and {human_bytes(placement.memory)} may be taken."
    changes: list[dict[str, Any]] = []
    if not placement.streamed and recipe.offload is False and not ready.steps:
        changes.append({"offload": True})
    if recipe.batch_size is not None and recipe.batch_size > 1:
        changes.append({"batch_size": 1})
    changes += [{"sequence_length": n} for n in (ready.length // 2, ready.length // 4) if n >= 128]
    for change in changes:
        changed, length = recipe.model_copy(update=change), change.get("sequence_length", ready.length)
        shortened = replace(ready, recipe=changed, length=length, windows=ready.windows[:, :length])
        held = replace(placement, streamed=placement.streamed or "offload" in change, ahead=False)
        if estimate(shortened, pruning_memory, held, batch=changed.batch_size or 1).fits:
            ((name, value),) = change.items()
            return f"{message} Pass `{name}={value!r}`."
    if recipe.max_memory is not None and data <= SHARE * plan.free_bytes:
        return f"{message} Pass `max_memory='{-(-data // 10**6)}MB'`."
    return f"{message} Use a machine with more memory, or `method='wanda'` or `method='magnitude'`, which need least."


def check_disk(output: Path, needed: int, free: int) -> None:
    """Raise TooLarge if a command writes more bytes than are free where its output is."""
    if needed > free:
        sizes = f"{human_bytes(needed)} of disk are needed, and {human_bytes(free)} are free"
        raise TooLarge(f"{output}: {sizes}. Write to another disk.")
