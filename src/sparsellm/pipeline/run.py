"""A whole run: open, plan, place, load, measure, prune, measure. The command line and `interface` call `run`."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import PurePath

import torch

from sparsellm.checkpoints.block_loader import DiskWeights
from sparsellm.checkpoints.loading import Checkpoint, InMemoryModel
from sparsellm.checkpoints.remarks import remarks_to
from sparsellm.checkpoints.stamps import Stamps, unchanged
from sparsellm.errors import NonFinite
from sparsellm.evaluation.measurements import Perplexity
from sparsellm.methods import BlockMethod
from sparsellm.models.loaded_model import LoadedModel
from sparsellm.pipeline.early_checks import check_inputs
from sparsellm.pipeline.events import (
    LOADING,
    OPENING,
    READING_TEXTS,
    Begun,
    Ended,
    EventLog,
    Note,
    Observer,
    Schedule,
    add_note,
    combine_observers,
    phase,
)
from sparsellm.pipeline.export import Result
from sparsellm.pipeline.fingerprint import DenseCache, cache_key, environment
from sparsellm.pipeline.inputs import Inputs
from sparsellm.pipeline.journal import Journal
from sparsellm.pipeline.layer_costs import dense_outputs, measure_layers
from sparsellm.pipeline.loading import Placement, check_runs, load, open_model
from sparsellm.pipeline.measuring import measure_checkpoint, measure_into
from sparsellm.pipeline.output_folder import ANEW, LOG
from sparsellm.pipeline.outputs import changed_before
from sparsellm.pipeline.preparation import Prepared, make_plan, prepare
from sparsellm.pipeline.recipe import Recipe
from sparsellm.pipeline.recovery import recovery_plan
from sparsellm.pipeline.recovery_recipe import RecoveryRecipe
from sparsellm.pipeline.report import Report
from sparsellm.pipeline.stages import prune_model, stage_names
from sparsellm.pipeline.startup import start_run
from sparsellm.pipeline.workspace import WorkDirectory
from sparsellm.runtime import collectives, devices
from sparsellm.runtime.memory import peak_memory, release_free_memory
from sparsellm.texts.in_memory import Given
from sparsellm.training.block_training import split_batches


@torch.inference_mode(False)  # a caller's own would leave no gradients
def run(
    recipe: Recipe | RecoveryRecipe,
    observe: Observer | None = None,
    *,
    given: Given | None = None,
    source: Checkpoint | InMemoryModel | None = None,
    work: WorkDirectory | None = None,
    shared: DenseCache | None = None,
    name: str | None = None,
    check: Callable[[Inputs], object] = lambda _: None,
) -> Result:
    """Run a recipe up to the pruned model and its report; `Result.save_pretrained` writes them.

    Invalid input is rejected before the weights are read.

    Args:
        observe: Callback that receives every event.
        given: Data that replace the recipe's texts, in forms of `sparsellm.texts.in_memory`.
        source: Model that replaces the recipe's.
        work: Directory for finished blocks, from `sparsellm.pipeline.workspace.work_directory`. Without it a killed run cannot
            be resumed, and the model must fit in memory.
        shared: Cache of results on dense models, shared with other runs.
        name: Name of the run for observers. Default: the name of its output, or of its model.
        check: Called with the digests of what the run reads, before any heavy work.

    Raises:
        SparseLLMError: See `sparsellm.errors`.
    """
    check_inputs(recipe, given=given, has_model=source is not None)
    log, report = EventLog(), Report(recipe)
    observer = combine_observers(log, observe)
    with remarks_to(lambda text, is_new: add_note(text, report, observer if is_new else log)):
        return _run(recipe, report, observer, log, given=given, source=source, work=work, shared=shared, name=name, check=check)


def _run(
    recipe: Recipe | RecoveryRecipe,
    report: Report,
    observer: Observer,
    log: EventLog,
    *,
    given: Given | None,
    source: Checkpoint | InMemoryModel | None,
    work: WorkDirectory | None,
    shared: DenseCache | None,
    name: str | None,
    check: Callable[[Inputs], object],
) -> Result:
    """Run a recipe, as `run`, with a log that is one of the observers."""
    started = time.perf_counter()
    method: BlockMethod
    with phase(OPENING, report, observer):
        opened = open_model(recipe, source)
        if isinstance(recipe, RecoveryRecipe):
            method, plan, report.pruned = recovery_plan(recipe, opened.source)
        else:
            method, plan = make_plan(recipe, opened)
        report.origin = opened.source.origin()
    with phase(READING_TEXTS, report, observer):
        ready = prepare(opened, method, plan, report=report, observer=observer, given=given, shared=shared)
    report.environment = environment(ready.device)
    placement, batch, journal = start_run(ready, report, observer, work=work)
    check(report.inputs)
    release_free_memory()  # used by tokenization
    if work and collectives.is_main():
        log.keep(work.folder / LOG)
    name = name or (work.output.name if work else PurePath(recipe.model).name)
    observer(Begun(name, recipe, report.environment, placement.tight))
    observer(Schedule(stage_names(recipe, ready, streamed=placement.streamed)))
    with unchanged(*_stamps(ready), ignored=(*ANEW, LOG)):
        loaded = _measure_and_prune(
            ready, placement, batch, report=report, observer=observer, journal=journal, work=work, shared=shared
        )
    report.seconds["total"] = time.perf_counter() - started
    report.parameters, report.zeros = loaded.weights.size()
    report.peak_memory_bytes = peak_memory()
    observer(Ended(report.totals.to_dict(), report.seconds["total"]))
    return _result(loaded, ready, report=report, log=log)


def _measure_and_prune(
    ready: Prepared,
    placement: Placement,
    batch: int,
    *,
    report: Report,
    observer: Observer,
    journal: Journal | None,
    work: WorkDirectory | None,
    shared: DenseCache | None,
) -> LoadedModel:
    """Measure the dense model, prune it or recover the pruned one, and measure the result."""
    recipe = report.recipe
    load_model = partial(load, recipe, ready, folder=work.folder if work else None, placement=placement)
    before = _measure_before(ready, placement, report=report, observer=observer, work=work)
    loaded = _load(load_model, ready, report=report, observer=observer)
    measure_into(report, "dense", loaded, ready=ready, observer=observer, shared=shared)
    report.add_before(before)
    dense = dense_outputs(loaded, ready, report, observer)
    loaded = _prune(loaded, ready, batch, report=report, observer=observer, journal=journal, shared=shared, reload=load_model)
    report.add_changes(changed_before(ready.source.folder))
    for text in report.warnings(damping=getattr(getattr(ready.method, "solver", None), "damping", None)):
        add_note(text, report, observer)
    try:
        measure_into(report, "pruned", loaded, ready=ready, observer=observer)
        if dense:
            measure_layers(report, loaded, ready, dense=dense, observer=observer)
    except NonFinite as error:  # the pruned model is still written
        add_note(f"the pruned model was not measured: {error}", report, observer)
    return loaded


def _stamps(ready: Prepared) -> tuple[Stamps, ...]:
    """The files of the checkpoints that a run reads, as they were when it opened them."""
    found = (getattr(ready.source, "stamps", None), getattr(ready.method, "stamps", None))
    return tuple(stamps for stamps in found if stamps is not None)


def _measure_before(
    ready: Prepared, placement: Placement, *, report: Report, observer: Observer, work: WorkDirectory | None
) -> dict[str, Perplexity]:
    """The perplexity of a recovery's pruned checkpoint, by text; empty for a pruning run."""
    recipe = report.recipe
    if not isinstance(recipe, RecoveryRecipe) or not ready.tests:
        return {}
    unread = {"evaluate": (), "task": (), "prompt": ()}  # its texts are tokens already
    opened = open_model(recipe.model_copy(update={"model": recipe.pruned, "revision": None, **unread}))
    folder = work.folder if work else None
    before = measure_checkpoint(report, opened, ready=ready, placement=placement, observer=observer, folder=folder)
    gc.collect()  # frees the checkpoint's weights
    return before


