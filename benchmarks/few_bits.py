"""Perplexity against bits a weight, as `python benchmarks/bits.py` measured it: tables and chart of docs/few-bits.md."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import mean, stdev

from decode import FILES, RACED
from measuring import MEASURED, markdown_table, read_figures
from quality import svg_of

from sparsellm.extensions.packed.record import KERNEL, TORCH
from sparsellm.extensions.studies.figures import COLORS, INK, new_figure, style

FILE = MEASURED / "bits.json"
MODELS = ("demo-opt", "demo-llama", "wt2-opt", "wt2-llama")

SPARSE = "sparse |recovered "
COMPARED = {
    "GPTQ": ("dense (RTN|GPTQ)", f"{SPARSE}|dense compensated"),
    "dense forms, ours too": ("dense", SPARSE),
}
"""Dense forms, and ours beside them, as regular expressions. `prune --bits` rounds dense weights, too, where that is better."""

_TIMED = ("packed as --bits 2.3, dense head",)
IN_SHORT = {
    "dense, 16 bits": ("", (TORCH, KERNEL)),
    "GPTQ, 3 bits in groups of 64": ("dense GPTQ, int3, groups of 64", ()),
    "`--bits 3.0`": ("sparse mixed, one run, 3.0 bits", ()),
    "`--bits 2.3`": ("sparse mixed, one run, 2.3 bits", _TIMED),
    "`--bits 2.3`, then `recover`": ("recovered mixed, one run, 2.3 bits", _TIMED),
}
"""Forms of the first table: the measured form, none for the dense model, and its names in `decode.py`, of which the fastest
counts. Training changes no mask, so that the recovered form is as fast as the one before."""

LINES = {
    "dense, rounded to nearest": r"dense RTN",
    "dense, GPTQ": r"dense GPTQ",
    "dense, compensated": r"dense compensated",
    "sparse, bf16": r"sparse bf16",
    "sparse, int8": r"sparse int8",
    "sparse, int4": r"sparse int4",
    "sparse, int3": r"sparse int3",
    "sparse, --bits": r"sparse mixed",
    "recovered, --bits": r"recovered mixed",
}
"""Lines of the chart."""

FLOOR = 1e-3
"""Excess below which the chart shows no difference: the text is too short for it."""


@dataclass(frozen=True)
class Point:
    """A form: its bits a weight and its excesses, one for each seed."""

    form: str
    bits: float
    excesses: tuple[float, ...]

    @property
    def excess(self) -> float:
        """Mean logarithm of the perplexity over that of the dense model."""
        return mean(self.excesses)


def points(model: str) -> list[Point]:
    """Every measured form of a model, by bits."""
    cells: dict[str, list[dict]] = {}
    for key, cell in read_figures(FILE).items():
        name, _, rest = key.partition(" | ")
        form, _, _ = rest.rpartition(" | ")
        if name == model and form:
            cells.setdefault(form, []).append(cell)
    found = [Point(x, mean(c["bits"] for c in some), tuple(c["excess"] for c in some)) for x, some in cells.items()]
    return sorted(found, key=lambda point: point.bits)


def frontier(some: Iterable[Point]) -> list[Point]:
    """The forms that no other one beats with as few bits."""
    best: list[Point] = []
    for point in sorted(some, key=lambda x: (x.bits, x.excess)):
        if not best or point.excess < best[-1].excess:
            best.append(point)
    return best


def hull(some: Iterable[Point]) -> list[Point]:
    """The forms that neither another one beats nor two others that the layers are divided among: the lower convex hull."""
    best: list[Point] = []
    for point in frontier(some):
        while len(best) > 1 and _slope(best[-2], point) <= _slope(best[-2], best[-1]):
            best.pop()
        best.append(point)
    return best


def _slope(one: Point, two: Point) -> float:
    """Change of the excess for a bit more."""
    return (two.excess - one.excess) / (two.bits - one.bits)


def excess_at(some: Sequence[Point], bits: float) -> float | None:
    """The least excess of forms at a budget. Between two forms, the layers are divided among them. None below the first."""
    best = hull(some)
    if not best or bits < best[0].bits:
        return None
    for left, right in pairwise(best):
        if bits < right.bits:
            share = (bits - left.bits) / (right.bits - left.bits)
            return left.excess + share * (right.excess - left.excess)
    return best[-1].excess


def matching(model: str, forms: str) -> list[Point]:
    """The forms of a model whose names begin with a regular expression."""
    return [point for point in points(model) if re.match(forms, point.form)]


def table() -> list[str]:
    """Bits and excess of each form that was measured on several models, seeds beside each other."""
    found = {model: {point.form: point for point in points(model)} for model in MODELS}
    forms = {form: point.bits for some in found.values() for form, point in some.items()}
    forms = {form: bits for form, bits in forms.items() if sum(form in some for some in found.values()) > 1}
    rows = []
    for form in sorted(forms, key=lambda x: (x.partition(" ")[0], forms[x])):
        row = [form]
        for model in MODELS:
            point = found[model].get(form)
            if point is None:
                row += ["", ""]
                continue
            spread = f" ± {100 * stdev(point.excesses):.2f}" if len(point.excesses) > 1 else ""
            row += [f"{point.bits:.2f}", f"{100 * point.excess:.2f}{spread}"]
        rows.append(row)
    return markdown_table(["form", *(text for model in MODELS for text in (f"{model}, bits", "excess, %"))], rows)


def in_short() -> list[str]:
    """Bits, lost perplexity, bytes and speed of five forms; one sequence and two threads."""
    found = {model: {point.form: point for point in points(model)} for model in MODELS}
    timed = [(figures["kernel"], figures[RACED]) for figures in map(read_figures, FILES) if figures]
    rows = []
    for label, (form, names) in IN_SHORT.items():
        some = [found[model][form] for model in MODELS] if form else []
        row = [label, f"{max(point.bits for point in some) if some else 16:.2f}"]
        row += [f"loses {100 * math.expm1(point.excess):.1f} %" for point in some] or ["loses 0 %" for _ in MODELS]
        row.append(f"{timed[0][1]['memory_bytes'][names[0]] / 1e9:.2f}" if names else "")
        for _, figures in timed:
            speeds = [x["decode"] for x in figures["speeds"] if (x["threads"], x["batch"]) == (2, 1) and x["form"] in names]
            row.append(f"{max(speeds):.1f}" if speeds else "")
        rows.append(row)
    head = ["form", "bits a weight", *MODELS, "GB", *(f"tokens/s, {kernel}" for kernel, _ in timed)]
    return markdown_table(head, rows)


def compared() -> list[str]:
    """Our forms beside the dense ones at equal bits, on each model."""
    rows = []
    for model in MODELS:
        for label, (dense, own) in COMPARED.items():
            theirs, ours = matching(model, dense), matching(model, own)
            if not theirs or not ours:
                continue
            few = [bits / 100 for bits in range(150, 251, 5)]
            both = [(excess_at(ours, x), excess_at(theirs, x)) for x in few]
            shares = [mine / other for mine, other in both if mine is not None and other]
            mine, other = excess_at(ours, 2.3), excess_at(theirs, 3.25)
            budgets = [bits / 100 for bits in range(250, 451, 5)]
            worse = [x for x in budgets if (excess_at(ours, x) or 0) > (excess_at(theirs, x) or 0)]
            losses = ["" if x is None else f"loses {100 * math.expm1(x):.1f} %" for x in (mine, other)]
            where = f"{worse[0]:.2f} to {worse[-1]:.2f}" if worse else "nowhere"
            rows.append([model, label, f"{max(shares):.0%}" if shares else "", *losses, where])
    head = ["model", "compared with", "share of its loss that remains, at 2.5 bits or fewer"]
    head += ["ours, 2.3 bits", "it, 3.25 bits", "bits from 2.5 to 4.5 at which ours loses more"]
    return markdown_table(head, rows, left=(0, 1, 5))


ROUNDINGS = (("int4, nearest", "int4, compensated"), ("int3, nearest", "int3, compensated"), ("bf16", "int8, nearest"))
"""Forms of the same pruned weights that are compared."""


def rounding() -> list[str]:
    """What two forms of the same pruned weights cost: means over the sparsities measured both ways, and how often less."""
    rows = []
    for model in MODELS:
        found = {point.form: point.excess for point in points(model)}
        row = [model]
        for one, other in ROUNDINGS:
            pairs = [(x, found.get(form.replace(one, other))) for form, x in found.items() if form.startswith(f"sparse {one}")]
            both = [(x, y) for x, y in pairs if y is not None]
            means = ", ".join(f"{100 * mean(side):.2f}" for side in zip(*both, strict=True))
            row.append(f"{means} ({sum(y < x for x, y in both)} of {len(both)})" if both else "")
        rows.append(row)
    return markdown_table(["model", *(f"{one}; {other} (less at)" for one, other in ROUNDINGS)], rows)


def llama_cpp() -> list[str]:
    """llama.cpp's types, without and with an importance matrix, and our forms that take as many bits."""
    rows, weighted = [], ", importance matrix"
    for model in MODELS:
        found = {point.form: point for point in matching(model, "llama.cpp")}
        ours = [matching(model, forms) for forms in ("sparse |dense compensated", f"{SPARSE}|dense compensated")]
        for form, point in found.items():
            if form.endswith(weighted):
                continue
            excesses = [x and x.excess for x in (point, found.get(form + weighted))]
            excesses += [excess_at(some, point.bits) if point.bits < some[-1].bits + 1 else None for some in ours]
            rows.append([model, form, f"{point.bits:.2f}", *("" if x is None else f"{100 * x:.2f}" for x in excesses)])
    head = ["model", "type", "bits", "excess, %", "with an importance matrix", "ours", "ours, recovered too"]
    return markdown_table(head, rows, left=(0, 1))


def chart() -> str:
    """Excess against bits for each model, as SVG whose colors follow the reader's system."""
    with style(7.2):
        figure = new_figure(5.4)
        for axes, model in zip(figure.subplots(2, 2).flat, MODELS, strict=True):
            for (label, forms), color in zip(LINES.items(), (INK, *COLORS), strict=False):
                best = frontier(matching(model, forms))
                values = [max(point.excess, FLOOR) for point in best]
                line = "--" if label.startswith("dense") else "-"
                axes.plot([point.bits for point in best], values, line, color=color, marker="o", markersize=3, label=label)
            axes.set(title=model, yscale="log", xlim=(0.8, 8.4), ylim=(0.8 * FLOOR, 1))
        handles = figure.axes[0].get_legend_handles_labels()
        figure.legend(*handles, loc="outside lower center", ncols=4, fontsize=8)
        figure.supylabel("excess, logarithmic; 0.01 loses 1 % of perplexity")
        for axes in figure.axes[2:]:  # a label of the whole figure would lie on the legend
            axes.set_xlabel("bits a weight")
    return svg_of(figure, "few-bits")
