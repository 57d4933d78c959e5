"""Plots of what a sweep found: perplexity against sparsity, calibration and hyper-parameters, and time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sparsellm.comparison import SEED, Figure, Row
from sparsellm.drawing import COLOURS, MARKERS, Plot, drawn
from sparsellm.panels import by_depth, by_epoch
from sparsellm.patterns import NM, parse_pattern
from sparsellm.plots import with_error
from sparsellm.sweep_file import Sweep, in_words
from sparsellm.sweeping import Outcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

PANELS = 3
"""Panels in a row; more go below."""


def sweep_plots(sweep: Sweep, rows: Sequence[Row], outcomes: Sequence[Outcome]) -> list[Plot]:
    """All plots that a sweep's axes and results have something for."""
    done = [row for row in rows if row.figures]
    found: list[Plot] = []
    for number, measure in enumerate(_quality(done)):
        for axis in ("sparsity", "samples", "length", "written"):
            if len(sweep.axes.get(axis, ())) > 1:
                found.append(against(sweep, done, axis, measure, f"{axis}-{number}"))
        if len(sweep.axes.get("alpha", ())) > 1 and len(sweep.axes.get("beta", ())) > 1:
            found += surface(sweep, done, measure, f"grid-{number}")
    depth = by_depth(outcomes)
    epochs = by_epoch(outcomes)
    return [*found, *([depth] if depth else []), *([epochs] if epochs else []), *([seconds(sweep, done)] if done else [])]


def _quality(rows: Sequence[Row]) -> list[str]:
    """The measures that say how good a pruned model is."""
    every = dict.fromkeys(name for row in rows for name in row.figures)
    return [name for name in every if name.startswith("perplexity ") or name in ("accuracy mean",)]


