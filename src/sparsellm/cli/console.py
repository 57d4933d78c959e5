"""The commands, a file for each family. Here is what they share: the two consoles, errors told in one message, JSON."""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from sparsellm.errors import MAX_MESSAGE, SparseLLMError, printable

stderr = Console(stderr=True, emoji=False, markup=False)
stdout = Console(emoji=False, markup=False)
silent = Console(quiet=True)
"""For processes that work with others and leave it to one of them to speak."""


@contextmanager
def report_errors(context: typer.Context) -> Iterator[None]:
    """Errors as one clean message and exit status 1; with --debug, as they are."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        stderr.print("; ".join(["interrupted", *getattr(interrupt, "__notes__", ["nothing was written"])]), highlight=False)
        sys.exit(130)
    except Exception as error:
        if context.obj or not (_out_of_memory(error) or isinstance(error, (SparseLLMError, OSError))):
            raise
        where = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
        stderr.print(Text(printable(f"error: {_message(error)}{where}", 4 * MAX_MESSAGE), style="red"), soft_wrap=True)
        sys.exit(1)


def message_of_lost_process(why: str) -> None:
    """Say why a process is being ended that cannot do it by itself."""
    stderr.print(Text(f"error: {why}", style="red"), soft_wrap=True)


def _message(error: Exception) -> str:
    """An error in words."""
    if _out_of_memory(error):
        return (
            "The device is out of memory. Pass a smaller --batch-size, fewer --samples, a shorter --sequence-length, "
            "or --device cpu."
        )
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"The disk is full{f' ({error.filename})' if error.filename else ''}."
    if isinstance(error, OSError) and not isinstance(error, SparseLLMError) and error.strerror:
        return f"{error.strerror}: {error.filename}." if error.filename else f"{error.strerror}."
    return str(error)


def _out_of_memory(error: Exception) -> bool:
    """Whether torch says so; not loaded for this alone, since --help must not wait for it."""
    from sparsellm.runtime.memory import is_out_of_memory

    return isinstance(error, RuntimeError) and is_out_of_memory(error)


def print_json(data: Any) -> None:
    """JSON on stdout, one document."""
    from sparsellm.runs.report import strict_json

    print(strict_json(data))
