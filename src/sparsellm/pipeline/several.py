"""Runs that are written to folders: one, or several that differ in their sparsity and share the dense model's results.

`run_outputs` is what the commands, and `prune` in Python, call.
"""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Unpack

from sparsellm.checkpoints.files import WORK
from sparsellm.errors import CannotResume, InvalidSetting, OutputExists
from sparsellm.observers.events import WRITING, NextRun, Observer, Stage
from sparsellm.outputs.fingerprint import Inputs, SameInputs, check_kept
from sparsellm.outputs.folder import is_finished, locked, not_moved, recover_output, refuse_links, remove
from sparsellm.outputs.journal import JOURNAL, work_directory
from sparsellm.outputs.report import Report
from sparsellm.outputs.saving import Result, check_output
from sparsellm.pipeline.dense_results import DenseCache
from sparsellm.pipeline.prune import prune_run
from sparsellm.pipeline.run import RunArguments
from sparsellm.recipes.recipe import Recipe, RunRecipe
from sparsellm.runtime import collectives
from sparsellm.texts.paths import local_path

Folders = Mapping[Path, RunRecipe]
"""The recipe of each output, by the folder that it is written to."""


class RunSet:
    """Runs of one command: several sparsities, cells of a sweep, or points of a search.

    Results on the dense model are computed once, and a model or a text that is changed between two runs is an error. The set
    does not choose the recipes, and keeps no results.

    Args:
        observe: Receives the events of all runs.
        cache: Folder for the dense model's results; None if they are not kept, as for a single run.
        inputs: Compares what the runs read. Default: with what earlier runs of the set have read.
        function: Runs a recipe, with the arguments of `prune_run`, which is the default.
    """

    def __init__(
        self,
        observe: Observer,
        cache: Path | None = None,
        inputs: SameInputs | None = None,
        function: Callable[..., Result] | None = None,
    ) -> None:
        self.observe, self.inputs, self._function = observe, SameInputs() if inputs is None else inputs, function
        self._cache = None if cache is None else DenseCache(cache, observe)

    def run(self, recipe: RunRecipe, **place: Unpack[RunArguments]) -> Result:
        """Run a recipe. place: where it works, as in `RunArguments`; nowhere by default: a killed run is lost."""
        arguments: RunArguments = {"shared": self._cache, "check": self.inputs.check, **place}
        function: Callable[..., Result] = self._function or prune_run
        return function(recipe, self.observe, **arguments)

    def run_in(
        self,
        folder: str | Path,
        recipe: RunRecipe,
        *,
        resume: bool = False,
        restart: bool = False,
        name: str | None = None,
        begin: Callable[[], object] = lambda: None,
        finish: Callable[[Result], object] = lambda _: None,
    ) -> Result:
        """Run a recipe in the work directory of an output folder, from which a killed run is resumed.

        Args:
            folder: The output folder, which this method does not write.
            resume: As for `work_directory`.
            restart: As for `work_directory`.
            name: As in `RunArguments`.
            begin: Called once the folder is locked against other commands.
            finish: Called with the result while the work directory exists, to save it.

        Raises:
            CannotResume: As `work_directory`, and if the unfinished run has other settings.
        """
        with work_directory(folder, resume, restart) as work:
            begin()
            result = self.run(recipe, work=work, name=name)
            finish(result)
        return result

    def save(self, result: Result, folder: str | Path, *, overwrite: bool) -> None:
        """Write the output of a run."""
        self.observe(Stage(WRITING))
        result.save_pretrained(folder, overwrite)


def run_outputs(
    output: str | Path,
    folders: Folders,
    observing: Callable[[], AbstractContextManager[Observer]],
    *,
    resume: bool = False,
    restart: bool = False,
    overwrite: bool = False,
    function: Callable[..., Result] | None = None,
    inputs: Callable[[], Inputs] | None = None,
    check: Callable[[], object] = lambda: None,
) -> Report | None:
    """Run one or several recipes, in one process or in those of a launcher, and write the outputs.

    Args:
        output: The output, or the folder that holds several.
        folders: The recipes, from `output_folders`.
        observing: Opens the context of the runs, which yields their observer; not called if nothing is left to do.
        resume: Continue what is unfinished, and keep what is finished.
        restart: Discard what is unfinished.
        overwrite: Replace finished outputs.
        function: As for `RunSet`.
        inputs: Gives the digests of what each run reads, if some of it is in memory; called if an output is finished.
        check: Called once the outputs are checked, in the main process.

    Returns:
        The report of the last run; None if all outputs were finished, which `resume` keeps.

    Raises:
        InvalidSetting: `resume` and `restart` are both set.
        SparseLLMError: As `check_outputs` and the runs.
    """
    if resume and restart:
        raise InvalidSetting("`resume` continues an unfinished run, and `restart` discards it: pass one of them.")
    replace = {"resume": resume, "restart": restart, "overwrite": overwrite}
    if collectives.is_main():
        check_outputs(output, folders, **replace, inputs=inputs)
        check()
    finished = collectives.broadcast_object([resume and is_finished(folder) for folder in folders])
    if all(finished):
        if len(folders) > 1 and collectives.is_main():
            remove_shared_results(output)
        return None
    with observing() as observe, locked_runs(output, folders, observe, function) as runs:
        return run_each(folders, runs, finished=finished, **replace)


