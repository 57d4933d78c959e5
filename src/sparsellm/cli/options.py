"""Arguments and options of the command line. Options for fields of the recipe are generated from its declaration."""

from __future__ import annotations

import difflib
import functools
import inspect
import re
import types
from collections.abc import Callable
from typing import Annotated, Any, Literal, Union, cast, get_args, get_origin

import typer
import typer.core
from pydantic.fields import FieldInfo

from sparsellm import __version__
from sparsellm.pipeline.recipe_fields import HELP_PANELS, RecipeFields, RecoveryFields, RunFields
from sparsellm.solvers.integers import BITS_OF
from sparsellm.texts.paths import TEXT_FILES, TEXT_NAMES

_POSITIONAL, _KEYWORD = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY

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
            command(**{name: value for name, value in values.items() if name not in selected or value not in (None, [])})

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


def _extra(field: FieldInfo) -> dict[str, Any]:
    """The entries of a field's declaration on its option."""
    return cast("dict[str, Any]", field.json_schema_extra)


def _option(name: str, field: FieldInfo, hidden: bool) -> inspect.Parameter:
    """The parameter of a command that sets a field."""
    kind, values = _option_type(field.annotation)
    extra = _extra(field)
    no_default = field.default is False or field.default in (None, ())
    option = typer.Option(
        help=field.description,
        metavar=f"[{'|'.join(values)}]" if values else _METAVARS.get(kind),
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


_output = functools.partial(typer.Option, rich_help_panel="Output")

HelpAll = Annotated[
    bool,
    typer.Option("--help-all", help="List all options with this message and exit.", is_eager=True, callback=_print_all_options),
]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Version = Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)]

Model = Annotated[str, typer.Argument(metavar="MODEL", help=RecipeFields.model_fields["model"].description)]
ModelOrConfig = Annotated[str | None, typer.Argument(metavar="MODEL", help=RecipeFields.model_fields["model"].description)]
Out = Annotated[str | None, typer.Argument(metavar="OUT", help="Folder to write; must not exist.")]
Pruned = Annotated[str, typer.Argument(metavar="PRUNED", help=RecoveryFields.model_fields["pruned"].description)]
Recovered = Annotated[str, typer.Argument(metavar="OUT", help="Folder to write; must not exist.")]
PrunedFrom = Annotated[str, typer.Option("--against", metavar="DENSE", help="Dense model that PRUNED was made from.")]
_TEXT = f"Text to measure the perplexity on: {', '.join(TEXT_NAMES)}, or a {TEXT_FILES} file."
# typer 0.27 would name it --TEXT
TextOption = Annotated[list[str] | None, typer.Option("--text", metavar="TEXT", help=_TEXT)]

Config = Annotated[str | None, _output(metavar="FILE", help="Recipe file (YAML) or saved report; options override it.")]
PrintConfig = Annotated[bool, _output("--print-config", help="Print the recipe as YAML and exit.", hidden=True)]
Resume = Annotated[bool, _output("--resume", help="Continue an unfinished run, if there is one.")]
Restart = Annotated[bool, _output("--restart", help="Discard an unfinished run and start again.")]
Overwrite = Annotated[bool, _output("--overwrite", help="Replace OUT if sparsellm wrote every file in it.")]
AlsoPack = Annotated[bool, _output("--pack", help="Also write OUT-packed, without the zeros; see pack.")]
QuietOption = Annotated[bool, _output("--quiet", help="Show no progress, only results, notes and errors.")]
JsonOption = Annotated[bool, _output("--json", help="Print the result as JSON on stdout.")]
ComparedWith = Annotated[str | None, typer.Option("--against", metavar="DENSE", help="Model to measure the difference from.")]
Against = Annotated[str | None, typer.Option(metavar="DENSE", help="List the tensors that differ from this model's.")]
_DENSE = "Check that all tensors that were not pruned equal this model's."
Dense = Annotated[str | None, typer.Option("--against", metavar="DENSE", help=_DENSE)]
Expect = Annotated[
    str | None,
    typer.Option(help="Check that each pruned layer has this sparsity, or the one allocated to it; exit with status 1 if not."),
]

