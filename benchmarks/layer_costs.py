"""Predicted against measured cost of every layer: does the prediction rank the layers, and what does `--exclude` win?

    python benchmarks/layer_costs.py measure CALIBRATION TEXT MODEL...    # minutes per model
    python benchmarks/layer_costs.py exclude CALIBRATION TEXT MODEL...
    python benchmarks/layer_costs.py table

Each method prunes each model with `--allocation fisher` and measures all layers, not only the five that `prune` measures. Where
layers stand out, the model is pruned again without them. `exclude` prunes the model again without each of its layers, at 70 %.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
from measuring import MEASURED, markdown_table, read_figures, record

import sparsellm
from sparsellm.methods import LayerResult
from sparsellm.pipeline import costliest_layers as layer_costs

FILE, EXCLUDED = MEASURED / "layer-costs.json", MEASURED / "layers-excluded.json"
METHODS = {"sparsegpt": {"method": "sparsegpt"}, "alps": {"method": "alps"}, "effort fast": {"effort": "fast"}, "sparsellm": {}}
SPARSITIES = ("70%", "80%")


def rank_correlation(one: list[float], other: list[float]) -> float:
    """Spearman's rank correlation of two lists without ties."""
    ranks = [np.argsort(np.argsort(values)).astype(float) for values in (one, other)]
    return float(np.corrcoef(*ranks)[0, 1])


def exclude(calibration: str, text: str, models: list[str]) -> None:
    """Prune without each layer in turn, and correlate what that wins with the predicted and the measured costs."""
    for model in models:
        for method in ("effort fast", "sparsegpt"):
            settings: dict[str, Any] = {"sparsity": "70%", "allocation": "fisher", "calibration": calibration, "samples": 16}
            settings |= METHODS[method] | {"sequence_length": 256, "evaluate": text, "evaluate_limit": 8}
            layer_costs.WORST = sys.maxsize
            report = sparsellm.prune(model, **settings).report
            predicted, measured = ([getattr(x, field) for x in report.layers] for field in ("predicted_kl", "measured_kl"))
            layer_costs.WORST = 1
            wins = [_kl(report) - _kl(sparsellm.prune(model, exclude=x.name, **settings).report) for x in report.layers]
            best = max(range(len(wins)), key=wins.__getitem__)
            figures = {
                "kl": _kl(report),
                "predicted": rank_correlation(predicted, wins),
                "measured": rank_correlation(measured, wins),
                "best": [report.layers[best].name, predicted[best], measured[best], wins[best]],
            }
            record(EXCLUDED, f"{Path(model).name} {method}", figures)


def _kl(report: sparsellm.Report) -> float:
    """The KL divergence that a run measured."""
    assert report.layer_costs is not None
    return report.layer_costs.kl


def cell(model: str, sparsity: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The figures of one method on one model."""
    layer_costs.WORST = sys.maxsize
    report = sparsellm.prune(model, sparsity=sparsity, **settings).report
    layers, costs = [layer for layer in report.layers if layer.measured_kl is not None], report.layer_costs
    if costs is None:
        raise SystemExit(f"{model}: the layers were not measured")
    predicted, measured, errors = (
        [float(getattr(layer, field)) for layer in layers] for field in ("predicted_kl", "measured_kl", "error")
    )
    worst: list[LayerResult] = sorted(layers, key=lambda layer: -(layer.predicted_kl or 0))[:5]
    truly = {layer.name for layer in sorted(layers, key=lambda layer: -(layer.measured_kl or 0))[:5]}
    figures: dict[str, Any] = {
        "layers": len(layers),
        "kl": costs.kl,
        "predicted": sum(predicted),
        "measured": sum(measured),
        "correlation": rank_correlation(predicted, measured),
        "correlation of errors": rank_correlation(errors, measured),
        "found": sum(layer.name in truly for layer in worst),
    }
    outstanding = [layer.name for layer in worst if layer.name in costs.exclude]
    if outstanding:
        again = sparsellm.prune(model, sparsity=sparsity, exclude=outstanding, **settings).report.layer_costs
        figures |= {"exclude": outstanding, "kl without": again.kl if again else None}
    return figures


def measure(calibration: str, text: str, models: list[str]) -> None:
    """Measure every method at every sparsity."""
    for model in models:
        for sparsity in SPARSITIES:
            for method, settings in METHODS.items():
                shared = {"allocation": "fisher", "calibration": calibration, "samples": 64, "sequence_length": 256}
                figures = cell(model, sparsity, settings | shared | {"evaluate": text, "evaluate_limit": 8})
                record(FILE, f"{Path(model).name} {sparsity} {method}", figures)


def table() -> list[str]:
    """What was measured, as Markdown."""
    rows = []
    for name, x in read_figures(FILE).items():
        if name != "machine":
            model, sparsity, method = name.split(" ", 2)
            sums = [f"{x[key]:.3g}" for key in ("kl", "predicted", "measured")]
            ranks = [f"{x['correlation']:.2f}", f"{x['correlation of errors']:.2f}", f"{x['found']} of 5"]
            won = f"{len(x['exclude'])} layers: {x['kl without']:.3g}" if x.get("exclude") else ""
            rows.append([model, sparsity, method, *sums, *ranks, won])
    head = ["model", "", "method", "KL", "predicted", "measured", "rank correlation", "of errors", "worst found", "excluded"]
    return markdown_table(head, rows, left=(0, 1, 2))


def summary_table() -> list[str]:
    """By method, the range over models and sparsities."""
    cells = {name: x for name, x in read_figures(FILE).items() if name != "machine"}
    rows = []
    for method in METHODS:
        figures = [x for name, x in cells.items() if name.split(" ", 2)[2] == method]
        ranges = ([x[key] for x in figures] for key in ("correlation", "correlation of errors"))
        found = sum(x["found"] for x in figures) / len(figures)
        rows.append([method, *(f"{min(values):.2f} to {max(values):.2f}" for values in ranges), f"{found:.1f}"])
    return markdown_table(["", "predicted", "relative output error", "of the five costliest, predicted"], rows)


def excluded_table() -> list[str]:
    """What `exclude` measured, as Markdown."""
    rows = []
    for name, x in read_figures(EXCLUDED).items():
        if name != "machine":
            layer, *costs = x["best"]
            rows.append(
                [*name.split(" ", 1), f"{x['predicted']:.2f}", f"{x['measured']:.2f}", layer, *(f"{y:.3g}" for y in costs)]
            )
    head = ["model", "method", "predicted", "measured", "best layer to exclude", "its predicted cost", "measured", "real"]
    return markdown_table(head, rows, left=(0, 1, 4))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("measure", "exclude"):
        command = commands.add_parser(name)
        command.add_argument("calibration")
        command.add_argument("text")
        command.add_argument("models", nargs="+")
    commands.add_parser("table")
    given = parser.parse_args()
    if given.command == "table":
        print("\n".join([*table(), "", *excluded_table()]))
    else:
        (measure if given.command == "measure" else exclude)(given.calibration, given.text, given.models)
