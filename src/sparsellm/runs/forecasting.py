"""What a run's stages take, from a miniature that goes through the same code in seconds."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sparsellm.activations.sensitivity import TOKENS
from sparsellm.checkpoints.loading import InMemoryModel
from sparsellm.errors import InvalidSetting
from sparsellm.runs.meter import PASS, PRODUCT, rates
from sparsellm.runs.miniature import miniature
from sparsellm.runs.placement import STREAMS_SHARE, Placement
from sparsellm.runs.preparation import Prepared, model_bytes, model_step, model_written
from sparsellm.runs.recipe import Recipe
from sparsellm.runs.stages import SENSING, TRAINING
from sparsellm.runs.trial import VISITED, Seen, Trial
from sparsellm.runtime.memory import current_memory

PRUNING, MEASURING = "pruning", "measuring"
"""Stages that the forecast scales in their own way."""

KEPT, MOST_KEPT = 0.4, 128 * 2**20
"""The share of the data that the processor's allocator holds besides, and its bound: measured on glibc (docs/results.md)."""

WIDTHS = 4
"""Tokens, in widths of the model, beyond which what is sampled of them no longer grows."""


@dataclass(frozen=True)
class StageNeeds:
    """What a stage of the run takes.

    memory: bytes of data at its peak, by device type. files: bytes of temporary files at theirs. operations: floating-point, of
    products and factorisations. seconds: at this machine's rates; nan where these were not measured.
    """

    name: str
    memory: Mapping[str, int]
    files: int
    operations: float
    seconds: float


@dataclass(frozen=True)
class Forecast:
    """What a run will take.

    place: where the model will be. batch: windows at a time. device: where it computes. stages: in order. libraries: bytes of
    memory that Python and its libraries hold besides. kept: bytes on disk of blocks that are finished, and of the output.
    a_window: bytes that travel for each calibration window.
    """

    place: Placement
    batch: int
    device: str
    stages: tuple[StageNeeds, ...]
    libraries: int
    kept: int
    a_window: int

    @property
    def peak(self) -> StageNeeds:
        """The stage that takes most memory, where the run computes."""
        return max(self.stages, key=lambda stage: stage.memory.get(self.device, 0))

    @property
    def data(self) -> int:
        """Bytes of data at the peak, where the run computes."""
        return self.peak.memory.get(self.device, 0)

    @property
    def resident(self) -> int:
        """Bytes of the processor's memory at the peak, with libraries, and what the allocator keeps of what was freed."""
        data = max(stage.memory.get("cpu", 0) for stage in self.stages)
        return self.libraries + data + min(int(KEPT * data), MOST_KEPT)

    @property
    def disk(self) -> int:
        """Bytes of disk at the peak."""
        return self.kept + max(stage.files for stage in self.stages)

    @property
    def operations(self) -> float:
        """Floating-point operations, of products and factorisations."""
        return sum(stage.operations for stage in self.stages)

    @property
    def seconds(self) -> float:
        """At this machine's rates; reading and writing not included."""
        return sum(stage.seconds for stage in self.stages)

    @property
    def fits(self) -> bool:
        """Whether the data keep within what the run may take."""
        return self.data <= self.place.memory

    @property
    def tight(self) -> bool:
        """Whether the data fit for certain only if what is freed is returned at once: holes in the heap can be as large."""
        return self.device == "cpu" and 2 * self.data > self.place.memory

    def most_samples(self, disk: int) -> int | None:
        """How many calibration windows can travel, with so many bytes of disk; None where nothing travels."""
        room = int(STREAMS_SHARE * self.place.memory) if disk < self.kept else disk - self.kept
        return max(room, int(STREAMS_SHARE * self.place.memory)) // self.a_window if self.a_window else None


