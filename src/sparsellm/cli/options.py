"""Arguments and options of the command line. Options for fields of the recipe are generated from its declaration."""

from __future__ import annotations

import difflib
import functools
import inspect
import os
import re
import sys
import types
from collections.abc import Callable
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

import typer
import typer.core
from pydantic.fields import FieldInfo

from sparsellm import __version__
from sparsellm.cli.console import print_note, report_errors
from sparsellm.extension import PROBLEMS
from sparsellm.recipes.fields import HELP_PANELS, RecipeFields, RunFields
from sparsellm.recipes.plugins import load_plugins
from sparsellm.texts.paths import TEXT_FILES, TEXT_NAMES

_POSITIONAL, _KEYWORD = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY

LONGEST_METAVAR = 60
"""Characters of the values of an option in its help; where they take more, its text says who lists them."""

_METAVARS: dict[Any, str] = {str: "TEXT", list[str]: "TEXT", int: "N", float: "X"}
"""Placeholder of an option's value in the help, by type; a flag has none."""


class Command(typer.core.TyperCommand):
    """A command whose help lists its options by panel, without the hidden ones unless `--help-all` is given."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, then the options of each panel. typer supports panels only with rich."""
        panels: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Target": [], "Options": []}
        for parameter in self.get_params(ctx):
            panel = getattr(parameter, "rich_help_panel", None)
            panel = panel or ("Arguments" if parameter.param_type_name == "argument" else "Options")
            if record := parameter.get_help_record(ctx):
                name, text = record
                panels.setdefault(panel, []).append((name, re.sub(r"  \[default: \((.*)\)\]$", r" [default: \1]", text)))
        for panel, records in panels.items():
            if records:
                with formatter.section(panel):
                    formatter.write_dl(records, col_max=24)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the command line; an unknown option's error suggests similar names."""
        try:
            return super().parse_args(ctx, args)
        except Exception as error:  # click's NoSuchOption, which typer does not export
            unknown: Any = error
            if possible := getattr(unknown, "possibilities", None):
                # click compared the names with their dashes, which makes short ones look alike.
                close = difflib.get_close_matches(unknown.option_name.strip("-"), [name.strip("-") for name in possible])
                unknown.possibilities = [f"--{name}" for name in close]
            raise

    def shell_complete(self, ctx: Any, incomplete: str) -> Any:
        """Complete the names of all options."""
        self.unhide()
        return super().shell_complete(ctx, incomplete)

    def unhide(self) -> None:
        """Let the help list every option."""
        for parameter in cast("list[Any]", self.params):
            parameter.hidden = False


