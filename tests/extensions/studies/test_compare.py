"""`report` of several runs: differences with their errors, and refusals of what cannot be compared.

The page and its tables are in tests/pages/comparison.html.
"""

from __future__ import annotations

import html
import json
import math
import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import Result

import sparsellm
from sparsellm.errors import InvalidSetting
from sparsellm.evaluation.differences import Difference
from sparsellm.extensions.studies.compare import Comparison, read_comparison
from sparsellm.extensions.studies.figures import style
from sparsellm.extensions.studies.plots import DENSE_MODEL, size_plots
from sparsellm.extensions.studies.sweep_runner import read_outcomes, saved_sweep
from sparsellm.extensions.studies.tables import write_tables
from sparsellm.recipes.recipe import Recipe
from tests import made_up

Command = Callable[..., Result]


DENSE = (0.0, 1.0, 2.0, 3.0)
"""Losses of the dense model's sequences, which differ by far more than those of two models."""


def run_of(folder: Path, *rises: float, model: str = "opt", digest: str = "x") -> Path:
    """A run in whose model the losses rise by so much, in turn over the sequences."""
    losses = [loss + rises[number % len(rises)] for number, loss in enumerate(DENSE)]
    after = made_up.measured(*losses)
    pair = {"dense": made_up.measured(*DENSE), "pruned": replace(after, parts=replace(after.parts, digest=digest))}
    recipe = Recipe(model=model, method="magnitude", sparsity="50%")
    inputs = {model: {"model.safetensors": "x"}}
    layers = made_up.blocks("50%", shape=made_up.SHAPE)
    return made_up.written(
        folder, made_up.report(recipe, perplexity={"demo": pair}, inputs=inputs, blocks=layers, **made_up.SIZE)
    )


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """A folder with two runs of one model, and one of another."""
    for name, rise, model in (("half", 0.1, "opt"), ("two-four", 0.2, "opt"), ("llama", 0.1, "llama")):
        run_of(tmp_path / "runs" / name, rise, rise + 0.01 * rise, model=model)
    return tmp_path / "runs"


@pytest.fixture
def sweep_folder(tmp_path: Path) -> Path:
    """A sweep with a cell that failed, and one that is open."""
    return made_up.a_sweep(tmp_path / "made")


def cells(comparison: Comparison, number: int) -> dict[str, list[str]]:
    """A table's lines by their first cell, the head under an empty name."""
    head, lines = list(comparison.tables().values())[number]
    return {"": head} | {line[0]: line[1:] for line in lines}


def test_differences_have_the_paired_error(runs: Path) -> None:
    """The same sequences are hard for both models."""
    sure = read_comparison([runs / "half", runs / "two-four"])
    error = 0.0005 * math.sqrt(4 / 3) / 2  # of the mean of 0, 0.001, 0, 0.001, their deviations being 0.0005
    change = math.expm1(0.1005)
    figure = next(iter(sure.runs[0].figures.values()))
    assert figure.difference
    assert figure.difference.change == pytest.approx(change)
    assert figure.difference.standard_error == pytest.approx((1 + change) * error)
    assert cells(sure, 0)["half"][3] == "+10.57 ± 0.03"
    data = sure.to_dict()["runs"][0]["figures"]["perplexity demo"]
    assert data["change_error"] == pytest.approx((1 + change) * error)


@pytest.mark.parametrize(
    ("half", "two_four", "marks"),
    [
        ((0.1, 0.101), (0.2, 0.202), ["lowest", "+10.57 ± 0.03 %"]),
        ((0.1, 0.101), (0.1, 0.101), ["reference", "no difference measurable (+0.0 ± 0.0 %)"]),  # the same weights
        ((0.1, 0.1), (0.101, 0.201), ["reference", "no difference measurable (+5.2 ± 3.0 %)"]),
        ((-0.05, 0.05), (-0.047, -0.047), ["no difference measurable (+4.8 ± 3.0 %)", "reference"]),
    ],
)
def test_the_best_is_called_so_only_if_it_differs(
    half: tuple[float, float], two_four: tuple[float, float], marks: list[str], tmp_path: Path
) -> None:
    read = read_comparison([run_of(tmp_path / "half", *half), run_of(tmp_path / "two-four", *two_four)])
    table = cells(read, 1)
    assert [table["half"][0], table["two-four"][0]] == marks
    assert ("no difference measurable from" in read.verdict) == (marks != ["lowest", "+10.57 ± 0.03 %"])
    assert read.verdict.startswith("half has" if half[0] >= 0 else "two-four has")
    unsure = [note for note in read.notes if note.startswith("No difference measurable from the dense model on demo: half")]
    assert bool(unsure) == (half[0] < 0)


