"""Plots of one run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter

from sparsellm.reports.comparison import short_names, value_with_error
from sparsellm.reports.figures import Plot, bar_figure, heat_map, new_figure
from sparsellm.runs.records import SavedBlock, SavedReport


def run_plots(report: SavedReport) -> list[Plot]:
    """All plots of a run that its report has data for."""
    blocks = [block for block in report.blocks if block.layers]
    plots = [before_and_after(report), *(_layer_maps(blocks) if blocks else ()), convergence(blocks), where_time_went(report)]
    return [plot for plot in plots if plot is not None]


def before_and_after(report: SavedReport) -> Plot | None:
    """Perplexity of the dense and the pruned model on each text, with standard errors."""
    names = short_names(report.perplexity)
    pairs = {names[text]: (x.dense, x.pruned) for text, x in report.perplexity.items() if x.dense and x.pruned}
    if not pairs:
        return None
    rows = [[text, *(value_with_error(x.value, x.standard_error) for x in pair if x)] for text, pair in pairs.items()]
    text = "; ".join(f"{name}: perplexity changes from {dense} to {pruned}" for name, dense, pruned in rows)
    series = {
        model: [(x.value, x.standard_error) for pair in pairs.values() if (x := pair[number])]
        for number, model in enumerate(("dense", "pruned"))
    }
    figure = bar_figure(list(pairs), "perplexity", series)
    return Plot("before-and-after", "Before and after", f"{text}.", ["text", "dense", "pruned"], rows, figure)


def _layer_maps(blocks: Sequence[SavedBlock]) -> list[Plot]:
    """Heat maps of error and sparsity: a column for each block, a row for each kind of layer."""
    from matplotlib.colors import LogNorm, Normalize

    layers = [layer for block in blocks for layer in block.layers]
    errors = [layer.error for layer in layers if 0 < layer.error < math.inf] or [1.0]
    sparsities = [layer.sparsity for layer in layers]
    # The scale ends at multiples of 0.05, so that rounding of the counts of one pattern does not look like a difference.
    linear = Normalize(math.floor(20 * min(sparsities) - 1e-3) / 20, math.ceil(20 * max(sparsities) + 1e-3) / 20)
    indices = [str(block.index) for block in blocks]
    by_block = [{layer.name.removeprefix(f"{block.name}."): layer for layer in block.layers} for block in blocks]
    kinds = list(dict.fromkeys(kind for by_kind in by_block for kind in by_kind))
    plots = []
    for field, title, label, norm in (
        ("error", "Error of each layer", "relative output error", LogNorm(min(errors), max(errors) * (1 + 1e-9))),
        ("sparsity", "Sparsity of each layer", "fraction of zeros", linear),
    ):
        value = attrgetter(field)
        lowest, highest = (f"{value(x):.3g} ({x.name})" for x in (min(layers, key=value), max(layers, key=value)))
        text = f"{title}, {len(blocks)} blocks by {len(kinds)} kinds of layer: the {label} is from {lowest} to {highest}."
        cells = [[value(by_kind[kind]) if kind in by_kind else math.nan for by_kind in by_block] for kind in kinds]
        columns = zip(*cells, strict=True)
        rows = [[i, *("" if math.isnan(x) else f"{x:.3g}" for x in column)] for i, column in zip(indices, columns, strict=True)]
        figure = heat_map(cells, kinds, indices, xlabel="block", ylabel="", label=label, norm=norm)
        plots.append(Plot(f"{field}-map", title, text, ["block", *kinds], rows, figure))
    return plots


def convergence(blocks: Sequence[SavedBlock]) -> Plot | None:
    """Error of the feed-forward parts after each step, and the objective of Algorithm 1 if the report has it."""
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator

    series = {block.index: steps for block in blocks if (steps := [step for step in block.epochs if step.accepted])}
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
    figure = new_figure(7.0 if len(measures) > 1 else 5.4, 3.4)
    for axes, (field, label) in zip(figure.subplots(1, len(measures), squeeze=False)[0], measures.items(), strict=True):
        for number, (index, steps) in enumerate(series.items()):
            values = [getattr(step, field) for step in steps]
            if None not in values:
                colour = colormaps["viridis"](0.25 + 0.65 * number / max(len(series) - 1, 1))
                axes.plot(range(1, len(values) + 1), values, marker="o", color=colour, label=f"block {index}")
        axes.set_yscale("log")
        axes.set_xlabel("step")
        axes.set_ylabel(f"{label} (mean over tokens)" if field == "after_weights" else label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if len(series) <= 8:
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    return Plot("convergence", "Convergence", text, ["block", "step", *measures.values()], rows, figure)


def where_time_went(report: SavedReport) -> Plot:
    """Seconds of each phase, and peak memory of the process."""
    phases = sorted(((name, x) for name, x in report.seconds.items() if name != "total"), key=lambda phase: -phase[1])
    total = sum(seconds for _, seconds in phases) or 1.0
    rows = [[name, f"{seconds:.1f}", f"{100 * seconds / total:.0f} %"] for name, seconds in phases]
    peak = report.peak_memory_bytes
    memory = f" Peak memory of the process: {peak / 2**30:.2f} GiB." if peak else ""
    text = f"Of {total:.1f} seconds, {rows[0][0]} took {rows[0][2]}.{memory}" if rows else f"No phase was timed.{memory}"
    figure = bar_figure([name for name, _ in phases], "seconds", {"": [(seconds, None) for _, seconds in phases]})
    return Plot("time", "Time and memory", text, ["phase", "seconds", "share"], rows, figure)
