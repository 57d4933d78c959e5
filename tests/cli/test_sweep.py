"""Sweeps: what a file multiplies out to, what is refused, and that cells are durable, shared and taken one by one."""

from __future__ import annotations

import csv
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from typer.testing import Result

from sparsellm.cli.console import show, text_table
from sparsellm.errors import InvalidSetting, OutputExists
from sparsellm.evaluation.differences import Parts
from sparsellm.methods import BlockResult
from sparsellm.pipeline import cached_allocation, measuring, stages
from sparsellm.pipeline.prune import prune_run
from sparsellm.pipeline.recipe_file import read_recipe
from sparsellm.studies.commands import sweep_yaml
from sparsellm.studies.measures import Figure, error_legend, mean_over_seeds
from sparsellm.studies.page import sweep_verdict
from sparsellm.studies.sweep_cells import Sweep
from sparsellm.studies.sweep_file import read_sweep
from sparsellm.studies.sweep_runner import CellFolder, Outcome, read_outcomes, run_sweep, saved_sweep
from sparsellm.studies.sweep_tables import Row, grid, table, to_csv, to_json, to_markdown
from tests import made_up
from tests.cli.test_bad_input import refused
from tests.made_up import perplexity

Command = Callable[..., Result]
AXES = {"model": ["demo:opt"], "method": ["magnitude", "wanda"], "sparsity": [0.7, "2:4"]}
SHARED = {"calibration": "demo", "samples": 2, "sequence_length": 32}


def written(folder: Path, name: str = "sweep.yaml", **parts: Any) -> Path:
    """A sweep file."""
    file = folder / name
    file.write_text(yaml.safe_dump({"recipe": SHARED, "axes": AXES, **parts}, sort_keys=False), encoding="utf-8")
    return file


@pytest.fixture
def small(tiny: dict[str, Path], text_file: Path, tmp_path: Path) -> Callable[..., Sweep]:
    """A sweep of tiny models; other axes and fields as given."""

    def make(axes: dict[str, Any] | None = None, **fields: Any) -> Sweep:
        shared = {"calibration": str(text_file), "samples": 4, "sequence_length": 32, "evaluate": [str(text_file)]} | fields
        usual = {"model": {family: str(folder) for family, folder in tiny.items()}, "method": ["magnitude", "sparsegpt"]}
        return read_sweep(written(tmp_path, recipe=shared, axes=axes or usual))

    return make


def told(outcomes: list[Outcome]) -> list[dict[str, Any]]:
    """What the cells found, without what differs from run to run: times, memory."""
    found = []
    for outcome in outcomes:
        assert outcome.report is not None, outcome.error
        report = outcome.report.to_dict()
        del report["seconds"], report["peak_memory_bytes"]
        for block in report["blocks"]:
            del block["seconds"]
            for layer in block["layers"]:
                del layer["seconds"]
        for both in report["perplexity"].values():
            for result in both.values():
                del result["seconds"]
        found.append(report)
    return found


def quiet(_: object) -> None:
    """An observer that does nothing."""


def test_axes_multiply_out(tmp_path: Path) -> None:
    sweep = read_sweep(written(tmp_path))
    assert [cell.name for cell in sweep.cells] == [
        f"demo:opt, {method}, {pattern}" for method in ("magnitude", "wanda") for pattern in ("70%", "2:4")
    ]
    assert [cell.recipe.sparsity for cell in sweep.cells] == ["70%", "2:4"] * 2
    assert all(cell.recipe.samples == 2 for cell in sweep.cells)


