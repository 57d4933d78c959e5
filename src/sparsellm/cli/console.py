"""Consoles, error messages, tables and JSON output, shared by all commands."""

from __future__ import annotations

import errno
import gc
import os
import re
import shlex
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from sparsellm.checkpoints.remarks import remarks_to
from sparsellm.errors import MAX_MESSAGE, SparseLLMError, printable
from sparsellm.observers.wording import wording
from sparsellm.recipes.fields import RecipeFields
from sparsellm.texts.paths import check_machine

stderr = Console(stderr=True, emoji=False, markup=False)
stdout = Console(emoji=False, markup=False)

LESS_MEMORY = {"batch_size": "a smaller", "samples": "fewer", "sequence_length": "a shorter", "max_memory": "a smaller"}
"""The change of each option that takes less memory."""


@contextmanager
def report_errors(context: typer.Context) -> Iterator[None]:
    """Turn errors into one message and exit status 1, or raise them with --debug; print remarks on checkpoints once each."""
    try:
        words, show_note = partial(in_options, context=context), partial(print_note, context=context)
        with wording(words), remarks_to(lambda text, is_new: show_note(text) if is_new else None):
            check_machine()
            yield
            sys.stdout.flush()  # what cannot be printed is known here, not when Python ends
    except KeyboardInterrupt as interrupt:
        notes = getattr(interrupt, "__notes__", ["nothing was written"])
        print_line(stderr, in_options("; ".join(["interrupted", *(note.removesuffix(".") for note in notes)]), context))
        sys.exit(130)
    except Exception as error:
        if context.obj or not (_out_of_memory(error) or _failed_import(error) or isinstance(error, (SparseLLMError, OSError))):
            raise
        notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
        print_error(printable(f"{_error_text(error, context)}{notes}", 4 * MAX_MESSAGE), context)
        if isinstance(error, OSError) and _is_of_printing(error):
            with suppress(OSError):  # otherwise Python writes what is left in the stream when it ends, and ends with status 120
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


@contextmanager
def in_process_group(context: typer.Context) -> Iterator[bool]:
    """Join the process group of a launcher, if there is one, so that errors are printed once, by the main process.

    Yields:
        Whether this is the main process, which writes files and prints.
    """
    with report_errors(context):
        if int(os.environ.get("WORLD_SIZE", "1")) == 1 and "torch" not in sys.modules:
            yield True
            return
        from sparsellm.runtime import process_group

        with process_group.init_process_group(os.environ) as is_main:
            yield is_main


def in_options(text: str, context: typer.Context) -> str:
    """Write the settings that a message names as in Python, `samples` or `offload=False`, as options of the command.

    A name that the command has no option for, such as the field of a file that it reads, stays as it is; `sweep` sets a field
    with a value by --set. An alternative that needs an option which the command does not have is left out.
    """
    parameters: dict[str, Any] = {}
    for parameter in context.command.params:
        parameters |= {option.lstrip("-").replace("-", "_"): parameter for option in parameter.opts}
        parameters.setdefault(str(parameter.name), parameter)

    def written(match: re.Match[str]) -> str:
        parameter, value = parameters.get(match["name"]), match["value"]
        if parameter is None and value and "changes" in parameters and match["name"] in RecipeFields.model_fields:
            value = value.lower() if value in ("True", "False") else value.strip("'")
            return f"--set {shlex.quote('='.join((match['name'], value)))}"
        if parameter is None:
            return match[0]
        if parameter.param_type_name == "argument":
            return str(parameter.metavar)
        option: str = parameter.opts[-1]
        if value in (None, "True"):
            return option
        if value == "False":
            return next(iter(parameter.secondary_opts), match[0])
        value = shlex.quote(value.strip("'"))
        return f"{option} {value}"

    setting = r"`(?P<name>[a-z_][a-z0-9_]*)(=(?P<value>True|False|\d+|'[^'`\\]*'))?`"

    def possible(match: re.Match[str]) -> str:
        return match[0] if written(match) != match[0] or match["value"] is None else ""

    text = re.sub(rf",? or [^,.;`]*{setting}[^,.;`]*(?=[.;,])", possible, text)
    return re.sub(setting, written, text)


