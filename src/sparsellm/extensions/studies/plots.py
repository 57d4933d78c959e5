"""Plots of a run and its trainings, of a sweep, and of the speed of a packed model."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

from sparsellm.errors import capitalized, plural
from sparsellm.extensions.packed.record import CEILING, PACKED, Bench
from sparsellm.extensions.studies.compare import Comparison
from sparsellm.extensions.studies.figures import (
    BOUND_MARKS,
    COLORS,
    DENSE_LABEL,
    INK,
    Lines,
    Plot,
    PlotPoint,
    draw_bars,
    heat_map,
    line_figure,
    new_figure,
    seconds_figure,
    size_unit,
)
from sparsellm.extensions.studies.measures import (
    BITS_A_WEIGHT,
    Figure,
    claim,
    headlines,
    one_target,
    rank_figures,
    short_names,
    spoken,
)
from sparsellm.extensions.studies.search_result import SearchResult, search_table
from sparsellm.extensions.studies.sweep_file import Cell, Sweep, labels_in_words
from sparsellm.extensions.studies.sweep_runner import Outcome
from sparsellm.extensions.studies.tables import SEED_AXIS, Row
from sparsellm.methods import WHOLE_MODEL, BlockResult, LayerResult, TrainingResult
from sparsellm.outputs.report import Report
from sparsellm.solvers.patterns import parse_pattern

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure as MatplotlibFigure

DIFFERENT = 0.001
"""The least difference of sparsities that is shown: equal patterns differ by less, since counts are rounded."""

DENSE_MODEL = "dense model"
"""Label of its point."""

ERROR_BARS = "Error bars are those of the change, where its error is known."

OF_GRID = ("alpha", "beta")
"""The axes of heat maps."""


def run_plots(report: Report) -> list[Plot]:
    """All plots of a run that its report has data for."""
    blocks = [block for block in report.blocks if block.layers]
    plots = [searched(report), *_layer_maps(blocks), convergence(blocks), training_curves(report), where_time_went(report)]
    return [plot for plot in plots if plot is not None]


def at_bound(layers: Sequence[LayerResult]) -> dict[str, str]:
    """By name of a layer, "minimum" or "maximum" if its sparsity is at that bound of the allocation; empty if all are equal."""
    sparsities = {layer.name: layer.pattern.sparsity for layer in layers if layer.pattern.is_shareable}
    bounds = {name: choose(sparsities.values(), default=0.0) for name, choose in (("minimum", min), ("maximum", max))}
    if bounds["maximum"] - bounds["minimum"] < DIFFERENT:
        return {}
    return {layer: name for layer, x in sparsities.items() for name, bound in bounds.items() if abs(x - bound) < DIFFERENT / 2}


def searched(report: Report) -> Plot | None:
    """The curve of a search: perplexity or accuracy, on the first text or task, against what was varied."""
    if (search := SearchResult.of(report)) is None:
        return None
    points = [(x, value) for x in search.points for value in [*x.perplexity.values(), *x.accuracy.values()][:1]]
    if not points:
        return None
    name = short_names(points[0][0].perplexity or points[0][0].accuracy)
    label = f"{'perplexity' if points[0][0].perplexity else 'accuracy'} on {next(iter(name.values()))}"
    lines: Lines = {}
    for x, value in points:
        lines.setdefault(("", x.effort), []).append(PlotPoint(x.value * (100 if x.over == "sparsity" else 1), value))
    values, xlabel = {"sparsity": ("Sparsities", "sparsity, %"), "bits": ("Bits", "bits a weight")}[points[0][0].over]
    figure = line_figure(lines, [[""]], xlabel=xlabel, ylabel=label, kinds=[effort for _, effort in lines])
    text = f"{values} that the search tried, for {search.target}: {sum(x.met for x, _ in points)} of {len(points)} meet it."
    if unsure := sum(x.undecided for x, _ in points):
        text += f" {unsure} cannot be decided: the measurement is within its error of the target."
    return Plot("search", "Search", text, *search_table(search.points), figure)


def _layer_maps(blocks: Sequence[BlockResult]) -> Iterator[Plot]:
    """Heat maps of the error, and of the sparsity if it differs: a column for each block, a row for each kind of layer."""
    from matplotlib.colors import LogNorm, Normalize

    layers = [layer for block in blocks for layer in block.layers]
    if not layers:
        return
    errors = [layer.error for layer in layers if 0 < layer.error < math.inf] or [1.0]
    norm: Normalize = LogNorm(min(errors), max(errors) * (1 + 1e-9))
    yield _layer_map(blocks, "error", label="relative output error", shown=lambda layer: f"{layer.error:.2g}", norm=norm)
    lowest, highest = min(x.sparsity for x in layers), max(x.sparsity for x in layers)
    if highest - lowest >= DIFFERENT:
        norm = Normalize(100 * lowest, 100 * highest)
        yield _layer_map(blocks, "sparsity", label="zeros, %", shown=lambda layer: f"{100 * layer.sparsity:.1f}", norm=norm)


def _layer_map(
    blocks: Sequence[BlockResult], field: str, *, label: str, shown: Callable[[LayerResult], str], norm: Normalize
) -> Plot:
    """A heat map of one value of each layer, which `shown` writes as text; of the sparsity, with marks of the bounds."""
    scale, unit = (100, " %") if field == "sparsity" else (1, "")
    layers = sorted((layer for block in blocks for layer in block.layers), key=attrgetter(field))
    marks = {name: BOUND_MARKS[bound] for name, bound in at_bound(layers).items()} if field == "sparsity" else {}
    cells: dict[tuple[str, str], tuple[float, str]] = {}
    for block in blocks:
        for layer in block.layers:
            kind = layer.name.removeprefix(f"{block.name}.")
            column = block.name if kind == block.name else str(block.index)  # the head is its own layer
            cells[kind, column] = scale * getattr(layer, field), shown(layer) + marks.get(layer.name, "")
    kinds, columns = (list(dict.fromkeys(names)) for names in zip(*cells, strict=True))
    extremes = " to ".join(f"{shown(x)}{unit} ({x.name})" for x in (layers[0], layers[-1]))
    title = f"{field.capitalize()} of each layer"
    text = f"{title}, {sum(map(str.isdigit, columns))} blocks by {len(kinds)} kinds of layer: from {extremes}."
    if marks:
        at_bounds = (f"{list(marks.values()).count(mark)} at its {bound} ({mark})" for bound, mark in BOUND_MARKS.items())
        text += f" The allocation has {' and '.join(at_bounds)}."
    return Plot(f"{field}-map", title, text, *heat_map(cells, kinds, columns, labels=("block", label), kind=field, norm=norm))


def convergence(blocks: Sequence[BlockResult]) -> Plot | None:
    """Error of the feed-forward parts after each step, and the objective of Algorithm 1; None if no part has two steps."""
    accepted = {block.index: [step for step in block.epochs if step.accepted] for block in blocks}
    series = {index: steps for index, steps in accepted.items() if len(steps) > 1}
    if not series:
        return None
    measures = {"feed_forward_error": "feed-forward error"}
    if any(step.after_weights is not None for steps in series.values() for step in steps):
        measures["after_weights"] = "objective"
    rows = [
        [str(index), f"{step.step} {step.epoch}", *("" if (x := getattr(step, m)) is None else f"{x:.4g}" for m in measures)]
        for index, steps in series.items()
        for step in steps
    ]
    errors = [(steps[0].feed_forward_error, steps[-1].feed_forward_error) for steps in series.values()]
    ratios = [last / first for first, last in errors if first]
    text = (
        f"Steps over the feed-forward parts of {len(series)} blocks: the error after the last step is on average "
        f"{sum(ratios) / max(len(ratios), 1):.3g} times the error after the first."
    )
    kinds = {step.step for steps in series.values() for step in steps}
    if "published" in kinds:
        text += " Algorithm 1 minimizes its objective, not this error, which may rise."
    if "round" in kinds:
        text += " The last step rounds the weights to integers, which may raise it."
    lines: Lines = {
        (label, f"block {index}"): [PlotPoint(n, x) for n, step in enumerate(steps, 1) if (x := getattr(step, m)) is not None]
        for m, label in measures.items()
        for index, steps in series.items()
    }
    blocks_shown = [f"block {index}" for index in series]
    figure = line_figure(lines, [[x] for x in measures.values()], xlabel="step", ylabel="", kinds=blocks_shown, log=True)
    return Plot("convergence", "Convergence", text, ["block", "step", *measures.values()], rows, figure)


def size_plots(comparison: Comparison) -> list[Plot]:
    """The change of the perplexity against the bytes of the packed weights: a plot for each text, a point for each run."""
    plots: list[Plot] = []
    dense_size = comparison.dense_size
    for key in sorted(comparison.rankings, key=lambda key: -len(comparison.rankings[key].differences)):
        found = [(run.name, run.report.sizes, x) for run in comparison.runs if (x := run.figures.get(key))]
        points = [(name, sizes, x) for name, sizes, x in found if sizes and math.isfinite(x.value)]
        dense = next((x.dense for _, _, x in points if x.dense), None)
        if isinstance(key, str) or len(points) < 2 or dense_size is None:
            continue
        unit, scale = size_unit(dense_size.written)
        lines: Lines = {("", name): [PlotPoint(sizes.packed / scale, x.value, x.bar)] for name, sizes, x in points}
        rows = [[name, x.measured, x.change_text, sizes.packed_text or sizes.written_text] for name, sizes, x in points]
        if dense:
            place = [PlotPoint(dense_size.written / scale, dense.value)]
            lines |= {("", DENSE_MODEL): place, ("", DENSE_LABEL): place}
            rows.append([DENSE_MODEL, dense.measured, "", dense_size.written_text])
        kinds, heading = [name for _, name in lines if name != DENSE_LABEL], f"perplexity on {comparison.columns[key]}"
        xlabel = f"weights once packed, {unit}"
        figure = line_figure(
            lines, [[""]], xlabel=xlabel, ylabel=heading, kinds=kinds, log=True, at_points=True, finish=_few_ticks
        )
        text = (
            f"{capitalized(heading)} against the bytes of the weights once they are packed; further down and left is better. "
            f"The axis on the right has the change from the dense model, which is the dashed line. {ERROR_BARS}"
        )
        head = ["run", heading, "change", "packed"]
        plots.append(Plot(f"size-{len(plots)}", f"Change of {heading} against size", text, head, rows, figure))
    return plots


def _few_ticks(axes: Axes) -> None:
    """Let the horizontal axis have ticks between whole numbers."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(5))


