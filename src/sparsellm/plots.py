"""Plots of what a run did."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sparsellm.drawing import COLOURS, INK, Plot, drawn

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Data = Mapping[str, Any]
"""A run's report, as `Report.to_dict` gives it."""


def run_plots(report: Data) -> list[Plot]:
    """All plots of one run that its report has something for."""
    blocks = [block for block in report["blocks"] if block["layers"]]
    found = [before_and_after(report), *_maps(blocks), convergence(blocks), where_time_went(report)]
    return [plot for plot in found if plot is not None]


def before_and_after(report: Data) -> Plot | None:
    """The dense and the pruned model's perplexity on each text, with standard errors."""
    texts = [text for text, values in report["perplexity"].items() if values.get("dense") and values.get("pruned")]
    if not texts:
        return None
    pairs = [[report["perplexity"][text][when] for when in ("dense", "pruned")] for text in texts]
    rows = [
        [_short(text), *(with_error(x["value"], x["standard_error"]) for x in pair)]
        for text, pair in zip(texts, pairs, strict=True)
    ]
    text = "; ".join(f"{row[0]}: the perplexity goes from {row[1]} to {row[2]}" for row in rows)

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for place, (when, colour) in enumerate((("dense", COLOURS[0]), ("pruned", COLOURS[1]))):
            values = [_finite(pair[place]["value"]) for pair in pairs]
            errors = [pair[place]["standard_error"] or 0.0 for pair in pairs]
            at = [number + 0.38 * (place - 0.5) for number in range(len(texts))]
            bars = axes.barh(at, values, 0.34, xerr=errors, color=colour, label=when, ecolor=INK, capsize=2)
            axes.bar_label(bars, [f" {value:.4g}" for value in values], padding=6)
        axes.set_yticks(range(len(texts)), [_short(text) for text in texts])
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("perplexity")
        figure.legend(loc="outside upper right", ncols=2)

    return drawn(
        "before-and-after",
        "Before and after",
        f"{text}.",
        ["text", "dense", "pruned"],
        rows,
        draw,
        (5.4, 1.3 + 0.7 * len(texts)),
    )


def _maps(blocks: Sequence[Data]) -> list[Plot | None]:
    """Error and sparsity of every layer, over the blocks."""
    if not blocks:
        return []
    errors = heat_map(blocks, "error", "Error of each layer", "relative output error", logarithmic=True)
    return [errors, heat_map(blocks, "sparsity", "Sparsity of each layer", "share of zeros", logarithmic=False)]


