"""The stages to come of a run, an evaluation or several runs, with the seconds that `plan` expects of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from sparsellm.data.padding import count_tokens
from sparsellm.errors import SparseLLMError
from sparsellm.evaluation.measurements import TOKENS
from sparsellm.methods import planned_layers
from sparsellm.models.output_head import blocks_and_head
from sparsellm.runs import layer_costs
from sparsellm.runs.costs import block_shapes, rates
from sparsellm.runs.events import (
    ALLOCATION,
    ANSWERING,
    CONTINUING,
    ESTIMATING,
    GENERATING,
    LAYERS,
    LOADING,
    MEASURING,
    MEASURING_CHECKPOINT,
    PREDICTING,
    SENSITIVITIES,
    TRAINING,
    WRITING,
    ExpectedStage,
    Observer,
    Schedule,
    Stage,
)
from sparsellm.runs.fingerprint import DenseCache
from sparsellm.runs.loading import OpenedModel, Placement, choose_placement, open_model
from sparsellm.runs.planning import estimate, training_rates
from sparsellm.runs.preparation import Prepared, make_plan, prepare
from sparsellm.runs.recipe import Recipe, RunRecipe
from sparsellm.runs.recovery import BlockRecovery
from sparsellm.runs.recovery_recipe import RecoveryRecipe
from sparsellm.runs.report import Report
from sparsellm.runs.stage_costs import block_stage
from sparsellm.runs.training_costs import block_training_cost

READ_SECONDS, WRITTEN_SECONDS = 0.7e-9, 6e-9
"""Seconds for each byte that is read, or written, read back and digested, from a disk that the system caches."""

OF_ITS_OWN = {"method", "sparsity", "effort", "solver", "as_published", "scope", "gauss_newton_steps", "epochs", "alpha"}
OF_ITS_OWN |= {"beta", "allocation", "allocation_bounds", "blocks", "include", "exclude", "keep_zeros", "true_sequential"}
"""Recipe fields on which the opened model, its sequences and the batch size do not depend."""


def expected_stages(
    recipe: RunRecipe, ready: Prepared, placement: Placement, *, batch: int, restored: int = 0, written: bool
) -> tuple[ExpectedStage, ...]:
    """Estimate the stages of a run from the loading of the model on.

    Args:
        recipe: The run.
        ready: Its method, plan and sequences.
        placement: Where the model is held.
        batch: Sequences per batch.
        restored: Number of blocks that an earlier process has finished.
        written: Whether the run's model is written.
    """
    speed = rates(ready.device)
    seconds = {stage.name: stage.seconds for stage in estimate(recipe, ready, placement, batch=batch, speed=speed).stages}
    stages = []
    if isinstance(recipe, RecoveryRecipe) and ready.tests:
        stages.append(ExpectedStage(MEASURING_CHECKPOINT, seconds[MEASURING] / 2, MEASURING))
    stages += [ExpectedStage(LOADING, READ_SECONDS * placement.model * (not placement.streamed), LOADING)]
    stages += _measurements("dense", recipe, ready, placement, seconds=seconds)
    stages += _layer_costs(1, recipe, ready, placement, seconds=seconds)
    generated = [ExpectedStage(GENERATING, seconds.get(GENERATING, 0.0), GENERATING)]
    stages += generated * bool(recipe.calibration_written)
    stages += [ExpectedStage(name, seconds[name], name) for name in seconds if name.startswith((SENSITIVITIES, ALLOCATION))]
    if recipe.model_steps:
        stages += generated
        stages += [ExpectedStage(name, seconds[name], name) for name in (PREDICTING,) if name in seconds]
    stages.append(_pruning(recipe, ready, placement, seconds[block_stage(recipe)], batch=batch, restored=restored))
    if recipe.model_steps:
        stages.append(ExpectedStage(TRAINING, seconds[TRAINING], TRAINING))
    stages += _measurements("pruned", recipe, ready, placement, seconds=seconds)
    stages += _layer_costs(layer_costs.WORST + 2, recipe, ready, placement, seconds=seconds)
    if written:
        stages.append(ExpectedStage(WRITING, WRITTEN_SECONDS * placement.model, WRITING))
    return tuple(stages)


def expected_evaluation(
    recipe: Recipe, opened: OpenedModel, tests: dict[str, Tensor], length: int
) -> tuple[ExpectedStage, ...]:
    """Estimate the stages of an evaluation of a model on texts, each (sequences, length), and on the recipe's tasks."""
    method, plan = make_plan(recipe, opened)
    windows = torch.empty(0, dtype=torch.long)
    ready = Prepared(**vars(opened), method=method, plan=plan, length=length, windows=windows, tests=tests, batch=1)
    stages = expected_stages(recipe, ready, choose_placement(recipe, ready, files=True), batch=1, written=False)
    names = (LOADING, f"{MEASURING} dense", f"{ANSWERING} dense")
    kept = (stage for stage in stages if stage.name in names)
    return tuple(replace(stage, name=stage.name.removesuffix(" dense")) for stage in kept)


def announce_runs(
    recipes: Sequence[Recipe | None], observe: Observer, *, written: bool | Sequence[bool], shared: DenseCache | None
) -> None:
    """Tell the observer of all runs of a command before the first one: a display then estimates the time of the whole.

    Args:
        recipes: As for `expected_runs`.
        written: Whether the runs' models are written, of all or of each.
        shared: As for `expected_runs`.
    """
    each = [written] * len(recipes) if isinstance(written, bool) else written

    def estimate() -> list[tuple[ExpectedStage, ...] | None]:
        runs = expected_runs(recipes, written=True, shared=shared)
        return [
            stages and tuple(stage for stage in stages if is_written or stage.name != WRITING)
            for stages, is_written in zip(runs, each, strict=True)
        ]

    observe(Stage(ESTIMATING))
    observe(Schedule(estimate))