_DEMO_OUTPUT = "Folder to write the model pruned by the method sparsellm to; must not exist."
DemoOutput = Annotated[str | None, typer.Option(help=_DEMO_OUTPUT)]
Family = Annotated[str, typer.Option(help="Bundled model: opt or llama.")]

SweepFile = Annotated[str, typer.Argument(metavar="SWEEP", help="YAML file with `recipe:` and `axes:`; see docs/sweeps.md.")]
SweepOut = Annotated[
    str | None,
    typer.Argument(
        metavar="OUT", help="Folder of the sweep; an existing sweep is continued. Default: the file's name without .yaml."
    ),
]
Smoke = Annotated[bool, typer.Option("--smoke", help="Run the small version that the file describes under `smoke:`.")]
OnlyCells = Annotated[
    list[str] | None,
    typer.Option("--only", metavar="AXIS=LABEL", help="Run or list only the cells with this label on this axis."),
]
Changes = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="FIELD=VALUE",
        help="Change a field of the recipe in all cells, or with AXIS.LABEL=VALUE the value behind one label.",
    ),
]
Retry = Annotated[bool, typer.Option("--retry", help="Run failed cells again.")]
ListCells = Annotated[bool, typer.Option("--list", help="List the cells and their states without running any.")]

_target = functools.partial(typer.Option, rich_help_panel="Target")
MaxIncrease = Annotated[
    str | None, _target(metavar="PERCENT", help="Largest increase of the perplexity on each text of --evaluate, as 5%.")
]
MinAccuracy = Annotated[
    list[str] | None, _target(metavar="TASK:ACCURACY", help="Smallest accuracy on a zero-shot task, as boolq:0.60.")
]
MaxSize = Annotated[str | None, _target(metavar="SIZE", help="Size of the weights, as 500MB, once `pack` has packed them.")]
StepOption = Annotated[str, _target(metavar="PERCENT", help="Distance between the sparsities to choose from.")]

Finished = Annotated[str, typer.Argument(metavar="OUT", help="Folder of a pruned model, as written by `prune`.")]
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
AllowDense = Annotated[bool, typer.Option("--allow-dense", help="Pack a model with less than 30 % zeros.")]
PositiveZeros = Annotated[
    bool, typer.Option("--positive-zeros", help="Store -0.0, which some software leaves for removed weights, as 0.0.")
]
OverwritePacked = Annotated[bool, typer.Option("--overwrite", help="Replace PACKED if sparsellm wrote every file in it.")]
OverwriteUnpacked = Annotated[bool, typer.Option("--overwrite", help="Replace MODEL if sparsellm wrote every file in it.")]

_REPORTED = "Folders of pruned models or of sweeps; several, of one dense model, are compared."
Reported = Annotated[list[str], typer.Argument(metavar="RUN", help=_REPORTED)]
_PAGE_DEFAULT = "RUN.html, beside RUN; none for several or for --json alone"
PageOption = Annotated[str | None, _output("--output", help="HTML file to write.", show_default=_PAGE_DEFAULT)]
_FIGURES = "Also write each plot of a run's page to this folder, as SVG and PNG."
Figures = Annotated[str | None, _output(metavar="DIR", help=_FIGURES)]

OverwriteFiles = Annotated[bool, _output("--overwrite", help="Replace files that sparsellm did not write.")]

PackedArgument = Annotated[str, typer.Argument(metavar="PACKED", help="Folder of a packed model, as written by `pack`.")]
DenseForm = Annotated[
    str | None,
    typer.Option("--against", metavar="DENSE", help="Dense model to compare with.", show_default="PACKED, decoded"),
]
Batches = Annotated[str, typer.Option("--batch", metavar="N,N", help="Numbers of sequences to decode together.")]
Threads = Annotated[
    str | None, typer.Option("--threads", metavar="N,N", help="Numbers of threads.", show_default="as many as torch uses")
]
Decoded = Annotated[int, typer.Option("--tokens", metavar="N", help="Tokens of each sequence to decode in a measurement.")]
SpeedPage = Annotated[str | None, _output(help="HTML file to write, with the tables and a chart.")]
RecordSpeed = Annotated[
    bool, typer.Option("--record", help="Write the speeds into PACKED's report and model card, in place of earlier ones.")
]
