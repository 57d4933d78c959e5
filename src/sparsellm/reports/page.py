"""The HTML report of a run or a sweep, one file with key figures, tables and plots, from the template page.html."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined

from sparsellm.errors import InvalidSetting
from sparsellm.reports.comparison import grid, legend, measures, table
from sparsellm.reports.figures import Plot, style
from sparsellm.reports.run_plots import run_plots
from sparsellm.reports.sweep_plots import sweep_plots
from sparsellm.reports.sweep_runner import is_sweep, read_outcomes, saved_sweep
from sparsellm.runs.export import Result
from sparsellm.runs.recipe import Recipe, RecoveryRecipe
from sparsellm.runs.recipe_file import validated
from sparsellm.runs.records import REPORT, SavedReport, folder_path, load_report


def report_page(run: str | Path | Result) -> tuple[str, list[Plot]]:
    """The HTML report of a run or a sweep.

    Args:
        run: Output folder of a run or a sweep, or the result of a run.

    Returns:
        The page as HTML, and its plots.

    Raises:
        InvalidSetting: If the folder is the output of neither a run nor a sweep.
        MissingPackage: If matplotlib is not installed.
    """
    with style():
        content = _content(run)
        # The texts come from models, files and prompts, so all are escaped.
        environment = Environment(autoescape=True, undefined=StrictUndefined)
        template = environment.from_string(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))
        return template.render(content) + "\n", content["plots"]


def page_name(run: str | Path | Result) -> str:
    """The path of a folder, or a name for the result of a run, which has no folder."""
    return f"{PurePath(run.report.recipe.model).name}-pruned" if isinstance(run, Result) else str(Path(run))


def _content(run: str | Path | Result) -> dict[str, Any]:
    """Template variables for a run or a sweep."""
    if isinstance(run, Result):
        return _run_content(SavedReport.model_validate(json.loads(run.report.to_json())), page_name(run))
    path = folder_path(run)
    if not is_sweep(path) and not (path / REPORT).is_file():
        problem = f"holds no run or sweep: it has no {REPORT}" if path.is_dir() else "does not exist"
        raise InvalidSetting(f"{run} {problem}. Give the output folder of a run or a sweep.")
    return _sweep_content(path) if is_sweep(path) else _run_content(load_report(path / REPORT), path.name)


def write_figures(plots: Sequence[Plot], folder: str | Path) -> None:
    """Write each plot as SVG and as PNG."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    for plot in plots:
        (path / f"{plot.name}.svg").write_bytes(plot.save("svg"))
        (path / f"{plot.name}.png").write_bytes(plot.save("png"))


def _run_content(report: SavedReport, name: str) -> dict[str, Any]:
    """Template variables for a run."""
    recovery, totals = "pruned" in report.recipe, report.totals
    recipe = validated(RecoveryRecipe if recovery else Recipe, report.recipe)
    keys = {
        "zeros in pruned layers": f"{100 * totals.sparsity_of_pruned_layers:.2f} %",
        "zeros in the model": f"{100 * totals.sparsity_of_model:.2f} %",
        "layers pruned": str(totals.pruned_layers),
    }
    for measure, figure in measures(report).items():
        if "perplexity " in measure:
            label = f"pruned {measure}" if measure.startswith("perplexity") else measure
            keys[label] = str(figure)
    if "total" in report.seconds:
        keys["seconds"] = f"{report.seconds['total']:.0f}"
    return {
        "title": f"{name}: {Path(recipe.model).name} pruned",
        "lead": f"{recipe.model} was pruned {'and' if recovery else 'by'} {recipe.describe()}.",
        "note": report.calibration and f"Calibrated on {report.calibration}.",
        "keys": keys,
        "notes": report.notes,
        "tables": {},
        "legend": [],
        "plots": run_plots(report),
        "samples": {"": report.samples} if report.samples else {},
        "layers": [[x.name, str(x.pattern), f"{100 * x.sparsity:.2f} %", f"{x.error:.3g}"] for x in report.layers],
        "command": (
            f"sparsellm recover {recipe.pruned} {name} --against {recipe.model} --calibration {recipe.calibration}"
            if isinstance(recipe, RecoveryRecipe)
            else f"sparsellm prune --config recipe.yaml {name}"
        ),
        "recipe_title": "recipe.yaml",
        "recipe": recipe.to_yaml(),
        "environment": report.environment,
    }


def _sweep_content(path: Path) -> dict[str, Any]:
    """Template variables for a sweep."""
    sweep = saved_sweep(path)
    outcomes = read_outcomes(sweep, path)
    rows = table(sweep, outcomes)
    failed = [[outcome.cell.name, outcome.error] for outcome in outcomes if outcome.error]
    tables = {"Cells that failed": (["cell", "error"], failed)} if failed else {}
    recipes = {outcome.cell.name: outcome.cell.recipe.model_dump(mode="json") for outcome in outcomes}
    axes = " × ".join(f"{len(labels)} {name}" for name, labels in sweep.axes.items())
    return {
        "title": sweep.title,
        "lead": f"{len(outcomes)} cells: {axes}.",
        "note": sweep.note,
        "keys": {f"cells {state}": str(count) for state, count in Counter(x.state for x in outcomes).items()},
        "notes": [],
        "tables": tables | {"Results": grid(sweep, rows)},
        "legend": legend(sweep, rows),
        "plots": sweep_plots(sweep, rows, outcomes),
        "samples": {x.cell.name: x.report.samples for x in outcomes if x.report and x.report.samples},
        "layers": [],
        "command": "sparsellm sweep FILE.yaml FOLDER",
        "recipe_title": "Recipes of all cells",
        "recipe": yaml.safe_dump(recipes, sort_keys=False, allow_unicode=True),
        "environment": {},
    }
