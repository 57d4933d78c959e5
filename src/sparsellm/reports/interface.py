"""`sweep` and `report` in Python."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sparsellm.reports.comparison import write_tables
from sparsellm.reports.page import report_page, write_figures
from sparsellm.reports.sweep_file import read_sweep
from sparsellm.reports.sweep_runner import Outcome, run_sweep
from sparsellm.runs.events import Observer


def sweep(
    file: str | Path,
    output: str | Path | None = None,
    *,
    smoke: bool = False,
    only: Mapping[str, str | Sequence[str]] | None = None,
    changes: Mapping[str, Any] | None = None,
    retry: bool = False,
    device: str | None = None,
    observe: Observer | None = None,
) -> list[Outcome]:
    """Prune with every combination of settings in a file, and write tables that compare the results.

    Each combination is a cell. A cell that fails is skipped. Called again, an interrupted sweep continues.

    Args:
        file: YAML file with `recipe:` and `axes:`; docs/sweeps.md describes it.
        output: Folder of the sweep. Default: the file's name without .yaml, in the current folder.
        smoke: Run the small version that the file describes under `smoke:`.
        only: Labels by axis, as `{"method": ["alps", "wanda"]}`: only cells with them are run.
        changes: Values by recipe field, for all cells; or by "axis.label", for the field that the axis is named after.
        retry: Run failed cells again.
        device: Device that replaces the recipes'.
        observe: Callback that receives the events of all runs (see `sparsellm.runs.events`).

    Returns:
        The state of every cell: "finished" with a `report`, "failed" with an `error`, "at work" in another process, or "open".

    Raises:
        InvalidSetting: The file, a selection or a change is invalid.
        OutputExists: The folder exists and is not the folder of a sweep.
    """
    labels = {axis: [value] if isinstance(value, str) else value for axis, value in (only or {}).items()}
    cells = read_sweep(file, smoke=smoke, changes=[f"{name}={json.dumps(value)}" for name, value in (changes or {}).items()])
    folder = Path(output or Path(file).stem)
    outcomes = run_sweep(
        cells,
        folder,
        observe or (lambda _: None),
        retry=retry,
        device=device,
        only=[f"{axis}={label}" for axis, values in labels.items() for label in values],
    )
    write_tables(cells, outcomes, folder)
    return outcomes


def report(run: str | Path, output: str | Path | None = None, *, figures: str | Path | None = None) -> Path:
    """Write a report of a run or a sweep: one HTML file with text, tables and plots, readable without network.

    Args:
        run: Folder of a pruned model or of a sweep.
        output: HTML file to write. Default: the folder's name with .html, beside the folder.
        figures: Folder to write each plot to as well, as SVG and PNG.

    Returns:
        The HTML file.

    Raises:
        InvalidSetting: The folder is the output of neither a run nor a sweep.
        MissingPackage: matplotlib is not installed.
    """
    page, plots = report_page(run)
    # Beside the run's folder: inside it, `overwrite` would find a foreign file.
    file = Path(output or f"{Path(run)}.html")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(page, encoding="utf-8")
    if figures:
        write_figures(plots, figures)
    return file
