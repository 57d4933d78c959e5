"""The command line: a thin skin over `run`. Data go to stdout, all else to stderr; heavy imports wait inside the commands."""

from __future__ import annotations

import errno
import inspect as introspection
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from sparsellm import __version__, options
from sparsellm.errors import SparseLLMError

app = typer.Typer(
    name="sparsellm",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
stderr = Console(stderr=True, emoji=False, markup=False)
stdout = Console(emoji=False, markup=False)


@app.callback()
def root(
    context: typer.Context,
    debug: options.Debug = False,
    version: options.Version = False,
) -> None:
    """Prune pre-trained language models, block by block, on a CPU or a GPU.

    Example: sparsellm methods
    """
    context.obj = debug
    if version:
        print(__version__)
        raise typer.Exit


@app.command()
def prune(
    context: typer.Context,
    model: options.ModelOrConfig = None,
    output: options.Out = None,
    method: options.Method = None,
    sparsity: options.Sparsity = None,
    as_published: options.AsPublished = None,
    solver: options.Solver = None,
    targets: options.Targets = None,
    residual: options.Residual = None,
    curvature: options.Curvature = None,
    horizon: options.Horizon = None,
    newton: options.Newton = None,
    refine: options.Refine = None,
    epochs: options.Epochs = None,
    alpha: options.Alpha = None,
    beta: options.Beta = None,
    couple: options.Couple = None,
    couple_steps: options.CoupleSteps = None,
    couple_written: options.CoupleWritten = None,
    allocation: options.Allocation = None,
    allocation_bounds: options.AllocationBounds = None,
    blocks: options.Blocks = None,
    only: options.Only = None,
    skip: options.Skip = None,
    calibration: options.Calibration = None,
    text_field: options.TextField = None,
    samples: options.Samples = None,
    written: options.Written = None,
    length: options.Length = None,
    seed: options.Seed = None,
    evaluate: options.Evaluate = None,
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
    as_json: options.Json = False,
) -> None:
    """Prune a model and write the pruned checkpoint.

    Example: sparsellm prune demo:opt opt-70 --sparsity 70% --calibration demo --samples 16
    """
    given = {name: value for name, value in locals().items() if name not in _NOT_FIELDS and value not in (None, [])}
    with _told(context):
        from sparsellm.export import check_output, is_finished
        from sparsellm.recipe_file import read_recipe, read_yaml

        if config and output is None and model is not None and "model" in read_yaml(Path(config)):
            output = given.pop("model")  # the recipe names the model, so the one name given is the output's
        recipe = read_recipe(given, config)
        if print_config:
            print(recipe.to_yaml(), end="")
            return
        if output is None:
            raise typer.BadParameter("name the folder to write: sparsellm prune MODEL OUT")
        if resume and restart:
            raise typer.BadParameter("--resume goes on with an unfinished output, --restart throws it away: pass one of them")
        if resume and is_finished(output):
            stderr.print(f"{output} is finished: there is nothing to go on with.", highlight=False, soft_wrap=True)
            return
        check_output(output, overwrite, recipe.model)

        from sparsellm.display import Progress, print_summary
        from sparsellm.events import Stage
        from sparsellm.run import run
        from sparsellm.work import working

        with Progress(stderr) as progress, working(output, resume, restart) as work:
            result = run(recipe, progress, work=work)
            progress(Stage("writing and verifying"))
            folder = result.save_pretrained(output, overwrite)
        if as_json:
            _print_json(result.report.to_dict() | {"output": str(folder)})
        else:
            print_summary(stdout, result.report, str(folder))


def _like_prune(command: Callable[..., None]) -> Callable[..., None]:
    """A command with the arguments and options of `prune` that decide what a run takes."""
    whole = introspection.signature(prune, eval_str=True)
    left_out = ("print_config", "resume", "restart", "overwrite")
    command.__signature__ = whole.replace(  # type: ignore[attr-defined]
        parameters=[some for name, some in whole.parameters.items() if name not in left_out]
    )
    command.__annotations__ = {name: kind for name, kind in prune.__annotations__.items() if name not in left_out}
    return command


@app.command()
@_like_prune
def plan(context: typer.Context, **given: Any) -> None:
    """Tell what `prune` would take with the same words: memory, disk, operations, time. No weights are read.

    Example: sparsellm plan demo:opt --sparsity 70% --calibration demo --samples 16
    """
    output, config, as_json = given.pop("output"), given.pop("config"), given.pop("as_json")
    settings = {name: value for name, value in given.items() if value not in (None, [])}
    with _told(context):
        from sparsellm.display import print_plan
        from sparsellm.planning import plan_run
        from sparsellm.recipe_file import read_recipe

        with stderr.status("planning"):
            planned = plan_run(read_recipe(settings, config), output)
        if as_json:
            _print_json(planned.to_dict())
        else:
            print_plan(stdout, planned)
        if not planned.fits:
            stderr.print(Text(f"error: {planned.refusal}", style="red"), soft_wrap=True)
            raise typer.Exit(1)


_NOT_FIELDS = ("context", "output", "config", "print_config", "resume", "restart", "overwrite", "as_json")


@app.command()
def evaluate(
    context: typer.Context,
    model: options.Model,
    text: options.Text,
    text_field: options.TextField = None,
    length: options.Length = None,
    memory: options.Memory = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    as_json: options.Json = False,
) -> None:
    """Measure the perplexity of a model on texts, with its standard error.

    Example: sparsellm evaluate demo:opt --text demo
    """
    with _told(context):
        from sparsellm.display import plus_minus, table
        from sparsellm.measuring import measure

        with stderr.status(f"measuring {model}"):
            found = measure(model, text, text_field, length, device or "auto", dtype or "auto", memory)
        if as_json:
            _print_json({"model": model, "perplexity": found})
            return
        rows = [
            [name, plus_minus(x["value"], x["standard_error"]), f"{x['windows']} x {x['length']}", f"{x['seconds']:.1f}"]
            for name, x in found.items()
        ]
        stdout.print(table(["text", "perplexity", "windows", "seconds"], rows))


@app.command()
def inspect(
    context: typer.Context,
    model: options.Model,
    against: options.Against = None,
    expect: options.Expect = None,
    as_json: options.Json = False,
) -> None:
    """Count the zeros of a checkpoint, layer by layer, and check a pattern over every group.

    Example: sparsellm inspect demo:opt
    """
    with _told(context):
        from sparsellm.display import table
        from sparsellm.inspection import inspect as look

        found = look(model, against, expect)
        if as_json:
            _print_json(found.to_dict())
        else:
            marks = {True: "yes", False: "NO", None: "-"}
            columns = ["layer", "shape", "zeros", *([f"{found.expected} holds"] if found.expected else [])]
            rows = [
                [x.name, f"{x.shape[0]} x {x.shape[1]}", f"{100 * x.sparsity:.2f} %", *([marks[x.holds]] if expect else [])]
                for x in found.layers
            ]
            stdout.print(table(columns, rows))
            share = 100 * found.zeros / max(found.parameters, 1)
            stdout.print(
                f"{found.zeros:,} of {found.parameters:,} stored parameters are zero ({share:.2f} %).", highlight=False
            )
            if against:
                stdout.print(f"{found.alike} tensors equal those of {against}; {len(found.changed)} differ.", highlight=False)
                for word, names in (("only here", found.only_here), ("only there", found.only_there)):
                    if names:
                        stdout.print(f"{word}: {', '.join(names)}", highlight=False)
        if not found.as_expected:
            broken = [layer.name for layer in found.layers if layer.holds is False]
            fault = f"{len(broken)} layers break {found.expected}, {broken[0]} first" if broken else "no such layer was found"
            if not broken and not found.total_holds:
                fault = f"all layers together have fewer zeros than {found.expected}"
            stderr.print(Text(f"error: {fault}.", style="red"), soft_wrap=True)
            raise typer.Exit(1)


@app.command()
def methods(context: typer.Context, as_json: options.Json = False) -> None:
    """List the methods and solvers.

    Example: sparsellm methods
    """
    with _told(context):
        from sparsellm.display import table
        from sparsellm.recipe import METHODS

        if as_json:
            _print_json(METHODS)
        else:
            stdout.print(table(["method", "what it does"], [[name, text] for name, text in METHODS.items()], words=True))


@app.command()
def demo(
    context: typer.Context,
    output: options.DemoOutput = None,
    family: options.Family = "opt",
    as_json: options.Json = False,
) -> None:
    """Prune a bundled model by every method and compare: no network, no GPU, under two minutes.

    Example: sparsellm demo --output pruned-demo
    """
    with _told(context):
        from dataclasses import asdict

        from sparsellm.demonstration import SPARSITY, demonstrate
        from sparsellm.display import Progress, plus_minus, table
        from sparsellm.export import check_output

        if output is not None:
            check_output(output)
        with Progress(stderr) as progress:
            rows = demonstrate(family, output, progress)
        if as_json:
            _print_json(
                {"model": f"demo:{family}", "sparsity": SPARSITY, "rows": [asdict(row) for row in rows], "output": output}
            )
            return
        title = f"demo:{family}, {SPARSITY} removed, perplexity on text that it was not trained on"
        cells = [
            [x.method, plus_minus(x.perplexity, x.standard_error), f"{100 * x.sparsity:.1f} %", f"{x.seconds:.1f}"]
            for x in rows
        ]
        stdout.print(table(["method", "perplexity", "zeros", "seconds"], cells, title))
        if output is not None:
            stdout.print(f"Wrote SparseLLM's model to {output}, read back and verified.", highlight=False, soft_wrap=True)


def main() -> None:
    """Run the command line. Exit status: 0, 1 for an error told in one message, 2 for wrong usage, 130 when interrupted."""
    app()


@contextmanager
def _told(context: typer.Context) -> Iterator[None]:
    """Errors as one clean message and exit status 1; with --debug, as they are."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        stderr.print("; ".join(["interrupted", *getattr(interrupt, "__notes__", ["nothing was written"])]), highlight=False)
        sys.exit(130)
    except Exception as error:
        if context.obj or not (_out_of_memory(error) or isinstance(error, (SparseLLMError, OSError))):
            raise
        where = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
        stderr.print(Text(f"error: {_message(error)}{where}", style="red"), soft_wrap=True)
        sys.exit(1)


def _message(error: Exception) -> str:
    """An error in words."""
    if _out_of_memory(error):
        return "The device is out of memory. Pass a smaller --batch, fewer --samples, a shorter --length, or --device cpu."
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        kept = "" if getattr(error, "__notes__", ()) else " Nothing was kept of the output."
        return f"The disk is full{f' ({error.filename})' if error.filename else ''}.{kept}"
    if isinstance(error, OSError) and not isinstance(error, SparseLLMError) and error.strerror:
        return f"{error.strerror}: {error.filename}." if error.filename else f"{error.strerror}."
    return str(error)


def _out_of_memory(error: Exception) -> bool:
    """Whether torch says so; not loaded for this alone, since --help must not wait for it."""
    from sparsellm.memory import out_of_memory

    return isinstance(error, RuntimeError) and out_of_memory(error)


def _print_json(data: Any) -> None:
    """JSON on stdout, one document."""
    from sparsellm.report import strict_json

    print(strict_json(data))