def test_other_sequences_are_not_paired(runs: Path, tmp_path: Path) -> None:
    """Of as many sequences of another text: the difference has no error, and the notes say so."""
    other = read_comparison([run_of(tmp_path / "other", 0.1, 0.101, digest="of another text"), runs / "two-four"])
    assert [cells(other, 1)[name] for name in ("other", "two-four")] == [["reference"], ["+10.6 %, error unknown"]]
    assert next(iter(other.runs[0].figures.values())).difference == Difference(pytest.approx(math.expm1(0.1005)), None)
    assert other.notes[-1].startswith("Difference without a known error")


def test_other_texts_of_one_name_are_said(runs: Path) -> None:
    other = Path(shutil.copytree(runs / "half", runs / "other"))
    content = json.loads((other / "sparsellm.json").read_text(encoding="utf-8"))
    content["perplexity"]["demo"]["dense"]["value"] *= 1.02
    (other / "sparsellm.json").write_text(json.dumps(content), encoding="utf-8")
    assert any(note.endswith(": these are different texts.") for note in read_comparison([runs / "half", other]).notes)


def test_a_chart_has_the_dense_model_and_each_run_that_was_measured_on_its_text(runs: Path, tmp_path: Path) -> None:
    """With its packed bytes; a run on other texts is named in a note, and is in no chart of these."""
    pair = {"words.txt": {"dense": made_up.measured(*DENSE), "pruned": made_up.measured(*DENSE)}}
    recipe = Recipe(model="opt", method="magnitude", sparsity="50%")
    other = made_up.written(tmp_path / "other", made_up.report(recipe, perplexity=pair, **made_up.SIZE))
    read = read_comparison([runs / "half", runs / "two-four", other])
    with style():
        (plot,) = size_plots(read)
    assert [row[0] for row in plot.rows] == ["half", "two-four", DENSE_MODEL]
    assert plot.rows[-1][-1] == "2.0 MiB"
    assert {text.get_text() for text in plot.figure.axes[0].texts} == {"half", "two-four", DENSE_MODEL}
    named = [note for note in read.notes if "tells nothing of" in note]
    assert [note.split("tells nothing of ")[1] for note in named] == ["other.", "half and two-four."]


@pytest.mark.parametrize(("method", "compared"), [("wanda", True), ("sparsellm", False)])
def test_errors_with_different_targets_are_not_compared(method: str, compared: bool, runs: Path, tmp_path: Path) -> None:
    """Those of the default are relative to the dense stream: no table of layers, and a note that says so."""
    recipe = Recipe(model="opt", method=method, sparsity="50%", calibration="demo")
    other = made_up.written(tmp_path / "other", made_up.report(recipe, blocks=made_up.blocks("50%", error=0.3)))
    read = read_comparison([runs / "half", other])
    assert ("Layers whose errors differ most" in read.tables()) == compared
    assert any("dense stream" in note for note in read.notes) != compared


def test_a_sweep_and_an_output(sweep_folder: Path, tmp_path: Path) -> None:
    """A line for each finished cell; the cells that are not finished are named."""
    comparison = read_comparison([sweep_folder, run_of(tmp_path / "run", 0.1, model=made_up.MODEL)])
    finished = list(cells(comparison, 0))[2:]
    assert len(finished) == 10 + 1
    assert finished[0] == "out: opt, 50%, seed 0, alpha 0.1, beta 0.1"
    assert re.fullmatch(r"Not finished and left out: out: none.*\(failed\), out: none.*\(open\)\.", comparison.notes[-1])


