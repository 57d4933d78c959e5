"""The Typer application. Results go to stdout, everything else to stderr; the commands import torch only when they run."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from typing import Annotated, NoReturn

import typer

from sparsellm.cli import options
from sparsellm.cli.console import print_note, report_errors
from sparsellm.cli.evaluate import evaluate, inspect, verify
from sparsellm.cli.info import info
from sparsellm.cli.prune import prune
from sparsellm.extension import PROBLEMS, named
from sparsellm.recipes.registry import brought_methods

app = typer.Typer(
    name="sparsellm",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def root(
    context: typer.Context,
    debug: options.Debug = False,
    version: options.Version = False,
) -> None:
    """Prune pre-trained language models, block by block, on a CPU or a GPU.

    Example: sparsellm info
    """
    context.obj = debug
    brought_methods()  # notes names that sparsellm has
    for line in PROBLEMS:
        print_note(line, context)


Words = Annotated[list[str] | None, typer.Argument()]


def refusing(error: Exception) -> Callable[..., None]:
    """A command for a name that two packages bring; it ends with the error that says so."""

    def refuse(context: typer.Context, words: Words = None) -> None:
        with report_errors(context):
            raise error

    return refuse


COMMANDS: tuple[Callable[..., None], ...] = (prune, evaluate, inspect, verify, info)

for command in COMMANDS:
    app.command(cls=options.Command)(command)
for name, brought in named("commands", taken={command.__name__ for command in COMMANDS}).items():
    if isinstance(brought, Exception):
        app.command(name, help=str(brought), context_settings={"ignore_unknown_options": True})(refusing(brought))
    else:
        app.command(name, cls=options.Command)(brought)


def main() -> None:
    """Run the command line. Exit status: 0, 1 for an error with a message, 2 for wrong usage, 130 when interrupted."""
    try:
        app()
    except SystemExit as error:
        collectives = sys.modules.get("sparsellm.runtime.collectives")  # not imported here, since it imports torch
        if collectives is not None and collectives.world() > 1:
            _exit_now(error.code)
        raise
    finally:
        gc.freeze()  # at exit Python would search the libraries' objects for garbage, a third of `plan`'s time


def _exit_now(status: str | int | None) -> NoReturn:
    """End a process of a distributed run without Python's cleanup, which torch's threads may abort if other processes are gone.

    `status` is the `code` of a `SystemExit`.
    """
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status if isinstance(status, int) else int(status is not None))
