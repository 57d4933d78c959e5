"""The recipes of the paper's tables and of small models: every one reads, its figures have their cells, its small form runs."""

from __future__ import annotations

import csv
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from typer.testing import Result

from sparsellm.extensions.studies.page import report_page
from sparsellm.extensions.studies.sweep_file import read_sweep
from tests.conftest import ROOT, SHARED

FOLDER = ROOT / "recipes" / "neurips2024"
RECIPES = sorted(FOLDER.glob("*.yaml"))
SMALL_MODELS = FOLDER.parent / "small-models.yaml"
HERE = [pytest.param(path, id=path.stem) for path in (*RECIPES, SMALL_MODELS)]
QUESTIONS = SHARED / "data" / "zeroshot"


@pytest.mark.parametrize("path", HERE)
def test_every_recipe_reads_and_every_figure_has_its_cell(path: Path) -> None:
    sweep = read_sweep(path)
    for published in sweep.published:
        assert "NeurIPS 2024" in published.source or path == SMALL_MODELS
        for where, value in published.figures:
            cells = [cell for cell in sweep.cells if where.items() <= cell.labels.items()]
            assert len(cells) == 1, where
            assert value > 0
    assert {cell.recipe.blocks for cell in sweep.cells} in ({"first-half", "all"}, {"all"})
    small = read_sweep(path, smoke=True)
    assert all(cell.recipe.model.startswith("demo:") for cell in small.cells)
    assert not any(published.beside(cell.labels) for published in small.published for cell in small.cells)


def test_some_figures_are_where_they_belong() -> None:
    figures = read_sweep(FOLDER / "table1-opt.yaml").published[0]
    at = {"protocol": "half", "method": "published"}
    assert figures.beside({"model": "opt-6.7b", "sparsity": "3:4", **at}) == 83.4
    assert figures.beside({"model": "opt-13b", "sparsity": "85%", **at}) == 2052
    assert figures.beside({"model": "opt-125m", "sparsity": "70%", **at}) is None
    assert figures.beside({"model": "opt-125m", "sparsity": "70%", "protocol": "all", "method": "published"}) == 208.46


def test_small_models_have_dense_gptq_at_the_same_bits() -> None:
    sweep = read_sweep(SMALL_MODELS)
    one = {"model": "opt-125m"}
    dense = [cell.recipe for cell in sweep.cells if cell.labels == one | {"size": "int4", "method": "sparsegpt"}]
    assert [(recipe.sparsity, recipe.values, recipe.group_size) for recipe in dense] == [("0%", "int4", 128)]
    bits = [cell.recipe.bits for cell in sweep.cells if cell.labels == one | {"size": "4.125 bits", "method": "default"}]
    assert bits == [4 + 16 / 128]
    assert {cell.labels["method"] for cell in sweep.cells if cell.labels["size"] == "50%"} == set(sweep.axes["method"])


def test_the_table_names_every_recipe() -> None:
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    assert all(f"({path.name})" in text for path in RECIPES)
    assert text.count(".yaml](") == len(RECIPES)


@pytest.mark.parametrize(
    "path", [one if one.id == "time" else pytest.param(*one.values, id=one.id, marks=pytest.mark.long) for one in HERE]
)
def test_the_small_form_runs(path: Path, tmp_path: Path, command: Callable[..., Result]) -> None:
    changes = []
    if path.stem == "zero-shot":
        if find_spec("lm_eval") is None or not QUESTIONS.is_dir():
            pytest.skip("lm-eval (the extra `eval`) or the shared task files are not here")
        changes = ["--set", f"task_data={QUESTIONS}"]
    done = command("sweep", path, tmp_path / "out", "--smoke", *changes)
    assert done.exit_code == 0, done.stderr
    sweep = read_sweep(path, smoke=True)
    with (tmp_path / "out" / "results.csv").open(encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    seeds = len(sweep.axes.get("seed", ("",)))
    assert len([row for row in rows if row["measure"] == "seconds"]) == len(sweep.cells) / seeds
    page, plots = report_page(tmp_path / "out")
    assert "small form" in page
    names = {plot.name for plot in plots}
    assert ("epochs" in names) == any(cell.recipe.method == "algorithm1" for cell in sweep.cells)
    assert ("samples-0" in names) == (path.stem == "calibration")
    assert ("grid-0-0" in names) == (path.stem == "hyper-parameters")
