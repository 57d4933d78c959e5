"""A pruning run: open, plan, place, load, measure, prune, measure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Unpack

import torch
from torch import Tensor

from sparsellm.checkpoints.loading import Checkpoint, InMemoryModel
from sparsellm.methods import BlockResult
from sparsellm.models.loaded_model import LoadedModel
from sparsellm.models.output_head import blocks_and_head
from sparsellm.observers.events import ALLOCATION, Observer, add_note, run_stage
from sparsellm.outputs.fingerprint import check_inputs
from sparsellm.outputs.saving import Result
from sparsellm.outputs.verification import report_before
from sparsellm.pipeline.cached_allocation import Allocated, cached_allocation
from sparsellm.pipeline.dense_results import estimate_fisher
from sparsellm.pipeline.planning import fit_to_memory
from sparsellm.pipeline.preparation import PreparedPruning, prepare_run
from sparsellm.pipeline.run import Run, RunArguments, recorded
from sparsellm.pipeline.sequential import prune_blocks
from sparsellm.recipes.recipe import Recipe
from sparsellm.texts.in_memory import Given


@torch.inference_mode(False)  # a caller's own would leave no gradients
def prune_run(
    recipe: Recipe,
    observe: Observer | None = None,
    *,
    given: Given | None = None,
    source: Checkpoint | InMemoryModel | None = None,
    **arguments: Unpack[RunArguments],
) -> Result:
    """Run a recipe up to the pruned model and its report; `Result.save_pretrained` writes them.

    Invalid input is rejected before the weights are read.

    Args:
        observe: Callback that receives every event.
        given: Data that replace the recipe's texts, in forms of `sparsellm.texts.in_memory`.
        source: Model that replaces the recipe's.
        **arguments: See `RunArguments`.

    Raises:
        SparseLLMError: See `sparsellm.errors`.
    """
    check_inputs(recipe, given)
    with recorded(recipe, observe, source) as records:
        report, observer = records.report, records.observer
        ready = prepare_run(recipe, report, observer, given=given, source=source, shared=arguments.get("shared"))
        run = Run.start(ready, records, fit_to_memory, **arguments)
        run.schedule([f"{ALLOCATION} ({ready.recipe.allocation_rule})"] if ready.recipe.allocates else [])
        with run.unchanged():
            loaded = run.load_and_check()
            run.measure("dense", loaded)
            loaded = run.in_batches(loaded, partial(prune_model, run))
            if before_run := report_before(ready.source):
                report.add_changes(before_run.changed_parameters)
            for text in report.pruning_warnings(getattr(getattr(ready.method, "solver", None), "damping", None)):
                add_note(text, report, observer)
            with run.noting_not_measured():
                run.measure("pruned", loaded)
        return run.finish(loaded)


def prune_model(run: Run[PreparedPruning], loaded: LoadedModel, batches: Sequence[Tensor]) -> None:
    """Allocate sparsity, prune block by block, and take the steps after the blocks, each if the recipe says so.

    Args:
        batches: Calibration token ids, each (batch, length) without padding.
    """
    ready, report, observer, journal = run.ready, run.report, run.observer, run.journal
    recipe, plan, method = ready.recipe, ready.plan, ready.method
    blocks = blocks_and_head(loaded.model, plan)
    fisher: Sequence[Tensor] = []
    allocated: Allocated | None = None
    with run.dense_cache(loaded) as cache:
        if method.needs_fisher:
            fisher = estimate_fisher(loaded, batches, report=report, observer=observer, cache=cache)
        if recipe.allocates:
            with run_stage(f"{ALLOCATION} ({recipe.allocation_rule})", report, observer) as advance:
                allocated = cached_allocation(recipe, loaded, batches, plan=plan, cache=cache)
                plan = allocated.plan
                advance(1, 1)
        finishing = [step.begin(run, loaded, batches, cache) for step in ready.steps]
    if allocated and allocated.after_solve:
        method = replace(method, after_solve=allocated.after_solve)  # type: ignore[type-var]
    visited = sum(any(block.full_name(name) in plan for name in block.layers) for block in blocks)
    with run_stage(recipe.stage, report, observer, unit="batch", blocks=visited, layers=len(plan)) as advance:
        for step in prune_blocks(loaded, batches, method, plan, fisher=fisher, journal=journal, progress=advance):
            observer(step)
            if isinstance(step, BlockResult):
                report.blocks.append(step)
                if allocated:  # which may change `plan` and `after_solve` for the blocks that follow
                    allocated.spend(step, blocks[step.index])
    for finish in finishing:
        finish()
