"""What a run will take, by closed forms; whether that fits, and what would make it fit."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from sparsellm.activations.fisher import TOKENS as FISHER_TOKENS
from sparsellm.activations.fisher import WINDOWS as FISHER_WINDOWS
from sparsellm.activations.sensitivity import TOKENS
from sparsellm.checkpoints.loading import InMemoryModel
from sparsellm.errors import TooLarge
from sparsellm.evaluation.perplexity import batch_to_measure
from sparsellm.methods.layerwise import LayerWise, coupled_parts, planned_layers
from sparsellm.models.coverage import Coverage
from sparsellm.runs.events import ALLOCATION, MEASURING, PRUNING, SENSITIVITIES, TRAINING, Note, Observer
from sparsellm.runs.loading import SHARE, STREAMS_SHARE, Placement, choose_placement, open_model
from sparsellm.runs.preparation import Prepared, make_plan, model_bytes, model_step, model_written, prepare
from sparsellm.runs.recipe import Recipe, RunRecipe
from sparsellm.runs.recipe_fields import ALLOCATIONS
from sparsellm.runs.report import Report
from sparsellm.runtime.costs import BlockCost, BlockShapes, rates, work
from sparsellm.runtime.memory import available, current_memory, human_bytes, release_free_memory
from sparsellm.solvers.sparsegpt import SparseGPT

KEPT, MOST_KEPT = 0.4, 128 * 2**20
"""The share of the data that the processor's allocator holds besides, and its bound: measured on glibc (docs/results.md)."""

LOGITS = 12
"""Bytes for each logit of a window while its loss and the gradient by it are made."""


@dataclass(frozen=True)
class StageNeeds:
    """What a stage takes: bytes of data at the peak by device type, of files, operations; seconds (NaN where rates were not
    measured) without reading and writing."""

    name: str
    memory: Mapping[str, int]
    files: int
    operations: float
    seconds: float


