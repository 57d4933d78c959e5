"""The HTML report of a run or a sweep, one file with a verdict, tables and plots, from the template page.html."""

from __future__ import annotations

import json
import re
import shlex
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Literal

import yaml
from jinja2 import Environment, StrictUndefined

from sparsellm.checkpoints.files import REPORT
from sparsellm.checkpoints.tensor_index import report_digest
from sparsellm.errors import capitalized, plural
from sparsellm.extensions.packed.record import Bench, Packed
from sparsellm.extensions.studies.compare import Comparison
from sparsellm.extensions.studies.figures import BROAD, SLIM, Plot, style
from sparsellm.extensions.studies.measures import (
    Figure,
    Table,
    claim,
    error_legend,
    evaluations,
    headlines,
    rank_figures,
    spoken,
)
from sparsellm.extensions.studies.plots import at_bound, run_plots, size_plots, speed_plot, sweep_plots
from sparsellm.extensions.studies.run_again import run_command, sweep_command, sweep_yaml
from sparsellm.extensions.studies.sweep_file import Sweep, labels_in_words
from sparsellm.extensions.studies.sweep_runner import Outcome, read_outcomes, saved_sweep
from sparsellm.extensions.studies.tables import (
    LEGEND,
    Row,
    grid,
    legend,
    shown_measures,
    size_line,
    speed_tables,
    table,
)
from sparsellm.outputs.folder import is_sweep
from sparsellm.outputs.report import NOT_PRUNED, Report, read_report
from sparsellm.outputs.saving import Result
from sparsellm.recipes.path_names import PathNames, local_files
from sparsellm.recipes.recipe import RunRecipe
from sparsellm.texts.paths import local_path


@dataclass(frozen=True, kw_only=True)
class Page:
    """A page of results, one file with sentences, tables and plots. All texts are escaped.

    Attributes:
        verdict: The result, in sentences.
        lead: What was done, under the title.
        remarks: Further sentences under the verdict.
        tables: Tables by their headings.
        legend: What stands under the tables.
        charts: Plots before the tables.
        layers: A line for each pruned layer: name, pattern, sparsity and error.
        command: The command that gives the same again; empty if there is none.
        inputs: Names of the local files that it reads.
        file: Name of the file that holds `settings`.
        environment: Versions and the machine.
    """

    title: str
    lead: str
    command: str
    file: str
    settings: str
    verdict: Sequence[str] = ()
    remarks: Sequence[str] = ()
    notes: Sequence[str] = ()
    tables: Mapping[str, Table] = field(default_factory=dict)
    legend: str = ""
    charts: Sequence[Plot] = ()
    plots: Sequence[Plot] = ()
    layers: Sequence[Sequence[str]] = ()
    inputs: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def to_html(self) -> str:
        """Fill the template page.html."""
        environment = Environment(autoescape=True, undefined=StrictUndefined)
        environment.filters.update(base64=lambda text: b64encode(text.encode()).decode(), words=_word_columns)
        environment.filters["unbroken"] = lambda text: re.sub(r" (?=[%±]|[KMGT]iB)|(?<=±) ", "\N{NO-BREAK SPACE}", str(text))
        template = environment.from_string(Path(__file__).with_suffix(".html").read_text(encoding="utf-8"))
        return template.render(vars(self)) + "\n"


def report_page(run: str | Path | Result) -> tuple[str, list[Plot]]:
    """The HTML report of a run or a sweep.

    Args:
        run: Output folder of a run or a sweep, or the result of a run.

    Raises:
        MissingPackage: If matplotlib is not installed.
    """
    if isinstance(run, Result):
        page = _run_page(run.report.named(PathNames(run.report.recipe)), page_name(run), verified=False)
    elif is_sweep(path := local_path(run)):
        page = _sweep_page(path)
    else:
        report, content = read_report(path / REPORT)
        verified = report.digests is not None and report_digest(content) == report.digests.report
        page = _run_page(report, path.resolve().name, verified=verified)
    return page.to_html(), list(page.plots)


def _drawn(draw: Callable[[], Sequence[Plot]]) -> list[Plot]:
    """The plots that a function draws, each for both widths of a page."""
    with style(SLIM):
        slim = draw()
    with style(BROAD):
        return [replace(plot, slim=other.figure) for plot, other in zip(draw(), slim, strict=True)]


def comparison_page(comparison: Comparison) -> str:
    """The verdict, the chart and the tables of a comparison as an HTML page."""
    recipes = {run.name: run.report.recipe.changed() for run in comparison.runs}
    figures = [figure for run in comparison.runs for figure in run.figures.values()]
    return Page(
        title=f"{comparison.model}: {len(comparison.runs)} runs compared",
        verdict=[comparison.verdict] if comparison.verdict else [],
        lead="A line for each run; changes are relative to the model before it.",
        notes=comparison.notes,
        tables=comparison.tables(),
        legend=" ".join([*error_legend(figures), "≤: an estimate from above of what pack writes."]),
        charts=_drawn(lambda: size_plots(comparison)),
        command=shlex.join(["sparsellm", "report", *comparison.folders]) if comparison.folders else "",
        file="recipes.yaml",
        settings=yaml.safe_dump(recipes, sort_keys=False, allow_unicode=True),
    ).to_html()


