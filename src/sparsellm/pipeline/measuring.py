"""What is measured of a model: perplexity on texts, accuracy on tasks, continuations of prompts."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, TypeVar, Unpack

import torch
from torch import Tensor

from sparsellm.checkpoints.loading import InMemoryModel
from sparsellm.checkpoints.remarks import remarks_to
from sparsellm.errors import InvalidSetting, nearest
from sparsellm.evaluation.measurements import Accuracy, Evaluation, Perplexity, generate_text, measure_of
from sparsellm.evaluation.perplexity import measure_perplexity
from sparsellm.evaluation.task_definitions import prepare_tasks
from sparsellm.evaluation.zeroshot import evaluate_tasks
from sparsellm.models.loaded_model import LoadedModel
from sparsellm.pipeline.display import Display
from sparsellm.pipeline.early_checks import check_inputs
from sparsellm.pipeline.events import (
    ANSWERING,
    CONTINUING,
    LOADING,
    MEASURING,
    MEASURING_CHECKPOINT,
    OPENING,
    READING_TEXTS,
    Advance,
    Measured,
    NextRun,
    Note,
    Observer,
    Schedule,
    Stage,
    advance_by,
    combine_observers,
    phase,
)
from sparsellm.pipeline.fingerprint import DenseCache, cache_key
from sparsellm.pipeline.loading import OpenedModel, Placement, check_runs, load_model, named_model, open_model
from sparsellm.pipeline.preparation import Prepared
from sparsellm.pipeline.recipe import Recipe, RunRecipe
from sparsellm.pipeline.recipe_file import read_recipe
from sparsellm.pipeline.report import Report, When
from sparsellm.pipeline.settings import EvaluationSettings, recipe_keywords
from sparsellm.pipeline.token_sequences import check_tokens, read_test, window_length
from sparsellm.texts.in_memory import SOURCE, CalibrationData, Given, given_texts
from sparsellm.texts.padding import count_tokens, token_digest
from sparsellm.texts.paths import is_task_file

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Value = TypeVar("Value")


@recipe_keywords(EvaluationSettings)
def evaluate(
    model: str | Path | PreTrainedModel,
    text: str | Path | Sequence[str | Path] | CalibrationData = (),
    *,
    against: str | Path | PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: bool = False,
    observe: Observer | None = None,
    **settings: Unpack[EvaluationSettings],
) -> Evaluation:
    """Measure a model's perplexity on texts and its accuracy on tasks of lm-eval, with standard errors.

    All texts and tasks are read before the first measurement. A model that does not fit in memory is loaded block by block.

    Args:
        model: A folder, a hub name, "demo:opt" or "demo:llama"; or a model in memory.
        text: Texts to measure the perplexity on: files, or names of texts (c4, wikitext2, ptb, demo); or data, as the
            `calibration` of `prune`.
        against: Another model to measure too, such as the dense one; the result has the differences from it, with their paired
            standard errors.
        tokenizer: Tokenizer of a model in memory.
        progress: Whether to display progress and the time left on stderr, or as a bar in a notebook.
        observe: Callback that receives every stage and result (see `sparsellm.pipeline.events`).
        **settings: Further fields of `Recipe`.

    Returns:
        The perplexity by text and the accuracy by task.

    Raises:
        SparseLLMError: See `sparsellm.errors`; before any heavy work where possible.
    """
    models = [named_model(x, tokenizer) for x in (model, against) if x is not None]
    if unknown := sorted(set(settings) - set(EvaluationSettings.__annotations__)):
        raise InvalidSetting(f"Unknown field {unknown[0]!r}. {nearest(unknown[0], EvaluationSettings.__annotations__)}")
    texts, data = given_texts(text)
    if against is not None and isinstance(data, Iterator):
        data = list(data)  # which is read for each model
    given = {} if data is None else {"evaluate": data}
    runs = [(read_recipe({**x, **settings, "method": "magnitude", "evaluate": texts}), source) for x, source in models]
    with Display("auto" if progress else "off") as display:
        observer = combine_observers(display, observe)
        is_observed = progress or observe is not None  # otherwise a remark is a warning of Python
        with remarks_to(lambda text, is_new: observer(Note(text)) if is_new else None) if is_observed else nullcontext():
            return evaluate_recipes(runs, observer, given)


def evaluate_recipes(
    runs: Sequence[tuple[Recipe, InMemoryModel | None]], observer: Observer, given: Given | None = None
) -> Evaluation:
    """Measure the model of a recipe, or one in memory, and the one that it is compared with, if there is one.

    Args:
        given: Data that replace the recipes' texts.

    Raises:
        SparseLLMError: See `sparsellm.errors`.
    """
    if not (runs[0][0].evaluate or runs[0][0].task):
        raise InvalidSetting("There is nothing to measure on: name a `text` or a `task`.")
    for recipe, source in runs:
        check_inputs(recipe, given=given, has_model=source is not None)
    results = []
    for number, (recipe, source) in enumerate(runs, 1):
        if len(runs) > 1:
            observer(NextRun(number, len(runs), PurePath(recipe.model).name))
        results.append(_evaluate(recipe, source, observer, given=given))
        gc.collect()  # frees the model
    if not results[1:]:
        return results[0]
    result = replace(results[0], against=results[1])
    for text, one in result.perplexity.items():
        another = results[1].perplexity[text]
        if one.parts and another.parts and one.parts.digest != another.parts.digest:
            names = " and ".join(recipe.model for recipe, _ in runs)
            observer(Note(f"{names} read {text} as other token sequences: their perplexities cannot be compared"))
    return result


def _evaluate(recipe: Recipe, source: InMemoryModel | None, observer: Observer, *, given: Given | None) -> Evaluation:
    """Measure the recipe's model, or `source`, on the recipe's texts, or on `given`, and on its tasks."""
    observer(Stage(OPENING))
    opened = open_model(recipe, source, packed=True)
    prepare_tasks(recipe.task, recipe.task_data)
    observer(Stage(READING_TEXTS))
    length = window_length(recipe, opened.source.length)
    read = {name: read_test(recipe, opened.source, name, length=length, given=given) for name in recipe.evaluate}
    tests = {name: sequences.windows for name, sequences in read.items()}
    check_tokens(opened, *tests.values())
    for note in dict.fromkeys(note for sequences in read.values() for note in sequences.notes):
        observer(Note(note))
    observer(Schedule((LOADING, *[MEASURING] * len(tests), *[ANSWERING] * bool(recipe.task))))
    observer(Stage(LOADING))
    loaded = load_model(recipe, opened, folder=Path(tempfile.gettempdir()))
    check_runs(loaded, by_block=loaded.weights.on_disk)
    perplexity, accuracy = {}, {}
    for name, test in tests.items():
        observer(Stage(MEASURING))
        perplexity[name] = measure_perplexity(loaded, test, name, progress=advance_by("sequence", observer))
    if recipe.task:
        observer(Stage(ANSWERING))
        accuracy = _accuracies(recipe, loaded, opened.source.tokenizer(), advance_by("answer", observer))
    return Evaluation(perplexity, accuracy)


def _accuracies(
    recipe: RunRecipe, loaded: LoadedModel, tokenizer: PreTrainedTokenizerBase, advance: Advance
) -> dict[str, Accuracy]:
    """The accuracies on the recipe's tasks."""
    folder, limit = recipe.task_data, recipe.task_limit
    return evaluate_tasks(loaded, tokenizer, recipe.task, folder=folder, limit=limit, progress=advance)


