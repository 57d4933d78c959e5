"""`evaluate`, `inspect` and `verify`: the commands that measure and check."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import typer

from sparsellm.cli import options
from sparsellm.cli.console import (
    displayed,
    in_process_group,
    print_error,
    print_json,
    print_line,
    report_errors,
    stdout,
)
from sparsellm.cli.run_options import observing
from sparsellm.errors import plural
from sparsellm.recipes.fields import EVALUATION


# Python alone has `offload`: options of the command line are frozen.
@options.recipe_options(*EVALUATION, without=("offload",), shown=("task",))
def evaluate(
    context: typer.Context,
    model: options.Model,
    *,
    text: options.TextOption = None,
    against: options.ComparedWith = None,
    quiet: options.QuietOption = False,
    as_json: options.JsonOption = False,
    **settings: Any,
) -> None:
    """Measure perplexity on texts and accuracy on tasks.

    Each figure comes with its standard error; with --against also the difference from another model, on the same sequences.

    Example: sparsellm evaluate opt-70 --against demo:opt --text demo
    """
    with in_process_group(context) as is_main:
        from sparsellm.cli.result_text import print_evaluation
        from sparsellm.pipeline.evaluate import evaluate_recipes
        from sparsellm.recipes.file import read_recipe

        with observing(context, quiet=quiet, displays=is_main) as observe:
            named = {**settings, "method": "magnitude", "evaluate": text or ()}
            recipes = [read_recipe({**named, "model": x}) for x in (model, against) if x is not None]
            result = evaluate_recipes([(recipe, None) for recipe in recipes], observe)
        if not is_main:
            return
        if as_json:
            data = asdict(result)
            if against:
                data |= {"differences": {name: asdict(x) if x else None for name, x in result.differences.items()}}
            print_json({"model": model} | data)
        else:
            print_evaluation(stdout, result, against)


@options.recipe_options("trust_remote_code")
def inspect(
    context: typer.Context,
    model: options.Model,
    *,
    against: options.Against = None,
    expect: options.Expect = None,
    as_json: options.JsonOption = False,
    trust_remote_code: bool = False,
) -> None:
    """Count the zeros in each layer, and check the sparsity pattern.

    Example: sparsellm inspect demo:opt
    """
    with report_errors(context):
        from sparsellm.cli.result_text import print_inspection
        from sparsellm.outputs.inspection import inspect as inspect_model

        with displayed(f"reading {model}", context):
            result = inspect_model(model, against, expect, trust_remote_code=trust_remote_code)
        if as_json:
            print_json(result.to_dict())
        else:
            print_inspection(stdout, result)
        if not result.as_expected:
            print_error(f"{result.failures()}.", context)
            raise typer.Exit(1)


@options.recipe_options("trust_remote_code")
def verify(
    context: typer.Context,
    output: options.Finished,
    *,
    against: options.Dense = None,
    as_json: options.JsonOption = False,
    trust_remote_code: bool = False,
) -> None:
    """Check that a pruned model is unchanged since `prune` wrote it.

    Compares files, tensors, and each layer's zeros and pattern.

    Example: sparsellm verify opt-70 --against demo:opt
    """
    with report_errors(context):
        from sparsellm.errors import VerificationFailed
        from sparsellm.outputs.verification import verify as verify_output

        try:
            with displayed(f"verifying {output}", context):
                result = verify_output(output, against, trust_remote_code=trust_remote_code)
        except VerificationFailed as error:
            if as_json:
                print_json({"output": output, "against": against, "holds": False, "differences": error.differences})
            raise
        if as_json:
            print_json(result.to_dict())
            return
        counts = [(result.files, "file"), (result.tensors, "tensor"), (result.layers, "pruned layer")]
        files, tensors, layers = (plural(count, noun) for count, noun in counts)
        changed = f"; the run also changed {plural(result.changed, 'tensor')}" if result.changed else ""
        dense = f"; {result.compared()}" if against else ""
        print_line(stdout, f"{output}: {files}, {tensors} and {layers} match its report{changed}{dense}.")
