"""The fingerprint of a run, compared when it is resumed, and the digests of what it read, compared when results are kept."""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsellm import __version__
from sparsellm.checkpoints.documents import CONFIG_FILE
from sparsellm.checkpoints.files import card_terms
from sparsellm.checkpoints.loading import Checkpoint, InMemoryModel, open_checkpoint
from sparsellm.errors import BadText, CannotResume, InvalidSetting, SparseLLMError
from sparsellm.outputs.folder import ANEW, LOG
from sparsellm.outputs.journal import OF_RECIPE
from sparsellm.outputs.verification import read_output
from sparsellm.recipes.fields import RunFields, fields_with
from sparsellm.recipes.method_classes import class_origins
from sparsellm.recipes.path_names import PathNames
from sparsellm.recipes.recipe import RunRecipe
from sparsellm.runtime import devices
from sparsellm.solvers import sparsegpt
from sparsellm.texts.data_sets import is_saved
from sparsellm.texts.json_files import Unreadable, read_utf8
from sparsellm.texts.padding import token_digest
from sparsellm.texts.paths import TEXT_NAMES, is_task_file, local_path
from sparsellm.texts.texts import check_text

NOT_DECISIVE = fields_with(RunFields, "memory", "measured")
"""Recipe fields that may differ on resume, since they do not change the weights."""

PACKAGES = ("torch", "transformers", "safetensors", "tokenizers", "numpy")
"""Packages whose versions may change a result."""

DIGEST_THREADS = 8
"""Most files to digest in parallel: one thread cannot saturate a fast disk."""

Inputs = Mapping[str, Mapping[str, str]]
"""The files that a run read: by the name in its recipe, their contents as `contents` describes them; and the classes of its
method, as `method_inputs`."""

NO_SOURCE = "not known"
"""Stands for the source of a class that has none, as one that was made by exec."""

OF_THE_MACHINE = fields_with(RunFields, "machine")
"""Recipe fields that do not identify a result: it may be made on another machine."""

WEIGHT_ENDINGS = (".safetensors", ".bin")
"""Endings of the names of weight files."""


def environment(device: torch.device) -> dict[str, str]:
    """Versions and machine properties that a result may depend on."""
    # Not what importlib.metadata finds, which after a broken update may be another version than the one that is imported.
    result = {"sparsellm": __version__} | {package: str(import_module(package).__version__) for package in PACKAGES}
    if sparsegpt.has_kernel(device):
        result["column loop"] = sparsegpt.kernel_compiler()
    return result | {
        "python": platform.python_version(),
        "system": platform.system(),
        "device": f"{device} ({devices.name_of(device)})",
        "threads": str(torch.get_num_threads()),
    }