def heat_map(blocks: Sequence[Data], field: str, title: str, what: str, logarithmic: bool) -> Plot:
    """A field of the layers' results as colours: a column for each block, a row for each kind of layer."""
    kinds = list(dict.fromkeys(_kind(block, layer) for block in blocks for layer in block["layers"]))
    values = [{_kind(block, layer): _finite(layer[field]) for layer in block["layers"]} for block in blocks]
    numbers = [block["index"] for block in blocks]
    every = [(number, kind, x) for number, found in zip(numbers, values, strict=True) for kind, x in found.items()]
    least, most = min(every, key=lambda x: x[2]), max(every, key=lambda x: x[2])
    text = (
        f"{title}, {len(blocks)} blocks by {len(kinds)} kinds of layer: the least {what} is {least[2]:.3g} "
        f"({least[1]} of block {least[0]}), the largest {most[2]:.3g} ({most[1]} of block {most[0]})."
    )
    rows = [
        [str(number), *(f"{found[kind]:.3g}" if kind in found else "" for kind in kinds)]
        for number, found in zip(numbers, values, strict=True)
    ]

    def draw(figure: Figure) -> None:
        from matplotlib.colors import LogNorm, Normalize

        axes = figure.subplots()
        positive = [x for _, _, x in every if x > 0] or [1.0]
        # A share's scale ends at whole twentieths: what rounding does to one pattern's count should not look like a difference.
        low, high = math.floor(20 * least[2] - 1e-3) / 20, math.ceil(20 * most[2] + 1e-3) / 20
        scale = LogNorm(min(positive), max(positive) * (1 + 1e-9)) if logarithmic else Normalize(low, high)
        cells = [[found.get(kind, math.nan) for found in values] for kind in kinds]
        mesh = axes.pcolormesh(cells, norm=scale, cmap="viridis", edgecolors="face")
        axes.set_yticks([number + 0.5 for number in range(len(kinds))], kinds)
        step = max(1, len(numbers) // 12)
        axes.set_xticks([place + 0.5 for place in range(0, len(numbers), step)], [str(x) for x in numbers[::step]])
        axes.set_xlabel("block")
        axes.invert_yaxis()
        axes.grid(visible=False)
        figure.colorbar(mesh, label=what, shrink=0.9)

    width = min(10.0, 3.6 + 0.16 * len(blocks))
    return drawn(f"{field}-map", title, text, ["block", *kinds], rows, draw, (max(width, 5.4), 1.4 + 0.3 * len(kinds)))


def convergence(blocks: Sequence[Data]) -> Plot | None:
    """Error of the feed-forward parts step by step, and Algorithm 1's objective where there is one."""
    series = {block["index"]: [_numbers(step) for step in block["epochs"] if step["accepted"]] for block in blocks}
    series = {index: steps for index, steps in series.items() if steps}
    if not series:
        return None
    objective = any(step["after_weights"] is not None for steps in series.values() for step in steps)
    rows = [
        [
            str(index),
            f"{step['step']} {step['epoch']}",
            f"{step['feed_forward_error']:.4g}",
            *([_shown(step["after_weights"])] if objective else []),
        ]
        for index, steps in series.items()
        for step in steps
    ]
    ratios = [
        steps[-1]["feed_forward_error"] / steps[0]["feed_forward_error"]
        for steps in series.values()
        if steps[0]["feed_forward_error"]
    ]
    text = (
        f"Steps over the feed-forward parts of {len(series)} blocks: the last step's error is on average "
        f"{sum(ratios) / max(len(ratios), 1):.3g} times the first's."
    )

    def lines(axes: Axes, field: str, label: str) -> None:
        from matplotlib import colormaps
        from matplotlib.ticker import MaxNLocator

        last = max(len(series) - 1, 1)
        for place, (index, steps) in enumerate(series.items()):
            found = [step[field] for step in steps]
            if None not in found:
                colour = colormaps["viridis"](0.25 + 0.65 * place / last)
                axes.plot(range(1, len(found) + 1), found, marker="o", color=colour, label=f"block {index}")
        axes.set_yscale("log")
        axes.set_xlabel("step")
        axes.set_ylabel(label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))

    def draw(figure: Figure) -> None:
        panels = figure.subplots(1, 2 if objective else 1, squeeze=False)[0]
        lines(panels[0], "feed_forward_error", "feed-forward error")
        if objective:
            lines(panels[1], "after_weights", "objective (mean over tokens)")
        if len(series) <= 8:
            handles, labels = panels[0].get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside lower center", ncols=4)

    head = ["block", "step", "feed-forward error", *(["objective"] if objective else [])]
    return drawn("convergence", "Convergence", text, head, rows, draw, (7.0 if objective else 5.4, 3.4))


def where_time_went(report: Data) -> Plot:
    """Seconds of each phase, and the most memory that the process held."""
    phases = {name: seconds for name, seconds in report["seconds"].items() if name != "total"}
    names = sorted(phases, key=lambda name: -phases[name])
    total = sum(phases.values()) or 1.0
    rows = [[name, f"{phases[name]:.1f}", f"{100 * phases[name] / total:.0f} %"] for name in names]
    peak = report["peak_memory_bytes"]
    held = f" The process held {peak / 2**30:.2f} GiB at most." if peak else ""
    text = f"Of {total:.1f} seconds, {names[0]} took {rows[0][2]}.{held}" if names else f"Nothing was timed.{held}"

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        bars = axes.barh(names, [phases[name] for name in names], color=COLOURS[0], height=0.6)
        axes.bar_label(bars, [f" {phases[name]:.1f}" for name in names])
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("seconds")

    return drawn(
        "time",
        "Where the time and the memory went",
        text,
        ["phase", "seconds", "share"],
        rows,
        draw,
        (5.4, 1.0 + 0.32 * len(names)),
    )


def with_error(value: Any, error: float | None) -> str:
    """A figure with its standard error."""
    return f"{float(value):.4g}" + (f" ± {error:.2g}" if error else "")


def _kind(block: Data, layer: Data) -> str:
    """A layer's name within its block."""
    return str(layer["name"].removeprefix(f"{block['name']}."))


def _finite(value: Any) -> float:
    """A figure of a report; infinity, which stands there as a word, cannot be drawn."""
    number = float(value)
    return number if math.isfinite(number) else math.nan


def _numbers(step: Data) -> dict[str, Any]:
    """A step with its figures as numbers, for infinite ones stand there as words."""
    figures = {name: step[name] for name in ("feed_forward_error", "after_weights")}
    return {**step, **{name: None if value is None else float(value) for name, value in figures.items()}}


def _short(text: str) -> str:
    """The last part of a path."""
    return text.rstrip("/").rsplit("/", 1)[-1]


def _shown(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