class RunPlan:
    """A run, with what each of its stages will take, by the shapes of its largest block; all blocks are taken to be like it.

    stages: in order; peak: the one that takes most memory. data: bytes at the peak, where the run computes; resident: of the
    processor's memory, with libraries and with what the allocator keeps. disk: bytes at the peak. seconds: NaN where rates were
    not measured. most_samples: the largest `--samples` that fits memory and disk; None where the method needs none. layers: how
    many are pruned, by pattern and shape.

    Args:
        recipe, ready, place: the run, before its weights are read.
        batch: windows at a time.
        output: the folder that it would write, for the disk's free bytes.
        timed: whether to measure this machine's rates.
        coverage: how much of the blocks' weights is pruned. refusal: why the run would not begin.
    """

    def __init__(
        self,
        recipe: Recipe,
        ready: Prepared,
        place: Placement,
        batch: int,
        output: Path | None = None,
        timed: bool = False,
        coverage: Coverage | None = None,
        refusal: str = "",
    ) -> None:
        self.recipe, self.ready, self.place, self.batch = recipe, ready, place, batch
        self.coverage, self.refusal = coverage, refusal
        self.device, self.disk_free, self.libraries = ready.device.type, free_disk(output or Path()), current_memory()
        self._rates = rates(ready.device) if timed else work() + float("nan")
        assert not isinstance(ready.source, InMemoryModel)  # a model that is in memory is pruned whatever the memory
        stored, config = ready.source.dtype(recipe.dtype).itemsize, ready.source.config.get_text_config()
        self._total, self._words = place.model // stored, int(config.vocab_size)
        self._shapes = shapes = block_shapes(recipe, ready, config, batch, max(4, stored) if self.device == "cpu" else stored)
        self._ends = shapes.number * (self._total - len(ready.blocks) * shapes.parameters)  # as what is in no block computes
        self._model = place.model + shapes.parameters * (shapes.number - stored)
        if place.streamed:
            self._model = shapes.parameters * (shapes.number + place.ahead * stored)
        kept = place.model * (1 if place.streamed else 2)  # finished blocks, and the output
        costs = list(self._costs())
        self.stages = [self._stage(name, cost) for name, cost in costs]
        self.seconds = sum(stage.seconds for stage in self.stages)
        self.peak = max(self.stages, key=lambda stage: stage.memory[self.device])
        self.data = self.peak.memory[self.device]
        self.fits, self.disk = self.data <= place.memory, kept + max(stage.files for stage in self.stages)
        host = max(stage.memory["cpu"] for stage in self.stages)
        self.resident = self.libraries + host + min(int(KEPT * host), MOST_KEPT)
        travels = sum(dict(costs)[PRUNING].lists)
        room = max(self.disk_free - kept, STREAMS_SHARE * place.memory)
        self.most_samples = int(room * len(ready.windows) / travels) if travels else None
        plan, layers = ready.plan, {x.full_name(n): layer for x in ready.blocks for n, layer in x.layers.items()}
        self.layers = Counter((str(plan[n]), (x.out_features, x.in_features)) for n, x in layers.items() if n in plan)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            "model": self.recipe.model,
            "recipe": self.recipe.model_dump(mode="json"),
            "blocks": len(self.ready.blocks),
            "layers": [{"pattern": x, "shape": list(shape), "count": n} for (x, shape), n in self.layers.items()],
            "coverage": self.coverage and self.coverage.to_dict(),
            "samples": len(self.ready.windows),
            "length": self.ready.length,
            "batch": self.batch,
            "device": self.device,
            "model_bytes": self.place.model,
            "streamed": self.place.streamed,
            "note": self.place.note,
            "memory_bytes": self.place.memory,
            "free_bytes": available(self.ready.device),
            "disk_free_bytes": self.disk_free,
            "stages": [asdict(stage) for stage in self.stages],
            "peak": {
                "stage": self.peak.name,
                "data_bytes": self.data,
                "libraries_bytes": self.libraries,
                "resident_bytes": self.resident,
                "disk_bytes": self.disk,
            },
            "operations": sum(stage.operations for stage in self.stages),
            "seconds": self.seconds,
            "most_samples": self.most_samples,
            "fits": not self.refusal,
            "refusal": self.refusal,
        }

    def _costs(self) -> Iterator[tuple[str, BlockCost]]:
        """Each stage by its name, in the order in which they run, with all that it holds."""
        recipe, shapes, ready, depth = self.recipe, self._shapes, self.ready, len(self.ready.blocks)

        def there_and_back(tokens: int, batch: int, stop: int) -> BlockCost:
            # Forward, then down to block `stop` forward again and back, with every block's inputs kept; the logits' softmax and
            # running sums.
            memory = self._model + max(2 * batch * shapes.forward_bytes, LOGITS * shapes.length * self._words)
            done = tokens * work(4 * self._words * shapes.width + 2 * depth * shapes.width**2, passes=40 * self._words)
            inputs = (depth + 1) * tokens * shapes.width * shapes.number
            return BlockCost(memory, [inputs], done + (3 * depth - 2 * stop) * shapes.forward(tokens))

        if ready.method.needs_fisher:
            yield SENSITIVITIES, there_and_back(min(shapes.tokens, TOKENS), shapes.batch, 1)
        if recipe.sharing == "fisher":
            few = max(FISHER_TOKENS, FISHER_WINDOWS * shapes.length)
            yield f"{ALLOCATION} (fisher)", there_and_back(min(shapes.tokens, few), shapes.length, 0)
        elif recipe.sharing in ALLOCATIONS[1:]:
            memory = self._model + max(shapes.batch * shapes.forward_bytes, 12 * shapes.parameters)  # a block's scores
            yield f"{ALLOCATION} ({recipe.sharing})", BlockCost(memory, [shapes.stream], depth * shapes.forward(shapes.tokens))

        pruned = [block.index for block in ready.blocks if planned_layers(block, ready.plan)]
        cost = getattr(ready.method, "cost", LayerWise(SparseGPT()).cost)  # a method that tells nothing is taken to be like it
        memory, lists, done = cost(shapes)
        done = len(pruned) * done + max(pruned) * shapes.forward(shapes.tokens)
        # The first hidden states are made with all that is outside the blocks as it computes.
        entering = self._ends + self.place.model * (not self.place.streamed)
        yield PRUNING, BlockCost(max(self._model + memory, entering), lists, done)

        if ready.tests:
            tokens = [windows.numel() for windows in ready.tests.values()]
            batch = min(shapes.length * batch_to_measure(self._words, shapes.length, self.place.memory), max(tokens))
            logits = batch * 2 * self._words * shapes.number
            done = work(2 * self._words * shapes.width * sum(tokens)) + depth * shapes.forward(sum(tokens))
            memory, lists = self._total * shapes.number + max(batch * shapes.forward_bytes, logits), []
            if self.place.streamed:
                memory = max(self._model + batch * shapes.forward_bytes, self._ends + logits)
                lists = [max(tokens) * shapes.width * shapes.number]
            yield MEASURING, BlockCost(memory, lists, 2 * done)  # before and after
        if recipe.model_steps:
            samples, length = ready.windows.shape
            memory = self.place.model + model_bytes(recipe, ready.blocks, ready.windows, vocabulary=self._words)
            read = 4 * recipe.model_steps * model_step(samples, length) + model_written(recipe, samples, length)
            yield TRAINING, BlockCost(memory, [], work(2.0 * self._total * read * length))

    def _stage(self, name: str, cost: BlockCost) -> StageNeeds:
        """A stage, its lists where `Storage` puts them: on the device while there is room, on its host, in files."""
        held = {"cpu": 0.0, self.device: cost.memory}
        room = {self.device: STREAMS_SHARE * self.place.memory}
        if self.device != "cpu":
            room["cpu"] = STREAMS_SHARE * SHARE * available(torch.device("cpu"))
        files = 0.0
        for size in cost.lists:
            where = next((where for where, left in room.items() if size <= left), "")
            if where:
                room[where] -= size
                held[where] += size
            else:
                files += size
        operations, seconds = float(cost.work[:3].sum()), float((cost.work / self._rates).sum())
        return StageNeeds(name, {where: int(size) for where, size in held.items()}, int(files), operations, seconds)


