"""The command line, its help, the recipe and docs/cli.md say the same."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib.metadata import version
from typing import Any, get_args

import pytest
import typer
from typer.testing import CliRunner

from sparsellm.cli.app import app
from sparsellm.cli.options import recipe_options
from sparsellm.extensions.recover.recipe import RecoveryRecipe
from sparsellm.recipes.fields import ALLOCATIONS, METHODS, MethodName, SolverName
from sparsellm.recipes.recipe import Recipe
from sparsellm.recipes.registry import SOLVERS
from tests.conftest import ROOT

COMMANDS: dict[str, Any] = vars(typer.main.get_command(app))["commands"]
OWN = {
    ("push", "revision"),
    ("sweep", "only"),
    ("recover", "model"),
    ("pack", "values"),
    ("pack", "group_size"),
    ("export", "values"),
}
"""Options that are named like a field of the recipe but mean something else."""
NOT_FIELDS = {"resume", "restart", "output", "config", "print_config", "overwrite", "report_to", "as_json", "help_all"}
NOT_FIELDS |= {"quiet", "pack"}


def test_page_is_up_to_date() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "docs" / "make_cli.py", "--check"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_help_ends_in_an_example_and_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for name in ["", *COMMANDS]:
        shown = CliRunner().invoke(app, [*name.split(), "--help"])
        assert shown.exit_code == 0
        assert max(map(len, shown.stdout.splitlines())) <= 80, name
        text = str(COMMANDS[name].help if name else typer.main.get_command(app).help)
        example = f"Example: sparsellm {name}"
        assert text.strip().splitlines()[-1].startswith(example)
        assert example in shown.stdout
        if not name:
            assert "..." not in shown.stdout.partition("Commands:")[2]  # click cuts summaries that are too long


def option_of(field: str) -> str:
    """The option of a field."""
    return "--set" if field == "settings" else f"--{field.replace('_', '-')}"


def test_prune_has_an_option_for_every_field_of_the_recipe() -> None:
    """The fields' order on the command line may differ, their names may not; `model` is an argument."""
    given = {parameter.name for parameter in COMMANDS["prune"].params}
    assert given - NOT_FIELDS == set(Recipe.model_fields)
    spelled = {option for parameter in COMMANDS["prune"].params for option in parameter.opts}
    assert {option_of(field) for field in Recipe.model_fields if field != "model"} <= spelled


def test_options_for_fields_show_the_description_and_default_of_the_field() -> None:
    """Their default is None, so that a recipe file counts; help shows the recipe's."""
    for name, parameter in ((name, parameter) for name, command in COMMANDS.items() for parameter in command.params):
        field = (RecoveryRecipe if name == "recover" else Recipe).model_fields.get(parameter.name)
        if parameter.param_type_name == "option" and field is not None and (name, parameter.name) not in OWN:
            assert parameter.default is None
            assert parameter.help == field.description, parameter.name
            if field.default not in (None, False, (), {}):
                assert parameter.show_default == str(field.default), parameter.name


def test_value_lists_hold_every_name() -> None:
    assert set(get_args(SolverName)) == set(SOLVERS)
    assert set(get_args(MethodName)) == set(METHODS)
    assert all(rule in (Recipe.model_fields["allocation"].description or "") for rule in ALLOCATIONS)


def test_help_lists_the_values_of_a_field_and_completion_offers_them() -> None:
    parameters = {parameter.name: parameter for parameter in COMMANDS["prune"].params}
    assert parameters["dtype"].metavar == "[auto|float32|bfloat16|float16]"
    context = COMMANDS["prune"].make_context("prune", [])
    for name, start, expected in (("dtype", "b", ["bfloat16"]), ("method", "alps", ["alps-accurate", "alps"])):
        assert [item.value for item in parameters[name].shell_complete(context, start)] == expected
    assert parameters["seed"].shell_complete(context, "") == []


