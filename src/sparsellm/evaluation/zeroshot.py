"""Zero-shot accuracy on multiple-choice tasks through lm-eval, with data from the hub or from local files."""

from __future__ import annotations

import io
import json
import logging
import math
import tempfile
from collections.abc import Collection, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from sparsellm.checkpoints.loading import compute_dtype
from sparsellm.errors import BadText, MissingPackage, TooLarge, Unreachable, first_line
from sparsellm.evaluation.measurements import SPLITS, Accuracy, TaskName
from sparsellm.models.contexts import compute_dtype_context, eval_mode
from sparsellm.models.loaded_model import LoadedModel
from sparsellm.runtime import collectives

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lm_eval.tasks import TaskManager
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

BATCH = 8
"""Requests per batch. Requests are padded, so another number changes the scores by rounding."""


def prepare_tasks(tasks: Sequence[TaskName], folder: str | None) -> dict[str, dict[str, Any]]:
    """Check that all tasks can run.

    Args:
        tasks: The tasks.
        folder: Folder with a local file of each task; None for data from the hub.

    Returns:
        By task, the fields of lm-eval's task definition to override; empty for data from the hub.

    Raises:
        MissingPackage: If lm-eval is not installed.
        BadText: If the local file of a task is missing or cannot be read.
    """
    if tasks and find_spec("lm_eval") is None:
        raise MissingPackage("Tasks run through lm-eval, which is not installed: pip install 'sparsellm[eval]'.")
    return {task: {} if folder is None else _local_overrides(task, Path(folder).expanduser()) for task in tasks}


def _local_overrides(task: TaskName, folder: Path) -> dict[str, Any]:
    """Fields of a task definition that read its JSONL file in `folder`, whose fields are those of the hub data set."""
    part = SPLITS[task]
    files = sorted(folder.glob(f"{task}*{part}*.jsonl"))
    if len(files) != 1:
        reason = f"none of {folder}'s files is called" if not files else f"{len(files)} files of {folder} are called"
        raise BadText(f"The task {task} has no data: {reason} {task}*{part}*.jsonl. Put one there, or leave out `task_data`.")
    try:
        with files[0].open(encoding="utf-8") as lines:
            first = json.loads(next(lines))
    except (OSError, ValueError, StopIteration) as error:
        raise BadText(f"{files[0]} cannot be read ({first_line(error)}): it must hold one JSON object per line.") from None
    overrides: dict[str, Any] = {"dataset_path": "json", "dataset_name": None, "training_split": None}
    overrides |= {"dataset_kwargs": {"data_files": {part: str(files[0].resolve())}}}
    overrides |= {"validation_split": None, "test_split": None, f"{part}_split": part}
    if task == "hellaswag" and "query" in first:  # the file has the fields that lm-eval's process_docs creates
        overrides |= {"process_docs": None, "doc_to_text": "{{query}}", "doc_to_target": "{{gold}}"}
    return overrides


def evaluate_tasks(
    loaded: LoadedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[TaskName],
    *,
    folder: str | None = None,
    limit: int | None = None,
) -> dict[str, Accuracy]:
    """Evaluate a model on zero-shot tasks.

    The results equal those of lm-eval with `--num_fewshot 0 --batch_size 8` and, for a 16-bit model on a CPU, `dtype=float32`.
    In a distributed run, each process evaluates a shard of the tasks.

    Args:
        loaded: The model.
        tokenizer: Its tokenizer.
        tasks: The tasks.
        folder: Folder with a local file of each task; None for data from the hub.
        limit: Maximum number of questions per task; None for all.

    Raises:
        TooLarge: If the model is offloaded.
        MissingPackage: If lm-eval is not installed.
        BadText: If the local file of a task is missing or cannot be read.
        Unreachable: If a task's data on the hub cannot be loaded.
    """
    if loaded.weights.on_disk:
        raise TooLarge(
            "Tasks need the whole model in memory, and it is read block by block. Leave out `task`, or raise `max_memory`."
        )
    overrides = prepare_tasks(tasks, folder)
    model = loaded.model
    local = {task: overrides[task] for task in collectives.shard(list(tasks))}
    with eval_mode(model), compute_dtype_context(model, compute_dtype(model)), _silence_lm_eval():
        results = _run_lm_eval(model, tokenizer, local, limit=limit) if local else {}
    accuracies = [asdict(_accuracy(results["results"][task], results["n-samples"][task]["effective"])) for task in local]
    return {task: Accuracy(**accuracy) for task, accuracy in zip(tasks, collectives.all_gather(accuracies), strict=True)}


def _run_lm_eval(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Mapping[TaskName, Mapping[str, Any]],
    *,
    limit: int | None,
) -> dict[str, Any]:
    """The result dictionary of lm-eval for tasks, given with their overrides."""
    from jinja2 import UndefinedError
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    lm = HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=BATCH)
    try:
        with tempfile.TemporaryDirectory() as folder:
            names = [str(definition(task, fields, Path(folder))) if fields else task for task, fields in tasks.items()]
            results = simple_evaluate(
                lm, tasks=names, num_fewshot=0, limit=limit, log_samples=False, task_manager=_task_manager()
            )
    except (ConnectionError, OSError) as error:
        raise Unreachable(
            f"The tasks' data cannot be loaded ({first_line(error)}). Pass a folder of .jsonl files as `task_data`."
        ) from error
    except (KeyError, ValueError, UndefinedError) as error:
        raise BadText(
            f"lm-eval cannot read the tasks' data ({first_line(error)}): the fields must be as on the hub."
        ) from error
    return dict(results or {})


@cache
def _task_manager() -> TaskManager:
    """lm-eval's task index, cached because building it reads thousands of files."""
    from lm_eval.tasks import TaskManager

    return TaskManager()


def definition(task: str, overrides: Mapping[str, Any], folder: Path) -> Path:
    """Write an lm-eval task definition that includes the original one.

    Args:
        task: Name of the task.
        overrides: Fields that replace those of the original.
        folder: Folder to write to.

    Returns:
        The YAML file.
    """
    file = folder / f"{task}.yaml"
    include = {"include": str(_task_manager().task_index[task].yaml_path), "task": task}
    file.write_text(yaml.safe_dump(include | dict(overrides), sort_keys=False), encoding="utf-8")
    return file


def _accuracy(results: Mapping[str, Any], questions: int) -> Accuracy:
    """Convert lm-eval's results for one task."""
    error = results.get("acc_stderr,none")
    finite = isinstance(error, float) and math.isfinite(error)
    return Accuracy(results["acc,none"], error if finite else None, results.get("acc_norm,none"), questions)


def mean(accuracies: Collection[tuple[float, float | None]]) -> tuple[float, float | None]:
    """Mean accuracy over tasks and its standard error, None if that of any task is None.

    Args:
        accuracies: Accuracy and standard error of each task.
    """
    squares = [error**2 for _, error in accuracies if error is not None]
    error = math.sqrt(sum(squares)) / len(squares) if len(squares) == len(accuracies) else None
    return sum(value for value, _ in accuracies) / len(accuracies), error


@contextmanager
def _silence_lm_eval() -> Iterator[None]:
    """Suppress the output of lm-eval and datasets within the context."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
