"""What was removed is answered by what replaces it, wherever a user may still name it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import typer
from typer.testing import Result

import sparsellm
from sparsellm.cli.app import app
from sparsellm.errors import InvalidSetting
from sparsellm.runs.recipe_fields import RecipeFields, RecoveryFields
from sparsellm.runs.recipe_file import read_recipe
from sparsellm.runs.removed import REMOVED

Command = Callable[..., Result]

FIELD, REPORTS = "allocation_bounds", Path(__file__).parents[1] / "reports"


def test_what_was_removed_is_gone() -> None:
    """An entry that outlives its subject would answer for something that exists."""
    commands = set(typer.main.get_group(app).commands)
    assert not REMOVED.keys() & (
        set(RecipeFields.model_fields) | set(RecoveryFields.model_fields) | commands | set(dir(sparsellm))
    )


def test_an_option_names_its_replacement(tmp_path: Path, command: Command) -> None:
    done = command("prune", "demo:opt", tmp_path / "out", "--allocation-bounds", "60%:95%")
    assert done.exit_code == 2
    assert "No such option: --allocation-bounds. A rule of --allocation has no bounds any more" in " ".join(done.stderr.split())
    assert "Did you mean" not in done.stderr


@pytest.mark.parametrize("name", ["methods", "doctor", "compare"])
def test_a_command_names_its_replacement(name: str, command: Command) -> None:
    done = command(name, "out")
    assert done.exit_code == 2
    assert f"No such command '{name}'. {REMOVED[name]}" in " ".join(done.stderr.split())


def test_a_function_names_its_replacement() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'compare'\. The command sparsellm report A B compares"):
        _ = sparsellm.compare


def test_a_setting_names_its_replacement(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text(f"model: demo:opt\n{FIELD}: 60%:95%\n", encoding="utf-8")
    for fields, file in (({"model": "demo:opt", FIELD: "60%:95%"}, None), ({}, tmp_path / "recipe.yaml")):
        with pytest.raises(InvalidSetting, match=f"nknown field '{FIELD}'. A rule of `allocation` has no bounds any more"):
            read_recipe(fields, file)


def test_a_saved_recipe_may_have_it_where_it_was_not_set(tmp_path: Path) -> None:
    saved = json.loads((REPORTS / "pruned.json").read_text(encoding="utf-8"))
    assert saved["recipe"][FIELD] is None
    assert read_recipe({"model": "demo:opt"}, REPORTS / "pruned.json").effort == saved["recipe"]["effort"]
    file = tmp_path / "sparsellm.json"
    file.write_text(json.dumps(saved | {"recipe": saved["recipe"] | {FIELD: "60%:95%"}}), encoding="utf-8")
    with pytest.raises(InvalidSetting, match="unknown field"):
        read_recipe({"model": "demo:opt"}, file)
