"""The command line: thin skins over the library. Data go to stdout, all else to stderr; heavy imports wait in the commands."""

from __future__ import annotations

import typer

from sparsellm import __version__, options
from sparsellm.commands.comparing import report, sweep
from sparsellm.commands.looking import demo, evaluate, inspect, methods
from sparsellm.commands.pruning import plan, prune
from sparsellm.commands.pushing import push

app = typer.Typer(
    name="sparsellm",
    no_args_is_help=True,
    rich_markup_mode="rich",
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

    Example: sparsellm methods
    """
    context.obj = debug
    if version:
        print(__version__)
        raise typer.Exit


for command in (prune, plan, sweep, report, evaluate, inspect, push, methods, demo):
    app.command()(command)


def main() -> None:
    """Run the command line. Exit status: 0, 1 for an error told in one message, 2 for wrong usage, 130 when interrupted."""
    app()