def against(sweep: Sweep, rows: Sequence[Row], axis: str, measure: str, name: str) -> Plot:
    """A measure against an axis of numbers or patterns: a panel for each model, a line for whatever else differs; a paper's
    figures hollow."""
    models = list(dict.fromkeys(row.labels.get("model", "") for row in rows))
    lines: dict[tuple[str, str], list[tuple[float, str, Figure]]] = {}
    for row in rows:
        if measure in row.figures:
            kind = in_words(row.labels, (axis, SEED, "model")) or "all"
            point = (place_of(axis, row.labels[axis]), row.labels[axis], row.figures[measure])
            lines.setdefault((row.labels.get("model", ""), kind), []).append(point)
    kinds = list(dict.fromkeys(kind for _, kind in lines))
    table = [
        [model, kind, label, with_error(x.value, x.error), "" if x.published is None else f"{x.published:g}"]
        for (model, kind), points in lines.items()
        for _, label, x in points
    ]
    best = [
        min(((points[-1][2].value, kind) for (m, kind), points in lines.items() if m == model), default=(math.nan, ""))
        for model in models
    ]
    labels = sweep.axes[axis]
    text = f"{measure} against {axis}, {len(kinds)} lines. " + " ".join(
        f"{model or 'The model'}: the least at the last point is {value:.4g}, {kind}."
        for model, (value, kind) in zip(models, best, strict=True)
        if kind
    )

    def panel(axes: Axes, model: str) -> None:
        for number, kind in enumerate(kinds):
            points = sorted(lines.get((model, kind), []), key=lambda point: point[0])
            points = [point for point in points if math.isfinite(point[2].value)]
            if not points:
                continue
            look: dict[str, Any] = {"color": COLOURS[number % len(COLOURS)], "marker": MARKERS[number % len(MARKERS)]}
            at, values = [x for x, _, _ in points], [x.value for _, _, x in points]
            smooth = [not _is_nm(axis, label) for _, label, _ in points]
            axes.plot(
                [x for x, ok in zip(at, smooth, strict=True) if ok],
                [y for y, ok in zip(values, smooth, strict=True) if ok],
                color=look["color"],
            )
            axes.errorbar(at, values, [x.error or 0.0 for _, _, x in points], ls="", capsize=2, label=kind, **look)
            theirs = [(x, point.published) for x, _, point in points if point.published is not None]
            if theirs:
                axes.plot(*zip(*theirs, strict=True), ls="", mfc="none", ms=9, color=look["color"], marker=look["marker"])
        if measure.startswith("perplexity"):
            axes.set_yscale("log")
        axes.set_title(model, fontsize=10)
        axes.set_xlabel(axis)
        ticks = {place_of(axis, label): label for label in labels}
        axes.set_xticks(list(ticks), list(ticks.values()), rotation=45 if len(ticks) > 4 else 0)

    def draw(canvas: Canvas) -> None:
        wide = min(PANELS, len(models))
        grid = canvas.subplots(-(-len(models) // wide), wide, squeeze=False).flat
        for axes, model in zip(grid, models, strict=False):
            panel(axes, model)
        for axes in list(grid)[len(models) :]:
            axes.set_visible(False)
        canvas.supylabel(measure, fontsize=10)
        handles, names = max((axes.get_legend_handles_labels() for axes in canvas.axes), key=lambda found: len(found[1]))
        canvas.legend(handles, names, loc="outside lower center", ncols=2)

    tall = -(-len(models) // PANELS)
    size = (2.4 + 3.0 * min(PANELS, len(models)), 0.4 + 2.8 * tall + 0.12 * len(kinds))
    return drawn(name, f"{measure} against {axis}", text, ["model", "line", axis, measure, "paper"], table, draw, size)


def place_of(axis: str, label: str) -> float:
    """Where a label stands on its axis."""
    if axis == "sparsity":
        pattern = parse_pattern(label)
        return 100 * (pattern.zeros / pattern.group if isinstance(pattern, NM) else pattern.sparsity)
    try:
        return float(label)
    except ValueError:
        return math.nan


def _is_nm(axis: str, label: str) -> bool:
    """Whether a point is an N:M pattern: such points stand beside the line of the unstructured ones."""
    return axis == "sparsity" and isinstance(parse_pattern(label), NM)


def surface(sweep: Sweep, rows: Sequence[Row], measure: str, name: str) -> list[Plot]:
    """A measure over alpha and beta, a plot for each place of the other axes."""
    alphas, betas = sweep.axes["alpha"], sweep.axes["beta"]
    places: dict[str, dict[tuple[str, str], float]] = {}
    for row in rows:
        if measure in row.figures:
            rest = in_words(row.labels, ("alpha", "beta"))
            places.setdefault(rest, {})[row.labels["alpha"], row.labels["beta"]] = row.figures[measure].value
    found = []
    for number, (rest, values) in enumerate(places.items()):
        least, most = min(values, key=lambda at: values[at]), max(values, key=lambda at: values[at])
        ends = [f"{values[at]:.4g} (alpha {at[0]}, beta {at[1]})" for at in (least, most)]
        text = f"{measure} over alpha and beta, {rest}: from {ends[0]} to {ends[1]}."
        table = [
            [alpha, *(f"{values[alpha, beta]:.4g}" if (alpha, beta) in values else "" for beta in betas)] for alpha in alphas
        ]

        def draw(canvas: Canvas, values: Mapping[tuple[str, str], float] = values) -> None:
            axes = canvas.subplots()
            cells = [[values.get((alpha, beta), math.nan) for beta in betas] for alpha in alphas]
            mesh = axes.pcolormesh(cells, cmap="viridis", edgecolors="face")
            axes.set_yticks([n + 0.5 for n in range(len(alphas))], alphas)
            axes.set_xticks([n + 0.5 for n in range(len(betas))], betas)
            axes.set_xlabel("beta")
            axes.set_ylabel("alpha")
            axes.grid(visible=False)
            canvas.colorbar(mesh, label=measure)

        found.append(drawn(f"{name}-{number}", f"{measure}: alpha and beta", text, ["alpha", *betas], table, draw, (5.0, 3.2)))
    return found


def seconds(sweep: Sweep, rows: Sequence[Row]) -> Plot:
    """Seconds of pruning at each place, the mean over places that share all labels but the sparsity's."""
    found: dict[str, list[float]] = {}
    for row in rows:
        name = in_words(row.labels, ("sparsity",)) or sweep.title
        found.setdefault(name, []).append(row.figures["seconds"].value)
    means = {name: sum(values) / len(values) for name, values in found.items()}
    table = [[name, f"{value:.1f}"] for name, value in means.items()]
    slow = max(means, key=lambda name: means[name])
    text = f"Seconds of pruning, without loading and measuring; the most is {means[slow]:.1f}, {slow}."

    def draw(canvas: Canvas) -> None:
        axes = canvas.subplots()
        bars = axes.barh(list(means), list(means.values()), color=COLOURS[0], height=0.6)
        axes.bar_label(bars, [f" {value:.1f}" for value in means.values()])
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("seconds")

    return drawn("seconds", "Seconds of pruning", text, ["cells", "seconds"], table, draw, (5.6, 0.9 + 0.24 * len(means)))
