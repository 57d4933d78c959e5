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
from sparsellm.reports.comparison import value_with_error

if TYPE_CHECKING:
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

INK, FAINT = "#22262e", "#c9ced6"
"""Colours of text and axes, and of grid lines. An HTML page replaces them by its own colours, light or dark."""

COLOURS = ("#3d85c6", "#e08214", "#3a9a5b", "#c2559d", "#8c6bb1", "#a6761d", "#d1495b", "#5b9aa0")
"""Colours of lines and bars, distinct on white and on black and with most colour vision deficiencies."""

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
        title: Its heading.
        text: Its content in sentences.
        head: Column names of its data.
        rows: Its data.
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
        options: dict[str, Any] = {"dpi": 200, "facecolor": "white"}
        if file_format == "svg":  # without a date, so that the file is reproducible
            options = {"transparent": True, "metadata": dict.fromkeys(("Date", "Creator", "Format", "Type"))}
        stream = io.BytesIO()
        with style():
            self.figure.savefig(stream, format=file_format, **options)
        return stream.getvalue()

    def inline(self) -> str:
        """The figure as an SVG element of an HTML page: with unique identifiers, the page's colours and a label."""
        svg = self.save("svg").decode()
        svg = svg[svg.index("<svg") :].replace(INK, "currentColor").replace(FAINT, "var(--line)")
        svg = re.sub(r'(\sid="|xlink:href="#|url\(#)', rf"\g<1>{self.name}-", svg)
        return svg.replace("<svg", f'<svg role="img" aria-labelledby="{self.name}-title"', 1)


def new_figure(width: float, height: float) -> Figure:
    """An empty figure; width and height in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def bar_figure(names: Sequence[str], xlabel: str, series: Mapping[str, Sequence[tuple[float, float | None]]]) -> Figure:
    """Horizontal bars, one of each series for each name.

    Args:
        names: Labels of the bars, from top to bottom.
        xlabel: Label of the values.
        series: By label, a value and its standard error for each name.
    """
    figure = new_figure(5.4, 1.0 + (0.1 + 0.25 * len(series)) * len(names))
    axes = figure.subplots()
    height = 0.7 / len(series)
    for number, (label, points) in enumerate(series.items()):
        centres = [row + height * (number - (len(series) - 1) / 2) for row in range(len(names))]
        values, errors = (
            [value if math.isfinite(value) else math.nan for value, _ in points],
            [error or 0.0 for _, error in points],
        )
        error_bars: dict[str, Any] = {"xerr": errors, "ecolor": INK, "capsize": 2} if any(errors) else {}
        bars = axes.barh(centres, values, 0.9 * height, color=COLOURS[number], label=label, **error_bars)
        axes.bar_label(bars, [value_with_error(value) for value, _ in points], padding=6)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(xlabel)
    if len(series) > 1:
        figure.legend(loc="outside upper right", ncols=len(series))
    return figure


def heat_map(
    cells: Sequence[Sequence[float]],
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    xlabel: str,
    ylabel: str,
    label: str,
    norm: Normalize | None = None,
) -> Figure:
    """A heat map.

    Args:
        cells: (rows, columns) values; cells with NaN are empty.
        rows: Labels of the rows, from top to bottom.
        columns: Labels of the columns; about twelve of them are shown.
        xlabel: Label of the columns.
        ylabel: Label of the rows.
        label: Label of the values.
        norm: Scale of the colours; linear by default.
    """
    figure = new_figure(min(10.0, max(5.4, 3.6 + 0.16 * len(columns))), 1.4 + 0.3 * len(rows))
    axes = figure.subplots()
    mesh = axes.pcolormesh(cells, norm=norm, cmap="viridis", edgecolors="face")
    axes.set_yticks([number + 0.5 for number in range(len(rows))], rows)
    step = max(1, len(columns) // 12)
    axes.set_xticks([number + 0.5 for number in range(0, len(columns), step)], columns[::step])
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.invert_yaxis()
    axes.grid(visible=False)
    figure.colorbar(mesh, label=label, shrink=0.9)
    return figure
