"""Few combinations of settings in which every value of each setting occurs with every value of each other setting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, product
from typing import Any


def pairwise(*settings: Sequence[object], allowed: Callable[..., bool] = lambda *values: True) -> list[tuple[Any, ...]]:
    """Rows for `pytest.mark.parametrize`: of all allowed combinations, those needed for each pair of values.

    A fault that takes three settings to show may be missed, so what is subtle about one combination gets a test of its own.
    """
    rows = [row for row in product(*map(range, map(len, settings))) if allowed(*pick(settings, row))]
    pairs = {row: {(*two, row[two[0]], row[two[1]]) for two in combinations(range(len(row)), 2)} for row in rows}
    missing = set().union(*pairs.values())
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(pairs[row] & missing))
        missing -= pairs[best]
        chosen.append(pick(settings, best))
    return chosen


def pick(settings: Sequence[Sequence[object]], places: Sequence[int]) -> tuple[Any, ...]:
    """The values of settings at places."""
    return tuple(values[place] for values, place in zip(settings, places, strict=True))
