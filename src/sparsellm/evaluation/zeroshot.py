"""Accuracy on the tasks of lm-eval, with data from the hub or, for those of the SparseLLM paper, from local files."""

from __future__ import annotations

import difflib
import io
import json
import logging
import math
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import asdict
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import yaml

from sparsellm.checkpoints.loading import compute_dtype
from sparsellm.errors import BadText, InvalidSetting, MissingPackage, TooLarge, Unreachable, first_line, printable
from sparsellm.evaluation.measurements import Accuracy
from sparsellm.models.contexts import compute_dtype_context, eval_mode
from sparsellm.models.loaded_model import LoadedModel
from sparsellm.runtime import collectives
from sparsellm.runtime.devices import is_out_of_memory
from sparsellm.runtime.products import fast_linear_layers

if TYPE_CHECKING:
    from collections.abc import Iterator

    from lm_eval.tasks import TaskManager
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

BATCH = 8
"""Requests per batch. Requests are padded, so another number changes the scores by rounding."""

SEED = 1234
"""The seed with which lm-eval chooses examples, its own default."""

SPLITS = {
    "boolq": "validation",
    "rte": "validation",
    "hellaswag": "validation",
    "winogrande": "validation",
    "arc_easy": "test",
    "arc_challenge": "test",
    "openbookqa": "test",
    "piqa": "validation",
}
"""Tasks that can be read from local files, with the split that lm-eval evaluates. The SparseLLM paper uses the first seven and
reports their `acc`, also where lm-eval has `acc_norm`."""


def prepare_tasks(tasks: Sequence[str], folder: str | None) -> dict[str, dict[str, Any]]:
    """Check that all tasks can run: their names, and their data, which is downloaded unless it is in a folder or a cache.

    Args:
        tasks: Names of tasks, groups and tags of lm-eval.
        folder: Folder with a local file of each task; None for data from the hub.

    Returns:
        By task, the fields of lm-eval's task definition to override; empty for data from the hub.

    Raises:
        MissingPackage: If lm-eval, or a package that a task needs, is not installed.
        InvalidSetting: If a task is unknown, runs code that the model writes, or cannot be read from a local file.
        BadText: If the local file of a task is missing or cannot be read.
        Unreachable: If a task's data on the hub cannot be loaded.
    """
    if tasks and find_spec("lm_eval") is None:
        raise MissingPackage("Tasks run through lm-eval, which is not installed: pip install 'sparsellm[eval]'.")
    if others := [task for task in tasks if task not in SPLITS]:
        for task in others:
            _check_name(task)
        if folder is not None:
            raise InvalidSetting(f"`task_data` can hold the tasks {', '.join(SPLITS)}, not {others[0]}. Leave out one of them.")
    if folder is not None:
        return {task: _local_overrides(task, Path(folder).expanduser()) for task in tasks}
    for task in tasks:
        _check_loads(task)
    return {task: {} for task in tasks}


def _check_name(task: str) -> None:
    """Raise InvalidSetting for a name that lm-eval does not have."""
    known = _task_manager().all_tasks
    if task not in known:
        close = [repr(name) for name in difflib.get_close_matches(task, known)]
        question = f"Did you mean {' or '.join(close)}? " if close else ""
        raise InvalidSetting(f"`task` is unknown: got {task!r}. {question}'lm-eval ls tasks' lists all.")


def _check_loads(task: str) -> None:
    """Raise an error for a task whose data cannot be loaded, or that this package does not run."""
    with _silence_lm_eval(), _task_errors(task):
        members: Mapping[str, Any] = _task_manager().load([task])["tasks"]
    for name, member in members.items():
        for flag, what in (("UNSAFE_CODE", "runs code that the model writes"), ("MULTIMODAL", "has images or sounds")):
            if getattr(member, flag, False):
                raise InvalidSetting(f"The task {name} {what}: run lm-eval itself on the output for it.")


@contextmanager
def _task_errors(*tasks: str) -> Iterator[None]:
    """Turn the errors of lm-eval's code for these tasks within the context into one message with their names."""
    noun = f"task{'s' * (len(tasks) > 1)} {', '.join(tasks)}"
    try:
        yield
    except ImportError as error:
        raise MissingPackage(f"The {noun} cannot be loaded ({first_line(error)}): install what lm-eval asks for.") from error
    except OSError as error:
        paper = set(tasks) <= set(SPLITS)
        local = " Or pass a folder of .jsonl files as `task_data`." if paper else ""
        raise Unreachable(
            f"The data of the {noun} cannot be loaded ({first_line(error)}). Run once with a network: the data then stay in "
            f"the cache of data sets (HF_HOME).{local}"
        ) from error
    except Exception as error:  # a task's own code may fail in any way on data that it does not expect
        if is_out_of_memory(error):
            raise
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise BadText(f"lm-eval cannot read the data of the {noun} ({reason}): the fields must be as on the hub.") from error


