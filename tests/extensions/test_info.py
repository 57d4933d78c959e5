"""`sparsellm info`: what this machine has, how to get what is missing, what was measured, and the methods."""

from __future__ import annotations

import json
import tomllib
from unittest import mock

import pytest
import torch
from typer.testing import CliRunner

from sparsellm.cli import info
from sparsellm.cli.app import app
from sparsellm.extensions.packed import facts
from sparsellm.extensions.packed.formats import kernel_library, kernels
from sparsellm.recipes.fields import METHODS
from tests.conftest import ROOT


@pytest.fixture(autouse=True)
def bandwidth() -> object:
    with mock.patch.object(kernel_library, "stream_bandwidth", return_value=12.34e9):
        yield


def test_table_fits_80_columns() -> None:
    result = CliRunner().invoke(app, ["info"], env={"COLUMNS": "80"})
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert "12.3 GB/s" in result.stdout
    assert torch.__version__ in result.stdout
    assert (kernels.instruction_set() or "not compiled") in result.stdout
    parts = [part.splitlines() for part in result.stdout.split("\n\n")]
    assert [part[0].split() for part in parts] == [["machine"], ["measured", "choices"], ["methods"], ["extensions"]]
    assert len({line.index(line.split(maxsplit=1)[1]) for line in (parts[0][1], parts[2][1])}) == 1, "columns are aligned"
    assert [line.split()[0] for line in parts[2][1:] if not line.startswith(" ")] == list(METHODS)


def test_json_has_the_same_facts() -> None:
    found = json.loads(CliRunner().invoke(app, ["info", "--json"]).stdout)
    assert found["packed"]["kernels"] == {"in_use": kernels.instruction_set(), "instruction_sets": kernels.instruction_sets()}
    assert found["threads"] == torch.get_num_threads()
    assert found["memory"]["total"] > found["memory"]["available"] > 0
    assert found["packed"]["bandwidth"] == 12.34e9
    assert found["packages"]["torch"] == torch.__version__
    assert found["methods"] == METHODS


def test_a_method_is_shown_with_its_settings() -> None:
    """Each field of its class with the default and its line of the docstring, and solvers by name."""
    shown = CliRunner().invoke(app, ["info", "algorithm1"], env={"COLUMNS": "100"})
    assert shown.exit_code == 0
    rows = {words[0]: words[2] for line in shown.stdout.splitlines() if len(words := line.split()) > 2}
    assert (rows["epochs"], rows["solver"], rows["blocks"]) == ("4", "sparsegpt", "None")
    assert "keep_zeros" not in rows
    for name in METHODS:
        found = json.loads(CliRunner().invoke(app, ["info", name, "--json"]).stdout)["settings"]
        assert all(setting["description"] for setting in found.values()), name
    assert "'algorithm1'" in CliRunner().invoke(app, ["info", "algoritm1"]).stderr


def test_missing_parts_say_how_to_get_them() -> None:
    with (
        mock.patch.object(kernels, "load_kernels", return_value=None),
        mock.patch.object(info, "_version", lambda package: None if package == "matplotlib" else "1.0"),
    ):
        text = " ".join(CliRunner().invoke(app, ["info"], env={"COLUMNS": "80"}).stdout.split())
    assert " ".join(facts.NO_KERNELS.split()) in text
    assert "not installed matplotlib: pip install 'sparsellm[plots]'" in text


def test_extras_are_those_of_the_package() -> None:
    """Those for users, which a command asks for."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert set(info.EXTRAS) == set(extras) - {"docs", "test"}
    assert all(any(line.startswith(package) for line in extras[extra]) for extra, package in info.EXTRAS.items())


@pytest.mark.parametrize(
    ("names", "line"),
    [
        (["products in bfloat16"], "1 measurement was made under load and will be made again: products in bfloat16"),
        (list("abc"), "3 measurements were made under load and will be made again (--json lists them)"),
    ],
)
def test_measurements_under_load_are_one_line(names: list[str], line: str) -> None:
    assert info._under_load(names) == line
