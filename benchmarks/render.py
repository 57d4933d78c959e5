"""Write docs/results.md, docs/distributed.md, and the demo's table in README.md and the quick start, from benchmarks/measured/.

sparsellm demo --json > benchmarks/measured/demo.json
python benchmarks/render.py
"""

from __future__ import annotations

import json

import excess
import planning
import processes
import solvers
import speed_tables
import streaming
from measuring import MEASURED, ROOT
from results import epochs_tables, seconds_table, table

from sparsellm.cli.display import plus_minus


def render() -> None:
    """Write docs/results.md from the measured figures and the words in benchmarks/results.md.in."""
    measured = (json.loads(file.read_text()) for file in sorted(MEASURED.glob("*.json")))
    files = [data for data in measured if "cells" in data and "dense" in data]
    parts = []
    for data in files:
        dense = plus_minus(data["dense"]["perplexity"], data["dense"]["standard_error"])
        windows = f"{data['dense']['windows']} windows of {data['dense']['length']} tokens"
        parts += [f"### {data['model']}", "", f"Dense: {dense}, over {windows}.", "", *table(data), ""]
    template = (ROOT / "benchmarks" / "results.md.in").read_text(encoding="utf-8")
    page = template.replace("{{tables}}\n", "\n".join(parts)).replace("{{seconds}}\n", "\n".join(seconds_table(files)) + "\n")
    page = page.replace("{{epochs}}\n", "\n".join(epochs_tables())).replace("{{machine}}", files[0]["machine"])
    page = page.replace("{{excess}}\n", "\n".join(excess.tables()) + "\n").replace(
        "{{solvers}}\n", "\n".join(solvers.tables()) + "\n"
    )
    page = page.replace("{{streaming}}\n", "\n".join([*streaming.tables(), "", *streaming.cost()]) + "\n")
    page = page.replace("{{planning}}\n", "\n".join(planning.tables()) + "\n")
    page = page.replace("{{speed}}\n", "\n".join(speed_tables.tables()) + "\n")
    (ROOT / "docs" / "results.md").write_text(page, encoding="utf-8")
    told = (ROOT / "benchmarks" / "distributed.md.in").read_text(encoding="utf-8")
    told = told.replace("{{processes}}", "\n".join(processes.table())).replace("{{costs}}", "\n".join(processes.costs()))
    (ROOT / "docs" / "distributed.md").write_text(told, encoding="utf-8")
    middle = "\n".join(demo_table(json.loads((MEASURED / "demo.json").read_text())))
    for file in (ROOT / "README.md", ROOT / "docs" / "quick-start.md"):
        before, rest = file.read_text(encoding="utf-8").split("<!-- demo table -->\n")
        _, after = rest.split("<!-- end of demo table -->\n")
        page = f"{before}<!-- demo table -->\n{middle}\n<!-- end of demo table -->\n{after}"
        file.write_text(page, encoding="utf-8")


def demo_table(data: dict) -> list[str]:
    """What `sparsellm demo` found, as a Markdown table."""
    lines = [f"| {data['model']}, {data['sparsity']} removed | perplexity | zeros | seconds |", "|---|---:|---:|---:|"]
    for row in data["rows"]:
        value = plus_minus(row["perplexity"], row["standard_error"])
        lines.append(f"| {row['method']} | {value} | {100 * row['sparsity']:.1f} % | {row['seconds']:.1f} |")
    return lines


if __name__ == "__main__":
    render()
