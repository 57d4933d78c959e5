"""What is wrong with the inputs of a command, as far as files' names tell it. Imports no torch, so that it is told at once."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from sparsellm.checkpoints.files import UNFINISHED, find_checkpoint, find_local, is_begun
from sparsellm.errors import BadText, InvalidSetting
from sparsellm.pipeline.output_folder import REPORT, check_finished, folder_path, is_sweep
from sparsellm.pipeline.recipe import RunRecipe
from sparsellm.pipeline.recipe_fields import RULES
from sparsellm.pipeline.recipe_file import validated
from sparsellm.pipeline.recovery_recipe import RecoveryRecipe
from sparsellm.texts.json_files import Unreadable, read_bytes
from sparsellm.texts.paths import check_machine, local_path
from sparsellm.texts.texts import check_text


def check_inputs(recipe: RunRecipe, *, given: Collection[str] | None = None, has_model: bool = False) -> None:
    """Check that everything is there which a run reads: first the texts and other files, then the model.

    Args:
        given: Fields of texts that are given in memory: "calibration", "evaluate".
        has_model: Whether the model is given in memory.

    Raises:
        SparseLLMError: A path of the recipe cannot be read.
    """
    check_machine()
    texts = {"calibration": [recipe.calibration] if recipe.reads_text else [], "evaluate": recipe.evaluate}
    for text in (text for field, named in texts.items() if field not in (given or ()) for text in named):
        check_text(str(text))
    if recipe.allocation_rule not in RULES:
        _check_readable(recipe.allocation_rule, "allocation")
    if recipe.task_data is not None and not local_path(recipe.task_data).is_dir():
        raise BadText(f"There is no folder {recipe.task_data}. Put the questions there, or leave out `task_data`.")
    if not has_model:
        check_model(recipe.model, recipe.revision)


def check_recovery_inputs(recipe: RecoveryRecipe, *, given: Collection[str] | None = None, has_model: bool = False) -> None:
    """Check the pruned checkpoint that a recovery reads, and then as `check_inputs`."""
    check_machine()
    check_finished(recipe.pruned)
    if not has_model and local_path(recipe.model).resolve() == local_path(recipe.pruned).resolve():
        raise InvalidSetting(f"{recipe.model} is the pruned model. Pass the dense one that it was made from as `against`.")
    check_inputs(recipe, given=given, has_model=has_model)


def _check_readable(file: str, kind: str) -> None:
    """Raise InvalidSetting for a YAML file that cannot be read, as `read_mapping` does; its content is checked later."""
    try:
        read_bytes(local_path(file))
    except Unreadable as error:
        raise InvalidSetting(f"The {kind} {file} cannot be read: {error}.") from None


def check_model(name: str, revision: str | None = None) -> None:
    """Raise SparseLLMError if there is no such model, as far as it is known without a network."""
    check_machine()

    from huggingface_hub.constants import HF_HUB_OFFLINE  # reads the environment as the hub's functions do

    if find_local(name, revision) is None and HF_HUB_OFFLINE:
        find_checkpoint(name, revision)


def check_recovery(settings: Mapping[str, Any]) -> None:
    """Check the settings of a recovery and what it reads."""
    check_machine()
    check_finished(settings["pruned"])
    check_recovery_inputs(validated(RecoveryRecipe, settings))


def check_results(folder: str | Path) -> Path:
    """The folder of a run or a sweep as a path. Raises InvalidSetting if it is neither."""
    check_machine()
    path = folder_path(folder)
    if not is_sweep(path) and not (path / REPORT).is_file():
        if is_begun(path):
            raise InvalidSetting(f"{folder} {UNFINISHED}")
        problem = f"holds no run or sweep: it has no {REPORT}" if path.is_dir() else "does not exist"
        raise InvalidSetting(f"{folder} {problem}. Give the output folder of a run or a sweep.")
    return path
