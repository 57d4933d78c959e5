"""Runs of one command, which share the dense model's results and must read the same files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from sparsellm.pipeline.events import Observer
from sparsellm.pipeline.fingerprint import DenseCache
from sparsellm.pipeline.input_digests import SameInputs
from sparsellm.pipeline.prune import prune_run
from sparsellm.pipeline.recipe import RunRecipe
from sparsellm.pipeline.run import RunArguments
from sparsellm.pipeline.saving import Result
from sparsellm.pipeline.work_directory import work_directory
from sparsellm.texts.in_memory import Given


class RunSet:
    """Runs of one command: several sparsities, cells of a sweep, or points of a search.

    Results on the dense model are computed once, and a model or a text that is changed between two runs is an error. Who owns
    the set decides which recipe is run next, and what becomes of its result.

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

    def run(self, recipe: RunRecipe, *, given: Given | None = None) -> Result:
        """Run a recipe without a folder: a killed run is lost.

        Args:
            given: Data that replace the recipe's texts, in forms of `sparsellm.texts.in_memory`.
        """
        return self._run(recipe, {}, given)

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
            result = self._run(recipe, {"work": work, "name": name})
            finish(result)
        return result

    def _run(self, recipe: RunRecipe, place: RunArguments, given: Given | None = None) -> Result:
        arguments: RunArguments = {"shared": self._cache, "check": self.inputs.check, **place}
        function: Callable[..., Result] = self._function or prune_run
        return function(recipe, self.observe, given=given, **arguments)
