"""`prune` and `plan`: the commands that take a recipe."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import typer
from rich.text import Text

from sparsellm import options
from sparsellm.commands import ended, print_json, silent, stderr, stdout, told


@options.recipe_options()
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
    track: options.Track = None,
    as_json: options.Json = False,
    **settings: Any,
) -> None:
    """Prune a model and write the pruned checkpoint.

    Example: sparsellm prune demo:opt opt-70 --sparsity 70% --calibration demo --samples 16
    """
    with told(context):
        from sparsellm.export import check_output, is_finished
        from sparsellm.recipe_file import read_recipe, read_yaml

        if config and output is None and model is not None and "model" in read_yaml(Path(config)):
            model, output = None, model  # the recipe names the model, so the only argument is the output
        if model is not None:
            settings["model"] = model
        recipe = read_recipe(settings, config)
        if print_config:
            print(recipe.to_yaml(), end="")
            return
        if output is None:
            raise typer.BadParameter("name the folder to write: sparsellm prune MODEL OUT")
        if resume and restart:
            raise typer.BadParameter("--resume continues an unfinished run, --restart discards it: pass one of them")

        from sparsellm import distributed
        from sparsellm.display import Progress, print_summary
        from sparsellm.events import Stage, each
        from sparsellm.output_lock import recover
        from sparsellm.pages import manage_memory
        from sparsellm.run import run
        from sparsellm.tracking import Tracked
        from sparsellm.work import working

        with distributed.joined(
            os.environ, ended
        ) as leads:  # alone, or with the other processes of a launcher, of which one speaks
            if leads:
                recover(output)
            if distributed.agreed(resume and is_finished(output)):
                stderr.print(f"{output} is finished: there is nothing to go on with.", highlight=False, soft_wrap=True)
                return
            if leads:
                check_output(output, overwrite, recipe.model)
            with (
                Progress(stderr if leads else silent) as progress,
                Tracked(*(track or () if leads else ()), say=progress) as tracked,
                working(output, resume, restart) as work,
            ):
                result = run(recipe, each(manage_memory, progress, tracked), work=work)
                progress(Stage("writing and verifying"))
                folder = result.save_pretrained(output, overwrite)
            if not leads:
                return
            if as_json:
                print_json(result.report.to_dict() | {"output": str(folder)})
            else:
                print_summary(stdout, result.report, str(folder))


@options.recipe_options()
def plan(
    context: typer.Context,
    model: options.ModelOrConfig = None,
    output: options.Out = None,
    *,
    config: options.Config = None,
    as_json: options.Json = False,
    **settings: Any,
) -> None:
    """Estimate memory, disk space, operations and time of a `prune` command, without reading any weights.

    Example: sparsellm plan demo:opt --sparsity 70% --calibration demo --samples 16
    """
    with told(context):
        from sparsellm.display import print_plan
        from sparsellm.planning import plan_run
        from sparsellm.recipe_file import read_recipe

        if model is not None:
            settings["model"] = model
        with stderr.status("planning"):
            planned = plan_run(read_recipe(settings, config), output)
        if as_json:
            print_json(planned.to_dict())
        else:
            print_plan(stdout, planned)
        if not planned.fits:
            stderr.print(Text(f"error: {planned.refusal}", style="red"), soft_wrap=True)
            raise typer.Exit(1)
