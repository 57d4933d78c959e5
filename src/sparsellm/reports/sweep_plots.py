"""Plots of a sweep: perplexity against its axes, error by depth, training loss by epoch, and time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sparsellm.reports.comparison import SEED, Row, value_with_error
from sparsellm.reports.figures import COLOURS, INK, Plot, bar_figure, heat_map, new_figure
from sparsellm.reports.sweep_file import Cell, Sweep, in_words
from sparsellm.reports.sweep_runner import Outcome
from sparsellm.runs.records import SavedReport
from sparsellm.solvers.patterns import NM, parse_pattern

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PANELS = 3
"""Panels in a row of a figure."""

MARKERS = "osD^vPX*"

NAMED = 16
"""The most lines in a legend; figures with more have none."""


class Point(NamedTuple):
    """A point of a plot.

    Attributes:
        x: Position on the axis.
        y: Measured value.
        error: Its standard error.
        published: Published value.
        joined: Whether the line passes through the point.
    """

    x: float
    y: float
    error: float | None = None
    published: float | None = None
    joined: bool = True


Lines = dict[tuple[str, str], list[Point]]
"""Points, by title of the panel and label of the line."""


def sweep_plots(sweep: Sweep, rows: Sequence[Row], outcomes: Sequence[Outcome]) -> list[Plot]:
    """All plots of a sweep that its axes and results have data for."""
    finished = [row for row in rows if row.figures]
    varied = {axis for axis, labels in sweep.axes.items() if len(labels) > 1}
    names = dict.fromkeys(name for row in finished for name in row.figures)
    measures = [name for name in names if name.startswith("perplexity ") or name == "accuracy mean"]
    plots: list[Plot | None] = []
    for number, measure in enumerate(measures):
        axes = [axis for axis in ("sparsity", "samples", "sequence_length", "written") if axis in varied]
        plots += [against(sweep, finished, axis, measure=measure, name=f"{axis}-{number}") for axis in axes]
        if {"alpha", "beta"} <= varied:
            plots += surfaces(sweep, finished, measure, name=f"grid-{number}")
    reports = [(outcome.cell, outcome.report) for outcome in outcomes if outcome.report is not None]
    first_seed = [(cell, report) for cell, report in reports if cell.recipe.seed == reports[0][0].recipe.seed]
    plots += [by_depth(first_seed), by_epoch(first_seed), seconds(sweep, finished) if finished else None]
    return [plot for plot in plots if plot is not None]


def against(sweep: Sweep, rows: Sequence[Row], axis: str, *, measure: str, name: str) -> Plot:
    """A measure against an axis: a panel for each model, a line for each combination of the other labels."""
    lines: Lines = {}
    table: dict[tuple[str, str], list[list[str]]] = {}
    for row in (row for row in rows if measure in row.figures):
        model, kind = row.labels.get("model", ""), in_words(row.labels, (axis, SEED, "model")) or "all"
        figure, label = row.figures[measure], row.labels[axis]
        # The line passes through unstructured patterns only.
        joined = not (axis == "sparsity" and isinstance(parse_pattern(label), NM))
        point = Point(axis_value(axis, label), figure.value, figure.standard_error, figure.published, joined)
        lines.setdefault((model, kind), []).append(point)
        published = "" if figure.published is None else f"{figure.published:g}"
        shown = value_with_error(figure.value, figure.standard_error)
        table.setdefault((model, kind), []).append([model, kind, label, shown, published])
    text = f"{measure} against {axis}, {len({kind for _, kind in lines})} lines."
    for model in dict.fromkeys(model for model, _ in lines):
        value, kind = min((points[-1].y, kind) for (panel, kind), points in lines.items() if panel == model)
        text += f" {model or 'The model'}: the lowest value at the last point is {value:.4g}, {kind}."
    labels = {label: axis_value(axis, label) for label in sweep.axes[axis]}
    ticks = {x: ", ".join(label for label in labels if labels[label] == x) for x in labels.values()}

    def finish(axes: Axes) -> None:
        if measure.startswith("perplexity"):
            axes.set_yscale("log")
        axes.set_xticks(list(ticks), list(ticks.values()), rotation=45 if len(ticks) > 4 else 0)

    panels = list(dict.fromkeys(panel for panel, _ in lines))
    rows_of_panels = [panels[first : first + PANELS] for first in range(0, len(panels), PANELS)]
    drawing = _line_figure(lines, rows_of_panels, (3.0, 2.8), xlabel=axis, ylabel=measure, finish=finish)
    table_rows = [line for lines_of_kind in table.values() for line in lines_of_kind]
    return Plot(name, f"{measure} against {axis}", text, ["model", "line", axis, measure, "paper"], table_rows, drawing)


def axis_value(axis: str, label: str) -> float:
    """Position of a label on its axis; NaN if it is neither a number nor a pattern."""
    if axis == "sparsity":
        return 100 * parse_pattern(label).sparsity
    try:
        return float(label)
    except ValueError:
        return math.nan


def surfaces(sweep: Sweep, rows: Sequence[Row], measure: str, *, name: str) -> list[Plot]:
    """Heat maps of a measure over alpha and beta, one for each combination of the other labels."""
    alphas, betas = sweep.axes["alpha"], sweep.axes["beta"]
    values_by_label: dict[str, dict[tuple[str, str], float]] = {}
    for row in (row for row in rows if measure in row.figures):
        label = in_words(row.labels, ("alpha", "beta"))
        values_by_label.setdefault(label, {})[row.labels["alpha"], row.labels["beta"]] = row.figures[measure].value
    plots = []
    for number, (label, values) in enumerate(values_by_label.items()):
        extremes = [choose(values, key=lambda point: values[point]) for choose in (min, max)]
        lowest, highest = (f"{values[alpha, beta]:.4g} (alpha {alpha}, beta {beta})" for alpha, beta in extremes)
        text = f"{measure} over alpha and beta, {label}: from {lowest} to {highest}."
        cells = [[values.get((alpha, beta), math.nan) for beta in betas] for alpha in alphas]
        table = [
            [alpha, *("" if math.isnan(x) else f"{x:.4g}" for x in line)] for alpha, line in zip(alphas, cells, strict=True)
        ]
        figure = heat_map(cells, alphas, betas, xlabel="beta", ylabel="alpha", label=measure)
        plots.append(Plot(f"{name}-{number}", f"{measure}: alpha and beta", text, ["alpha", *betas], table, figure))
    return plots


def by_depth(reports: Sequence[tuple[Cell, SavedReport]]) -> Plot | None:
    """The mean error of the layers of each block, for every cell."""
    series = [
        (cell, {block.index: sum(x.error for x in block.layers) / len(block.layers) for block in report.blocks if block.layers})
        for cell, report in reports
    ]
    means = {cell.name: sum(points.values()) / len(points) for cell, points in series if points}
    if not means:
        return None
    lowest = min(means, key=lambda name: means[name])
    text = (
        f"Mean relative output error of each block's layers, {len(means)} cells; the lowest is {means[lowest]:.3g}, {lowest}. "
        "Errors are relative to the targets of each method. Those of the default include the errors of earlier layers, so its "
        "values are larger."
    )
    return _series_plot(
        "depth",
        "Error by depth",
        text,
        xlabel="block",
        ylabel="mean relative error",
        series=series,
        finish=lambda axes: axes.set_yscale("log"),
    )


def by_epoch(reports: Sequence[tuple[Cell, SavedReport]]) -> Plot | None:
    """The objective of Algorithm 1 after each epoch, relative to the first, mean over blocks."""
    series = []
    for cell, report in reports:
        objectives = [[step.after_weights for step in block.epochs if step.step == "published"] for block in report.blocks]
        relative = [[x / steps[0] for x in steps if x is not None] for steps in objectives if steps and steps[0]]
        epochs = max(map(len, relative), default=0)
        complete = [steps for steps in relative if len(steps) == epochs > 1]
        series.append((cell, {n + 1: sum(steps[n] for steps in complete) / len(complete) for n in range(epochs) if complete}))
    last = [points[max(points)] for _, points in series if points]
    if not last:
        return None
    ratios = f"{min(last):.3g} to {max(last):.3g}"
    text = f"The objective of Algorithm 1 after the last epoch is {ratios} times its value after the first."
    return _series_plot(
        "epochs",
        "Training loss by epoch",
        text,
        xlabel="epoch",
        ylabel="objective, relative",
        series=series,
        finish=lambda axes: axes.axhline(1.0, color=INK, lw=0.6),
    )


def _series_plot(
    name: str,
    title: str,
    text: str,
    *,
    xlabel: str,
    ylabel: str,
    series: Iterable[tuple[Cell, dict[int, float]]],
    finish: Callable[[Axes], object],
) -> Plot:
    """Values by block or epoch: a panel for each model and sparsity, a line for each combination of the other labels."""
    series = [(cell, points) for cell, points in series if points]
    models = list(dict.fromkeys(cell.labels.get("model", "") for cell, _ in series))
    lines: Lines = {}
    panels: dict[str, list[str]] = {model: [] for model in models}
    for cell, points in series:
        parts = (cell.labels.get("model", ""), cell.labels.get("sparsity", ""))
        panel = ", ".join(part for part in parts if part)
        if panel not in panels[parts[0]]:
            panels[parts[0]].append(panel)
        kind = in_words(cell.labels, ("model", "sparsity", SEED)) or "all"
        lines[panel, kind] = [Point(x, y) for x, y in points.items()]
    positions = sorted({x for _, points in series for x in points})
    table = [[cell.name, *(f"{points[x]:.4g}" if x in points else "" for x in positions)] for cell, points in series]
    figure = _line_figure(lines, list(panels.values()), (2.2, 2.2), xlabel=xlabel, ylabel=ylabel, finish=finish)
    return Plot(name, title, text, ["cell", *(f"{xlabel} {x}" for x in positions)], table, figure)


def _line_figure(
    lines: Lines,
    panels: Sequence[Sequence[str]],
    size: tuple[float, float],
    *,
    xlabel: str,
    ylabel: str,
    finish: Callable[[Axes], object],
) -> Figure:
    """Panels of lines with a common legend.

    Args:
        lines: The points; published values are drawn as larger hollow markers.
        panels: Titles of the panels, by row.
        size: Width and height of a panel in inches.
        xlabel: Label of the positions.
        ylabel: Label of the values.
        finish: Called with the axes of each panel after its lines are drawn.
    """
    from matplotlib.ticker import MaxNLocator

    kinds = list(dict.fromkeys(kind for _, kind in lines))
    columns = max(map(len, panels))
    legend = 1 < len(kinds) <= NAMED
    figure = new_figure(max(5.4, 1.2 + size[0] * columns), 0.6 + size[1] * len(panels) + 0.12 * len(kinds) * legend)
    grid = figure.subplots(len(panels), columns, squeeze=False, sharey="row")
    handles: dict[str, Any] = {}
    for titles, row in zip(panels, grid, strict=True):
        for title, axes in zip(titles, row, strict=False):
            for number, kind in enumerate(kinds):
                points = sorted(point for point in lines.get((title, kind), ()) if math.isfinite(point.y))
                colour = COLOURS[number % len(COLOURS)]
                style = {"color": colour, "marker": MARKERS[(number + number // len(COLOURS)) % len(MARKERS)], "ls": ""}
                joined = [(point.x, point.y) for point in points if point.joined]
                axes.plot([x for x, _ in joined], [y for _, y in joined], color=colour)
                errors = [point.error or 0.0 for point in points]
                x, y = [point.x for point in points], [point.y for point in points]
                handles[kind] = axes.errorbar(x, y, errors if any(errors) else None, ms=4, capsize=2, **style)
                published = [(point.x, point.published) for point in points if point.published is not None]
                axes.plot([x for x, _ in published], [y for _, y in published], mfc="none", ms=9, **style)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.set_title(title, fontsize=9)
            axes.set_xlabel(xlabel)
            finish(axes)
        for axes in row[len(titles) :]:
            axes.remove()
    figure.supylabel(ylabel, fontsize=10)
    if legend:
        figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=2, fontsize=8)
    return figure


def seconds(sweep: Sweep, rows: Sequence[Row]) -> Plot:
    """Seconds of pruning, the mean over cells whose labels differ in the sparsity only."""
    times: dict[str, list[float]] = {}
    for row in rows:
        times.setdefault(in_words(row.labels, ("sparsity",)) or sweep.title, []).append(row.figures["seconds"].value)
    means = {name: sum(values) / len(values) for name, values in times.items()}
    slowest = max(means, key=lambda name: means[name])
    text = f"Seconds of pruning, without loading and evaluation; the longest is {means[slowest]:.1f}, {slowest}."
    table = [[name, f"{value:.1f}"] for name, value in means.items()]
    figure = bar_figure(list(means), "seconds", {"": [(value, None) for value in means.values()]})
    return Plot("seconds", "Seconds of pruning", text, ["cells", "seconds"], table, figure)