def where_time_went(report: Report) -> Plot | None:
    """Seconds of each stage, and peak memory of the process; None if no stage was timed."""
    stages = sorted(((name, x) for name, x in report.seconds.items() if name != "total"), key=lambda stage: -stage[1])
    if not stages:
        return None
    total = sum(seconds for _, seconds in stages) or 1.0
    rows = [[name, f"{seconds:.1f}", f"{100 * seconds / total:.0f} %"] for name, seconds in stages]
    peak = report.peak_memory_bytes
    memory = f" Peak memory of the process: {peak / 2**30:.2f} GiB." if peak else ""
    text = f"Of {total:.1f} seconds, {rows[0][0]} took {rows[0][2]}.{memory}"
    return Plot("time", "Time and memory", text, ["stage", "seconds", "share"], rows, seconds_figure(dict(stages)))


def training_curves(report: Report) -> Plot | None:
    """The held-out and the training loss at each validation; None if nothing was trained."""
    trainings: dict[str, TrainingResult] = {WHOLE_MODEL: report.recovered} if report.recovered else {}
    trainings |= {f"block {block.index}": block.refined for block in report.blocks if block.refined}
    trainings = {name: training for name, training in trainings.items() if len(training.curve) > 1}
    if not trainings:
        return None
    rows = [
        [name, str(point.step), "" if point.training is None else f"{point.training:.4g}", f"{point.held_out:.4g}"]
        for name, training in trainings.items()
        for point in training.curve
    ]
    unchanged = [name for name, x in trainings.items() if not x.steps]
    ratios = [x.after / x.before for x in trainings.values() if x.before]
    of = "the whole model" if report.recovered else plural(len(report.blocks), "block")
    text = (
        f"Training of {of}: the held-out loss of the state that was kept is{' on average' if len(ratios) > 1 else ''} "
        f"{sum(ratios) / max(len(ratios), 1):.3g} times the one before."
    )
    if unchanged:
        none = "No step lowered it" + (f" for {', '.join(unchanged)}" if len(unchanged) < len(trainings) else "")
        text += f" {none}: these weights are unchanged."
    lines: Lines = {
        ("", f"{name}, held-out"): [PlotPoint(x.step, x.held_out) for x in training.curve]
        for name, training in trainings.items()
    }
    if len(trainings) == 1:
        curve = next(iter(trainings.values())).curve
        lines["", "training"] = [PlotPoint(x.step, x.training) for x in curve if x.training is not None]
    figure = line_figure(lines, [[""]], xlabel="step", ylabel="loss", kinds=[kind for _, kind in lines], log=True)
    return Plot("training", "Training", text, ["trained", "step", "training loss", "held-out loss"], rows, figure)


