"""What was removed is answered by what replaces it, wherever a user may still name it."""

from __future__ import annotations

import html
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
import typer
from typer.testing import Result

import sparsellm
from sparsellm import load_report
from sparsellm.cli.app import app
from sparsellm.errors import InvalidSetting
from sparsellm.pipeline.recipe_fields import RecipeFields, RecoveryFields
from sparsellm.pipeline.recipe_file import read_recipe
from sparsellm.pipeline.removed import REMOVED, asks_for_removed, without_removed
from sparsellm.studies.page import report_page
from sparsellm.studies.sweep_file import read_sweep
from tests.cli.test_bad_input import refused

Command = Callable[..., Result]

FIELD, REPORTS = "allocation_bounds", Path(__file__).parents[1] / "reports"

ASKED: list[tuple[str, str, Any]] = [
    ("recovered", "train", "norms"),
    ("recovered", "loss", "text"),
    ("gradual", "loss", "hidden"),
    ("recovered", "written", 0),
    ("pruned", "written", 3),
]
"""Settings that a report of an earlier revision may have, and that no run can have now: the report, the field, the value."""


def test_what_was_removed_is_gone() -> None:
    """An entry that outlives its subject would answer for something that exists."""
    fields = RecoveryFields.model_fields | RecipeFields.model_fields
    assert not REMOVED.keys() & {*fields, *typer.main.get_group(app).commands, *dir(sparsellm)}
    for name, value in (key.split("=") for key in REMOVED if "=" in key):
        assert value not in get_args(fields[name].annotation)


@pytest.mark.parametrize(
    ("words", "option", "said"),
    [
        (("prune", "demo:opt", "out"), "--allocation-bounds", "A rule of --allocation has no bounds any more"),
        (("recover", "pruned", "out"), "--loss", "--scope model lowers the divergence of the predictions, --scope block"),
        (("recover", "pruned", "out"), "--written", "Pruning reads more text with --samples; training generates"),
        (("prune", "demo:opt", "out"), "--written", "Pruning reads more text with --samples; training generates"),
    ],
)
def test_an_option_names_its_replacement(words: tuple[str, ...], option: str, said: str, command: Command) -> None:
    message = refused(command(*words, option, "60%:95%"), f"No such option: {option}. {said}", status=2)
    assert "Did you mean" not in message


@pytest.mark.parametrize("name", ["methods", "doctor", "compare"])
def test_a_command_names_its_replacement(name: str, command: Command) -> None:
    done = command(name, "out")
    assert done.exit_code == 2
    assert f"No such command '{name}'. {REMOVED[name]}" in " ".join(done.stderr.split())


def test_a_function_names_its_replacement() -> None:
    with pytest.raises(AttributeError, match=r"no attribute 'compare'\. The command sparsellm report A B compares"):
        _ = sparsellm.compare


@pytest.mark.parametrize(("field", "value"), [(FIELD, "60%:95%"), ("written", 3)])
def test_a_setting_names_its_replacement(field: str, value: Any, tmp_path: Path) -> None:
    """In Python, in a recipe file, and where a sweep's field is set."""
    (tmp_path / "recipe.yaml").write_text(f"model: demo:opt\n{field}: {value}\n", encoding="utf-8")
    said = re.escape(REMOVED[field])
    for fields, file in (({"model": "demo:opt", field: value}, None), ({}, tmp_path / "recipe.yaml")):
        with pytest.raises(InvalidSetting, match=f"nknown field '{field}'. {said}"):
            read_recipe(fields, file)
    with pytest.raises(InvalidSetting, match=f"names an unknown field: '{field}'. {said}"):
        read_sweep({"model": "demo:opt", "axes": {"method": ["magnitude"]}}, changes=[f"{field}={value}"])


@pytest.mark.parametrize("key", [key for key in REMOVED if "=" in key])
def test_a_value_names_its_replacement(key: str, tmp_path: Path, command: Command) -> None:
    """In Python and on the command line, before a model is read; for a value that never was one, the nearest is told."""
    name, value = key.split("=")
    saved = json.loads((REPORTS / "pruned.json").read_text(encoding="utf-8"))
    (tmp_path / "sparsellm.json").write_text(json.dumps(saved | {"files": []}), encoding="utf-8")
    with pytest.raises(InvalidSetting, match=re.escape(f"`{name}` is unknown: got '{value}'. {REMOVED[key]}")):
        sparsellm.recover(tmp_path, "demo:opt", "demo", **{name: value})
    for words in (("recover", tmp_path, "out", "--against", "demo:opt"), ("plan", "demo:opt", "--recover", tmp_path)):
        done = command(*words, "--calibration", "demo", f"--{name}", value)
        refused(done, f"--{name} is unknown: got '{value}'. --train full trains norms and biases with the weights, and --train")
    with pytest.raises(InvalidSetting, match=rf"got 'no {value}'\. (Did you mean|Known:)"):
        sparsellm.recover(tmp_path, "demo:opt", "demo", **{name: f"no {value}"})


@pytest.mark.parametrize(("report", "name", "value"), ASKED)
def test_a_report_of_what_was_removed_is_read(report: str, name: str, value: Any, tmp_path: Path) -> None:
    """In text and as a page, which says what its command leaves out."""
    saved = json.loads((REPORTS / f"{report}.json").read_text(encoding="utf-8"))
    saved["recipe"][name] = value
    (tmp_path / "sparsellm.json").write_text(json.dumps(saved), encoding="utf-8")
    said, without = str(load_report(tmp_path)), str(load_report(REPORTS / f"{report}.json"))
    assert said == without if name in REMOVED else f"({value}, " in said
    page, _ = report_page(tmp_path)
    assert html.escape(f"`{name}` was {value}, which was removed. ") in page
    assert f"  --{name}" not in page
    shutil.copy(REPORTS / f"{report}.json", tmp_path / "sparsellm.json")
    assert "was removed" not in report_page(tmp_path)[0]


@pytest.mark.parametrize(
    "fields",
    [
        {FIELD: None},
        {"pruned": "p", "loss": None},
        {"pruned": "p", "scope": "model", "loss": "kl"},
        {"pruned": "p", "scope": "block", "loss": "hidden"},
        {"pruned": "p", "train": "lora"},
        {"written": 0},
        {"pruned": "p", "scope": "model", "written": None},
        {"pruned": "p", "scope": "block", "written": 0},
    ],
)
def test_what_a_run_does_anyway_is_nothing_removed(fields: dict[str, Any]) -> None:
    assert asks_for_removed(fields) == {}
    assert not REMOVED.keys() & without_removed(fields).keys()


@pytest.mark.parametrize(("field", "value"), [(FIELD, "60%:95%"), ("written", 3)])
def test_a_saved_recipe_may_have_it_where_it_was_not_set(field: str, value: Any, tmp_path: Path) -> None:
    saved = json.loads((REPORTS / "pruned.json").read_text(encoding="utf-8"))
    assert not saved["recipe"][field]
    assert read_recipe({"model": "demo:opt"}, REPORTS / "pruned.json").effort == saved["recipe"]["effort"]
    file = tmp_path / "sparsellm.json"
    file.write_text(json.dumps(saved | {"recipe": saved["recipe"] | {field: value}}), encoding="utf-8")
    with pytest.raises(InvalidSetting, match=f"unknown field '{field}'. {re.escape(REMOVED[field])}"):
        read_recipe({"model": "demo:opt"}, file)
