"""`export`: the command that writes a pruned model as integers for other software."""

from __future__ import annotations

from typing import Annotated

import typer

from sparsellm.cli import options
from sparsellm.cli.console import displayed, print_json, print_line, report_errors, stdout

ToExport = Annotated[str, typer.Argument(metavar="MODEL", help="Folder of a pruned model, or its name on the hub.")]
ExportedOut = Annotated[str, typer.Argument(metavar="OUT", help="Folder to write; must not exist.")]
ExportValues = Annotated[
    str | None,
    typer.Option("--values", metavar="[int4|int8]", help="Integers to round to, for a model that was pruned without --values."),
]
OverwriteExported = Annotated[bool, typer.Option("--overwrite", help="Replace OUT if sparsellm wrote every file in it.")]


def export(
    context: typer.Context,
    model: ToExport,
    output: ExportedOut,
    *,
    values: ExportValues = None,
    overwrite: OverwriteExported = False,
    quiet: options.QuietOption = False,
    as_json: options.JsonOption = False,
) -> None:
    """Write a pruned model as integers for vLLM and transformers.

    The format is that of compressed-tensors, with int4 or int8 weights. Zeros stay zero, but save no bytes.

    Example: sparsellm export opt-70 opt-70-int4 --values int4
    """
    with report_errors(context):
        from sparsellm.extensions.integers.compressed_export import export as export_model
        from sparsellm.runtime.memory import human_bytes

        with displayed(f"exporting {model}", context, quiet=quiet) as observe:
            result = export_model(model, output, values=values, overwrite=overwrite, observe=observe)
        if as_json:
            print_json(result.to_dict())
        else:
            size = f"{human_bytes(result.exported_bytes)} from {human_bytes(result.dense_bytes)}"
            forms = " and ".join(str(scheme) for scheme in result.schemes)
            print_line(stdout, f"{output}: {size}; {result.layers:,} layers have {forms}.")
            print_line(stdout, f"{result.zeros:,} of their weights are zero, which saves no bytes in this format.")
