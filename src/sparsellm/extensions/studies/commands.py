"""`sweep`, `search`, `report`, `bench` and `demo`: the commands that compare, and that write pages."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from sparsellm.cli import options
from sparsellm.cli.console import (
    displayed,
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
from sparsellm.cli.run_options import Extras, extended, observing
from sparsellm.errors import capitalized, plural

SweepFile = Annotated[str, typer.Argument(metavar="SWEEP", help="YAML file with `recipe:` and `axes:`; see docs/sweeps.md.")]
SweepOut = Annotated[
    str | None,
    typer.Argument(
        metavar="OUT", help="Folder of the sweep; an existing sweep is continued. Default: the file's name without .yaml."
    ),
]
Smoke = Annotated[bool, typer.Option("--smoke", help="Run the small version that the file describes under `smoke:`.")]
OnlyCells = Annotated[
    list[str] | None,
    typer.Option("--only", metavar="AXIS=LABEL", help="Run or list only the cells with this label on this axis."),
]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="Change a field of the recipe in all cells, or with AXIS.LABEL=VALUE the value behind one label.",
    ),
]
Retry = Annotated[bool, typer.Option("--retry", help="Run failed cells again.")]
ListCells = Annotated[bool, typer.Option("--list", help="List the cells and their states without running any.")]
_target = partial(typer.Option, rich_help_panel="Target")
MaxIncrease = Annotated[
    str | None, _target(metavar="PERCENT", help="Largest increase of the perplexity on each text of --evaluate, as 5%.")
]
MinAccuracy = Annotated[
    list[str] | None, _target(metavar="TASK:ACCURACY", help="Smallest accuracy on a zero-shot task, as boolq:0.60.")
]
MaxSize = Annotated[str | None, _target(metavar="SIZE", help="Size of the weights, as 500MB, once `pack` has packed them.")]
Over = Annotated[
    str, _target(metavar="[sparsity|bits]", help="Setting to search over: sparsity, or bits a weight as --bits of prune.")
]
_STEP = "Distance between the values to choose from: a percentage, or a number of bits."
StepOption = Annotated[str | None, _target(metavar="DISTANCE", help=_STEP, show_default="1%, or 0.1 bits")]
_REPORTED = "Folders of pruned models or of sweeps; several, of one dense model, are compared."
Reported = Annotated[list[str], typer.Argument(metavar="RUN", help=_REPORTED)]
_PAGE_DEFAULT = "RUN.html, beside RUN; none for several or for --json alone"
PageOption = Annotated[str | None, options.output_option("--output", help="HTML file to write.", show_default=_PAGE_DEFAULT)]
_FIGURES = "Also write each plot of a run's page to this folder, as SVG and PNG."
Figures = Annotated[str | None, options.output_option(metavar="DIR", help=_FIGURES)]
OverwriteFiles = Annotated[bool, options.output_option("--overwrite", help="Replace files that sparsellm did not write.")]
PackedArgument = Annotated[str, typer.Argument(metavar="PACKED", help="Folder of a packed model, as written by `pack`.")]
DenseForm = Annotated[
    str | None,
    typer.Option("--against", metavar="DENSE", help="Dense model to compare with.", show_default="PACKED, decoded"),
]
Batches = Annotated[str, typer.Option("--batch", metavar="N,N", help="Numbers of sequences to decode together.")]
Threads = Annotated[
    str | None, typer.Option("--threads", metavar="N,N", help="Numbers of threads.", show_default="as many as torch uses")
]
Decoded = Annotated[int, typer.Option("--tokens", metavar="N", help="Tokens of each sequence to decode in a measurement.")]
SpeedPage = Annotated[str | None, options.output_option(help="HTML file to write, with the tables and a chart.")]
RecordSpeed = Annotated[
    bool, typer.Option("--record", help="Write the speeds into PACKED's report and model card, in place of earlier ones.")
]
_DEMO_OUTPUT = "Folder to write the model pruned by the method sparsellm to; must not exist."
DemoOutput = Annotated[str | None, typer.Option(help=_DEMO_OUTPUT)]
Family = Annotated[str, typer.Option(help="Bundled model: opt or llama.")]


@options.recipe_options("device", "plugin")
@extended("sweep")
def sweep(
    context: typer.Context,
    file: SweepFile,
    output: SweepOut = None,
    *,
    smoke: Smoke = False,
    only: OnlyCells = None,
    changes: Changes = None,
    retry: Retry = False,
    list_cells: ListCells = False,
    quiet: options.QuietOption = False,
    as_json: options.JsonOption = False,
    extras: Extras,
    device: str | None = None,
    plugin: Sequence[str] = (),
) -> None:
    """Prune with every combination of settings in a file and compare.

    Each combination is a cell. Run the command again to continue an interrupted sweep. Several processes can share one folder.

    Example: sparsellm sweep recipes/demo.yaml demo-sweep
    """
    with report_errors(context):
        from sparsellm.extensions.studies.sweep_file import read_sweep
        from sparsellm.extensions.studies.sweep_runner import read_outcomes, run_sweep
        from sparsellm.extensions.studies.tables import grid, legend, table, to_json, write_tables
        from sparsellm.runtime import process_group
        from sparsellm.texts.paths import local_path

        cells = read_sweep(file, smoke=smoke, changes=changes or (), plugins=plugin)
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
        with observing(context, extras, quiet=quiet, displays=not rank) as observe:
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
    max_perplexity_increase: MaxIncrease = None,
    min_accuracy: MinAccuracy = None,
    max_size: MaxSize = None,
    over: Over = "sparsity",
    step: StepOption = None,
    config: options.Config = None,
    overwrite: options.Overwrite = False,
    quiet: options.QuietOption = False,
    as_json: options.JsonOption = False,
    extras: Extras,
    **settings: Any,
) -> None:
    """Prune a model as far as a target allows.

    The largest sparsity, or the fewest bits, that meet the target are found with --effort fast, and the output is pruned with
    the effort given. Run the command again to continue an interrupted search.

    Example: sparsellm search demo:opt opt-5 --max-perplexity-increase 5% --calibration demo --evaluate demo --samples 16
    """
    with report_errors(context):
        from sparsellm.errors import TargetNotReached
        from sparsellm.extensions.studies.searched import searched_setting
        from sparsellm.recipes.file import read_search

        setting = searched_setting(over)
        distance = setting.read_step(step)
        recipe = read_search(settings | ({"model": model} if model else {}), config, setting.fields(setting.start))
        if output is None:
            raise typer.BadParameter("name the folder to write: sparsellm search MODEL OUT")

        from sparsellm.cli.result_text import print_summary
        from sparsellm.extensions.studies.search import run_search
        from sparsellm.extensions.studies.search_result import search_table
        from sparsellm.extensions.studies.target import Target

        target = Target.read(max_perplexity_increase, min_accuracy, max_size)
        try:
            with observing(context, extras, quiet=quiet) as observe:
                result = run_search(recipe, output, target, setting, step=distance, overwrite=overwrite, observe=observe)
        except TargetNotReached as error:
            if as_json:
                print_json(
                    {"over": over, "target": str(target), "value": None, "points": [asdict(point) for point in error.points]}
                )
            elif error.points:
                show(stdout, text_table(*search_table(error.points)))
            raise
        if as_json:
            found = {"over": over, "target": result.target, "value": result.value}
            print_json(
                found
                | {
                    "points": [asdict(point) for point in result.points],
                    "report": result.report.to_dict(),
                    "output": str(result.output),
                }
            )
            return
        show(stdout, text_table(*search_table(result.points)))
        print_line(stdout, f"{capitalized(result.outcome)}.")
        print_summary(stdout, result.report, str(result.output))


def report(
    context: typer.Context,
    runs: Reported,
    *,
    output: PageOption = None,
    figures: Figures = None,
    overwrite: OverwriteFiles = False,
    as_json: options.JsonOption = False,
) -> None:
    """Write the page of a run or a sweep, or compare several.

    The page is one HTML file with text, tables and plots, and needs no network. Of several, lists perplexity, accuracy, zeros,
    size, and the layers whose errors differ most. --json prints all values.

    Example: sparsellm report opt-70
    """
    with report_errors(context):
        from sparsellm.extensions.studies.interface import report as write_report

        if len(runs) > 1:
            comparison = write_report(runs, output, figures=figures, overwrite=overwrite)
            if as_json:
                print_json(comparison.to_dict())
                return
            if comparison.verdict:
                print_line(stdout, f"{comparison.verdict}\n")
            for title, made in comparison.tables().items():
                show(stdout, text_table(*made, title))
                print_line(stdout, "")
            for note in comparison.notes:
                print_line(stdout, note)
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
    from sparsellm.checkpoints.files import REPORT
    from sparsellm.extensions.studies.sweep_runner import read_outcomes, saved_sweep
    from sparsellm.extensions.studies.tables import table, to_json
    from sparsellm.outputs.folder import check_results, is_sweep
    from sparsellm.outputs.report import read_report

    folder = check_results(run)
    if not is_sweep(folder):
        return read_report(folder / REPORT)[1]
    cells = saved_sweep(folder)
    outcomes = read_outcomes(cells, folder)
    return to_json(cells, table(cells, outcomes), outcomes)


def bench(
    context: typer.Context,
    packed: PackedArgument,
    *,
    against: DenseForm = None,
    batch: Batches = "1,4",
    threads: Threads = None,
    tokens: Decoded = 32,
    output: SpeedPage = None,
    record: RecordSpeed = False,
    overwrite: OverwriteFiles = False,
    as_json: options.JsonOption = False,
) -> None:
    """Measure how fast a packed model decodes on this machine's CPU.

    Lists tokens a second of the dense model in transformers, of the dense model with this package's kernel, of the packed
    model, and memory's speed (the ceiling), which is that of reading the dense weights; also prefill and memory.

    Example: sparsellm bench opt-70-packed
    """
    with report_errors(context):
        batches, counts = read_counts("--batch", batch), read_counts("--threads", threads)

        from sparsellm.extensions.studies.interface import bench as measure
        from sparsellm.extensions.studies.tables import LEGEND, size_line, speed_tables

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


def demo(
    context: typer.Context,
    *,
    output: DemoOutput = None,
    family: Family = "opt",
    quiet: options.QuietOption = False,
    as_json: options.JsonOption = False,
) -> None:
    """Prune a bundled model with every method and compare them.

    Takes under two minutes, without network or GPU. With --output, it ends with the size and speed of the output packed.

    Example: sparsellm demo --output pruned-demo
    """
    with report_errors(context):
        from sparsellm.extensions.studies.demonstration import SPARSITY, demonstrate, measure_packed, packed_lines
        from sparsellm.observers.display import with_standard_error
        from sparsellm.outputs.saving import check_output

        if output is not None:
            check_output(output)
        with observing(context, quiet=quiet) as observe:
            rows = demonstrate(family, output, observe)
        packed = None if output is None else measure_packed(output)
        if as_json:
            result = {"model": f"demo:{family}", "sparsity": SPARSITY, "rows": [asdict(row) for row in rows]}
            print_json(result | {"output": output} | ({"packed": packed.to_dict()} if packed else {}))
            return
        title = f"demo:{family}, {SPARSITY} removed, perplexity on text outside its training data"
        cells = [
            [
                x.method,
                with_standard_error(x.perplexity, x.standard_error),
                str(x.change or ""),
                f"{100 * x.sparsity:.1f} %",
                f"{x.seconds:.1f}",
            ]
            for x in rows
        ]
        show(stdout, text_table(["method", "perplexity", "change", "zeros", "seconds"], cells, title))
        if packed is not None:
            print_line(stdout, f"Wrote the model pruned by SparseLLM to {output}, read back and verified.")
            for line in packed_lines(packed):
                print_line(stdout, line)
            print_line(stdout, f"Look at it: sparsellm inspect {output}")
        print_line(stdout, "Your model: sparsellm plan MODEL --sparsity 70% --calibration TEXT")
        print_line(stdout, "Prune it: sparsellm prune MODEL OUTPUT --sparsity 70% --calibration TEXT")
