"""Outputs and sweeps side by side: perplexity, accuracy, size, and the layers whose errors differ most."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import chain
from pathlib import Path, PurePath
from typing import Any

from sparsellm.errors import InvalidSetting, capitalized, plural
from sparsellm.evaluation.differences import NOT_MEASURABLE
from sparsellm.evaluation.results import Perplexity
from sparsellm.extensions.studies.measures import (
    Figure,
    Ranking,
    Table,
    figure_of,
    measures,
    one_target,
    rank_figures,
    short_names,
)
from sparsellm.extensions.studies.sweep_runner import read_outcomes, saved_sweep
from sparsellm.outputs.folder import check_results, is_sweep
from sparsellm.outputs.report import NOT_PRUNED, Report, When, load_report
from sparsellm.outputs.saving import Result
from sparsellm.outputs.sizes import WeightSizes
from sparsellm.outputs.views import Viewed
from sparsellm.recipes.path_names import PathNames
from sparsellm.recipes.recipe import Recipe

WEIGHT_FILES = (".safetensors", ".bin")
"""Endings of the names of weight files."""

TABLE_LAYERS, COLUMNS = 5, 6
"""Layers in the table of errors, and the most runs that it has columns for."""

LISTED = 4
"""The most names of runs in a sentence."""

SAME_TEXT = 0.01
"""Dense perplexities that differ by more than this fraction are those of different texts."""

UNKNOWN_ERROR = "difference without a known error (measured on other sequences, on one, or by an earlier version)"
"""How differences are introduced whose error cannot be computed."""

MeasuredOn = tuple[str, int | None, int | None, int | None]
"""The sequences of a perplexity: name of the text, number of sequences, tokens of the longest and of all."""


@dataclass(frozen=True)
class ComparedRun:
    """One run of a comparison.

    Attributes:
        name: Its folder, for a cell of a sweep with the cell's labels.
    """

    name: str
    report: Report

    @property
    def method(self) -> str:
        """The method, with what differs from its defaults."""
        recipe = self.report.recipe
        if not isinstance(recipe, Recipe):
            return "nothing recovered" if self.report.recovered_nothing else "recovered"
        if not self.report.blocks:
            return NOT_PRUNED
        return recipe.method_label

    @property
    def model(self) -> str:
        """The last part of the dense model's name."""
        return PurePath(self.report.recipe.model).name

    @property
    def weights(self) -> dict[str, str]:
        """Digests of the dense model's weight files by name; empty if they are not known."""
        files = self.report.inputs.get(self.report.recipe.model, {})
        return {name: text for name, text in files.items() if name.endswith(WEIGHT_FILES)}

    @property
    def perplexities(self) -> dict[MeasuredOn, dict[When, Perplexity]]:
        """Dense and pruned perplexity, by what they were measured on."""
        return {
            (PurePath(text).name, figure.windows, figure.length, figure.tokens): pair
            for text, pair in self.report.perplexity.items()
            for figure in [*pair.values()][-1:]
        }

    def files_of(self, text: str) -> dict[str, str]:
        """Digests of the files of a test text, by the last part of its name; empty if it has none."""
        return next((files for name, files in self.report.inputs.items() if PurePath(name).name == text), {})

    @property
    def figures(self) -> dict[MeasuredOn | str, Figure]:
        """Measurements of the pruned and the dense model: on texts by their sequences, on tasks by their names."""
        on_texts = {key: figure_of(pair) for key, pair in self.perplexities.items() if "pruned" in pair}
        on_tasks = {task: figure_of(pair) for task, pair in self.report.tasks.items() if "pruned" in pair}
        return dict(chain[tuple[MeasuredOn | str, Figure]](on_texts.items(), on_tasks.items()))

    @property
    def errors(self) -> dict[str, float]:
        """Relative error by layer."""
        return {layer.name: layer.error for layer in self.report.layers}


