"""The speed of a packed model as tables and a plot."""

from __future__ import annotations

from sparsellm.errors import plural
from sparsellm.extensions.packed.record import CEILING, PACKED, TORCH, Bench, Speed
from sparsellm.extensions.studies.figures import COLORS, FIGURE_WIDTH, INK, Plot, new_figure
from sparsellm.runtime.memory import human_bytes

SPEED_COLUMNS = ["form", "sequences", "tokens/s", "× torch", "× ceiling", "prefill/s", "memory"]

LEGEND = (
    "tokens/s: tokens decoded a second, of all sequences together.",
    "× torch: relative to the dense model in transformers.",
    "× ceiling: relative to reading the dense weights once for every token.",
    "prefill/s: tokens of the prompts read a second. memory: bytes of the weights.",
)


def speed_tables(bench: Bench) -> dict[str, tuple[list[str], list[list[str]]]]:
    """Heading and cells of a table for each number of threads, by title."""
    tables = {}
    for threads, bandwidth in bench.bandwidth.items():
        title = f"{threads} {'thread reads' if threads == 1 else 'threads read'} {bandwidth / 1e9:.1f} GB/s of dense weights"
        tables[title] = (SPEED_COLUMNS, [_cells(bench, speed) for speed in bench.speeds if speed.threads == threads])
    return tables


def size_line(bench: Bench) -> str:
    """The packed model's size on disk and in memory, and the dense model's, in a sentence."""
    dense, packed = bench.memory_bytes[TORCH], bench.memory_bytes[PACKED]
    files = f"{human_bytes(bench.disk_bytes)} on disk, {human_bytes(packed)} in memory"
    return f"{bench.model}: {files}; the dense weights are {human_bytes(dense)}."


def _cells(bench: Bench, speed: Speed) -> list[str]:
    """A row of a table."""
    size = bench.memory_bytes.get(speed.form)
    return [
        speed.form,
        str(speed.batch),
        f"{speed.decode:,.1f}",
        f"{bench.ratio(speed, TORCH):.2f}",
        f"{bench.ratio(speed, CEILING):.2f}",
        "" if speed.prefill is None else f"{speed.prefill:,.0f}",
        "" if size is None else human_bytes(size),
    ]


def speed_plot(bench: Bench) -> Plot:
    """A bar for each form, with the ceiling as a line across those with the same threads and sequences."""
    groups = list(dict.fromkeys((speed.threads, speed.batch) for speed in bench.speeds))
    forms = list(dict.fromkeys(speed.form for speed in bench.speeds if speed.form != CEILING))
    speeds = {(x.threads, x.batch, x.form): x for x in bench.speeds}
    figure = new_figure(FIGURE_WIDTH, 0.6 + (0.35 + 0.3 * len(forms)) * len(groups))
    for axes, group in zip(figure.subplots(len(groups), squeeze=False)[:, 0], groups, strict=True):
        values = [speeds[*group, form].decode for form in forms]
        bars = axes.barh(range(len(forms)), values, 0.65, color=[COLORS[2 if form == PACKED else 0] for form in forms])
        axes.bar_label(bars, [f"{value:,.1f}" for value in values], padding=6)
        axes.axvline(speeds[*group, CEILING].decode, color=INK, lw=1.2, ls="--", label=CEILING)
        axes.set_yticks(range(len(forms)), forms)
        axes.invert_yaxis()
        axes.margins(x=0.2)
        axes.grid(axis="y", visible=False)
        axes.set_title(_group(*group), fontsize=9)
    figure.axes[-1].set_xlabel("tokens a second")
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper right")
    text = "Tokens decoded a second. The dashed line is the ceiling: the speed at which memory can deliver the dense weights."
    rows = [[_group(x.threads, x.batch), x.form, f"{x.decode:,.1f}"] for x in bench.speeds]
    return Plot("speed", "Decoding speed", text, ["threads and sequences", "form", "tokens a second"], rows, figure)


def _group(threads: int, batch: int) -> str:
    """The name of the figures with the same threads and sequences."""
    return f"{plural(threads, 'thread')}, {plural(batch, 'sequence')}"