def _local_overrides(task: str, folder: Path) -> dict[str, Any]:
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
        tasks: Names of tasks, groups and tags of lm-eval.
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
    overrides, model = prepare_tasks(tasks, folder), loaded.model
    local = {task: overrides[task] for task in collectives.shard(list(tasks))}
    with eval_mode(model), compute_dtype_context(model, compute_dtype(model)), fast_linear_layers(), _silence_lm_eval():
        results = _run_lm_eval(model, tokenizer, local, limit=limit, progress=progress) if local else {}
    figures = [{name: asdict(_accuracy(results, name)) for name in _reported_names(results, task)} for task in local]
    return {name: Accuracy(**figure) for shard in collectives.all_gather(figures) for name, figure in shard.items()}


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

    lm = CountedLM(pretrained=model, tokenizer=tokenizer, backend="causal", batch_size=BATCH)
    with _task_errors(*tasks), tempfile.TemporaryDirectory() as folder:
        names = [str(definition(task, fields, Path(folder))) if fields else task for task, fields in tasks.items()]
        members = _task_manager().load(names)
        # As simple_evaluate, which has no results where LOCAL_RANK is not 0, and takes seconds to list the installed packages.
        random.seed(0)
        np.random.seed(SEED)
        torch.manual_seed(SEED)
        for member in members["tasks"].values():
            if member.get_config("num_fewshot") is None:
                member.set_config(key="num_fewshot", value=0)
            member.set_fewshot_seed(seed=SEED)
        return dict(evaluate(lm, members, limit=limit, log_samples=False) or {})


@cache
def _task_manager() -> TaskManager:
    """lm-eval's task index, cached because building it reads thousands of files."""
    from lm_eval.tasks import TaskManager

    return TaskManager()


def definition(task: str, overrides: Mapping[str, Any], folder: Path) -> Path:
    """Write an lm-eval task definition that includes the original one.

    Args:
        overrides: Fields that replace those of the original.
    """
    file = folder / f"{task}.yaml"
    include = {"include": str(_task_manager().task_index[task].yaml_path), "task": task}
    file.write_text(yaml.safe_dump(include | dict(overrides), sort_keys=False), encoding="utf-8")
    return file


def _reported_names(results: Mapping[str, Any], task: str) -> list[str]:
    """The names in lm-eval's results that a task, group or tag is reported under."""
    is_group = task not in results["n-samples"]
    if not is_group or len(_metrics(results["results"].get(task, {}))) == 1:
        return [task]
    index = _task_manager().task_index
    members = results["group_subtasks"].get(task) or [name for name, entry in index.items() if task in entry.tags]
    return [name for member in members for name in _reported_names(results, member)]


def _leaves(results: Mapping[str, Any], name: str) -> list[str]:
    """The tasks of a group; a task itself."""
    members = results["group_subtasks"].get(name)
    return [leaf for member in members for leaf in _leaves(results, member)] if members else [name]


def _metrics(figures: Mapping[str, Any]) -> list[str]:
    """The names of the metrics with a number, each with that of its filter after a comma."""
    return [key for key, value in figures.items() if "," in key and "_stderr," not in key and isinstance(value, (int, float))]


def _accuracy(results: Mapping[str, Any], name: str) -> Accuracy:
    """Convert lm-eval's results for one task or group: `acc_norm`, else `acc`, else its first metric."""
    figures = results["results"][name]
    metrics = _metrics(figures)
    if not metrics:
        raise BadText(f"lm-eval gives no number for the task {name}, got {printable(str(figures), 200)}. Leave it out.")
    preferred = [] if name in SPLITS else ["acc_norm,none"]
    key = next((key for key in (*preferred, "acc,none") if key in metrics), metrics[0])
    metric, _, filtered_by = key.partition(",")
    error = figures.get(f"{metric}_stderr,{filtered_by}")
    finite = isinstance(error, float) and math.isfinite(error)
    questions = sum(results["n-samples"][leaf]["effective"] for leaf in _leaves(results, name))
    normalised = figures.get("acc_norm,none")
    return Accuracy(figures[key], error if finite else None, normalised, questions, key.removesuffix(",none"))


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