def speed_page(bench: Bench, command: str) -> str:
    """The measurement of a packed model as an HTML page, with the command that made it."""
    settings = ("prompts", f"{bench.prompt} tokens"), ("decoded", f"{bench.tokens} tokens in each of several turns")
    return Page(
        title=f"{bench.model}: speed and size",
        verdict=bench.describe(),
        lead=size_line(bench),
        remarks=[" ".join(LEGEND)],
        notes=bench.notes,
        tables=speed_tables(bench),
        plots=_drawn(lambda: [speed_plot(bench)]),
        command=command,
        file="bench.json",
        settings=json.dumps(bench.to_dict(), indent=1),
        environment=bench.environment | dict(settings),
    ).to_html()


def page_name(run: str | Path | Result) -> str:
    """The path of a folder, or a name for the result of a run, which has no folder."""
    return f"{PurePath(run.report.recipe.model).name}-pruned" if isinstance(run, Result) else str(Path(run))


def figure_files(plots: Sequence[Plot], folder: str | Path) -> dict[Path, bytes]:
    """The content of each plot as SVG and as PNG, by file."""
    formats: tuple[Literal["svg", "png"], ...] = ("svg", "png")
    return {local_path(folder) / f"{plot.name}.{suffix}": plot.save(suffix) for plot in plots for suffix in formats}


def verdict(report: Report, verified: bool) -> str:
    """The result of a run in one sentence: what was removed, the change of perplexity or accuracy, and whether it is verified.

    Args:
        verified: Whether the output was read back and verified when it was written.
    """
    pattern = f"{report.n_m} sparsity, " if report.n_m else ""
    removed = f"zero, {_percent(report.sparsity_before)} before the run" if report.totals.before_and_after else "removed"
    share = f"{pattern}{_percent(report.sparsity)} of the weights in the pruned layers {removed}"
    parts = [share] if report.blocks else [NOT_PRUNED]
    figures = evaluations(report)
    before = evaluations(report.pruned) if report.pruned else {}
    for name in headlines(figures):
        figure, earlier = figures[name], before.get(name)
        values = " → ".join(x.short for x in (figure.dense, figure) if x)
        part = f"{spoken(name)} {values}" + (f", {figure.difference}" if figure.difference else "")
        if earlier and earlier.dense == figure.dense:
            part += f" ({', '.join(filter(None, (earlier.short, earlier.change_text)))} before the recovery"
            part += f"; by the recovery {by})" if (by := figure.against(earlier)) else ")"
        parts.append(part)
    if report.recovered_nothing:
        parts.append("nothing was recovered")
    parts += [] if figures else ["perplexity not measured"]
    parts += [f"weights {report.sizes}"] if report.sizes else []
    return "; ".join([*parts, "verified when written" if verified else "not verified"]) + "."


def _word_columns(rows: Sequence[Sequence[str]]) -> list[int]:
    """The columns of a table that hold words, and not numbers, in every row."""
    return [
        column
        for column, cells in enumerate(zip(*rows, strict=False))
        if not any(str(x)[:1] in set("0123456789+-") for x in cells)
    ]


def _percent(share: float) -> str:
    """A share in per cent, with a digit after the point if it is not zero."""
    return f"{100 * share:.1f}".removesuffix(".0") + " %"


def _run_page(report: Report, name: str, *, verified: bool) -> Page:
    """The page of a run."""
    totals = report.totals
    recipe, recovery, bounds = report.recipe, report.is_recovery, at_bound(report.layers)
    described = report.describe()
    nothing = report.recovered_nothing
    if recovery:
        described = f". {capitalized(described)}" if nothing else f" and {described}"
    state = "pruned, nothing recovered" if nothing else report.result if report.blocks else NOT_PRUNED
    made = f"pruned{described if recovery else f' by {described}'}: {totals.pruned_layers} layers"
    before, figures = evaluations(report.pruned) if report.pruned else {}, evaluations(report)
    measured = []
    for x, figure in figures.items():
        columns = (figure.dense, *([before.get(x)] if recovery else []), figure)
        measured.append([spoken(x), *(value.measured if value else "" for value in columns), figure.change_text])
    states = list(dict.fromkeys((report.start, "pruned", report.result)))
    packing = Packed.of(report)
    bench = packing.bench if packing else None
    tables = {", ".join(states).capitalize(): (["measure", *states, "change"], measured)} if measured else {}
    return Page(
        title=f"{name}: {Path(recipe.model).name} {state}",
        verdict=[verdict(report, verified)],
        lead=f"{recipe.model} was {made if report.blocks else state}. "
        f"{_percent(totals.sparsity_of_model)} of all parameters of the model are zero."
        + "".join(f" {text}" for section in report.sections.values() if (text := section.describe())),
        remarks=[f"Calibrated on {report.calibration}."] * bool(report.calibration) + [" ".join(LEGEND)] * bool(bench),
        notes=report.notes,
        tables=tables | (speed_tables(bench) if bench else {}),
        legend=" ".join(error_legend(figures.values())) if measured else "",
        plots=_drawn(lambda: run_plots(report) + ([speed_plot(bench)] if bench else [])),
        layers=[
            [
                x.name,
                f"{x.pattern}",
                f"{100 * x.sparsity:.2f} %{f' ({bounds[x.name]})' if x.name in bounds else ''}",
                f"{x.error:.3g}",
            ]
            for x in report.layers
        ],
        command=run_command(recipe, f"{name}-again") if report.blocks else "",
        inputs=_input_names(recipe),
        file="recipe.yaml",
        settings=recipe.to_yaml(),
        environment=report.environment,
    )


