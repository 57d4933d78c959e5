"""Draw the pictures of docs/concepts.md: `python docs/make_pictures.py`. With `--check`, only check that they are current."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse, FancyArrowPatch, FancyBboxPatch, Rectangle

from sparsellm.solvers.patterns import NM, Pattern, Unstructured

FOLDER = Path(__file__).with_name("pictures")

INK, FAINT, PRUNED, SIGNAL, WRONG = "#22262e", "#8a919c", "#3d85c6", "#e08214", "#d1495b"
"""Colors of text and lines, of unchanged parts, of pruned parts, of auxiliary signals and of errors."""

LOOK = f"<style>:root{{--ink:{INK}}}@media(prefers-color-scheme:dark){{:root{{--ink:#d7dae0}}}}</style>"
"""The ink follows the reader's color scheme; the other colors are legible on white and on black."""

TEXT = 9.5
"""Font size in points. A picture is about 400 points wide, so that it is legible on a phone."""


def box(axes: Axes, x: float, y: float, words: str, color: str = FAINT, width: float = 12, height: float = 7) -> None:
    """A box centered at (x, y) with text in it."""
    shape = FancyBboxPatch(
        (x - width / 2, y - height / 2), width, height, boxstyle="round,pad=0,rounding_size=1.2", ec=color, fc=(color, 0.18)
    )
    axes.add_patch(shape)
    say(axes, x, y, words)


def signal(axes: Axes, x: float, y: float, words: str, color: str = SIGNAL, radius: float = 3.4) -> None:
    """A circle centered at (x, y) with a letter in it. radius: in hundredths of the width."""
    wide, high = axes.figure.get_size_inches()
    axes.add_patch(Ellipse((x, y), 2 * radius, 2 * radius * wide / high, ec=color, fc=(color, 0.18)))
    say(axes, x, y, words)


def say(axes: Axes, x: float, y: float, words: str, side: Any = "center", color: str = INK) -> None:
    """Text at (x, y), centered or to one side of it."""
    axes.text(x, y, words, ha=side, va="center", color=color, fontsize=TEXT, linespacing=1.35)


def arrow(axes: Axes, *places: tuple[float, float], color: str = INK, style: str = "-|>") -> None:
    """An arrow through the points."""
    for begin, end in pairwise(places):
        head = style if end == places[-1] else "-"
        axes.add_patch(
            FancyArrowPatch(
                begin,
                end,
                arrowstyle=head,
                mutation_scale=8,
                color=color,
                lw=1.1,
                shrinkA=0,
                shrinkB=0,
            )
        )


def block(axes: Axes) -> None:
    """A decoder block: its pruned layers, numbered in the order of pruning."""
    stream = 8
    arrow(axes, (stream, 96), (stream, 4))
    say(axes, stream + 2, 94, "input hidden states", "left")
    say(axes, stream + 2, 6, "hidden states for the next block", "left")
    for top, bottom, inputs, between, output, order in (
        (86, 56, ("q", "k", "v"), "attention", "o", 1),
        (44, 14, ("gate", "up"), "activation\nand product", "down", 3),
    ):
        middle = (top + bottom) / 2
        arrow(axes, (stream, top), (17, top))
        box(axes, 23, top, "norm")
        reach = 5 * len(inputs) - 5  # of the input projections, above and below the middle
        arrow(axes, (29, top), (34, top), (34, middle - reach), style="-")
        for number, name in enumerate(inputs):
            y = middle + reach - 10 * number
            arrow(axes, (34, y), (39, y))
            box(axes, 45, y, name, PRUNED)
            arrow(axes, (51, y), (58, y))
        box(axes, 67, middle, between, width=18, height=2 * reach + 10)
        arrow(axes, (76, middle), (83, middle))
        box(axes, 89, middle, output, PRUNED)
        arrow(axes, (89, middle - 3.5), (89, bottom - 3), (stream + 2.4, bottom - 3))
        signal(axes, stream, bottom - 3, "+", INK, 2.2)
        say(axes, 45, middle + reach + 6, f"{order}.")
        say(axes, 89, middle + 6, f"{order + 1}.")