def sweep_plots(sweep: Sweep, rows: Sequence[Row], outcomes: Sequence[Outcome]) -> list[Plot]:
    """All plots of a sweep that its axes and results have data for."""
    finished = [row for row in rows if row.figures]
    varied = {axis for axis, labels in sweep.axes.items() if len(labels) > 1}
    names = dict.fromkeys(name for row in finished for name in row.figures)
    plots: list[Plot | None] = []
    for number, measure in enumerate(headlines(names)):
        axes = [axis for axis in ("sparsity", "samples", "sequence_length") if axis in varied]
        plots += [against(sweep, finished, axis, measure, name=f"{axis}-{number}") for axis in axes]
        plots.append(against(sweep, finished, BITS_A_WEIGHT, measure, name=f"bits-{number}"))
        if varied.issuperset(OF_GRID):
            plots += surfaces(sweep, finished, measure, name=f"grid-{number}")
    reports = [(outcome.cell, outcome.report) for outcome in outcomes if outcome.report is not None]
    first_seed = [(cell, report) for cell, report in reports if cell.recipe.seed == reports[0][0].recipe.seed]
    plots += [by_depth(sweep, first_seed), by_epoch(sweep, first_seed), seconds(sweep, finished) if finished else None]
    return [plot for plot in plots if plot is not None]