def block_shapes(recipe: Recipe, ready: Prepared, config: Any, batch: int, number: float) -> BlockShapes:
    """The sizes of the largest block that is pruned. config: of the text model. number: bytes of one that is computed with."""
    block = max(
        (block for block in ready.blocks if planned_layers(block, ready.plan)),
        key=lambda block: sum(tensor.numel() for tensor in block.module.parameters()),
    )
    layers = {name: (layer.out_features, layer.in_features) for name, layer in block.layers.items()}
    chosen, parts = planned_layers(block, ready.plan), coupled_parts(block, ready.plan)
    part = next(iter(block.architecture.feed_forward_parts), None)
    coupled = {name for some in parts for name in (*some.in_proj, some.out_proj)}
    # An expert computes for its share of the tokens.
    routed = {name: view.expert for name, view in block.views.items() if view.expert is not None}
    experts = len(set(routed.values()))
    share = min(1.0, (getattr(config, "num_experts_per_tok", None) or 1) / experts) if experts else 1.0
    parameters = sum(tensor.numel() for tensor in block.module.parameters())
    samples = len(ready.windows) and len(ready.windows) + recipe.calibration_written
    return BlockShapes(
        layers=[layers[name] for name in chosen],
        alone=[layers[name] for name in chosen if name not in coupled],
        grams=[layers[group[0]][1] for group in block.architecture.groups if any(name in chosen for name in group)],
        parts=len(parts),
        readers=len(part.in_proj) if part else 2,
        width=int(config.hidden_size),
        hidden=layers[part.out_proj][1] if part else max(max(shape) for shape in layers.values()),
        share=share,
        parameters=parameters,
        active=parameters - (1 - share) * sum(layers[name][0] * layers[name][1] for name in routed),
        number=number,
        tokens=samples * ready.length,
        length=ready.length,
        batch=min(batch, samples) * ready.length,
    )


def plan_run(recipe: Recipe, output: str | Path | None = None) -> RunPlan:
    """What `prune` would take with this recipe. output: the folder that it would write, for the disk's free bytes."""
    folder, report, refusal = Path(output or "."), Report(recipe), ""
    opened = open_model(recipe)
    ready = prepare(opened, *make_plan(recipe, opened.blocks), report=report, observer=lambda _: None)
    place, batch = choose_placement(recipe, ready, files=True), ready.batch
    try:
        place, batch = fitted(recipe, ready, place, lambda _: None, folder)
    except TooLarge as error:
        refusal = str(error)
    release_free_memory()  # what tokenising took
    return RunPlan(recipe, ready, place, batch, folder, True, report.coverage, refusal)


