"""What each stage of a run takes, whether that fits into memory, and what would make it fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sparsellm.activations.fisher import TOKENS as FISHER_TOKENS
from sparsellm.activations.fisher import WINDOWS as FISHER_WINDOWS
from sparsellm.activations.sensitivity import TOKENS
from sparsellm.checkpoints.loading import InMemoryModel
from sparsellm.data.in_memory import CalibrationData
from sparsellm.errors import TooLarge
from sparsellm.evaluation.perplexity import batch_to_measure
from sparsellm.methods import planned_layers
from sparsellm.models.output_head import blocks_and_head
from sparsellm.runs.costs import BlockShapes, Cost, Work, block_cost, block_shapes, rates, work
from sparsellm.runs.estimates import PeakEstimate, RunPlan, StageEstimate, free_disk
from sparsellm.runs.events import ALLOCATION, MEASURING, PRUNING, SENSITIVITIES, TRAINING, Note, Observer
from sparsellm.runs.loading import SHARE, STREAMS_SHARE, Placement, choose_placement, open_model
from sparsellm.runs.preparation import Prepared, make_plan, prepare, recipe_layers, window_length
from sparsellm.runs.recipe import Recipe, RunRecipe
from sparsellm.runs.recipe_fields import ALLOCATIONS
from sparsellm.runs.report import Report
from sparsellm.runs.training import model_bytes, model_step, model_written
from sparsellm.runtime.memory import available, current_memory, human_bytes, release_free_memory

FREED_SHARE, FREED_BYTES = 0.4, 128 * 2**20
"""Freed memory that the processor's allocator keeps: this fraction of the data, at most so many bytes; measured on glibc."""

HEAD_EXTRA = (1, 0), (6, 3)
"""float32 matrices of the output head's size, and products of it by a Gram matrix, that a block's formulas leave out, since in
a block they are small against the rest: of a layer-wise method, and of one with a dense stream. Counted."""

LOGITS_BYTES = 12
"""Bytes for each logit of a sequence while its loss and the gradient by it are computed."""

LOGITS_PASSES = 10
"""How often a float32 logit is read or written for its loss and the gradient by it."""


