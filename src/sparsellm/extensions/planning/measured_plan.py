"""`plan`: the memory and disk space that a run takes and, if its first block is pruned for real, the time."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePath

import torch

from sparsellm.checkpoints.loading import InMemoryModel
from sparsellm.errors import InvalidSetting, TooLarge
from sparsellm.extensions.planning.run_plan import MeasuredTime, RunPlan
from sparsellm.extensions.recover.block_recovery import recovery_plan
from sparsellm.extensions.recover.preparation import fit_to_disk, prepare_recovery, recovery_layers, recovery_memory
from sparsellm.extensions.recover.recipe import RecoveryRecipe
from sparsellm.methods import BlockResult
from sparsellm.observers.events import ANSWERING, WRITING, Advanced, Event, Measured, Note, Observer, Stage
from sparsellm.outputs.fingerprint import check_inputs
from sparsellm.outputs.journal import WorkDirectory
from sparsellm.outputs.report import Report
from sparsellm.pipeline.loading import choose_placement, open_model
from sparsellm.pipeline.planning import StageMemory, estimate, fit_to_memory
from sparsellm.pipeline.preparation import (
    Prepared,
    PreparedPruning,
    prepare_run,
    pruning_layers,
)
from sparsellm.pipeline.prune import prune_model
from sparsellm.pipeline.run import Run, recorded
from sparsellm.pipeline.stage_memory import pruning_memory
from sparsellm.pipeline.startup import PlacementChoice
from sparsellm.recipes.plan import PlannedLayer
from sparsellm.recipes.recipe import Recipe
from sparsellm.runtime import collectives, devices
from sparsellm.runtime.memory import release_free_memory
from sparsellm.texts.in_memory import Given
from sparsellm.texts.padding import count_tokens
from sparsellm.texts.paths import local_path

EVALUATED_PART, LEAST_EVALUATED = 8, 8
"""One of so many sequences of a text is measured, and at least so many sequences."""


def plan_pruning(
    recipe: Recipe,
    output: str | Path | None = None,
    *,
    given: Given | None = None,
    source: InMemoryModel | None = None,
    measure: bool = False,
    observe: Observer | None = None,
) -> RunPlan:
    """Estimate what `prune` would take, without reading weights unless its time is measured.

    Args:
        recipe: The run.
        output: The folder that it would write, for the free bytes of its disk. Nothing is written there.
        given: Data that replace the recipe's texts, in forms of `sparsellm.texts.in_memory`.
        source: Model in memory that replaces the recipe's.
        measure: Whether to measure the time: the run begins in a temporary folder and ends after its first block.
        observe: Callback that receives the events but notes, which the plan has, and measurements.

    Raises:
        InvalidSetting: The time of pruning a model in memory is to be measured, which would change it.
    """
    check_inputs(recipe, given)
    if measure and source is not None:
        raise InvalidSetting(
            f"`measure` prunes a block, and {source.name} is in memory, where it would be changed. Pass the model's folder."
        )
    started, report, notes = time.perf_counter(), Report(recipe), list[str]()
    ready = prepare_run(recipe, report, _without_notes(observe, notes), given=given, source=source)
    layers = pruning_layers(ready)
    plan = _plan(ready, pruning_memory, fit_to_memory, output, report=report, notes=notes, layers=layers)
    if not measure or plan.refusal:
        return plan
    return replace(plan, time=_measure_time(ready, output, observe=observe, started=started))


def plan_recovery(
    recipe: RecoveryRecipe, output: str | Path | None = None, *, given: Given | None = None, source: InMemoryModel | None = None
) -> RunPlan:
    """Estimate what `recover` would take, as `plan_pruning` does."""
    check_inputs(recipe, given)
    opened, report, notes = open_model(recipe, source), Report(recipe), list[str]()
    method, plan, _ = recovery_plan(recipe, opened.source, verified=False)
    collect = _without_notes(None, notes)
    ready = prepare_recovery(opened, recipe, method, plan, report=report, observer=collect, given=given)
    layers = recovery_layers(ready)
    return _plan(ready, recovery_memory, fit_to_disk, output, report=report, notes=notes, layers=layers)


def _without_notes(observe: Observer | None, notes: list[str]) -> Observer:
    """An observer that adds notes to a list, and passes on all other events but measurements, which are of some sequences."""

    def collect(event: Event) -> None:
        if isinstance(event, Note):
            notes.append(event.text)
        elif observe and not isinstance(event, Measured):
            observe(event)

    return collect


def _plan(
    ready: Prepared,
    needed: StageMemory,
    fit: PlacementChoice,
    output: str | Path | None,
    *,
    report: Report,
    notes: list[str],
    layers: Sequence[PlannedLayer],
) -> RunPlan:
    """Estimate a prepared run, with the reason if it would be refused, and the notes before its work."""
    folder, refusal = Path(output or "."), ""
    placement, batch = choose_placement(ready.recipe, ready, files=True), ready.batch
    if isinstance(ready.source, InMemoryModel):  # its weights are no longer part of the free memory
        placement = replace(placement, memory=placement.memory + placement.model)
    try:
        placement, batch = fit(ready, placement, observer=_without_notes(None, notes), output=folder)
    except TooLarge as error:
        refusal = str(error)
    release_free_memory()  # what tokenizing took
    estimates = vars(estimate(ready, needed, placement, batch=batch, output=folder))
    fits = estimates["fits"] and not refusal
    coverage, noted = report.coverage, tuple(notes)
    return RunPlan(**estimates | {"fits": fits}, refusal=refusal, coverage=coverage, each_layer=layers, notes=noted)


@torch.inference_mode(False)  # as `prune_run`
def _measure_time(
    ready: PreparedPruning, output: str | Path | None, *, observe: Observer | None, started: float
) -> MeasuredTime:
    """Measure the time of a run: all that comes before its blocks is done, and the first block is pruned.

    Of each text only some sequences are measured. Tasks are left out, and a training of the whole model with the
    text that the dense model would generate for it.

    Args:
        started: When the preparation began, by `time.perf_counter`.
    """
    recipe = ready.recipe.model_copy(update={"task": ()})
    first = _FirstBlock(_without_notes(observe, []), ready.device)
    some = {text: x[: max(LEAST_EVALUATED, len(x) // EVALUATED_PART)] for text, x in ready.tests.items()}
    with recorded(recipe, first, None) as records, _temporary_work(output) as work:
        run = Run.start(ready, records, fit_to_memory, work=work, name=PurePath(recipe.model).name)
        run = replace(run, ready=replace(ready, recipe=recipe, steps=(), tests=some))
        with run.unchanged():
            loaded = run.load_and_check()
            began = time.perf_counter()
            run.measure("dense", loaded)
            evaluated = time.perf_counter() - began
            with suppress(_Passed):
                run.in_batches(loaded, partial(prune_model, run))
    assert first.result is not None  # a plan without layers is refused
    left_out = [ANSWERING] * bool(ready.recipe.task) + [step.stage for step in ready.steps]
    tokens, of_some = (sum(map(count_tokens, texts.values())) for texts in (ready.tests, some))
    return MeasuredTime(
        preparation=first.pruned - first.result.seconds - evaluated - started,
        block=first.result.seconds + first.passed - first.pruned,
        blocks=first.blocks,
        evaluation=2 * evaluated * tokens / of_some if some else 0.0,
        left_out=(*left_out, WRITING),
    )


class _Passed(Exception):
    """The first block is pruned, and the next one has its inputs."""


class _FirstBlock:
    """Observer that passes on the events of a run, and ends it by `_Passed`.

    Attributes:
        blocks: Number of blocks that the run would prune.
        result: The result of the first one; None until it is pruned.
        pruned: When it was pruned.
        passed: When the sequences had passed it; the same as `pruned` if they passed before, or if none are needed.
    """

    def __init__(self, observe: Observer, device: torch.device) -> None:
        self._observe, self._device = observe, device
        self.blocks = 0
        self.result: BlockResult | None = None
        self.pruned = self.passed = 0.0

    def __call__(self, event: Event) -> None:
        """Take note of an event."""
        self._observe(event)
        if self.result is None:
            if isinstance(event, Stage):
                self.blocks = event.blocks
            elif isinstance(event, BlockResult):
                self.result = event
                self.pruned = self.passed = time.perf_counter()
            return
        if isinstance(event, Advanced):
            devices.synchronize(self._device)
            self.passed = time.perf_counter()
        if not isinstance(event, Advanced) or event.done >= event.total:
            raise _Passed


@contextmanager
def _temporary_work(output: str | Path | None) -> Iterator[WorkDirectory]:
    """A work directory on the disk of the output, or without one among the system's temporary files, which is removed."""
    with ExitStack() as stack:
        folder: str | None = None
        if collectives.is_main():
            parents = [] if output is None else local_path(output).absolute().parents
            beside = next((parent for parent in parents if parent.exists()), None)
            made = tempfile.TemporaryDirectory(prefix="sparsellm-plan-", dir=beside, ignore_cleanup_errors=True)
            folder = stack.enter_context(made)
        work = WorkDirectory(Path(collectives.broadcast_object(folder)), resume=False)
        work.folder.mkdir(parents=True, exist_ok=True)
        yield work
        collectives.all_gather_object(None)  # no process has a file open there any more
