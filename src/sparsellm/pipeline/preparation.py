"""Plan, calibration and test sequences of a run, prepared before it reads weights. Invalid input is rejected here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any, NamedTuple

from torch import Tensor

from sparsellm.checkpoints.loading import Checkpoint, InMemoryModel
from sparsellm.checkpoints.stamps import Stamps
from sparsellm.checkpoints.stored_form import StoredForm
from sparsellm.errors import dtype_name, plural
from sparsellm.evaluation.task_definitions import prepare_tasks
from sparsellm.methods import BlockMethod, Plan
from sparsellm.methods.layerwise import LayerWise
from sparsellm.models.output_head import blocks_and_head, output_head
from sparsellm.observers.events import OPENING, READING_TEXTS, Note, Observer, add_note, run_stage
from sparsellm.outputs.folder import ANEW, LOG
from sparsellm.outputs.report import Report
from sparsellm.outputs.verification import report_before
from sparsellm.pipeline.cached_allocation import rule_of
from sparsellm.pipeline.dense_results import DenseCache
from sparsellm.pipeline.loading import OpenedModel, check_names, open_model
from sparsellm.pipeline.sequential import InputsReader
from sparsellm.pipeline.steps import ModelStep, steps_of
from sparsellm.pipeline.token_sequences import check_tokens, read_tokens, tokens_note, window_length
from sparsellm.recipes.fields import ALLOCATIONS, select_blocks
from sparsellm.recipes.methods import method_of
from sparsellm.recipes.plan import PlannedLayer, list_layers, plan_from_file, uniform_plan
from sparsellm.recipes.recipe import Recipe, RunRecipe
from sparsellm.recipes.selection import layer_names
from sparsellm.solvers import Magnitude
from sparsellm.solvers.patterns import Unstructured
from sparsellm.solvers.statistics import Gram
from sparsellm.texts.in_memory import SOURCE, Given
from sparsellm.texts.padding import count_contexts, count_tokens, token_digest, windows_a_step

TOKENS_A_BATCH = 2048
"""Tokens per batch: enough for efficient matrix products; the activations of twice as many no longer fit the cache."""


@dataclass(frozen=True, eq=False)
class Prepared(OpenedModel):
    """A run before its weights are read.

    Attributes:
        windows: Calibration token ids, (samples, length), `PADDING` after the end of shorter sequences; empty where the method
            needs none.
        tests: Token ids to measure perplexity on, (sequences, length), by text, `PADDING` after the end of shorter sequences.
        given: Data in memory that replace texts of the recipe, of which `windows` and `tests` are.
        batch: Sequences per batch.
        steps: What the run does with the whole model after its blocks.
    """

    recipe: RunRecipe
    method: InputsReader
    plan: Plan
    length: int
    windows: Tensor
    tests: Mapping[str, Tensor]
    given: Given
    batch: int
    steps: tuple[ModelStep, ...]

    def stamps(self) -> tuple[Stamps, ...]:
        """The files of the checkpoints that the run reads, as they were when it opened them."""
        return (self.source.stamps,) if isinstance(self.source, Checkpoint) else ()

    def inputs_in_memory(self) -> dict[str, dict[str, str]]:
        """Digests of what is given in memory, as `run_inputs` has those of files: the model, and the token ids of texts."""
        found, source = dict[str, dict[str, str]](), self.source
        if isinstance(source, InMemoryModel):
            found[self.recipe.model] = {"tensors": source.digest()}
        if "calibration" in self.given:
            found[f"calibration {SOURCE}"] = {"token ids": token_digest(self.windows)}
        return found | {name: {"token ids": token_digest(self.tests[name])} for name in self.given.get("evaluate", ())}


@dataclass(frozen=True, eq=False)
class PreparedPruning(Prepared):
    """A pruning run before its weights are read."""

    recipe: Recipe
    method: BlockMethod


def prepare_run(
    recipe: Recipe,
    report: Report,
    observer: Observer,
    *,
    given: Given | None = None,
    source: Checkpoint | InMemoryModel | None = None,
    shared: DenseCache | None = None,
) -> PreparedPruning:
    """Open the recipe's model, or take `source`, and prepare its pruning. Other arguments as for `prepare_pruning`."""
    with run_stage(OPENING, report, observer):
        opened = open_model(recipe, source)
        method, plan = make_plan(recipe, opened)
        report.origin = opened.source.origin()
    with run_stage(READING_TEXTS, report, observer):
        return prepare_pruning(opened, recipe, method, plan, report=report, observer=observer, given=given, shared=shared)


