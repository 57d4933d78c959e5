"""`pack`, `unpack` and `export`: the commands that write packed models, turn them back, and write them for other software."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from sparsellm.cli import options
from sparsellm.cli.console import displayed, print_json, print_line, report_errors, stdout

if TYPE_CHECKING:
    from sparsellm.pipeline.packed_sizes import Packed

ToExport = Annotated[str, typer.Argument(metavar="MODEL", help="Folder of a pruned model, or its name on the hub.")]
ExportedOut = Annotated[str, typer.Argument(metavar="OUT", help="Folder to write; must not exist.")]
ExportValues = Annotated[
    str | None,
    typer.Option("--values", metavar="[int4|int8]", help="What to round a model to that was pruned without --values."),
]
OverwriteExported = Annotated[bool, typer.Option("--overwrite", help="Replace OUT if sparsellm wrote every file in it.")]


def pack(
    context: typer.Context,
    model: options.ToPack,
    packed: options.PackedOut,
    *,
    values: options.PackedValues = None,
    group_size: options.GroupSize = None,
    archive: options.Archive = False,
    allow_dense: options.AllowDense = False,
    positive_zeros: options.PositiveZeros = False,
    overwrite: options.OverwritePacked = False,
    quiet: options.QuietOption = False,
    as_json: options.JsonOption = False,
) -> None:
    """Write a pruned model without its zeros. Nothing is lost, unless --values rounds the weights.

    If it is interrupted, the same command continues it.

    Example: sparsellm pack opt-70 opt-70-packed
    """
    with report_errors(context):
        from sparsellm.pipeline.packing import pack as pack_model

        with displayed(f"packing {model}", context, quiet=quiet) as observe:
            result = pack_model(
                model,
                packed,
                values=values,
                group_size=group_size,
                archive=archive,
                overwrite=overwrite,
                allow_dense=allow_dense,
                positive_zeros=positive_zeros,
                observe=observe,
            )
        if as_json:
            print_json(result.to_dict() | {"output": packed})
        else:
            print_packed(stdout, result)


def print_packed(console: Console, result: Packed) -> None:
    """Print the sizes of a packed model, and what stays dense."""
    from sparsellm.runtime.memory import human_bytes

    print_text = partial(print_line, console)
    percent = 100 * result.packed_bytes / max(result.dense_bytes, 1)
    size = f"{human_bytes(result.packed_bytes)}, {percent:.0f} % of {human_bytes(result.dense_bytes)}"
    count = len(result.packed)
    matrices = "1 matrix takes" if count == 1 else f"{count:,} matrices take"
    print_text(f"{result.output}: {size}; {matrices} {result.bits:.2f} bits a weight ({result.description}).")
    if dense := [matrix.name for matrix in result.dense]:
        names = ", ".join(dense[:3]) + (f" and {len(dense) - 3} more" if len(dense) > 3 else "")
        stay = "1 matrix with few zeros stays" if len(dense) == 1 else f"{len(dense)} matrices with few zeros stay"
        print_text(f"{stay} dense: {names}.")
    if negative := sum(matrix.negative_zeros for matrix in result.packed):
        print_text(
            f"{negative:,} zeros are -0.0 and stored like other numbers; --positive-zeros stores them as 0.0, which takes less."
        )
    if result.skipped:
        print_text(f"Not copied: {', '.join(result.skipped)}.")
    compared = "read back. Its weights are rounded" if result.rounded else "read back and compared with the model bit by bit"
    print_text(f"Wrote {result.output}, {compared}.")


def unpack(
    context: typer.Context,
    packed: options.PackedIn,
    model: options.UnpackedOut,
    *,
    overwrite: options.OverwriteUnpacked = False,
    quiet: options.QuietOption = False,
    as_json: options.JsonOption = False,
) -> None:
    """Turn a packed model back into the one that was packed.

    Every tensor is as it was, bit by bit.

    Example: sparsellm unpack opt-70-packed opt-70-unpacked
    """
    with report_errors(context):
        from dataclasses import asdict

        from sparsellm.pipeline.packing import unpack as unpack_model
        from sparsellm.runtime.memory import human_bytes

        with displayed(f"unpacking {packed}", context, quiet=quiet) as observe:
            result = unpack_model(packed, model, overwrite=overwrite, observe=observe)
        if as_json:
            print_json(asdict(result))
        else:
            size = f"{human_bytes(result.dense_bytes)} from {human_bytes(result.packed_bytes)}"
            print_line(stdout, f"{model}: {size}. Every tensor has the checksum that it had when it was packed.")


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
        from sparsellm.pipeline.compressed_export import export as export_model
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
