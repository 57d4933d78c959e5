"""`check`: the command that checks a solver, method or pattern promise by promise."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from sparsellm.cli.console import print_line, report_errors, stderr, stdout
from sparsellm.cli.options import import_from_current_folder
from sparsellm.errors import InvalidSetting, first_line, plural
from sparsellm.extension import imported, is_place

Named = Annotated[
    str,
    typer.Argument(metavar="NAME", help="A method, a sparsity as 2:4, or module:object of a class or an object of your own."),
]


def check(context: typer.Context, name: Named) -> None:
    """Check a solver, method or pattern against its contract.

    Prints a line for each check, and exits with status 1 if one fails.

    Example: sparsellm check wanda
    """
    with report_errors(context):
        subject = _imported(name) if is_place(name) else _named(name)

        from unittest import SkipTest

        from sparsellm.testing import FailedCheck, checks_of

        failed, checks = 0, checks_of(subject)
        for one in checks:
            try:
                with stderr.status(one.name):
                    one(subject)
                line = f"passed  {one.name}: {one.promise}"
            except SkipTest as reason:
                line = f"left out  {one.name}: {reason}"
            except FailedCheck as failure:
                line, failed = f"FAILED  {failure}", failed + 1
            print_line(stdout, line)
        print_line(stdout, f"{plural(len(checks), 'promise')} of {name}, {failed or 'none'} broken")
        if failed:
            sys.exit(1)


def _named(name: str) -> Any:
    """The solver or method of a name, with its default settings, or the pattern of a text."""
    from sparsellm.methods.layerwise import LayerWise
    from sparsellm.recipes.registry import build, method_names
    from sparsellm.solvers.patterns import parse_pattern

    if name not in method_names():
        try:
            return parse_pattern(name)
        except InvalidSetting:
            pass  # the message for a name says more
    method = build(name, {})
    return method.solver if type(method) is LayerWise else method


def _imported(place: str) -> Any:
    """An object at a place "module:name", also in the current folder; of a class, one with its default settings."""
    import_from_current_folder()
    try:
        found = imported(place)
        return found() if isinstance(found, type) else found
    except Exception as error:  # code of others
        raise InvalidSetting(f"{place} cannot be used ({type(error).__name__}: {first_line(error)}).") from error
