"""Accuracy on the tasks of lm-eval, with data from the hub or, for those of the SparseLLM paper, from local files."""

from __future__ import annotations

import hashlib
import math
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from pydantic import TypeAdapter

from sparsellm.checkpoints.loading import compute_dtype
from sparsellm.errors import BadText, TooLarge, printable
from sparsellm.evaluation import task_definitions as definitions
from sparsellm.evaluation.differences import Parts
from sparsellm.evaluation.results import Accuracy
from sparsellm.models.contexts import compute_dtype_context, eval_mode
from sparsellm.models.loaded_model import LoadedModel
from sparsellm.runtime import collectives
from sparsellm.runtime.products import fast_linear_layers

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

REQUESTS_A_BATCH = 8
"""Requests per batch. Requests are padded, so another number changes the scores by rounding."""

ACCURACY = TypeAdapter(Accuracy)  # reads what other processes send

EXAMPLES_SEED = 1234
"""The seed with which lm-eval chooses examples, its own default."""


def evaluate_tasks(
    loaded: LoadedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[str],
    *,
    folder: str | None = None,
    limit: int | None = None,
    progress: Callable[[float, int], None] | None = None,
) -> dict[str, Accuracy]:
    """Evaluate a model on tasks.

    The results equal those of lm-eval with `--batch_size 8` and, for a 16-bit model on a CPU, `dtype=float32`: with as many
    examples in the prompt as the task's definition says, zero for most. In a distributed run, each process evaluates a shard of
    the tasks.

    Args:
        tasks: Names of tasks, groups and tags of lm-eval, or files with the definition of a task.
        folder: Folder with a local file of each task; None for data from the hub.
        limit: Maximum number of questions per task; None for all.
        progress: Called after each batch with the number of scored answers and their total.

    Returns:
        By task. A group has one result if lm-eval combines one metric of its tasks, else one for each member, as has a tag.

    Raises:
        TooLarge: If the model is offloaded.
        SparseLLMError: As `prepare_tasks`.
    """
    if loaded.weights.on_disk:
        raise TooLarge(
            "Tasks need the whole model in memory, and it is read block by block. Leave out `task`, or raise `max_memory`."
        )
    overrides, model = definitions.prepare_tasks(tasks, folder), loaded.model
    local = {task: overrides[task] for task in collectives.shard(list(tasks))}
    with (
        eval_mode(model),
        compute_dtype_context(model, compute_dtype(model)),
        fast_linear_layers(),
        definitions.silence_lm_eval(),
    ):
        results = _run_lm_eval(model, tokenizer, local, limit=limit, progress=progress) if local else {}
    figures = [_figures(results, task, fields.get("task", task)) for task, fields in local.items()]
    return {
        name: ACCURACY.validate_python(figure) for shard in collectives.all_gather(figures) for name, figure in shard.items()
    }


def _run_lm_eval(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Mapping[str, Mapping[str, Any]],
    *,
    limit: int | None,
    progress: Callable[[float, int], None] | None,
) -> dict[str, Any]:
    """The result dictionary of lm-eval for tasks, given with their overrides."""
    from lm_eval import evaluate
    from lm_eval.models.huggingface import HFLM

    class CountedLM(HFLM):  # type: ignore[misc]
        """lm-eval's model, which counts the answers that it scores."""

        scored = total = 0

        def _loglikelihood_tokens(self, requests: list[Any], *arguments: Any, **keywords: Any) -> Any:
            self.total += len(requests)
            return super()._loglikelihood_tokens(requests, *arguments, **keywords)

        def _model_call(self, inps: Any, *arguments: Any, **keywords: Any) -> Any:
            logits = super()._model_call(inps, *arguments, **keywords)
            self.scored = min(self.scored + len(inps), self.total)  # padding may add rows
            if progress is not None:
                progress(self.scored, self.total)
            return logits

    lm = CountedLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=REQUESTS_A_BATCH)
    with definitions.task_errors(*tasks), tempfile.TemporaryDirectory() as folder:
        specs = [definitions.spec(task, fields, Path(folder)) for task, fields in tasks.items()]
        members = definitions.task_manager().load(specs)
        # As simple_evaluate, which has no results where LOCAL_RANK is not 0, and takes seconds to list the installed packages.
        random.seed(0)
        np.random.seed(EXAMPLES_SEED)
        torch.manual_seed(EXAMPLES_SEED)
        for member in members["tasks"].values():
            if member.get_config("num_fewshot") is None:
                member.set_config(key="num_fewshot", value=0)
            member.set_fewshot_seed(seed=EXAMPLES_SEED)
        return dict(evaluate(lm, members, limit=limit, log_samples=True) or {})


