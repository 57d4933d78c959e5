"""Search for the largest sparsity or the fewest bits that meet a target, by bisection over runs that are cells of a sweep."""

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
from sparsellm.errors import CannotResume, InvalidSetting, TargetNotReached, plural
from sparsellm.evaluation.results import is_fraction
from sparsellm.extensions.studies.search_result import SEARCH, Point, SearchResult
from sparsellm.extensions.studies.searched import PrunedSizes, Searched
from sparsellm.extensions.studies.sweep_file import Cell
from sparsellm.extensions.studies.sweep_runner import CellFolder, run_cell
from sparsellm.extensions.studies.target import Target, bound_note, outcome, point_of, undecided_note
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


@dataclass(frozen=True)
class Search:
    """The result of a search.

    Attributes:
        over: The setting that was varied, "sparsity" or "bits".
        value: The value that was found.
        target: What it meets, in words.
        points: All values that were tried, from the one that removes least, those with the final effort last.
        outcome: A sentence on the output: it has the target, or why that is not certain.
    """

    over: str
    value: float
    target: str
    points: tuple[Point, ...]
    report: Report
    output: Path
    outcome: str

    def __repr__(self) -> str:
        return f"<Search: {self.outcome}, {plural(len(self.points), 'value')} tried, in {self.output}>"


def bisect(is_met: Callable[[int], bool], count: int) -> int:
    """The largest of the numbers 1 to `count` that meets a target, if all smaller ones do and no larger one does; 0 for none.

    Otherwise, the number that is returned meets the target, and the one after it, if there is one, does not.
    """
    low, high = 0, count + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if is_met(middle) else (low, middle)
    return low