def forecast(recipe: Recipe, ready: Prepared, place: Placement, batch: int | None = None, timed: bool = True) -> Forecast:
    """What the run will take, from a miniature of its model that is pruned in the same way, once or twice.

    batch: windows at a time, if not as prepared. timed: whether to measure this machine, for two seconds.
    Raises UnsupportedModel where no miniature of the model's form can be made.
    """
    source, batch = ready.source, batch or ready.batch
    if isinstance(source, InMemoryModel):
        raise InvalidSetting("A model that is in memory is not planned for: name a folder, or a hub name.")
    dtype, samples = source.dtype(recipe.dtype), max(1, len(ready.windows))
    libraries = current_memory()
    enough = max(TOKENS, WIDTHS * source.config.get_text_config().hidden_size)
    few = min(samples, max(batch, -(-enough // ready.length)))
    with tempfile.TemporaryDirectory(prefix="sparsellm-plan-") as folder:
        small = miniature(source, Path(folder) / "model", dtype)
        trial = Trial(recipe, ready, place, small, batch, samples, Path(folder) / "work")
        counts = [few] if few == samples else [few, min(samples, 2 * few)]
        runs = [trial.prune(count) for count in counts]
        measured = trial.measure() if ready.tests else []
    speed = rates(ready.device) if timed else {}
    beyond = 0.0 if len(counts) == 1 else (samples - few) / (counts[1] - few)
    stages = [_needs(name, [run[name] for run in runs], 0.0 if name == SENSING else beyond, trial, speed) for name in runs[0]]
    if measured:
        batches = max(map(len, ready.tests.values())) / trial.measured
        stages.append(_needs(MEASURING, measured, max(0.0, batches - 1), trial, speed))
    if recipe.model_steps:
        stages.append(_training(recipe, ready, place, speed))
    size = dtype.itemsize * sum(tensor.numel() for tensor in source.skeleton().parameters())
    most = max((run.kept for run in runs[-1].values()), default=0)
    return Forecast(
        place=place,
        batch=batch,
        device=ready.device.type,
        stages=tuple(stages),
        libraries=libraries,
        kept=size if place.streamed else 2 * size,
        a_window=int(small.scale**2 * most / counts[-1]),
    )


def _training(recipe: Recipe, ready: Prepared, place: Placement, speed: Mapping[str, float]) -> StageNeeds:
    """Gradient steps over the whole model, by count: each reads its windows forward twice and back, the dense model writes."""
    skeleton, (samples, length) = ready.source.skeleton(), ready.windows.shape
    words = skeleton.get_input_embeddings().num_embeddings
    parameters = sum(tensor.numel() for tensor in skeleton.parameters())
    needed = place.model + model_bytes(recipe, ready.blocks, ready.windows, words)
    read = recipe.model_steps * model_step(samples, length) * length
    operations = 2.0 * parameters * (4 * read + model_written(recipe, samples, length) * length)
    seconds = operations / speed[PRODUCT] if speed else float("nan")
    return StageNeeds(TRAINING, {ready.device.type: needed}, 0, operations, seconds)


def _needs(name: str, seen: Sequence[Seen], beyond: float, trial: Trial, speed: Mapping[str, float]) -> StageNeeds:
    """A stage of the real run, from the miniature's: of two trials, `beyond` times their difference on from the first."""
    area, volume = trial.small.scale**2, trial.small.scale**3
    times = max(1.0, trial.touched / VISITED) if name == PRUNING else 1.0

    def at(values: Sequence[float]) -> float:
        return max(0.0, values[0] + (values[-1] - values[0]) * beyond)

    devices = {device for some in seen for device in some.memory}
    memory = {device: int(area * at([some.memory.get(device, 0) for some in seen])) for device in devices}
    kinds = {kind for some in seen for kind in some.work}
    work = {kind: at([some.work.get(kind, 0.0) for some in seen]) * times for kind in kinds}
    full = {kind: amount * (area if kind == PASS else volume) for kind, amount in work.items()}
    return StageNeeds(
        name=name,
        memory=memory,
        files=int(area * at([some.files for some in seen])),
        operations=sum(amount for kind, amount in full.items() if kind != PASS),
        seconds=sum(amount / speed[kind] for kind, amount in full.items()) if speed else float("nan"),
    )