def prepare_pruning(
    opened: OpenedModel,
    recipe: Recipe,
    method: BlockMethod,
    plan: Plan,
    *,
    report: Report,
    observer: Observer,
    given: Given | None = None,
    shared: DenseCache | None = None,
) -> PreparedPruning:
    """Check the plan against the model, and read the texts of the recipe. Invalid input is rejected here.

    Args:
        report: Receives notes, and how the calibration sequences were drawn.
        given: Data that replace the recipe's texts, in forms of `sparsellm.texts.in_memory`.
        shared: Keeps the token ids for other runs of this process.
    """
    texts = read_texts(opened, recipe, plan, report=report, observer=observer, given=given, shared=shared)
    windows = texts.windows
    if issubclass(method.needs, Gram):
        blocks = blocks_and_head(opened.skeleton, plan)
        widths = [block.layer(name).in_features for block in blocks for name in block.layers if block.full_name(name) in plan]
        different = count_contexts(windows)
        if note := tokens_note(windows, different, max(widths)):
            if method.needs_dense_stream and "solver" in recipe.settings:  # which may not shrink its fit, as the default does
                note += f"; the solver of {recipe.method} may give more alone: compare the two"
            add_note(note, report, observer)
        is_projected = recipe.projecting or getattr(method, "after_solve", None)  # which may need the inputs
        if different < getattr(method, "least_tokens", 0) * max(widths) and not is_projected:
            method = LayerWise(Magnitude(), getattr(method, "keep_zeros", False))
            text = "the smallest weights of each layer are removed"
            if recipe.allocates:
                recipe, text = recipe.model_copy(update={"allocation": ALLOCATIONS[0]}), f"{text}, the same fraction of each"
            add_note(f"too few tokens to tell inputs apart: {text}", report, observer)
    batch = sequences_a_batch(recipe, windows, length=texts.length, observer=observer)
    steps = steps_of(recipe, method)
    for step in steps:
        observer(Note(step.check_memory(opened, windows)))
    found = vars(opened) | texts._asdict()
    return PreparedPruning(**found, recipe=recipe, method=method, plan=plan, batch=batch, steps=steps)


class Texts(NamedTuple):
    """The texts of a run as token ids: `Prepared.length`, `windows`, `tests` and `given`."""

    length: int
    windows: Tensor
    tests: dict[str, Tensor]
    given: Given


def read_texts(
    opened: OpenedModel,
    recipe: RunRecipe,
    plan: Plan,
    *,
    report: Report,
    observer: Observer,
    given: Given | None,
    shared: DenseCache | None,
) -> Texts:
    """Check the plan against the model, and read the texts of the recipe."""
    source, skeleton = opened.source, opened.skeleton
    blocks = blocks_and_head(skeleton, plan)
    report.coverage = opened.coverage.of_plan(opened.blocks, plan)
    if isinstance(source, Checkpoint):
        form = StoredForm.of(source.files(), skeleton)
        check_names(form, source, blocks=blocks, plan=plan)
        before = report_before(source)
        report.dtype_changed = bool(before and before.dtype_changed) or form.changes(source.dtype(recipe.dtype))
        for text in _source_notes(form, source, recipe.dtype):
            add_note(text, report, observer)
        if before and (text := before.note_before(recipe)):
            observer(Note(text))  # the report says what became of the zeros
    prepare_tasks(recipe.task, recipe.task_data)
    length = window_length(recipe, source.length)
    calibration, read = read_tokens(recipe, source, length, given=given, shared=shared)
    windows, report.calibration = calibration.windows, calibration.description
    tests = {text: sequences.windows for text, sequences in read.items()}
    check_tokens(opened, windows, *tests.values())
    if opened.no_text:  # not before: a text that needs the tokenizer is refused with the reason
        add_note(opened.no_text, report, observer)
    for text in dict.fromkeys(note for sequences in (calibration, *read.values()) for note in sequences.notes):
        add_note(text, report, observer)
    if recipe.calibration in recipe.evaluate and "." in str(recipe.calibration):
        name = PurePath(str(recipe.calibration)).name
        add_note(f"{name} is both calibration and test text: its perplexity is too low", report, observer)
    if (limit := recipe.evaluate_limit) and tests:
        add_note(f"perplexity is measured on the first {limit} sequences of {length} tokens of each text", report, observer)
    return Texts(length, windows, tests, given or {})


