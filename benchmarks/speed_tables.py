"""What speed.py measured, as Markdown: `python benchmarks/speed.py tables`."""

from __future__ import annotations

import json
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any

import excess
from measuring import MEASURED, markdown_table

FILE = MEASURED / "speed.json"
AVX2_FILE = MEASURED / "speed-avx2.json"
"""A race where torch, oneDNN, MKL and the kernels use AVX2, as on other processors: docs/results.md."""

LENGTH = 512
"""Tokens of a window."""

PEER = "llm-compressor's SparseGPT"

EXCESS_NAMES = {
    "default": "sparsellm",
    "default, by error": "sparsellm, shared out by error",
}
"""What `excess.py` calls methods that have another name here."""

WIDE = "tinyllama-1.1b | 1 | "
"""How the key begins of the race among our own methods on one block of a wide shape."""

TODAY = {
    "SparseGPT": "SparseGPT",
    "SparseGPT, true-sequential": "SparseGPT, `true_sequential`",
    "fast-admm": "fast-admm",
    "fast-admm, true-sequential": "fast-admm, `true_sequential`",
    "Algorithm 1": "Algorithm 1",
    "default, scope none, fast-admm inside, uniform": "sparsellm, `--effort fast --allocation uniform`",
    "default, scope none, fast-admm inside": "sparsellm, `--effort fast`",
    "default": "sparsellm",
}
"""The methods of docs/results.md, as a user names them; other forms cannot be run any more."""

BARGAINS = ("demo-opt", "demo-llama")
"""The models whose losses stand beside times."""


def best_peer(rounds: Mapping[str, list[dict[str, float]]]) -> str:
    """The peer's faster batch, by the first round."""
    return min((name for name in rounds if name.startswith(PEER)), key=lambda name: rounds[name][0]["seconds"])


def best_rounds(rounds: Mapping[str, list[dict[str, float]]]) -> list[dict[str, float]]:
    """The peer's faster batch in each round; after the first one of a race only one batch is run."""
    peers = [some for name, some in rounds.items() if name.startswith(PEER)]
    return [min((x for x in together if x), key=lambda x: x["seconds"]) for together in zip_longest(*peers)]


def tables() -> list[str]:
    """Races, phases and exponents, as Markdown."""
    known = json.loads(FILE.read_text())
    lines: list[str] = []
    for depth in sorted(_depth(key) for key in known["race"] if not key.startswith(WIDE)):
        lines += [*race_table(depth), ""]
    lines += [*wide_table(), ""]
    lines += [*bargain_table(), "", "### Phases", ""]
    for key, cell in known["phases"].items():
        lines += [*_phases_table(key, cell), ""]
    return [*lines, "### Growth", "", *_scaling_table(known["scaling"])]


def race_table(depth: int = 12, file: Path = FILE) -> list[str]:
    """The races on so many blocks, one for each number of threads: medians, and ratios within each round."""
    known = {"memory": {}} | json.loads(file.read_text())
    lines: list[str] = []
    for race, rounds in known["race"].items():
        if _depth(race) == depth and not race.startswith(WIDE):
            lines += ["", *_race_lines(race, rounds, known["memory"], known["machine"])]
    return lines[1:]


def _race_lines(
    race: str, rounds: Mapping[str, list[dict[str, float]]], memory: Mapping[str, float], machine: str
) -> list[str]:
    """The table of one race."""
    shape, blocks, windows, threads = race.split(" | ")
    best = best_rounds(rounds)
    largest = max(each["memory"] for each in best)
    prefix, rows = f"{shape} | {blocks} | {windows} | ", []
    for name, some in rounds.items():
        ratios = [one["seconds"] / other["seconds"] for one, other in zip(some, best, strict=False)]
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        held = memory.get(prefix + name) or max(each["memory"] for each in some)
        spent = statistics.median(each["seconds"] for each in some)
        rows.append([name, str(len(some)), f"{spent:.1f}", spread, f"{held / 1e9:.2f} GB", f"{held / largest:.2f}"])
    for key, held in memory.items():
        if key.startswith(prefix) and (name := key.removeprefix(prefix)) not in rounds:
            rows.append([name, "", "", "", f"{held / 1e9:.2f} GB", f"{held / largest:.2f}"])
    used = re.sub(r"\d+ threads?", f"{threads} thread{'s' if threads != '1' else ''}", machine)
    title = f"{shape}, {blocks} blocks, {windows} samples of {LENGTH} tokens, {used}:"
    head = ["", "rounds", "seconds", "over llm-compressor's best", "peak memory", "over its"]
    return [title, "", *markdown_table(head, rows)]


