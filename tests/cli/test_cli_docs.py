"""The command line, its help, the recipe and docs/cli.md say the same."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from sparsellm.choices import METHODS, SOLVERS
from sparsellm.cli import app
from sparsellm.recipe import Recipe

ROOT = Path(__file__).parents[2]
COMMANDS: dict[str, Any] = vars(typer.main.get_command(app))["commands"]
NOT_FIELDS = {"resume", "restart", "output", "config", "print_config", "overwrite", "track", "as_json"}


def test_page_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "make_cli.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_help_ends_in_an_example(name: str) -> None:
    shown = CliRunner().invoke(app, [*name.split(), "--help"])
    assert shown.exit_code == 0
    text = typer.main.get_command(app).help if not name else COMMANDS[name].help
    last = text.strip().splitlines()[-1]
    assert last.startswith("Example: sparsellm")
    assert "Example: sparsellm" in shown.output
    if name:
        assert last.startswith(f"Example: sparsellm {name}")


def test_prune_has_an_option_for_every_field_of_the_recipe() -> None:
    """The fields' order on the command line may differ, their names may not; `model` is an argument."""
    given = {parameter.name for parameter in COMMANDS["prune"].params}
    assert given - NOT_FIELDS == set(Recipe.model_fields)
    spelled = {option for parameter in COMMANDS["prune"].params for option in parameter.opts}
    assert {f"--{field.replace('_', '-')}" for field in Recipe.model_fields if field != "model"} <= spelled


def test_shown_defaults_are_the_recipe_s() -> None:
    """Options default to nothing, so that a recipe file counts; what help shows as their default must be the recipe's."""
    words = {None: set(), False: set(), (): set()}
    for parameter in COMMANDS["prune"].params:
        shown = parameter.show_default
        if parameter.name in Recipe.model_fields and isinstance(shown, str):
            default = Recipe.model_fields[parameter.name].default
            assert default in words or shown == str(default), f"{parameter.name}: help shows {shown}, the recipe has {default}"


def test_help_names_every_method_and_solver() -> None:
    listed = {parameter.name: parameter.help for parameter in COMMANDS["prune"].params}
    assert all(method in listed["method"] for method in METHODS)
    assert set(METHODS) == {"sparsellm", *SOLVERS}


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_its_page(name: str) -> None:
    assert (ROOT / "docs" / "methods" / f"{name}.md").is_file()
    assert f"methods/{name}.md" in (ROOT / "docs" / "index.md").read_text(encoding="utf-8")


def test_the_version_needs_no_command() -> None:
    """It is the installed package's."""
    shown = CliRunner().invoke(app, ["--version"])
    assert (shown.exit_code, shown.stdout.strip()) == (0, version("sparsellm"))
