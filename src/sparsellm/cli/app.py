"""The command line: thin skins over the library. Data go to stdout, all else to stderr; heavy imports wait in the commands."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

import typer

from sparsellm.cli import options
from sparsellm.cli.evaluate import demo, evaluate, inspect, methods, verify
from sparsellm.cli.prune import plan, prune, recover
from sparsellm.cli.push import push
from sparsellm.cli.sweep import report, sweep

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


for command in (prune, recover, plan, sweep, report, evaluate, inspect, verify, push, methods, demo):
    app.command()(command)


def main() -> None:
    """Run the command line. Exit status: 0, 1 for an error told in one message, 2 for wrong usage, 130 when interrupted."""
    try:
        app()
    except SystemExit as end:
        together = sys.modules.get("sparsellm.runtime.collectives")  # imported with torch, which most commands do without
        if together is not None and together.world() > 1:
            _leave(end.code)
        raise


def _leave(status: str | int | None) -> NoReturn:
    """End this process at once, where an error left it among others: torch's threads, whose peers are gone, may abort what
    Python does at its end. status: as `SystemExit` has it."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status if isinstance(status, int) else int(status is not None))