@dataclass(frozen=True, repr=False)
class Comparison(Viewed):
    """Runs of one model side by side.

    Attributes:
        folders: The folders that were read, as they were given, so that the command that compares them again can be run; none
            if a result was in memory.
        notes: What limits the comparison, as sentences.
    """

    model: str
    folders: tuple[str, ...]
    runs: tuple[ComparedRun, ...]
    notes: tuple[str, ...]

    @property
    def dense_size(self) -> WeightSizes | None:
        """The bytes of the dense model, whose weights are written like those of the runs; None if they are not known."""
        written = max((x.written for run in self.runs if (x := run.report.sizes)), default=0)
        return WeightSizes(written, written) if written else None

    @cached_property
    def columns(self) -> dict[MeasuredOn | str, str]:
        """The headings of what was measured: of texts by their sequences, then of tasks by their names."""
        texts = list(dict.fromkeys(key for run in self.runs for key in run.perplexities))
        tasks = list(dict.fromkeys(task for run in self.runs for task in run.report.tasks))
        return dict(zip([*texts, *tasks], [*_column_names(texts), *tasks], strict=True))

    @cached_property
    def rankings(self) -> dict[MeasuredOn | str, Ranking]:
        """The runs in order of each measure that has a best value."""
        figures = [(run.name, run.figures) for run in self.runs]
        found = {key: rank_figures({name: x[key] for name, x in figures if key in x}) for key in self.columns}
        return {key: x for key, x in found.items() if x and (x.figure.share or not isinstance(key, str))}

    @property
    def verdict(self) -> str:
        """The run with the best value of what most runs were measured on, and the smallest one, in a sentence."""
        parts: list[str] = []
        if key := max(self.rankings, key=lambda key: len(self.rankings[key].differences), default=None):
            ranking = self.rankings[key]
            measure = f"{'perplexity' if isinstance(key, tuple) else 'accuracy'} on {self.columns[key]}"
            change = f", {ranking.figure.change_text} from the dense model" if ranking.figure.change_text else ""
            parts.append(f"{ranking.best} has the {ranking.extreme} {measure}: {ranking.figure.short}{change}")
            if close := ranking.those(measurable=False):
                parts[-1] += f", with {NOT_MEASURABLE} from {_listed(close)}"
            elif ranking.differences:
                sign = -1 if ranking.figure.share else 1
                name, gap = min(ranking.differences.items(), key=lambda pair: sign * pair[1].change if pair[1] else math.inf)
                parts.append(f"{name} follows, {gap or 'by an unknown difference'} from that")
        sizes = {run.name: x for run in self.runs if (x := run.report.sizes)}
        if sizes and self.dense_size:
            least = min(sizes.values(), key=lambda x: x.packed)
            names = [name for name, x in sizes.items() if x.packed == least.packed]
            taken = (
                f"{least.packed_text or least.written_text} packed, where the dense model takes {self.dense_size.written_text}"
            )
            parts.append(f"{_listed(names)} {'are' if len(names) > 1 else 'is'} smallest, with {taken}")
        return f"{'; '.join(parts)}." if parts else ""

    def summary(self) -> dict[str, str]:
        """The model, and for each run what was measured, in a line."""
        measured = {
            run.name: ", ".join(f"{key if isinstance(key, str) else key[0]} {x.short}" for key, x in run.figures.items())
            for run in self.runs
        }
        return {"model": self.model} | {name: text or "not measured" for name, text in measured.items()}

    def tables(self) -> dict[str, Table]:
        """The tables by title: all runs below the dense model, how they differ, and the layers whose errors differ most."""
        columns = [key for key in self.columns if not isinstance(key, str)]
        tasks = [key for key in self.columns if isinstance(key, str)]
        head = ["run", "method", "sparsity"]
        for name in (self.columns[key] for key in columns):
            head += [name, "change, %"]
        figures = [run.figures for run in self.runs]
        dense = {key: figure.dense for by_key in reversed(figures) for key, figure in by_key.items() if figure.dense}
        line = [", ".join(dict.fromkeys(run.report.start for run in self.runs)), "", ""]
        line += [cell for key in columns for cell in (_measured(dense.get(key)), "")]
        sizes = WeightSizes.columns([self.dense_size, *(run.report.sizes for run in self.runs)])
        taken = [*zip(*sizes, strict=True)] or [()] * (2 + len(self.runs))  # by line, that of the headings first
        lines = [[*line, *(_measured(dense.get(task)) for task in tasks), *taken[1]]]
        for run, by_key, of_run in zip(self.runs, figures, taken[2:], strict=True):
            zeros = f"{100 * run.report.sparsity:.3g}%"
            pattern = getattr(run.report.recipe, "sparsity", None) or run.report.n_m or zeros  # a recovery's has none
            line = [run.name, run.method, str(pattern)]
            for key in columns:
                change = by_key[key].difference if key in by_key else None
                line += [_measured(by_key.get(key)), change.short.removesuffix(" %") if change else "-"]
            line += [_measured(by_key.get(task)) for task in tasks]
            lines.append([*line, *of_run])
        layers, differences = self._layers(), self._differences()
        shown = {"Differences between the runs": differences} if len(differences[0]) > 1 else {}
        shown |= {"Layers whose errors differ most": (["layer", *(run.name for run in self.runs)], layers)} if layers else {}
        return {f"Pruned from {self.model}": ([*head, *tasks, *taken[0]], lines)} | shown

    def _differences(self) -> Table:
        """How the runs differ from the best one, on each text and task, which is called so only if it is measurable."""
        rankings = {self.columns[key]: x for key, x in self.rankings.items() if x.differences}

        def cell(name: str, ranking: Ranking) -> str:
            if name == ranking.best:
                return ranking.mark
            return str(ranking.differences.get(name) or "-")

        return ["run", *rankings], [[run.name, *(cell(run.name, x) for x in rankings.values())] for run in self.runs]

    def _layers(self) -> list[list[str]]:
        """The median error of each run, and the layers with the largest ratio between the errors of two runs.

        None of runs whose errors are relative to different targets.
        """
        if len(self.runs) > COLUMNS or not one_target(run.report for run in self.runs):
            return []
        by_run = [run.errors for run in self.runs]
        spread: dict[str, float] = {}
        for name in dict.fromkeys(name for errors in by_run for name in errors):
            values = [errors[name] for errors in by_run if 0 < errors.get(name, 0) < math.inf]
            spread[name] = max(values) / min(values) if len(values) > 1 else 1.0
        worst = sorted((name for name in spread if spread[name] > 1), key=lambda name: -spread[name])[:TABLE_LAYERS]
        finite = [[error for error in errors.values() if math.isfinite(error)] for errors in by_run]
        medians = ["median of all", *(f"{statistics.median(errors):.3g}" if errors else "-" for errors in finite)]
        lines = [[name, *(f"{errors[name]:.3g}" if name in errors else "dense" for errors in by_run)] for name in worst]
        return [medians, *lines] if worst else []

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data for JSON."""
        runs = [
            {
                "name": run.name,
                "recipe": run.report.recipe.model_dump(mode="json"),
                "figures": {name: _plain(figure) for name, figure in measures(run.report).items()},
                "sequences": [list(key) for key in run.perplexities],
                "sparsity_of_model": run.report.totals.sparsity_of_model,
                "sizes": run.report.sizes and asdict(run.report.sizes),
                "errors": run.errors,
            }
            for run in self.runs
        ]
        return {"model": self.model, "notes": list(self.notes), "runs": runs}


def read_comparison(sources: Sequence[str | Path | Result]) -> Comparison:
    """Read the reports of outputs and sweeps, or take those of results in memory.

    Args:
        sources: Two or more folders that `prune`, `recover` or `sweep` wrote, or results, together with at least two finished
            runs.

    Raises:
        InvalidSetting: Fewer than two folders, a folder holds neither, fewer than two runs are finished, or the runs are of
            different models.
        BadCheckpoint: A report is damaged.
    """
    folders = [str(source) for source in sources if not isinstance(source, Result)]
    if twice := next((folder for number, folder in enumerate(folders) if folder in folders[:number]), None):
        raise InvalidSetting(f"{twice} is named twice. Name every folder once.")
    names, open_cells, runs = short_names(folders), list[str](), list[ComparedRun]()
    for source in sources:
        if isinstance(source, Result):
            runs.append(_in_memory(source, runs))
        else:
            runs.extend(_read(check_results(source), names[str(source)], open_cells))
    if len(sources) < 2 or len(runs) < 2:
        got = f"{plural(len(sources), 'folder')} with {plural(len(runs), 'finished run')}"
        raise InvalidSetting(f"A comparison is of two folders or more, got {got}. Name another one, or one alone for its page.")
    _check_model(runs)
    again = tuple(folders) if len(folders) == len(sources) else ()
    return Comparison(runs[0].model, again, tuple(runs), tuple(_notes(runs, open_cells)))


def _in_memory(result: Result, others: Sequence[ComparedRun]) -> ComparedRun:
    """The run of a result in memory, called by its method and sparsity, and by a number where another one is called so."""
    report = result.report.named(PathNames(result.report.recipe))
    name = f"{ComparedRun('', report).method} {getattr(report.recipe, 'label', '')}".strip()
    same = sum(run.name == name or run.name.startswith(f"{name} (") for run in others)
    return ComparedRun(f"{name} ({same + 1})" if same else name, report)


def _check_model(runs: Sequence[ComparedRun]) -> None:
    """Raise InvalidSetting if the models of two runs differ in their name, their size or the contents of a weight file."""
    known: dict[str, tuple[str, object]] = {}
    for run in runs:
        for what, value in {"name": run.model, "size": run.report.totals.parameters, **run.weights}.items():
            first, recorded = known.setdefault(what, (run.name, value))
            if recorded != value:
                raise InvalidSetting(
                    f"{first} and {run.name} are pruned from different models: {what} is {recorded} in the first and {value} "
                    "in the second. Compare runs of one model."
                )


def _read(path: Path, name: str, open_cells: list[str]) -> Iterator[ComparedRun]:
    """The run of an output, or the finished cells of a sweep; the names of the others are added to `open_cells`."""
    if not is_sweep(path):
        yield ComparedRun(name, load_report(path))
        return
    for outcome in read_outcomes(saved_sweep(path), path):
        label = f"{name}: {outcome.cell.name}"
        if outcome.report is None:
            open_cells.append(f"{label} ({outcome.state})")
        else:
            yield ComparedRun(label, outcome.report)


def _notes(runs: Sequence[ComparedRun], open_cells: Sequence[str]) -> Iterator[str]:
    """The limits of a comparison: other sequences or texts, other definitions of the error, unfinished cells."""
    sequences: dict[str, set[MeasuredOn]] = {}
    values: dict[MeasuredOn, list[float]] = {}
    for run in runs:
        for key, pair in run.perplexities.items():
            sequences.setdefault(key[0], set()).add(key)
            values.setdefault(key, []).extend([pair["dense"].value] if "dense" in pair and run.report.start == "dense" else [])
    for text, keys in sequences.items():
        if without := [run.name for run in runs if keys.isdisjoint(run.perplexities)]:
            yield f"Not all were measured on {text}, which tells nothing of {_listed(without)}."
        if len(keys) > 1:
            yield f"The perplexity on {text} was measured on other sequences in other columns: compare within a column only."
    for text in sequences:
        if len({tuple(sorted(files.values())) for run in runs if (files := run.files_of(text))}) > 1:
            yield f"The perplexity on {text} is on different texts of that name: the file was changed between the runs."
    if any(run.weights.keys() != runs[0].weights.keys() or not run.weights for run in runs):
        yield f"Runs may be of different versions of {runs[0].model}: their reports do not all name the files that they read."
    for (text, *_), dense in values.items():
        if dense and max(dense) > (1 + SAME_TEXT) * min(dense):
            yield f"The dense perplexity on {text} is from {min(dense):.4g} to {max(dense):.4g}: these are different texts."
    yield from _differences_from_dense(runs)
    if not one_target(run.report for run in runs):
        yield (
            "Errors of layers are left out: those of the method sparsellm are relative to the dense stream, of others to the "
            "layer's own output."
        )
    if open_cells:
        yield f"Not finished and left out: {', '.join(open_cells)}."


def _differences_from_dense(runs: Sequence[ComparedRun]) -> Iterator[str]:
    """The runs whose difference from the dense model is not measurable, and those where its error is unknown."""
    for measurable, words in ((False, NOT_MEASURABLE), (None, UNKNOWN_ERROR)):
        names: dict[str, list[str]] = {}
        for run in runs:
            for key, figure in run.figures.items():
                if figure.difference and figure.difference.is_measurable is measurable:
                    names.setdefault(key if isinstance(key, str) else key[0], []).append(run.name)
        for subject, found in names.items():
            yield f"{capitalized(words)} from the dense model on {subject}: {', '.join(dict.fromkeys(found))}."


def _listed(names: Sequence[str]) -> str:
    """The first of some names, and how many more there are."""
    shown = names if len(names) <= LISTED else names[: LISTED - 1]
    more = [f"{len(names) - len(shown)} more"] * (len(names) > len(shown))
    *first, last = [*shown, *more]
    return f"{', '.join(first)} and {last}" if first else last


def _measured(figure: Figure | None) -> str:
    """A figure with its standard error, or a dash."""
    return figure.measured if figure else "-"


def _column_names(keys: Sequence[MeasuredOn]) -> list[str]:
    """The headings of columns of perplexities: the text, with the number and length of its sequences if there are others."""
    texts = [text for text, *_ in keys]
    return [text if texts.count(text) == 1 else f"{text}, {windows} x {length}" for text, windows, length, _ in keys]


def _plain(figure: Figure) -> dict[str, Any]:
    """A figure as plain data, with the error of its change from the dense model."""
    data = asdict(replace(figure, dense=None, deviations=None)) | figure.to_dict()
    del data["deviations"]
    return data | {"dense": _plain(figure.dense) if figure.dense else None}
