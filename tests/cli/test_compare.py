"""`report` of several runs: the values of their reports side by side, and refusals of what cannot be compared."""

from __future__ import annotations

import html
import json
import math
import re
import shlex
import shutil
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from typer.testing import Result

import sparsellm
from sparsellm.errors import InvalidSetting
from sparsellm.evaluation.differences import Difference, Parts
from sparsellm.pipeline.recovery_recipe import RecoveryRecipe
from sparsellm.pipeline.report import Perplexities, Report
from sparsellm.runtime.memory import human_bytes
from sparsellm.studies.compare import Comparison, _notes, read_comparison
from sparsellm.studies.page import comparison_page, verdict
from tests.made_up import accuracy

Command = Callable[..., Result]


@pytest.fixture(scope="module")
def runs(tiny: dict[str, Path], text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with four outputs, of which `llama` is of another model and `short` is measured on fewer sequences."""
    place = tmp_path_factory.mktemp("runs")
    for name, model, method, sparsity, limit in (
        ("half", "opt", "magnitude", "50%", 4),
        ("two-four", "opt", "wanda", "2:4", 4),
        ("short", "opt", "magnitude", "70%", 2),
        ("llama", "llama", "magnitude", "50%", 4),
    ):
        settings = {"calibration": str(text_file), "evaluate": str(text_file), "evaluate_limit": limit, "samples": 4}
        result = sparsellm.prune(tiny[model], method, sparsity, sequence_length=32, exclude=("k_proj",), **settings)
        result.save_pretrained(place / name)
    return place


@pytest.fixture(scope="module")
def sweep_folder(tiny: dict[str, Path], text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of three cells over the same model, one of which is not finished."""
    place = tmp_path_factory.mktemp("sweep")
    recipe = {"model": str(tiny["opt"]), "method": "magnitude", "evaluate": [str(text_file)], "evaluate_limit": 4}
    content = {"recipe": recipe | {"sequence_length": 32}, "axes": {"sparsity": ["50%", "60%", "2:4"]}}
    (place / "s.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
    sparsellm.sweep(place / "s.yaml", place / "cells", only={"sparsity": ["50%", "60%"]})
    return place / "cells"


def cells(comparison: Comparison, number: int) -> dict[str, list[str]]:
    """A table's lines by their first cell, the head under an empty name."""
    head, lines = list(comparison.tables().values())[number]
    return {"": head} | {line[0]: line[1:] for line in lines}


def test_the_table_holds_what_the_reports_say(runs: Path) -> None:
    comparison = sparsellm.report([runs / "half", runs / "two-four"])
    table = cells(comparison, 0)
    assert table[""] == ["run", "method", "sparsity", "zeros", "words.txt", "change, %", "error", "size"]
    reports = {name: sparsellm.load_report(runs / name) for name in ("half", "two-four")}
    for name, report in reports.items():
        ((_, pair),) = report.perplexity.items()
        method, sparsity, zeros, perplexity, change, error, size = table[name]
        assert (method, sparsity) == {"half": ("magnitude", "50%"), "two-four": ("wanda", "2:4")}[name]
        assert zeros == f"{100 * report.totals.sparsity_of_model:.1f} %"
        assert perplexity.startswith(f"{pair['pruned'].value:.1f} ± ")
        assert table["dense"][3].startswith(f"{pair['dense'].value:.1f} ± ")
        assert " ± " in change
        assert float(change.split()[0]) == pytest.approx(100 * (pair["pruned"].value / pair["dense"].value - 1), abs=0.06)
        errors = sorted(layer.error for layer in report.layers)
        assert len(errors) == 15
        assert error == f"{errors[7]:.3g}"
        assert size == human_bytes((runs / name / "model.safetensors").stat().st_size)
    errors_by_run = [{layer.name: layer.error for layer in report.layers} for report in reports.values()]
    ratios = {name: max(x[name] for x in errors_by_run) / min(x[name] for x in errors_by_run) for name in errors_by_run[0]}
    layers = cells(comparison, -1)
    assert layers.pop("") == ["layer", "half", "two-four"]
    assert list(layers) == sorted(ratios, key=lambda name: -ratios[name])[:5]
    assert layers[next(iter(layers))] == [f"{errors[next(iter(layers))]:.3g}" for errors in errors_by_run]


@pytest.mark.parametrize(("name", "sparsity"), [("half", "50%"), ("two-four", "2:4")])
def test_a_recovery_has_the_pattern_of_its_layers(runs: Path, name: str, sparsity: str) -> None:
    """Its recipe has no sparsity; 2:4 and 50 % are as many zeros."""
    read = read_comparison([runs / name, runs / "short"])
    recipe = RecoveryRecipe(model="opt", pruned=name, calibration="demo")
    report = replace(read.runs[0].report, recipe=recipe)
    comparison = replace(read, runs=(*read.runs, replace(read.runs[0], name="recovered", report=report)))
    table = cells(comparison, 0)
    assert table["recovered"][:2] == ["recovered", sparsity]
    assert table["recovered"][2:] == table[name][2:]
    assert verdict(report, verified=True).startswith("2:4 sparsity, ") == (sparsity == "2:4")


def made_up(comparison: Comparison, *runs: tuple[float, float]) -> Comparison:
    """The comparison with other losses: by run, how much the loss of every sequence rises, and that of every second one."""
    changed = []
    for run, (by, every_second) in zip(comparison.runs, runs, strict=True):
        measured: Perplexities = {}
        for text, pair in run.report.perplexity.items():
            for when, (rise, more) in {"dense": (0.0, 0.0), "pruned": (by, every_second)}.items():
                figure = pair[when]
                assert figure.parts
                losses = tuple(number + rise + more * (number % 2) for number in range(len(figure.parts.values)))
                changes = {"parts": replace(figure.parts, values=losses), "value": math.exp(statistics.fmean(losses))}
                measured.setdefault(text, {})[when] = replace(figure, **changes)
        changed.append(replace(run, report=replace(run.report, perplexity=measured)))
    return replace(comparison, runs=tuple(changed), notes=tuple(_notes(changed, [])))


def test_differences_have_the_paired_error(runs: Path) -> None:
    """The sequences' losses differ by far more than the models do, and the same sequences are hard for both."""
    read = read_comparison([runs / "half", runs / "two-four"])
    sure = made_up(read, (0.1, 0.001), (0.2, 0.002))
    error = 0.0005 * math.sqrt(4 / 3) / 2  # of the mean of 0, 0.001, 0, 0.001, their deviations being 0.0005
    change = math.expm1(0.1005)
    figure = next(iter(sure.runs[0].figures.values()))
    assert figure.difference
    assert figure.difference.change == pytest.approx(change)
    assert figure.difference.standard_error == pytest.approx((1 + change) * error)
    assert cells(sure, 0)["half"][4] == "+10.57 ± 0.03"
    assert cells(sure, 1) == {"": ["run", "words.txt"], "half": ["lowest"], "two-four": ["+10.57 ± 0.03 %"]}
    assert sure.notes == ()


def test_no_difference_is_claimed_within_its_error(runs: Path) -> None:
    """Neither between the runs nor from the dense model: 1 % and less with an error of 3 %."""
    unsure = made_up(read_comparison([runs / "half", runs / "two-four"]), (-0.05, 0.1), (-0.047, 0.0))
    assert cells(unsure, 1) == {
        "": ["run", "words.txt"],
        "half": ["no difference measurable (+4.8 ± 3.0 %)"],
        "two-four": ["reference"],
    }
    assert unsure.notes == ("No difference measurable from the dense model on words.txt: half.",)
    page = comparison_page(unsure)
    assert "no difference measurable (+4.8 ± 3.0" in page
    data = unsure.to_dict()["runs"][0]["figures"]["perplexity words.txt"]
    assert data["change_error"] == pytest.approx(0.0289, abs=1e-4)


@pytest.mark.parametrize(
    ("half", "two_four", "marks"),
    [
        ((0.1, 0.001), (0.2, 0.002), ["lowest", "+10.57 ± 0.03 %"]),
        ((0.1, 0.001), (0.1, 0.001), ["reference", "no difference measurable (+0.0 ± 0.0 %)"]),  # the same weights
        ((0.1, 0.0), (0.101, 0.1), ["reference", "no difference measurable (+5.2 ± 3.0 %)"]),
    ],
)
def test_the_best_is_called_so_only_if_it_differs(
    runs: Path, half: tuple[float, float], two_four: tuple[float, float], marks: list[str]
) -> None:
    read = made_up(read_comparison([runs / "half", runs / "two-four"]), half, two_four)
    table = cells(read, 1)
    assert [table["half"][0], table["two-four"][0]] == marks
    assert list(read.tables())[1] == "Differences between the runs"


def test_other_sequences_are_not_paired(runs: Path) -> None:
    """Of as many sequences of another text; and a report of an earlier version, without the losses."""
    read = made_up(read_comparison([runs / "half", runs / "two-four"]), (0.1, 0.001), (0.2, 0.002))
    for parts in (Parts("of another text", (0.0, 1.0, 2.0, 3.0)), None):
        ((text, pair),) = read.runs[0].report.perplexity.items()
        report = replace(read.runs[0].report, perplexity={text: {**pair, "pruned": replace(pair["pruned"], parts=parts)}})
        other = replace(read, runs=(replace(read.runs[0], report=report), read.runs[1]))
        assert [cells(other, 1)[name] for name in ("half", "two-four")] == [["reference"], ["+10.6 %, error unknown"]]
        assert next(iter(other.runs[0].figures.values())).difference == Difference(pytest.approx(math.expm1(0.1005)), None)
        assert list(_notes(other.runs, []))[-1].startswith("Difference without a known error")


def test_other_sequences_are_other_columns(runs: Path) -> None:
    comparison = read_comparison([runs / "half", runs / "short"])
    table = cells(comparison, 0)
    assert table[""][4:8] == ["words.txt, 4 x 32", "change, %", "words.txt, 2 x 32", "change, %"]
    assert table["half"][5:7] == table["short"][3:5] == ["-", "-"]
    assert comparison.notes[0].startswith("The perplexity on words.txt was measured on other sequences in other columns")


def test_other_texts_of_one_name_are_said(runs: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(runs / "half", tmp_path / "other"))
    content = json.loads((other / "sparsellm.json").read_text(encoding="utf-8"))
    next(iter(content["perplexity"].values()))["dense"]["value"] *= 1.02
    (other / "sparsellm.json").write_text(json.dumps(content), encoding="utf-8")
    assert read_comparison([runs / "half", other]).notes[0].endswith(": these are different texts.")


def test_a_sweep_and_an_output(runs: Path, sweep_folder: Path) -> None:
    """A line for each finished cell; the cells that are not finished are named."""
    comparison = read_comparison([sweep_folder, runs / "two-four"])
    table = cells(comparison, 0)
    assert list(table)[2:] == ["cells: 50%", "cells: 60%", "two-four"]
    assert table["cells: 60%"][-1] == "-"
    assert comparison.notes[-1] == "Not finished and left out: cells: 2:4 (open)."


def test_the_command_prints_and_writes(runs: Path, tmp_path: Path, command: Command) -> None:
    """Tables within 80 columns; the same values as JSON; and a page that loads nothing."""
    printed = command("report", runs / "half", runs / "two-four", "--output", tmp_path / "new" / "page.html")
    assert printed.exit_code == 0, printed.stderr
    lines = printed.stdout.splitlines()
    assert lines[0].startswith("Pruned from opt")
    assert max(len(line.rstrip()) for line in lines if "Wrote" not in line) <= 80
    page = (tmp_path / "new" / "page.html").read_text(encoding="utf-8")
    assert "two-four" in page
    assert "Layers whose errors differ most" in page
    data = json.loads(command("report", runs / "half", runs / "two-four", "--json").stdout)
    assert [run["name"] for run in data["runs"]] == ["half", "two-four"]
    saved = sparsellm.load_report(runs / "half")
    pruned = next(iter(saved.perplexity.values()))["pruned"]
    assert data["runs"][0]["figures"]["perplexity words.txt"]["value"] == pruned.value
    assert data["runs"][0]["bytes"] == (runs / "half" / "model.safetensors").stat().st_size


def shown_command(page: Path) -> list[str]:
    """The words of the command with which a page says that it is made again."""
    found = re.search(r"<h2>Run it again</h2>\s*<pre>(.*?)</pre>", page.read_text(encoding="utf-8"), re.DOTALL)
    assert found
    return shlex.split(html.unescape(found[1]))


@pytest.mark.parametrize("form", ["relative", "absolute", "of one name", "a sweep", "with spaces"])
def test_the_command_of_the_page_can_be_run(
    form: str, runs: Path, sweep_folder: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it stands, where the comparison was run; of a sweep it names the folder, not its cells."""
    monkeypatch.chdir(tmp_path)
    for name, source in (("one/half", "half"), ("other/two-four", "two-four"), ("other/half", "two-four"), ("a b", "half")):
        shutil.copytree(runs / source, tmp_path / name)
    given: dict[str, list[object]] = {
        "relative": ["one/half", "other/two-four"],
        "absolute": [runs / "half", runs / "two-four"],
        "of one name": ["one/half", "other/half"],
        "a sweep": [sweep_folder, "other/two-four"],
        "with spaces": ["a b", "./other/two-four"],
    }
    first = command("report", *given[form], "--output", "page.html")
    assert first.exit_code == 0, first.stderr
    program, *words = shown_command(tmp_path / "page.html")
    again = command(*words)
    assert program == "sparsellm"
    assert again.exit_code == 0, again.stderr
    assert again.stdout == first.stdout.replace("Wrote page.html.\n", "")


def test_metrics_that_are_no_fractions_are_not_in_per_cent(runs: Path) -> None:
    """A task's value is shown as its report shows it."""
    comparison = read_comparison([runs / "half", runs / "two-four"])
    tasks = {
        "boolq": {"pruned": accuracy(0.5)},
        "wikitext": {"pruned": accuracy(12.5, metric="word_perplexity")},
    }
    first = replace(comparison.runs[0], report=replace(comparison.runs[0].report, tasks=tasks))
    head, lines = next(iter(replace(comparison, runs=(first, comparison.runs[1])).tables().values()))
    shown = dict(zip(head, lines[1], strict=False))
    assert (shown["boolq"], shown["wikitext"]) == ("50.00 %", "12.50")


def test_what_cannot_be_compared_is_refused(runs: Path, sweep_folder: Path, tmp_path: Path, command: Command) -> None:
    unfinished = tmp_path / "unfinished"
    unfinished.mkdir()
    shutil.copy(sweep_folder / "sweep.json", unfinished)
    refused = command("report", runs / "half", runs / "llama", "--output", tmp_path / "page.html")
    assert refused.exit_code == 1
    assert (
        refused.stderr == "error: half and llama are pruned from different models, opt and llama. Compare runs of one model.\n"
    )
    assert not (tmp_path / "page.html").exists()
    for folders, message in (
        ([runs / "half"], "A comparison is of two folders or more, got 1"),
        ([runs / "half", unfinished], r"There is nothing to compare: 1 finished run\."),
        ([runs / "half", runs / "half"], "is named twice"),
        ([runs / "half", tmp_path / "none"], "does not exist"),
        ([runs / "half", runs], "holds no run or sweep"),
    ):
        with pytest.raises(InvalidSetting, match=message):
            read_comparison(folders)


def test_what_one_run_and_several_have_apart(runs: Path, tmp_path: Path, command: Command) -> None:
    """Plots are of one run; a list is of several; a second run is not the page to write."""
    half, other = runs / "half", runs / "two-four"
    with pytest.raises(InvalidSetting, match="A comparison has no plots for `figures`"):
        sparsellm.report([half, other], figures=tmp_path / "figures")
    done = command("report", half, other, "--figures", tmp_path / "figures", "--output", tmp_path / "page.html")
    assert done.exit_code == 1
    assert done.stderr == "error: A comparison has no plots for --figures. Leave it out, or report one run at a time.\n"
    assert list(tmp_path.iterdir()) == []
    for given in ([half], (half,), []):
        with pytest.raises(InvalidSetting, match=rf"two folders or more, got {len(given)}\. Pass one alone for its page"):
            sparsellm.report(given)
    with pytest.raises(InvalidSetting, match=r"`output` must name an HTML file, got the folder .*; `runs` takes all folders"):
        sparsellm.report(half, other)
    done = command("report", half, "--output", other)
    assert done.exit_code == 1
    assert done.stderr.endswith("Name a file to write; RUN takes all folders to compare.\n")
    result = sparsellm.prune("demo:opt", "magnitude", "50%")
    with pytest.raises(InvalidSetting, match="got Result"):
        sparsellm.report([half, result])  # type: ignore[call-overload]


def test_the_values_of_one_as_json(runs: Path, sweep_folder: Path, tmp_path: Path, command: Command) -> None:
    """Those that its files hold, without a page unless one is named; a damaged report is refused."""
    before = set(runs.iterdir()) | set(sweep_folder.parent.iterdir())
    printed = json.loads(command("report", runs / "half", "--json").stdout)
    assert printed == json.loads((runs / "half" / "sparsellm.json").read_text(encoding="utf-8"))
    printed = json.loads(command("report", sweep_folder, "--json").stdout)
    assert printed == json.loads((sweep_folder / "results.json").read_text(encoding="utf-8"))
    assert set(runs.iterdir()) | set(sweep_folder.parent.iterdir()) == before
    named = command("report", runs / "half", "--json", "--output", tmp_path / "page.html")
    assert json.loads(named.stdout)["recipe"]["sparsity"] == "50%"
    assert (tmp_path / "page.html").is_file()
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "sparsellm.json").write_text("{}", encoding="utf-8")
    refused = command("report", tmp_path / "damaged", "--json")
    assert refused.exit_code == 1
    assert "is damaged" in refused.stderr


def test_models_of_one_name_and_other_sizes_differ(runs: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(runs / "half", tmp_path / "other"))
    content = json.loads((other / "sparsellm.json").read_text(encoding="utf-8"))
    content["totals"]["parameters"] += 1
    (other / "sparsellm.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(InvalidSetting, match="both called opt and of different size"):
        read_comparison([runs / "half", other])
    assert isinstance(read_comparison([runs / "half", runs / "short"]).runs[0].report, Report)
