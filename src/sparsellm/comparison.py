"""The cells of a sweep side by side, with a paper's figures beside them: as rows, CSV, JSON, Markdown, LaTeX."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from sparsellm.journal import durable
from sparsellm.report import strict_json
from sparsellm.sweep_file import Sweep, in_words
from sparsellm.sweeping import Outcome
from sparsellm.zeroshot import mean

SEED = "seed"
"""The axis whose cells are repetitions of one another: a row of the table is their mean."""


@dataclass(frozen=True)
class Figure:
    """A measured figure. error: its standard error, over seeds where there are several, else over windows or questions; None
    where neither is known. published: what a paper prints for it. source: where."""

    value: float
    error: float | None = None
    published: float | None = None
    source: str = ""

    @property
    def ratio(self) -> float | None:
        """Ours over the paper's."""
        return None if not self.published else self.value / self.published


@dataclass(frozen=True)
class Row:
    """What the cells at one place came to. labels: by axis but the seeds'. figures: by measure; none where no cell is finished.
    seeds: how many cells are in the mean. trouble: what became of cells that are not."""

    labels: Mapping[str, str]
    figures: Mapping[str, Figure]
    seeds: int
    trouble: str = ""


def measures(report: Mapping[str, Any]) -> dict[str, tuple[float, float | None]]:
    """What a run's report measures, by name, each with its standard error. Of a text that is a file, the file's name."""
    found: dict[str, tuple[float, float | None]] = {}
    last = [PurePath(text).name for text in report["perplexity"]]
    for text, values in report["perplexity"].items():
        short = PurePath(text).name
        shown = short if last.count(short) == 1 else text
        for when, name in (("dense", "dense perplexity"), ("pruned", "perplexity")):
            if values.get(when):
                found[f"{name} {shown}"] = _number(values[when]["value"]), values[when]["standard_error"]
    answered = {task: x["pruned"] for task, x in report.get("tasks", {}).items() if "pruned" in x}
    for task, x in answered.items():
        found[f"accuracy {task}"] = x["value"], x["standard_error"]
    if answered:
        found["accuracy mean"] = mean(answered)
    blocks = report["blocks"]
    found["sparsity"] = report["totals"]["sparsity_of_pruned_layers"], None
    found["seconds"] = sum(block["seconds"] for block in blocks), None  # also of blocks that an earlier process finished
    if blocks:
        found["seconds per block"] = found["seconds"][0] / len(blocks), None
    return found


def table(sweep: Sweep, outcomes: Sequence[Outcome]) -> list[Row]:
    """A row for every place of the sweep, the cells of several seeds as one: their mean, and its standard error."""
    places: dict[tuple[tuple[str, str], ...], list[Outcome]] = {}
    for outcome in outcomes:
        labels = tuple((axis, label) for axis, label in outcome.cell.labels.items() if axis != SEED)
        places.setdefault(labels, []).append(outcome)
    rows = []
    for labels, cells in places.items():
        done = [measures(cell.report) for cell in cells if cell.report is not None]
        figures = {name: _mean([found[name] for found in done if name in found]) for name in (done[0] if done else ())}
        trouble = ", ".join(sorted({cell.state for cell in cells if cell.state != "finished"}))
        rows.append(Row(dict(labels), _beside(sweep, dict(labels), figures), len(done), trouble))
    return rows


def _mean(values: Sequence[tuple[float, float | None]]) -> Figure:
    """The mean over seeds with its standard error; of a single one its own."""
    if len(values) == 1:
        return Figure(*values[0])
    found = [value for value, _ in values]
    mean = statistics.fmean(found)
    return Figure(mean, statistics.stdev(found) / math.sqrt(len(found)) if math.isfinite(mean) else None)


def _beside(sweep: Sweep, labels: Mapping[str, str], figures: Mapping[str, Figure]) -> dict[str, Figure]:
    """The figures with the papers' beside them. A `measure` without a text's or task's name means the first."""
    found = dict(figures)
    for published in sweep.published:
        other = published.beside(labels)
        name = next((name for name in found if name == published.measure or name.startswith(f"{published.measure} ")), None)
        if other is not None and name is not None and found[name].published is None:
            found[name] = Figure(found[name].value, found[name].error, other, published.source)
    return found


def _number(value: Any) -> float:
    """A figure of a report, where infinity is a word."""
    return float(value)