def against(sweep: Sweep, rows: Sequence[Row], over: str, measure: str, *, name: str) -> Plot | None:
    """A measure against an axis or the stored bits a weight: a panel for each model, a line for each kind of cell.

    None for one number of bits.
    """
    of_bits = over == BITS_A_WEIGHT
    rows = [row for row in rows if measure in row.figures and (not of_bits or over in row.figures)]
    if of_bits and len({row.figures[over].value for row in rows}) < 2:
        return None
    along = (*(("sparsity", "bits") if of_bits else (over,)), SEED_AXIS, "model")  # their labels differ along a line
    lines: Lines = {}
    table: dict[tuple[str, str], list[list[str]]] = {}
    last: dict[str, dict[str, Figure]] = {}  # at the last label, by panel and line
    positions, apart = axis_positions(over, sweep.axes.get(over, ()))
    for row in rows:
        figure, scale = row.figures[measure], 100 if row.figures[measure].share else 1
        panel, kind = row.labels.get("model", sweep.models[0]), labels_in_words(row.labels, along) or "all"
        label = f"{row.figures[over].value:.3f}" if of_bits else row.labels[over]
        x = row.figures[over].value if of_bits else positions[label]
        joined = apart is None or x < apart
        error, published = (None if y is None else scale * y for y in (figure.bar, figure.published))
        lines.setdefault((panel, kind), []).append(PlotPoint(x, scale * figure.value, error, published, joined))
        if figure.dense:
            lines.setdefault((panel, DENSE_LABEL), []).append(PlotPoint(x, scale * figure.dense.value))
        line = labels_in_words(row.labels, (SEED_AXIS, "model")) if of_bits else kind
        values = [figure.dense.measured if figure.dense else "", figure.measured, figure.change_text]
        values.append("" if published is None else f"{published:g}")
        table.setdefault((panel, kind), []).append([panel, line, label, *values])
        if not of_bits and label == sweep.axes[over][-1]:
            last.setdefault(panel, {})[kind] = figure
    title = f"{capitalized(spoken(measure))} against {over}"
    text = f"{title}; the dashed line is the model before the run. {ERROR_BARS} "
    if of_bits:
        text += "Bits are those of the packed layers. Cells without integers are left out."
    if apart is not None:
        text += "Patterns that remove as many weights of each group stand apart, on the right. "
    for panel, ranking in ((panel, rank_figures(figures)) for panel, figures in last.items()):
        if ranking:
            value = ", ".join(filter(None, (ranking.figure.short, ranking.figure.change_text)))
            text += f"{panel}: {claim(ranking)}at {sweep.axes[over][-1]} ({value}). "
    ticks = {x: ", ".join(label for label in positions if positions[label] == x) for x in positions.values()}

    def set_ticks(axes: Axes) -> None:
        if of_bits:
            _few_ticks(axes)
        else:
            axes.set_xticks(list(ticks), list(ticks.values()), rotation=45 if len(ticks) > 8 else 0)
        if apart is not None:
            axes.axvline(apart, color=INK, lw=1, ls=":")

    panels = list(dict.fromkeys(panel for panel, _ in lines))
    drawing = line_figure(
        lines,
        [panels],
        xlabel=over,
        ylabel=spoken(measure) + (", %" if any(row.figures[measure].share for row in rows) else ""),
        kinds=_kinds(sweep, along),
        log=measure.startswith("perplexity"),
        finish=set_ticks,
    )
    head = ["model", "line", over, ", ".join(dict.fromkeys(row.start for row in rows)), spoken(measure), "change", "paper"]
    cells = [line for of_line in table.values() for line in of_line]
    columns = len(head) if any(line[-1] for line in cells) else -1  # without the last if nothing is published
    return Plot(name, title, text.rstrip(), head[:columns], [line[:columns] for line in cells], drawing)


