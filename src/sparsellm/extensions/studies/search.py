"""Search for the largest sparsity that meets a target, by bisection over runs that are cells of a sweep."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from sparsellm.checkpoints.files import WORK
from sparsellm.checkpoints.loading import Checkpoint
from sparsellm.errors import CannotResume, InvalidSetting, TargetNotReached
from sparsellm.evaluation.results import is_fraction
from sparsellm.extensions.studies.search_result import SEARCH, Point, SearchResult
from sparsellm.extensions.studies.sweep_file import Cell
from sparsellm.extensions.studies.sweep_runner import CellFolder, run_cell
from sparsellm.extensions.studies.target import HIGHEST, Target, bound_note, outcome, packed_size, point_of, undecided_note
from sparsellm.observers.events import NextRun, Note, Observer, add_note
from sparsellm.outputs.fingerprint import check_inputs, environment, model_fingerprint, run_inputs
from sparsellm.outputs.journal import JOURNAL
from sparsellm.outputs.report import Report
from sparsellm.outputs.saving import Result, claimed
from sparsellm.pipeline.loading import OpenedModel, open_model
from sparsellm.pipeline.several import RunSet
from sparsellm.recipes.file import validated
from sparsellm.recipes.recipe import Recipe
from sparsellm.runtime import collectives
from sparsellm.runtime.memory import human_bytes
from sparsellm.solvers.patterns import Unstructured

FINEST = 1e-3
"""The smallest step: measurements of two models that are closer differ by less than their standard errors."""


@dataclass(frozen=True)
class Search:
    """The result of a search.

    Attributes:
        target: What it meets, in words.
        points: All sparsities that were tried, in increasing order, those with the final effort last.
        outcome: What the output is known to have, as the predicate of a sentence: the target, or why it is not certain.
    """

    sparsity: float
    target: str
    points: tuple[Point, ...]
    report: Report
    output: Path
    outcome: str

    def __repr__(self) -> str:
        return f"<Search: {Unstructured(self.sparsity)} {self.outcome}, {len(self.points)} sparsities tried, in {self.output}>"


def bisect(is_met: Callable[[int], bool], count: int) -> int:
    """The largest of the numbers 1 to `count` that meets a target, if all smaller ones do and no larger one does; 0 for none.

    Otherwise, the number that is returned meets the target, and the one after it, if there is one, does not.
    """
    low, high = 0, count + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_met(middle) else (low, middle)
    return low


def search_sparsity(
    recipe: Recipe, output: str | Path, target: Target, *, step: float, overwrite: bool, observe: Observer
) -> Search:
    """Find the largest sparsity that meets a target, by bisection with the effort "fast", and prune with the recipe's effort.

    If the final run misses the target, the next smaller sparsity is pruned. For a size, the smallest sparsity that meets it is
    computed and pruned. Repeated after an interruption, the search continues.

    Args:
        recipe: What to run; its sparsity is not used. Methods without efforts are searched as they are.
        step: Distance between sparsities, which are multiples of it up to `HIGHEST`.

    Raises:
        InvalidSetting: The recipe cannot be searched, does not measure what the target needs, or several processes search.
        TargetNotReached: No sparsity meets the target. Nothing is written.
    """
    if max(collectives.world(), int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        raise InvalidSetting("A search runs in one process. Start it without a launcher.")
    check_inputs(recipe)
    grid = _sparsities(step)
    if target.perplexity_increase is not None and not recipe.evaluate:
        raise InvalidSetting("A perplexity needs a text to measure it on: pass `evaluate` with a file or the name of a text.")
    recipe = recipe.model_copy(update={"task": tuple(dict.fromkeys([*recipe.task, *(target.accuracy or ())]))})
    with claimed(output, overwrite, recipe.model) as path:
        if (path / WORK / JOURNAL).exists():
            raise CannotResume(
                f"{output} is the unfinished output of a pruning run. Finish that run, or choose another output."
            )
        opened = open_model(recipe)
        assert isinstance(opened.source, Checkpoint)
        # Finished runs on other files or another machine do not count.
        known = {**model_fingerprint(opened.source), **environment(opened.device), **run_inputs(recipe, opened.source)}
        digest = hashlib.blake2b(json.dumps(known, sort_keys=True).encode(), digest_size=8).hexdigest()
        folder = path / WORK / f"search-{digest}"
        try:
            return _Searcher(recipe, target, path, grid, folder, RunSet(observe, folder / "dense")).run(opened)
        except BaseException as error:
            _clean_up(folder, error)
            raise


@dataclass
class _Searcher:
    """A search in its folder of cells.

    Attributes:
        found: The result, once an output that meets the target is written.
        points: By whether the effort is that of the output, and by sparsity.
        sizes: Bytes of the packed weights by sparsity, if the target is a size.
        number: Number of the run.
        expected: Runs that the search takes if its output meets the target.
    """

    recipe: Recipe
    target: Target
    output: Path
    grid: list[float]
    folder: Path
    runs: RunSet
    found: Search | None = None
    points: dict[tuple[bool, float], Point] = field(default_factory=dict)
    sizes: dict[float, int] = field(default_factory=dict)
    number: int = 0
    expected: int = 1

    def run(self, opened: OpenedModel) -> Search:
        """Find the sparsity among those of the grid, and write the output."""
        grid = self.grid
        self.runs.inputs.check(run_inputs(self.recipe, opened.source))  # those of finished cells
        if self.target.size is None:
            self.expected = math.ceil(math.log2(len(grid) + 1)) + 1
            candidates = grid[: bisect(lambda number: self._is_met(number - 1), len(grid))][::-1]
            if note := undecided_note(self._sorted(), self.target):
                self.runs.observe(Note(note))
        else:
            self.sizes = {sparsity: packed_size(self.recipe, opened, sparsity) for sparsity in grid}
            candidates = [sparsity for sparsity in grid if self.sizes[sparsity] <= self.target.size][:1]
        for sparsity in candidates:
            if self.found:
                break
            self.number = max(self.number, self.expected - 1)  # fewer trials may have sufficed
            point = self._measure(sparsity, self.recipe, "output at", write=True)
            if not point.met:
                fails = f"is not known to meet the target ({point.describe()})" if point.undecided else "misses the target"
                note = f"with the final effort, {Unstructured(sparsity)} {fails}: a smaller one follows"
                self.runs.observe(Note(note))
        if self.found:
            return self.found
        tried = self._sorted()
        nearest = f"{Unstructured(grid[-1])} takes {human_bytes(self.sizes[grid[-1]])}" if self.sizes else tried[0].describe()
        known = "is known to have" if any(point.undecided for point in tried) else "has"
        advice = "Relax the target" + (", or measure on more text, `evaluate_limit`." if known != "has" else ".")
        raise TargetNotReached(f"No sparsity {known} {self.target}: {nearest}. Nothing was written. {advice}", tried)

    def _is_met(self, index: int) -> bool:
        """Whether the sparsity at this place of the grid meets the target, with the effort "fast".

        Where that is the recipe itself, the last one that is tried is written at once if it does: it is the output.
        """
        recipe, tried = _fast(self.recipe, self.target), {sparsity for _, sparsity in self.points}
        is_last = tried.issuperset(self.grid[max(index - 1, 0) : index] + self.grid[index + 1 : index + 2])
        return self._measure(self.grid[index], recipe, "trying", write=is_last and recipe == self.recipe).met

    def _measure(self, sparsity: float, recipe: Recipe, name: str, *, write: bool) -> Point:
        """The point of a recipe at a sparsity, from its finished cell or from a run.

        Args:
            name: Name of the run, for observers.
            write: Whether to write the output if it meets the target.
        """
        pattern = str(Unstructured(sparsity))
        labels = {"sparsity": pattern, "effort": _effort(recipe)}
        cell_folder = CellFolder(self.folder, Cell(labels=labels, recipe=recipe.model_copy(update={"sparsity": pattern})))
        self.number += 1
        if report := cell_folder.outcome().report:
            point = self._add(sparsity, recipe, report)
            if not (write and point.met):
                return point  # an earlier process has seen it

        def save(result: Result) -> None:
            point = self._add(sparsity, recipe, result.report)
            if point.met:
                if note := bound_note(point, self.target, self.grid):
                    add_note(note, result.report, self.runs.observe)
                points = tuple(self._sorted())
                result.report.sections[SEARCH] = SearchResult(str(self.target), points)
                self.runs.save(result, self.output, overwrite=True)
                found = outcome(point, self.target)
                self.found = Search(sparsity, str(self.target), points, result.report, self.output, found)

        self.runs.observe(NextRun(self.number, max(self.number, self.expected), f"{name} {pattern}"))
        with cell_folder.taken():
            result = run_cell(cell_folder, self.runs, finish=save if write else lambda _: None)
            if not self.found:
                cell_folder.finish(result)
        return self._add(sparsity, recipe, result.report)

    def _add(self, sparsity: float, recipe: Recipe, report: Report) -> Point:
        """Make a point from the report of a run. Raises TargetNotReached if the dense model itself misses the target."""
        for task in self.target.accuracy or ():
            figure = report.tasks.get(task, {}).get("pruned")
            if figure is None or not is_fraction(figure.metric):
                raise InvalidSetting(f"`min_accuracy` names {task}, for which lm-eval computes no accuracy. Name another task.")
        size = self.sizes.get(sparsity)
        dense = {task: x["dense"] for task, x in report.tasks.items() if "dense" in x}
        if size is None and not self.target.decide([], dense).met:
            figures = ", ".join(f"{x.value:.3g} on {task}" for task, x in dense.items())
            raise TargetNotReached(f"The dense model itself has not {self.target}: it has {figures}. Relax the target.")
        point = point_of(sparsity, _effort(recipe), report, size=size, target=self.target)
        self.points[recipe.effort == self.recipe.effort, sparsity] = point
        return point

    def _sorted(self) -> list[Point]:
        """All points, in increasing order, those with the final effort last."""
        return [self.points[key] for key in sorted(self.points)]


def _sparsities(step: float) -> list[float]:
    """The sparsities to choose from, in increasing order: multiples of the step."""
    if not FINEST <= step <= 0.5:
        raise InvalidSetting(f"`step` must be from {100 * FINEST:g}% to 50%, got {100 * step:.10g}%.")
    return [round(number * step, 12) for number in range(1, int(HIGHEST / step + 1e-9) + 1)]


def _effort(recipe: Recipe) -> str:
    """The effort of a recipe, or its method."""
    return recipe.effort if recipe.method == "sparsellm" else recipe.method


def _fast(recipe: Recipe, target: Target) -> Recipe:
    """The recipe of the runs before the last one: the effort "fast", and only the target is measured."""
    fields = recipe.model_dump(exclude_defaults=True, exclude={"task", "evaluate"})
    if target.accuracy:
        fields["task"] = tuple(target.accuracy)
    else:
        fields["evaluate"] = recipe.evaluate
    if recipe.method == "sparsellm" and recipe.effort != "fast":
        fields = {name: value for name, value in fields.items() if name != "settings"} | {"effort": "fast"}
    return validated(Recipe, fields)


def _clean_up(folder: Path, error: BaseException) -> None:
    """After an error, keep the folder if a run is finished or begun, with a note on how to continue, else remove it."""
    error.__notes__ = [note for note in getattr(error, "__notes__", []) if "`resume`" not in note]
    finished = len(list(folder.glob("cells/*/result.json")))
    begun = any(folder.glob(f"cells/*/model/{WORK}/{JOURNAL}"))
    if isinstance(error, TargetNotReached) or not (finished or begun):
        shutil.rmtree(folder, ignore_errors=True)
    else:
        kept = f"{finished} {'sparsity is' if finished == 1 else 'sparsities are'} measured and kept"
        error.add_note(f"{kept}: repeat the command to continue")