def patterns(axes: Axes) -> None:
    """The same small weight: dense, 50 % unstructured, and 2:4."""
    random = Random(0)
    weight = torch.tensor([[random.gauss(0, 1) for _ in range(16)] for _ in range(8)])
    many: list[tuple[str, Pattern | None]] = [("dense", None), ("50 %, unstructured", Unstructured(0.5)), ("2:4", NM(2, 4))]
    for number, (title, pattern) in enumerate(many):
        left, top, cell = 1 + 34 * number, 84, 1.9
        say(axes, left + 8 * cell, 93, title)
        stays = torch.ones_like(weight, dtype=torch.bool) if pattern is None else pattern.keep(weight.abs())
        for row in range(8):
            for column in range(16):
                strength = min(float(weight[row, column].abs()) / 2, 1)
                place = (left + column * cell, top - (row + 1) * 9)
                if stays[row, column]:
                    axes.add_patch(Rectangle(place, cell, 9, fc=(PRUNED, round(0.15 + 0.85 * strength, 2)), clip_on=False))
        for column in range(17):
            axes.plot([left + column * cell] * 2, [top, top - 72], color=FAINT, lw=0.4)
        for row in range(9):
            axes.plot([left, left + 16 * cell], [top - row * 9] * 2, color=FAINT, lw=0.4)
        for column in range(0, 17, 4) if isinstance(pattern, NM) else ():
            axes.plot([left + column * cell] * 2, [top, top - 72], color=INK, lw=1.1)


def goals(axes: Axes) -> None:
    """Three problems for the same two layers: one per layer, one for both, and SparseLLM's split."""
    rows = (
        (86, "layer by layer", "each layer is fitted to its own output"),
        (54, "global", "both layers are fitted to the final output"),
        (22, "split, as in SparseLLM", "z and p are free; each error is a small problem"),
    )
    for y, name, says in rows:
        say(axes, 2, y + 12, f"{name}: {says}", "left")
    gap = {"color": WRONG, "style": "<|-|>"}
    for y in (86, 54, 22):
        say(axes, 4, y, "$x$")
        arrow(axes, (7, y), (12, y))
        box(axes, 19, y, "$W_{in}$", PRUNED, 14)
        box(axes, 71, y, "$W_{out}$", PRUNED, 14)
        say(axes, 96, y, "$y$")
    y = 86
    arrow(axes, (26, y), (32, y), **gap)
    say(axes, 35.5, y, "$z_0$")
    arrow(axes, (39, y), (44, y))
    say(axes, 47, y, r"$\varphi$")
    arrow(axes, (50, y), (55, y))
    say(axes, 58, y, "$p_0$")
    arrow(axes, (60.5, y), (64, y))
    arrow(axes, (78, y), (93, y), **gap)
    y = 54
    arrow(axes, (26, y), (44, y))
    say(axes, 47, y, r"$\varphi$")
    arrow(axes, (50, y), (64, y))
    arrow(axes, (78, y), (93, y), **gap)
    y = 22
    arrow(axes, (26, y), (32.1, y), **gap)
    signal(axes, 35.5, y, "$z$")
    arrow(axes, (38.9, y), (44, y))
    say(axes, 46.3, y, r"$\varphi$")
    arrow(axes, (48.5, y), (54.6, y), **gap)
    signal(axes, 58, y, "$p$")
    arrow(axes, (61.4, y), (64, y), style="-")
    arrow(axes, (78, y), (93, y), **gap)
    say(axes, 28.8, y - 7, r"$\alpha$", color=WRONG)
    say(axes, 51.3, y - 7, r"$\beta$", color=WRONG)
    say(axes, 85.5, y - 7, r"$\alpha$", color=WRONG)
    arrow(axes, (4, 3), (10, 3), **gap)
    say(axes, 12, 3, "an error that is minimized", "left")


