"""Tables that compare the cells of a sweep with each other and with published values: CSV, JSON, Markdown, LaTeX."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePath
from typing import Any

from sparsellm.data.json_files import durable
from sparsellm.evaluation.measurements import measure_of
from sparsellm.evaluation.zeroshot import mean
from sparsellm.reports.sweep_file import Sweep, in_words
from sparsellm.reports.sweep_runner import Outcome
from sparsellm.runs.records import SavedReport
from sparsellm.runs.report import strict_json

SEED = "seed"
"""The axis of repetitions: a row of the table is the mean over its cells."""

_LATEX = str.maketrans({"\\": r"\textbackslash{}", "±": r"$\pm$", "×": r"$\times$", **{mark: f"\\{mark}" for mark in "%&_#$"}})


@dataclass(frozen=True)
class Figure:
    """A measured value.

    Attributes:
        value: The value, or its mean over seeds.
        standard_error: Over seeds if there are several, else over sequences or questions; None if unknown.
        published: The value that a paper reports.
        source: Where the paper reports it.
    """

    value: float
    standard_error: float | None = None
    published: float | None = None
    source: str = ""

    @property
    def ratio(self) -> float | None:
        """The measured value divided by the published one."""
        return self.value / self.published if self.published else None

    def __str__(self) -> str:
        """The value with its standard error, then the published value and the ratio."""
        measured = value_with_error(self.value, self.standard_error)
        if self.published is None:
            return measured
        return f"{measured} (paper {value_with_error(self.published)}, ×{self.value / self.published:.2f})"


@dataclass(frozen=True)
class Row:
    """One combination of labels, with the mean over seeds.

    Attributes:
        labels: By axis, without the seeds' axis.
        figures: By measure; empty if no cell is finished.
        seeds: Number of cells in the mean.
        trouble: States of the cells that are not finished, as text.
    """

    labels: Mapping[str, str]
    figures: Mapping[str, Figure]
    seeds: int
    trouble: str = ""


def short_names(texts: Iterable[str]) -> dict[str, str]:
    """By text, the last part of its path, or the full path if several texts have the same last part."""
    texts = list(texts)
    names = [PurePath(text).name for text in texts]
    return {text: name if names.count(name) == 1 else text for text, name in zip(texts, names, strict=True)}


def measures(report: SavedReport) -> dict[str, Figure]:
    """The values in a run's report, by the name of the measure."""
    figures = {
        f"{name} {short}": Figure(x.value, x.standard_error)
        for text, short in short_names(report.perplexity).items()
        for name, x in (("dense perplexity", report.perplexity[text].dense), ("perplexity", report.perplexity[text].pruned))
        if x
    }
    on_tasks = {task: x.pruned for task, x in report.tasks.items() if x.pruned}
    figures |= {f"{measure_of(x.metric)} {task}": Figure(x.value, x.standard_error) for task, x in on_tasks.items()}
    if accuracies := [(x.value, x.standard_error) for x in on_tasks.values() if measure_of(x.metric) == "accuracy"]:
        figures["accuracy mean"] = Figure(*mean(accuracies))
    figures["sparsity"] = Figure(report.totals.sparsity_of_pruned_layers)
    seconds = sum(block.seconds for block in report.blocks)  # includes blocks that an earlier process finished
    figures["seconds"] = Figure(seconds)
    if report.blocks:
        figures["seconds per block"] = Figure(seconds / len(report.blocks))
    return figures


def table(sweep: Sweep, outcomes: Sequence[Outcome]) -> list[Row]:
    """One row for each combination of labels, with the mean over seeds and its standard error."""
    groups: dict[tuple[tuple[str, str], ...], list[Outcome]] = {}
    for outcome in outcomes:
        key = tuple((axis, label) for axis, label in outcome.cell.labels.items() if axis != SEED)
        groups.setdefault(key, []).append(outcome)
    rows = []
    for key, cells in groups.items():
        labels = dict(key)
        finished = [measures(cell.report) for cell in cells if cell.report is not None]
        names = finished[0] if finished else ()
        figures = {name: _mean([values[name] for values in finished if name in values]) for name in names}
        trouble = ", ".join(sorted({cell.state for cell in cells if cell.state != "finished"}))
        rows.append(Row(labels, _with_published(sweep, labels, figures), len(finished), trouble))
    return rows


def _mean(figures: Sequence[Figure]) -> Figure:
    """The mean over seeds with its standard error; a single figure unchanged."""
    if len(figures) == 1:
        return figures[0]
    values = [figure.value for figure in figures]
    mean = statistics.fmean(values)
    return Figure(mean, statistics.stdev(values) / math.sqrt(len(values)) if math.isfinite(mean) else None)


def _with_published(sweep: Sweep, labels: Mapping[str, str], figures: Mapping[str, Figure]) -> dict[str, Figure]:
    """The figures with published values. A published `measure` without the name of a text or task refers to the first."""
    result = dict(figures)
    for entry in sweep.published:
        value = entry.beside(labels)
        name = next((name for name in result if name == entry.measure or name.startswith(f"{entry.measure} ")), None)
        if value is not None and name is not None and result[name].published is None:
            result[name] = replace(result[name], published=value, source=entry.source)
    return result


