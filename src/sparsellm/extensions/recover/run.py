"""A recovery: open both models, load the dense one, give it the pruned weights and train them, measure."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Unpack

import torch
from torch import Tensor

from sparsellm.checkpoints.loading import Checkpoint, InMemoryModel
from sparsellm.errors import plural
from sparsellm.evaluation.perplexity import measure_perplexity
from sparsellm.evaluation.results import Perplexity
from sparsellm.extensions.recover.block_recovery import recovery_plan
from sparsellm.extensions.recover.preparation import MEASURING_CHECKPOINT, PreparedRecovery, fit_to_disk, prepare_recovery
from sparsellm.extensions.recover.recipe import RecoveryRecipe
from sparsellm.extensions.recover.training.masked_training import TrainingStore
from sparsellm.extensions.recover.training.trained_weights import pruned_blocks
from sparsellm.methods import BlockResult
from sparsellm.models.loaded_model import LoadedModel
from sparsellm.models.output_head import blocks_and_head
from sparsellm.observers.events import OPENING, READING_TEXTS, Observer, add_note, run_stage
from sparsellm.outputs.fingerprint import check_inputs
from sparsellm.outputs.report import Report
from sparsellm.outputs.saving import Result
from sparsellm.outputs.verification import report_before
from sparsellm.pipeline.dense_results import estimate_fisher
from sparsellm.pipeline.loading import check_runs, load_model, open_model
from sparsellm.pipeline.run import Run, RunArguments, recorded
from sparsellm.pipeline.sequential import visit_blocks
from sparsellm.recipes.path_names import PathNames
from sparsellm.texts.in_memory import Given
from sparsellm.texts.padding import token_digest


@torch.inference_mode(False)  # a caller's own would leave no gradients
def recover_run(
    recipe: RecoveryRecipe,
    observe: Observer | None = None,
    *,
    given: Given | None = None,
    source: Checkpoint | InMemoryModel | None = None,
    **arguments: Unpack[RunArguments],
) -> Result:
    """Run a recipe up to the recovered model and its report, as `prune_run` does.

    Raises:
        SparseLLMError: See `sparsellm.errors`.
    """
    check_inputs(recipe, given)
    with recorded(recipe, observe, source) as records:
        report, observer = records.report, records.observer
        with run_stage(OPENING, report, observer):
            opened = open_model(recipe, source)
            method, plan, report.pruned = recovery_plan(recipe, opened.source)
            report.origin = opened.source.origin()
        with run_stage(READING_TEXTS, report, observer):
            ready = prepare_recovery(
                opened, recipe, method, plan, report=report, observer=observer, given=given, shared=arguments.get("shared")
            )
        run = Run.start(ready, records, fit_to_disk, **arguments)
        run.schedule([], before=[MEASURING_CHECKPOINT] if ready.tests else [])
        with run.unchanged():
            before = _measure_before(run)
            gc.collect()  # frees the checkpoint's weights
            loaded = run.load_and_check()
            run.measure("dense", loaded)
            measured = {text: {**report.perplexity.get(text, {}), "pruned": value} for text, value in before.items()}
            report.pruned = replace(report.pruned, perplexity=report.pruned.perplexity | measured)
            loaded = run.in_batches(loaded, partial(_recover, run))
            if before_run := report_before(ready.source):
                report.add_changes(before_run.changed_parameters)
            for text in recovery_warnings(report):
                add_note(text, report, observer)
            with run.noting_not_measured():
                run.measure("pruned", loaded)
        return run.finish(loaded)


def _measure_before(run: Run[PreparedRecovery]) -> dict[str, Perplexity]:
    """The perplexity of the pruned checkpoint, by text.

    What its own report says about the same sequences is not measured again.
    """
    ready, recipe, report = run.ready, run.ready.recipe, run.report
    results: dict[str, Perplexity] = {}
    loaded: LoadedModel | None = None
    for text, test in ready.tests.items():
        with run_stage(MEASURING_CHECKPOINT, report, run.observer, unit="sequence") as advance:
            known = report.before(text)
            if known is None or not known.parts or known.parts.digest != token_digest(test):
                if loaded is None:
                    unread = {"evaluate": (), "task": ()}  # its texts are tokens already
                    opened = open_model(recipe.model_copy(update={"model": recipe.pruned, "revision": None, **unread}))
                    loaded = load_model(report.recipe, opened, folder=run.folder, placement=run.placement)
                    check_runs(loaded, by_block=loaded.weights.on_disk, predicts=True)
                known = measure_perplexity(loaded, test, PathNames(report.recipe)[text], progress=advance)
            results[text] = known
    return results


def recovery_warnings(report: Report) -> Iterator[str]:
    """State what differs from the recipe: fallbacks in blocks, and blocks that are unchanged."""
    yield from report.block_notes()
    if unchanged := [x.name for x in report.blocks if x.refined and x.refined.curve and not x.refined.steps]:
        count = f"{len(unchanged)} of {plural(len(report.blocks), 'block')}, {unchanged[0]} first"
        advice = "Use more text, with more `samples`, or more `steps`"
        yield f"no step lowered the held-out loss of {count}: the weights there are unchanged. {advice}"


def _recover(run: Run[PreparedRecovery], loaded: LoadedModel, batches: Sequence[Tensor]) -> None:
    """Recover block by block, and take the steps after the blocks if the recipe says so.

    Args:
        batches: Calibration token ids, each (batch, length) without padding.
    """
    ready, report, observer, journal = run.ready, run.report, run.observer, run.journal
    plan, method = ready.plan, ready.method
    blocks = blocks_and_head(loaded.model, plan)
    fisher: Sequence[Tensor] = []
    with run.dense_cache(loaded) as cache:
        if method.needs_fisher:
            fisher = estimate_fisher(loaded, batches, report=report, observer=observer, cache=cache)
        finishing = [step.begin(run, loaded, batches, cache) for step in ready.steps]
    if journal:
        method = replace(method, store=TrainingStore(journal).begin)
    visited = len(pruned_blocks(blocks, plan))
    with run_stage(ready.recipe.stage, report, observer, unit="batch", blocks=visited, layers=len(plan)) as advance:
        change = partial(method.steps, plan)
        for step in visit_blocks(loaded, batches, method, plan, steps=change, fisher=fisher, journal=journal, progress=advance):
            observer(step)
            if isinstance(step, BlockResult):
                report.blocks.append(step)
    if method.outside:
        method.copy_outside(loaded, journal)
        report.changed_outside = method.outside
    for finish in finishing:
        finish()
