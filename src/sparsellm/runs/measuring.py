"""Perplexity and zero-shot accuracy of a checkpoint."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from sparsellm.checkpoints.loading import open_checkpoint, resolve_device
from sparsellm.evaluation.measurements import Accuracy, Perplexity
from sparsellm.evaluation.perplexity import measure as measure_perplexity
from sparsellm.evaluation.zeroshot import evaluate_tasks, prepare_tasks
from sparsellm.runs.first_pass import check_runs
from sparsellm.runs.placement import load
from sparsellm.runs.preparation import check_tokens, check_vocabulary, read_test, window_length
from sparsellm.runs.recipe_file import read_recipe


def measure(model: str, **settings: Any) -> tuple[dict[str, Perplexity], dict[str, Accuracy]]:
    """Measure a checkpoint's perplexity on texts and its accuracy on zero-shot tasks, with standard errors.

    All texts and tasks are read before the first measurement. A model that does not fit in memory is loaded block by block.

    Args:
        model: Checkpoint folder, model name on the hub, demo:opt or demo:llama.
        **settings: Recipe fields; `evaluate` names the texts and `task` the tasks.

    Returns:
        The perplexity by text and the accuracy by task.
    """
    recipe = read_recipe({"model": model, "method": "magnitude", **settings})
    device = resolve_device(recipe.device)
    source = open_checkpoint(model, recipe.revision, recipe.trust_remote_code)
    skeleton = source.skeleton()
    check_vocabulary(skeleton, source)
    length = window_length(recipe, source.length)
    tests = {text: read_test(recipe, source, text, length) for text in recipe.evaluate}
    check_tokens(skeleton, *tests.values())
    prepare_tasks(recipe.task, recipe.task_data)
    loaded = load(recipe, source, device, Path(tempfile.gettempdir()))
    check_runs(loaded, by_block=loaded.offloaded)
    perplexities = {text: measure_perplexity(loaded, test, text) for text, test in tests.items()}
    if not recipe.task:
        return perplexities, {}
    return perplexities, evaluate_tasks(
        loaded, source.tokenizer(), recipe.task, folder=recipe.task_data, limit=recipe.task_limit
    )