def test_a_label_may_stand_for_several_fields(tmp_path: Path) -> None:
    variants = {"paper": {"method": "sparsellm", "as_published": True}, "ours": {"method": "sparsellm"}}
    sweep = read_sweep(written(tmp_path, axes={"model": ["demo:opt"], "variant": variants}))
    assert [cell.recipe.as_published for cell in sweep.cells] == [True, False]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({"axes": {"method": []}}, "The axis 'method' is empty"),
        ({"axes": {}}, "has no axes"),
        ({"axes": {"sparsity": ["70%", 0.7]}}, "two values named '70%'"),
        (
            {"axes": {"seed": {"one": 0, "another": 0}, "model": ["demo:opt"]}},
            "'one, demo:opt' and 'another, demo:opt' .* same recipe",
        ),
        ({"axes": {"metod": ["wanda"]}}, "unknown field: 'metod'. Did you mean 'method'"),
        ({"axes": {"method": "wanda"}}, "must be a list"),
        ({"axes": {"a": {"x": {"seed": 1}}, "seed": [2], "model": ["demo:opt"]}}, "Two axes set 'seed'"),
        ({"leave_out": [{"model": "demo:opt"}]}, "leaves out every cell"),
        ({"leave_out": [{"modle": "x"}]}, "unknown axis: 'modle'"),
        ({"axis": {}}, "Unknown field 'axis'. Did you mean 'axes'"),
        ({"axes": {"method": ["wanda", "sparsgpt"], "model": ["demo:opt"]}}, "sparsgpt.*Did you mean 'sparsegpt'"),
        ({"recipe": "x"}, "`recipe`: .* valid dictionary, got 'x'"),
        ({"columns": "speed"}, "unknown axis: 'speed'"),
    ],
)
def test_what_cannot_be_is_refused_at_once(parts: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match=message):
        read_sweep(written(tmp_path, **parts))


@pytest.mark.parametrize(
    ("spec", "labels", "sparsities"),
    [
        ({"half": "50%", "most": "80%"}, ["half", "most"], ["50%", "80%"]),
        ({"0.5": {"sparsity": "50%", "seed": 1}, "2:4": "2:4"}, ["0.5", "2:4"], ["50%", "2:4"]),
        ([0.5, "80%"], ["50%", "80%"], ["50%", "80%"]),
    ],
)
def test_labels_of_a_mapping_are_the_user_s(spec: Any, labels: list[str], sparsities: list[str], tmp_path: Path) -> None:
    """Also where an entry of `leave_out` or `published`, a selection or a change names them."""
    entry = {"source": "x", "measure": "perplexity", "axes": ["sparsity"], "values": {next(iter(spec)): 3.5}}
    axes = {"model": ["demo:opt"], "method": ["wanda", "magnitude"], "sparsity": spec}
    leave_out = [{"method": "magnitude", "sparsity": next(iter(spec))}]
    file = written(tmp_path, axes=axes, leave_out=leave_out, published=[entry])
    sweep = read_sweep(file)
    assert sweep.axes["sparsity"] == tuple(labels)
    assert [x.recipe.sparsity for x in sweep.cells if x.recipe.method == "wanda"] == sparsities
    assert len(sweep.cells) == 3
    assert sweep.published[0].beside(sweep.cells[0].labels) == 3.5
    first = next(iter(spec))
    assert [x.name for x in sweep.at([f"sparsity={first}"])] == [sweep.cells[0].name]
    assert read_sweep(file, changes=[f"sparsity.{first}=30%"]).cells[0].recipe.sparsity == "30%"


def test_a_value_of_a_list_may_be_named_in_any_form(tmp_path: Path) -> None:
    sweep = read_sweep(written(tmp_path, axes={"model": ["a/opt-125m"], "sparsity": ["70%", "2:4"]}))
    assert [x.name for x in sweep.at(["model=a/opt-125m", "sparsity=0.7"])] == ["opt-125m, 70%"]


def test_labels_of_truth_are_yaml_s(tmp_path: Path) -> None:
    sweep = read_sweep(
        written(tmp_path, axes={"model": ["demo:opt"], "keep_zeros": [True, False], "max_memory": [None, "1GiB"]})
    )
    assert (sweep.axes["keep_zeros"], sweep.axes["max_memory"]) == (("true", "false"), ("null", "1GiB"))


FIELDS = {"model": "demo:opt", "calibration": "demo"}