def _load(load_model: Callable[[], LoadedModel], ready: Prepared, *, report: Report, observer: Observer) -> LoadedModel:
    """Load the model, and check on a few tokens that it runs if anything is computed with it."""
    with phase(LOADING, report, observer):
        loaded = load_model()
        if len(ready.windows) or ready.tests or report.recipe.task or report.recipe.prompt:
            check_runs(loaded, by_block=loaded.weights.on_disk or len(ready.windows) > 0)
    if loaded.note:
        observer(Note(loaded.note))  # about this machine, so not a note of the report and its model card
    return loaded


def _dense_facts(
    shared: DenseCache | None,
    ready: Prepared,
    loaded: LoadedModel,
    *,
    environment: Mapping[str, str],
    batch: int,
) -> AbstractContextManager[Journal] | None:
    """The cached results of the dense model on the calibration sequences; None without a cache, or for a model in memory."""
    if shared is None or not isinstance(ready.source, Checkpoint) or not len(ready.windows):
        return None
    dtype = loaded.products or loaded.compute or loaded.model.dtype
    return shared.open(cache_key(ready.source, ready.windows, dtype=dtype, environment=environment, batch=batch))


def _prune(
    loaded: LoadedModel,
    ready: Prepared,
    batch: int,
    *,
    report: Report,
    observer: Observer,
    journal: Journal | None,
    shared: DenseCache | None,
    reload: Callable[[], LoadedModel],
) -> LoadedModel:
    """Prune or recover the model with this many sequences per batch, or half as many wherever the device's memory is short."""
    source, windows = ready.source, ready.windows
    while True:
        if journal:
            journal.note("batch", batch)
        dtype = loaded.products or loaded.compute or loaded.model.dtype
        report.resolved = {  # the values used where the recipe leaves them open
            "method": repr(ready.method),
            "samples": len(windows),
            "sequence_length": windows.shape[1] if windows.numel() else None,
            "batch_size": batch,
            "device": str(ready.device),
            "dtype": str(loaded.model.dtype),
            "computed_in": str(dtype),
        }
        batches = split_batches(windows, batch) if windows.numel() else ()
        try:
            facts = _dense_facts(shared, ready, loaded, environment=report.environment, batch=batch)
            prune_model(loaded, ready, batches, report=report, observer=observer, journal=journal, facts=facts)
            return loaded
        except RuntimeError as error:
            can_retry = batch > 1 and isinstance(source, Checkpoint) and collectives.world() == 1
            if not can_retry or not devices.is_out_of_memory(error):
                raise
        batch //= 2
        observer(Note(f"{ready.device} is out of memory: continuing with {batch} sequences per batch"))
        report.blocks.clear()
        loaded.model.to("meta")  # frees the partly pruned model
        gc.collect()
        devices.empty_cache(ready.device)
        loaded = reload()


def _result(loaded: LoadedModel, ready: Prepared, *, report: Report, log: EventLog) -> Result:
    """Collect everything that `Result.save_pretrained` writes."""
    source = ready.source
    return Result(
        loaded.model,
        report,
        tokenizer=source.own_tokenizer if isinstance(source, InMemoryModel) else None,
        source=source if isinstance(source, Checkpoint) else None,
        weights=loaded.weights if isinstance(loaded.weights, DiskWeights) else None,
        log=log,
        read=_stamps(ready),
    )