def fingerprint(
    recipe: RunRecipe, source: Checkpoint | InMemoryModel, *, windows: Tensor, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Compute what must be unchanged for a run to be resumed.

    Files are compared by name and content, not by modification time. The number of processes and threads may differ: sums
    are then rounded differently, which the run notes.

    Args:
        recipe: The run's settings; the fields in `NOT_DECISIVE` are left out.
        source: The dense model; the digest of one in memory is the caller's to add.
        windows: Calibration tokens, (samples, seq).
    """
    settings = recipe.model_dump(mode="json", exclude=set(NOT_DECISIVE))
    decisive = {f"{OF_RECIPE}{name}": value for name, value in settings.items()}
    if recipe.allocation_file:
        decisive["contents of `allocation`"] = contents(Path(recipe.allocation_file))
    if isinstance(source, Checkpoint):
        decisive |= model_fingerprint(source)
    decisive["calibration tokens"] = token_digest(windows)
    methods = method_inputs(recipe).items()
    decisive |= {f"{entry} of {name}": text for name, entries in methods for entry, text in entries.items()}
    decisive |= {f"the package of {name}": package for name, package in recipe.packages.items()}
    return decisive | {f"environment.{name}": value for name, value in environment.items() if name != "threads"}


def model_fingerprint(source: Checkpoint) -> dict[str, Any]:
    """Fingerprint of a model: digests of its files, and the license terms in its card.

    Every byte of the weights is read, once per process.
    """
    folder = source.folder
    documents = [folder / name for name in source.documents((*ANEW, LOG)).copied]
    files = sorted({*source.files(), folder / CONFIG_FILE, *documents})
    with ThreadPoolExecutor(min(DIGEST_THREADS, os.cpu_count() or 1)) as pool:
        result: dict[str, Any] = {
            f"file {file.relative_to(folder)}": digest for file, digest in zip(files, pool.map(contents, files), strict=True)
        }
    result["terms in README.md"] = card_terms(folder)
    return result


def contents(file: Path) -> str:
    """Size and SHA-256 digest of a file, as text; cached until the file changes."""
    stat = file.stat()
    return f"{stat.st_size:,} bytes, SHA-256 {_digest(file, stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns)}"


@lru_cache(maxsize=4096)
def _digest(file: Path, *_: int) -> str:
    """SHA-256 digest of a file. The further arguments are the cache key; programs cannot set the change time (ctime)."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()[:32]


class OtherContents(CannotResume):
    """A result is of a model or a text that was changed since."""


class SameInputs:
    """Compares what the runs of one command read: another model or text of the same name makes no result with the others."""

    def __init__(self) -> None:
        self._known: dict[str, Mapping[str, str]] = {}

    def check(self, inputs: Inputs) -> None:
        """Raise OtherContents if an earlier run has read other files under a name; remember these."""
        if difference := changed_input(self._known, inputs):
            raise OtherContents(
                f"{difference}, between two runs of this command. Run it again when nothing writes to the files, or on a copy."
            )
        self._known = {**inputs, **self._known}


def check_inputs(recipe: RunRecipe, given: Collection[str] | None = None) -> None:
    """Check that everything is there which a recipe names besides its model, before that is opened and perhaps downloaded.

    Args:
        given: Fields of texts that are given in memory: "calibration", "evaluate".

    Raises:
        SparseLLMError: A text, the allocation file or the folder of the tasks' data cannot be read.
    """
    texts = {"calibration": [recipe.calibration] if recipe.reads_text else [], "evaluate": recipe.evaluate}
    for text in (text for field, named in texts.items() if field not in (given or ()) for text in named):
        check_text(str(text))
    if file := recipe.allocation_file:
        try:
            read_utf8(local_path(file))
        except Unreadable as error:
            raise InvalidSetting(f"The allocation {file} cannot be read: {error}.") from None
    if recipe.task_data is not None and not local_path(recipe.task_data).is_dir():
        raise BadText(f"There is no folder {recipe.task_data}. Put the questions there, or leave out `task_data`.")


def run_inputs(recipe: RunRecipe, source: Checkpoint | InMemoryModel) -> dict[str, dict[str, str]]:
    """Digests of what a recipe names: the classes of its method, and the files of model, texts, allocation and tasks.

    Every byte of the weights is read, once per process. A model or a text in memory, and a text on the hub, have none.
    """
    found = method_inputs(recipe)
    if isinstance(source, Checkpoint):
        known = {name.removeprefix("file "): str(text) for name, text in model_fingerprint(source).items()}
        del known["terms in README.md"]  # which decide nothing
        found[recipe.model] = known
    return found | {name: named for name in _local_names(recipe) if (named := text_contents(name))}


def method_inputs(recipe: RunRecipe) -> dict[str, dict[str, str]]:
    """The classes of a recipe's method that are not of sparsellm, by their names: modules, package, and source."""
    found: dict[str, dict[str, str]] = {}
    for origin in class_origins(recipe):
        entries = {f"module {name}": contents(file) for name, file in origin.files.items()}
        if origin.package:
            entries["package"] = origin.package
        if origin.source is None:
            entries["source"] = NO_SOURCE
        elif origin.source:
            entries["source"] = f"SHA-256 {hashlib.sha256(origin.source.encode()).hexdigest()[:32]}"
        found[origin.name] = entries
    return found


def text_contents(name: str) -> dict[str, str]:
    """Digests of a local text, data set or folder of tasks' data by the names of its files; empty for any other name."""
    path = local_path(name, any_length=True)
    try:
        inside = path.rglob("*") if is_saved(path) else path.glob("*.jsonl")
        files = [path] if path.is_file() else sorted(file for file in inside if file.is_file())
    except (OSError, ValueError):  # a sentence is too long for the name of a file
        return {}
    if name in TEXT_NAMES or not files:
        return {}
    return {str(file.relative_to(path.parent)): contents(file) for file in files}


def changed_input(recorded: Inputs, current: Inputs, endings: str | tuple[str, ...] = "") -> str:
    """Describe the first input of the same name with other contents; empty if there is none.

    Args:
        endings: Compare only files with names that end so.
    """
    for name in (name for name in recorded if name in current):
        before, now = recorded[name], current[name]
        for file in sorted(before.keys() | now.keys()):
            if file.endswith(endings) and before.get(file) != now.get(file):
                return f"{name} was changed: {file} had {before.get(file, 'no bytes')}, and then {now.get(file, 'no bytes')}"
    return ""


def check_kept(folder: Path, recipe: RunRecipe, inputs: Inputs | None = None) -> None:
    """Check that a finished output, which need not be written again, is of this recipe, and of the files that it names now.

    Args:
        inputs: Digests of what the run would read; None for those of the files that the recipe names.

    Raises:
        OtherContents: It is not.
    """
    output = read_output(local_path(folder))
    names = PathNames(recipe)
    settings = names.recipe(recipe).model_dump(mode="json", exclude=set(OF_THE_MACHINE))
    stored = output.content["recipe"]
    changed = next((name for name, value in settings.items() if name in stored and stored[name] != value), None)
    if changed:
        difference = f"its `{changed}` was {stored[changed]!r}, and is now {settings[changed]!r}"
    else:
        required: Inputs = method_inputs(recipe) if inputs is None else inputs
        current = required
        if inputs is None:
            with suppress(SparseLLMError):  # of a model that cannot be opened any more
                current = run_inputs(recipe, open_checkpoint(recipe.model, recipe.revision, recipe.trust_remote_code))
        current, recorded = names.keys(current), output.report.inputs
        unknown = next((f"it does not say which {name} it read" for name in required if names[name] not in recorded), "")
        difference = changed_input(recorded, current) or unknown
    if difference:
        advice = "or `restart=True` and `overwrite=True` to start over"
        if changed in NOT_DECISIVE:
            advice = f"and measure {folder} with sparsellm evaluate: its weights do not depend on this"
        message = f"{folder} is finished, but not of this run: {difference}. Pass the original settings and files, {advice}."
        raise OtherContents(message)


def _local_names(recipe: RunRecipe) -> Iterator[str]:
    """The names in a recipe that may be files or folders, besides its model."""
    yield from [recipe.calibration] if recipe.reads_text and recipe.calibration else []
    yield from recipe.evaluate
    yield from [recipe.allocation_file] if recipe.allocation_file else []
    yield from [recipe.task_data] if recipe.task and recipe.task_data else []
    yield from (task for task in recipe.task if is_task_file(task))
