"""The cells of a sweep side by side, with a paper's figures beside them: as rows, CSV, JSON, Markdown, LaTeX."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePath
from typing import Any

from sparsellm.evaluation.zeroshot import mean
from sparsellm.pruning.journal import durable
from sparsellm.reports.sweep_file import Sweep, in_words
from sparsellm.reports.sweep_runner import Outcome
from sparsellm.runs.records import SavedReport
from sparsellm.runs.report import strict_json

SEED = "seed"
"""The axis whose cells are repetitions of one another: a row of the table is their mean."""

_LATEX = str.maketrans({"\\": r"\textbackslash{}", "±": r"$\pm$", "×": r"$\times$", **{mark: f"\\{mark}" for mark in "%&_#$"}})


@dataclass(frozen=True)
class Figure:
    """A measured figure.

    standard_error: over seeds where there are several, else over windows or questions; None where neither is known.
    published: what a paper prints for it. source: where.
    """

    value: float
    standard_error: float | None = None
    published: float | None = None
    source: str = ""

    @property
    def ratio(self) -> float | None:
        """Ours over the paper's."""
        return self.value / self.published if self.published else None

    def __str__(self) -> str:
        """Ours with its standard error, then the paper's and their ratio."""
        ours = value_with_error(self.value, self.standard_error)
        if self.published is None:
            return ours
        return f"{ours} (paper {value_with_error(self.published)}, ×{self.value / self.published:.2f})"


@dataclass(frozen=True)
class Row:
    """The cells of one place in the sweep, those of all seeds together.

    labels: by axis, without the seeds'. figures: by measure; empty where no cell is finished. seeds: how many cells are in the
    mean. trouble: the states of the cells that are not finished.
    """

    labels: Mapping[str, str]
    figures: Mapping[str, Figure]
    seeds: int
    trouble: str = ""


def short_names(texts: Iterable[str]) -> dict[str, str]:
    """By text, the last part of its path, or the whole where several texts end in the same part."""
    texts = list(texts)
    last = [PurePath(text).name for text in texts]
    return {text: name if last.count(name) == 1 else text for text, name in zip(texts, last, strict=True)}


def measures(report: SavedReport) -> dict[str, Figure]:
    """What a run's report measures, by name."""
    figures = {
        f"{name} {short}": Figure(x.value, x.standard_error)
        for text, short in short_names(report.perplexity).items()
        for name, x in (("dense perplexity", report.perplexity[text].dense), ("perplexity", report.perplexity[text].pruned))
        if x
    }
    answered = {task: (x.pruned.value, x.pruned.standard_error) for task, x in report.tasks.items() if x.pruned}
    figures |= {f"accuracy {task}": Figure(*accuracy) for task, accuracy in answered.items()}
    if answered:
        figures["accuracy mean"] = Figure(*mean(answered.values()))
    figures["sparsity"] = Figure(report.totals.sparsity_of_pruned_layers)
    seconds = sum(block.seconds for block in report.blocks)  # also of blocks that an earlier process finished
    figures["seconds"] = Figure(seconds)
    if report.blocks:
        figures["seconds per block"] = Figure(seconds / len(report.blocks))
    return figures


def table(sweep: Sweep, outcomes: Sequence[Outcome]) -> list[Row]:
    """A row for every place of the sweep, the cells of several seeds as one: their mean, and its standard error."""
    places: dict[tuple[tuple[str, str], ...], list[Outcome]] = {}
    for outcome in outcomes:
        place = tuple((axis, label) for axis, label in outcome.cell.labels.items() if axis != SEED)
        places.setdefault(place, []).append(outcome)
    rows = []
    for place, cells in places.items():
        labels = dict(place)
        done = [measures(cell.report) for cell in cells if cell.report is not None]
        figures = {name: _mean([found[name] for found in done if name in found]) for name in (done[0] if done else ())}
        trouble = ", ".join(sorted({cell.state for cell in cells if cell.state != "finished"}))
        rows.append(Row(labels, _with_published(sweep, labels, figures), len(done), trouble))
    return rows


def _mean(figures: Sequence[Figure]) -> Figure:
    """The mean over seeds with its standard error; a single figure as it is."""
    if len(figures) == 1:
        return figures[0]
    values = [figure.value for figure in figures]
    mean = statistics.fmean(values)
    return Figure(mean, statistics.stdev(values) / math.sqrt(len(values)) if math.isfinite(mean) else None)


def _with_published(sweep: Sweep, labels: Mapping[str, str], figures: Mapping[str, Figure]) -> dict[str, Figure]:
    """The figures with the papers' beside them. A `measure` without a text's or task's name means the first."""
    result = dict(figures)
    for entry in sweep.published:
        value = entry.beside(labels)
        name = next((name for name in result if name == entry.measure or name.startswith(f"{entry.measure} ")), None)
        if value is not None and name is not None and result[name].published is None:
            result[name] = replace(result[name], published=value, source=entry.source)
    return result