def output_folders(output: str | Path, recipes: Sequence[RunRecipe]) -> Folders:
    """The folder of each recipe's output: `output` itself for one, else a folder in it, "62.5" for 62.5% and "2-4" for 2:4."""
    if len(recipes) == 1:
        return {Path(output): recipes[0]}
    return {
        Path(output) / recipe.label.removesuffix("%").replace(":", "-"): recipe
        for recipe in recipes
        if isinstance(recipe, Recipe)
    }


def check_outputs(
    output: str | Path,
    folders: Folders,
    *,
    resume: bool,
    restart: bool,
    overwrite: bool,
    inputs: Callable[[], Inputs] | None = None,
) -> None:
    """Check that the outputs can be written.

    Args:
        output: The output, or the folder that holds several. That one may hold other folders, but no files.
        resume: Outputs that are finished are kept.
        restart: Outputs of an unfinished command for several are replaced.
        overwrite: Outputs of earlier runs are replaced.
        inputs: As for `run_outputs`.

    Raises:
        OutputExists: One exists, or the folder for several is a file or holds files.
        CannotResume: The folder for several is unfinished, and neither `resume` nor `restart` is set; or a finished output
            was made with other settings, or from files that were changed since.
        InvalidSetting: As `check_output`.
    """
    if len(folders) > 1:
        path = local_path(output)
        refuse_links(path, path / WORK)
        unfinished = (path / WORK).exists()
        with not_moved(path):
            entries = [*path.glob("*"), path / WORK / JOURNAL] if path.is_dir() else [path]
            files = sorted(str(entry.relative_to(path.parent)) for entry in entries if entry.is_file())
        if files:
            raise OutputExists(
                f"{files[0]} is a file. Name a new folder for {len(folders)} outputs, or one that holds no files."
            )
        if unfinished and not resume and not restart:
            raise CannotResume(f"{output} is unfinished. Pass `resume` to continue it, or `restart` to start over.")
        overwrite = overwrite or (restart and unfinished)
    for folder, recipe in folders.items():
        recover_output(folder)
        for other in recipe.also_read:  # a pruned checkpoint is finished, but no output to keep
            check_output(folder, overwrite or resume or restart, other)
        if not (resume and is_finished(folder)):
            check_output(folder, overwrite, recipe.model)
        else:
            check_kept(folder, recipe, None if inputs is None else inputs())


def run_each(
    folders: Folders,
    runs: RunSet,
    *,
    finished: Sequence[bool],
    resume: bool,
    restart: bool,
    overwrite: bool,
) -> Report:
    """Run recipes one after the other, and write their outputs.

    Args:
        finished: Whether each is finished already; not all are.
        resume: As for `work_directory`.
        restart: As for `work_directory`, and outputs are replaced if there are several.
        overwrite: Replace outputs.

    Returns:
        The report of the last run.
    """
    several = len(folders) > 1
    overwrite = overwrite or (restart and several)
    for number, (folder, recipe) in enumerate(folders.items()):
        if finished[number]:
            continue
        label = recipe.label if several and isinstance(recipe, Recipe) else ""
        if several:
            runs.observe(NextRun(number + 1, len(folders), label, alike=not any(finished[number:])))
        # Once more when it is locked: another command may have finished it since this one checked it.
        check = partial(check_output, folder, overwrite, recipe.model)
        report = runs.run_in(
            folder,
            recipe,
            resume=resume,
            restart=restart,
            name=f"{folder.parent.name}, {label}" if label else None,
            begin=partial(collectives.on_main, check),
            finish=partial(runs.save, folder=folder, overwrite=overwrite),
        ).report
        gc.collect()  # frees the model
    return report


@contextmanager
def locked_runs(
    output: str | Path, folders: Collection[Path], observe: Observer, function: Callable[..., Result] | None = None
) -> Iterator[RunSet]:
    """The runs that write these folders. Several share the dense model's results, in a work folder in `output`.

    For several, `output` is locked for all of the time, and the shared results are removed at the end. After an error they are
    kept if any output is begun, with a note on the error that says how to resume.

    Args:
        output: The output, or the folder that holds several.
        folders: The folders of the outputs.
        observe: Receives the events of all runs.
        function: As for `RunSet`.

    Raises:
        CannotResume: Another process is working on `output`.
    """
    if len(folders) == 1:
        yield RunSet(observe, function=function)
        return
    work = local_path(output) / WORK
    with locked(output) if collectives.is_main() else nullcontext():
        try:
            yield RunSet(observe, work / "dense", function=function)
        except BaseException as error:
            if collectives.is_main():
                _clean_up(work, folders, error)
            raise
        if collectives.is_main():
            shutil.rmtree(work, ignore_errors=True)


def remove_shared_results(output: str | Path) -> None:
    """Remove what several finished runs shared: the process that ran the last one may have been killed before it did."""
    work = local_path(output) / WORK
    with locked(output) if work.exists() else nullcontext():
        shutil.rmtree(work, ignore_errors=True)


def _clean_up(work: Path, folders: Collection[Path], error: BaseException) -> None:
    """After an error, note how to resume if an output is finished; remove the results if none is finished or begun."""
    if finished := sum(map(is_finished, folders)):
        are = "is" if finished == 1 else "are"
        error.add_note(f"{finished} of {len(folders)} outputs {are} finished and kept: pass `resume` to continue")
    elif not any((local_path(folder) / WORK / JOURNAL).exists() for folder in folders):
        remove(work / "dense")