@pytest.mark.parametrize(
    ("shared", "axes", "names", "ignored"),
    [
        (
            {"effort": "fast"},
            {"method": ["wanda", "sparsellm", "sparsegpt"]},
            ["wanda", "sparsellm", "sparsegpt"],
            "Cells of wanda and sparsegpt leave out settings of other methods: effort.",
        ),
        (
            {},
            {"method": ["wanda", "sparsellm"], "effort": ["fast", "standard"]},
            ["wanda, fast", "sparsellm, fast", "sparsellm, standard"],
            "Cells of wanda leave out settings of other methods: effort. Combinations that differ in these only are one cell.",
        ),
        (
            {"method": "sparsellm", "epochs": 2, "effort": "fast"},
            {"as_published": [True, False]},
            ["true", "false"],
            "Cells of sparsellm as published leave out settings of other methods: effort. "
            "Cells of sparsellm leave out settings of other methods: epochs.",
        ),
        (
            {"true_sequential": True},
            {"method": ["wanda", "magnitude"]},
            ["wanda", "magnitude"],
            "Cells of magnitude leave out settings of other methods: true_sequential.",
        ),
    ],
)
def test_settings_that_a_method_does_not_have_are_left_out_of_its_cells(
    shared: dict[str, Any], axes: dict[str, Any], names: list[str], ignored: str, tmp_path: Path, command: Command
) -> None:
    file = written(tmp_path, recipe=FIELDS | shared, axes=axes)
    sweep = read_sweep(file)
    assert [cell.name for cell in sweep.cells] == names
    assert sweep.ignored == ignored
    done = command("sweep", file, tmp_path / "out", "--list")
    assert done.stdout.count(ignored) == 1
    assert to_markdown(sweep, []).count(ignored) == 1
    again = tmp_path / "again.yaml"
    again.write_text(sweep_yaml(sweep), encoding="utf-8")
    assert read_sweep(again).cells == sweep.cells


def test_settings_that_no_cell_has_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match="`effort` belongs to the method sparsellm, got the method wanda"):
        read_sweep(written(tmp_path, recipe=FIELDS | {"effort": "fast"}, axes={"method": ["wanda", "magnitude"]}))


def test_fields_of_a_recipe_may_stand_at_the_top(tmp_path: Path) -> None:
    parts = {"axes": {"sparsity": ["50%"]}, "smoke": {"samples": 1}}
    inside = read_sweep(written(tmp_path, recipe=FIELDS | {"method": "wanda", "samples": 3}, **parts))
    beside = read_sweep(written(tmp_path, recipe=None, **FIELDS, method="wanda", samples=3, **parts))
    assert beside == inside
    assert read_sweep(tmp_path / "sweep.yaml", smoke=True).cells[0].recipe.samples == 1
    with pytest.raises(InvalidSetting, match="`samples:` stands both in `recipe:` and beside it"):
        read_sweep(written(tmp_path, samples=3))
    with pytest.raises(InvalidSetting, match=r"Unknown field 'modle'\. Did you mean 'model'"):
        read_sweep(written(tmp_path, modle="demo:opt"))


@pytest.mark.parametrize("place", ["top", "recipe"])
@pytest.mark.parametrize(
    ("field", "values"), [("method", ["wanda", "sparsegpt"]), ("sparsity", ["50%", "60%"]), ("samples", [1, 2])]
)
def test_several_values_outside_of_the_axes_are_told_where_they_belong(
    place: str, field: str, values: list[Any], tmp_path: Path
) -> None:
    several = {field: values}
    parts = {"recipe": FIELDS | several} if place == "recipe" else {"recipe": None, **FIELDS, **several}
    with pytest.raises(InvalidSetting, match=f"`{field}:` has 2 values for one recipe. Move it below `axes:`"):
        read_sweep(written(tmp_path, axes={"seed": [0, 1]}, **parts))


def test_a_refused_cell_is_named(tmp_path: Path, command: Command) -> None:
    file = written(tmp_path, recipe=SHARED | {"allocation": "fisher", "samples": 2})
    done = command("sweep", file, tmp_path / "out")
    assert done.exit_code == 1
    assert "needs an unstructured sparsity" in done.stderr
    assert "in the cell demo:opt, magnitude, 2:4" in done.stderr
    assert not (tmp_path / "out").exists()
    kept = read_sweep(written(tmp_path, recipe=SHARED | {"allocation": "fisher"}, leave_out=[{"sparsity": "2:4"}]))
    assert [cell.recipe.sparsity for cell in kept.cells] == ["70%", "70%"]


def test_changes_and_choices(tmp_path: Path) -> None:
    file = written(tmp_path)
    sweep = read_sweep(file, changes=["samples=3", "model.demo:opt=demo:llama", "evaluate=[demo]"])
    assert {(x.recipe.samples, x.recipe.model, x.recipe.evaluate) for x in sweep.cells} == {(3, "demo:llama", ("demo",))}
    assert [cell.name for cell in sweep.at(["sparsity=2:4", "method=wanda"])] == ["demo:opt, wanda, 2:4"]
    for wrong in ("samples", "sampels=3", "model.opt=x", "kind.opt=x"):
        with pytest.raises(InvalidSetting, match=r"`changes` needs|names an unknown"):
            read_sweep(file, changes=[wrong])
    with pytest.raises(InvalidSetting, match="unknown label"):
        sweep.at(["sparsity=3:4"])