def plan_run(
    recipe: Recipe,
    output: str | Path | None = None,
    *,
    given: CalibrationData | None = None,
    source: InMemoryModel | None = None,
) -> RunPlan:
    """Estimate what `prune` would take, without reading weights.

    Args:
        recipe: The run.
        output: The folder that it would write, for the free bytes of its disk.
        given: Data that replaces the recipe's calibration text, in a form of `sparsellm.data.in_memory`.
        source: Model in memory that replaces the recipe's.
    """
    folder, report, refusal = Path(output or "."), Report(recipe), ""
    opened = open_model(recipe, source)
    if given is None and recipe.reads_text and recipe.calibration == "demo":
        opened.source.tokenizer()  # raises the error of a model without one
        # Only the shape counts, and this text is long enough for any model.
        given = torch.zeros(recipe.samples, window_length(recipe, opened.source.length), dtype=torch.long)
    ready = prepare(opened, *make_plan(recipe, opened), report=report, observer=lambda _: None, given=given)
    placement, batch = choose_placement(recipe, ready, files=True), ready.batch
    if source:  # its weights are no longer part of the free memory
        placement = replace(placement, memory=placement.memory + placement.model)
    try:
        placement, batch = fit_to_memory(recipe, ready, placement, observer=lambda _: None, output=folder)
    except TooLarge as error:
        refusal = str(error)
    release_free_memory()  # what tokenising took
    plan = estimate(recipe, ready, placement, batch=batch, output=folder, speed=rates(ready.device))
    each_layer, fits = recipe_layers(recipe, ready), plan.fits and not refusal
    return replace(plan, coverage=report.coverage, fits=fits, refusal=refusal, each_layer=each_layer)


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
    costs, device = dict(_stage_costs(recipe, ready, placement, batch=batch)), ready.device.type
    stages = [_estimate_stage(name, cost, device=device, placement=placement, speed=speed) for name, cost in costs.items()]
    peak = max(stages, key=lambda stage: stage.memory[device])
    host, libraries = max(stage.memory["cpu"] for stage in stages), current_memory()
    held = isinstance(ready.source, InMemoryModel)
    resident = libraries - placement.model * (held and device == "cpu") + host + min(int(FREED_SHARE * host), FREED_BYTES)
    written = placement.model * (1 if placement.streamed or held else 2)  # finished blocks, and the output
    disk, disk_free = written + max(stage.files for stage in stages), free_disk(output or Path())
    streams, room = sum(costs[PRUNING].lists), max(disk_free - written, STREAMS_SHARE * placement.memory)
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
    if not isinstance(recipe, Recipe) or isinstance(ready.source, InMemoryModel):
        return placement, ready.batch  # a model that is in memory is pruned whatever the memory
    attempt = partial(estimate, recipe, ready, output=output)
    plan = attempt(placement, batch=ready.batch)
    if not plan.fits and recipe.offload is None and not placement.streamed:
        plan = attempt(_streamed(plan, ready, files=output is not None), batch=plan.batch)
    if not plan.fits and plan.placement.ahead:
        plan = attempt(replace(plan.placement, ahead=False), batch=plan.batch)
    while not plan.fits and plan.batch > 1 and recipe.batch_size is None:
        plan = attempt(plan.placement, batch=plan.batch // 2)
    if not plan.fits:
        raise TooLarge(_refusal(plan, ready))
    if output and plan.peak.disk_bytes > plan.disk_free_bytes:
        needed, free = human_bytes(plan.peak.disk_bytes), human_bytes(plan.disk_free_bytes)
        raise TooLarge(f"{needed} of disk are needed, and {free} are free. Write to another disk.")
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
    seconds = float("nan") if speed is None else float((cost.work / speed).sum())
    return StageEstimate(name, memory, files, float(cost.work[:3].sum()), seconds)


def _stage_costs(recipe: RunRecipe, ready: Prepared, placement: Placement, *, batch: int) -> Iterator[tuple[str, Cost]]:
    """What each stage takes, by its name, in running order."""
    shapes = block_shapes(recipe, ready, batch)
    depth, vocabulary, stored = shapes.depth, shapes.vocabulary, shapes.stored
    parameters = placement.model // stored
    non_block = shapes.itemsize * (parameters - depth * shapes.parameters)
    model = placement.model + shapes.parameters * (shapes.itemsize - stored)  # one block is converted for computing
    if placement.streamed:
        model = shapes.parameters * (shapes.itemsize + placement.ahead * stored)

    if ready.method.needs_fisher:
        yield SENSITIVITIES, _gradient_cost(shapes, model, min(shapes.tokens, TOKENS), batch=shapes.batch, stop=1)
    if recipe.allocation_rule == "fisher":
        tokens = min(shapes.tokens, max(FISHER_TOKENS, FISHER_WINDOWS * shapes.length))
        yield f"{ALLOCATION} (fisher)", _gradient_cost(shapes, model, tokens, batch=shapes.length, stop=0)
    elif recipe.allocation_rule in ALLOCATIONS[1:]:
        memory = model + max(shapes.batch * shapes.forward_bytes, 12 * shapes.parameters)  # a block's scores
        yield f"{ALLOCATION} ({recipe.allocation_rule})", Cost(memory, [shapes.stream], depth * shapes.forward(shapes.tokens))

    yield PRUNING, _pruning_cost(recipe, ready, placement, shapes=shapes, model=model, non_block=non_block)

    if ready.tests:
        lengths = [windows.numel() for windows in ready.tests.values()]
        tokens = min(shapes.length * batch_to_measure(vocabulary, shapes.length, placement.memory), max(lengths))
        logits, memory = 2 * tokens * vocabulary * shapes.itemsize, tokens * shapes.forward_bytes
        done = work(2 * vocabulary * shapes.width * sum(lengths)) + depth * shapes.forward(sum(lengths))
        lists = [max(lengths) * shapes.width * shapes.itemsize] if placement.streamed else []
        memory = max(model + memory, non_block + logits) if lists else parameters * shapes.itemsize + max(memory, logits)
        yield MEASURING, Cost(memory, lists, 2 * done)  # before and after
    if recipe.model_steps:
        samples, length = ready.windows.shape
        memory = placement.model + model_bytes(recipe, ready.blocks, ready.windows, vocabulary=vocabulary)
        passes = 4 * recipe.model_steps * model_step(samples, length) + model_written(recipe, samples, length)
        head = work(2 * vocabulary * shapes.width, passes=LOGITS_PASSES * vocabulary)  # of a token
        yield TRAINING, Cost(memory, [], depth * shapes.forward(passes * length) + passes * length * head)


def _pruning_cost(
    recipe: RunRecipe, ready: Prepared, placement: Placement, *, shapes: BlockShapes, model: float, non_block: float
) -> Cost:
    """Each planned block beside the model (or the block that is read), and the output head after all blocks."""
    *_, last = planned = [b for b in blocks_and_head(ready.skeleton, ready.plan) if planned_layers(b, ready.plan)]
    entering = non_block + placement.model * (not placement.streamed)  # what is outside the blocks makes the first inputs
    total = Cost(entering, [], last.index * shapes.forward(shapes.tokens))
    if len(planned) > last.is_head:
        block = block_cost(ready.method, shapes)
        # For `predicted_kl`, the dense weights are copied.
        copies = (recipe.allocation_rule == "fisher") * shapes.stored * sum(out * into for out, into in shapes.layers)
        done = (len(planned) - last.is_head) * block.work + total.work
        total = Cost(max(model + block.memory + copies, entering), block.lists, done)
    if last.is_head:
        outputs, inputs = next(iter(last.layers.values())).weight.shape
        one = {
            "layers": [(outputs, inputs)],
            "inputs": [inputs],
            "parameters": outputs * inputs,
            "pattern": ready.plan[last.name],
        }
        alone = replace(shapes, parts=0, projections=0, hidden=0, active=0, **one)  # type: ignore[arg-type]
        head = block_cost(ready.method, alone)
        matrices, products = HEAD_EXTRA[ready.method.needs_dense_stream]
        memory = placement.model * (not placement.streamed) + (shapes.itemsize + 4 * matrices) * alone.parameters + head.memory
        done = total.work + head.work + work(2 * products * alone.parameters * inputs)
        total = Cost(max(total.memory, memory), max(total.lists, head.lists, key=sum), done)
    return total


def _gradient_cost(shapes: BlockShapes, model: float, tokens: int, *, batch: int, stop: int) -> Cost:
    """Forward, then for each block down to `stop` forward again and backward; the inputs of all blocks are held."""
    memory = model + max(2 * batch * shapes.forward_bytes, LOGITS_BYTES * shapes.length * shapes.vocabulary)
    # The logits' products, F of each block, and the logits' float32 softmax and running sums.
    products = 4 * shapes.vocabulary * shapes.width + 2 * shapes.depth * shapes.width**2
    done = tokens * work(products, passes=4 * LOGITS_PASSES * shapes.vocabulary)
    inputs = (shapes.depth + 1) * tokens * shapes.width * shapes.itemsize
    return Cost(memory, [inputs], done + (3 * shapes.depth - 2 * stop) * shapes.forward(tokens))


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
    if not placement.streamed and recipe.offload is False and not recipe.model_steps and not recipe.calibration_written:
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