@contextmanager
def collection_paused() -> Iterator[None]:
    """Collect no garbage within the context, for commands that hold no weights.

    Libraries and parsed texts make millions of objects, most of which stay: searching them takes a quarter of `plan`'s time.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def print_line(console: Console, text: str) -> None:
    """Print a line without highlighting or wrapping, and without the control characters of a path, which a terminal obeys."""
    console.print(printable(text, len(text)), highlight=False, soft_wrap=True)


def print_error(text: str, context: typer.Context) -> None:
    """Print an error message in red, with settings as options of the command."""
    stderr.print(Text(f"error: {in_options(text, context)}", style="red"), soft_wrap=True)


def print_note(text: str, context: typer.Context) -> None:
    """Print a note as a run displays its own; of the processes of a launcher the first one prints."""
    if os.environ.get("RANK", "0") != "0":
        return
    stderr.print(Text(f"note: {in_options(printable(text, len(text)), context)}", style="yellow"), soft_wrap=True)


@contextmanager
def displayed(name: str, context: typer.Context, *, quiet: bool = False) -> Iterator[Callable[[str], None]]:
    """Display what a command does as a run displays its stages: in a live line on a terminal, in lines elsewhere.

    Args:
        name: What is done first.
        quiet: Display only notes.

    Yields:
        The function to call with what is done next.
    """
    from sparsellm.observers.display import Display
    from sparsellm.observers.events import Stage

    with Display("quiet" if quiet else "auto", partial(in_options, context=context)) as display:
        display(Stage(name))
        yield lambda text: display(Stage(text))


def text_table(columns: list[str], rows: list[list[str]], title: str | None = None, *, words: bool = False) -> Table:
    """Make a table without borders.

    Args:
        columns: Headings. The first column is aligned left, the others right and without wrapping.
        rows: The cells, row by row.
        words: All columns hold text: align them left, and allow wrapping.
    """
    result = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        numeric = number > 0 and not words
        # A name stays whole; the terminal itself breaks a line that is too long.
        result.add_column(column, justify="right" if numeric else "left", overflow="fold", no_wrap=numeric or number == 0)
    for row in rows:
        result.add_row(*(printable(cell, len(cell)) for cell in row))
    return result


def show(console: Console, made: Table) -> None:
    """Print a table at its full width, since a narrow console would drop its first column or truncate its numbers."""
    width = console.width
    console.width = max(width, Measurement.get(console, console.options.update(width=1000), made).maximum)
    console.print(made)
    console.width = width


def _error_text(error: Exception, context: typer.Context) -> str:
    """The message of an error."""
    if _out_of_memory(error):
        own = {parameter.name for parameter in context.command.params}
        advice = [f"{how} `{name}`" for name, how in LESS_MEMORY.items() if name in own]
        pass_less = f"Pass {' or '.join(advice)}, or use" if advice else "Use"
        return f"The device is out of memory. {pass_less} a device with more."
    if failed := _failed_import(error):
        return failed
    if isinstance(error, OSError) and _is_of_printing(error):
        return f"The result cannot be printed: {error.strerror}. What the command wrote to files is complete."
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return f"The disk is full{f' ({error.filename})' if error.filename else ''}."
    if isinstance(error, OSError) and not isinstance(error, SparseLLMError) and error.strerror:
        return f"{error.strerror}: {error.filename}." if error.filename else f"{error.strerror}."
    return str(error)


def _failed_import(error: Exception) -> str | None:
    """The message about a package that is missing, or that cannot be imported, such as torch without its libraries."""
    if isinstance(error, SparseLLMError) or not isinstance(error, (ImportError, OSError)):
        return None
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name == "<module>"]
    packages = [str(frame.f_globals["__name__"]).partition(".")[0] for frame in frames]
    package = next((name for name in packages if name not in ("__main__", "sparsellm")), None)
    if package is not None:
        return f"{package} cannot be imported: {error}. Install what is missing, or {package} again."
    if isinstance(error, ModuleNotFoundError) and error.name and not error.name.startswith("sparsellm"):
        missing = error.name.partition(".")[0]
        return f"{missing} is not installed. Install sparsellm again, which brings it: pip install sparsellm"
    return None


def _is_of_printing(error: OSError) -> bool:
    """Whether an error of the system came from printing, as where standard output is a file on a full disk."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return error.filename is None and frame.f_globals["__name__"].startswith(("rich.", "sparsellm.cli."))


def _out_of_memory(error: Exception) -> bool:
    """Whether an error means that a device is out of memory, without importing torch for one that cannot be torch's."""
    if isinstance(error, SparseLLMError) or not (isinstance(error, MemoryError) or "torch" in sys.modules):
        return False
    from sparsellm.runtime import devices

    return devices.is_out_of_memory(error)


def print_json(data: Any) -> None:
    """Print one JSON document to stdout."""
    from sparsellm.texts.json_files import strict_json

    print(strict_json(data))


def read_counts(option: str, text: str | None) -> tuple[int, ...] | None:
    """Read an option's numbers, which are separated by commas."""
    try:
        return None if text is None else tuple(int(word) for word in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{option} takes numbers separated by commas, as 1,4; got {text!r}") from None
