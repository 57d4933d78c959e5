"""Sweeps: what a file multiplies out to, what is refused, and that cells are durable, shared and taken one by one."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import Result

from sparsellm.errors import InvalidSetting, OutputExists
from sparsellm.extensions.studies.run_again import sweep_yaml
from sparsellm.extensions.studies.sweep_file import Sweep, read_sweep
from sparsellm.extensions.studies.sweep_runner import CellFolder, Outcome, read_outcomes, run_sweep, saved_sweep
from sparsellm.extensions.studies.tables import to_markdown
from sparsellm.methods import BlockResult
from sparsellm.pipeline import cached_allocation, measuring
from sparsellm.pipeline import dense_results as stages
from sparsellm.pipeline.prune import prune_run
from sparsellm.recipes.file import read_recipe
from sparsellm.recipes.path_names import PathNames
from tests.core.cli.test_bad_input import refused

Command = Callable[..., Result]
AXES = {"model": ["demo:opt"], "method": ["magnitude", "wanda"], "sparsity": [0.7, "2:4"]}
FIELDS = {"model": "demo:opt", "calibration": "demo"}
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
    variants = {"paper": {"method": "algorithm1"}, "ours": {"method": "sparsellm"}}
    sweep = read_sweep(written(tmp_path, axes={"model": ["demo:opt"], "variant": variants}))
    assert [cell.recipe.method for cell in sweep.cells] == ["algorithm1", "sparsellm"]


PUBLISHED = {"source": "x", "measure": "perplexity", "axes": ["method"]}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"axes": {"method": []}}, "'method'"),
    ({"axes": {"method": "wanda"}}, "'method'.*'wanda'"),
    ({"axes": {}}, "`axes`"),
    ({"axes": None}, "`axes`"),
    ({"axes": {"sparsity": ["70%", 0.7]}}, "'sparsity'.*'70%'"),
    ({"axes": {"seed": {"one": 0, "another": 0}, "model": ["demo:opt"]}}, "'one, demo:opt'.*'another, demo:opt'"),
    ({"axes": {"metod": ["wanda"]}}, "'metod'.*'method'"),
    ({"axes": {"a": {"x": {"seed": 1}}, "seed": [2], "model": ["demo:opt"]}}, "'seed'"),
    ({"axes": {"method": ["wanda", "sparsgpt"], "model": ["demo:opt"]}}, "'sparsgpt'.*'sparsegpt'"),
    ({"recipe": FIELDS | {"effort": "fast"}, "axes": {"method": ["wanda", "magnitude"]}}, "`effort`.*wanda"),
    ({"recipe": FIELDS | {"sparsity": ["50%", "60%"]}, "axes": {"seed": [0, 1]}}, "`sparsity:`.*'60%'.*`axes:`"),
    ({"recipe": None, **FIELDS, "method": ["wanda", "alps"], "axes": {"seed": [0, 1]}}, "`method:`.*'alps'.*`axes:`"),
    ({"recipe": FIELDS | {"samples": [1, 2]}, "axes": {"seed": [0, 1]}}, r"`samples:`.*\[1, 2\].*`axes:`"),
    ({"recipe": "x"}, "`recipe`.*'x'"),
    ({"samples": 3}, "`samples:`.*`recipe:`"),
    ({"modle": "demo:opt"}, "'modle'.*'model'"),
    ({"axis": {}}, "'axis'.*'axes'"),
    ({"leave_out": [{"model": "demo:opt"}]}, "`leave_out:`"),
    ({"leave_out": [{"modle": "x"}]}, "`leave_out:`.*'modle'"),
    ({"columns": "speed"}, "`columns:`.*'speed'"),
    ({"published": [PUBLISHED | {"values": {"wnada": 1}}]}, "`published:`.*'method': 'wnada'"),
    ({"published": [PUBLISHED | {"values": {"wanda": "1"}}]}, "`published:`.*'wanda'.*'1'"),
    ({"published": [PUBLISHED | {"values": {"wanda": 1}, "axes": ["method", "model"]}]}, "`published:`.*'wanda'.*1"),
    ({"published": [{"source": "x"}]}, r"`published\.0\.measure`"),
]


@pytest.mark.parametrize(("parts", "named"), REFUSED)
def test_what_cannot_be_is_refused_at_once(parts: dict[str, Any], named: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidSetting, match=named):
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


@pytest.mark.parametrize(
    ("shared", "axes", "names", "ignored"),
    [
        (
            {"effort": "fast"},
            {"method": ["wanda", "sparsellm", "sparsegpt"]},
            ["wanda", "sparsellm", "sparsegpt"],
            "wanda and sparsegpt .* `effort`",
        ),
        (
            {},
            {"method": ["wanda", "sparsellm"], "effort": ["fast", "standard"]},
            ["wanda, fast", "sparsellm, fast", "sparsellm, standard"],
            "wanda .* `effort`.* one cell",
        ),
    ],
)
def test_settings_that_a_method_does_not_have_are_left_out_of_its_cells(
    shared: dict[str, Any], axes: dict[str, Any], names: list[str], ignored: str, tmp_path: Path, command: Command
) -> None:
    file = written(tmp_path, recipe=FIELDS | shared, axes=axes)
    sweep = read_sweep(file)
    assert [cell.name for cell in sweep.cells] == names
    assert re.search(ignored, sweep.ignored)
    done = command("sweep", file, tmp_path / "out", "--list")
    assert done.stdout.count(sweep.ignored) == 1
    assert to_markdown(sweep, []).count(sweep.ignored) == 1
    again = tmp_path / "again.yaml"
    again.write_text(sweep_yaml(sweep, PathNames()), encoding="utf-8")
    assert read_sweep(again).cells == sweep.cells


def test_fields_of_a_recipe_may_stand_at_the_top(tmp_path: Path) -> None:
    parts = {"axes": {"sparsity": ["50%"]}, "smoke": {"samples": 1}}
    inside = read_sweep(written(tmp_path, recipe=FIELDS | {"method": "wanda", "samples": 3}, **parts))
    beside = read_sweep(written(tmp_path, recipe=None, **FIELDS, method="wanda", samples=3, **parts))
    assert beside == inside
    assert read_sweep(tmp_path / "sweep.yaml", smoke=True).cells[0].recipe.samples == 1


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
    sweep = small({"model": [small().cells[0].recipe.model], "rounds": [0, 1], "sparsity": ["60%", "80%"]}, method="sparsellm")
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