def run_search(
    recipe: Recipe, output: str | Path, target: Target, over: Searched, *, step: float, overwrite: bool, observe: Observer
) -> Search:
    """Find the value that removes most and meets a target, by bisection with the effort "fast", and prune with the recipe's.

    If the final run misses the target, the value before is pruned. For a size, the value that removes least and meets it is
    computed and pruned. Repeated after an interruption, the search continues.

    Args:
        recipe: What to run, with any value of the setting. Methods without efforts are searched as they are.
        over: The setting to vary.
        step: Distance between its values.

    Raises:
        InvalidSetting: The recipe cannot be searched, does not measure what the target needs, or several processes search.
        TargetNotReached: No value meets the target. Nothing is written.
    """
    if max(collectives.world(), int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        raise InvalidSetting("A search runs in one process. Start it without a launcher.")
    check_inputs(recipe)
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
            return _Searcher(recipe, target, over, path, folder, RunSet(observe, folder / "dense")).run(opened, step)
        except BaseException as error:
            _clean_up(folder, error)
            raise


@dataclass
class _Searcher:
    """A search in its folder of cells.

    Attributes:
        grid: The values to choose from.
        found: The result, once an output that meets the target is written.
        points: By whether the effort is that of the output, and by place in the grid.
        sizes: Bytes of the packed weights at each place, if the target is a size.
        number: Number of the run.
        expected: Runs that the search takes if its output meets the target.
    """

    recipe: Recipe
    target: Target
    over: Searched
    output: Path
    folder: Path
    runs: RunSet
    grid: list[float] = field(default_factory=list)
    found: Search | None = None
    points: dict[tuple[bool, int], Point] = field(default_factory=dict)
    sizes: list[int] = field(default_factory=list)
    number: int = 0
    expected: int = 1

    def run(self, opened: OpenedModel, step: float) -> Search:
        """Find the value among the multiples of the step, and write the output."""
        sizes = PrunedSizes.of(self.recipe, opened)
        kept = sizes.others * sizes.dtype.itemsize
        self.grid = grid = self.over.grid(step, sizes)
        self.runs.inputs.check(run_inputs(self.recipe, opened.source))  # those of finished cells
        if note := self.over.size_note(sizes):
            self.runs.observe(Note(note))
        if self.target.size is None:
            self.expected = math.ceil(math.log2(len(grid) + 1)) + 1
            candidates = range(bisect(lambda number: self._is_met(number - 1), len(grid)))[::-1]
            if note := undecided_note(self._sorted(), self.target):
                self.runs.observe(Note(note))
        else:
            self.sizes = [kept + self.over.packed_bytes(value, sizes) for value in grid]
            candidates = range(
                next((x for x, size in enumerate(self.sizes) if size <= self.target.size), len(grid)), len(grid)
            )[:1]
        for place in candidates:
            if self.found:
                break
            self.number = max(self.number, self.expected - 1)  # fewer trials may have sufficed
            point = self._measure(place, self.recipe, "output at", write=True)
            if not point.met:
                fails = "is not known to be met" if point.undecided else "is missed"
                follows = f". {self.over.label(grid[place - 1])} follows" if place else ""
                self.runs.observe(Note(f"with the final effort, the target {fails}: {point.describe()}{follows}"))
        if self.found:
            return self.found
        tried = self._sorted()
        nearest = tried[0].describe() if tried else f"{self.over.label(grid[-1])} takes {human_bytes(self.sizes[-1])}"
        nearest += "" if tried else f", {human_bytes(kept)} of it in weights that are not pruned"
        known = "is known to have" if any(point.undecided for point in tried) else "has"
        advice = "Relax the target" + (", or measure on more text, `evaluate_limit`." if known != "has" else ".")
        raise TargetNotReached(f"No {self.over.noun} {known} {self.target}: {nearest}. Nothing was written. {advice}", tried)

    def _is_met(self, place: int) -> bool:
        """Whether the value at this place of the grid meets the target, with the effort "fast".

        Where that is the recipe itself, the last one that is tried is written at once if it does: it is the output.
        """
        recipe, tried = _fast(self.recipe, self.target), {place for _, place in self.points}
        is_last = tried.issuperset({place - 1, place + 1} & set(range(len(self.grid))))
        return self._measure(place, recipe, "trying", write=is_last and recipe == self.recipe).met

    def _measure(self, place: int, recipe: Recipe, name: str, *, write: bool) -> Point:
        """The point of a recipe at a value, from its finished cell or from a run.

        Args:
            name: Name of the run, for observers.
            write: Whether to write the output if it meets the target.
        """
        value = self.grid[place]
        label = self.over.label(value)
        cell = Cell(
            labels={self.over.name: label, "effort": _effort(recipe)}, recipe=recipe.model_copy(update=self.over.fields(value))
        )
        cell_folder = CellFolder(self.folder, cell)
        self.number += 1
        if report := cell_folder.outcome().report:
            point = self._add(place, recipe, report)
            if not (write and point.met):
                return point  # an earlier process has seen it

        def save(result: Result) -> None:
            point = self._add(place, recipe, result.report)
            if point.met:
                if note := bound_note(point, self.target, self.grid):
                    add_note(note, result.report, self.runs.observe)
                points = tuple(self._sorted())
                result.report.sections[SEARCH] = SearchResult(str(self.target), points)
                self.runs.save(result, self.output, overwrite=True)
                found = outcome(point, self.target)
                self.found = Search(self.over.name, value, str(self.target), points, result.report, self.output, found)

        self.runs.observe(NextRun(self.number, max(self.number, self.expected), f"{name} {label}"))
        with cell_folder.taken():
            result = run_cell(cell_folder, self.runs, finish=save if write else lambda _: None)
            if not self.found:
                cell_folder.finish(result)
        return self._add(place, recipe, result.report)

    def _add(self, place: int, recipe: Recipe, report: Report) -> Point:
        """Make a point from the report of a run. Raises TargetNotReached if the dense model itself misses the target."""
        for task in self.target.accuracy or ():
            figure = report.tasks.get(task, {}).get("pruned")
            if figure is None or not is_fraction(figure.metric):
                raise InvalidSetting(f"`min_accuracy` names {task}, for which lm-eval computes no accuracy. Name another task.")
        size = self.sizes[place] if self.sizes else None
        dense = {task: x["dense"] for task, x in report.tasks.items() if "dense" in x}
        if size is None and not self.target.decide([], dense).met:
            figures = ", ".join(f"{x.value:.3g} on {task}" for task, x in dense.items())
            raise TargetNotReached(f"The dense model itself has not {self.target}: it has {figures}. Relax the target.")
        point = point_of(self.over.name, self.grid[place], _effort(recipe), report, size=size, target=self.target)
        self.points[recipe.effort == self.recipe.effort, place] = point
        return point

    def _sorted(self) -> list[Point]:
        """All points, in the order of the grid, those with the final effort last."""
        return [self.points[key] for key in sorted(self.points)]


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
        kept = f"{finished} {'value is' if finished == 1 else 'values are'} measured and kept"
        error.add_note(f"{kept}: repeat the command to continue")
