"""`sweep`, `search`, `report` and `bench`: the commands that compare, and that write pages."""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import typer

from sparsellm.cli import options
from sparsellm.cli.console import (
    displayed,
    in_options,
    print_error,
    print_json,
    print_line,
    read_counts,
    report_errors,
    show,
    stderr,
    stdout,
    text_table,
)
from sparsellm.cli.run_options import Extras, extended
from sparsellm.errors import plural


@options.recipe_options("device")
@extended("sweep")
def sweep(
    context: typer.Context,
    file: options.SweepFile,
    output: options.SweepOut = None,
    *,
    smoke: options.Smoke = False,
    only: options.OnlyCells = None,
    changes: options.Changes = None,
    retry: options.Retry = False,
    list_cells: options.ListCells = False,
    quiet: options.QuietOption = False,
    as_json: options.JsonOption = False,
    extras: Extras,
    device: str | None = None,
) -> None:
    """Prune with every combination of settings in a file and compare.

    Each combination is a cell. Run the command again to continue an interrupted sweep. Several processes can share one folder.

    Example: sparsellm sweep recipes/demo.yaml demo-sweep
    """
    with report_errors(context):
        from sparsellm.cli.allocator import manage_memory
        from sparsellm.pipeline.display import Display
        from sparsellm.runtime import process_group
        from sparsellm.studies.sweep_file import read_sweep
        from sparsellm.studies.sweep_runner import read_outcomes, run_sweep
        from sparsellm.studies.sweep_tables import grid, legend, table, to_json, write_tables
        from sparsellm.texts.paths import local_path

        cells = read_sweep(file, smoke=smoke, changes=changes or ())
        folder = local_path(output or Path(file).stem)
        if list_cells:
            outcomes = read_outcomes(cells, folder, only or ())
            lines = [[x.cell.name, x.state, x.cell.recipe.describe()] for x in outcomes]
            stdout.print(text_table(["cell", "state", "recipe"], lines, words=True))
            if cells.ignored:
                print_line(stdout, cells.ignored)
            return
        # The processes of a launcher run different cells; only the first one prints.
        rank, count = process_group.independent_process(os.environ)
        with (
            Display("off" if rank else "quiet" if quiet else "auto", partial(in_options, context=context)) as display,
            extras.observing(display, manage_memory) as observe,
        ):
            outcomes = run_sweep(
                cells,
                folder,
                observe,
                retry=retry,
                device=device,
                only=only or (),
                after=lambda current: write_tables(cells, current, folder),
            )
        if rank:
            return
        while count > 1 and any(x.state == "at work" for x in outcomes):
            time.sleep(1)
            outcomes = read_outcomes(cells, folder)
        files = write_tables(cells, outcomes, folder)
        rows = table(cells, outcomes)
        if as_json:
            print_json(to_json(cells, rows, outcomes) | {"output": str(folder)})
        else:
            show(stdout, text_table(*grid(cells, rows), title=cells.title))
            for line in legend(cells, rows):
                print_line(stdout, line)
            print_line(stdout, f"Wrote {', '.join(map(str, files))}.")
        if running := sum(x.state == "at work" for x in outcomes):
            print_line(stderr, f"{plural(running, 'cell')} still at work in other processes.")
        if failed := [x for x in outcomes if x.state == "failed"]:
            first = f"{failed[0].cell.name} first: {failed[0].error}"
            share = f"{len(failed)} of {plural(len(outcomes), 'cell')} failed"
            print_error(f"{share}, {first} Pass --retry to run them again.", context)
            raise typer.Exit(1)


@options.recipe_options(without=("model", "sparsity", "bits"))
@extended("search")
def search(
    context: typer.Context,
    model: options.ModelOrConfig = None,
    output: options.Out = None,
    *,
    max_perplexity_increase: options.MaxIncrease = None,
    min_accuracy: options.MinAccuracy = None,
    max_size: options.MaxSize = None,
    step: options.StepOption = "1%",
    config: options.Config = None,
    overwrite: options.Overwrite = False,
    quiet: options.QuietOption = False,
    as_json: options.JsonOption = False,
    extras: Extras,
    **settings: Any,
) -> None:
    """Prune a model to the largest sparsity that meets a target.

    The sparsity is found with --effort fast, and the output is pruned with the effort given. Run the command again to continue
    an interrupted search.

    Example: sparsellm search demo:opt opt-5 --max-perplexity-increase 5% --calibration demo --evaluate demo --samples 16
    """
    with report_errors(context):
        from sparsellm.errors import TargetNotReached
        from sparsellm.pipeline.recipe_file import read_search
        from sparsellm.solvers.patterns import parse_pattern

        recipe = read_search(settings | ({"model": model} if model else {}), config)
        if output is None:
            raise typer.BadParameter("name the folder to write: sparsellm search MODEL OUT")
        distance = parse_pattern(step, "step").sparsity

        from sparsellm.cli.allocator import manage_memory
        from sparsellm.cli.result_text import print_search, print_summary
        from sparsellm.pipeline.display import Display
        from sparsellm.studies.search import search_sparsity
        from sparsellm.studies.target import Target

        target = Target.read(max_perplexity_increase, min_accuracy, max_size)
        try:
            with (
                Display("quiet" if quiet else "auto", partial(in_options, context=context)) as display,
                extras.observing(display, manage_memory) as observe,
            ):
                result = search_sparsity(recipe, output, target, step=distance, overwrite=overwrite, observe=observe)
        except TargetNotReached as error:
            if as_json:
                print_json({"target": str(target), "sparsity": None, "points": [asdict(point) for point in error.points]})
            elif error.points:
                print_search(stdout, error.points)
            raise
        if as_json:
            found = {"target": result.target, "sparsity": result.sparsity, "points": [asdict(point) for point in result.points]}
            print_json(found | {"report": result.report.to_dict(), "output": str(result.output)})
            return
        print_search(stdout, result.points)
        print_line(stdout, f"{100 * result.sparsity:.5g} % {result.outcome}.")
        print_summary(stdout, result.report, str(result.output))


