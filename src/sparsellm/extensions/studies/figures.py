"""Figures in one matplotlib style, each with a description and a table of its data."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from sparsellm.errors import MissingPackage
from sparsellm.extensions.studies.measures import value_with_error

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

INK, FAINT = "#22262e", "#c9ced6"
"""Colors of text and axes, and of grid lines. An HTML page replaces them by its own colors, light or dark."""

FIGURE_WIDTH = 4.4
"""Width of a figure in inches whose content needs no more, about that of a phone's screen."""

COLORS = ("#3d85c6", "#e08214", "#3a9a5b", "#c2559d", "#8c6bb1", "#a6761d", "#d1495b", "#5b9aa0")
"""Colors of lines and bars, distinct on white and on black and with most color vision deficiencies."""

COLOR_MAPS = {"error": "YlOrRd", "sparsity": "PuBu", "measure": "YlGn"}
"""Color maps, one for each kind of value."""

BOUND_MARKS = {"minimum": "▼", "maximum": "▲"}
"""Marks of layers whose sparsity is at a bound of the allocation."""

MARKERS = "osD^vPX*"

NAMED = 16
"""The most lines in a legend; figures with more have none, and their lines the colors of a gradient."""

NUMBERED = 12
"""The most columns of a heat map with a number in each cell."""

STYLE: Mapping[str, Any] = (
    dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK)
    | dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False)
    | {"grid.color": FAINT, "axes.grid": True, "axes.axisbelow": True, "lines.markersize": 5, "savefig.bbox": "tight"}
    | {"svg.fonttype": "none", "svg.hashsalt": "sparsellm", "font.size": 10, "font.family": "sans-serif"}
)
"""Settings of matplotlib. The fixed salt makes the SVG reproducible."""


@contextmanager
def style() -> Iterator[None]:
    """Apply `STYLE` within the context. Raises MissingPackage if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise MissingPackage("Plots are drawn by matplotlib, which is not installed: pip install 'sparsellm[plots]'.") from None
    with matplotlib.rc_context(dict(STYLE)), warnings.catch_warnings():
        # Names in a report can be longer than the figure is wide; matplotlib then draws without the layout.
        warnings.filterwarnings("ignore", "constrained_layout not applied", UserWarning)
        yield


@dataclass(frozen=True)
class Plot:
    """A figure and its content.

    Attributes:
        name: Stem of its file names, and prefix of its identifiers in an HTML page.
        text: Its content in sentences.
        figure: The figure, drawn within `style`.
    """

    name: str
    title: str
    text: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    figure: Figure

    def save(self, file_format: Literal["svg", "png"]) -> bytes:
        """The figure as the content of an SVG file without background, or of a PNG file on white."""
        options: dict[str, Any] = {"dpi": 200, "facecolor": "white", "metadata": {"Software": "sparsellm"}}
        if file_format == "svg":  # without a date, so that the file is reproducible
            metadata = dict.fromkeys(("Date", "Format", "Type")) | {"Creator": "sparsellm"}
            options = {"transparent": True, "metadata": metadata}
        stream = io.BytesIO()
        with style():
            self.figure.savefig(stream, format=file_format, **options)
        return stream.getvalue()

    def inline(self) -> str:
        """The figure as an SVG element of an HTML page: with unique identifiers, the page's colors and a label."""
        svg = self.save("svg").decode()
        svg = svg[svg.index("<svg") :].replace(INK, "currentColor").replace(FAINT, "var(--line)")
        svg = re.sub(r'(\sid="|xlink:href="#|url\(#)', rf"\g<1>{self.name}-", svg)
        # The text keeps a readable size: a wide figure scrolls on a narrow screen, and a narrow one leaves space on a wide one.
        width = re.search(r' width="([\d.]+)pt" height="[\d.]+pt"', svg)
        assert width
        size = f' style="min-width:{1.05 * float(width[1]):.0f}px;max-width:{1.6 * float(width[1]):.0f}px"'
        return svg.replace(width[0], size, 1).replace("<svg", f'<svg role="img" aria-labelledby="{self.name}-title"', 1)


def new_figure(width: float, height: float) -> Figure:
    """An empty figure; width and height in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def plain_numbers(axes: Axes) -> None:
    """Write the numbers of a logarithmic axis without powers of ten. Its limits must be final."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    low, high = axes.get_ylim()
    if axes.get_yscale() == "log" and 0 < low < high:
        locator = LogLocator(subs=(1.0,) if high > 300 * low else (1.0, 2.0, 5.0))
        axes.yaxis.set_major_locator(MaxNLocator(5) if high < 5 * low else locator)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.4g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())


def draw_bars(axes: Axes, values: Mapping[str, float], texts: Sequence[str], colors: str | Sequence[str] = COLORS[0]) -> None:
    """Draw horizontal bars with their texts, from top to bottom."""
    lengths = [value if math.isfinite(value) else math.nan for value in values.values()]
    bars = axes.barh(range(len(values)), lengths, 0.65, color=colors)
    axes.bar_label(bars, texts, padding=6)
    axes.set_yticks(range(len(values)), list(values))
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.grid(axis="y", visible=False)


