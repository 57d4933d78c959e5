"""`prune`, `recover` and `plan`: the commands that take a recipe."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.text import Text

from sparsellm import options
from sparsellm.commands import ended, print_json, silent, stderr, stdout, told

if TYPE_CHECKING:
    from sparsellm.recipe import RunRecipe

_NOT_FIELDS = ("context", "output", "config", "print_config", "resume", "restart", "overwrite", "track", "as_json")


def prune(
    context: typer.Context,
    model: options.ModelOrConfig = None,
    output: options.Out = None,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = None,
    architecture: options.Architecture = None,
    method: options.Method = None,
    sparsity: options.Sparsity = None,
    as_published: options.AsPublished = None,
    solver: options.Solver = None,
    targets: options.Targets = None,
    residual: options.Residual = None,
    curvature: options.Curvature = None,
    horizon: options.Horizon = None,
    newton: options.Newton = None,
    epochs: options.Epochs = None,
    alpha: options.Alpha = None,
    beta: options.Beta = None,
    couple: options.Couple = None,
    allocation: options.Allocation = None,
    allocation_bounds: options.AllocationBounds = None,
    blocks: options.Blocks = None,
    only: options.Only = None,
    skip: options.Skip = None,
    keep_zeros: options.KeepZeros = None,
    true_sequential: options.TrueSequential = None,
    calibration: options.Calibration = None,
    text_field: options.TextField = None,
    samples: options.Samples = None,
    written: options.Written = None,
    length: options.Length = None,
    seed: options.Seed = None,
    evaluate: options.Evaluate = None,
    evaluate_limit: options.EvaluateLimit = None,
    prompt: options.Prompt = None,
    task: options.Task = None,
    task_data: options.TaskData = None,
    task_limit: options.TaskLimit = None,
    memory: options.Memory = None,
    stream: options.Stream = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    batch: options.Batch = None,
    config: options.Config = None,
    print_config: options.PrintConfig = False,
    resume: options.Resume = False,
    restart: options.Restart = False,
    overwrite: options.Overwrite = False,
    track: options.Track = None,
    as_json: options.Json = False,
) -> None:
    """Prune a model and write the pruned checkpoint.

    Example: sparsellm prune demo:opt opt-70 --sparsity 70% --calibration demo --samples 16
    """
    given = {name: value for name, value in locals().items() if name not in _NOT_FIELDS and value not in (None, [])}
    with told(context):
        from sparsellm.recipe_file import read_recipe, read_yaml

        if config and output is None and model is not None and "model" in read_yaml(Path(config)):
            output = given.pop("model")  # the recipe names the model, so the one name given is the output's
        recipe = read_recipe(given, config)
        if print_config:
            print(recipe.to_yaml(), end="")
            return
        if output is None:
            raise typer.BadParameter("name the folder to write: sparsellm prune MODEL OUT")
        _write(recipe, output, resume=resume, restart=restart, overwrite=overwrite, track=track or [], as_json=as_json)


def recover(
    context: typer.Context,
    pruned: options.Pruned,
    output: options.Recovered,
    model: options.Toward,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = None,
    architecture: options.Architecture = None,
    scope: options.Scope = None,
    steps: options.Steps = None,
    calibration: options.Calibration = None,
    text_field: options.TextField = None,
    samples: options.Samples = None,
    written: options.RecoveryWritten = None,
    length: options.Length = None,
    seed: options.Seed = None,
    evaluate: options.Evaluate = None,
    evaluate_limit: options.EvaluateLimit = None,
    prompt: options.Prompt = None,
    task: options.Task = None,
    task_data: options.TaskData = None,
    task_limit: options.TaskLimit = None,
    memory: options.Memory = None,
    stream: options.Stream = None,
    device: options.Device = None,
    batch: options.Batch = None,
    resume: options.Resume = False,
    restart: options.Restart = False,
    overwrite: options.Overwrite = False,
    track: options.Track = None,
    as_json: options.Json = False,
) -> None:
    """Train the weights that a pruned checkpoint has left, zeros held, and write the recovered checkpoint.

    Example: sparsellm recover opt-70 opt-70-recovered --against demo:opt --calibration demo --samples 16
    """
    given = {name: value for name, value in locals().items() if name not in _NOT_FIELDS and value not in (None, [])}
    with told(context):
        from sparsellm.export import check_output
        from sparsellm.recovery import read_recovery

        recipe = read_recovery(given)
        check_output(output, overwrite or resume or restart, recipe.pruned)
        _write(recipe, output, resume=resume, restart=restart, overwrite=overwrite, track=track or [], as_json=as_json)


def _write(
    recipe: RunRecipe, output: str, *, resume: bool, restart: bool, overwrite: bool, track: list[str], as_json: bool
) -> None:
    """Run a recipe, alone or with the other processes of a launcher, write the output, and print what was done."""
    if resume and restart:
        raise typer.BadParameter("--resume goes on with an unfinished output, --restart throws it away: pass one of them")

    from sparsellm import distributed, output_lock
    from sparsellm.display import Progress, print_summary
    from sparsellm.events import Stage, each
    from sparsellm.export import check_output, is_finished
    from sparsellm.run import run
    from sparsellm.tracking import Tracked
    from sparsellm.work import working

    with distributed.joined(os.environ, ended) as leads:  # of several processes one speaks
        if leads:
            output_lock.recover(output)
        if distributed.agreed(resume and is_finished(output)):
            stderr.print(f"{output} is finished: there is nothing to go on with.", highlight=False, soft_wrap=True)
            return
        if leads:
            check_output(output, overwrite, recipe.model)
        with (
            Progress(stderr if leads else silent) as progress,
            Tracked(*(track if leads else ()), say=progress) as tracked,
            working(output, resume, restart) as work,
        ):
            result = run(recipe, each(progress, tracked), work=work)
            progress(Stage("writing and verifying"))
            folder = result.save_pretrained(output, overwrite)
        if not leads:
            return
        if as_json:
            print_json(result.report.to_dict() | {"output": str(folder)})
        else:
            print_summary(stdout, result.report, str(folder))


def _like_prune(command: Callable[..., None]) -> Callable[..., None]:
    """A command with the arguments and options of `prune` that decide what a run takes."""
    whole = inspect.signature(prune, eval_str=True)
    left_out = ("print_config", "resume", "restart", "overwrite", "track")
    command.__signature__ = whole.replace(  # type: ignore[attr-defined]
        parameters=[some for name, some in whole.parameters.items() if name not in left_out]
    )
    command.__annotations__ = {name: kind for name, kind in prune.__annotations__.items() if name not in left_out}
    return command


@_like_prune
def plan(context: typer.Context, **given: Any) -> None:
    """Tell what `prune` would take with the same words: memory, disk, operations, time. No weights are read.

    Example: sparsellm plan demo:opt --sparsity 70% --calibration demo --samples 16
    """
    output, config, as_json = given.pop("output"), given.pop("config"), given.pop("as_json")
    settings = {name: value for name, value in given.items() if value not in (None, [])}
    with told(context):
        from sparsellm.display import print_plan
        from sparsellm.planning import plan_run
        from sparsellm.recipe_file import read_recipe

        with stderr.status("planning"):
            planned = plan_run(read_recipe(settings, config), output)
        if as_json:
            print_json(planned.to_dict())
        else:
            print_plan(stdout, planned)
        if not planned.fits:
            stderr.print(Text(f"error: {planned.refusal}", style="red"), soft_wrap=True)
            raise typer.Exit(1)