def wide_race() -> dict[str, tuple[float, str]]:
    """Of the race on one wide block, the median seconds of each method, and how a user names it."""
    return {name: (statistics.median(each["seconds"] for each in some), TODAY[name]) for name, some in _wide_rounds().items()}


def wide_table() -> list[str]:
    """The race on one wide block: medians, and ratios to our SparseGPT within each round."""
    rounds, rows = _wide_rounds(), []
    for name, some in rounds.items():
        ratio = statistics.median(a["seconds"] / b["seconds"] for a, b in zip(some, rounds["SparseGPT"], strict=False))
        spent, held = statistics.median(each["seconds"] for each in some), max(each["memory"] for each in some)
        rows.append([TODAY.get(name, name), str(len(some)), f"{spent:.1f}", f"{ratio:.1f}", f"{held / 1e9:.2f} GB"])
    head = ["", "rounds", "seconds", "over SparseGPT", "peak memory"]
    return markdown_table(head, rows)


def bargain_table(names: Mapping[str, str] | None = None, figure: str = "excess") -> list[str]:
    """The time of each method, in the deepest race that it ran in, beside what is lost at 80 %.

    names: the methods that are shown, and under which names; all by default. figure: `excess` or `perplexity`.
    """
    races = json.loads(FILE.read_text())["race"]
    data = [excess.known(model) for model in BARGAINS]
    rows: dict[str, tuple[float, list[str]]] = {}
    for key in sorted((key for key in races if not key.startswith(WIDE)), key=_depth):
        best = best_rounds(races[key])
        for name, some in races[key].items():
            lost = [excess.summary(excess.by_seed(each, EXCESS_NAMES.get(name, name), "80%"), figure) for each in data]
            if lost[0] and (names is None or name in names):
                ratio = statistics.median(one["seconds"] / other["seconds"] for one, other in zip(some, best, strict=False))
                rows[name] = ratio, [(names or {}).get(name, name), str(_depth(key)), f"{ratio:.2f}", *lost]
    head = ["", "blocks", "time over llm-compressor's SparseGPT", *(f"{figure}, {model}, 80 %" for model in BARGAINS)]
    return markdown_table(head, [row for _, row in sorted(rows.values())])


def _wide_rounds() -> dict[str, list[dict[str, float]]]:
    """The race on one wide block."""
    races: dict[str, Any] = json.loads(FILE.read_text())["race"]
    return next((rounds for key, rounds in races.items() if key.startswith(WIDE)), {})


def _depth(key: str) -> int:
    """The blocks of a race."""
    return int(key.split(" | ")[1])


def _phases_table(key: str, cell: dict[str, Any]) -> list[str]:
    """Where one run's time went."""
    shape, blocks, windows, name = key.split(" | ")
    plain, counted = cell["plain"], cell["counted"]
    products, operations = sum(counted["products"].values()), sum(counted["operations"].values())
    large = f"{cell['rate'] / 1e9:.0f} GFLOP/s"
    lines = [f"{name}, {shape}, {blocks} blocks, {int(windows) * LENGTH:,} tokens: {plain['total']:.1f} s.", ""]
    share, reached = products / counted["total"], operations / products / cell["rate"]
    lines += [
        f"Matrix products: {100 * share:.0f} % of the time, at {100 * reached:.0f} % of one large product's {large}, "
        f"at which they would take {operations / cell['rate']:.1f} s.",
        "",
    ]
    rows = []
    for phase, spent in sorted(plain["seconds"].items(), key=lambda item: -item[1]):
        if spent > 0.005 * plain["total"]:
            done, moved = counted["operations"].get(phase, 0.0), counted["bytes"].get(phase, 0.0)
            part = f"{100 * spent / plain['total']:.0f} %"
            rows.append([phase, f"{spent:.1f}", part, f"{done / 1e9:.0f}", f"{moved / 1e9:.1f}"])
    return lines + markdown_table(["phase", "seconds", "share", "GFLOP in products", "GB moved"], rows)


def _scaling_table(known: dict[str, list[float]]) -> list[str]:
    """The exponents, by axis and method, of the medians."""
    slopes: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for key, seconds in known.items():
        name, axis, value = key.split(" | ")
        slopes[name, axis].append((math.log(float(value)), math.log(statistics.median(seconds))))
    names = list(dict.fromkeys(name for name, _ in slopes))
    rows = (
        [axis, *(f"{_slope(slopes[name, axis]):.2f}" if (name, axis) in slopes else "" for name in names)]
        for axis in dict.fromkeys(axis for _, axis in slopes)
    )
    return markdown_table(["seconds against", *names], rows)


def _slope(points: list[tuple[float, float]]) -> float:
    """The exponent: of a straight line through logarithms."""
    return statistics.linear_regression(*zip(*points, strict=True)).slope