def to_json(sweep: Sweep, rows: Sequence[Row], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The table as plain data, with the state of every cell."""
    records = [
        asdict(row) | {"figures": {name: asdict(figure) | {"ratio": figure.ratio} for name, figure in row.figures.items()}}
        for row in rows
    ]
    cells = [{"name": x.cell.name, "state": x.state} | ({"error": x.error} if x.error else {}) for x in outcomes]
    return {"title": sweep.title, "note": sweep.note, "rows": records, "cells": cells}


def to_csv(sweep: Sweep, rows: Sequence[Row]) -> str:
    """One line for each figure: labels, measure, value, standard error, seeds, published value, ratio and source."""
    axes = [axis for axis in sweep.axes if axis != SEED]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*axes, "measure", "value", "standard_error", "seeds", "published", "ratio", "source"])
    for row in rows:
        for name, x in row.figures.items():
            labels = [row.labels[axis] for axis in axes]
            writer.writerow([*labels, name, x.value, x.standard_error, row.seeds, x.published, x.ratio, x.source])
    return text.getvalue()


def grid(sweep: Sweep, rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """The printed table.

    Args:
        sweep: With `columns`, the table has a column for each label of that axis and a line for each measure and combination
            of the other labels. Otherwise it has a column for each measure and a line for each combination.
        rows: Rows from `table`.

    Returns:
        The head and the lines.
    """
    names = shown_measures(rows)
    axes = [axis for axis in sweep.axes if axis not in (SEED, sweep.columns)]
    if sweep.columns is None:
        return [*axes, *names], [[row.labels[a] for a in axes] + [_cell(row, name) for name in names] for row in rows]
    labels = sweep.axes[sweep.columns]
    lines: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in rows:
        lines.setdefault(tuple(row.labels[axis] for axis in axes), {})[row.labels[sweep.columns]] = row
    with_measure = len(names) != 1
    head = [*axes, *(["measure"] if with_measure else []), *labels]
    return head, [
        [*key, *([name] if with_measure else []), *(_cell(by_label[x], name) if x in by_label else "" for x in labels)]
        for key, by_label in lines.items()
        for name in names
    ]


def shown_measures(rows: Sequence[Row]) -> list[str]:
    """The measures in a printed table: those of the pruned model on texts and tasks, and measures with published values."""
    names = dict.fromkeys(name for row in rows for name in row.figures)
    published = {name for row in rows for name, figure in row.figures.items() if figure.published is not None}
    others = ("sparsity", "seconds", "seconds per block")
    shown = [name for name in names if name in published or not (name.startswith("dense ") or name in others)]
    return shown or list(names)


def _cell(row: Row, name: str) -> str:
    """A figure as text, or the states of the cells without one."""
    return str(row.figures[name]) if name in row.figures else row.trouble or "-"


def value_with_error(value: float, error: float | None = None) -> str:
    """A value to about four digits, with its standard error to the same number of decimal places."""
    size = abs(value)
    decimals = 0 if size >= 1000 else 1 if size >= 100 else 2 if size >= 1 else 3
    text = f"{value:.3g}" if size < 1 else f"{value:,.{decimals}f}"
    return f"{text} ± {error:,.{decimals}f}" if error else text


def to_markdown(sweep: Sweep, rows: Sequence[Row]) -> str:
    """The table in Markdown, with its sources and missing cells."""
    head, lines = grid(sweep, rows)
    parts = [f"# {sweep.title}", "", *([sweep.note.strip(), ""] if sweep.note else [])]
    parts += [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(line)} |" for line in lines)]
    return "\n".join([*parts, "", *legend(sweep, rows)]) + "\n"


def to_latex(sweep: Sweep, rows: Sequence[Row]) -> str:
    """The table in LaTeX; it uses the package booktabs."""
    head, lines = grid(sweep, rows)
    left_columns = sum(axis not in (SEED, sweep.columns) for axis in sweep.axes)
    first, *body = (" & ".join(cell.translate(_LATEX) for cell in line) + r" \\" for line in (head, *lines))
    alignment = "l" * left_columns + "r" * (len(head) - left_columns)
    parts = [f"% {sweep.title}", rf"\begin{{tabular}}{{{alignment}}}", r"\toprule", first]
    parts += [r"\midrule", *body, r"\bottomrule", r"\end{tabular}", *(f"% {line}" for line in legend(sweep, rows))]
    return "\n".join(parts) + "\n"


def legend(sweep: Sweep, rows: Sequence[Row]) -> list[str]:
    """Sentences below a table: the meaning of its errors, the sources of published values, and the missing cells."""
    seeds = max((row.seeds for row in rows), default=0)
    lines = [f"± is the standard error over {f'{seeds} seeds' if seeds > 1 else 'sequences or questions'}."]
    sources = dict.fromkeys(figure.source for row in rows for figure in row.figures.values() if figure.source)
    lines += [f"Paper: {source}." for source in sources]
    if sweep.smoke:
        lines.append("This is the small form of the sweep, for a trial run: its values cannot be compared with published ones.")
    if missing := [f"{in_words(row.labels)} ({row.trouble})" for row in rows if row.trouble]:
        lines.append(f"Missing or incomplete: {'; '.join(missing)}.")
    return lines


def write_tables(sweep: Sweep, outcomes: Sequence[Outcome], folder: Path) -> list[Path]:
    """Write results.csv, .json, .md and .tex to a folder, each atomically."""
    rows = table(sweep, outcomes)
    contents = {
        folder / "results.csv": to_csv(sweep, rows),
        folder / "results.json": strict_json(to_json(sweep, rows, outcomes)) + "\n",
        folder / "results.md": to_markdown(sweep, rows),
        folder / "results.tex": to_latex(sweep, rows),
    }
    for file, text in contents.items():
        durable(file, text.encode())
    return list(contents)
