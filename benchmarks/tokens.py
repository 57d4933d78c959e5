"""What pruning costs by the number of calibration sequences, for the default, `fast`, SparseGPT and ALPS: docs/calibration.md.

    python benchmarks/tokens.py measure demo:opt --seeds 0 1 2
    python benchmarks/tokens.py measure PATH/wt2-llama --calibrate train.txt --test test.txt
    python benchmarks/tokens.py measure PATH/mixtral --counts 4 8 64    # trained by `train_demo_models.py mixtral PATH/mixtral`
    python benchmarks/tokens.py table                       # excess by method, and every cell where SparseGPT or ALPS is better
    python benchmarks/tokens.py compare FOLDER              # the same cells in two folders of figures, as of two revisions
    python benchmarks/tokens.py pair PATH/wt2-opt --methods fast ALPS --patterns "50% uniform" --counts 16 --windows 800

Excess is the logarithm of the pruned model's perplexity over the dense one's, on up to 200 test sequences of 256 tokens.
Every cell is written to benchmarks/measured/tokens-MODEL.json as soon as it is known, and a killed run continues. `pair` prints
the difference of two methods on as many test sequences as are given, with its errors over sequences and over seeds.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from statistics import mean, stdev

import torch
from matplotlib.ticker import FuncFormatter, LogLocator
from measuring import CUT, MEASURED, add_measure, markdown_table, read_figures, record
from quality import svg_of
from training import sequence_losses
from transformers import PreTrainedModel

from sparsellm.checkpoints.loading import open_checkpoint
from sparsellm.evaluation.perplexity import measure_perplexity
from sparsellm.extensions.studies.figures import COLORS, new_figure, style
from sparsellm.pipeline.prune import prune_run
from sparsellm.recipes.file import read_recipe
from sparsellm.texts.samples import test_windows
from sparsellm.texts.texts import read_text

COUNTS, LENGTH, WINDOWS = (4, 8, 16, 32, 64, 128, 256), 256, 200
PATTERNS = ("50%", "80%", "50% uniform", "80% uniform", "2:4")
CHARTED, SEEDS = "2:4", (0, 1, 2)
RIVALS = {"SparseGPT": {"method": "sparsegpt"}, "ALPS": {"method": "alps"}}
OURS = {"fast": {"method": "sparsellm", "effort": "fast"}, "default": {"method": "sparsellm"}}

Cells = dict[str, float]


def settings_of(method: str, pattern: str) -> dict[str, object]:
    """The settings of a cell."""
    sparsity, *uniform = pattern.split()
    if method in RIVALS:
        return RIVALS[method] | {"sparsity": sparsity}
    return OURS[method] | {"sparsity": sparsity} | ({"allocation": "uniform"} if uniform else {})


def key_of(method: str, pattern: str, count: int, seed: int) -> str:
    """The name of a cell in a file; SparseGPT and ALPS, which share no sparsity out, have uniform ones only."""
    if method in RIVALS and pattern.endswith("%"):
        pattern = f"{pattern} uniform"
    return f"{method} | {pattern} | {count} | {seed}"


def measure(words: argparse.Namespace) -> None:
    """Fill a model's file."""
    file = words.folder / f"tokens-{Path(words.model.replace('demo:', 'demo-')).name}.json"
    source = open_checkpoint(words.model)
    tests = test_windows(read_text(words.test, "test"), source.tokenizer(), LENGTH, limit=WINDOWS, **CUT).windows
    dense = measure_perplexity(source.load(), tests).value
    for seed, count, pattern, method in product(words.seeds, words.counts, words.patterns, words.methods):
        key = key_of(method, pattern, count, seed)
        if key not in read_figures(file):
            model = pruned(words, method, pattern, count, seed)
            record(file, key, round(math.log(measure_perplexity(model, tests).value / dense), 5))


def pair(words: argparse.Namespace) -> Iterator[str]:
    """The difference of the loss between two methods, by pattern and number of sequences, with two standard errors."""
    tests = test_windows(
        read_text(words.test, "test"), open_checkpoint(words.model).tokenizer(), LENGTH, limit=words.windows, **CUT
    ).windows
    for pattern, count in product(words.patterns, words.counts):
        found = []
        for seed in words.seeds:
            one, other = (pruned(words, method, pattern, count, seed).float() for method in words.methods)
            found.append(sequence_losses(one, tests) - sequence_losses(other, tests))
        gaps = torch.stack(found).double()  # (seeds, sequences)
        errors = (gaps.mean(axis).std() / math.sqrt(gaps.shape[1 - axis]) for axis in (0, 1))
        text = " ± ".join(f"{error:.5f}" for error in errors)
        yield f"{pattern}, {count} sequences: {gaps.mean():+.5f} ± {text} ({len(tests)} test sequences; {len(found)} seeds)"


def pruned(words: argparse.Namespace, method: str, pattern: str, count: int, seed: int) -> PreTrainedModel:
    """The model pruned as a cell says."""
    drawn = {"calibration": words.calibrate, "samples": count, "sequence_length": LENGTH, "seed": seed} | CUT
    settings = settings_of(method, pattern) | drawn | {"model": words.model}
    return prune_run(read_recipe(settings), lambda event: None).model


def excesses(cells: Cells, method: str, pattern: str, count: int) -> dict[int, float]:
    """The excess by seed."""
    keys = {seed: key_of(method, pattern, count, seed) for seed in range(10)}
    return {seed: cells[key] for seed, key in keys.items() if key in cells}


