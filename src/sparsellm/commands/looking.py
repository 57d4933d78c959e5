"""`evaluate`, `inspect`, `verify`, `methods` and `demo`: the commands that look and compare."""

from __future__ import annotations

import os

import typer
from rich.text import Text

from sparsellm import options
from sparsellm.commands import ended, print_json, silent, stderr, stdout, told


def evaluate(
    context: typer.Context,
    model: options.Model,
    text: options.Text = None,
    task: options.Task = None,
    task_data: options.TaskData = None,
    task_limit: options.TaskLimit = None,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = None,
    text_field: options.TextField = None,
    length: options.Length = None,
    evaluate_limit: options.EvaluateLimit = None,
    memory: options.Memory = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    as_json: options.Json = False,
) -> None:
    """Measure a model: its perplexity on texts, its accuracy on zero-shot tasks, with standard errors.

    Example: sparsellm evaluate demo:opt --text demo
    """
    with told(context):
        from sparsellm import watch
        from sparsellm.display import percent, plus_minus, show, table
        from sparsellm.measuring import measure
        from sparsellm.zeroshot import mean

        if not text and not task:
            raise typer.BadParameter("name what to measure on: --text or --task")
        with watch.joined(os.environ, ended) as leads, (stderr if leads else silent).status(f"measuring {model}"):
            on = (text or [], text_field, length, evaluate_limit, task or [], task_data, task_limit)
            at = (device or "auto", dtype or "auto", memory)
            found, answered = measure(model, *on, *at, revision=revision, trusted=bool(trust_remote_code))
        if not leads:
            return
        if as_json:
            print_json({"model": model, "perplexity": found, "accuracy": answered})
            return
        rows = [
            [name, plus_minus(x["value"], x["standard_error"]), f"{x['windows']} x {x['length']}", f"{x['seconds']:.1f}"]
            for name, x in found.items()
        ]
        if rows:
            show(stdout, table(["text", "perplexity", "windows", "seconds"], rows))
        if answered:
            lines = [[name, percent(x["value"], x["standard_error"]), f"{x['questions']}"] for name, x in answered.items()]
            show(stdout, table(["task", "accuracy, %", "questions"], [*lines, ["mean", percent(*mean(answered)), ""]]))


def inspect(
    context: typer.Context,
    model: options.Model,
    against: options.Against = None,
    expect: options.Expect = None,
    trust_remote_code: options.TrustRemoteCode = None,
    architecture: options.Architecture = None,
    as_json: options.Json = False,
) -> None:
    """Count the zeros of a checkpoint, layer by layer, and check a pattern over every group.

    Example: sparsellm inspect demo:opt
    """
    with told(context):
        from sparsellm.display import print_inspection
        from sparsellm.inspection import inspect as look

        found = look(model, against, expect, bool(trust_remote_code), architecture)
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


def verify(
    context: typer.Context,
    output: options.Finished,
    against: options.Dense = None,
    trust_remote_code: options.TrustRemoteCode = None,
    architecture: options.Architecture = None,
    as_json: options.Json = False,
) -> None:
    """Check that a pruned model is as `prune` wrote it: every file, every tensor, every layer's zeros and pattern.

    Example: sparsellm verify opt-70 --against demo:opt
    """
    with told(context):
        from sparsellm.errors import VerificationFailed
        from sparsellm.verification import verify as check

        try:
            with stderr.status(f"verifying {output}"):
                done = check(output, against, bool(trust_remote_code), architecture)
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
    with told(context):
        from sparsellm.choices import METHODS
        from sparsellm.display import table

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
    """Prune a bundled model by every method and compare: no network, no GPU, under two minutes.

    Example: sparsellm demo --output pruned-demo
    """
    with told(context):
        from dataclasses import asdict

        from sparsellm.demonstration import SPARSITY, demonstrate
        from sparsellm.display import Progress, plus_minus, show, table
        from sparsellm.export import check_output

        if output is not None:
            check_output(output)
        with Progress(stderr) as progress:
            rows = demonstrate(family, output, progress)
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
