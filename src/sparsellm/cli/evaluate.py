"""`evaluate`, `inspect`, `verify`, `methods` and `demo`: the commands that look and compare."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

import typer
from rich.text import Text

from sparsellm.cli import options
from sparsellm.cli.console import message_of_lost_process, print_json, report_errors, silent, stderr, stdout

_EVALUATION = (
    "task",
    "task_data",
    "task_limit",
    "text_field",
    "sequence_length",
    "evaluate_limit",
    "max_memory",
    "device",
    "dtype",
)


@options.recipe_options("revision", "trust_remote_code", *_EVALUATION)
def evaluate(
    context: typer.Context,
    model: options.Model,
    *,
    text: options.Text = None,
    as_json: options.Json = False,
    **settings: Any,
) -> None:
    """Measure a model's perplexity on texts and its accuracy on zero-shot tasks, with standard errors.

    Example: sparsellm evaluate demo:opt --text demo
    """
    with report_errors(context):
        from sparsellm.cli.allocator import keep_pages
        from sparsellm.cli.display import percent, plus_minus, show, table
        from sparsellm.evaluation.zeroshot import mean
        from sparsellm.runs.measuring import measure
        from sparsellm.runtime import watchdog

        if not text and "task" not in settings:
            raise typer.BadParameter("name what to measure on: --text or --task")
        with (
            watchdog.init_process_group(os.environ, message_of_lost_process) as is_main,
            (stderr if is_main else silent).status(f"measuring {model}"),
        ):
            keep_pages()
            found, answered = measure(model, evaluate=tuple(text or ()), **settings)
        if not is_main:
            return
        if as_json:
            figures = {name: asdict(x) for name, x in found.items()}, {task: asdict(x) for task, x in answered.items()}
            print_json({"model": model, "perplexity": figures[0], "accuracy": figures[1]})
            return
        rows = [
            [name, plus_minus(x.value, x.standard_error), f"{x.windows} x {x.length}", f"{x.seconds:.1f}"]
            for name, x in found.items()
        ]
        if rows:
            show(stdout, table(["text", "perplexity", "windows", "seconds"], rows))
        if answered:
            lines = [[name, percent(x.value, x.standard_error), f"{x.questions}"] for name, x in answered.items()]
            average = mean([(x.value, x.standard_error) for x in answered.values()])
            show(stdout, table(["task", "accuracy, %", "questions"], [*lines, ["mean", percent(*average), ""]]))


@options.recipe_options("trust_remote_code", "architecture")
def inspect(
    context: typer.Context,
    model: options.Model,
    *,
    against: options.Against = None,
    expect: options.Expect = None,
    as_json: options.Json = False,
    trust_remote_code: bool = False,
    architecture: str | None = None,
) -> None:
    """Count the zeros in each layer of a checkpoint, and check its sparsity pattern.

    Example: sparsellm inspect demo:opt
    """
    with report_errors(context):
        from sparsellm.cli.display import print_inspection
        from sparsellm.runs.inspection import inspect as look

        found = look(model, against, expect, trust_remote_code, architecture)
        if as_json:
            print_json(found.to_dict())
        else:
            print_inspection(stdout, found)
        if not found.as_expected:
            broken = [layer.name for layer in found.layers if layer.holds is False]
            fault = f"{len(broken)} layers break {found.expected}, {broken[0]} first" if broken else "no such layer was found"
            if found.missing:
                fault = f"{len(found.missing)} layers are not there, {found.missing[0]} first"
            elif not broken and not found.total_holds:
                fault = f"all layers together have fewer zeros than {found.expected}"
            stderr.print(Text(f"error: {fault}.", style="red"), soft_wrap=True)
            raise typer.Exit(1)


@options.recipe_options("trust_remote_code", "architecture")
def verify(
    context: typer.Context,
    output: options.Finished,
    *,
    against: options.Dense = None,
    as_json: options.Json = False,
    trust_remote_code: bool = False,
    architecture: str | None = None,
) -> None:
    """Check that a pruned model is unchanged since `prune` wrote it: files, tensors, and each layer's zeros and pattern.

    Example: sparsellm verify opt-70 --against demo:opt
    """
    with report_errors(context):
        from sparsellm.errors import VerificationFailed
        from sparsellm.runs.verification import verify as check

        try:
            with stderr.status(f"verifying {output}"):
                done = check(output, against, trust_remote_code, architecture)
        except VerificationFailed as error:
            if as_json:
                print_json({"output": output, "against": against, "holds": False, "differences": error.differences})
            raise
        if as_json:
            print_json(done.to_dict())
            return
        what = f"{done.files} files, {done.tensors} tensors and {done.layers} pruned layers"
        dense = f"; all else equals {against}" if against else ""
        stdout.print(f"{output}: {what} are as its report says{dense}.", highlight=False, soft_wrap=True)


def methods(context: typer.Context, as_json: options.Json = False) -> None:
    """List the methods and solvers.

    Example: sparsellm methods
    """
    with report_errors(context):
        from sparsellm.cli.display import table
        from sparsellm.runs.registry import METHODS

        if as_json:
            print_json(METHODS)
        else:
            stdout.print(table(["method", "what it does"], [[name, text] for name, text in METHODS.items()], words=True))


def demo(
    context: typer.Context,
    output: options.DemoOutput = None,
    family: options.Family = "opt",
    as_json: options.Json = False,
) -> None:
    """Prune a bundled model with every method and compare, in under two minutes without network or GPU.

    Example: sparsellm demo --output pruned-demo
    """
    with report_errors(context):
        from dataclasses import asdict

        from sparsellm.cli.allocator import manage_memory
        from sparsellm.cli.display import Progress, plus_minus, show, table
        from sparsellm.runs.demonstration import SPARSITY, demonstrate
        from sparsellm.runs.events import combine_observers
        from sparsellm.runs.export import check_output

        if output is not None:
            check_output(output)
        with Progress(stderr) as progress:
            rows = demonstrate(family, output, combine_observers(manage_memory, progress))
        if as_json:
            print_json(
                {"model": f"demo:{family}", "sparsity": SPARSITY, "rows": [asdict(row) for row in rows], "output": output}
            )
            return
        title = f"demo:{family}, {SPARSITY} removed, perplexity on text that it was not trained on"
        cells = [
            [x.method, plus_minus(x.perplexity, x.standard_error), f"{100 * x.sparsity:.1f} %", f"{x.seconds:.1f}"]
            for x in rows
        ]
        show(stdout, table(["method", "perplexity", "zeros", "seconds"], cells, title))
        if output is not None:
            stdout.print(f"Wrote SparseLLM's model to {output}, read back and verified.", highlight=False, soft_wrap=True)