def _figures(results: Mapping[str, Any], task: str, name: str) -> dict[str, dict[str, Any]]:
    """The fields of each `Accuracy` that a task, whose name in lm-eval's results is `name`, is reported with, by its name."""
    return {task if x == name else x: asdict(_accuracy(results, x)) for x in _reported_names(results, name)}


def _reported_names(results: Mapping[str, Any], task: str) -> list[str]:
    """The names in lm-eval's results that a task, group or tag is reported under."""
    is_group = task not in results["n-samples"]
    if not is_group or len(metrics_of(results["results"].get(task, {}))) == 1:
        return [task]
    index = definitions.task_manager().task_index
    members = results["group_subtasks"].get(task) or [name for name, entry in index.items() if task in entry.tags]
    return [name for member in members for name in _reported_names(results, member)]


def _accuracy(results: Mapping[str, Any], name: str) -> Accuracy:
    """Convert lm-eval's results for one task or group: `acc_norm`, else `acc`, else its first metric."""
    figures = results["results"][name]
    metrics = metrics_of(figures)
    if not metrics:
        raise BadText(f"lm-eval gives no number for the task {name}, got {printable(str(figures), 200)}. Leave it out.")
    preferred = [] if name in definitions.TASK_SPLITS else ["acc_norm,none"]
    key = next((key for key in (*preferred, "acc,none") if key in metrics), metrics[0])
    metric, _, filtered_by = key.partition(",")
    error = figures.get(f"{metric}_stderr,{filtered_by}")
    finite = isinstance(error, float) and math.isfinite(error)
    questions = sum(results["n-samples"][leaf]["effective"] for leaf in leaves(results, name))
    normalised = figures.get("acc_norm,none")
    parts = question_parts(results, name, metric, filtered_by)
    return Accuracy(figures[key], error if finite else None, normalised, questions, key.removesuffix(",none"), parts)


HASHES = ("doc_hash", "prompt_hash", "target_hash")
"""Digests of a question's text, prompt and answer, which lm-eval records besides the answers."""


def question_parts(results: Mapping[str, Any], name: str, metric: str, filtered_by: str) -> Parts | None:
    """The scores of a task's questions; None for a group of tasks, and where the metric is not the mean of its scores.

    Args:
        results: What lm-eval returns, with samples.
        name: A task or group in the results.
        filtered_by: Name of the filter of the answers.
    """
    samples = [x for x in results.get("samples", {}).get(name, ()) if x.get("filter") == filtered_by]
    scores = [x.get(metric) for x in samples]
    if not scores or not all(isinstance(x, (int, float)) and math.isfinite(x) for x in scores):
        return None
    value = results["results"][name][f"{metric},{filtered_by}"]
    if not math.isclose(math.fsum(scores) / len(scores), value, rel_tol=1e-6, abs_tol=1e-9):
        return None
    digest = hashlib.blake2b(" ".join(str(x.get(key)) for x in samples for key in HASHES).encode(), digest_size=16)
    return Parts.of(digest.hexdigest(), [float(x) for x in scores])


def leaves(results: Mapping[str, Any], name: str) -> list[str]:
    """The tasks of a group; a task itself."""
    members = results["group_subtasks"].get(name)
    return [leaf for member in members for leaf in leaves(results, member)] if members else [name]


def metrics_of(figures: Mapping[str, Any]) -> list[str]:
    """The names of the metrics with a number, each with that of its filter after a comma."""
    return [key for key, value in figures.items() if "," in key and "_stderr," not in key and isinstance(value, (int, float))]
