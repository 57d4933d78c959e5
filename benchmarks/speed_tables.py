"""What speed.py measured, as Markdown: `python benchmarks/speed.py tables`."""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import excess
from results import MEASURED

FILE = MEASURED / "speed.json"

LENGTH = 512
"""Tokens of a window."""

PEER = "llm-compressor's SparseGPT"

EXCESS_NAMES = {
    "default": "sparsellm",
    "default, by error": "sparsellm, shared out by error",
}
"""What `excess.py` calls methods that have another name here."""

BARGAINS = ("demo-opt", "demo-llama")
"""The models whose losses stand beside times."""


def best_peer(rounds: Mapping[str, list[dict[str, float]]]) -> str:
    """The peer's faster batch, by the first round."""
    return min((name for name in rounds if name.startswith(PEER)), key=lambda name: rounds[name][0]["seconds"])


def tables() -> list[str]:
    """What was measured, as Markdown."""
    known = json.loads(FILE.read_text()) if FILE.exists() else {}
    phases = known.get("phases", {})
    lines: list[str] = []
    for key, rounds in sorted(known.get("race", {}).items(), key=lambda item: _depth(item[0])):
        lines += [*_race_table(key, rounds, phases, known.get("memory", {})), ""]
    lines += _bargain_table(known.get("race", {}))
    for key, cell in phases.items():
        lines += [*_phases_table(key, cell), ""]
    return lines + _scaling_table(known.get("scaling", {}))


def _race_table(
    key: str, rounds: dict[str, list[dict[str, float]]], phases: dict[str, Any], memory: dict[str, int]
) -> list[str]:
    """One race: medians, ratios within each round, and what the operations alone would take."""
    shape, blocks, windows, threads = key.split(" | ")
    lines = [f"{shape}, {blocks} blocks, {windows} windows of {LENGTH} tokens, {threads} threads:", ""]
    lines += ["| | rounds | seconds | over llm-compressor's best | products alone | peak memory | over its |"]
    lines += ["|---|---:|---:|---:|---:|---:|---:|"]
    best = rounds[best_peer(rounds)]
    largest = max(each["memory"] for each in best)
    for name, some in rounds.items():
        ratios = [one["seconds"] / other["seconds"] for one, other in zip(some, best, strict=False)]
        spent = statistics.median(each["seconds"] for each in some)
        held = memory.get(f"{shape} | {blocks} | {windows} | {name}") or max(each["memory"] for each in some)
        spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        counted = next((cell for known, cell in phases.items() if known == f"{shape} | {blocks} | {windows} | {name}"), None)
        least = f"{sum(counted['counted']['operations'].values()) / counted['rate']:.1f}" if counted else ""
        share = held / largest
        lines.append(f"| {name} | {len(some)} | {spent:.1f} | {spread} | {least} | {held / 1e9:.2f} GB | {share:.2f} |")
    for name, held in memory.items():
        if name.startswith(f"{shape} | {blocks} | {windows} | ") and (method := name.split(" | ")[3]) not in rounds:
            lines.append(f"| {method} | | | | | {held / 1e9:.2f} GB | {held / largest:.2f} |")
    return lines


def _bargain_table(races: dict[str, dict[str, list[dict[str, float]]]]) -> list[str]:
    """What methods take, each in the shallowest race that it ran in, beside what is lost with them, from `excess.py`."""
    data = [excess.known(model) for model in BARGAINS]
    if not data[0] or not races:
        return []
    heads = ["| | blocks | time over llm-compressor's SparseGPT", *(f"excess, {model}, 80 %" for model in BARGAINS)]
    lines = [" | ".join(heads) + " |", "|---|---:|---:|" + "---:|" * len(BARGAINS)]
    rows: dict[str, tuple[float, str]] = {}
    for key in sorted(races, key=_depth):
        best = races[key][best_peer(races[key])]
        for name, some in races[key].items():
            lost = [excess.summary(excess.cells(each, EXCESS_NAMES.get(name, name), "80%")) for each in data]
            if lost[0] and name not in rows:
                ratio = statistics.median(one["seconds"] / other["seconds"] for one, other in zip(some, best, strict=False))
                rows[name] = ratio, " | ".join([f"| {name} | {_depth(key)} | {ratio:.2f}", *lost]) + " |"
    return [*lines, *(row for _, row in sorted(rows.values())), ""]


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
    lines += [f"Matrix products: {100 * share:.0f} % of the time, at {100 * reached:.0f} % of one large product's {large}."]
    lines += ["", "| phase | seconds | share | GFLOP in products | GB moved |", "|---|---:|---:|---:|---:|"]
    for phase, spent in sorted(plain["seconds"].items(), key=lambda item: -item[1]):
        if spent > 0.005 * plain["total"]:
            done, moved = counted["operations"].get(phase, 0.0), counted["bytes"].get(phase, 0.0)
            part = f"{100 * spent / plain['total']:.0f} %"
            lines.append(f"| {phase} | {spent:.1f} | {part} | {done / 1e9:.0f} | {moved / 1e9:.1f} |")
    return lines


def _scaling_table(known: dict[str, list[float]]) -> list[str]:
    """The exponents, by axis and method, of the medians."""
    slopes: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for key, seconds in known.items():
        name, axis, value = key.split(" | ")
        slopes[name, axis].append((math.log(float(value)), math.log(statistics.median(seconds))))
    if not slopes:
        return []
    names = list(dict.fromkeys(name for name, _ in slopes))
    lines = ["| seconds against | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
    for axis in dict.fromkeys(axis for _, axis in slopes):
        row = [f"{_slope(slopes[name, axis]):.2f}" if (name, axis) in slopes else "" for name in names]
        lines.append(f"| {axis} | " + " | ".join(row) + " |")
    return lines


def _slope(points: list[tuple[float, float]]) -> float:
    """The exponent: of a straight line through logarithms."""
    return statistics.linear_regression(*zip(*points, strict=True)).slope
