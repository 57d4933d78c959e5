"""One page of HTML for a run or a sweep: figures in words, as tables, and drawn; nothing is fetched from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import yaml

from sparsellm.comparison import grid, table, to_markdown
from sparsellm.drawing import Plot, inline
from sparsellm.errors import InvalidSetting
from sparsellm.inspection import REPORT
from sparsellm.plots import run_plots, with_error
from sparsellm.recipe import Recipe, RecoveryRecipe
from sparsellm.recipe_file import validated
from sparsellm.records import saved_report
from sparsellm.sweep_plots import sweep_plots
from sparsellm.sweeping import is_sweep, read_outcomes, saved_sweep

STYLE = """
:root{--paper:#fff;--ink:#1b1f24;--soft:#59616b;--line:#d5dae1;--box:#f4f6f8;--mark:#1f6fb5}
@media (prefers-color-scheme:dark){
:root{--paper:#14171b;--ink:#e6e9ed;--soft:#a2abb6;--line:#3a424c;--box:#1d2127;--mark:#6cb0ee}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%}
body{margin:0;background:var(--paper);color:var(--ink);font:16px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
main{max-width:60rem;margin:0 auto;padding:1.5rem 1rem 4rem}
h1{font-size:1.7rem;line-height:1.2;margin:.5rem 0}h2{font-size:1.2rem;margin:2.5rem 0 .6rem}
p.lead{font-size:1.1rem}.soft,figcaption,summary{color:var(--soft)}
dl.key{display:grid;grid-template-columns:repeat(auto-fit,minmax(9.5rem,1fr));gap:.6rem;margin:1.2rem 0;padding:0}
dl.key div{background:var(--box);border-radius:.5rem;padding:.6rem .8rem}dt{font-size:.85rem;color:var(--soft)}
dd{margin:0;font-size:1.25rem;font-variant-numeric:tabular-nums}
.wide{overflow-x:auto}figure{margin:1rem 0 2rem}figure svg{display:block;width:100%;height:auto;min-width:20rem;max-width:52rem}
figcaption{margin:.4rem 0}table{border-collapse:collapse;font-size:.92rem;font-variant-numeric:tabular-nums;min-width:60%}
th,td{padding:.25rem .7rem .25rem 0;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th:first-child,td:first-child,td.word{text-align:left}th{font-weight:600}
details{margin:.4rem 0}summary{cursor:pointer}
pre{background:var(--box);padding: .8rem;border-radius:.5rem;overflow-x:auto;font-size:.88rem;white-space:pre-wrap}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(16rem,1fr));gap:.8rem}.pair p{margin:.2rem 0}
.pair div{background:var(--box);border-radius:.5rem;padding:.6rem .8rem;overflow-wrap:anywhere}b.prompt{color:var(--mark)}
@media print{:root{--paper:#fff;--ink:#000;--soft:#444;--line:#bbb;--box:#fff;--mark:#000}
main{max-width:none;padding:0}figure,.pair,dl.key{break-inside:avoid}details:not([open]){display:none}pre{white-space:pre-wrap}}
"""


def report_page(folder: str | Path) -> tuple[str, list[Plot]]:
    """The page of a run's or a sweep's folder, and its plots. Raises InvalidSetting for a folder that is neither."""
    place = Path(folder).expanduser()
    if is_sweep(place):
        return _sweep_page(place)
    if not (place / REPORT).is_file():
        what = "is no run's or sweep's folder" if place.is_dir() else "does not exist"
        raise InvalidSetting(f"{folder} {what}: it has no {REPORT}. Name what `sparsellm prune` or `sparsellm sweep` wrote.")
    return _run_page(saved_report(place / REPORT), place.name)


def write_figures(plots: Sequence[Plot], folder: str | Path) -> list[Path]:
    """Write each plot as SVG and as PNG."""
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    for plot in plots:
        (place / f"{plot.name}.svg").write_text(plot.svg, encoding="utf-8")
        (place / f"{plot.name}.png").write_bytes(plot.png())
    return [place / f"{plot.name}.{kind}" for plot in plots for kind in ("svg", "png")]


def _run_page(report: Mapping[str, Any], name: str) -> tuple[str, list[Plot]]:
    """A run: what was done, before and after, layers, steps, time, samples, the recipe."""
    recovery = "pruned" in report["recipe"]
    recipe = validated(RecoveryRecipe if recovery else Recipe, report["recipe"])
    totals, plots = report["totals"], run_plots(report)
    keys = {"zeros in pruned layers": f"{100 * totals['sparsity_of_pruned_layers']:.2f} %"}
    keys |= {"zeros in the model": f"{100 * totals['sparsity_of_model']:.2f} %", "layers pruned": str(totals["pruned_layers"])}
    for text, found in report["perplexity"].items():
        for when in (when for when in ("dense", "pruned") if found.get(when)):
            label = f"{when} perplexity, {Path(text).name}"
            keys[label] = with_error(found[when]["value"], found[when]["standard_error"])
    seconds = report["seconds"].get("total")
    keys |= {"seconds": f"{seconds:.0f}"} if seconds else {}
    lead = f"{recipe.model} was pruned {'and ' if recovery else 'by '}{recipe.describe()}."
    parts = [_lead(lead, report["calibration"] and f"Calibrated on {report['calibration']}."), _keys(keys)]
    parts += [f"<p class=soft>Note: {escape(note.rstrip('.'))}.</p>" for note in report["notes"]]
    parts += [_figure(plot) for plot in plots]
    if report.get("samples"):
        parts += ["<h2>What the models write</h2>", *(_sample(prompt, found) for prompt, found in report["samples"].items())]
    layers = [layer for block in report["blocks"] for layer in block["layers"]]
    rows = [[x["name"], x["pattern"], f"{100 * x['sparsity']:.2f} %", f"{float(x['error']):.3g}"] for x in layers]
    head = ["layer", "pattern", "zeros", "relative output error"]
    parts += ["<h2>Every layer</h2>", _folded(f"{len(layers)} layers", _table(head, rows))]
    parts += [
        "<h2>Do it again</h2>",
        _pre(
            f"sparsellm recover {recipe.pruned} {name} --against {recipe.model} --calibration {recipe.calibration}"
            if isinstance(recipe, RecoveryRecipe)
            else f"sparsellm prune --config recipe.yaml {name}"
        ),
        _folded("recipe.yaml", _pre(recipe.to_yaml())),
    ]
    parts += [
        _folded("Versions and machine", _table(["what", "which"], [[k, str(v)] for k, v in report["environment"].items()]))
    ]
    return _document(f"{name}: {Path(recipe.model).name} pruned", parts), plots


def _sweep_page(place: Path) -> tuple[str, list[Plot]]:
    """A sweep: its table, its plots, samples, what is missing."""
    sweep = saved_sweep(place)
    outcomes = read_outcomes(sweep, place)
    rows = table(sweep, outcomes)
    plots = sweep_plots(sweep, rows, outcomes)
    states = {state: sum(x.state == state for x in outcomes) for state in ("finished", "failed", "at work", "open")}
    axes = " × ".join(f"{len(labels)} {name}" for name, labels in sweep.axes.items())
    parts = [
        _lead(f"{len(outcomes)} cells: {axes}.", sweep.note),
        _keys({f"cells {state}": str(n) for state, n in states.items() if n}),
    ]
    if failed := [[x.cell.name, x.error] for x in outcomes if x.error]:
        parts += ["<h2>Cells that failed</h2>", _table(["cell", "why"], failed)]
    parts += ["<h2>The figures</h2>", _table(*grid(sweep, rows))]
    legend = to_markdown(sweep, rows).rsplit("\n\n", 1)[-1].splitlines()
    parts += [f"<p class=soft>{escape(line)}</p>" for line in legend if line and not line.startswith("|")]
    parts += [_figure(plot) for plot in plots]
    for outcome in outcomes:
        samples = (outcome.report or {}).get("samples") or {}
        shown = "".join(_sample(prompt, found) for prompt, found in samples.items())
        parts += [_folded(f"What the models write: {outcome.cell.name}", shown)] if shown else []
    recipes = {x.cell.name: x.cell.recipe.model_dump(mode="json") for x in outcomes}
    parts += ["<h2>Do it again</h2>", _pre("sparsellm sweep FILE.yaml FOLDER")]
    parts += [_folded("Every cell's recipe", _pre(yaml.safe_dump(recipes, sort_keys=False, allow_unicode=True)))]
    return _document(sweep.title, parts), plots


def _document(title: str, parts: Sequence[str]) -> str:
    """A whole page."""
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><meta name="color-scheme" content="light dark">'
        f'<link rel="icon" href="data:,"><style>{STYLE}</style></head><body><main><h1>{escape(title)}</h1>\n'
        + "\n".join(parts)
        + "\n</main></body></html>\n"
    )


def _lead(text: str, more: str) -> str:
    return f"<p class=lead>{escape(text)}</p>" + (f"<p class=soft>{escape(more)}</p>" if more else "")


def _keys(figures: Mapping[str, str]) -> str:
    """The figures that matter most, large."""
    return (
        "<dl class=key>" + "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in figures.items()) + "</dl>"
    )


def _figure(plot: Plot) -> str:
    """A plot, what it shows in words, and the same as a table."""
    return (
        f'<h2 id="{plot.name}-title">{escape(plot.title)}</h2><figure><div class=wide>{inline(plot)}</div>'
        f"<figcaption>{escape(plot.text)}</figcaption>{_folded('As a table', _table(plot.head, plot.rows))}</figure>"
    )


def _folded(title: str, content: str) -> str:
    return f"<details><summary>{escape(title)}</summary>{content}</details>"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; whatever is wider than the page scrolls within itself."""
    top = "".join(f"<th scope=col>{escape(cell)}</th>" for cell in head)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<div class=wide><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>"


def _pre(text: str) -> str:
    return f"<pre>{escape(text.rstrip())}</pre>"


def _sample(prompt: str, found: Mapping[str, str]) -> str:
    """How the dense and the pruned model go on, side by side."""
    cells = "".join(
        f"<div><p class=soft>{when}</p><p><b class=prompt>{escape(prompt)}</b>{escape(found[when])}</p></div>"
        for when in ("dense", "pruned")
        if when in found
    )
    return f"<div class=pair>{cells}</div>"
