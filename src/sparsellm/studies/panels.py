"""Panels of lines: measured values with errors, published ones, and the dense model's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from sparsellm.studies.figures import COLOURS, INK, WIDTH, new_figure, plain_numbers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = "osD^vPX*"

NAMED = 16
"""The most lines in a legend; figures with more have none."""


class Point(NamedTuple):
    """A point of a plot.

    Attributes:
        joined: Whether the line passes through the point.
    """

    x: float
    y: float
    error: float | None = None
    published: float | None = None
    joined: bool = True


DENSE = "dense"
"""Label of the dense model's line."""

Lines = dict[tuple[str, str], list[Point]]
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
) -> Figure:
    """Panels of lines with a common legend.

    Args:
        lines: The points; published values are drawn as larger hollow markers, and the points of `DENSE` as a dashed line.
        panels: Titles of the panels, by row.
        kinds: Labels of the lines; a line has the colour of its place among them.
        finish: Called with the axes of each panel after its lines are drawn.
    """
    from matplotlib.ticker import MaxNLocator

    columns = max(map(len, panels))
    dense = any(kind == DENSE for _, kind in lines)
    shown = len({kind for _, kind in lines})
    legend = 1 < shown <= NAMED
    figure = new_figure(max(WIDTH, 1.2 + size[0] * columns), 0.6 + size[1] * len(panels) + 0.12 * shown * legend)
    grid = figure.subplots(len(panels), columns, squeeze=False, sharey="row")
    handles: dict[str, Any] = {}
    for titles, row in zip(panels, grid, strict=True):
        for title, axes in zip(titles, row, strict=False):
            for number, kind in enumerate(kinds):
                if points := sorted(point for point in lines.get((title, kind), ()) if math.isfinite(point.y)):
                    handles[kind] = _draw_line(axes, points, number)
            if dense_values := sorted({(x, y) for x, y, *_ in lines.get((title, DENSE), ()) if math.isfinite(y)}):
                handles[DENSE] = _draw_dense(axes, dense_values)
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
            values = {y for _, y, *_ in lines.get((title, DENSE), ()) if math.isfinite(y) and y > 0}
            if len(values) == 1:
                _add_changes(axes, values.pop(), ylabel.endswith("%"))
    figure.supylabel(ylabel, fontsize=10)
    if legend:
        figure.legend(list(handles.values()), list(handles), loc="outside lower left", ncols=2, fontsize=8)
    return figure


def _draw_line(axes: Axes, points: Sequence[Point], number: int) -> Any:
    """Draw the points of a line, with the colour and marker of its number; returns its handle for the legend."""
    marker = MARKERS[(number + number // len(COLOURS)) % len(MARKERS)]
    style: dict[str, Any] = {"color": COLOURS[number % len(COLOURS)], "marker": marker, "ls": ""}
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
        list(ticks.values()), [f"{100 * x:+,g}{'' if share else ' %'}" if x else "dense" for x in ticks], fontsize=8
    )
    right.minorticks_off()