def fitted(
    recipe: RunRecipe, ready: Prepared, place: Placement, observer: Observer, output: Path | None = None
) -> tuple[Placement, int]:
    """Where the model will be and the windows at a time with which the run keeps within its memory.

    As they are, or else read block by block, or else with fewer windows, as far as the recipe leaves either open; the second is
    told here, the first by the place's note. output: the folder to write. Raises TooLarge, with what would do, where nothing
    fits.
    """
    if not isinstance(recipe, Recipe) or isinstance(ready.source, InMemoryModel):
        return place, ready.batch
    run = RunPlan(recipe, ready, place, ready.batch, output)
    if not run.fits and recipe.offload is None and not place.streamed:
        run = RunPlan(recipe, ready, _streamed(run, output is not None), run.batch, output)
    if not run.fits and run.place.ahead:
        run = RunPlan(recipe, ready, replace(run.place, ahead=False), run.batch, output)
    while not run.fits and run.batch > 1 and recipe.batch_size is None:
        run = RunPlan(recipe, ready, run.place, run.batch // 2, output)
    if not run.fits:
        raise TooLarge(_refusal(run))
    if output and run.disk > run.disk_free:
        needed = f"{human_bytes(run.disk)} of disk are needed, and {human_bytes(run.disk_free)} are free"
        raise TooLarge(f"{needed}. Write to another disk.")
    if run.batch < ready.batch:
        observer(Note(f"{run.batch} windows at a time, where {ready.batch} are usual: more would not fit the memory"))
    # Holes in the processor's heap can be as large as the data: these then fit only if what is freed is returned at once.
    return replace(run.place, tight=run.device == "cpu" and 2 * run.data > place.memory), run.batch


def free_disk(folder: Path) -> int:
    """Bytes that are free where a folder is or would be."""
    path = folder.expanduser().absolute()
    return shutil.disk_usage(next(parent for parent in (path, *path.parents) if parent.exists())).free


def _streamed(run: RunPlan, files: bool) -> Placement:
    """The place of a model that fits the memory while its run does not: read block by block, where that can be."""
    try:
        place = choose_placement(run.recipe.model_copy(update={"offload": True}), run.ready, files=files)
    except TooLarge:
        return run.place
    needed = f"{run.peak.name} would need {human_bytes(run.data)}, and {human_bytes(place.memory)} may be taken"
    return replace(place, note=f"{place.note}: {needed}") if place.streamed else run.place


def _refusal(run: RunPlan) -> str:
    """Why a run is refused, and what would do."""
    recipe, ready, place = run.recipe, run.ready, run.place
    fewer = ", with one window at a time" if run.batch < ready.batch else ""
    message = (
        f"{run.peak.name.capitalize()} needs {human_bytes(run.data)} of memory on {ready.device}{fewer}, and "
        f"{human_bytes(place.memory)} may be taken."
    )
    changes: list[tuple[str, dict[str, Any]]] = []
    if not place.streamed and recipe.offload is False and not recipe.model_steps and not recipe.calibration_written:
        changes.append(("--offload", {"offload": True}))
    if recipe.batch_size is not None and recipe.batch_size > 1:
        changes.append(("--batch-size 1", {"batch_size": 1}))
    shorter = [length for length in (ready.length // 2, ready.length // 4) if length >= 128]
    changes += [(f"--sequence-length {length}", {"sequence_length": length}) for length in shorter]
    for option, change in changes:
        other, length = recipe.model_copy(update=change), change.get("sequence_length", ready.length)
        less = replace(ready, length=length, windows=ready.windows[:, :length])
        there = replace(place, streamed=bool(change.get("offload", place.streamed)), ahead=False)
        if RunPlan(other, less, there, other.batch_size or 1).fits:
            return f"{message} Pass {option}."
    if recipe.max_memory is not None and run.data <= SHARE * available(ready.device):
        return f"{message} Pass --max-memory {-(-run.data // 10**6)}MB."
    return f"{message} Use a machine with more memory, or --method wanda or magnitude, which need least."
