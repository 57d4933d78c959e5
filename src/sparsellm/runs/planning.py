"""Whether a run will fit, before it starts, and what would make it fit."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from sparsellm.checkpoints.loading import InMemoryModel
from sparsellm.errors import TooLarge, UnsupportedModel
from sparsellm.models.coverage import Coverage
from sparsellm.runs.events import Note, Observer, Stage
from sparsellm.runs.forecasting import Forecast, forecast
from sparsellm.runs.placement import SHARE, Placement, choose_placement
from sparsellm.runs.preparation import Prepared, prepare
from sparsellm.runs.recipe import Recipe, RunRecipe
from sparsellm.runs.report import Report
from sparsellm.runtime.memory import available, human_bytes

MATRICES, HIDDEN = 40, 16
"""Square matrices of the widest layer, and hidden states of a batch at that width, that no method here takes more of: what fits
half of the memory with them is not looked at more closely."""


@dataclass(frozen=True)
class RunPlan:
    """A run that is planned. layers: what is pruned, by pattern and shape, and how often. free, disk_free: bytes to be had.

    coverage: how much of the blocks' matrix weights is pruned.
    """

    recipe: Recipe
    found: Forecast
    blocks: int
    layers: Mapping[tuple[str, tuple[int, int]], int]
    samples: int
    length: int
    free: int | None
    disk_free: int
    refusal: str
    coverage: Coverage

    @property
    def fits(self) -> bool:
        """Whether `prune` would begin."""
        return not self.refusal

    @property
    def most_samples(self) -> int | None:
        """The largest `--samples` that fits memory and disk; None where the method needs none."""
        return self.found.most_samples(self.disk_free)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        found = self.found
        return {
            "model": self.recipe.model,
            "recipe": self.recipe.model_dump(mode="json"),
            "blocks": self.blocks,
            "layers": [{"pattern": x, "shape": list(shape), "count": n} for (x, shape), n in self.layers.items()],
            "coverage": self.coverage.to_dict(),
            "samples": self.samples,
            "length": self.length,
            "batch": found.batch,
            "device": found.device,
            "model_bytes": found.place.model,
            "streamed": found.place.streamed,
            "note": found.place.note,
            "memory_bytes": found.place.memory,
            "free_bytes": self.free,
            "disk_free_bytes": self.disk_free,
            "stages": [asdict(stage) for stage in found.stages],
            "peak": {
                "stage": found.peak.name,
                "data_bytes": found.data,
                "libraries_bytes": found.libraries,
                "resident_bytes": found.resident,
                "disk_bytes": found.disk,
            },
            "operations": found.operations,
            "seconds": found.seconds,
            "most_samples": self.most_samples,
            "fits": self.fits,
            "refusal": self.refusal,
        }


def plan_run(recipe: Recipe, output: str | Path | None = None) -> RunPlan:
    """What `prune` would take with this recipe. output: the folder that it would write, for the disk's free bytes."""
    report = Report(recipe, {})
    ready = prepare(recipe, None, None, report, lambda _: None)
    place = choose_placement(recipe, ready.source, ready.device, files=True)
    batch, refused = ready.batch, ""
    try:
        place, batch = fitted(recipe, ready, place, lambda _: None, Path(output or "."))
    except TooLarge as error:
        refused = str(error)
    found = forecast(recipe, ready, place, batch)
    disk_free = free_disk(Path(output or "."))
    refused = refused or _disk_refusal(found.disk, disk_free)  # of small runs too
    shapes = Counter(
        (str(ready.plan[block.full_name(name)]), (layer.out_features, layer.in_features))
        for block in ready.blocks
        for name, layer in block.layers.items()
        if block.full_name(name) in ready.plan
    )
    samples = len(ready.windows)
    free = available(ready.device)
    assert report.coverage is not None  # `prepare` counts it
    length, coverage = ready.length, report.coverage
    return RunPlan(recipe, found, len(ready.blocks), shapes, samples, length, free, disk_free, refused, coverage)


def free_disk(folder: Path) -> int:
    """Bytes that are free where a folder is or would be."""
    path = folder.expanduser().absolute()
    return shutil.disk_usage(next(some for some in (path, *path.parents) if some.exists())).free


def _disk_refusal(needed: int, free: int) -> str:
    """Why a run is refused for its disk; empty where there is enough."""
    if needed <= free:
        return ""
    return f"{human_bytes(needed)} of disk are needed, and {human_bytes(free)} are free. Write to another disk."