def expected_runs(
    recipes: Iterable[Recipe | None], *, written: bool, shared: DenseCache | None
) -> list[tuple[ExpectedStage, ...] | None]:
    """Estimate the stages of several runs, one after the other. Each model and text is read once.

    Args:
        recipes: The runs; None for one that is finished.
        written: Whether the runs' models are written.
        shared: The cache of results on dense models that the runs share; it keeps the token ids for them.

    Returns:
        By run, its stages; none for a finished run, None for one that is refused.
    """
    result: list[tuple[ExpectedStage, ...] | None] = []
    prepared: dict[str, Prepared] = {}
    cached: set[str] = set()
    for recipe in recipes:
        stages: tuple[ExpectedStage, ...] | None = ()
        if recipe is not None:
            try:
                ready = _prepared(recipe, prepared, shared)
                placement = choose_placement(recipe, ready, files=True)
                stages = expected_stages(recipe, ready, placement, batch=ready.batch, written=written)
            except (SparseLLMError, OSError):  # the run itself says why
                stages = None
            if shared and stages:
                stages = tuple(_without_cached(recipe, stages, cached))
        result.append(stages)
    return result


def _prepared(recipe: Recipe, known: dict[str, Prepared], shared: DenseCache | None) -> Prepared:
    """Prepare a run, with the model and the sequences of an earlier one that has the same."""
    key = f"{recipe.reads_text} {recipe.model_dump_json(exclude=OF_ITS_OWN)}"
    if key not in known:
        opened = open_model(recipe)
        method, plan = make_plan(recipe, opened)
        known[key] = prepare(opened, method, plan, report=Report(recipe), observer=lambda _: None, shared=shared)
    method, plan = make_plan(recipe, known[key])
    return replace(known[key], method=method, plan=plan)


def _without_cached(recipe: Recipe, stages: Iterable[ExpectedStage], cached: set[str]) -> Iterator[ExpectedStage]:
    """Set the seconds to 0 of what an earlier run computes on the same dense model, and note what this one computes."""
    for number, stage in enumerate(stages):
        if stage.name.endswith(" dense"):
            fields = {"model", "revision", "dtype", "sequence_length", "evaluate", "evaluate_limit", "task", "task_limit"}
        elif stage.name == SENSITIVITIES:
            fields = {"model", "revision", "dtype", "sequence_length", "calibration", "samples", "seed", "batch_size"}
        elif stage.name.startswith(ALLOCATION):
            fields = {"model", "revision", "dtype", "sequence_length", "calibration", "samples", "seed", "sparsity"}
        else:
            yield stage
            continue
        key = f"{number} {stage.name} {recipe.model_dump_json(include=fields)}"
        yield replace(stage, seconds=0.0) if key in cached else stage
        cached.add(key)


def _measurements(
    when: str, recipe: RunRecipe, ready: Prepared, placement: Placement, *, seconds: Mapping[str, float]
) -> Iterator[ExpectedStage]:
    """The measurements of the dense or the pruned model."""
    total = sum(map(count_tokens, ready.tests.values()))
    for windows in ready.tests.values():
        yield ExpectedStage(f"{MEASURING} {when}", seconds[MEASURING] / 2 * count_tokens(windows) / total, MEASURING)
    if recipe.task:
        yield ExpectedStage(f"{ANSWERING} {when}", None, f"{ANSWERING} {recipe.model}")  # how many answers, only lm-eval knows
    for _ in recipe.prompt:
        token = 0.0 if placement.streamed else placement.model / rates(ready.device)[3]
        yield ExpectedStage(CONTINUING, TOKENS * token, CONTINUING)


def _layer_costs(
    passes: int, recipe: RunRecipe, ready: Prepared, placement: Placement, *, seconds: Mapping[str, float]
) -> Iterator[ExpectedStage]:
    """The measurement of the layers that cost most: passes of the dense or the pruned model over a few sequences."""
    head = blocks_and_head(ready.skeleton, ready.plan)[-1].is_head
    if recipe.allocation_rule == "fisher" and ready.tests and not placement.streamed and not head:
        total = sum(map(count_tokens, ready.tests.values()))
        tokens = max(layer_costs.TOKENS, layer_costs.SEQUENCES * ready.length)
        yield ExpectedStage(LAYERS, seconds[MEASURING] / 2 * passes * tokens / total, LAYERS)


def _pruning(
    recipe: RunRecipe, ready: Prepared, placement: Placement, seconds: float, *, batch: int, restored: int
) -> ExpectedStage:
    """The stage that prunes or trains block by block. Restored blocks take the forward passes that lead to them."""
    blocks_there = blocks_and_head(ready.skeleton, ready.plan)
    pruned = [block.index for block in blocks_there if planned_layers(block, ready.plan)]
    shapes, speed = block_shapes(recipe, ready, batch), rates(ready.device)
    passed = float((shapes.forward(shapes.tokens) / speed).sum())
    block = (seconds - pruned[-1] * passed) / len(pruned)
    if isinstance(ready.method, BlockRecovery):
        speed = training_rates(speed, placement, ready.device)
        block = float((block_training_cost(ready.method, ready, shapes).work / speed).sum())
    gaps = (index - before for before, index in pairwise([0, *pruned]))
    blocks = tuple(gap * passed + block * (number >= restored) for number, gap in enumerate(gaps))
    name = block_stage(recipe)
    return ExpectedStage(name, sum(blocks), f"{name} {ready.method!r}", blocks)