def test_help_of_prune_fits_a_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 60 lines of 80 columns, the essential options first."""
    monkeypatch.setenv("COLUMNS", "80")
    lines = CliRunner().invoke(app, ["prune", "--help"]).stdout.splitlines()
    assert len(lines) <= 60
    assert max(map(len, lines)) <= 80
    panels = ["Arguments:", "Options:", "Layers:", "Machine:", "Output:"]
    assert [line for line in lines if line.endswith(":") and not line.startswith(" ")] == panels
    text = "\n".join(lines[lines.index("Options:") :])
    essentials = ["--method", "--sparsity", "--effort", "--calibration", "--samples", "--seed", "--evaluate", "--help-all"]
    places = [text.index(f"\n  {option}") for option in essentials]
    assert places == sorted(places)
    assert places[-1] < text.index("\nLayers:")
    assert "--set" not in text
    assert "One of:" not in text


@pytest.mark.parametrize(("name", "recipe"), [("prune", Recipe), ("plan", Recipe), ("recover", RecoveryRecipe)])
def test_help_all_lists_every_field(name: str, recipe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = CliRunner().invoke(app, [name, "--help-all"])
    assert shown.exit_code == 0
    assert max(map(len, shown.stdout.splitlines())) <= 80
    for field in recipe.model_fields.keys() - {"model", "pruned"} - ({"dtype"} if name == "recover" else set()):
        assert f"\n  {option_of(field)}" in shown.stdout


def test_completion_offers_options_that_help_does_not_list() -> None:
    command = typer.main.get_command(app).commands["prune"]  # type: ignore[attr-defined]
    context = command.make_context("prune", ["model", "out"])
    assert "--set" in [item.value for item in command.shell_complete(context, "--se")]


@pytest.mark.parametrize(("given", "suggested"), [("--hush", None), ("--sparsty", "--sparsity"), ("--sampels", "--samples")])
def test_only_a_similar_option_is_suggested(given: str, suggested: str | None) -> None:
    shown = CliRunner().invoke(app, ["prune", given])
    assert shown.exit_code == 2
    assert f"No such option: {given}" in shown.stderr
    assert (suggested in shown.stderr) if suggested else ("Possible options" not in shown.stderr)


def test_recipe_options_pass_on_only_what_was_given() -> None:
    received: list[dict[str, Any]] = []

    @recipe_options("seed", "keep_zeros", "include", "device")
    def command(context: typer.Context, *, device: str = "cpu", **settings: Any) -> None:
        received.append({"device": device} | settings)

    program = typer.Typer()
    program.command()(command)
    for line in ([], ["--seed", "0", "--no-keep-zeros", "--include", "a", "--include", "b", "--device", "cuda"]):
        assert CliRunner().invoke(program, line).exit_code == 0
    assert received == [{"device": "cpu"}, {"device": "cuda", "seed": 0, "keep_zeros": False, "include": ["a", "b"]}]
    assert CliRunner().invoke(program, ["--sparsity", "50%"]).exit_code == 2


def test_every_method_has_its_page() -> None:
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    for page in (f"methods/{name}.md" for name in METHODS):
        assert (ROOT / "docs" / page).is_file()
        assert page in index


def test_the_version_needs_no_command() -> None:
    """It is the installed package's."""
    shown = CliRunner().invoke(app, ["--version"])
    assert (shown.exit_code, shown.stdout.strip()) == (0, version("sparsellm"))


def test_options_named_like_their_placeholder_say_their_name() -> None:
    """typer 0.27 calls them by the placeholder otherwise, as `--TEXT`."""
    for registered in app.registered_commands:
        assert registered.callback is not None
        for name, parameter in inspect.signature(registered.callback).parameters.items():
            for option in getattr(parameter.annotation, "__metadata__", ()):
                if isinstance(option, typer.models.OptionInfo) and str(option.metavar).lower() == name:
                    assert option.default == f"--{name}"  # within Annotated, where typer reads the first name from
