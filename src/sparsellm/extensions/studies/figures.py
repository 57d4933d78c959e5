"""Figures in one matplotlib style, each with a description and a table of its data."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

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

COLOR_MAPS = {"error": "YlOrRd", "sparsity": "PuBu", "measure": "YlGn", "block": "viridis"}
"""Color maps, one for each kind of value."""

BOUND_MARKS = {"minimum": "▼", "maximum": "▲"}
"""Marks of layers whose sparsity is at a bound of the allocation."""

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


def bar_figure(names: Sequence[str], seconds: Sequence[float]) -> Figure:
    """Horizontal bars of durations, from top to bottom."""
    figure = new_figure(FIGURE_WIDTH, 0.8 + 0.3 * len(names))
    axes = figure.subplots()
    bars = axes.barh(
        range(len(names)), [value if math.isfinite(value) else math.nan for value in seconds], 0.65, color=COLORS[0]
    )
    axes.bar_label(bars, [value_with_error(value) for value in seconds], padding=6)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("seconds")
    return figure


def heat_map(
    cells: Sequence[Sequence[float]],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    labels: tuple[str, str],
    kind: str,
    texts: Sequence[Sequence[str]],
    norm: Normalize,
) -> Figure:
    """A heat map.

    Args:
        cells: (rows, columns) values; cells with NaN are empty.
        rows: Labels of the rows, from top to bottom.
        columns: Labels of the columns; about twelve of them are shown.
        labels: Labels of the columns and of the values.
        kind: Kind of the values, a key of `COLOR_MAPS`.
        texts: Text of each cell. With more than `NUMBERED` columns only the marks in it are shown.
    """
    from matplotlib import colormaps

    numbered = len(columns) <= NUMBERED
    lines = max((text.count("\n") + 1 for line in texts for text in line), default=1) if numbered else 1
    width = 2.4 + max((0.5 if numbered else 0.16) * len(columns), 0.07 * max(map(len, columns)))
    figure = new_figure(min(10.0, max(FIGURE_WIDTH, width)), 1.2 + (0.28 + 0.14 * (lines - 1)) * len(rows))
    axes = figure.subplots()
    mesh = axes.pcolormesh(cells, norm=norm, cmap=COLOR_MAPS[kind], edgecolors="face")
    for y, (line, words) in enumerate(zip(cells, texts, strict=True)):
        for x, (value, text) in enumerate(zip(line, words, strict=True)):
            shown = text if numbered else "".join(mark for mark in BOUND_MARKS.values() if mark in text)
            if shown and math.isfinite(value):
                red, green, blue, _ = colormaps[COLOR_MAPS[kind]](norm(value))
                light = 0.3 * red + 0.59 * green + 0.11 * blue > 0.55
                axes.text(x + 0.5, y + 0.5, shown, size=8, ha="center", va="center", color="black" if light else "white")
    axes.set_yticks([number + 0.5 for number in range(len(rows))], rows)
    step = max(1, len(columns) // 12)
    axes.set_xticks([number + 0.5 for number in range(0, len(columns), step)], columns[::step])
    axes.set_xlabel(labels[0])
    axes.invert_yaxis()
    axes.grid(visible=False)
    figure.colorbar(mesh, label=labels[1], shrink=0.9)
    plain_numbers(figure.axes[-1])
    return figure