def cycle(axes: Axes) -> None:
    """One epoch of Algorithm 1: four steps, each with everything else fixed."""
    steps = (
        (25, 82, "1. input projections\n" r"$W_{in}$ toward $z$, on $x$" "\nby the solver", PRUNED),
        (75, 82, "2. output projection\n" r"$W_{out}$ toward $y$, on $p$" "\nby the solver", PRUNED),
        (75, 30, "3. hidden activation\n" r"$p$ between $\varphi(z)$ and $y$" "\none factorization", SIGNAL),
        (25, 30, "4. pre-activation\n" r"$z$ between $W_{in}x$ and $p$" "\nelementwise", SIGNAL),
    )
    for x, y, words, color in steps:
        box(axes, x, y, words, color, 44, 30)
    arrow(axes, (47, 82), (53, 82))
    arrow(axes, (75, 67), (75, 45))
    arrow(axes, (53, 30), (47, 30))
    arrow(axes, (25, 45), (25, 67))
    say(axes, 50, 56, "an epoch")
    say(axes, 50, 5, r"start: $z = W_0 x$ and $p = \varphi(z)$ of the dense model")


def streams(axes: Axes) -> None:
    """The dense and the pruned stream, and the targets of the pruned block."""
    for y, name, words, color, letter in (
        (80, "dense stream", "dense block", FAINT, "r"),
        (24, "pruned stream", "pruned block", PRUNED, r"\hat r"),
    ):
        say(axes, 1, y + 14, name, "left")
        arrow(axes, (1, y), (10, y))
        box(axes, 17.5, y, "previous\nblocks", color, 15, 16)
        arrow(axes, (25, y), (39, y))
        say(axes, 28.5, y + 6, f"${letter}$")
        box(axes, 55, y, words, color, 32, 16)
        arrow(axes, (71, y), (99, y))
    say(axes, 73, 89, "$t$: the output of\neach of its layers", "left")
    arrow(axes, (55, 72), (55, 32), color=SIGNAL)
    say(
        axes,
        57,
        57,
        "targets $t$; for the two output\n" r"projections $t + (r - \hat r)$, which" "\nalso corrects earlier errors",
        "left",
    )
    arrow(axes, (32, 79), (32, 25), color=WRONG, style="<|-|>")
    say(axes, 30, 52, r"error so far:" "\n" r"$r - \hat r$", "right")
    say(axes, 55, 8, r"each layer is solved on its pruned inputs $\hat x$")


PICTURES: dict[str, tuple[Callable[[Axes], None], float]] = {
    "block": (block, 4.6),
    "patterns": (patterns, 1.7),
    "goals": (goals, 3.2),
    "cycle": (cycle, 2.6),
    "streams": (streams, 3.0),
}
"""The function that draws each picture, and its height in inches."""

WIDTH = 5.6
"""Inches."""


def drawn(name: str) -> str:
    """A picture as SVG, the same bytes for the same version of matplotlib."""
    draw, height = PICTURES[name]
    look = {"svg.fonttype": "path", "svg.hashsalt": "sparsellm", "font.family": "DejaVu Sans", "mathtext.fontset": "dejavusans"}
    with matplotlib.rc_context(look):
        figure = Figure(figsize=(WIDTH, height))
        axes = figure.add_axes((0.005, 0.005, 0.99, 0.99))
        axes.set(xlim=(0, 100), ylim=(0, 100))
        axes.axis("off")
        draw(axes)
        stream = io.StringIO()
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = stream.getvalue().replace(INK, "var(--ink)")
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = svg[svg.index("<svg") :]
    return "\n".join(line.rstrip() for line in svg.replace(">", f">{LOOK}", 1).splitlines()) + "\n"


def main() -> int:
    """Write the pictures or compare them; return the exit status."""
    stale = [name for name in PICTURES if not _same(name)]
    if "--check" not in sys.argv[1:]:
        FOLDER.mkdir(exist_ok=True)
        for name in stale:
            (FOLDER / f"{name}.svg").write_text(drawn(name), encoding="utf-8")
        return 0
    if stale:
        print(f"{', '.join(stale)}: not current. Run: python docs/make_pictures.py", file=sys.stderr)
    return int(bool(stale))


def _same(name: str) -> bool:
    """Whether the picture in the repository is current."""
    file = FOLDER / f"{name}.svg"
    return file.is_file() and file.read_text(encoding="utf-8") == drawn(name)


if __name__ == "__main__":
    sys.exit(main())
