"""A recovery: open both models, load the dense one, give it the pruned weights and train them, measure."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Unpack

import torch
from torch import Tensor

from sparsellm.activations.walk import Activations
from sparsellm.checkpoints.loading import Checkpoint, InMemoryModel
from sparsellm.evaluation.measurements import Perplexity
from sparsellm.methods import BlockResult, Plan
from sparsellm.models.blocks import Block
from sparsellm.models.loaded_model import LoadedModel
from sparsellm.models.output_head import blocks_and_head
from sparsellm.pipeline.block_recovery import BlockRecovery, recovery_plan
from sparsellm.pipeline.events import MEASURING_CHECKPOINT, OPENING, READING_TEXTS, Observer, add_note, run_stage
from sparsellm.pipeline.input_digests import check_inputs
from sparsellm.pipeline.journal import Journal
from sparsellm.pipeline.loading import open_model
from sparsellm.pipeline.measuring import measure_checkpoint
from sparsellm.pipeline.outputs import changed_before
from sparsellm.pipeline.planning import fit_to_disk
from sparsellm.pipeline.preparation import PreparedRecovery, prepare_recovery
from sparsellm.pipeline.recovery_recipe import RecoveryRecipe
from sparsellm.pipeline.run import Run, RunArguments, recorded
from sparsellm.pipeline.saving import Result
from sparsellm.pipeline.sequential import Step, block_steps, visit_blocks
from sparsellm.pipeline.stages import JournalStore, estimate_fisher, train_model, training_data
from sparsellm.pipeline.training_outcome import why_not_recovered
from sparsellm.texts.in_memory import Given


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
            loaded = run.load_and_check()
            run.measure("dense", loaded)
            report.add_before(before)
            loaded = run.in_batches(loaded, partial(_recover, run))
            report.add_changes(changed_before(ready.source.folder))
            for text in report.recovery_warnings():
                add_note(text, report, observer)
            with run.noting_not_measured():
                run.measure("pruned", loaded)
        return run.finish(loaded)


def _measure_before(run: Run[PreparedRecovery]) -> dict[str, Perplexity]:
    """The perplexity of the pruned checkpoint, by text."""
    ready, recipe = run.ready, run.ready.recipe
    if not ready.tests:
        return {}
    unread = {"evaluate": (), "task": ()}  # its texts are tokens already
    opened = open_model(recipe.model_copy(update={"model": recipe.pruned, "revision": None, **unread}))
    before = measure_checkpoint(
        run.report, opened, ready=ready, placement=run.placement, observer=run.observer, folder=run.folder
    )
    gc.collect()  # frees the checkpoint's weights
    return before


def _recover(run: Run[PreparedRecovery], loaded: LoadedModel, batches: Sequence[Tensor]) -> None:
    """Recover block by block, and train the whole model if the recipe says so.

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
        data, training = None, ready.training
        if training:
            # The head differs from the dense model's also where an earlier recovery changed it.
            copies_head = blocks[-1].is_head or bool(method.outside) or training.trains_outside
            data = training_data(
                loaded, ready, training, batches, report=report, observer=observer, cache=cache, copies_head=copies_head
            )
    if journal:
        method = replace(method, store=JournalStore(journal).begin)
    visited = sum(any(block.full_name(name) in plan for name in block.layers) for block in blocks)
    with run_stage(ready.stage, report, observer, unit="batch", blocks=visited, layers=len(plan)) as advance:
        for step in recover_blocks(loaded, batches, method, plan, fisher=fisher, journal=journal, progress=advance):
            observer(step)
            if isinstance(step, BlockResult):
                report.blocks.append(step)
    if method.outside:
        method.copy_outside(loaded, journal)
        report.changed_outside = method.outside
    if training and data:
        train_model(
            loaded,
            training,
            data,
            plan=plan,
            report=report,
            observer=observer,
            journal=journal,
            why_unchanged=partial(why_not_recovered, ready.recipe),
        )


def recover_blocks(
    loaded: LoadedModel,
    batches: Sequence[Tensor],
    recovery: BlockRecovery,
    plan: Plan,
    *,
    fisher: Sequence[Tensor] = (),
    journal: Journal | None = None,
    progress: Callable[[float, int], None] = lambda *_: None,
) -> Iterator[Step]:
    """Recover the blocks that have planned layers in place, and yield the results as `prune_blocks` does.

    Args:
        loaded: The dense model.
        plan: The pattern of each pruned layer, by full name.
        fisher: As for `prune_blocks`, like `batches`, `journal` and `progress`.
    """

    def steps(block: Block, inputs: Activations) -> Iterator[Step]:
        return block_steps(block, recovery.recover(block, inputs, plan), plan)

    return visit_blocks(loaded, batches, recovery, plan, steps=steps, fisher=fisher, journal=journal, progress=progress)
