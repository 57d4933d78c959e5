"""Outputs and sweeps side by side: perplexity, accuracy, zeros, size, and the layers whose errors differ most."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain
from pathlib import Path, PurePath
from typing import Any

from sparsellm.checkpoints.files import REPORT
from sparsellm.errors import InvalidSetting, capitalized, plural
from sparsellm.evaluation.differences import NOT_MEASURABLE
from sparsellm.evaluation.results import Perplexity
from sparsellm.extensions.studies.measures import Figure, Ranking, Table, figure_of, measures, rank_figures, short_names
from sparsellm.extensions.studies.sweep_runner import CellFolder, read_outcomes, saved_sweep
from sparsellm.outputs.folder import check_results, is_sweep
from sparsellm.outputs.report import NOT_PRUNED, Report, When, load_report
from sparsellm.recipes.recipe import Recipe
from sparsellm.runtime.memory import human_bytes

WEIGHT_FILES = (".safetensors", ".bin")
"""Endings of the files that count as the size of a model."""

TABLE_LAYERS, COLUMNS = 5, 6
"""Layers in the table of errors, and the most runs that it has columns for."""

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
        bytes: Size of its weight files; None if the model was not kept.
    """

    name: str
    report: Report
    bytes: int | None

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


@dataclass(frozen=True)
class Comparison:
    """Runs of one model side by side.

    Attributes:
        folders: The folders that were read, as they were given, so that the command that compares them again can be run.
        notes: What limits the comparison, as sentences.
    """

    model: str
    folders: tuple[str, ...]
    runs: tuple[ComparedRun, ...]
    notes: tuple[str, ...]

    def tables(self) -> dict[str, Table]:
        """The tables by title: all runs below the dense model, how they differ, and the layers whose errors differ most."""
        columns = list(dict.fromkeys(key for run in self.runs for key in run.perplexities))
        tasks = list(dict.fromkeys(task for run in self.runs for task in run.report.tasks))
        head = ["run", "method", "sparsity", "zeros"]
        for name in _column_names(columns):
            head += [name, "change, %"]
        figures = [run.figures for run in self.runs]
        dense = {key: figure.dense for by_key in reversed(figures) for key, figure in by_key.items() if figure.dense}
        line = [", ".join(dict.fromkeys(run.report.start for run in self.runs)), "", "", ""]
        line += [cell for key in columns for cell in (_measured(dense.get(key)), "")]
        lines = [[*line, *(_measured(dense.get(task)) for task in tasks), "", ""]]
        for run, by_key in zip(self.runs, figures, strict=True):
            totals, errors = run.report.totals, [error for error in run.errors.values() if math.isfinite(error)]
            zeros = f"{100 * totals.sparsity_of_pruned_layers:.3g}%"
            pattern = getattr(run.report.recipe, "sparsity", None) or run.report.n_m or zeros  # a recovery's has none
            line = [run.name, run.method, str(pattern), f"{100 * totals.sparsity_of_model:.1f} %"]
            for key in columns:
                change = by_key[key].difference if key in by_key else None
                line += [_measured(by_key.get(key)), change.short.removesuffix(" %") if change else "-"]
            line += [_measured(by_key.get(task)) for task in tasks]
            line += [
                f"{statistics.median(errors):.3g}" if errors else "-",
                "-" if run.bytes is None else human_bytes(run.bytes),
            ]
            lines.append(line)
        layers, differences = self._layers(), self._differences([*columns, *tasks])
        shown = {"Differences between the runs": differences} if len(differences[0]) > 1 else {}
        shown |= {"Layers whose errors differ most": (["layer", *(run.name for run in self.runs)], layers)} if layers else {}
        return {f"Pruned from {self.model}": ([*head, *tasks, "error", "size"], lines)} | shown

    def _differences(self, keys: Sequence[MeasuredOn | str]) -> Table:
        """How the runs differ from the best one, on each text and task, which is called so only if it is measurable."""
        figures = [(run.name, run.figures) for run in self.runs]
        found = {key: rank_figures({name: by_key[key] for name, by_key in figures if key in by_key}) for key in keys}
        rankings = {key: x for key, x in found.items() if x and x.differences and (x.figure.share or not isinstance(key, str))}
        head = ["run", *_column_names([key for key in rankings if not isinstance(key, str)])]
        head += [key for key in rankings if isinstance(key, str)]

        def cell(name: str, ranking: Ranking) -> str:
            if name == ranking.best:
                return ranking.mark
            return str(ranking.differences.get(name) or "-")

        return head, [[run.name, *(cell(run.name, ranking) for ranking in rankings.values())] for run in self.runs]

    def _layers(self) -> list[list[str]]:
        """The layers with the largest ratio between the errors of two runs, and the error of each run."""
        if len(self.runs) > COLUMNS:
            return []
        by_run = [run.errors for run in self.runs]
        spread: dict[str, float] = {}
        for name in dict.fromkeys(name for errors in by_run for name in errors):
            values = [errors[name] for errors in by_run if 0 < errors.get(name, 0) < math.inf]
            spread[name] = max(values) / min(values) if len(values) > 1 else 1.0
        worst = sorted((name for name in spread if spread[name] > 1), key=lambda name: -spread[name])[:TABLE_LAYERS]
        return [[name, *(f"{errors[name]:.3g}" if name in errors else "dense" for errors in by_run)] for name in worst]

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data for JSON."""
        runs = [
            {
                "name": run.name,
                "recipe": run.report.recipe.model_dump(mode="json"),
                "figures": {name: _plain(figure) for name, figure in measures(run.report).items()},
                "sequences": [list(key) for key in run.perplexities],
                "sparsity_of_model": run.report.totals.sparsity_of_model,
                "bytes": run.bytes,
                "errors": run.errors,
            }
            for run in self.runs
        ]
        return {"model": self.model, "notes": list(self.notes), "runs": runs}


def read_comparison(folders: Sequence[str | Path]) -> Comparison:
    """Read the reports of outputs and sweeps.

    Args:
        folders: Two or more that `prune`, `recover` or `sweep` wrote, together with at least two finished runs.

    Raises:
        InvalidSetting: Fewer than two folders, a folder holds neither, fewer than two runs are finished, or the runs are of
            different models.
        BadCheckpoint: A report is damaged.
    """
    if twice := next((folder for number, folder in enumerate(folders) if folder in folders[:number]), None):
        raise InvalidSetting(f"{twice} is named twice. Name every folder once.")
    names, open_cells = short_names([str(folder) for folder in folders]), list[str]()
    runs = [run for folder in folders for run in _read(check_results(folder), names[str(folder)], open_cells)]
    if len(folders) < 2 or len(runs) < 2:
        got = f"{plural(len(folders), 'folder')} with {plural(len(runs), 'finished run')}"
        raise InvalidSetting(f"A comparison is of two folders or more, got {got}. Name another one, or one alone for its page.")
    _check_model(runs)
    return Comparison(runs[0].model, tuple(map(str, folders)), tuple(runs), tuple(_notes(runs, open_cells)))


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
        report = load_report(path)
        yield ComparedRun(name, report, _bytes(path, report))
        return
    for outcome in read_outcomes(saved_sweep(path), path):
        label = f"{name}: {outcome.cell.name}"
        if outcome.report is None:
            open_cells.append(f"{label} ({outcome.state})")
        else:
            model = CellFolder(path, outcome.cell).model
            kept = (model / REPORT).is_file()
            yield ComparedRun(label, outcome.report, _bytes(model, load_report(model)) if kept else None)


def _bytes(path: Path, report: Report) -> int:
    """Size of the weight files that a report lists."""
    files = [path / file for file in report.files if file.endswith(WEIGHT_FILES)]
    return sum(file.stat().st_size for file in files if file.is_file())


def _notes(runs: Sequence[ComparedRun], open_cells: Sequence[str]) -> Iterator[str]:
    """The limits of a comparison: other sequences or texts, other definitions of the error, unfinished cells."""
    sequences: dict[str, set[MeasuredOn]] = {}
    values: dict[MeasuredOn, list[float]] = {}
    for run in runs:
        for key, pair in run.perplexities.items():
            sequences.setdefault(key[0], set()).add(key)
            values.setdefault(key, []).extend([pair["dense"].value] if "dense" in pair and run.report.start == "dense" else [])
    for text, keys in sequences.items():
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
    ours = {run.method.startswith("sparsellm") for run in runs if not run.report.is_recovery}
    if len(ours) > 1:
        yield "Errors of the method sparsellm are relative to the dense stream, those of others to the layer's own output."
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
