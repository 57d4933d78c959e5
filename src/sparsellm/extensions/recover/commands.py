"""`recover`: the command that trains the weights of a pruned model."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from sparsellm.cli import options
from sparsellm.cli.console import in_process_group
from sparsellm.cli.prune import write_outputs
from sparsellm.cli.run_options import Extras, extended
from sparsellm.extensions.recover.recipe_fields import RecoveryFields

Pruned = Annotated[str, typer.Argument(metavar="PRUNED", help=RecoveryFields.model_fields["pruned"].description)]
Recovered = Annotated[str, typer.Argument(metavar="OUT", help="Folder to write; must not exist.")]
PrunedFrom = Annotated[str, typer.Option("--against", metavar="DENSE", help="Dense model that PRUNED was made from.")]


@options.recipe_options(fields=RecoveryFields, without=("model", "pruned", "dtype"))
@extended("recover")
def recover(
    context: typer.Context,
    pruned: Pruned,
    output: Recovered,
    *,
    model: PrunedFrom,
    resume: options.Resume = False,
    restart: options.Restart = False,
    overwrite: options.Overwrite = False,
    quiet: options.QuietOption = False,
    as_json: options.JsonOption = False,
    extras: Extras,
    **settings: Any,
) -> None:
    """Train the weights of a pruned checkpoint, keeping its zeros.

    Writes the recovered checkpoint.

    Example: sparsellm recover opt-70 opt-70-recovered --against demo:opt --calibration demo --samples 16
    """
    with in_process_group(context) as is_main:
        from sparsellm.extensions.recover.block_recovery import read_recovery
        from sparsellm.extensions.recover.run import recover_run

        recipe = read_recovery({"model": model, "pruned": pruned, **settings})
        write_outputs(
            context,
            [recipe],
            output,
            is_main,
            resume=resume,
            restart=restart,
            overwrite=overwrite,
            extras=extras,
            quiet=quiet,
            as_json=as_json,
            function=recover_run,
        )