def seconds_figure(seconds: Mapping[str, float]) -> Figure:
    """Horizontal bars of durations."""
    figure = new_figure(FIGURE_WIDTH, 0.8 + 0.3 * len(seconds))
    axes = figure.subplots()
    draw_bars(axes, seconds, [value_with_error(value) for value in seconds.values()])
    axes.set_xlabel("seconds")
    return figure


def heat_map(
    cells: Mapping[tuple[str, str], tuple[float, str]],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    labels: tuple[str, str],
    kind: str,
    norm: Normalize,
) -> tuple[list[str], list[list[str]], Figure]:
    """A heat map, and before it the head and the rows of a table of its texts, with a row for each of its columns.

    Args:
        cells: The value and the text of a cell, by its row and column. With more than `NUMBERED` columns only the marks in the
            texts are shown.
        rows: Labels of the rows, from top to bottom.
        columns: Labels of the columns; about twelve of them are shown.
        labels: Labels of the columns and of the values.
        kind: Kind of the values, a key of `COLOR_MAPS`.
    """
    from matplotlib import colormaps

    numbered = len(columns) <= NUMBERED
    lines = max((text.count("\n") + 1 for _, text in cells.values()), default=1) if numbered else 1
    width = 2.4 + max((0.5 if numbered else 0.16) * len(columns), 0.07 * max(map(len, columns)))
    figure = new_figure(min(10.0, max(FIGURE_WIDTH, width)), 1.2 + (0.28 + 0.14 * (lines - 1)) * len(rows))
    axes = figure.subplots()
    values = [[cells.get((row, column), (math.nan, ""))[0] for column in columns] for row in rows]
    mesh = axes.pcolormesh(values, norm=norm, cmap=COLOR_MAPS[kind], edgecolors="face")
    for (row, column), (value, text) in cells.items():
        shown = text if numbered else "".join(mark for mark in BOUND_MARKS.values() if mark in text)
        if shown and math.isfinite(value):
            red, green, blue, _ = colormaps[COLOR_MAPS[kind]](norm(value))
            ink = "black" if 0.3 * red + 0.59 * green + 0.11 * blue > 0.55 else "white"
            x, y = columns.index(column) + 0.5, rows.index(row) + 0.5
            axes.text(x, y, shown, size=8, ha="center", va="center", color=ink)
    axes.set_yticks([number + 0.5 for number in range(len(rows))], rows)
    step = max(1, len(columns) // 12)
    axes.set_xticks([number + 0.5 for number in range(0, len(columns), step)], columns[::step])
    axes.set_xlabel(labels[0])
    axes.invert_yaxis()
    axes.grid(visible=False)
    figure.colorbar(mesh, label=labels[1], shrink=0.9)
    plain_numbers(figure.axes[-1])
    table = [[x, *(cells.get((row, x), (0.0, ""))[1].replace("\n", ", ") for row in rows)] for x in columns]
    return [labels[0], *rows], table, figure


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
    *,
    xlabel: str,
    ylabel: str,
    kinds: Sequence[str],
    size: tuple[float, float] = (3.3, 2.8),
    log: bool = False,
    finish: Callable[[Axes], object] = lambda _: None,
) -> Figure:
    """Panels of lines with a common legend.

    Args:
        lines: The points; published values are drawn as larger hollow markers, those of `DENSE_LABEL` as a dashed line.
        panels: Titles of the panels, by row. Those of a row share the vertical axis.
        kinds: Labels of the lines; a line has the color of its place among them.
        size: Width and height of a panel, in inches.
        log: Whether the vertical axes are logarithmic.
        finish: Called with the axes of each panel after its lines are drawn.
    """
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator

    gradient = colormaps["viridis"]
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
                    color = COLORS[number % len(COLORS)] if len(kinds) <= NAMED else gradient(number / (len(kinds) - 1))
                    handles[kind] = _draw_line(axes, points, color, MARKERS[(number + number // len(COLORS)) % len(MARKERS)])
            if dense_values := sorted({(x, y) for x, y, *_ in lines.get((title, DENSE_LABEL), ()) if math.isfinite(y)}):
                handles[DENSE_LABEL] = _draw_dense(axes, dense_values)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.set_title(title, fontsize=9)
            axes.set_xlabel(xlabel)
            if log:
                axes.set_yscale("log")
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


def _draw_line(axes: Axes, points: Sequence[PlotPoint], color: Any, marker: str) -> Any:
    """Draw the points of a line; returns its handle for the legend."""
    style: dict[str, Any] = {"color": color, "marker": marker, "ls": ""}
    joined = [(point.x, point.y) for point in points if point.joined]
    axes.plot([x for x, _ in joined], [y for _, y in joined], color=color)
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