def test_small_form(tmp_path: Path) -> None:
    smoke = {"recipe": {"samples": 1}, "axes": {"sparsity": ["50%"]}}
    sweep = read_sweep(written(tmp_path, smoke=smoke), smoke=True)
    assert [(cell.recipe.samples, cell.recipe.sparsity) for cell in sweep.cells] == [(1, "50%")] * 2
    with pytest.raises(InvalidSetting, match="has no small form"):
        read_sweep(written(tmp_path), smoke=True)


def test_cells_come_out_as_single_runs_do(small: Callable[..., Sweep], tmp_path: Path) -> None:
    """Also the cells that take sensitivities, shares and dense figures from others."""
    sweep = small({"model": [small().cells[0].recipe.model], "sparsity": ["60%", "80%"]})
    outcomes = run_sweep(sweep, tmp_path / "out", quiet)
    alone = [prune_run(cell.recipe).report for cell in sweep.cells]
    single = [Outcome(cell, "finished", report) for cell, report in zip(sweep.cells, alone, strict=True)]
    assert told(outcomes) == told(single)


def test_what_the_dense_model_shows_is_found_once(
    small: Callable[..., Sweep], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = {"sensitivities": 0, "shares": 0, "perplexities": 0}
    each, share = stages.iterate_output_fisher, cached_allocation.allocate
    measured = measuring.measure_perplexity

    def count(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*given: Any, **named: Any) -> Any:
            calls[name] += 1
            return real(*given, **named)

        return counted

    monkeypatch.setattr(stages, "iterate_output_fisher", count("sensitivities", each))
    monkeypatch.setattr(cached_allocation, "allocate", count("shares", share))
    monkeypatch.setattr(measuring, "measure_perplexity", count("perplexities", measured))
    sweep = small(
        {"model": [small().cells[0].recipe.model], "gauss_newton_steps": [0, 1], "sparsity": ["60%", "80%"]}, method="sparsellm"
    )
    run_sweep(sweep, tmp_path / "out", quiet)
    assert calls == {"sensitivities": 1, "shares": 2, "perplexities": 1 + 4}


def test_finished_cells_stay_and_failed_ones_are_told(
    small: Callable[..., Sweep], tiny: dict[str, Path], tmp_path: Path, command: Command
) -> None:
    small({"model": {"good": str(tiny["opt"]), "bad": str(tmp_path / "none")}, "method": ["magnitude"]})
    file, out = tmp_path / "sweep.yaml", tmp_path / "out"
    done = command("sweep", file, out)
    assert done.exit_code == 1
    assert "1 of 2 cells failed, bad, magnitude first: There is no folder" in done.stderr
    assert "--retry" in done.stderr
    results = json.loads((out / "results.json").read_text(encoding="utf-8"))
    assert [(cell["name"], cell["state"]) for cell in results["cells"]] == [
        ("good, magnitude", "finished"),
        ("bad, magnitude", "failed"),
    ]
    first = {file: file.stat().st_mtime_ns for file in out.rglob("result.json")}
    assert len(first) == 1
    again = command("sweep", file, out)
    assert again.exit_code == 1
    assert "[1/2]" not in again.stderr
    assert "[2/2]" not in again.stderr
    (tmp_path / "none").symlink_to(tiny["llama"])
    last = command("sweep", file, out, "--retry")
    assert last.exit_code == 0, last.stderr
    assert {file: file.stat().st_mtime_ns for file in out.rglob("result.json") if file in first} == first
    assert not list(out.rglob("failed.json"))


def test_a_cell_that_was_cut_off_goes_on(small: Callable[..., Sweep], tmp_path: Path) -> None:
    """Interrupted in the middle of a cell, twice; finished blocks are not pruned again; the end is the same."""
    sweep = small()
    whole = told(run_sweep(sweep, tmp_path / "whole", quiet))
    seen: list[str] = []

    def stops_after(blocks: int) -> Callable[[object], None]:
        left = [blocks]

        def observe(event: object) -> None:
            if isinstance(event, BlockResult):
                left[0] -= 1
                if not left[0]:
                    raise KeyboardInterrupt

        return observe

    for blocks in (2, 5):
        with pytest.raises(KeyboardInterrupt):
            run_sweep(sweep, tmp_path / "out", stops_after(blocks))
        seen.append(",".join(x.state for x in read_outcomes(sweep, tmp_path / "out")))
    assert seen == ["open,open,open,open", "finished,open,open,open"]
    assert told(run_sweep(sweep, tmp_path / "out", quiet)) == whole
    assert not list((tmp_path / "out").rglob("model"))


def test_a_cell_that_another_process_has_is_left_to_it(small: Callable[..., Sweep], tmp_path: Path) -> None:
    sweep = small()
    run_sweep(sweep, tmp_path / "out", quiet, only=["model=llama", "method=magnitude"])
    with CellFolder(tmp_path / "out", sweep.cells[1]).taken() as mine:
        assert mine
        outcomes = run_sweep(sweep, tmp_path / "out", quiet)
    assert [x.state for x in outcomes] == ["finished", "at work", "finished", "finished"]
    assert [x.state for x in run_sweep(sweep, tmp_path / "out", quiet)] == ["finished"] * 4


def test_a_folder_that_another_process_is_just_making_a_sweeps(small: Callable[..., Sweep], tmp_path: Path) -> None:
    """It holds what that one has half written of the sweep's file; so does the folder of one that was killed then."""
    out = tmp_path / "out"
    out.mkdir()
    (out / "sweep.json.4711.partial").write_text('{"format": 1, "ti')
    outcomes = run_sweep(small(), out, quiet, only=["model=llama", "method=magnitude"])
    assert [x.state for x in outcomes if x.state != "open"] == ["finished"]


def test_a_foreign_folder_is_refused(small: Callable[..., Sweep], tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "thesis.tex").touch()
    with pytest.raises(OutputExists, match="is not a sweep's folder"):
        run_sweep(small(), out, quiet)


def test_models_are_kept_where_asked(tiny: dict[str, Path], tmp_path: Path) -> None:
    axes = {"model": {"opt": str(tiny["opt"])}, "method": ["magnitude"]}
    sweep = read_sweep(written(tmp_path, axes=axes, keep=True))
    run_sweep(sweep, tmp_path / "out", quiet)
    assert len(list((tmp_path / "out").glob("cells/*/model/model.safetensors"))) == 1


def with_figures(tmp_path: Path, dense: float | None = None, **parts: Any) -> tuple[Sweep, list[Outcome]]:
    """A sweep with made-up results, three seeds, and a paper's figure for one of its rows; of a dense model if it is given."""
    values = {"demo:opt": {"wanda": {"70%": 20.0}}}
    published = [
        {"source": "Someone 2024, Table 1", "measure": "perplexity", "axes": ["model", "method", "sparsity"], "values": values}
    ]
    axes = AXES | {"seed": [0, 1, 2]}
    sweep = read_sweep(written(tmp_path, axes=axes, published=published, **parts))
    outcomes = []
    before = {} if dense is None else {"dense": perplexity(dense, 0.25)}
    for number, cell in enumerate(sweep.cells):
        measured = {"te_xt": {**before, "pruned": perplexity(10.0 + number, 0.5)}}
        outcomes.append(Outcome(cell, "finished", made_up.report(perplexity=measured)))
    outcomes[-1] = Outcome(sweep.cells[-1], "failed", error="out of luck")
    return sweep, outcomes


def test_figures_beside_the_paper_s(tmp_path: Path) -> None:
    sweep, outcomes = with_figures(tmp_path)
    rows = table(sweep, outcomes)
    assert len(rows) == 4
    figure = rows[2].figures["perplexity te_xt"]  # seeds 6, 7, 8: mean 17, deviation 1
    assert (figure.value, figure.standard_error, figure.published, figure.ratio) == (
        17.0,
        pytest.approx(1 / 3**0.5),
        20.0,
        0.85,
    )
    assert rows[3].seeds == 2
    assert rows[3].trouble == "failed"
    assert rows[0].figures["perplexity te_xt"].published is None
    lines = list(csv.DictReader(to_csv(sweep, rows).splitlines()))
    beside = [line for line in lines if line["published"]]
    assert [(x["method"], x["sparsity"], x["published"], x["ratio"]) for x in beside] == [("wanda", "70%", "20.0", "0.85")]
    data = to_json(sweep, rows, outcomes)
    assert data["rows"][2]["figures"]["perplexity te_xt"]["source"] == "Someone 2024, Table 1"
    assert data["cells"][-1]["error"] == "out of luck"
    text = to_markdown(sweep, rows)
    assert "17.00 ± 0.58 (paper 20.00, ×0.85)" in text
    assert "over 2 to 3 seeds" in text
    assert "Paper: Someone 2024, Table 1." in text
    assert "demo:opt, wanda, 2:4 (failed)" in text


def test_tables_have_a_dense_line_and_the_change_from_it(tmp_path: Path) -> None:
    sweep, outcomes = with_figures(tmp_path, dense=8.0)
    rows = table(sweep, outcomes)
    head, lines = grid(sweep, rows)
    assert head == ["model", "method", "sparsity", "perplexity on te_xt"]
    assert lines[:2] == [["demo:opt", "dense", "", "8.00 ± 0.25"], ["demo:opt", "magnitude", "70%", "11.00 ± 0.58 (+37.5 %)"]]
    assert len(lines) == 1 + 4
    assert "17.00 ± 0.58 (+112 %; paper 20.00, ×0.85)" in to_markdown(sweep, rows)
    assert "\nPerplexity on te_xt of demo:opt.\nIn brackets: the change from the dense model.\n" in to_markdown(sweep, rows)
    line = next(x for x in csv.DictReader(to_csv(sweep, rows).splitlines()) if x["measure"] == "perplexity te_xt")
    assert (float(line["dense"]), float(line["change"])) == (8.0, 11 / 8 - 1)
    assert to_json(sweep, rows, outcomes)["rows"][0]["figures"]["perplexity te_xt"]["change"] == 11 / 8 - 1
    sweep, outcomes = with_figures(tmp_path, dense=8.0, columns="sparsity")
    assert grid(sweep, table(sweep, outcomes))[1][0] == ["demo:opt", "dense", "8.00 ± 0.25", "8.00 ± 0.25"]


def test_a_combination_is_best_only_beyond_the_error_of_the_difference(tmp_path: Path) -> None:
    """By the losses of the same sequences: 238 beside 240 with an error of 11 each is one or the other."""
    axes = {"model": ["demo:opt"], "method": ["alps", "wanda", "magnitude"], "sparsity": ["50%", "60%"]}
    sweep = read_sweep(written(tmp_path, axes=axes))
    losses = [5.0, 5.4, 5.8, 5.7]

    def figure(*changes: float, digest: str = "x") -> Figure:
        values = [loss + change for loss, change in zip(losses, changes, strict=True)]
        parts = Parts(digest, tuple(values))
        return Figure(math.exp(statistics.fmean(values)), 11.0, deviations=parts.deviations)

    same, noisy, surely = figure(0, 0, 0, 0), figure(0.05, -0.03, 0.02, 0.0), figure(0.2, 0.21, 0.2, 0.19)
    by_method = {("alps", "50%"): same, ("wanda", "50%"): noisy, ("magnitude", "50%"): surely}
    by_method |= {("alps", "60%"): surely, ("wanda", "60%"): same, ("magnitude", "60%"): figure(0.3, 0.3, 0.3, 0.31)}
    rows = [
        Row({"model": "demo:opt", "method": method, "sparsity": sparsity}, {"perplexity demo": x}, 1)
        for (method, sparsity), x in by_method.items()
    ]
    assert sweep_verdict(sweep, rows, read_outcomes(sweep, tmp_path))[1] == (
        "demo:opt, perplexity on demo: alps is lowest, with no difference measurable from wanda, at 50% (239); "
        "wanda is best at 60% (239)."
    )
    others = [replace(rows[0], figures={"perplexity demo": figure(0, 0, 0, 0, digest="other")}), rows[1], rows[2]]
    assert "by a difference of unknown error, at 50% (239)" in sweep_verdict(sweep, others, [])[1]
    assert "demo: alps at 50% (239)." in sweep_verdict(sweep, rows[:1], [])[1], "nothing is best of one"


OVER_ITEMS, ALONE = "over sequences or questions", Figure(3.0, 0.2)


@pytest.mark.parametrize(
    ("figures", "over"),
    [
        ([ALONE], OVER_ITEMS),
        ([Figure(3.0, 0.2, dense=ALONE)], OVER_ITEMS),
        ([Figure(3.0, 0.2, seeds=2)], "over 2 seeds"),
        ([Figure(3.0, 0.2, dense=ALONE, seeds=2), Figure(60.0)], f"over 2 seeds, of the dense model {OVER_ITEMS}"),
        ([Figure(3.0, 0.2, seeds=2), ALONE], f"over 2 seeds, of a single run {OVER_ITEMS}"),
        (
            [Figure(3.0, 0.2, dense=ALONE, seeds=2), Figure(3.0, 0.2, seeds=3), ALONE],
            f"over 2 to 3 seeds, of a single run and of the dense model {OVER_ITEMS}",
        ),
    ],
)
def test_the_legend_says_what_every_error_is_over(figures: list[Figure], over: str) -> None:
    """The dense model is measured once, and so is a row of which one cell is finished."""
    assert error_legend(figures)[0] == f"± is the standard error {over}."


def test_an_error_of_zero_is_shown() -> None:
    """Over seeds that change nothing, and over questions of which all are answered; one that is not known is not."""
    assert mean_over_seeds([Figure(10.0, 1.0), Figure(10.0, 1.0)]).measured == "10.00 ± 0.00"
    assert Figure(1.0, 0.0, share=True).measured == "100.0 ± 0.0 %"
    assert Figure(10.0).measured == "10.00"


def test_the_error_of_a_mean_over_seeds_has_both_parts() -> None:
    """Over the sequences that all seeds share, and over the seeds."""
    dense = Parts("x", (1.0, 2.0, 3.0)).deviations
    seeds = [Figure(10.0, 1.0, Figure(8.0, 0.5, deviations=dense), Parts("x", (1.2, 2.3, 3.1)).deviations)]
    seeds.append(replace(seeds[0], value=11.0, deviations=Parts("x", (1.4, 2.3, 3.3)).deviations))
    mean = mean_over_seeds(seeds)
    assert mean.difference
    assert mean.difference.change == 10.5 / 8 - 1
    deviations = [(0.3, 0.3, 0.2)[number] - 0.8 / 3 for number in range(3)]
    over_sequences = 10.5 / 8 * math.sqrt(sum(x * x for x in deviations) / 6)
    assert mean.difference.standard_error == pytest.approx(math.hypot(over_sequences, 0.5 / 8))


def test_the_dense_line_has_the_labels_on_which_it_depends(tmp_path: Path) -> None:
    """Of a sweep over sequence lengths there are several dense figures; without other axes the line is named in the first."""
    axes = {"sequence_length": [16, 32], "method": ["magnitude", "wanda"]}
    for columns, method, expected in (
        (None, ["magnitude", "wanda"], [["16", "dense", "16.00"], ["32", "dense", "32.00"]]),
        (None, ["wanda"], [["16", "dense", "16.00"], ["32", "dense", "32.00"]]),
        ("sequence_length", ["wanda"], [["dense", "16.00", "32.00"]]),
    ):
        sweep = read_sweep(
            written(tmp_path, recipe=SHARED | {"model": "demo:opt"}, axes=axes | {"method": method}, columns=columns)
        )
        rows = []
        for cell in sweep.cells:
            dense = Figure(float(cell.labels["sequence_length"]))
            rows.append(Row(cell.labels, {"perplexity demo": Figure(40.0, dense=dense)}, 1))
        assert [line for line in grid(sweep, rows)[1] if "dense" in line] == expected
    only_columns = read_sweep(
        written(tmp_path, recipe=SHARED | {"model": "demo:opt"}, axes={"samples": [1, 2]}, columns="samples")
    )
    rows = [Row(cell.labels, {"perplexity demo": Figure(3.0, dense=Figure(2.0))}, 1) for cell in only_columns.cells]
    assert grid(only_columns, rows) == (["", "1", "2"], [["dense", *["2.00"] * 2], ["pruned", *["3.00 (+50.0 %)"] * 2]])


def test_accuracies_are_in_per_cent(tmp_path: Path) -> None:
    figure = Figure(0.58, 0.01, dense=Figure(0.61, share=True), share=True, published=0.5)
    assert str(figure) == "58.0 ± 1.0 % (-3.0 points; paper 50.00 %, ×1.16)"


def test_an_axis_may_be_the_columns(tmp_path: Path) -> None:
    sweep, outcomes = with_figures(tmp_path, columns="sparsity")
    head, lines = grid(sweep, table(sweep, outcomes))
    assert head == ["model", "method", "70%", "2:4"]
    assert lines[1] == ["demo:opt", "wanda", "17.00 ± 0.58 (paper 20.00, ×0.85)", "19.50 ± 0.50"]


def test_a_published_figure_must_have_its_cell(tmp_path: Path) -> None:
    entry = {"source": "x", "measure": "perplexity", "axes": ["method"], "values": {"wnada": 1}}
    with pytest.raises(InvalidSetting, match="unknown label of 'method': 'wnada'"):
        read_sweep(written(tmp_path, published=[entry]))
    with pytest.raises(InvalidSetting, match=r"`published\.0\.measure`: field required"):
        read_sweep(written(tmp_path, published=[{"source": "x"}]))


def test_a_saved_sweep_is_the_same(tmp_path: Path, tiny: dict[str, Path]) -> None:
    entry = {"source": "x", "measure": "perplexity", "axes": ["method"], "values": {"magnitude": 3.5}}
    axes = {"model": {"opt": str(tiny["opt"])}, "method": ["magnitude"]}
    sweep = read_sweep(written(tmp_path, axes=axes, published=[entry], note="n"))
    run_sweep(sweep, tmp_path / "out", quiet)
    assert saved_sweep(tmp_path / "out") == sweep


def test_the_list_runs_nothing(tmp_path: Path, command: Command) -> None:
    done = command("sweep", written(tmp_path), tmp_path / "out", "--list")
    assert done.exit_code == 0
    assert done.stdout.count("open") >= 4
    assert not (tmp_path / "out").exists()


def test_the_list_is_of_the_selected_cells(tmp_path: Path, command: Command) -> None:
    """As without --list, an unknown axis or label is refused, and so is a selection without cells."""
    file = written(tmp_path)
    words = ("sweep", file, tmp_path / "out", "--list", "--only")
    done = command(*words, "method=wanda", "--only", "sparsity=2:4")
    assert (done.stdout.count("open"), done.stdout.count("magnitude")) == (1, 0)
    refused(command(*words, "method=wnada"), "unknown label of 'method': 'wnada'")
    refused(command(*words, "effort=fast"), "unknown axis: 'effort'")


def test_one_recipe_s_patterns_read_as_in_a_recipe(tmp_path: Path) -> None:
    """YAML would read 2:4 as a number to the base 60."""
    file = tmp_path / "s.yaml"
    file.write_text("recipe: {calibration: demo}\naxes: {model: ['demo:opt'], sparsity: [2:4, 3:4]}\n", encoding="utf-8")
    assert [cell.recipe for cell in read_sweep(file).cells] == [
        read_recipe({"model": "demo:opt", "calibration": "demo", "sparsity": pattern}) for pattern in ("2:4", "3:4")
    ]


@pytest.mark.long
def test_killed_twice_by_the_system_and_continued_by_two_processes(small: Callable[..., Sweep], tmp_path: Path) -> None:
    sweep = small({"model": {"opt": small().cells[0].recipe.model}, "method": ["sparsegpt", "alps"], "seed": [0, 1, 2]})
    whole = told(run_sweep(sweep, tmp_path / "whole", quiet))
    words = [sys.executable, "-m", "sparsellm", "sweep", tmp_path / "sweep.yaml", tmp_path / "out"]
    out = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    for wanted in (1, 3):  # killed once so many cells are finished, wherever it is in the next
        process = subprocess.Popen(words, **out)
        ends = time.monotonic() + 120
        while len(list((tmp_path / "out").glob("cells/*/result.json"))) < wanted and time.monotonic() < ends:
            time.sleep(0.02)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    both = [subprocess.Popen(words, **out) for _ in range(2)]
    assert [process.wait() for process in both] == [0, 0]
    assert told(read_outcomes(sweep, tmp_path / "out")) == whole


def test_a_narrow_console_keeps_every_column() -> None:
    """A table is printed as wide as it is: no column is dropped, no figure cut."""
    said = StringIO()
    made = text_table(["model", "method", *(f"{n}0%" for n in range(9))], [["a model", "a method", *["1,234.5 ± 67.8"] * 9]])
    show(Console(file=said, width=40), made)
    assert said.getvalue().split("\n")[1].split() == ["a", "model", "a", "method", *["1,234.5", "±", "67.8"] * 9]
