"""The perplexity of a checkpoint on texts."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sparsellm.checkpoint import device_of, open_checkpoint
from sparsellm.evaluation import measure as measure_perplexity
from sparsellm.first_pass import check_runs
from sparsellm.pages import keep_pages
from sparsellm.preparation import check_tokens, check_vocabulary, read_test, window_length
from sparsellm.recipe_file import read_recipe
from sparsellm.residence import settle
from sparsellm.zeroshot import accuracies, prepared


def measure(
    model: str,
    texts: Sequence[str],
    field: str | None = None,
    length: int | None = None,
    evaluate_limit: int | None = None,
    tasks: Sequence[str] = (),
    task_data: str | None = None,
    task_limit: int | None = None,
    device: str = "auto",
    dtype: str = "auto",
    memory: str | None = None,
    revision: str | None = None,
    trusted: bool = False,
) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """The perplexity of a checkpoint on each text, and its accuracy on each task, with standard errors.

    All texts are read, and the tasks' files found, before anything is measured.

    The arguments are `Recipe`'s fields of those names. A model that is larger than the memory is read block by block, and
    hidden states that are go to temporary files.
    """
    recipe = read_recipe(
        {"model": model, "method": "magnitude", "evaluate": tuple(texts), "text_field": field, "length": length, "dtype": dtype}
        | {"memory": memory, "revision": revision, "trust_remote_code": trusted}
        | {"task": tuple(tasks), "task_data": task_data, "task_limit": task_limit, "evaluate_limit": evaluate_limit}
    )
    keep_pages()
    place = device_of(device)
    source = open_checkpoint(model, revision, trusted)
    skeleton = source.skeleton()
    check_vocabulary(skeleton, source)
    window = window_length(recipe, source.length)
    tests = {text: read_test(recipe, source, text, window) for text in recipe.evaluate}
    check_tokens(skeleton, *tests.values())
    prepared(recipe.task, task_data)
    home = settle(recipe, source, place, Path(tempfile.gettempdir()))
    check_runs(home, by_block=home.streamed)
    perplexities = {text: asdict(measure_perplexity(home, test, text)) for text, test in tests.items()}
    found = accuracies(home, source.tokenizer(), recipe.task, task_data, task_limit) if tasks else {}
    return perplexities, {task: asdict(accuracy) for task, accuracy in found.items()}
