"""`evaluate`: the perplexity and accuracy of any model, also a packed one, alone or beside another model."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Unpack

from torch import Tensor

from sparsellm.checkpoints.files import find_checkpoint
from sparsellm.checkpoints.loading import Checkpoint, InMemoryModel, named_model
from sparsellm.checkpoints.remarks import remarks_to
from sparsellm.errors import InvalidSetting, nearest
from sparsellm.evaluation.perplexity import measure_perplexity, refuse_unless_causal, token_perplexity
from sparsellm.evaluation.results import Evaluation, Perplexity
from sparsellm.evaluation.task_definitions import prepare_tasks
from sparsellm.observers.display import Display
from sparsellm.observers.events import (
    ANSWERING,
    LOADING,
    MEASURING,
    OPENING,
    READING_TEXTS,
    NextRun,
    Note,
    Observer,
    Schedule,
    Stage,
    advance_by,
    combine_observers,
)
from sparsellm.outputs.fingerprint import check_inputs
from sparsellm.pipeline.loading import check_runs, load_model, open_model
from sparsellm.pipeline.measuring import measure_accuracies
from sparsellm.pipeline.token_sequences import check_tokens, read_test, window_length
from sparsellm.recipes.fields import EVALUATION
from sparsellm.recipes.file import read_recipe
from sparsellm.recipes.keyword_types import EvaluationKeywords
from sparsellm.recipes.keywords import recipe_keywords
from sparsellm.recipes.recipe import Recipe
from sparsellm.texts.in_memory import CalibrationData, Given, given_texts

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase


@recipe_keywords(EvaluationKeywords)
def evaluate(
    model: str | Path | PreTrainedModel,
    text: str | Path | Sequence[str | Path] | CalibrationData = (),
    *,
    against: str | Path | PreTrainedModel | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    progress: bool = False,
    observe: Observer | None = None,
    **settings: Unpack[EvaluationKeywords],
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
        observe: Callback that receives every stage and result (see `sparsellm.observers.events`).
        **settings: Further fields of `Recipe`.

    Returns:
        The perplexity by text and the accuracy by task.

    Raises:
        SparseLLMError: See `sparsellm.errors`; before any heavy work where possible.
    """
    models = [named_model(x, tokenizer) for x in (model, against) if x is not None]
    if unknown := sorted(set(settings) - set(EVALUATION)):
        raise InvalidSetting(f"Unknown field {unknown[0]!r}. {nearest(unknown[0], EVALUATION)}")
    texts, data = given_texts(text, settings.get("text_field"))
    if against is not None and data is not None:  # which are read for each model
        data = {name: list(x) if isinstance(x, Iterator) else x for name, x in data.items()}
    given = {} if data is None else {"evaluate": data}
    runs = [(read_recipe({**x, **settings, "method": "magnitude", "evaluate": texts}), source) for x, source in models]
    with Display("auto" if progress else "off") as display:
        observer = combine_observers(display, observe)
        is_observed = progress or observe is not None  # otherwise a remark is a warning of Python
        with remarks_to(lambda text, is_new: observer(Note(text)) if is_new else None) if is_observed else nullcontext():
            return evaluate_recipes(runs, observer, given)


@recipe_keywords(EvaluationKeywords)
def perplexity(
    model: str | Path | PreTrainedModel,
    text: str | Path | CalibrationData,
    source: str = "",
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    batch: int | None = None,
    progress: Callable[[float, int], None] | None = None,
    **settings: Unpack[EvaluationKeywords],
) -> Perplexity:
    """Measure a model's perplexity on one text.

    Args:
        model: As for `evaluate`.
        text: As for `evaluate`. On a tensor of token ids, a model in memory computes in its own dtype.
        source: Name of such token ids, for the result.
        tokenizer: Tokenizer of a model in memory.
        batch: Sequences of such token ids per batch.
        progress: Called after each batch of them with the number of evaluated sequences and their total.
        **settings: As for `evaluate`.
    """
    if isinstance(text, Tensor) and not isinstance(model, (str, Path)) and not settings:
        refuse_unless_causal(model, text)
        return token_perplexity(model, text, source, batch=batch, progress=progress)
    if source or batch is not None or progress is not None:
        raise InvalidSetting(
            "A source, a batch and a function for progress are for token ids and a model in memory. Leave them out."
        )
    found = list(evaluate(model, text, tokenizer=tokenizer, **settings).perplexity.values())
    if len(found) != 1:
        raise InvalidSetting(f"One text has a perplexity, got {len(found)}. Call sparsellm.evaluate.")
    return found[0]


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
    check_inputs(runs[0][0], given)  # the recipes differ in their model only
    for recipe, source in runs:
        if source is None:  # the second model too, before the first one is measured
            find_checkpoint(recipe.model, recipe.revision, recipe.trust_remote_code)
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
    if isinstance(opened.source, Checkpoint) and opened.source.quantization:
        observer(Note(opened.source.quantization))
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
    check_runs(loaded, by_block=loaded.weights.on_disk, predicts=True)
    perplexity, accuracy = {}, {}
    for name, test in tests.items():
        observer(Stage(MEASURING))
        perplexity[name] = measure_perplexity(loaded, test, name, progress=advance_by("sequence", observer))
    if recipe.task:
        observer(Stage(ANSWERING))
        accuracy = measure_accuracies(recipe, loaded, opened.source.tokenizer(), advance_by("answer", observer))
    return Evaluation(perplexity, accuracy)