def to_json(sweep: Sweep, rows: Sequence[Row], outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The table as plain data, with the state of every cell."""
    return {
        "title": sweep.title,
        "note": sweep.note,
        "rows": [_row(row) for row in rows],
        "cells": [{"name": x.cell.name, "state": x.state} | ({"error": x.error} if x.error else {}) for x in outcomes],
    }


def _row(row: Row) -> dict[str, Any]:
    """A row as plain data."""
    figures: dict[str, dict[str, Any]] = {
        name: {"value": x.value, "standard_error": x.error}
        | ({"published": x.published, "ratio": x.ratio, "source": x.source} if x.published is not None else {})
        for name, x in row.figures.items()
    }
    return {"labels": dict(row.labels), "seeds": row.seeds, "figures": figures} | (
        {"trouble": row.trouble} if row.trouble else {}
    )


def to_csv(sweep: Sweep, rows: Sequence[Row]) -> str:
    """One line for every figure: its place, measure, value, standard error, seeds, the paper's, their ratio, the source."""
    axes = [axis for axis in sweep.axes if axis != SEED]
    made = io.StringIO()
    lines = csv.writer(made, lineterminator="\n")
    lines.writerow([*axes, "measure", "value", "standard_error", "seeds", "published", "ratio", "source"])
    for row in rows:
        for name, x in row.figures.items():
            numbers = [x.value, x.error, row.seeds, x.published, x.ratio, x.source]
            lines.writerow([*(row.labels[axis] for axis in axes), name, *("" if n is None else n for n in numbers)])
    return made.getvalue()


def grid(sweep: Sweep, rows: Sequence[Row], shown: Sequence[str] | None = None) -> tuple[list[str], list[list[str]]]:
    """The table as people read it: head and lines. With `columns` a line for each place off that axis and measure, and a column
    for each of the axis's labels; else a line for each place and a column for each measure. shown: which measures."""
    names = shown or shown_measures(rows)
    axes = [axis for axis in sweep.axes if axis not in (SEED, sweep.columns)]
    if sweep.columns is None:
        head = [*axes, *names]
        return head, [[*(row.labels[a] for a in axes), *(_cell(row, name) for name in names)] for row in rows]
    across = sweep.axes[sweep.columns]
    lines: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in rows:
        lines.setdefault(tuple(row.labels[axis] for axis in axes), {})[row.labels[sweep.columns]] = row
    head = [*axes, *([] if len(names) == 1 else ["measure"]), *across]
    return head, [
        [*at, *([] if len(names) == 1 else [name]), *(_cell(at_label[x], name) if x in at_label else "" for x in across)]
        for at, at_label in lines.items()
        for name in names
    ]


def shown_measures(rows: Sequence[Row]) -> list[str]:
    """What a printed table shows: perplexities and accuracies of the pruned model, and whatever a paper prints beside."""
    every = list(dict.fromkeys(name for row in rows for name in row.figures))
    beside = {name for row in rows for name, figure in row.figures.items() if figure.published is not None}
    found = [name for name in every if name.startswith(("perplexity ", "accuracy ")) or name in beside]
    return found or every


def _cell(row: Row, name: str) -> str:
    """A figure as text: ours with its error, then the paper's and their ratio."""
    figure = row.figures.get(name)
    if figure is None:
        return row.trouble or "-"
    ours = shown_number(figure.value) + (f" ± {shown_error(figure.value, figure.error)}" if figure.error else "")
    if figure.published is None:
        return ours
    return f"{ours} (paper {shown_number(figure.published)}, ×{figure.value / figure.published:.2f})"


def shown_number(value: float) -> str:
    """A figure to about four digits."""
    if not math.isfinite(value):
        return str(value)
    return (
        f"{value:,.0f}"
        if abs(value) >= 1000
        else f"{value:.1f}"
        if abs(value) >= 100
        else f"{value:.3g}"
        if abs(value) < 1
        else f"{value:.2f}"
    )


def shown_error(value: float, error: float) -> str:
    """A standard error to as many places as its figure."""
    places = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2 if abs(value) >= 1 else 3
    return f"{error:,.{places}f}"


def to_markdown(sweep: Sweep, rows: Sequence[Row]) -> str:
    """The table in Markdown, with its sources and what is missing."""
    head, lines = grid(sweep, rows)
    text = [f"# {sweep.title}", "", *([sweep.note.strip(), ""] if sweep.note else [])]
    text += [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    text += [f"| {' | '.join(line)} |" for line in lines]
    text += ["", _legend(sweep, rows)]
    return "\n".join(text).rstrip() + "\n"


def to_latex(sweep: Sweep, rows: Sequence[Row]) -> str:
    """The table in LaTeX, for the package booktabs."""
    head, lines = grid(sweep, rows)
    left = sum(axis not in (SEED, sweep.columns) for axis in sweep.axes)
    text = [f"% {sweep.title}", rf"\begin{{tabular}}{{{'l' * left}{'r' * (len(head) - left)}}}", r"\toprule"]
    text += [" & ".join(map(_tex, head)) + r" \\", r"\midrule"]
    text += [" & ".join(map(_tex, line)) + r" \\" for line in lines]
    text += [r"\bottomrule", r"\end{tabular}", *(f"% {line}" for line in _legend(sweep, rows).splitlines())]
    return "\n".join(text).rstrip() + "\n"


def _legend(sweep: Sweep, rows: Sequence[Row]) -> str:
    """What the figures' errors are, where the papers' are printed, and which cells are missing."""
    several = max((row.seeds for row in rows), default=0)
    over = f"over {several} seeds" if several > 1 else "over windows or questions"
    told = [f"± is the standard error {over}."]
    told += [
        f"Paper: {source}." for source in dict.fromkeys(f.source for row in rows for f in row.figures.values() if f.source)
    ]
    if sweep.smoke:
        told.append("This is the sweep's small form, for a try: no figure of a paper belongs beside it.")
    if missing := [f"{in_words(row.labels)} ({row.trouble})" for row in rows if row.trouble]:
        told.append(f"Missing or incomplete: {'; '.join(missing)}.")
    return "\n".join(told)


def _tex(text: str) -> str:
    """Text as LaTeX prints it."""
    marks = {
        "\\": r"\textbackslash{}",
        "%": r"\%",
        "&": r"\&",
        "_": r"\_",
        "#": r"\#",
        "$": r"\$",
        "±": r"$\pm$",
        "×": r"$\times$",
    }
    return "".join(marks.get(letter, letter) for letter in text)


def write_tables(sweep: Sweep, outcomes: Sequence[Outcome], folder: Path) -> list[Path]:
    """Write results.csv, .json, .md and .tex into a folder, each whole or as it was before."""
    rows = table(sweep, outcomes)
    texts = {
        "csv": to_csv(sweep, rows),
        "json": strict_json(to_json(sweep, rows, outcomes)) + "\n",
        "md": to_markdown(sweep, rows),
        "tex": to_latex(sweep, rows),
    }
    files = [folder / f"results.{ending}" for ending in texts]
    for file, text in zip(files, texts.values(), strict=True):
        durable(file, text.encode())
    return files