def _kinds(sweep: Sweep, without: Sequence[str]) -> list[str]:
    """The lines of a plot, which have the same colors in each plot of the sweep."""
    return list(dict.fromkeys(labels_in_words(cell.labels, without) or "all" for cell in sweep.cells))


def axis_positions(axis: str, labels: Sequence[str]) -> tuple[dict[str, float], float | None]:
    """The positions of labels on their axis, NaN for one that is neither a number nor a pattern.

    Patterns such as N:M, which remove more error than unstructured ones of their sparsity, stand on the right of all of these.

    Returns:
        The positions, and that of the border between the two; None if there is one kind only.
    """
    if axis != "sparsity":
        return {label: _number(label) for label in labels}, None
    patterns = {label: parse_pattern(label) for label in labels}
    plain = {label: 100 * pattern.sparsity for label, pattern in patterns.items() if pattern.is_shareable}
    others = [label for label in labels if label not in plain]
    right, step = (
        max(plain.values(), default=0.0),
        max(5.0, (max(plain.values(), default=0) - min(plain.values(), default=0)) / 5),
    )
    places = {label: right + number * step for number, label in enumerate(others, 1)}
    return plain | places, right + step / 2 if plain and others else None


def _number(label: str) -> float:
    """A label as a number; NaN if it is none."""
    try:
        return float(label)
    except ValueError:
        return math.nan


def surfaces(sweep: Sweep, rows: Sequence[Row], measure: str, *, name: str) -> list[Plot]:
    """Heat maps of a measure over alpha and beta, one for each combination of the other labels, with one scale of colors."""
    from matplotlib.colors import LogNorm, Normalize

    by_label: dict[str, dict[tuple[str, str], Figure]] = {}
    for row in (row for row in rows if measure in row.figures):
        model = "" if "model" in row.labels else ", ".join(sweep.models)
        label = ", ".join(filter(None, (model, labels_in_words(row.labels, OF_GRID))))
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
        cells = {
            (f"alpha {alpha}", beta): (x.value, "\n".join(filter(None, (x.short, x.change_text))))
            for (alpha, beta), x in figures.items()
        }
        rows_of_map = [f"alpha {alpha}" for alpha in sweep.axes["alpha"]]
        drawn = heat_map(cells, rows_of_map, sweep.axes["beta"], labels=("beta", spoken(measure)), kind="measure", norm=norm)
        plots.append(Plot(f"{name}-{number}", title, f"{title}: from {' to '.join(at)}.{dense}", *drawn))
    return plots