def to_json(sweep: Sweep, rows: Sequence[Row], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The table as plain data, with the state of every cell."""
    lines = [
        asdict(row) | {"figures": {name: asdict(figure) | {"ratio": figure.ratio} for name, figure in row.figures.items()}}
        for row in rows
    ]
    cells = [{"name": x.cell.name, "state": x.state} | ({"error": x.error} if x.error else {}) for x in outcomes]
    return {"title": sweep.title, "note": sweep.note, "rows": lines, "cells": cells}


def to_csv(sweep: Sweep, rows: Sequence[Row]) -> str:
    """One line for every figure: its place, measure, value, standard error, seeds, the paper's, their ratio, the source."""
    axes = [axis for axis in sweep.axes if axis != SEED]
    text = io.StringIO()
    lines = csv.writer(text, lineterminator="\n")
    lines.writerow([*axes, "measure", "value", "standard_error", "seeds", "published", "ratio", "source"])
    for row in rows:
        for name, x in row.figures.items():
            place = [row.labels[axis] for axis in axes]
            lines.writerow([*place, name, x.value, x.standard_error, row.seeds, x.published, x.ratio, x.source])
    return text.getvalue()


def grid(sweep: Sweep, rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """The table as people read it: head and lines.

    Args:
        sweep: With `columns`, a line for each place off that axis and measure, and a column for each of the axis's labels;
            otherwise a line for each place and a column for each measure.
        rows: What `table` gave.
    """
    names = shown_measures(rows)
    axes = [axis for axis in sweep.axes if axis not in (SEED, sweep.columns)]
    if sweep.columns is None:
        return [*axes, *names], [[row.labels[a] for a in axes] + [_cell(row, name) for name in names] for row in rows]
    labels = sweep.axes[sweep.columns]
    lines: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in rows:
        lines.setdefault(tuple(row.labels[axis] for axis in axes), {})[row.labels[sweep.columns]] = row
    several = len(names) != 1
    head = [*axes, *(["measure"] if several else []), *labels]
    return head, [
        [*place, *([name] if several else []), *(_cell(of_label[x], name) if x in of_label else "" for x in labels)]
        for place, of_label in lines.items()
        for name in names
    ]


def shown_measures(rows: Sequence[Row]) -> list[str]:
    """What a printed table shows: perplexities and accuracies of the pruned model, and whatever a paper prints beside."""
    every = dict.fromkeys(name for row in rows for name in row.figures)
    published = {name for row in rows for name, figure in row.figures.items() if figure.published is not None}
    return [name for name in every if name.startswith(("perplexity ", "accuracy ")) or name in published] or list(every)


def _cell(row: Row, name: str) -> str:
    """A figure as text, or why there is none."""
    return str(row.figures[name]) if name in row.figures else row.trouble or "-"


def value_with_error(value: float, error: float | None = None) -> str:
    """A figure to about four digits, its standard error to as many decimal places."""
    size = abs(value)
    places = 0 if size >= 1000 else 1 if size >= 100 else 2 if size >= 1 else 3
    text = f"{value:.3g}" if size < 1 else f"{value:,.{places}f}"
    return f"{text} ± {error:,.{places}f}" if error else text


def to_markdown(sweep: Sweep, rows: Sequence[Row]) -> str:
    """The table in Markdown, with its sources and what is missing."""
    head, lines = grid(sweep, rows)
    text = [f"# {sweep.title}", "", *([sweep.note.strip(), ""] if sweep.note else [])]
    text += [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(line)} |" for line in lines)]
    return "\n".join([*text, "", *legend(sweep, rows)]) + "\n"


def to_latex(sweep: Sweep, rows: Sequence[Row]) -> str:
    """The table in LaTeX, for the package booktabs."""
    head, lines = grid(sweep, rows)
    left = sum(axis not in (SEED, sweep.columns) for axis in sweep.axes)
    names, *body = (" & ".join(cell.translate(_LATEX) for cell in line) + r" \\" for line in (head, *lines))
    text = [f"% {sweep.title}", rf"\begin{{tabular}}{{{'l' * left}{'r' * (len(head) - left)}}}", r"\toprule", names]
    text += [r"\midrule", *body, r"\bottomrule", r"\end{tabular}", *(f"% {line}" for line in legend(sweep, rows))]
    return "\n".join(text) + "\n"


def legend(sweep: Sweep, rows: Sequence[Row]) -> list[str]:
    """Sentences: what the figures' errors are, where the papers' are printed, and which cells are missing."""
    seeds = max((row.seeds for row in rows), default=0)
    lines = [f"± is the standard error over {f'{seeds} seeds' if seeds > 1 else 'windows or questions'}."]
    sources = dict.fromkeys(figure.source for row in rows for figure in row.figures.values() if figure.source)
    lines += [f"Paper: {source}." for source in sources]
    if sweep.smoke:
        lines.append("This is the sweep's small form, for a try: no figure of a paper belongs beside it.")
    if missing := [f"{in_words(row.labels)} ({row.trouble})" for row in rows if row.trouble]:
        lines.append(f"Missing or incomplete: {'; '.join(missing)}.")
    return lines


def write_tables(sweep: Sweep, outcomes: Sequence[Outcome], folder: Path) -> list[Path]:
    """Write results.csv, .json, .md and .tex into a folder, each whole or as it was before."""
    rows = table(sweep, outcomes)
    texts = {
        "csv": to_csv(sweep, rows),
        "json": strict_json(to_json(sweep, rows, outcomes)) + "\n",
        "md": to_markdown(sweep, rows),
        "tex": to_latex(sweep, rows),
    }
    for ending, text in texts.items():
        durable(folder / f"results.{ending}", text.encode())
    return [folder / f"results.{ending}" for ending in texts]
