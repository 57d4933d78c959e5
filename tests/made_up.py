"""Results that no run has: reports, layers and measurements with given values."""

from __future__ import annotations

import math
import statistics
from typing import Any

from sparsellm.evaluation.differences import Parts
from sparsellm.evaluation.measurements import Accuracy, Perplexity
from sparsellm.methods import BlockResult, LayerResult
from sparsellm.pipeline.recipe import Recipe
from sparsellm.pipeline.report import Report
from sparsellm.solvers.patterns import parse_pattern


def perplexity(value: float, error: float | None = None, parts: Parts | None = None) -> Perplexity:
    """A perplexity on a few sequences."""
    return Perplexity(value, error, windows=4, length=64, tokens=256, source="demo", seconds=0.0, parts=parts)


def measured(*losses: float) -> Perplexity:
    """A perplexity on as many sequences, with these losses."""
    return perplexity(math.exp(statistics.fmean(losses)), 1.0, Parts("x", losses))


def accuracy(value: float, error: float | None = None, metric: str = "acc") -> Accuracy:
    """A score on a hundred questions."""
    return Accuracy(value, error, normalised=None, questions=100, metric=metric)


def layer(name: str, pattern: str = "70%", error: float = 0.1, **fields: Any) -> LayerResult:
    """A layer of 1,000 weights with as many zeros as its pattern removes."""
    parsed = parse_pattern(pattern)
    zeros = round(1000 * parsed.sparsity)
    given = {"known": "Gram", "damping": 0.01, "tokens": 256, "epoch": 1, "seconds": 0.1} | fields
    return LayerResult(name, parsed, (10, 100), zeros, error, **given)


def report(recipe: Any = None, **fields: Any) -> Report:
    """A report of two layers at 70 % of a model of 2,800 parameters."""
    blocks = [BlockResult(0, "a", (layer("a.x"), layer("a.y")), (), 1.0)]
    recipe = recipe or Recipe(model="m", sparsity="70%", calibration="demo")
    return Report(recipe, **{"blocks": blocks, "parameters": 2800, "zeros": 1400, **fields})
