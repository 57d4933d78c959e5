"""Perplexity by method, from what `python benchmarks/excess.py` measured: the chart and the tables of docs/results.md."""

from __future__ import annotations

import io
from statistics import mean

from excess import PATTERNS, by_seed, of_models, ratio, summary
from matplotlib.figure import Figure
from measuring import markdown_table

from sparsellm.extensions.studies.figures import COLORS, FAINT, INK, Plot, new_figure, style
from sparsellm.observers.display import with_standard_error

ROWS: dict[str, tuple[str, ...]] = {
    "SparseGPT": ("SparseGPT",),
    "fast-admm": ("fast-admm",),
    "ALPS": ("ALPS",),
    "Algorithm 1": ("Algorithm 1",),
    "sparsellm, `--effort fast`": ("effort fast", "default, scope none, fast-admm inside"),
    "sparsellm": ("sparsellm",),
    "sparsellm, `--effort best`": ("effort best",),
}
"""Methods as a user names them, and their labels in `forms.py`: the first that was measured counts."""

BRIEF = ("SparseGPT", "ALPS", "Algorithm 1", "sparsellm")
"""The methods of the chart and of the first table."""

TARGETS = {"SparseGPT": 0.18, "ALPS": 0.35, "Algorithm 1": 0.20}
SMALL_TARGETS = {"SparseGPT": 0.33, "ALPS": 0.60, "Algorithm 1": 0.20}
"""What the default is meant to lose at most, as a share of what another method loses; the second on stories260K-llama."""


def cells(data: dict, name: str, pattern: str) -> dict[str, dict]:
    """The figures of one method at one pattern, by calibration seed."""
    return next(filter(None, (by_seed(data, label, pattern) for label in ROWS[name])), {})


def brief_table() -> list[str]:
    """All models at 80 % and 2:4, the dense perplexity beside them."""
    rows = []
    for name, data in of_models().items():
        for pattern in ("80%", "2:4"):
            pruned = (summary(cells(data, method, pattern), "perplexity") for method in BRIEF)
            rows.append([name, pattern, f"{data['dense']['perplexity']:.2f}", *pruned])
    return markdown_table(["model", "sparsity", "dense", *BRIEF], rows, left=(0, 1))


def model_tables() -> list[str]:
    """A table for each model: every method at every pattern."""
    models = of_models()
    lines = [f"Machine: {next(iter(models.values()))['machine']}.", ""]
    for name, data in models.items():
        rows = ([method, *(summary(cells(data, method, pattern), "perplexity") for pattern in PATTERNS)] for method in ROWS)
        dense = with_standard_error(data["dense"]["perplexity"], data["dense"]["standard_error"])
        lines += [f"### {name}", "", f"Dense: {dense} (standard error over windows).", ""]
        lines += [*markdown_table(["", *PATTERNS], (row for row in rows if any(row[1:]))), ""]
    return lines[:-1]


def shares_table(patterns: tuple[str, ...] = ("80%", "90%")) -> list[str]:
    """What the default loses in log-perplexity, as a share of what others lose; bold where it is above its target."""
    rows = []
    for name, data in of_models().items():
        row = [name]
        for base, target in (SMALL_TARGETS if name.startswith("stories") else TARGETS).items():
            for pattern in patterns:
                share = ratio(data, "sparsellm", base, pattern)
                text = "" if share is None else f"{share:.3f}"
                row.append(f"**{text}**" if share and share > target else text)
        rows.append(row)
    return markdown_table(["", *(f"{base}, {pattern}" for base in TARGETS for pattern in patterns)], rows)


def chart() -> str:
    """Perplexity against sparsity for each model, as SVG whose colors follow the reader's system."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    patterns = [pattern for pattern in PATTERNS if pattern.endswith("%")]
    with style(7.2):
        figure = new_figure(4.6)
        panels = figure.subplots(2, 3).flat
        for axes, (name, data) in zip(panels, of_models().items(), strict=False):
            axes.axhline(data["dense"]["perplexity"], color=INK, linestyle=":", label="dense")
            for method, color in zip(BRIEF, COLORS, strict=False):
                found = {float(p[:-1]): cells(data, method, p).values() for p in patterns}
                points = [(share, mean(c["perplexity"] for c in some)) for share, some in found.items() if some]
                axes.plot(*zip(*points, strict=True), color=color, marker="o", label=method)
            axes.set(title=name, yscale="log", xticks=[float(p[:-1]) for p in patterns], xticklabels=patterns)
            low, high = axes.get_ylim()
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high > 20 * low else (1, 1.5, 2, 3, 4, 6, 8)))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.yaxis.set_minor_locator(NullLocator())
        last = figure.axes[-1]
        last.axis("off")
        last.legend(*axes.get_legend_handles_labels(), loc="center left")
        figure.supylabel("perplexity, logarithmic")
        figure.supxlabel("weights removed")
    return svg_of(figure, "perplexity")


CARD_MODEL = "wt2-llama"
"""The model of the card."""


def card() -> bytes:
    """The picture that other sites show beside a link to the documentation: 1200 x 630 pixels, as PNG."""
    import matplotlib
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    with style(), matplotlib.rc_context({"font.family": "DejaVu Sans", "font.size": 11, "savefig.bbox": None}):
        figure = Figure(figsize=(12, 6.3))
        figure.text(0.05, 0.80, "sparsellm", fontsize=44, weight="bold", color=INK)
        figure.text(
            0.05,
            0.74,
            "prunes language models to 50-90 % zeros,\none decoder block at a time,\non a CPU or a GPU",
            fontsize=18,
            color=INK,
            va="top",
            linespacing=1.5,
        )
        figure.text(
            0.05,
            0.08,
            f"Perplexity of a small Llama ({CARD_MODEL})\nby the share of weights removed, logarithmic",
            fontsize=14,
            color="#5c6470",
        )
        axes = figure.add_axes((0.57, 0.12, 0.39, 0.80))
        data = of_models()[CARD_MODEL]
        patterns = [pattern for pattern in PATTERNS if pattern.endswith("%")]
        axes.axhline(data["dense"]["perplexity"], color=INK, linestyle=":", linewidth=2, label="dense")
        for method, color in zip(BRIEF, COLORS, strict=False):
            found = {float(p[:-1]): cells(data, method, p).values() for p in patterns}
            points = [(share, mean(c["perplexity"] for c in some)) for share, some in found.items() if some]
            axes.plot(*zip(*points, strict=True), color=color, marker="o", markersize=8, linewidth=3, label=method)
        axes.set(yscale="log", xticks=[float(p[:-1]) for p in patterns], xticklabels=patterns)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.tick_params(labelsize=15)
        axes.legend(fontsize=15, loc="upper left")
        stream = io.BytesIO()
        figure.savefig(stream, format="png", dpi=100, facecolor="white", metadata={"Software": None})
    return stream.getvalue()


def svg_of(figure: Figure, name: str) -> str:
    """A figure as SVG whose colors follow the reader's system."""
    svg = Plot(name, "", "", (), (), figure).save("svg").decode()
    svg = svg[svg.index("<svg") :].replace(INK, "var(--ink)").replace(FAINT, "var(--line)")
    look = f":root{{--ink:{INK};--line:{FAINT}}}@media(prefers-color-scheme:dark){{:root{{--ink:#d7dae0;--line:#4a4f58}}}}"
    return "\n".join(line.rstrip() for line in svg.replace(">", f"><style>{look}</style>", 1).splitlines()) + "\n"
