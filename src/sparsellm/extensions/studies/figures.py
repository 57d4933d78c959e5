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
from sparsellm.runtime.memory import human_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

INK, FAINT = "#22262e", "#c9ced6"
"""Colors of text and axes, and of grid lines. An HTML page replaces them by its own colors, light or dark."""

BROAD, SLIM = 9.2, 4.4
"""Widths of a figure in inches, for a page on a desk and for one on a phone, where its text has the size of the page's."""

COLORS = ("#3d85c6", "#e08214", "#3a9a5b", "#c2559d", "#8c6bb1", "#a6761d", "#d1495b", "#5b9aa0")
"""Colors of lines and bars, distinct on white and on black and with most color vision deficiencies."""

COLOR_MAPS = {"error": "YlOrRd", "sparsity": "PuBu", "measure": "YlGn"}
"""Color maps, one for each kind of value."""

BOUND_MARKS = {"minimum": "▼", "maximum": "▲"}
"""Marks of layers whose sparsity is at a bound of the allocation."""

MARKERS = "osD^vPX*"

NAMED = 16
"""The most lines in a legend; figures with more have none, and their lines the colors of a gradient."""

CHARACTER, LABELED = 0.075, 10
"""Width of a character of a tick in inches, and the most points that have their names beside them."""

STYLE: Mapping[str, Any] = (
    dict.fromkeys(("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), INK)
    | dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False)
    | {"grid.color": FAINT, "axes.grid": True, "axes.axisbelow": True, "lines.markersize": 5, "savefig.bbox": "tight"}
    | {"svg.fonttype": "none", "svg.hashsalt": "sparsellm", "font.size": 10, "font.family": "sans-serif"}
)
"""Settings of matplotlib. The fixed salt makes the SVG reproducible."""


@contextmanager
def style(width: float = BROAD) -> Iterator[None]:
    """Apply `STYLE` within the context, with a width of figures in inches.

    Raises:
        MissingPackage: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise MissingPackage("Plots are drawn by matplotlib, which is not installed: pip install 'sparsellm[plots]'.") from None
    with matplotlib.rc_context({**STYLE, "figure.figsize": (width, width)}), warnings.catch_warnings():
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
        slim: The same, drawn for the width of a phone.
    """

    name: str
    title: str
    text: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    figure: Figure
    slim: Figure | None = None

    def save(self, file_format: Literal["svg", "png"], figure: Figure | None = None) -> bytes:
        """The figure, or another one, as the content of an SVG file without background, or of a PNG file on white."""
        options: dict[str, Any] = {"dpi": 200, "facecolor": "white", "metadata": {"Software": "sparsellm"}}
        if file_format == "svg":  # without a date, so that the file is reproducible
            metadata = dict.fromkeys(("Date", "Format", "Type")) | {"Creator": "sparsellm"}
            options = {"transparent": True, "metadata": metadata}
        stream = io.BytesIO()
        with style():
            (figure or self.figure).savefig(stream, format=file_format, **options)
        return stream.getvalue()

    def inline(self) -> str:
        """The figure as SVG elements of an HTML page: with unique identifiers, the page's colors and a label.

        The page shows the one that fits the screen, in the whole width.
        """
        drawn = []
        for kind, figure in (("broad", self.figure), ("slim", self.slim)):
            if figure is not None:
                svg = self.save("svg", figure).decode()
                svg = svg[svg.index("<svg") :].replace(INK, "currentColor").replace(FAINT, "var(--line)")
                svg = re.sub(r'(\sid="|xlink:href="#|url\(#)', rf"\g<1>{self.name}-{kind}-", svg)
                svg = re.sub(r' width="[\d.]+pt" height="[\d.]+pt"', f' class="{kind}"', svg, count=1)
                drawn.append(svg.replace("<svg", f'<svg role="img" aria-labelledby="{self.name}-title"', 1))
        return "".join(drawn)


def figure_width() -> float:
    """Width of figures in inches, within `style`."""
    from matplotlib import rcParams

    return float(rcParams["figure.figsize"][0])


def new_figure(height: float) -> Figure:
    """An empty figure of a height in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(figure_width(), height), layout="constrained")


def size_unit(count: float) -> tuple[str, int]:
    """The unit in which a number of bytes is shown, and how many bytes it has."""
    unit = human_bytes(count).split()[-1]
    return unit, 1024 ** ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB").index(unit)


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
    """Draw horizontal bars with their texts, from top to bottom; names that are long stand above the bars."""
    lengths = [value if math.isfinite(value) else math.nan for value in values.values()]
    are_long = CHARACTER * max(map(len, values), default=0) > figure_width() / 3
    bars = axes.barh(range(len(values)), lengths, 0.3 if are_long else 0.65, color=colors)
    axes.bar_label(bars, texts, padding=6)
    axes.set_yticks(range(len(values)), ["" for _ in values] if are_long else list(values))
    axes.tick_params(axis="y", length=0 if are_long else 3.5)
    for number, name in enumerate(values if are_long else ()):
        axes.annotate(name, (0, number - 0.2), xytext=(2, 1), textcoords="offset points", fontsize=8, va="bottom")
    axes.set_ylim(-0.8 if are_long else -0.5, len(values) - 0.5)
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.grid(axis="y", visible=False)


def seconds_figure(seconds: Mapping[str, float]) -> Figure:
    """Horizontal bars of durations."""
    figure = new_figure(0.8 + 0.36 * len(seconds))
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
        cells: The value and the text of a cell, by its row and column. Where the texts do not fit, only the marks in them are
            shown.
        rows: Labels of the rows, from top to bottom.
        columns: Labels of the columns, of which those that fit are shown.
        labels: Labels of the columns and of the values.
        kind: Kind of the values, a key of `COLOR_MAPS`.
    """
    from matplotlib import colormaps

    whole = figure_width()
    width = max(whole - 1.0 - CHARACTER * max(map(len, rows)), whole / 4) / len(columns)  # of a column
    longest = max((len(line) for _, text in cells.values() for line in text.split("\n")), default=1)
    numbered = 0.8 * CHARACTER * (1 + longest) < width
    lines = max((text.count("\n") + 1 for _, text in cells.values()), default=1) if numbered else 1
    figure = new_figure(1.2 + (0.28 + 0.14 * (lines - 1)) * len(rows))
    axes = figure.subplots()
    values = [[cells.get((row, column), (math.nan, ""))[0] for column in columns] for row in rows]
    mesh = axes.pcolormesh(values, norm=norm, cmap=COLOR_MAPS[kind], edgecolors="face")
    for (row, column), (value, text) in cells.items():
        shown = text if numbered else "".join(mark for mark in BOUND_MARKS.values() if mark in text)
        if shown and math.isfinite(value):
            red, green, blue, _ = colormaps[COLOR_MAPS[kind]](norm(value))
            ink = "black" if 0.3 * red + 0.59 * green + 0.11 * blue > 0.55 else "white"
            x, y = columns.index(column) + 0.5, rows.index(row) + 0.5
            axes.text(x, y, shown, size=8 if numbered else min(8.0, 60 * width), ha="center", va="center", color=ink)
    axes.set_yticks([number + 0.5 for number in range(len(rows))], rows)
    step = math.ceil(CHARACTER * (1 + max(map(len, columns))) / width)
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
    size: tuple[float, float] = (2.6, 2.8),
    log: bool = False,
    at_points: bool = False,
    finish: Callable[[Axes], object] = lambda _: None,
) -> Figure:
    """Panels of lines with a common legend.

    Args:
        lines: The points; published values are drawn as larger hollow markers, those of `DENSE_LABEL` as a dashed line.
        panels: Titles of the panels, by group. Those of a group are in rows, as many as fit, and share the vertical axis of it.
        kinds: Labels of the lines; a line has the color of its place among them.
        size: Least width and height of a panel, in inches.
        log: Whether the vertical axes are logarithmic.
        at_points: Whether the labels of lines of one point, in one panel, stand beside them, if they are few: without a legend.
        finish: Called with the axes of each panel after its lines are drawn.
    """
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator

    gradient = colormaps["viridis"]
    width, longest = figure_width(), max(map(len, kinds), default=0)
    columns = min(max(map(len, panels)), max(1, int((width - 1.0) // size[0])))
    panels = [group[first : first + columns] for group in panels for first in range(0, len(group), columns)]
    dense = any(kind == DENSE_LABEL for _, kind in lines)
    shown = len({kind for _, kind in lines})
    at_points = at_points and shown <= LABELED
    legend = 1 < shown <= NAMED and not at_points
    abreast = max(1, min(shown, int(width / (0.6 + 0.8 * CHARACTER * longest))))
    figure = new_figure(0.6 + size[1] * len(panels) + 0.2 * math.ceil(shown / abreast) * legend)
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
        figure.legend(list(handles.values()), list(handles), loc="outside lower left", ncols=abreast, fontsize=8)
    if at_points:
        _label_points(figure, {kind: points for (_, kind), points in lines.items()})
    return figure


def _label_points(figure: Figure, lines: Mapping[str, Sequence[PlotPoint]]) -> None:
    """Write the name of each line beside its only point, where it covers no point, name, or dashed line, if that can be."""
    from matplotlib.transforms import Bbox

    figure.draw_without_rendering()  # which sets what is where
    axes, points = figure.axes[0], {name: of_line[0] for name, of_line in lines.items() if name != DENSE_LABEL}
    inside = axes.get_window_extent()
    taken = [Bbox.from_bounds(x - 4, y - 4, 8, 8) for x, y in (axes.transData.transform(p[:2]) for p in points.values())]
    for point in lines.get(DENSE_LABEL, ()):
        taken.append(Bbox.from_bounds(inside.x0, axes.transData.transform(point[:2])[1] - 2, inside.width, 4))
    for name, point in points.items():
        places = [(7, 0, "left"), (-7, 0, "right"), *((x, y, "center") for y in (11, -11, 22, -22) for x in (0, 24, -24))]
        for x, y, side in places:
            text = axes.annotate(name, point[:2], xytext=(x, y), textcoords="offset points", ha=side, va="center", fontsize=8)
            box = text.get_window_extent()
            if (inside.x0 <= box.x0 and box.x1 <= inside.x1) and not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
            text.remove()
        else:
            axes.annotate(name, point[:2], xytext=(7, 0), textcoords="offset points", va="center", fontsize=8)


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
