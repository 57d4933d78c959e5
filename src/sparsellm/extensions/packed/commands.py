"""`pack`, `unpack` and `serve`, and `--pack` of the command that prunes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from sparsellm.cli import options
from sparsellm.cli.console import displayed, print_json, print_line, report_errors, stderr, stdout
from sparsellm.cli.run_options import RunOptions
from sparsellm.extensions.integers.formats import BITS_OF

if TYPE_CHECKING:
    from sparsellm.extensions.packed.record import Packed

ToPack = Annotated[str, typer.Argument(metavar="MODEL", help="Folder of a pruned model, or its name on the hub.")]
PackedOut = Annotated[str, typer.Argument(metavar="PACKED", help="Folder to write; must not exist.")]
PackedIn = Annotated[str, typer.Argument(metavar="PACKED", help="Folder that `pack` wrote, or its name on the hub.")]
UnpackedOut = Annotated[str, typer.Argument(metavar="MODEL", help="Folder to write; must not exist.")]
Archive = Annotated[
    bool, typer.Option("--archive", help="Compress further, for storage: loading takes longer. Dense matrices are packed too.")
]
_VALUES = "Round the layers of the blocks to integers with scales, dense layers too."
_GROUP_SIZE = "With --values: columns that share a scale, a multiple of 64; 0: rows."
_GROUP_DEFAULT = "about 128 kept weights, rows for int8"
PackedValues = Annotated[str | None, typer.Option("--values", metavar="|".join(BITS_OF), help=_VALUES, show_default="none")]
GroupSize = Annotated[int | None, typer.Option("--group-size", metavar="N", help=_GROUP_SIZE, show_default=_GROUP_DEFAULT)]
_EMBEDDINGS = "Round the embeddings and the output head to integers with scales."
Embeddings = Annotated[
    str | None, typer.Option("--embeddings", metavar="|".join(BITS_OF), help=_EMBEDDINGS, show_default="none")
]
AllowDense = Annotated[bool, typer.Option("--allow-dense", help="Pack a model with less than 30 % zeros.")]
PositiveZeros = Annotated[
    bool, typer.Option("--positive-zeros", help="Store negative zeros, which some software leaves for removed weights, as 0.0.")
]
OverwritePacked = Annotated[bool, typer.Option("--overwrite", help="Replace PACKED if sparsellm wrote every file in it.")]
OverwriteUnpacked = Annotated[bool, typer.Option("--overwrite", help="Replace MODEL if sparsellm wrote every file in it.")]
ToServe = Annotated[str, typer.Argument(metavar="MODEL", help="Folder of a pruned or packed model, or its name on the hub.")]
_SERVE_OPTIONS = "After --: further options of `transformers serve`, as -- --device cuda:0."
ServeOptions = Annotated[list[str] | None, typer.Argument(metavar="-- OPTIONS", help=_SERVE_OPTIONS)]
Host = Annotated[str, typer.Option(metavar="ADDRESS", help="Address to listen at.")]
Port = Annotated[int, typer.Option(metavar="N", min=1, max=65535, help="Port to listen at.")]
AlsoPack = Annotated[bool, options.output_option("--pack", help="Also write OUT-packed, without the zeros; see pack.")]


@dataclass(frozen=True)
class Packing(RunOptions):
    """Packed copies of the outputs."""

    pack: AlsoPack = False

    def check(self, folders: Mapping[Path, Any], *, resume: bool, overwrite: bool) -> None:
        if self.pack:
            from sparsellm.extensions.packed.packing import packed_outputs

            packed_outputs(folders, resume=resume, overwrite=overwrite)

    def finish(
        self,
        context: typer.Context,
        folders: Mapping[Path, Any],
        *,
        resume: bool,
        overwrite: bool,
        quiet: bool,
        on_stderr: bool,
    ) -> None:
        if not self.pack:
            return
        from sparsellm.extensions.packed.packing import pack, packed_outputs

        for folder, target in packed_outputs(folders, resume=resume, overwrite=overwrite).items():
            with displayed(f"packing {folder}", context, quiet=quiet) as observe:
                result = pack(folder, target, overwrite=overwrite, observe=observe)
            print_packed(stderr if on_stderr else stdout, result)


def pack(
    context: typer.Context,
    model: ToPack,
    packed: PackedOut,
    *,
    values: PackedValues = None,
    group_size: GroupSize = None,
    embeddings: Embeddings = None,
    archive: Archive = False,
    allow_dense: AllowDense = False,
    positive_zeros: PositiveZeros = False,
    overwrite: OverwritePacked = False,
    quiet: options.QuietOption = False,
    as_json: options.JsonOption = False,
) -> None:
    """Write a pruned model without its zeros. Nothing is lost, unless --values or --embeddings rounds weights.

    If it is interrupted, the same command continues it.

    Example: sparsellm pack opt-70 opt-70-packed
    """
    with report_errors(context):
        from sparsellm.extensions.packed.packing import pack as pack_model

        with displayed(f"packing {model}", context, quiet=quiet) as observe:
            result = pack_model(
                model,
                packed,
                values=values,
                group_size=group_size,
                embeddings=embeddings,
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
    print_text = partial(print_line, console)
    count = len(result.packed)
    matrices = "1 matrix takes" if count == 1 else f"{count:,} matrices take"
    print_text(f"{result.output}: {result.size}; {matrices} {result.bits:.2f} bits a weight ({result.description}).")
    if dense := [matrix.name for matrix in result.dense]:
        names = ", ".join(dense[:3]) + (f" and {len(dense) - 3} more" if len(dense) > 3 else "")
        stay = "1 matrix with few zeros stays" if len(dense) == 1 else f"{len(dense)} matrices with few zeros stay"
        print_text(f"{stay} dense: {names}.")
    if negative := sum(matrix.negative_zeros for matrix in result.packed):
        print_text(
            f"{negative:,} zeros are negative and stored like other values; --positive-zeros makes them 0.0, which takes less."
        )
    if result.skipped:
        print_text(f"Not copied: {', '.join(result.skipped)}.")
    compared = "read back. Weights are rounded" if result.rounded else "read back and compared with the model bit by bit"
    print_text(f"Wrote {result.output}, {compared}.")


def unpack(
    context: typer.Context,
    packed: PackedIn,
    model: UnpackedOut,
    *,
    overwrite: OverwriteUnpacked = False,
    quiet: options.QuietOption = False,
    as_json: options.JsonOption = False,
) -> None:
    """Turn a packed model back into the one that was packed.

    Every tensor is as it was, bit by bit.

    Example: sparsellm unpack opt-70-packed opt-70-unpacked
    """
    with report_errors(context):
        from dataclasses import asdict

        from sparsellm.extensions.packed.packing import unpack as unpack_model
        from sparsellm.runtime.memory import human_bytes

        with displayed(f"unpacking {packed}", context, quiet=quiet) as observe:
            result = unpack_model(packed, model, overwrite=overwrite, observe=observe)
        if as_json:
            print_json(asdict(result))
        else:
            size = f"{human_bytes(result.dense_bytes)} from {human_bytes(result.packed_bytes)}"
            print_line(stdout, f"{model}: {size}. Every tensor has the checksum that it had when it was packed.")


def serve(
    context: typer.Context,
    model: ToServe,
    further: ServeOptions = None,
    *,
    host: Host = "localhost",
    port: Port = 8000,
) -> None:
    """Serve a pruned or packed model, by the server of transformers.

    It has the interface of OpenAI, and needs pip install "transformers[serving]".

    Example: sparsellm serve opt-70-packed --port 8001
    """
    with report_errors(context):
        from sparsellm.extensions.packed.serving import check_serving
        from sparsellm.extensions.packed.serving import serve as serve_model

        words = ["--host", host, "--port", str(port), *(further or ())]
        check_serving(model, trusted="--trust-remote-code" in words)
        print_line(stderr, f"Serving at http://{host}:{port}/v1 until it is interrupted. Requests name the model {model!r}.")
        serve_model(model, words)
