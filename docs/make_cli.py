"""Write docs/cli.md from the commands and their options: `python docs/make_cli.py`. With `--check`, only compare it."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import typer
from pydantic.fields import FieldInfo

from sparsellm.cli.app import app
from sparsellm.recipes.recipe import Recipe

PAGE = Path(__file__).with_name("cli.md")

HEAD = """# The command line

<!-- Written by docs/make_cli.py. Change the commands, options.py or recipe_fields.py, then run `python docs/make_cli.py`. -->

Results go to stdout, progress and messages to stderr. `--json` prints one JSON document on stdout. The exit status is 0 for
success, 1 for an error or if `inspect` or `verify` finds a difference, 2 for wrong usage, and 130 when interrupted. An error is
one message; `sparsellm --debug COMMAND ...` shows its traceback.

`--help` lists the options that most runs need, `--help-all` those of the tables below.
"""

RECIPE = """## Recipe

`prune --config recipe.yaml` reads these fields from YAML, `--print-config` writes those that are not at their defaults, and
`sparsellm.prune` takes them as keywords. Options on the command line override the file. An unknown field is an error.

`prune --config OUT/sparsellm.json NEW`, or `--config OUT`, has the settings of the pruning run that wrote OUT. A report has
the names of local files without their folders: files that do not exist in the current folder are listed, and their settings
have to be passed again.

| field | type | default | meaning |
|---|---|---|---|
"""


def page() -> str:
    """The content of the page."""
    program = typer.main.get_command(app)
    commands: dict[str, Any] = getattr(program, "commands")  # noqa: B009  (typer's own click has no public type)
    parts = [HEAD, section("sparsellm", program, "## sparsellm", "[OPTIONS] COMMAND [ARGUMENTS]")]
    parts += [section(f"sparsellm {name}", command, f"## {name}") for name, command in commands.items()]
    parts.append(
        RECIPE
        + "".join(
            row(name, kind(field.annotation), default(field), field.description or "")
            for name, field in Recipe.model_fields.items()
        )
    )
    return "\n".join(parts)


def section(path: str, command: Any, title: str, usage: str | None = None) -> str:
    """The section of a command: description, usage, arguments, options and example."""
    description, example = split_help(command.help or "")
    arguments = [param for param in command.params if param.param_type_name == "argument"]
    options = [param for param in command.params if param.param_type_name == "option"]
    options = [param for param in options if param.name not in ("install_completion", "show_completion")]
    usage = usage or " ".join([*(placeholder(param) for param in arguments), "[OPTIONS]"])
    lines = [title, "", description, "", "```text", f"{path} {usage}", "```", ""]
    if arguments:
        lines += ["| argument | meaning |", "|---|---|"]
        lines += [f"| `{placeholder(param)}` | {cell(param.help)} |" for param in arguments]
        lines.append("")
    if options:
        lines += ["| option | default | meaning |", "|---|---|---|"]
        lines += [f"| `{', '.join(param.opts)}` | {option_default(param)} | {cell(meaning(param))} |" for param in options]
        lines.append("")
    if example:
        lines += ["Example:", "", "```bash", example, "```", ""]
    return "\n".join(lines)


def split_help(text: str) -> tuple[str, str]:
    """The help text without its example, and the command of the example."""
    description, _, example = text.partition("Example: ")
    return " ".join(description.split()), example.strip()


def placeholder(param: Any) -> str:
    """An argument in the usage line."""
    name = (param.metavar or param.name.upper()) + "..." * (param.nargs == -1)
    return name if param.required else f"[{name}]"


def meaning(param: Any) -> str:
    """The help of an option, and its values, which the terminal's help has in the placeholder."""
    values = (param.metavar or "").removeprefix("[").removesuffix("]").split("|")
    return param.help + (f" One of: {', '.join(values)}." if len(values) > 1 else "")


def option_default(param: Any) -> str:
    """The default of an option."""
    if isinstance(param.show_default, str):
        return cell(param.show_default)
    if param.required:
        return "required" + (", may be repeated" if param.multiple else "")
    if param.multiple:
        return "none, may be repeated"
    if param.is_flag:
        return "off"
    return cell(str(param.default)) if param.default is not None else "none"


def kind(annotation: Any) -> str:
    """The type of a field in words."""
    if get_origin(annotation) is Literal:
        return "one of " + ", ".join(map(str, get_args(annotation)))
    if get_origin(annotation) in (Union, types.UnionType):
        return " or ".join("null" if part is type(None) else kind(part) for part in get_args(annotation))
    if get_origin(annotation) is tuple:
        return f"list of {kind(get_args(annotation)[0])}"
    if get_origin(annotation) is dict:
        return "values by name"
    return {"str": "text", "bool": "true or false", "int": "whole number", "float": "number"}[annotation.__name__]


def default(field: FieldInfo) -> str:
    """The default of a field in YAML."""
    if field.is_required():
        return "required"
    extra: Any = field.json_schema_extra
    if extra["default_text"]:
        return f"null: {extra['default_text']}"
    value = field.default
    plain = {None: "null", True: "true", False: "false", (): "[]"}
    return plain[value] if value is None or isinstance(value, (bool, tuple)) else str(value)


def row(*cells: str) -> str:
    """A row of a table; the first cell is code."""
    first, *rest = cells
    return f"| `{first}` | {' | '.join(map(cell, rest))} |\n"


def cell(text: str | None) -> str:
    """Text in a cell of a table: one line, without Markdown's markup."""
    return re.sub(r"([|*])", r"\\\1", " ".join((text or "").split()))


def main() -> int:
    """Write the page, or compare it; returns the exit status."""
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    if PAGE.is_file() and PAGE.read_text(encoding="utf-8") == page():
        return 0
    print(f"{PAGE} is out of date. Run: python docs/make_cli.py", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