def difference(one: dict[int, float], other: dict[int, float]) -> tuple[float, float]:
    """The mean difference over the seeds that both have, and its standard error (infinite for one seed)."""
    found = [one[seed] - other[seed] for seed in one.keys() & other.keys()]
    if not found:
        return math.nan, math.inf
    return mean(found), stdev(found) / math.sqrt(len(found)) if len(found) > 1 else math.inf


def of_models(folder: Path) -> dict[str, Cells]:
    """The cells of every model in a folder."""
    found = sorted(folder.glob("tokens-*.json"))
    return {file.stem.removeprefix("tokens-"): read_figures(file) for file in found}


def table() -> list[str]:
    """Excess by method, pattern and number of sequences, and the cells where the better of SparseGPT and ALPS is ahead."""
    lines, behind = [], []
    for name, cells in of_models(MEASURED).items():
        rows = []
        for pattern, method in product(PATTERNS, (*RIVALS, *OURS)):
            found = [excesses(cells, method, pattern, count) for count in COUNTS]
            if any(found):
                rows.append([pattern, method, *(f"{mean(some.values()):.4f}" if some else "" for some in found)])
            for count in COUNTS if method in OURS else ():
                rivals = [excesses(cells, rival, pattern, count) for rival in RIVALS]
                if all(rivals) and (mine := excesses(cells, method, pattern, count)):
                    best = min(rivals, key=lambda some: mean(some.values()))
                    gap, error = difference(mine, best)
                    if gap > 0:
                        behind.append([name, pattern, method, str(count), f"{gap:+.4f} ± {error:.4f}"])
        lines += [f"### {name}", "", *markdown_table(["", "", *map(str, COUNTS)], rows, (0, 1)), ""]
    return [*lines, *markdown_table(["model", "", "", "sequences", "excess over the better rival"], behind, (0, 1, 2))]


def compare(folder: Path) -> list[str]:
    """Every cell of ours beside the same cell in another folder: the mean change, where it is worse first."""
    rows, before = [], of_models(folder)
    for name, cells in of_models(MEASURED).items():
        for pattern, method, count in product(PATTERNS, OURS, COUNTS):
            now, then = excesses(cells, method, pattern, count), excesses(before.get(name, {}), method, pattern, count)
            if now.keys() & then.keys():
                gap, error = difference(now, then)
                rows.append(
                    (gap, [name, pattern, method, str(count), f"{mean(then.values()):.4f}", f"{gap:+.4f} ± {error:.4f}"])
                )
    rows.sort(key=lambda row: -row[0])
    return markdown_table(["model", "", "", "sequences", "before", "change"], (row for _, row in rows), (0, 1, 2))


def shares_table() -> list[str]:
    """The default's excess at 2:4 as a share of that of the better of SparseGPT and ALPS, by the number of sequences."""
    rows = []
    for name, cells in of_models(MEASURED).items():
        row = [name]
        for count in COUNTS:
            found = [excesses(cells, rival, CHARTED, count) for rival in RIVALS]
            mine = excesses(cells, "default", CHARTED, count)
            row.append(f"{mean(mine.values()) / min(mean(some.values()) for some in found):.2f}" if mine and all(found) else "")
        rows.append(row)
    return markdown_table(["sequences of 256 tokens", *map(str, COUNTS)], rows)


def chart() -> str:
    """Excess at 2:4 against the number of sequences, one panel for each model, as SVG."""
    with style(7.2):
        figure = new_figure(4.6)
        *panels, last = figure.subplots(2, 3).flat
        for axes, (name, cells) in zip(panels, of_models(MEASURED).items(), strict=True):
            for method, color in zip((*RIVALS, *OURS), COLORS, strict=False):
                found = {count: excesses(cells, method, CHARTED, count) for count in COUNTS}
                points = {count: mean(some.values()) for count, some in found.items() if some}
                axes.plot([*points], [*points.values()], color=color, marker="o", label=method)
            axes.set(xscale="log", yscale="log", title=name)
            axes.set_xticks(COUNTS[::2], [*map(str, COUNTS[::2])])
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.minorticks_off()
        last.axis("off")
        last.legend(*axes.get_legend_handles_labels(), loc="center", fontsize=9)
        figure.supylabel("excess, logarithmic; 0.01 loses 1 % of perplexity")
        figure.supxlabel("calibration sequences of 256 tokens")
    return svg_of(figure, "few-tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    measuring, pairing = add_measure(commands, PATTERNS, SEEDS), add_measure(commands, PATTERNS, SEEDS, "pair")
    measuring.add_argument("--methods", nargs="+", default=[*RIVALS, *OURS])
    pairing.add_argument("--methods", nargs=2, default=["default", "ALPS"])
    for command in (measuring, pairing):
        command.add_argument("--counts", nargs="+", type=int, default=COUNTS)
    measuring.add_argument("--folder", type=Path, default=MEASURED)
    pairing.add_argument("--windows", type=int, default=WINDOWS)
    commands.add_parser("table")
    commands.add_parser("compare").add_argument("folder", type=Path)
    words = parser.parse_args()
    if words.command == "measure":
        measure(words)
    elif words.command == "pair":
        for line in pair(words):
            print(line, flush=True)
    else:
        print("\n".join(table() if words.command == "table" else compare(words.folder)))


if __name__ == "__main__":
    main()
