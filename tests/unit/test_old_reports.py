"""Reports that an earlier revision wrote are still read: `tests/reports` has one of each kind."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

import sparsellm
from sparsellm.errors import InvalidSetting
from sparsellm.pipeline.recipe_file import read_recipe
from sparsellm.pipeline.removed import REMOVED
from sparsellm.pipeline.report import Report
from sparsellm.studies.page import report_page
from sparsellm.studies.sweep_runner import READ_FINISHED
from sparsellm.texts.json_files import read_record

REPORTS = Path(__file__).parents[1] / "reports"
RECOVERIES = ("recovered", "gradual")
NAMES = sorted(file.stem for file in REPORTS.glob("*.json") if file.stem != "cell")


@pytest.mark.parametrize("name", NAMES)
def test_a_report_is_read(name: str, tmp_path: Path) -> None:
    """With the figures of its layers, in text and as a page."""
    report = sparsellm.load_report(REPORTS / f"{name}.json")
    assert report.totals.pruned_layers == len(report.layers) == len(report.to_frame()) > 0
    assert f"{100 * report.totals.sparsity_of_pruned_layers:.2f} %" in str(report)
    assert report.digests
    (tmp_path / "sparsellm.json").write_bytes((REPORTS / f"{name}.json").read_bytes())
    page, _ = report_page(tmp_path)
    assert f"{report.totals.pruned_layers} " in page


@pytest.mark.parametrize("name", [name for name in NAMES if name not in RECOVERIES])
def test_its_recipe_can_be_run_again(name: str) -> None:
    recipe = read_recipe({"model": "demo:opt"}, REPORTS / f"{name}.json")
    assert recipe.calibration == "demo"


@pytest.mark.parametrize("name", RECOVERIES)
def test_a_recovery_s_recipe_is_refused(name: str) -> None:
    with pytest.raises(InvalidSetting, match="report of a recovery"):
        read_recipe({"model": "demo:opt"}, REPORTS / f"{name}.json")


def test_a_finished_cell_is_read() -> None:
    cell, _ = read_record(REPORTS / "cell.json", READ_FINISHED, "finished cell")
    assert cell.report.perplexity


def test_every_field_of_a_report_is_written() -> None:
    """A new one needs an entry in `to_dict`, and a report here that has it."""
    reports = [sparsellm.load_report(REPORTS / f"{name}.json") for name in NAMES]
    reports[0].dtype_changed, reports[0].changed_outside = True, ("lm_head.weight",)  # which none of these has
    reports[0].initial_sparsity = 0.5
    written = {key for report in reports for key in report.to_dict()}
    in_totals, of_the_process = {"parameters", "zeros"}, {"origin"}
    assert {field.name for field in dataclasses.fields(Report)} - in_totals - of_the_process <= written


@pytest.mark.parametrize("name", NAMES)
def test_what_is_read_is_written_again(name: str) -> None:
    """Every entry, but for fields of the recipe that were removed."""
    content = json.loads((REPORTS / f"{name}.json").read_text(encoding="utf-8"))
    again = json.loads(sparsellm.load_report(REPORTS / f"{name}.json").to_json())
    for fields in (content["recipe"], content.get("pruned", {}).get("recipe", {})):
        for removed in {*fields} & {*REMOVED}:
            del fields[removed]
    assert again == content


def test_a_recipe_of_another_version_is_shown() -> None:
    """A method that this version does not have, and a field; but a value of a wrong type is damage."""
    content = json.loads((REPORTS / "pruned.json").read_text(encoding="utf-8"))
    content["recipe"] |= {"effort": "tomorrow", "new_field": 1}
    report = Report.from_dict(content)
    assert report.recipe.to_yaml().count("tomorrow") == 1
    assert "sparsellm of another version, 60%" in str(report)
    with pytest.raises(ValueError, match="`seed`"):
        Report.from_dict(content | {"recipe": content["recipe"] | {"seed": []}})
