"""Tables that compare the cells of a sweep with each other and with published values, and the forms of a packed model."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from sparsellm.errors import capitalized
from sparsellm.extensions.packed.record import CEILING, PACKED, TORCH, Bench, Speed
from sparsellm.extensions.studies.measures import (
    OF_RUN,
    OF_SIZE,
    PACKED_SIZE,
    SIZE,
    Figure,
    Table,
    error_legend,
    mean_over_seeds,
    measures,
    spoken,
)
from sparsellm.extensions.studies.sweep_file import Sweep, labels_in_words
from sparsellm.extensions.studies.sweep_runner import Outcome
from sparsellm.runtime.memory import human_bytes
from sparsellm.texts.json_files import durable, strict_json

SEED_AXIS = "seed"
"""The axis of repetitions: a row of the table is the mean over its cells."""


@dataclass(frozen=True)
class Row:
    """One combination of labels, with the mean over seeds.

    Attributes:
        labels: By axis, without the seeds' axis.
        figures: By measure; empty if no cell is finished.
        seeds: Number of cells in the mean.
        trouble: States of the cells that are not finished, as text.
        start: What the model was before the run.
    """

    labels: Mapping[str, str]
    figures: Mapping[str, Figure]
    seeds: int
    trouble: str = ""
    start: str = "dense"


def table(sweep: Sweep, outcomes: Sequence[Outcome]) -> list[Row]:
    """One row for each combination of labels, with the mean over seeds and its standard error."""
    groups: dict[tuple[tuple[str, str], ...], list[Outcome]] = {}
    for outcome in outcomes:
        key = tuple((axis, label) for axis, label in outcome.cell.labels.items() if axis != SEED_AXIS)
        groups.setdefault(key, []).append(outcome)
    rows = []
    for key, cells in groups.items():
        labels = dict(key)
        finished = [measures(cell.report) for cell in cells if cell.report is not None]
        names = finished[0] if finished else ()
        figures = {name: mean_over_seeds([values[name] for values in finished if name in values]) for name in names}
        trouble = ", ".join(sorted({cell.state for cell in cells if cell.state != "finished"}))
        start = next((cell.report.start for cell in cells if cell.report is not None), "dense")
        rows.append(Row(labels, _with_published(sweep, labels, figures), len(finished), trouble, start))
    return rows


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
        asdict(replace(row, figures={})) | {"figures": {name: figure.to_dict() for name, figure in row.figures.items()}}
        for row in rows
    ]
    cells = [{"name": x.cell.name, "state": x.state} | ({"error": x.error} if x.error else {}) for x in outcomes]
    return {"title": sweep.title, "note": sweep.note, "rows": records, "cells": cells}


def to_csv(sweep: Sweep, rows: Sequence[Row]) -> str:
    """One line for each figure: labels, measure, the number of seeds, and the entries of `Figure.to_dict`."""
    axes = [axis for axis in sweep.axes if axis != SEED_AXIS]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*axes, "measure", "seeds", *Figure(0.0).to_dict()])
    for row in rows:
        for name, figure in row.figures.items():
            writer.writerow([*(row.labels[axis] for axis in axes), name, row.seeds, *figure.to_dict().values()])
    return text.getvalue()


def grid(sweep: Sweep, rows: Sequence[Row]) -> Table:
    """The printed table, with a line for each dense model.

    Args:
        sweep: With `columns`, the table has a column for each label of that axis and a line for each measure and combination
            of the other labels. Otherwise it has a column for each measure and a line for each combination.
    """
    names = shown_measures(rows)
    rows = _with_dense(sweep, rows)
    axes = [axis for axis in sweep.axes if axis not in (SEED_AXIS, sweep.columns)] or [""]
    if sweep.columns is None:
        return [*axes, *map(spoken, names)], [[*_left(row, axes), *(_cell(row, name) for name in names)] for row in rows]
    labels = sweep.axes[sweep.columns]
    lines: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in rows:
        lines.setdefault(tuple(_left(row, axes)), {})[row.labels[sweep.columns]] = row
    with_measure = len(names) != 1
    head = [*axes, *(["measure"] if with_measure else []), *labels]
    made: list[list[str]] = []
    sizes: list[str] = []  # of the last line of sizes, which is not repeated
    for key, by_label in lines.items():
        for name in names:
            cells = [_cell(by_label[x], name) if x in by_label else "" for x in labels]
            known = any(name in row.figures or (row.trouble and name not in OF_SIZE) for row in by_label.values())
            if known and not (name == SIZE and cells == sizes):
                made.append([*key, *([spoken(name)] if with_measure else []), *cells])
            sizes = cells if name == SIZE else sizes
    return head, made


def _left(row: Row, axes: Sequence[str]) -> list[str]:
    """The labels of a row on these axes."""
    return [row.labels.get(axis, "pruned") for axis in axes]


def _with_dense(sweep: Sweep, rows: Sequence[Row]) -> list[Row]:
    """The rows, and before the first one of each dense model a row with that model's figures.

    It has the labels on which the dense figures depend, such as the model and the sequence length, and `start` on another axis.
    """
    with_dense = [(row, {name: x.dense for name, x in row.figures.items() if x.dense}) for row in rows]
    kept = [axis for axis in sweep.axes if axis != SEED_AXIS]
    for axis in reversed(kept):
        fewer = [other for other in kept if other != axis]
        values = {(*_left(row, fewer), str([f"{x.value:.6g}" for x in dense.values()])) for row, dense in with_dense if dense}
        if axis != "model" and len(values) == len({key[:-1] for key in values}):
            kept = fewer
    result: dict[tuple[str, ...], Row] = {}
    for row, dense in with_dense:
        labels = {axis: label if axis in (*kept, sweep.columns) else "" for axis, label in row.labels.items()}
        if free := [axis for axis, label in labels.items() if not label]:
            labels[free[0]] = row.start
        elif left := [axis for axis in labels if axis != sweep.columns]:
            labels[left[0]] += f", {row.start}"
        else:
            labels[""] = row.start
        if dense:
            size = {
                name: figure for name, figure in row.figures.items() if name == SIZE
            }  # zeros are written like other numbers
            result.setdefault(("dense", *labels.values()), Row(labels, dense | size, row.seeds))
        result[tuple(row.labels.values())] = row
    return list(result.values())


def shown_measures(rows: Sequence[Row]) -> list[str]:
    """The measures in a printed table: those on texts and tasks, those with published values, and sizes."""
    names = dict.fromkeys(name for row in rows for name in row.figures)
    published = {name for row in rows for name, figure in row.figures.items() if figure.published is not None}
    chosen = [name for name in names if name in published or name not in OF_RUN]
    return [name for name in names if name in chosen or name in OF_SIZE] if chosen else list(names)


def _cell(row: Row, name: str) -> str:
    """A figure as text, or the states of the cells without one."""
    return str(row.figures[name]) if name in row.figures else row.trouble or "-"


def to_markdown(sweep: Sweep, rows: Sequence[Row]) -> str:
    """The table in Markdown, with its sources and missing cells."""
    head, lines = grid(sweep, rows)
    parts = [f"# {sweep.title}", "", *([sweep.note.strip(), ""] if sweep.note else [])]
    parts += [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(line)} |" for line in lines)]
    return "\n".join([*parts, "", *legend(sweep, rows)]) + "\n"


def legend(sweep: Sweep, rows: Sequence[Row]) -> list[str]:
    """Sentences below a table: the meaning of its errors, the sources of published values, and the missing cells."""
    figures = [figure for row in rows for figure in row.figures.values()]
    shown = shown_measures(rows)
    subjects = " and ".join(spoken(name) for name in shown if name not in OF_SIZE)
    lines = [f"{capitalized(subjects)} of {', '.join(sweep.models)}."] if subjects else []
    if any(figure.change is not None for figure in figures):
        lines.append("In brackets: the change from the model before the run.")
    lines += error_legend(figures)
    lines += ["Packed size: an estimate from above of what pack writes."] if PACKED_SIZE in shown else []
    sources = dict.fromkeys(figure.source for figure in figures if figure.source)
    lines += [f"Paper: {source}." for source in sources]
    lines += [sweep.ignored] if sweep.ignored else []
    if sweep.smoke:
        lines.append("This is the small form of the sweep, for a trial run: its values cannot be compared with published ones.")
    if missing := [f"{labels_in_words(row.labels)} ({row.trouble})" for row in rows if row.trouble]:
        lines.append(f"Missing or incomplete: {'; '.join(missing)}.")
    return lines


def write_tables(sweep: Sweep, outcomes: Sequence[Outcome], folder: Path) -> list[Path]:
    """Write results.csv, .json and .md to a folder, each atomically."""
    rows = table(sweep, outcomes)
    contents = {
        folder / "results.csv": to_csv(sweep, rows),
        folder / "results.json": strict_json(to_json(sweep, rows, outcomes)) + "\n",
        folder / "results.md": to_markdown(sweep, rows),
    }
    for file, text in contents.items():
        durable(file, text.encode())
    return list(contents)


SPEED_COLUMNS = ["form", "sequences", "tokens/s", "× torch", "× ceiling", "prefill/s", "memory"]

LEGEND = (
    "tokens/s: tokens decoded a second, of all sequences together.",
    "× torch: relative to the dense model in transformers.",
    "× ceiling: share of memory's speed, which is that of reading all dense weights for every token.",
    "prefill/s: tokens of the prompts read a second. memory: bytes of the weights.",
)


def speed_tables(bench: Bench) -> dict[str, Table]:
    """Heading and cells of a table for each number of threads, by title."""
    tables = {}
    for threads, bandwidth in bench.bandwidth.items():
        title = f"{threads} {'thread reads' if threads == 1 else 'threads read'} {bandwidth / 1e9:.1f} GB/s of dense weights"
        tables[title] = (SPEED_COLUMNS, [_cells(bench, speed) for speed in bench.speeds if speed.threads == threads])
    return tables


def size_line(bench: Bench) -> str:
    """The packed model's size on disk and in memory, and the dense model's, in a sentence."""
    dense, packed = bench.memory_bytes[TORCH], bench.memory_bytes[PACKED]
    files = f"{human_bytes(bench.disk_bytes)} on disk, {human_bytes(packed)} in memory"
    return f"{bench.model}: {files}; the dense weights are {human_bytes(dense)}."


def _cells(bench: Bench, speed: Speed) -> list[str]:
    """A row of a table."""
    size = bench.memory_bytes.get(speed.form)
    return [
        speed.form,
        str(speed.batch),
        f"{speed.decode:,.1f}",
        f"{bench.ratio(speed, TORCH):.2f}",
        f"{bench.ratio(speed, CEILING):.2f}",
        "" if speed.prefill is None else f"{speed.prefill:,.0f}",
        "" if size is None else human_bytes(size),
    ]