def fitted(
    recipe: RunRecipe, ready: Prepared, place: Placement, observer: Observer, output: Path | None = None
) -> tuple[Placement, int]:
    """Where the model will be and the windows at a time with which the run keeps within its memory.

    As they are, or else read block by block, or else with fewer windows, as far as the recipe leaves either open; the second is
    told here, the first by the place's note. output: the folder to write. Raises TooLarge, with what would do, where nothing
    fits. Where the run cannot be planned it is not refused, which is told.
    """
    if not isinstance(recipe, Recipe) or isinstance(ready.source, InMemoryModel) or _small(ready, place):
        return place, ready.batch
    observer(Stage("planning"))
    batch = ready.batch
    try:
        found = forecast(recipe, ready, place, timed=False)
        if not found.fits and recipe.offload is None and not place.streamed:
            place = _streamed(recipe, ready, found, output is not None)
            found = forecast(recipe, ready, place, timed=False)
        if not found.fits and place.ahead:
            place = replace(place, ahead=False)
            found = forecast(recipe, ready, place, timed=False)
        while not found.fits and batch > 1 and recipe.batch_size is None:
            batch //= 2
            found = forecast(recipe, ready, place, batch, timed=False)
        if not found.fits:
            raise TooLarge(refusal(recipe, ready, found))
        if output and (refused := _disk_refusal(found.disk, free_disk(output))):
            raise TooLarge(refused)
    except (UnsupportedModel, OSError, SafetensorError) as error:  # a run must not fail for what only looks ahead
        observer(Note(f"whether the run fits the memory is not known: {error}"))
        return place, ready.batch
    if batch < ready.batch:
        observer(Note(f"{batch} windows at a time, where {ready.batch} are usual: more would not fit the memory"))
    return replace(place, tight=found.tight), batch


def _streamed(recipe: Recipe, ready: Prepared, found: Forecast, files: bool) -> Placement:
    """The place of a model that fits the memory while its run does not: read block by block, where that can be."""
    try:
        place = choose_placement(recipe.model_copy(update={"offload": True}), ready.source, ready.device, files)
    except TooLarge:
        return found.place
    message = f"{found.peak.name} would need {human_bytes(found.data)}, and {human_bytes(place.memory)} may be taken"
    return replace(place, note=f"{place.note}: {message}") if place.streamed else found.place


def refusal(recipe: Recipe, ready: Prepared, found: Forecast) -> str:
    """Why a run is refused, and what would do."""
    fewer = ", with one window at a time" if found.batch < ready.batch else ""
    message = (
        f"{found.peak.name.capitalize()} needs {human_bytes(found.data)} of memory on {ready.device}{fewer}, and "
        f"{human_bytes(found.place.memory)} may be taken."
    )
    trials: list[tuple[str, dict[str, Any]]] = []
    if not found.place.streamed and recipe.offload is False and not recipe.model_steps and not recipe.calibration_written:
        trials.append(("--offload", {"offload": True}))
    if recipe.batch_size is not None and recipe.batch_size > 1:
        trials.append(("--batch-size 1", {"batch_size": 1}))
    trials += [
        (f"--sequence-length {length}", {"sequence_length": length})
        for length in (ready.length // 2, ready.length // 4)
        if length >= 128
    ]
    for words, change in trials:
        other = recipe.model_copy(update=change)
        place = replace(found.place, streamed=bool(change.get("offload", found.place.streamed)), ahead=False)
        less = replace(
            ready, length=change.get("sequence_length", ready.length), windows=ready.windows[:, : change.get("sequence_length")]
        )
        if forecast(other, less, place, other.batch_size or 1, timed=False).fits:
            return f"{message} Pass {words}."
    if recipe.max_memory is not None and found.data <= SHARE * (available(ready.device) or 0):
        return f"{message} Pass --max-memory {-(-found.data // 10**6)}MB."
    return f"{message} Use a machine with more memory, or --method wanda or magnitude, which need least."


def _small(ready: Prepared, place: Placement) -> bool:
    """Whether a run fits whatever it does."""
    widest = max(max(layer.weight.shape) for block in ready.blocks for layer in block.layers.values())
    block = max(sum(tensor.numel() for tensor in block.module.parameters()) for block in ready.blocks)
    words = ready.source.skeleton().get_input_embeddings().num_embeddings
    tokens = ready.batch * max(ready.length, 1)
    most = MATRICES * widest**2 + 4 * block + tokens * (HIDDEN * widest + 3 * words)
    return bool(2 * place.model + 4 * most <= place.memory / 2)