def recipe_options(
    *names: str,
    fields: type[RunFields] = RecipeFields,
    without: tuple[str, ...] = ("model",),
    others: type[RunFields] | None = None,
    shown: tuple[str, ...] = (),
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add options for fields of the recipe to a command.

    The command receives the fields that the user sets as keyword arguments. Its positional parameters are its arguments; its
    other keyword-only parameters are further options, which help lists after the generated ones.

    Args:
        *names: The fields. Default: all fields except `without`.
        without: Fields that are arguments of the command, or that the command line does not set.
        others: Another class, whose own fields get options that only `--help-all` lists.
        shown: Fields that `--help` lists too, where it does not for other commands.
    """
    declared = {**(others.model_fields if others else {}), **fields.model_fields}
    chosen = [name for name in names or declared if name not in without]
    # In the order of the panels; within one, the fields that `prune` and `recover` do not share come first.
    chosen.sort(key=lambda name: (HELP_PANELS.index(_extra(declared[name])["panel"]), name in RunFields.model_fields))
    selected = {name: declared[name] for name in chosen}
    listed = [name for name in chosen if name in shown or (name in fields.model_fields and _extra(declared[name])["essential"])]

    def add_options(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def with_settings(help_all: bool, **values: Any) -> None:
            # An option that is not given is None, so that it does not override a recipe file.
            given = {name: value for name, value in values.items() if name not in selected or value not in (None, [])}
            command(**(with_plugins(given) if "plugin" in selected else given))

        signature = inspect.signature(command, eval_str=True)
        own = [parameter for name, parameter in signature.parameters.items() if name not in selected]
        parameters = [
            *(parameter for parameter in own if parameter.kind is _POSITIONAL),
            *(_option(name, field, hidden=name not in listed) for name, field in selected.items()),
            *(parameter for parameter in own if parameter.kind is _KEYWORD),
            inspect.Parameter("help_all", _KEYWORD, default=False, annotation=HelpAll),
        ]
        with_settings.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        with_settings.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return with_settings

    return add_options


def with_plugins(values: dict[str, Any]) -> dict[str, Any]:
    """The values of a command's options, once their plugins are loaded. What is wrong with a part of one is a note."""
    context, before = values["context"], len(PROBLEMS)
    with report_errors(context):
        values = load_plugins(values, find=import_from_current_folder)
    for line in PROBLEMS[before:]:
        print_note(line, context)
    return values


def import_from_current_folder() -> None:
    """Let imports find the modules of the current folder, as `python -m` does, but last: no file hides a library.

    Only for a module that the user names: a folder of others may hold files that are called like libraries that are missing.
    """
    if (folder := os.getcwd()) not in sys.path:
        sys.path.append(folder)


def _extra(field: FieldInfo) -> dict[str, Any]:
    """The entries of a field's declaration on its option."""
    return cast("dict[str, Any]", field.json_schema_extra)


def _option(name: str, field: FieldInfo, hidden: bool) -> inspect.Parameter:
    """The parameter of a command that sets a field."""
    kind, values = _option_type(field.annotation)
    extra = _extra(field)
    no_default = field.default is False or field.default in (None, (), {})
    metavar = f"[{'|'.join(values)}]" if values else _METAVARS.get(kind)
    if get_origin(field.annotation) is dict:
        metavar = "NAME=VALUE"
    elif metavar and len(metavar) > LONGEST_METAVAR:
        metavar = "NAME"
    spelled = [f"--{extra['spelled']}"] if extra["spelled"] else []
    option = typer.Option(
        *spelled,
        help=field.description,
        metavar=metavar,
        rich_help_panel=extra["panel"],
        hidden=hidden,
        show_default=extra["default_text"] or (False if no_default else str(field.default)),
        autocompletion=(lambda incomplete: [value for value in values if value.startswith(incomplete)]) if values else None,
    )
    return inspect.Parameter(name, _KEYWORD, default=None, annotation=Annotated[kind, option])


def _option_type(annotation: Any) -> tuple[Any, tuple[str, ...]]:
    """The type of an option's value, and its choices, empty if any value is allowed.

    The recipe checks the values; its message names the nearest choice.
    """
    arguments = get_args(annotation)
    if get_origin(annotation) is Literal:
        return str, arguments
    if get_origin(annotation) in (Union, types.UnionType):
        return _option_type(next(member for member in arguments if member is not types.NoneType))
    if get_origin(annotation) is dict:
        return list[str], ()
    if get_origin(annotation) is tuple:
        return list[str], _option_type(arguments[0])[1]
    return annotation, ()


def _print_version(given: bool) -> None:
    """Print the version and exit. Eager, so that it runs before a missing command is reported."""
    if given:
        print(__version__)
        raise typer.Exit


def _print_all_options(context: typer.Context, given: bool) -> None:
    """Print the help with all options and exit. Eager, so that missing arguments are not reported."""
    if given:
        cast("Command", context.command).unhide()
        print(context.get_help())
        raise typer.Exit


output_option = functools.partial(typer.Option, rich_help_panel="Output")

HelpAll = Annotated[
    bool,
    typer.Option("--help-all", help="List all options with this message and exit.", is_eager=True, callback=_print_all_options),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Version = Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)]

Model = Annotated[str, typer.Argument(metavar="MODEL", help=RecipeFields.model_fields["model"].description)]
ModelOrConfig = Annotated[str | None, typer.Argument(metavar="MODEL", help=RecipeFields.model_fields["model"].description)]
Out = Annotated[str | None, typer.Argument(metavar="OUT", help="Folder to write; must not exist.")]
_TEXT = f"Text to measure the perplexity on: {', '.join(TEXT_NAMES)}, or a {TEXT_FILES} file."
# typer 0.27 would name it --TEXT
TextOption = Annotated[list[str] | None, typer.Option("--text", metavar="TEXT", help=_TEXT)]

Config = Annotated[str | None, output_option(metavar="FILE", help="Recipe file (YAML) or saved report; options override it.")]
PrintConfig = Annotated[bool, output_option("--print-config", help="Print the recipe as YAML and exit.", hidden=True)]
Resume = Annotated[bool, output_option("--resume", help="Continue an unfinished run, if there is one.")]
Restart = Annotated[bool, output_option("--restart", help="Discard an unfinished run and start again.")]
Overwrite = Annotated[bool, output_option("--overwrite", help="Replace OUT if sparsellm wrote every file in it.")]
QuietOption = Annotated[bool, output_option("--quiet", help="Show no progress, only results, notes and errors.")]
JsonOption = Annotated[bool, output_option("--json", help="Print the result as JSON on stdout.")]
ComparedWith = Annotated[str | None, typer.Option("--against", metavar="DENSE", help="Model to measure the difference from.")]
Against = Annotated[str | None, typer.Option(metavar="DENSE", help="List the tensors that differ from this model's.")]
_DENSE = "Check that all tensors that were not pruned equal this model's."
Dense = Annotated[str | None, typer.Option("--against", metavar="DENSE", help=_DENSE)]
Expect = Annotated[
    str | None,
    typer.Option(
        help="Check that each pruned layer has this sparsity, or the one allocated to it (all layers together, where no report "
        "lists these); exit with status 1 if not."
    ),
]

Finished = Annotated[str, typer.Argument(metavar="OUT", help="Folder of a pruned model, as written by `prune`.")]
