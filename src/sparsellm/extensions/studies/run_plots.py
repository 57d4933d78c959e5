"""Plots of one run, and of its trainings."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

from sparsellm.errors import plural
from sparsellm.extensions.studies.figures import (
    BOUND_MARKS,
    COLOR_MAPS,
    FIGURE_WIDTH,
    Plot,
    bar_figure,
    heat_map,
    new_figure,
    plain_numbers,
)
from sparsellm.extensions.studies.measures import short_names, value_with_error
from sparsellm.extensions.studies.search_result import SearchResult
from sparsellm.methods import WHOLE_MODEL, BlockResult, LayerResult, TrainingResult
from sparsellm.outputs.report import Report

if TYPE_CHECKING:
    from matplotlib.colors import Normalize

DIFFERENT = 0.001
"""The least difference of sparsities that is shown: equal patterns differ by less, since counts are rounded."""


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
    """The curve of a search: perplexity or accuracy, on the first text or task, against the sparsity."""
    if (search := SearchResult.of(report)) is None:
        return None
    points = [(x, value) for x in search.points for value in [*x.perplexity.values(), *x.accuracy.values()][:1]]
    if not points:
        return None
    name = short_names(points[0][0].perplexity or points[0][0].accuracy)
    label = f"{'perplexity' if points[0][0].perplexity else 'accuracy'} on {next(iter(name.values()))}"
    figure = new_figure(FIGURE_WIDTH, 3.0)
    axes = figure.subplots()
    for effort in dict.fromkeys(x.effort for x, _ in points):
        xy = [(100 * x.sparsity, value) for x, value in points if x.effort == effort and math.isfinite(value)]
        axes.plot(*zip(*xy, strict=True), marker="o", label=effort)
    axes.set_xlabel("sparsity, %")
    axes.set_ylabel(label)
    figure.legend(loc="outside upper right", ncols=2)
    text = f"Sparsities that the search tried, for {search.target}: {sum(x.met for x, _ in points)} of {len(points)} meet it."
    if unsure := sum(x.undecided for x, _ in points):
        text += f" Of {unsure} it cannot be told: the measurement is within its error of the target."
    rows = [
        [
            f"{100 * x.sparsity:.5g} %",
            x.effort,
            value_with_error(value),
            "undecided" if x.undecided else "yes" if x.met else "no",
        ]
        for x, value in points
    ]
    return Plot("search", "Search", text, ["sparsity", "effort", label, "met"], rows, figure)


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
    by_block = [{layer.name.removeprefix(f"{block.name}."): layer for layer in block.layers} for block in blocks]
    layers = sorted((layer for by_kind in by_block for layer in by_kind.values()), key=attrgetter(field))
    marks = {name: BOUND_MARKS[bound] for name, bound in at_bound(layers).items()} if field == "sparsity" else {}
    kinds = list(dict.fromkeys(kind for by_kind in by_block for kind in by_kind))
    columns = zip(blocks, by_block, strict=True)
    indices = [block.name if block.name in x else str(block.index) for block, x in columns]  # the head is its own layer
    cells = [[scale * getattr(x[kind], field) if kind in x else math.nan for x in by_block] for kind in kinds]
    texts = [[shown(x[kind]) + marks.get(x[kind].name, "") if kind in x else "" for x in by_block] for kind in kinds]
    extremes = " to ".join(f"{shown(x)}{unit} ({x.name})" for x in (layers[0], layers[-1]))
    title = f"{field.capitalize()} of each layer"
    text = f"{title}, {sum(map(str.isdigit, indices))} blocks by {len(kinds)} kinds of layer: from {extremes}."
    if marks:
        at_bounds = (f"{list(marks.values()).count(mark)} at its {bound} ({mark})" for bound, mark in BOUND_MARKS.items())
        text += f" The allocation has {' and '.join(at_bounds)}."
    rows = [[index, *column] for index, column in zip(indices, zip(*texts, strict=True), strict=True)]
    figure = heat_map(cells, kinds, indices, labels=("block", label), kind=field, texts=texts, norm=norm)
    return Plot(f"{field}-map", title, text, ["block", *kinds], rows, figure)


def convergence(blocks: Sequence[BlockResult]) -> Plot | None:
    """Error of the feed-forward parts after each step, and the objective of Algorithm 1; None if no part has two steps."""
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator

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
    figure = new_figure(7.0 if len(measures) > 1 else FIGURE_WIDTH, 3.0)
    for axes, (field, label) in zip(figure.subplots(1, len(measures), squeeze=False)[0], measures.items(), strict=True):
        for number, (index, steps) in enumerate(series.items()):
            values = [getattr(step, field) for step in steps]
            if None not in values:
                color = colormaps[COLOR_MAPS["block"]](0.25 + 0.65 * number / max(len(series) - 1, 1))
                axes.plot(range(1, len(values) + 1), values, marker="o", color=color, label=f"block {index}")
        axes.set_yscale("log")
        plain_numbers(axes)
        axes.set_xlabel("step")
        axes.set_ylabel(f"{label} (mean over tokens)" if field == "after_weights" else label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if len(series) <= 8:
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower left", ncols=4)
    return Plot("convergence", "Convergence", text, ["block", "step", *measures.values()], rows, figure)


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
    figure = bar_figure([name for name, _ in stages], [seconds for _, seconds in stages])
    return Plot("time", "Time and memory", text, ["stage", "seconds", "share"], rows, figure)


def training_curves(report: Report) -> Plot | None:
    """The held-out and the training loss at each validation; None if nothing was trained."""
    from matplotlib import colormaps

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
    figure = new_figure(FIGURE_WIDTH, 3.0)
    axes = figure.subplots()
    for number, (name, training) in enumerate(trainings.items()):
        color = colormaps[COLOR_MAPS["block"]](0.25 + 0.65 * number / max(len(trainings) - 1, 1))
        held_out = [(x.step, x.held_out) for x in training.curve if math.isfinite(x.held_out)]
        axes.plot(*zip(*held_out, strict=True), marker="o", color=color, label=f"{name}, held-out")
        trained = [(x.step, x.training) for x in training.curve if x.training is not None and math.isfinite(x.training)]
        if trained and len(trainings) == 1:
            axes.plot(*zip(*trained, strict=True), linestyle="--", color=color, label="training")
    axes.set_yscale("log")
    plain_numbers(axes)
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    if len(trainings) <= 8:
        figure.legend(loc="outside lower left", ncols=2)
    return Plot("training", "Training", text, ["trained", "step", "training loss", "held-out loss"], rows, figure)
