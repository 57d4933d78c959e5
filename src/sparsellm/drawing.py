"""Figures by matplotlib as SVG and as pixels, in one look; each with the same in words and as a table."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparsellm.errors import MissingPackage

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, FAINT = "#22262e", "#c9ced6"
"""Of text and axes, and of grid lines. On the page they become the page's own colours, light or dark."""

COLOURS = ("#3d85c6", "#e08214", "#3a9a5b", "#c2559d", "#8c6bb1", "#a6761d", "#d1495b", "#5b9aa0")
"""Of lines and bars: told apart on white and on black, also by most who do not see all colours."""

MARKERS = "osD^vPX*"


@dataclass(frozen=True)
class Plot:
    """A plot and what it says. name: of its files. text: what it shows, in words. head, rows: the same as a table.
    svg: the picture. png: makes the same as pixels."""

    name: str
    title: str
    text: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    svg: str
    png: Callable[[], bytes]


@contextmanager
def _style() -> Iterator[None]:
    """matplotlib set to the page's look. Raises MissingPackage where it is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise MissingPackage("Plots are drawn by matplotlib, which is not installed: pip install 'sparsellm[plots]'.") from None
    look: dict[str, Any] = {
        "text.color": INK,
        "axes.edgecolor": INK,
        "axes.labelcolor": INK,
        "xtick.color": INK,
        "ytick.color": INK,
    }
    look |= {
        "grid.color": FAINT,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    look |= {"svg.fonttype": "none", "svg.hashsalt": "sparsellm", "font.size": 10, "font.family": "sans-serif"}
    with matplotlib.rc_context(look | {"legend.frameon": False, "lines.markersize": 5, "savefig.bbox": "tight"}):
        yield


def drawn(
    name: str,
    title: str,
    text: str,
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    draw: Callable[[Figure], None],
    size: tuple[float, float] = (5.4, 3.4),
) -> Plot:
    """A plot that `draw` puts into a figure of `size` inches."""
    with _style():
        from matplotlib.figure import Figure

        figure = Figure(figsize=size, layout="constrained")
        draw(figure)

        def saved(kind: str, **words: Any) -> bytes:
            with _style():
                stream = io.BytesIO()
                figure.savefig(stream, format=kind, **words)
                return stream.getvalue()

        svg = saved("svg", transparent=True, metadata={"Date": None, "Creator": None})
        return Plot(name, title, text, head, rows, svg.decode(), lambda: saved("png", dpi=200, facecolor="white"))


def inline(plot: Plot) -> str:
    """The picture as part of a page: its own names apart from other pictures', its colours the page's, read out by its text."""
    svg = plot.svg[plot.svg.index("<svg") :]
    svg = re.sub(r'(\sid=")', rf"\1{plot.name}-", svg)
    svg = re.sub(r'(xlink:href="#|url\(#)', rf"\1{plot.name}-", svg)
    svg = svg.replace(INK, "currentColor").replace(FAINT, "var(--line)")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    head, rest = svg.split(">", 1)
    head = re.sub(r'\s(width|height)="[^"]*"', "", head)
    return f'{head} role="img" aria-labelledby="{plot.name}-title">{rest}'
