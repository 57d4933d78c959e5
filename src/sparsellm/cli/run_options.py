"""Options that extensions bring to the commands that run recipes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

import typer

from sparsellm.errors import InvalidSetting, first_line
from sparsellm.extension import PROBLEMS, installed

if TYPE_CHECKING:
    from sparsellm.observers.events import Observer


@dataclass(frozen=True)
class RunOptions:
    """Base class of options that take part in runs. A subclass is a frozen dataclass, of which each field is an option.

    The annotation of a field is typer's, as `Annotated[bool, typer.Option("--pack", help="...")]`; each field has a default.
    """

    def check(self, folders: Mapping[Path, Any], *, resume: bool, overwrite: bool) -> None:
        """Check before the runs what `finish` will do.

        Args:
            folders: The recipe of each output, by its folder.
            resume: Whether a finished output is kept.
            overwrite: Whether an output is replaced.
        """

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
        """Do what follows the runs, and print it.

        Args:
            context: The command's, for what is displayed.
            folders: As for `check`, as are the next two.
            resume: See there.
            overwrite: See there.
            quiet: Whether to display no progress.
            on_stderr: Whether stdout holds JSON.
        """

    @contextmanager
    def observing(self, display: Observer) -> Iterator[Observer | None]:
        """Context of the runs of a command, in its main process.

        Args:
            display: Displays the notes that it receives.

        Yields:
            An observer of the runs, or None.
        """
        yield None


Extras = tuple[RunOptions, ...]
"""The options of extensions that a command was given, by extension."""


@contextmanager
def observing(context: typer.Context, extras: Extras = (), *, quiet: bool = False, displays: bool = True) -> Iterator[Observer]:
    """Context of the runs of a command.

    Yields:
        Their observer: the memory of the process, the display, and the observers of `extras`.
    """
    from sparsellm.cli.allocator import manage_memory
    from sparsellm.cli.console import in_options
    from sparsellm.observers.display import Display
    from sparsellm.observers.events import combine_observers

    mode: Literal["auto", "quiet", "off"] = "off" if not displays else "quiet" if quiet else "auto"
    with Display(mode, partial(in_options, context=context)) as display, ExitStack() as stack:
        brought = [stack.enter_context(options.observing(display)) for options in extras]
        yield combine_observers(manage_memory, display, *brought)


def extended(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add the options of extensions to the command of this name, which receives them as `extras`."""

    def extend(command: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(command, eval_str=True)
        own = [parameter for key, parameter in signature.parameters.items() if key != "extras"]
        groups = dict(_groups(name, {parameter.name for parameter in own}))

        @wraps(command)
        def with_extras(*arguments: Any, **values: Any) -> None:
            given = (kind(**{key: values.pop(key) for key in keys}) for kind, keys in groups.items())
            command(*arguments, extras=tuple(given), **values)

        added = [parameter for options in groups.values() for parameter in options.values()]
        last = [parameter for parameter in own if parameter.kind is inspect.Parameter.VAR_KEYWORD]
        parameters = [*(parameter for parameter in own if parameter not in last), *added, *last]
        with_extras.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        with_extras.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return with_extras

    return extend


def _groups(command: str, taken: set[str]) -> Iterator[tuple[type[RunOptions], dict[str, inspect.Parameter]]]:
    """The classes of options that extensions bring to a command, each with its options as parameters, by name."""
    for extension in installed():
        for value in extension.extension.options.get(command, ()):
            try:
                kind = extension.load(value)
                types, defaults = get_type_hints(kind, include_extras=True), vars(kind())
                if both := taken & defaults.keys():
                    raise InvalidSetting(f"{min(both)!r} is an option already")
            except Exception as error:  # code of others
                PROBLEMS.append(f"the options {value} of the package {extension.package} are left out: {first_line(error)}")
                continue
            keyword = inspect.Parameter.KEYWORD_ONLY
            taken |= defaults.keys()
            yield kind, {key: inspect.Parameter(key, keyword, default=x, annotation=types[key]) for key, x in defaults.items()}
