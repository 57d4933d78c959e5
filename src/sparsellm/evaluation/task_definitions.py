"""Definitions of tasks, lm-eval's own and those of local files: checked before any work, and loaded."""

from __future__ import annotations

import difflib
import io
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from sparsellm.errors import BadText, InvalidSetting, MissingPackage, Unreachable, first_line
from sparsellm.runtime.devices import is_out_of_memory
from sparsellm.texts.paths import is_task_file, local_path

if TYPE_CHECKING:
    from lm_eval.tasks import TaskManager

TASK_SPLITS = {
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
        tasks: Names of tasks, groups and tags of lm-eval, or files with the definition of a task.
        folder: Folder with a local file of each task; None for data from the hub.

    Returns:
        By task, the fields of lm-eval's task definition to override; empty for data from the hub. Of a file, the name that it
        defines.

    Raises:
        MissingPackage: If lm-eval, or a package that a task needs, is not installed.
        InvalidSetting: If a task is unknown, runs code that the model writes, or cannot be read from a local file, or if two
            files define tasks of one name.
        BadText: If the local file of a task is missing or cannot be read.
        Unreachable: If a task's data on the hub cannot be loaded.
    """
    if tasks and find_spec("lm_eval") is None:
        raise MissingPackage("Tasks run through lm-eval, which is not installed: pip install 'sparsellm[eval]'.")
    if others := [task for task in tasks if task not in TASK_SPLITS]:
        for task in others:
            _check_name(task)
        if folder is not None:
            raise InvalidSetting(
                f"`task_data` can hold the tasks {', '.join(TASK_SPLITS)}, not {others[0]}. Leave out one of them."
            )
    if folder is not None:
        return {task: _local_overrides(task, local_path(folder)) for task in tasks}
    names: dict[str, str] = {}  # by a task's name in results, the task as it is given
    for task in tasks:
        members = _load(task)
        name = next(iter(members)) if is_task_file(task) else task
        if (other := names.setdefault(name, task)) != task:
            raise InvalidSetting(f"{other} and {task} are both a task named {name}. Rename one of them in its file.")
    return {task: {"task": name} if is_task_file(task) else {} for name, task in names.items()}


def _check_name(task: str) -> None:
    """Raise InvalidSetting for a name that lm-eval does not have, and BadText for a file that is not there."""
    if is_task_file(task):
        if not local_path(task).is_file():
            raise BadText(f"There is no file {local_path(task).absolute()}. Name a task of lm-eval, or the file of one.")
        return
    known = task_manager().all_tasks
    if task not in known:
        close = [repr(name) for name in difflib.get_close_matches(task, known)]
        question = f"Did you mean {' or '.join(close)}? " if close else ""
        hint = "'lm-eval ls tasks' lists all; one of your own is a .yaml file."
        raise InvalidSetting(f"`task` is unknown: got {task!r}. {question}{hint}")


def _load(task: str) -> Mapping[str, Any]:
    """The tasks of a task, group or tag by name. Raises an error if data cannot be loaded, or this package does not run one."""
    with silence_lm_eval(), task_errors(task):
        members: Mapping[str, Any] = task_manager().load([task])["tasks"]
    for name, member in members.items():
        for flag, what in (("UNSAFE_CODE", "runs code that the model writes"), ("MULTIMODAL", "has images or sounds")):
            if getattr(member, flag, False):
                raise InvalidSetting(f"The task {name} {what}: run lm-eval itself on the output for it.")
    return members


@contextmanager
def task_errors(*tasks: str) -> Iterator[None]:
    """Turn the errors of lm-eval's code for these tasks within the context into one message with their names."""
    noun = f"task{'s' * (len(tasks) > 1)} {', '.join(tasks)}"
    try:
        yield
    except ImportError as error:
        raise MissingPackage(f"The {noun} cannot be loaded ({first_line(error)}): install what lm-eval asks for.") from error
    except OSError as error:
        paper = set(tasks) <= set(TASK_SPLITS)
        local = " Or pass a folder of .jsonl files as `task_data`." if paper else ""
        local = " Or look at the data set in its file." if any(map(is_task_file, tasks)) else local
        raise Unreachable(
            f"The data of the {noun} cannot be loaded ({first_line(error)}). Run once with a network: the data then stay in "
            f"the cache of data sets (HF_HOME).{local}"
        ) from error
    except Exception as error:  # a task's own code may fail in any way on data that it does not expect
        if is_out_of_memory(error):
            raise
        reason = f"{type(error).__name__}: {first_line(error)}"
        advice = "the fields must be as on the hub"
        if any(map(is_task_file, tasks)):
            advice = "look at the file, and at the fields of its data"
        raise BadText(f"lm-eval cannot read the data of the {noun} ({reason}): {advice}.") from error


def _local_overrides(task: str, folder: Path) -> dict[str, Any]:
    """Fields of a task definition that read its JSONL file in `folder`, whose fields are those of the hub data set."""
    part = TASK_SPLITS[task]
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


@cache
def task_manager() -> TaskManager:
    """lm-eval's task index, cached because building it reads thousands of files."""
    from lm_eval.tasks import TaskManager

    return TaskManager()


def spec(task: str, overrides: Mapping[str, Any], folder: Path) -> str:
    """The name by which lm-eval loads a task, or the file with its definition, which is written to `folder` for overrides."""
    if is_task_file(task):
        return str(local_path(task))
    if not overrides:
        return task
    file = folder / f"{task}.yaml"
    include = {"include": str(task_manager().task_index[task].yaml_path), "task": task}
    file.write_text(yaml.safe_dump(include | dict(overrides), sort_keys=False), encoding="utf-8")
    return str(file)


@contextmanager
def silence_lm_eval() -> Iterator[None]:
    """Suppress the output of lm-eval and datasets within the context."""
    logger = logging.getLogger("lm_eval")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with redirect_stderr(io.StringIO()), redirect_stdout(io.StringIO()):
            yield
    finally:
        logger.setLevel(level)
