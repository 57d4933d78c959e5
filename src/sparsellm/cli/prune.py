"""`prune`, and how a command runs recipes and writes outputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from sparsellm.cli import options
from sparsellm.cli.console import (
    in_process_group,
    print_json,
    print_line,
    stderr,
    stdout,
)
from sparsellm.cli.run_options import Extras, extended, observing
from sparsellm.texts.paths import local_path

if TYPE_CHECKING:
    from sparsellm.outputs.report import Report
    from sparsellm.outputs.saving import Result
    from sparsellm.recipes.recipe import RunRecipe


@options.recipe_options()
@extended("prune")
def prune(
    context: typer.Context,
    model: options.ModelOrConfig = None,
    output: options.Out = None,
    *,
    config: options.Config = None,
    print_config: options.PrintConfig = False,
    resume: options.Resume = False,
    restart: options.Restart = False,
    overwrite: options.Overwrite = False,
    quiet: options.QuietOption = False,
    as_json: options.JsonOption = False,
    extras: Extras,
    **settings: Any,
) -> None:
    """Prune a model and write the pruned checkpoint.

    Example: sparsellm prune demo:opt opt-70 --sparsity 70% --calibration demo --samples 16
    """
    with in_process_group(context) as is_main:
        from sparsellm.recipes.file import read_recipe_fields, read_recipes

        if config and output is None and model is not None and "model" in read_recipe_fields(local_path(config)):
            model, output = None, model  # the recipe names the model, so the only argument is the output
        if model is not None:
            settings["model"] = model
        recipes = read_recipes(settings, config)
        if print_config:
            sparsities = ",".join(x.sparsity for x in recipes if x.sparsity) or None
            if is_main:
                print(recipes[0].model_copy(update={"sparsity": sparsities}).to_yaml(), end="")
            return
        if output is None:
            raise typer.BadParameter("name the folder to write: sparsellm prune MODEL OUT")
        write_outputs(
            context,
            recipes,
            output,
            is_main,
            resume=resume,
            restart=restart,
            overwrite=overwrite,
            extras=extras,
            quiet=quiet,
            as_json=as_json,
        )


def write_outputs(
    context: typer.Context,
    recipes: Sequence[RunRecipe],
    output: str,
    is_main: bool,
    *,
    resume: bool,
    restart: bool,
    overwrite: bool,
    extras: Extras,
    quiet: bool,
    as_json: bool,
    function: Callable[..., Result] | None = None,
) -> None:
    """Run one or several recipes, in one process or in those of a launcher, write the outputs, and print the results."""
    from sparsellm.pipeline.several import output_folders, run_outputs

    folders = output_folders(output, recipes)

    def check() -> None:
        for brought in extras:
            brought.check(folders, resume=resume, overwrite=overwrite)

    report = run_outputs(
        output,
        folders,
        partial(observing, context, extras if is_main else (), quiet=quiet, displays=is_main),
        resume=resume,
        restart=restart,
        overwrite=overwrite,
        function=function,
        check=check,
    )
    if not is_main:
        return
    if report is None:
        print_line(stderr, f"{output} is finished: there is nothing to resume.")
    else:
        _print_results(folders, report, as_json)
    for brought in extras:
        brought.finish(context, folders, resume=resume, overwrite=overwrite, quiet=quiet, on_stderr=as_json)


def _print_results(folders: Collection[Path], report: Report, as_json: bool) -> None:
    """Print the results of one output, from its report, or of several, from those in their folders."""
    from sparsellm.checkpoints.files import REPORT
    from sparsellm.cli.result_text import print_several, print_summary
    from sparsellm.outputs.report import load_report
    from sparsellm.texts.json_files import read_json

    written = {str(folder): str(local_path(folder).resolve()) for folder in folders}
    if len(folders) > 1 and as_json:
        print_json({"outputs": [read_json(Path(path) / REPORT) | {"output": path} for path in written.values()]})
    elif len(folders) > 1:
        print_several(stdout, {folder: load_report(folder) for folder in written})
    elif as_json:
        print_json(report.to_dict() | {"output": next(iter(written.values()))})
    else:
        print_summary(stdout, report, next(iter(written.values())))