def report(
    context: typer.Context,
    runs: options.Reported,
    *,
    output: options.PageOption = None,
    figures: options.Figures = None,
    overwrite: options.OverwriteFiles = False,
    as_json: options.JsonOption = False,
) -> None:
    """Write the page of a run or a sweep, or compare several.

    The page is one HTML file with text, tables and plots, and needs no network. Of several, lists perplexity, accuracy, zeros,
    size, and the layers whose errors differ most. --json prints all values.

    Example: sparsellm report opt-70
    """
    with report_errors(context):
        from sparsellm.cli.result_text import print_comparison
        from sparsellm.studies.interface import report as write_report

        if len(runs) > 1:
            comparison = write_report(runs, output, figures=figures, overwrite=overwrite)
            if as_json:
                print_json(comparison.to_dict())
                return
            print_comparison(stdout, comparison)
            if output:
                print_line(stdout, f"Wrote {output}.")
            return
        if output or figures or not as_json:
            page = write_report(runs[0], output, figures=figures, overwrite=overwrite)
        if as_json:
            print_json(_saved(runs[0]))
            return
        print_line(stdout, f"Wrote {page}.")
        if figures:
            print_line(stdout, f"Wrote its plots to {figures}, each as SVG and PNG.")


def _saved(run: str) -> dict[str, Any]:
    """The report of a run as its file holds it, or the results of a sweep as `sweep --json` prints them."""
    from sparsellm.pipeline.output_folder import REPORT, check_results, is_sweep
    from sparsellm.pipeline.report import read_report
    from sparsellm.studies.sweep_runner import read_outcomes, saved_sweep
    from sparsellm.studies.sweep_tables import table, to_json

    folder = check_results(run)
    if not is_sweep(folder):
        return read_report(folder / REPORT)[1]
    cells = saved_sweep(folder)
    outcomes = read_outcomes(cells, folder)
    return to_json(cells, table(cells, outcomes), outcomes)


def bench(
    context: typer.Context,
    packed: options.PackedArgument,
    *,
    against: options.DenseForm = None,
    batch: options.Batches = "1,4",
    threads: options.Threads = None,
    tokens: options.Decoded = 32,
    output: options.SpeedPage = None,
    record: options.RecordSpeed = False,
    overwrite: options.OverwriteFiles = False,
    as_json: options.JsonOption = False,
) -> None:
    """Measure how fast a packed model decodes on this machine's CPU.

    Lists tokens a second of the dense model in transformers, of the dense model with this package's kernel, of the packed
    model, and the ceiling, which is the speed of reading the dense weights; also prefill and memory.

    Example: sparsellm bench opt-70-packed
    """
    with report_errors(context):
        batches, counts = read_counts("--batch", batch), read_counts("--threads", threads)

        from sparsellm.studies.interface import bench as measure
        from sparsellm.studies.speed_plots import LEGEND, size_line, speed_tables

        with displayed(f"measuring {packed}", context) as observe:
            result = measure(
                packed,
                against,
                batch=batches or (),
                threads=counts,
                tokens=tokens,
                output=output,
                record=record,
                overwrite=overwrite,
                observe=observe,
            )
        if as_json:
            print_json(result.to_dict())
            return
        print_line(stdout, size_line(result))
        if result.caution:
            print_line(stdout, f"{result.caution}.")
        for title, made in speed_tables(result).items():
            print_line(stdout, "")
            show(stdout, text_table(*made, title=title))
        print_line(stdout, "\n".join(["", *LEGEND]))
        for note in result.notes:
            print_line(stderr, f"note: {note}")
        if output:
            print_line(stdout, f"Wrote {output}.")
        if record:
            print_line(stdout, f"Wrote the speeds into the report and the model card of {packed}.")
