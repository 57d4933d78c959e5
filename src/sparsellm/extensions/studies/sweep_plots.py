"""Plots of a sweep: perplexity against its axes and stored bits, error by depth, training loss by epoch, and time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

from sparsellm.errors import capitalized
from sparsellm.extensions.studies.figures import (
    COLORS,
    FIGURE_WIDTH,
    INK,
    Plot,
    bar_figure,
    heat_map,
    new_figure,
    plain_numbers,
)
from sparsellm.extensions.studies.measures import BITS_A_WEIGHT, Figure, headlines, spoken
from sparsellm.extensions.studies.sweep_cells import Cell, Sweep, labels_in_words
from sparsellm.extensions.studies.sweep_runner import Outcome
from sparsellm.extensions.studies.sweep_tables import SEED_AXIS, Row, models
from sparsellm.outputs.report import Report
from sparsellm.solvers.patterns import NM, parse_pattern

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as MatplotlibFigure

PANELS_A_ROW = 3
"""Panels in a row of a figure."""

OF_GRID = ("alpha", "beta")


def sweep_plots(sweep: Sweep, rows: Sequence[Row], outcomes: Sequence[Outcome]) -> list[Plot]:
    """All plots of a sweep that its axes and results have data for."""
    finished = [row for row in rows if row.figures]
    varied = {axis for axis, labels in sweep.axes.items() if len(labels) > 1}
    names = dict.fromkeys(name for row in finished for name in row.figures)
    plots: list[Plot | None] = []
    for number, measure in enumerate(headlines(names)):
        axes = [axis for axis in ("sparsity", "samples", "sequence_length") if axis in varied]
        plots += [against(sweep, finished, axis, measure=measure, name=f"{axis}-{number}") for axis in axes]
        plots.append(against_bits(sweep, finished, measure, name=f"bits-{number}"))
        if {"alpha", "beta"} <= varied:
            plots += surfaces(sweep, finished, measure, name=f"grid-{number}")
    reports = [(outcome.cell, outcome.report) for outcome in outcomes if outcome.report is not None]
    first_seed = [(cell, report) for cell, report in reports if cell.recipe.seed == reports[0][0].recipe.seed]
    plots += [by_depth(sweep, first_seed), by_epoch(sweep, first_seed), seconds(sweep, finished) if finished else None]
    return [plot for plot in plots if plot is not None]


def against(sweep: Sweep, rows: Sequence[Row], axis: str, *, measure: str, name: str) -> Plot:
    """A measure against an axis: a panel for each model, a line for each combination of the other labels."""
    lines: Lines = {}
    table: dict[tuple[str, str], list[list[str]]] = {}
    best: dict[str, tuple[float, str]] = {}
    for row in (row for row in rows if measure in row.figures):
        figure, label = row.figures[measure], row.labels[axis]
        model, kind = (
            row.labels.get("model", models(sweep)[0]),
            labels_in_words(row.labels, (axis, SEED_AXIS, "model")) or "all",
        )
        x, scale = axis_value(axis, label), 100 if figure.share else 1
        # The line passes through unstructured patterns only.
        joined = not (axis == "sparsity" and isinstance(parse_pattern(label), NM))
        error, published = (None if y is None else scale * y for y in (figure.standard_error, figure.published))
        lines.setdefault((model, kind), []).append(PlotPoint(x, scale * figure.value, error, published, joined))
        if figure.dense:
            lines.setdefault((model, DENSE_LABEL), []).append(PlotPoint(x, scale * figure.dense.value))
        cells = [figure.dense.measured if figure.dense else "", figure.measured, figure.change_text]
        cells.append("" if published is None else f"{published:g}")
        table.setdefault((model, kind), []).append([model, kind, label, *cells])
        if label == sweep.axes[axis][-1]:
            order = -figure.value if figure.share else figure.value
            text = f"{figure.short}{f' ({figure.change_text})' if figure.change_text else ''}, {kind}"
            best[model] = min(best.get(model, (math.inf, "")), (order, text))
    text = f"{capitalized(spoken(measure))} against {axis}; the dashed line is the model before the run. "
    text += " ".join(f"{model}: the best value at {sweep.axes[axis][-1]} is {value}." for model, (_, value) in best.items())
    labels = {label: axis_value(axis, label) for label in sweep.axes[axis]}
    ticks = {x: ", ".join(label for label in labels if labels[label] == x) for x in labels.values()}

    def set_ticks(axes: Axes) -> None:
        axes.set_xticks(list(ticks), list(ticks.values()), rotation=45 if len(ticks) > 4 else 0)

    drawing = _drawing(sweep, lines, rows, measure, xlabel=axis, of_line=(axis, SEED_AXIS, "model"), set_ticks=set_ticks)
    head = ["model", "line", axis, ", ".join(dict.fromkeys(row.start for row in rows)), spoken(measure), "change", "paper"]
    table_rows = [line for lines_of_kind in table.values() for line in lines_of_kind]
    if not any("".join(line[6:]) for line in table_rows):  # the sweep has no published values
        head, table_rows = head[:6], [line[:6] for line in table_rows]
    return Plot(name, f"{capitalized(spoken(measure))} against {axis}", text, head, table_rows, drawing)


def against_bits(sweep: Sweep, rows: Sequence[Row], measure: str, *, name: str) -> Plot | None:
    """A measure against the stored bits a weight of rounded layers, a line for each kind of cell; None for one point."""
    from matplotlib.ticker import MaxNLocator

    rows = [row for row in rows if measure in row.figures and BITS_A_WEIGHT in row.figures]
    if len({row.figures[BITS_A_WEIGHT].value for row in rows}) < 2:
        return None
    of_line = ("sparsity", "bits", SEED_AXIS, "model")
    lines: Lines = {}
    table = []
    for row in rows:
        figure, bits = row.figures[measure], row.figures[BITS_A_WEIGHT].value
        model, kind = row.labels.get("model", models(sweep)[0]), labels_in_words(row.labels, of_line) or "all"
        scale = 100 if figure.share else 1
        error = None if figure.standard_error is None else scale * figure.standard_error
        lines.setdefault((model, kind), []).append(PlotPoint(bits, scale * figure.value, error))
        if figure.dense:
            lines.setdefault((model, DENSE_LABEL), []).append(PlotPoint(bits, scale * figure.dense.value))
        table.append(
            [model, labels_in_words(row.labels, (SEED_AXIS, "model")), f"{bits:.3f}", figure.measured, figure.change_text]
        )

    def set_ticks(axes: Axes) -> None:
        axes.xaxis.set_major_locator(MaxNLocator(5))

    drawing = _drawing(sweep, lines, rows, measure, xlabel=BITS_A_WEIGHT, of_line=of_line, set_ticks=set_ticks)
    fewest, most = (f"{choose(row.figures[BITS_A_WEIGHT].value for row in rows):.2f}" for choose in (min, max))
    text = f"{capitalized(spoken(measure))} against the bits a weight of the packed layers, {fewest} to {most}. "
    text += "The dashed line is the model before the run. Cells without integers are left out."
    head = ["model", "cell", BITS_A_WEIGHT, spoken(measure), "change"]
    return Plot(name, f"{capitalized(spoken(measure))} against {BITS_A_WEIGHT}", text, head, table, drawing)


def _drawing(
    sweep: Sweep,
    lines: Lines,
    rows: Sequence[Row],
    measure: str,
    *,
    xlabel: str,
    of_line: Sequence[str],
    set_ticks: Callable[[Axes], object],
) -> MatplotlibFigure:
    """A panel for each model with the lines of a measure; `of_line` are the axes whose labels differ along a line."""
    share = any(row.figures[measure].share for row in rows if measure in row.figures)

    def finish(axes: Axes) -> None:
        if measure.startswith("perplexity"):
            axes.set_yscale("log")
        set_ticks(axes)

    panels = list(dict.fromkeys(panel for panel, _ in lines))
    return line_figure(
        lines,
        [panels[first : first + PANELS_A_ROW] for first in range(0, len(panels), PANELS_A_ROW)],
        (3.3, 2.8),
        xlabel=xlabel,
        ylabel=spoken(measure) + (", %" if share else ""),
        kinds=_kinds(sweep, of_line),
        finish=finish,
    )


def _kinds(sweep: Sweep, without: Sequence[str]) -> list[str]:
    """The lines of a plot, which have the same colors in each plot of the sweep."""
    return list(dict.fromkeys(labels_in_words(cell.labels, without) or "all" for cell in sweep.cells))


def axis_value(axis: str, label: str) -> float:
    """Position of a label on its axis; NaN if it is neither a number nor a pattern."""
    if axis == "sparsity":
        return 100 * parse_pattern(label).sparsity
    try:
        return float(label)
    except ValueError:
        return math.nan


def surfaces(sweep: Sweep, rows: Sequence[Row], measure: str, *, name: str) -> list[Plot]:
    """Heat maps of a measure over alpha and beta, one for each combination of the other labels, with one scale of colors."""
    from matplotlib.colors import LogNorm, Normalize

    alphas, betas = sweep.axes["alpha"], sweep.axes["beta"]
    by_label: dict[str, dict[tuple[str, str], Figure]] = {}
    for row in (row for row in rows if measure in row.figures):
        label = ", ".join(
            filter(None, (", ".join(models(sweep)) * ("model" not in row.labels), labels_in_words(row.labels, OF_GRID)))
        )
        by_label.setdefault(label, {})[row.labels["alpha"], row.labels["beta"]] = row.figures[measure]
    finite = [x.value for figures in by_label.values() for x in figures.values() if math.isfinite(x.value)] or [1.0]
    share = any(x.share for figures in by_label.values() for x in figures.values())
    norm = (Normalize if share or min(finite) <= 0 else LogNorm)(min(finite), max(finite) * (1 + 1e-9))
    plots = []
    for number, (label, figures) in enumerate(by_label.items()):
        lowest, highest = (choose(figures, key=lambda point: figures[point].value) for choose in (min, max))
        at = (
            ", ".join(filter(None, (figures[x].short, figures[x].change_text, f"alpha {x[0]}, beta {x[1]}")))
            for x in (lowest, highest)
        )
        dense = next((f" Before: {x.dense.measured}." for x in figures.values() if x.dense), "")
        title = f"{capitalized(spoken(measure))} over alpha and beta, {label}"
        cells = [[figures[alpha, beta].value if (alpha, beta) in figures else math.nan for beta in betas] for alpha in alphas]
        texts = [[_in_cell(figures.get((alpha, beta))) for beta in betas] for alpha in alphas]
        table = [[alpha, *(text.replace("\n", ", ") for text in line)] for alpha, line in zip(alphas, texts, strict=True)]
        names = [f"alpha {alpha}" for alpha in alphas]
        figure = heat_map(cells, names, betas, labels=("beta", spoken(measure)), kind="measure", texts=texts, norm=norm)
        plots.append(
            Plot(f"{name}-{number}", title, f"{title}: from {' to '.join(at)}.{dense}", ["alpha", *betas], table, figure)
        )
    return plots


def _in_cell(figure: Figure | None) -> str:
    """A value and its change from the dense model in two lines; empty without a value."""
    return "" if figure is None else "\n".join(filter(None, (figure.short, figure.change_text)))


def by_depth(sweep: Sweep, reports: Sequence[tuple[Cell, Report]]) -> Plot | None:
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
        kinds=_kinds(sweep, ("model", "sparsity", SEED_AXIS)),
        finish=lambda axes: axes.set_yscale("log"),
    )


def by_epoch(sweep: Sweep, reports: Sequence[tuple[Cell, Report]]) -> Plot | None:
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
        kinds=_kinds(sweep, ("model", "sparsity", SEED_AXIS)),
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
    kinds: Sequence[str],
    finish: Callable[[Axes], object],
) -> Plot:
    """Values by block or epoch: a panel for each model and sparsity, a line for each combination of the other labels."""
    series = [(cell, points) for cell, points in series if points]
    models = list(dict.fromkeys(cell.labels.get("model", PurePath(cell.recipe.model).name) for cell, _ in series))
    lines: Lines = {}
    panels: dict[str, list[str]] = {model: [] for model in models}
    for cell, points in series:
        parts = (cell.labels.get("model", PurePath(cell.recipe.model).name), cell.labels.get("sparsity", ""))
        panel = ", ".join(part for part in parts if part)
        if panel not in panels[parts[0]]:
            panels[parts[0]].append(panel)
        kind = labels_in_words(cell.labels, ("model", "sparsity", SEED_AXIS)) or "all"
        lines[panel, kind] = [PlotPoint(x, y) for x, y in points.items()]
    positions = sorted({x for _, points in series for x in points})
    table = [[cell.name, *(f"{points[x]:.4g}" if x in points else "" for x in positions)] for cell, points in series]
    figure = line_figure(lines, list(panels.values()), (2.2, 2.2), xlabel=xlabel, ylabel=ylabel, kinds=kinds, finish=finish)
    return Plot(name, title, text, ["cell", *(f"{xlabel} {x}" for x in positions)], table, figure)


def seconds(sweep: Sweep, rows: Sequence[Row]) -> Plot:
    """Seconds of pruning, the mean over cells whose labels differ in the sparsity only."""
    times: dict[str, list[float]] = {}
    for row in rows:
        times.setdefault(labels_in_words(row.labels, ("sparsity",)) or sweep.title, []).append(row.figures["seconds"].value)
    means = {name: sum(values) / len(values) for name, values in times.items()}
    slowest = max(means, key=lambda name: means[name])
    text = f"Seconds of pruning, without loading and evaluation; the longest is {means[slowest]:.1f}, {slowest}."
    table = [[name, f"{value:.1f}"] for name, value in means.items()]
    figure = bar_figure(list(means), list(means.values()))
    return Plot("seconds", "Seconds of pruning", text, ["cells", "seconds"], table, figure)


MARKERS = "osD^vPX*"

NAMED = 16
"""The most lines in a legend; figures with more have none."""


class PlotPoint(NamedTuple):
    """A point of a plot.

    Attributes:
        joined: Whether the line passes through the point.
    """

    x: float
    y: float
    error: float | None = None
    published: float | None = None
    joined: bool = True


DENSE_LABEL = "before"
"""Label of the line of the models before their runs, which are dense or have zeros already."""

Lines = dict[tuple[str, str], list[PlotPoint]]
"""Points, by title of the panel and label of the line."""


def line_figure(
    lines: Lines,
    panels: Sequence[Sequence[str]],
    size: tuple[float, float],
    *,
    xlabel: str,
    ylabel: str,
    kinds: Sequence[str],
    finish: Callable[[Axes], object],
) -> MatplotlibFigure:
    """Panels of lines with a common legend.

    Args:
        lines: The points; published values are drawn as larger hollow markers, those of `DENSE_LABEL` as a dashed line.
        panels: Titles of the panels, by row.
        kinds: Labels of the lines; a line has the color of its place among them.
        finish: Called with the axes of each panel after its lines are drawn.
    """
    from matplotlib.ticker import MaxNLocator

    columns = max(map(len, panels))
    dense = any(kind == DENSE_LABEL for _, kind in lines)
    shown = len({kind for _, kind in lines})
    legend = 1 < shown <= NAMED
    figure = new_figure(max(FIGURE_WIDTH, 1.2 + size[0] * columns), 0.6 + size[1] * len(panels) + 0.12 * shown * legend)
    grid = figure.subplots(len(panels), columns, squeeze=False, sharey="row")
    handles: dict[str, Any] = {}
    for titles, row in zip(panels, grid, strict=True):
        for title, axes in zip(titles, row, strict=False):
            for number, kind in enumerate(kinds):
                if points := sorted(point for point in lines.get((title, kind), ()) if math.isfinite(point.y)):
                    handles[kind] = _draw_line(axes, points, number)
            if dense_values := sorted({(x, y) for x, y, *_ in lines.get((title, DENSE_LABEL), ()) if math.isfinite(y)}):
                handles[DENSE_LABEL] = _draw_dense(axes, dense_values)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.set_title(title, fontsize=9)
            axes.set_xlabel(xlabel)
            finish(axes)
        for axes in row[len(titles) :]:
            axes.remove()
    # After all lines, since the panels of a row share their limits. Axes of the changes are appended to the list.
    for title, axes in zip((x for titles in panels for x in titles), list(figure.axes), strict=True):
        plain_numbers(axes)
        if dense:
            values = {y for _, y, *_ in lines.get((title, DENSE_LABEL), ()) if math.isfinite(y) and y > 0}
            if len(values) == 1:
                _add_changes(axes, values.pop(), ylabel.endswith("%"))
    figure.supylabel(ylabel, fontsize=10)
    if legend:
        figure.legend(list(handles.values()), list(handles), loc="outside lower left", ncols=2, fontsize=8)
    return figure


def _draw_line(axes: Axes, points: Sequence[PlotPoint], number: int) -> Any:
    """Draw the points of a line, with the color and marker of its number; returns its handle for the legend."""
    marker = MARKERS[(number + number // len(COLORS)) % len(MARKERS)]
    style: dict[str, Any] = {"color": COLORS[number % len(COLORS)], "marker": marker, "ls": ""}
    joined = [(point.x, point.y) for point in points if point.joined]
    axes.plot([x for x, _ in joined], [y for _, y in joined], color=style["color"])
    errors = [point.error or 0.0 for point in points]
    x, y = [point.x for point in points], [point.y for point in points]
    handle = axes.errorbar(x, y, errors if any(errors) else None, ms=4, capsize=2, **style)
    published = [(point.x, point.published) for point in points if point.published is not None]
    axes.plot([x for x, _ in published], [y for _, y in published], mfc="none", ms=9, **style)
    return handle


def _draw_dense(axes: Axes, points: Sequence[tuple[float, float]]) -> Any:
    """Draw the dense model's values: a line if they are equal, otherwise a dash at each position."""
    if len({y for _, y in points}) == 1:
        return axes.axhline(points[0][1], color=INK, lw=1.2, ls="--")
    return axes.plot([x for x, _ in points], [y for _, y in points], color=INK, marker="_", ms=14, ls="")[0]


def _add_changes(axes: Axes, dense: float, share: bool) -> None:
    """Add an axis on the right with the change from the dense value: in per cent, or in points for shares in per cent."""
    right = axes.twinx()
    right.set_yscale(axes.get_yscale())
    right.set_ylim(axes.get_ylim())
    right.spines["right"].set_visible(True)
    right.grid(visible=False)
    position = right.transData.transform
    height = right.get_window_extent().height
    ticks: dict[float, float] = {}
    for change in (0.0, *(sign * digit * 10.0**power for power in range(6, -3, -1) for digit in (5, 2, 1) for sign in (1, -1))):
        y = dense + 100 * change if share else dense * (1 + change)
        if axes.get_ylim()[0] < y < axes.get_ylim()[1] and all(
            abs(position((0, y))[1] - position((0, other))[1]) > 0.12 * height for other in ticks.values()
        ):
            ticks[change] = y
    right.set_yticks(
        list(ticks.values()), [f"{100 * x:+,g}{'' if share else ' %'}" if x else DENSE_LABEL for x in ticks], fontsize=8
    )
    right.minorticks_off()
