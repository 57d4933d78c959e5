"""What a model is worth without an example: multiple-choice tasks through lm-eval, from the hub or from local files."""

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

from sparsellm.checkpoints.files import first_line
from sparsellm.checkpoints.loaded_model import LoadedModel
from sparsellm.checkpoints.loading import compute_dtype
from sparsellm.errors import BadText, MissingPackage, TooLarge, Unreachable
from sparsellm.evaluation.measurements import SPLITS, Accuracy, TaskName
from sparsellm.models.contexts import compute_dtype_context, eval_mode
from sparsellm.runtime import collectives

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lm_eval.tasks import TaskManager
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

BATCH = 8
"""Requests at a time. They are padded, so another number changes the last bits of the scores."""


def prepare_tasks(tasks: Sequence[TaskName], folder: str | None) -> dict[str, dict[str, Any]]:
    """By task, what is to be changed of lm-eval's own definition: nothing, or where its local file is.

    Raises MissingPackage without lm-eval, and BadText for a task whose file the folder lacks, or that cannot be read.
    """
    if tasks and find_spec("lm_eval") is None:
        raise MissingPackage("Tasks run through lm-eval, which is not installed: pip install 'sparsellm[eval]'.")
    return {task: {} if folder is None else _local(task, Path(folder).expanduser()) for task in tasks}


def _local(task: TaskName, folder: Path) -> dict[str, Any]:
    """What makes a task read its questions from a file of the folder, one JSON object a line, fields as on the hub."""
    part = SPLITS[task]
    found = sorted(folder.glob(f"{task}*{part}*.jsonl"))
    if len(found) != 1:
        what = f"none of {folder}'s files is called" if not found else f"{len(found)} files of {folder} are called"
        raise BadText(f"The task {task} has no data: {what} {task}*{part}*.jsonl. Put one there, or leave out --task-data.")
    try:
        with found[0].open(encoding="utf-8") as lines:
            first = json.loads(next(lines))
    except (OSError, ValueError, StopIteration) as error:
        raise BadText(f"{found[0]} cannot be read ({first_line(error)}): it must hold one JSON object a line.") from None
    words: dict[str, Any] = {"dataset_path": "json", "dataset_name": None, "training_split": None}
    words |= {"dataset_kwargs": {"data_files": {part: str(found[0].resolve())}}}
    words |= {"validation_split": None, "test_split": None, f"{part}_split": part}
    if task == "hellaswag" and "query" in first:  # in the form that lm-eval's own first step gives it
        words |= {"process_docs": None, "doc_to_text": "{{query}}", "doc_to_target": "{{gold}}"}
    return words


def evaluate_tasks(
    loaded: LoadedModel,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[TaskName],
    folder: str | None = None,
    limit: int | None = None,
) -> dict[str, Accuracy]:
    """The model's accuracy on each task, without examples in the prompt.

    What lm-eval itself gives for the same model with `--num_fewshot 0 --batch_size 8` and, for a 16-bit model on a CPU,
    `dtype=float32`. folder: of local files. limit: so many questions of each task, for a try.
    Raises TooLarge for a model that is not in memory, Unreachable where a task's data would come from a hub out of reach.
    """
    if loaded.offloaded:
        raise TooLarge(
            "Tasks need the whole model in memory, and it is read block by block. Leave out --task, or raise --max-memory."
        )
    asked = prepare_tasks(tasks, folder)
    model = loaded.model
    local = {task: asked[task] for task in collectives.shard(list(tasks))}  # of several processes each does some of the tasks
    with eval_mode(model), compute_dtype_context(model, compute_dtype(model)), _quiet():
        found = _evaluated(model, tokenizer, local, limit) if local else {}
    answers = [asdict(_accuracy(found["results"][task], found["n-samples"][task]["effective"])) for task in local]
    return {task: Accuracy(**answer) for task, answer in zip(tasks, collectives.all_gather(answers), strict=True)}


def _evaluated(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tasks: Mapping[TaskName, Mapping[str, Any]], limit: int | None
) -> dict[str, Any]:
    """lm-eval's own results."""
    from jinja2 import UndefinedError
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    lm = HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=BATCH)
    try:
        with tempfile.TemporaryDirectory() as folder:
            asked = [str(definition(task, words, Path(folder))) if words else task for task, words in tasks.items()]
            found = simple_evaluate(lm, tasks=asked, num_fewshot=0, limit=limit, log_samples=False, task_manager=_tasks())
    except (ConnectionError, OSError) as error:
        raise Unreachable(
            f"The tasks' data cannot be had ({first_line(error)}). Pass --task-data with a folder of .jsonl files."
        ) from error
    except (KeyError, ValueError, UndefinedError) as error:
        raise BadText(
            f"lm-eval cannot read the tasks' data ({first_line(error)}): the fields must be as on the hub."
        ) from error
    return dict(found or {})


@cache
def _tasks() -> TaskManager:
    """lm-eval's index of its tasks; made once, since it reads thousands of files."""
    from lm_eval.tasks import TaskManager

    return TaskManager()


def definition(task: str, words: Mapping[str, Any], folder: Path) -> Path:
    """A task's definition as a file of lm-eval's: its own, with some words changed."""
    file = folder / f"{task}.yaml"
    own = {"include": str(_tasks().task_index[task].yaml_path), "task": task}
    file.write_text(yaml.safe_dump(own | dict(words), sort_keys=False), encoding="utf-8")
    return file


def _accuracy(results: Mapping[str, Any], questions: int) -> Accuracy:
    """One task's part of lm-eval's results."""
    error = results.get("acc_stderr,none")
    known = isinstance(error, float) and math.isfinite(error)
    return Accuracy(results["acc,none"], error if known else None, results.get("acc_norm,none"), questions)


def mean(accuracies: Collection[tuple[float, float | None]]) -> tuple[float, float | None]:
    """The mean over tasks of accuracies, each given with its standard error, and its own standard error."""
    squares = [error**2 for _, error in accuracies if error is not None]
    error = math.sqrt(sum(squares)) / len(squares) if len(squares) == len(accuracies) else None
    return sum(value for value, _ in accuracies) / len(accuracies), error


@contextmanager
def _quiet() -> Iterator[None]:
    """Within the context lm-eval and datasets write neither bars nor log lines."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
