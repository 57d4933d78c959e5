"""Plots of what a sweep's cells went through: error by depth, training loss by epoch; a panel for each model and sparsity."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sparsellm.comparison import SEED
from sparsellm.drawing import COLOURS, INK, MARKERS, Plot, drawn
from sparsellm.sweep_file import Cell, in_words
from sparsellm.sweeping import Outcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

Lines = Sequence[tuple[Cell, Sequence[tuple[int, float]]]]
"""Cells, each with a figure at blocks or epochs."""

NAMED = 16
"""Lines of different looks that a legend still tells apart."""


def by_depth(outcomes: Sequence[Outcome]) -> Plot | None:
    """The mean error of each block's layers, for every finished cell of the first seed."""
    lines: list[tuple[Cell, list[tuple[int, float]]]] = []
    for cell, report in _first_seed(outcomes):
        errors = {block["index"]: [layer["error"] for layer in block["layers"]] for block in report["blocks"]}
        if points := [(index, sum(some) / len(some)) for index, some in errors.items() if some]:
            lines.append((cell, points))
    if not lines:
        return None
    means = {cell.name: sum(value for _, value in points) / len(points) for cell, points in lines}
    least = min(means, key=lambda name: means[name])
    text = (
        f"Mean relative output error of each block's layers, {len(lines)} cells; the least is {means[least]:.3g}, {least}. "
        "Each is measured by its method's own aim: the default's includes what earlier layers got wrong, so it is larger."
    )

    def dress(axes: Axes) -> None:
        axes.set_yscale("log")

    return _panels("depth", "Error by depth", text, "block", "mean relative error", lines, dress)


def by_epoch(outcomes: Sequence[Outcome]) -> Plot | None:
    """Algorithm 1's objective after each epoch, the mean over blocks relative to the first epoch's, for the first seed."""
    lines: list[tuple[Cell, list[tuple[int, float]]]] = []
    for cell, report in _first_seed(outcomes):
        series = [
            [step["after_weights"] for step in block["epochs"] if step["step"] == "published"] for block in report["blocks"]
        ]
        series = [found for found in series if len(found) > 1 and None not in found and found[0]]
        if series:
            many = range(len(series[0]))
            lines.append((cell, [(n + 1, sum(found[n] / found[0] for found in series) / len(series)) for n in many]))
    if not lines:
        return None
    ends = [points[-1][1] for _, points in lines]
    text = (
        f"The objective of Algorithm 1 after the last epoch is {min(ends):.3g} to {max(ends):.3g} times that after the first."
    )

    def dress(axes: Axes) -> None:
        axes.axhline(1.0, color=INK, lw=0.6)

    return _panels("epochs", "Training loss by epoch", text, "epoch", "objective, relative", lines, dress)


def _first_seed(outcomes: Sequence[Outcome]) -> list[tuple[Cell, Mapping[str, Any]]]:
    """The finished cells that have the seed of the first one, with their reports."""
    done = [(outcome.cell, outcome.report) for outcome in outcomes if outcome.report is not None]
    return [(cell, report) for cell, report in done if cell.recipe.seed == done[0][0].recipe.seed]


def _panels(name: str, title: str, text: str, along: str, measure: str, lines: Lines, dress: Callable[[Axes], None]) -> Plot:
    """A row of panels for each model, a column for each sparsity, in each a line for whatever else differs."""

    def labels(axis: str) -> list[str]:
        return list(dict.fromkeys(cell.labels.get(axis, "") for cell, _ in lines))

    models, sparsities = labels("model"), labels("sparsity")
    without = ("model", "sparsity", SEED)
    kinds = list(dict.fromkeys(in_words(cell.labels, without) for cell, _ in lines))
    named = 1 < len(kinds) <= NAMED

    def panel(axes: Axes, model: str, sparsity: str) -> None:
        from matplotlib.ticker import MaxNLocator

        for cell, points in lines:
            if (cell.labels.get("model", ""), cell.labels.get("sparsity", "")) == (model, sparsity):
                axes.plot(*zip(*points, strict=True), **_look(kinds.index(in_words(cell.labels, without))))
        dress(axes)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))

    def draw(canvas: Canvas) -> None:
        from matplotlib.lines import Line2D

        grid = canvas.subplots(len(models), len(sparsities), squeeze=False, sharex="row", sharey="row")
        for model, row in zip(models, grid, strict=True):
            for sparsity, axes in zip(sparsities, row, strict=True):
                panel(axes, model, sparsity)
            row[0].set_ylabel(model if len(models) > 1 else measure, fontsize=9)
        for sparsity, axes in zip(sparsities, grid[0], strict=True):
            axes.set_title(sparsity if len(sparsities) > 1 else "", fontsize=10)
        if len(models) > 1:
            canvas.supylabel(measure, fontsize=10)
        for axes in grid[-1]:
            axes.set_xlabel(along)
        if named:
            looks = [Line2D([], [], **_look(number)) for number in range(len(kinds))]
            canvas.legend(looks, kinds, loc="outside lower center", ncols=2, fontsize=8)

    places = sorted({at for _, points in lines for at, _ in points})
    rows = [[cell.name, *(f"{dict(points)[at]:.4g}" if at in dict(points) else "" for at in places)] for cell, points in lines]
    wide, tall = 1.2 + 1.6 * len(sparsities), 0.6 + (1.9 if len(models) > 1 else 2.6) * len(models)
    size = (max(5.6, wide), tall + (0.11 * len(kinds) if named else 0))
    return drawn(name, title, text, ["cell", *(f"{along} {at}" for at in places)], rows, draw, size)


def _look(number: int) -> dict[str, Any]:
    """Colour and marker of a kind of line."""
    marker = MARKERS[number // len(COLOURS) % len(MARKERS)]
    return {"color": COLOURS[number % len(COLOURS)], "marker": marker, "ms": 4}