def by_depth(sweep: Sweep, reports: Sequence[tuple[Cell, Report]]) -> Plot | None:
    """The mean error of the layers of each block, for every cell; None of methods whose errors have different targets."""
    if not one_target(report for _, report in reports):
        return None
    series = [
        (cell, {block.index: sum(x.error for x in block.layers) / len(block.layers) for block in report.blocks if block.layers})
        for cell, report in reports
    ]
    means = {cell.name: sum(points.values()) / len(points) for cell, points in series if points}
    if not means:
        return None
    lowest = min(means, key=lambda name: means[name])
    text = (
        f"Mean relative output error of each block's layers, {len(means)} cells; the lowest is {means[lowest]:.3g}, {lowest}."
    )
    return Plot("depth", "Error by depth", text, *_series(sweep, series, "block", "mean relative error"))


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
    return Plot("epochs", "Training loss by epoch", text, *_series(sweep, series, "epoch", "objective, relative"))


def _series(
    sweep: Sweep, series: Iterable[tuple[Cell, dict[int, float]]], xlabel: str, ylabel: str
) -> tuple[list[str], list[list[str]], MatplotlibFigure]:
    """A table and a figure of values by block or epoch.

    The figure has a panel for each model and sparsity, and a line for each combination of the other labels.
    """
    series = [(cell, points) for cell, points in series if points]
    along = ("model", "sparsity", SEED_AXIS)
    lines: Lines = {}
    panels: dict[str, dict[str, None]] = {}  # by model, in order
    for cell, points in series:
        panel = ", ".join(filter(None, (cell.model, cell.labels.get("sparsity"))))
        panels.setdefault(cell.model, {})[panel] = None
        lines[panel, labels_in_words(cell.labels, along) or "all"] = [PlotPoint(x, y) for x, y in points.items()]
    positions = sorted({x for _, points in series for x in points})
    table = [[cell.name, *(f"{points[x]:.4g}" if x in points else "" for x in positions)] for cell, points in series]
    rows, kinds = [list(x) for x in panels.values()], _kinds(sweep, along)
    figure = line_figure(lines, rows, xlabel=xlabel, ylabel=ylabel, kinds=kinds, size=(1.6, 2.2), log=True)
    return ["cell", *(f"{xlabel} {x}" for x in positions)], table, figure


def seconds(sweep: Sweep, rows: Sequence[Row]) -> Plot:
    """Seconds of pruning, the mean over cells whose labels differ in the sparsity only."""
    times: dict[str, list[float]] = {}
    for row in rows:
        times.setdefault(labels_in_words(row.labels, ("sparsity",)) or sweep.title, []).append(row.figures["seconds"].value)
    means = {name: sum(values) / len(values) for name, values in times.items()}
    slowest = max(means, key=lambda name: means[name])
    text = f"Seconds of pruning, without loading and evaluation; the longest is {means[slowest]:.1f}, {slowest}."
    table = [[name, f"{value:.1f}"] for name, value in means.items()]
    return Plot("seconds", "Seconds of pruning", text, ["cells", "seconds"], table, seconds_figure(means))


def speed_plot(bench: Bench) -> Plot:
    """A bar for each form, with the ceiling as a line across those with the same threads and sequences."""
    groups = list(dict.fromkeys((speed.threads, speed.batch) for speed in bench.speeds))
    forms = list(dict.fromkeys(speed.form for speed in bench.speeds if speed.form != CEILING))
    speeds = {(x.threads, x.batch, x.form): x for x in bench.speeds}
    figure = new_figure(0.6 + (0.35 + 0.3 * len(forms)) * len(groups))
    for axes, group in zip(figure.subplots(len(groups), squeeze=False)[:, 0], groups, strict=True):
        values = {form: speeds[*group, form].decode for form in forms}
        draw_bars(axes, values, [f"{x:,.1f}" for x in values.values()], [COLORS[2 if form == PACKED else 0] for form in forms])
        axes.axvline(speeds[*group, CEILING].decode, color=INK, lw=1.2, ls="--", label=CEILING)
        axes.set_title(_group(*group), fontsize=9)
    figure.axes[-1].set_xlabel("tokens a second")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper right")
    text = "Tokens decoded a second. The dashed line is memory's speed: that of reading all dense weights a token."
    rows = [[_group(x.threads, x.batch), x.form, f"{x.decode:,.1f}"] for x in bench.speeds]
    return Plot("speed", "Decoding speed", text, ["threads and sequences", "form", "tokens a second"], rows, figure)


def _group(threads: int, batch: int) -> str:
    """The name of the figures with the same threads and sequences."""
    return f"{plural(threads, 'thread')}, {plural(batch, 'sequence')}"