def _input_names(*recipes: RunRecipe) -> list[str]:
    """The names of the local files that recipes read, each once."""
    return list(dict.fromkeys(name for recipe in recipes for _, name in local_files(recipe)))


def _sweep_page(path: Path) -> Page:
    """The page of a sweep, with names in place of the paths of its recipes, as in outputs."""
    saved = saved_sweep(path)
    names = PathNames(*(cell.recipe for cell in saved.cells))
    cells = {cell.name: cell.model_copy(update={"recipe": names.recipe(cell.recipe)}) for cell in saved.cells}
    sweep = saved.model_copy(update={"cells": tuple(cells.values())})
    outcomes = [
        replace(x, cell=cells[x.cell.name], report=x.report and x.report.named(names), error=names.error(x.error))
        for x in read_outcomes(saved, path)
    ]
    rows = table(sweep, outcomes)
    failed = [[outcome.cell.name, outcome.error] for outcome in outcomes if outcome.error]
    notes = Counter(note for outcome in outcomes if outcome.report for note in dict.fromkeys(outcome.report.notes))
    name = path.resolve().name
    return Page(
        title=sweep.title,
        verdict=sweep_verdict(sweep, rows, outcomes),
        lead=f"Axes: {', '.join(f'{axis} ({len(labels)})' for axis, labels in sweep.axes.items())}.",
        remarks=[sweep.note] if sweep.note else [],
        notes=[
            f"in {'all' if count == len(outcomes) else f'{count} of {len(outcomes)}'} cells, {note}"
            for note, count in notes.items()
        ],
        tables={"Results": grid(sweep, rows)} | ({"Cells that failed": (["cell", "error"], failed)} if failed else {}),
        legend=" ".join(legend(sweep, rows)),
        plots=_drawn(lambda: sweep_plots(sweep, rows, outcomes)),
        command=sweep_command("sweep.yaml", f"{name}-again", smoke=sweep.smoke, plugins=sweep.cells[0].recipe.plugin),
        inputs=_input_names(*(cell.recipe for cell in sweep.cells)),
        file="sweep.yaml",
        settings=sweep_yaml(sweep, names),
    )


def sweep_verdict(sweep: Sweep, rows: Sequence[Row], outcomes: Sequence[Outcome]) -> list[str]:
    """The result of a sweep in sentences: its cells by state, and for each model the best combination at each sparsity."""
    states = Counter(outcome.state for outcome in outcomes)
    count = plural(len(outcomes), "cell")
    sentences = [f"{count}: {', '.join(f'{number} {state}' for state, number in states.items())}."]
    if states["finished"] == len(outcomes) > 1:
        sentences = [f"All {count} finished."]
    measure = next(iter(headlines(shown_measures(rows))), "")
    by_place: dict[tuple[str, str], dict[str, Figure]] = {}
    for row in (row for row in rows if measure in row.figures):
        key = row.labels.get("model", sweep.models[0]), row.labels.get("sparsity", "")
        by_place.setdefault(key, {})[labels_in_words(row.labels, ("model", "sparsity"))] = row.figures[measure]
    best = {key: ranking for key, figures in by_place.items() if (ranking := rank_figures(figures))}
    for model in dict.fromkeys(model for model, _ in best):
        rankings = {sparsity: x for (other, sparsity), x in best.items() if other == model}
        places: dict[str, list[str]] = {}
        for sparsity, x in rankings.items():
            results = ", ".join(filter(None, (x.figure.short, x.figure.change_text)))
            places.setdefault(claim(x), []).append(f"at {sparsity} ({results})" if sparsity else f"({results})")
        dense = {x.figure.dense.short for x in rankings.values() if x.figure.dense}
        subject = f"{model}, {spoken(measure)}{f' (before {dense.pop()})' if len(dense) == 1 else ''}"
        sentences.append(f"{subject}: {'; '.join(kind + ', '.join(texts) for kind, texts in places.items())}.")
    return sentences