def test_the_command_prints_and_writes(runs: Path, tmp_path: Path, command: Command) -> None:
    """Tables within 80 columns; the same values as JSON; and a page that loads nothing."""
    printed = command("report", runs / "half", runs / "two-four", "--output", tmp_path / "new" / "page.html")
    assert printed.exit_code == 0, printed.stderr
    lines = printed.stdout.splitlines()
    assert lines[0] == read_comparison([runs / "half", runs / "two-four"]).verdict
    assert lines[2].startswith("Pruned from opt")
    assert max(len(line.rstrip()) for line in lines[1:] if "Wrote" not in line) <= 80
    page = (tmp_path / "new" / "page.html").read_text(encoding="utf-8")
    assert "two-four" in page
    data = json.loads(command("report", runs / "half", runs / "two-four", "--json").stdout)
    assert [run["name"] for run in data["runs"]] == ["half", "two-four"]
    assert data["runs"][0]["figures"]["perplexity demo"]["value"] == pytest.approx(math.exp(1.6005))
    assert data["runs"][0]["sizes"]["packed"] < data["runs"][0]["sizes"]["written"] == made_up.SIZE["weight_bytes"]


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
    run_of(tmp_path / "as in the sweep", 0.1, model=made_up.MODEL)
    for name, source in (("one/half", "half"), ("other/two-four", "two-four"), ("other/half", "two-four"), ("a b", "half")):
        shutil.copytree(runs / source, tmp_path / name)
    given: dict[str, list[object]] = {
        "relative": ["one/half", "other/two-four"],
        "absolute": [runs / "half", runs / "two-four"],
        "of one name": ["one/half", "other/half"],
        "a sweep": [sweep_folder, "as in the sweep"],
        "with spaces": ["a b", "./other/two-four"],
    }
    first = command("report", *given[form], "--output", "page.html")
    assert first.exit_code == 0, first.stderr
    program, *words = shown_command(tmp_path / "page.html")
    again = command(*words)
    assert program == "sparsellm"
    assert again.exit_code == 0, again.stderr
    assert again.stdout == first.stdout.replace("Wrote page.html.\n", "")


@pytest.mark.parametrize(
    ("folders", "named"),
    [
        ((), "0 folders"),
        (("half",), "1 folder "),
        (("half", "unfinished"), "1 finished run"),
        (("half", "half"), "half"),
        (("half", "none"), "none"),
        (("half", "."), "runs"),
        (("half", "llama"), "half and llama .* name is opt .* llama"),
        (("half", "larger"), "half and larger .* size is"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    folders: tuple[str, ...], named: str, runs: Path, sweep_folder: Path, tmp_path: Path
) -> None:
    (runs / "unfinished").mkdir()
    shutil.copy(sweep_folder / "sweep.json", runs / "unfinished")
    shutil.copytree(runs / "half", runs / "larger")
    content = json.loads((runs / "larger" / "sparsellm.json").read_text(encoding="utf-8"))
    content["totals"]["parameters"] += 1
    (runs / "larger" / "sparsellm.json").write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(InvalidSetting, match=named):
        sparsellm.report([runs / name for name in folders], tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()


def test_what_one_run_and_several_have_apart(runs: Path, tmp_path: Path, command: Command) -> None:
    """Plots are of one run; a list is of several; a second run is not the page to write."""
    half, other = runs / "half", runs / "two-four"
    with pytest.raises(InvalidSetting, match="`figures`"):
        sparsellm.report([half, other], figures=tmp_path / "figures")
    done = command("report", half, other, "--figures", tmp_path / "figures", "--output", tmp_path / "page.html")
    assert done.exit_code == 1
    assert "--figures" in done.stderr
    assert list(tmp_path.iterdir()) == [runs]
    with pytest.raises(InvalidSetting, match=r"two-four is a folder.*`runs`"):
        sparsellm.report(half, other)
    done = command("report", half, "--output", other)
    assert done.exit_code == 1
    assert "; RUN " in done.stderr
    with pytest.raises(InvalidSetting, match="got Report"):
        sparsellm.report([half, made_up.report()])  # type: ignore[type-var]


def test_the_values_of_one_as_json(runs: Path, sweep_folder: Path, tmp_path: Path, command: Command) -> None:
    """Those that its files hold, without a page unless one is named; a damaged report is refused."""
    sweep = saved_sweep(sweep_folder)
    write_tables(sweep, read_outcomes(sweep, sweep_folder), sweep_folder)
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
