"""The measurements of a run: perplexity on texts and accuracy on tasks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from sparsellm.checkpoints.loading import InMemoryModel
from sparsellm.checkpoints.remarks import remark, remarks_to
from sparsellm.evaluation.perplexity import measure_perplexity, remark_overflow
from sparsellm.evaluation.results import Accuracy, Perplexity, measure_of
from sparsellm.evaluation.zeroshot import evaluate_tasks
from sparsellm.models.loaded_model import LoadedModel
from sparsellm.observers.events import (
    ANSWERING,
    MEASURING,
    Advance,
    Measured,
    Observer,
    run_stage,
)
from sparsellm.outputs.report import Report, When
from sparsellm.pipeline.dense_results import DenseCache, cache_key
from sparsellm.pipeline.loading import short_sequence
from sparsellm.pipeline.preparation import Prepared
from sparsellm.recipes.path_names import PathNames
from sparsellm.recipes.recipe import RunRecipe
from sparsellm.texts.paths import is_task_file

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Value = TypeVar("Value")


def measure_accuracies(
    recipe: RunRecipe, loaded: LoadedModel, tokenizer: PreTrainedTokenizerBase, advance: Advance
) -> dict[str, Accuracy]:
    """The accuracies on the recipe's tasks."""
    folder, limit = recipe.task_data, recipe.task_limit
    result = evaluate_tasks(loaded, tokenizer, recipe.task, folder=folder, limit=limit, progress=advance)
    remark_overflow(loaded.model, short_sequence(loaded.model), ", ".join(PurePath(task).name for task in recipe.task))
    return result


def measure_into(
    report: Report,
    when: When,
    loaded: LoadedModel,
    *,
    ready: Prepared,
    observer: Observer,
    shared: DenseCache | None = None,
) -> None:
    """Measure a run's model on the recipe's texts and tasks.

    Args:
        when: Whether the model is still dense.
        shared: Cache of results on the dense model; None for a pruned one.
    """

    def recall(tokens: Tensor, name: str, find: Callable[[], Value], *, kind: Any) -> Value:
        if shared is None or isinstance(ready.source, InMemoryModel):
            return find()

        def find_and_hear() -> tuple[Value, list[str]]:
            said: list[str] = []
            with remarks_to(lambda text, is_new: said.append(text)):
                return find(), said

        key = cache_key(ready.source, tokens, dtype=loaded.compute or loaded.model.dtype, environment=report.environment)
        value: Value
        value, said = shared.value(key, name, find_and_hear, kind=tuple[kind, list[str]])
        for text in said:
            remark(text, text)  # a new subject, as that of the remark is known where the value was found
        return value

    recipe, names = report.recipe, PathNames(report.recipe)
    for text, test in ready.tests.items():
        with run_stage(f"{MEASURING} {when}", report, observer, unit="sequence") as advance:
            find = partial(measure_perplexity, loaded, test, names[text], progress=advance)
            perplexity = recall(test, f"perplexity of {text}", find, kind=Perplexity)
            report.perplexity.setdefault(text, {})[when] = perplexity
            observer(Measured("perplexity", names[text], when, perplexity.value, perplexity.standard_error))
    if recipe.task:
        with run_stage(f"{ANSWERING} {when}", report, observer, unit="answer") as advance:
            score = partial(measure_accuracies, recipe, loaded, ready.source.tokenizer(), advance)
            files = [task for task in recipe.task if is_task_file(task)]
            data = [report.inputs.get(str(name), name) for name in (recipe.task_data, *files)]
            name = f"accuracies on {recipe.task} of {data}, {recipe.task_limit} questions"
            accuracies = recall(torch.empty(0, dtype=torch.long), name, score, kind=dict[str, Accuracy])
            for task, accuracy in accuracies.items():
                report.tasks.setdefault(task, {})[when] = accuracy
                observer(Measured(measure_of(accuracy.metric), names[task], when, accuracy.value, accuracy.standard_error))