def measure_checkpoint(
    report: Report, opened: OpenedModel, *, ready: Prepared, placement: Placement, observer: Observer, folder: Path | None
) -> dict[str, Perplexity]:
    """The perplexity, by text, of the pruned checkpoint that a recovery starts from.

    What its own report says about the same sequences is not measured again.

    Args:
        opened: The pruned checkpoint.
        placement: Where it is held.
        folder: Folder for the files of this measurement.
    """
    results: dict[str, Perplexity] = {}
    loaded: LoadedModel | None = None
    for text, test in ready.tests.items():
        with phase(MEASURING_CHECKPOINT, report, observer, unit="sequence") as advance:
            known = report.before(text)
            if known is None or text == SOURCE or not _is_of(known, test):
                loaded = loaded or load_model(report.recipe, opened, folder=folder, placement=placement)
                known = measure_perplexity(loaded, test, text, progress=advance)
            results[text] = known
    return results


def _is_of(known: Perplexity, test: Tensor) -> bool:
    """Whether a perplexity is of these sequences; by their numbers if it is in a report without their digest."""
    same = (known.windows, known.length, known.tokens) == (*test.shape, count_tokens(test))
    return same and (known.parts is None or known.parts.digest == token_digest(test))


def measure_into(
    report: Report,
    when: When,
    loaded: LoadedModel,
    *,
    ready: Prepared,
    observer: Observer,
    shared: DenseCache | None = None,
) -> None:
    """Measure a run's model on the recipe's texts, tasks and prompts.

    Args:
        when: Whether the model is still dense.
        shared: Cache of results on the dense model; None for a pruned one.
    """

    def recall(tokens: Tensor, name: str, find: Callable[[], Value], *, kind: Any) -> Value:
        if shared is None or isinstance(ready.source, InMemoryModel):
            return find()
        key = cache_key(ready.source, tokens, dtype=loaded.compute or loaded.model.dtype, environment=report.environment)
        value: Value = shared.value(key, name, find, kind=kind)
        return value

    recipe = report.recipe
    for text, test in ready.tests.items():
        with phase(f"{MEASURING} {when}", report, observer, unit="sequence") as advance:
            find = partial(measure_perplexity, loaded, test, text, progress=advance)
            perplexity = recall(test, f"perplexity of {text}", find, kind=Perplexity)
            report.perplexity.setdefault(text, {})[when] = perplexity
            observer(Measured("perplexity", text, when, perplexity.value, perplexity.standard_error))
    if recipe.task:
        with phase(f"{ANSWERING} {when}", report, observer, unit="answer") as advance:
            score = partial(_accuracies, recipe, loaded, ready.source.tokenizer(), advance)
            files = [task for task in recipe.task if is_task_file(task)]
            data = [report.inputs.get(str(name), name) for name in (recipe.task_data, *files)]
            name = f"accuracies on {recipe.task} of {data}, {recipe.task_limit} questions"
            accuracies = recall(torch.empty(0, dtype=torch.long), name, score, kind=dict[str, Accuracy])
            for task, accuracy in accuracies.items():
                report.tasks.setdefault(task, {})[when] = accuracy
                observer(Measured(measure_of(accuracy.metric), task, when, accuracy.value, accuracy.standard_error))
    for prompt in recipe.prompt:
        with phase(CONTINUING, report, observer):
            report.samples.setdefault(prompt, {})[when] = generate_text(loaded, ready.source.tokenizer(), prompt)