def _source_notes(form: StoredForm, source: Checkpoint, name: str) -> Iterator[str]:
    """Notes on tensors that the output, in the dtype of this name, has in another form than the checkpoint, or not."""
    target, rounded = source.dtype(name), form.rounded()
    if rounded:
        dtypes, kept = " and ".join(sorted(set(rounded.values()))), "float64" if "float64" in rounded.values() else "float32"
        verb = "is" if len(rounded) == 1 else "are"
        keeps = f"; `dtype='{kept}'` keeps them" if kept == "float32" else ""
        reason = f", as config.json says{keeps}" if name == "auto" else ""
        yield f"{plural(len(rounded), 'tensor')} {verb} stored in {dtypes} and {verb} rounded to {dtype_name(target)}{reason}"
    if form.carried:
        first = next(iter(form.carried))
        verb = "goes along as it is" if len(form.carried) == 1 else "go along as they are"
        yield f"{plural(len(form.carried), 'tensor')} that the model does not use, {first} first, {verb}"
    if form.zero_biases:
        first = form.zero_biases[0]
        yield f"biases of 0 that the model does not have, {first} first of {len(form.zero_biases):,}, are left out"
    if form.computed:
        first, verb = form.computed[0], "is" if len(form.computed) == 1 else "are"
        yield f"{plural(len(form.computed), 'buffer')} that the model computes itself, {first} first, {verb} left out"
    if note := source.documents((*ANEW, LOG)).note():
        yield note


def make_plan(recipe: Recipe, opened: OpenedModel) -> tuple[BlockMethod, Plan]:
    """Build the recipe's method, and its plan checked against every layer's shape.

    Raises:
        UnsupportedModel: The method cannot solve the model's feed-forward layers.
        InvalidSetting: The recipe rounds a model that is rounded already.
    """
    blocks = opened.blocks
    recipe.check_source(opened.source)
    method = method_of(recipe, len(blocks))
    if check := getattr(method, "check_blocks", None):
        check(blocks, recipe.model)
    # An allocation file may set a pattern that fits a layer where the recipe's does not, so shapes are checked with the file.
    pattern = Unstructured(0) if recipe.allocation_file else recipe.pattern
    selection = _selection(recipe, opened)
    plan = uniform_plan(pattern=pattern, **selection)
    if rule := rule_of(recipe):
        rule.check(selection["blocks"], plan)
    if recipe.allocation_file:
        plan = plan_from_file(recipe.allocation_file, plan, layer_names(selection["blocks"]), recipe.pattern)
    return method, plan


def pruning_layers(ready: PreparedPruning) -> list[PlannedLayer]:
    """Every linear layer of the blocks with its pattern in the plan, or the reason why it stays dense."""
    layers = list_layers(pattern=ready.recipe.pattern, **_selection(ready.recipe, ready))
    return [replace(layer, pattern=ready.plan.get(layer.name)) for layer in layers]


def _selection(recipe: Recipe, opened: OpenedModel) -> dict[str, Any]:
    """The arguments of `uniform_plan` by which a recipe selects layers; the head is one only where some are included."""
    head = output_head(opened.skeleton, len(opened.blocks)) if recipe.include else None
    blocks, chosen = [*opened.blocks, *filter(None, [head])], select_blocks(recipe.blocks, len(opened.blocks))
    return {"blocks": blocks, "chosen": chosen, "include": recipe.include, "exclude": recipe.exclude}


def sequences_a_batch(
    recipe: RunRecipe, windows: Tensor, *, length: int, observer: Observer, at_most_a_step: bool = False
) -> int:
    """Sequences per batch: about TOKENS_A_BATCH tokens, and no more than a gradient step over one block reads."""
    per_step = windows_a_step(*windows.shape) if windows.numel() else None
    usual = max(1, TOKENS_A_BATCH // (windows.shape[1] if per_step else length))
    batch = recipe.batch_size or (min(usual, per_step) if per_step else usual)
    if at_most_a_step and per_step and batch > per_step:
        observer(Note(f"{per_step} sequences per batch instead of {batch}, as many as a gradient step reads"))
        batch = per_step
    if batch > 1 and count_tokens(windows) < windows.numel():
        if recipe.batch_size:
            observer(Note("1 sequence per batch, since the sequences differ in length"))
        return 1
    return batch
