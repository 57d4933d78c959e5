"""The progress of whole commands: the same stages as expected, in a pipe and in Python."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoModelForCausalLM
from typer.testing import Result

import sparsellm
from sparsellm.observers.events import Event, Schedule, Stage
from sparsellm.texts.samples import test_windows

Command = Callable[..., Result]
SMALL = ("--samples", 4, "--sequence-length", 32)


@pytest.fixture(autouse=True)
def fine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain line for every event, with all of its parts."""
    monkeypatch.setattr("sparsellm.observers.display.PLAIN_SHARE", 0.0)
    monkeypatch.setattr("sparsellm.observers.display.PLAIN_LEAST", 0.0)
    monkeypatch.setenv("COLUMNS", "200")


LINE = re.compile(
    r"(\[(?P<run>\d+)/(?P<runs>\d+)\] )?((?P<name>[^:]+): )?((?P<number>\d+)/(?P<stages>\d+) )?(?P<stage>.+?)"
    r"(, (?P<unit>\w+) (?P<done>\d+)/(?P<total>\d+))?(  (?P<percent>\d+)%)?  \w+(, (?P<left>\S+) left)?  memory \d+%.*"
)
"""A line that describes a stage, as in docs/large-models.md."""


def states(text: str) -> list[dict[str, Any]]:
    """The parts of the lines that describe stages; those that a line leaves out are None."""
    found = [match.groupdict() for match in map(LINE.fullmatch, text.splitlines()) if match]
    return [{name: int(x) if x and x.isdigit() else x for name, x in fields.items()} for fields in found]


def check(text: str) -> list[str]:
    """Check that stages are numbered without gaps up to the last one, and that their units rise; return their names."""
    shown = [fields for fields in states(text) if fields["number"]]
    names = list(dict.fromkeys((fields["run"], fields["number"], fields["stage"]) for fields in shown))
    for current in dict.fromkeys(name[0] for name in names):
        numbers = [number for run_number, number, _ in names if run_number == current]
        assert numbers == list(range(1, len(numbers) + 1))
        assert {fields["stages"] for fields in shown if fields["run"] == current} == {len(numbers)}
    for name in names:
        of_stage = [fields for fields in shown if (fields["run"], fields["number"], fields["stage"]) == name]
        done = [fields["done"] or 0 for fields in of_stage]
        assert done == sorted(done)
        if of_stage[-1]["total"]:
            assert done[-1] == of_stage[-1]["total"]
    return [stage for _, _, stage in names]


@pytest.mark.parametrize("options", [("--method", "sparsellm"), ("--method", "wanda", "--offload")])
def test_every_stage_of_a_run_is_expected(
    options: tuple[str, ...], tiny: dict[str, Path], text_file: Path, tmp_path: Path, command: Command
) -> None:
    """In memory and block by block: sequences are counted while measuring, layers while pruning."""
    words = (*SMALL, *options, "--calibration", text_file, "--evaluate", text_file, "--evaluate-limit", 8)
    ran = command("prune", tiny["llama"], tmp_path / "out", *words, "--json")
    assert ran.exit_code == 0, ran.stderr
    before = ["estimating sensitivity", "choosing per-layer sparsity (fisher)"] if "sparsellm" in options else []
    assert check(ran.stderr) == ["loading", "measuring dense", *before, "pruning", "measuring pruned"]
    units = {(fields["stage"], fields["unit"], fields["total"]) for fields in states(ran.stderr) if fields["total"]}
    assert {("measuring dense", "sequence", 8), ("pruning", "layer", 21), ("measuring pruned", "sequence", 8)} <= units
    assert json.loads(ran.stdout)["output"] == str(tmp_path / "out")


@pytest.mark.parametrize("scope", ["model", "block"])
def test_recovery_is_expected(scope: str, tiny: dict[str, Path], text_file: Path, tmp_path: Path, command: Command) -> None:
    words = ("--calibration", text_file, *SMALL)
    assert command("prune", tiny["llama"], tmp_path / "pruned", "--method", "magnitude", "--quiet").exit_code == 0
    run_words = (tmp_path / "pruned", tmp_path / "out", "--against", tiny["llama"], "--scope", scope, "--steps", 3)
    ran = command("recover", *run_words, *words)
    assert ran.exit_code == 0, ran.stderr
    model = ["generating text with the dense model", "computing the dense model's predictions"]
    expected = (
        [*model, "recovering", "training the whole model"] if scope == "model" else ["estimating sensitivity", "recovering"]
    )
    assert check(ran.stderr) == ["loading", *expected]


def test_evaluation_counts_sequences(tiny: dict[str, Path], text_file: Path, command: Command) -> None:
    words = ("--text", text_file, "--sequence-length", 32, "--evaluate-limit", 4)
    ran = command("evaluate", tiny["opt"], *words)
    assert ran.exit_code == 0, ran.stderr
    assert check(ran.stderr) == ["loading", "measuring"]
    assert command("evaluate", tiny["opt"], *words, "--quiet").stderr == ""


SEVERAL = {
    "several": ("prune", "--sparsity", "50%,60%,70%"),
    "search": ("search", "--max-perplexity-increase", "30%", "--step", "20%"),
    "sweep": ("sweep",),
}


@pytest.mark.parametrize("name", SEVERAL)
def test_several_runs_have_one_time_left(
    name: str, tiny: dict[str, Path], text_file: Path, tmp_path: Path, command: Command
) -> None:
    """Known in every run; labels are sparsities, and what is told alike is told once."""
    verb, *options = SEVERAL[name]
    texts = ("--calibration", text_file, "--evaluate", text_file, "--evaluate-limit", 4)
    words = (verb, tiny["opt"], tmp_path / "out", *options, *SMALL, *texts)
    if name == "sweep":
        shared = {"model": str(tiny["opt"]), "calibration": str(text_file), "evaluate": [str(text_file)], "evaluate_limit": 4}
        content = {"recipe": {**shared, "samples": 4, "sequence_length": 32}, "axes": {"sparsity": ["50%", "60%", "70%"]}}
        (tmp_path / "s.yaml").write_text(yaml.safe_dump(content), encoding="utf-8")
        words = (verb, tmp_path / "s.yaml", tmp_path / "out")
    ran = command(*words)
    assert ran.exit_code == 0, ran.stderr
    shown = [fields for fields in states(ran.stderr) if fields["run"]]
    runs = list(dict.fromkeys((fields["run"], fields["runs"], fields["name"]) for fields in shown if fields["name"]))
    count = runs[0][1]
    assert {number for _, number, _ in runs} == {count}
    assert runs[-1][0] == count
    for run_number, *_ in runs:
        assert any(fields["left"] for fields in shown if fields["run"] == run_number)
    if name != "search":
        assert [label for _, _, label in runs] == ["50%", "60%", "70%"]
    notes = [line for line in ran.stderr.splitlines() if line.startswith("note: ")]
    assert len(notes) == len(set(notes)) > 0
    assert [ran.stderr.count(f"{text_file.name}, {when}: ") for when in ("dense", "pruned")] == [1, len(runs)]


def test_the_demo_has_a_time_left_in_each_run(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sparsellm.extensions.studies.demonstration.SAMPLES", 2)
    monkeypatch.setattr(
        "sparsellm.pipeline.token_sequences.test_windows",
        lambda *given, limit, **named: test_windows(*given, limit=4, **named),
    )
    methods = {"magnitude": "", "wanda": ""}
    monkeypatch.setattr("sparsellm.extensions.studies.demonstration.METHODS", methods)
    ran = command("demo")
    assert ran.exit_code == 0, ran.stderr
    assert check(ran.stderr) == ["loading", "measuring dense", "pruning", "measuring pruned"] * 2
    shown = states(ran.stderr)
    assert {fields["name"] for fields in shown if fields["name"]} == {"wanda", "magnitude"}
    assert {fields["run"] for fields in shown if fields["left"]} == {1, 2}
    assert all(fields["percent"] is not None for fields in shown if fields["name"])


def test_python_displays_progress_where_asked(
    tiny: dict[str, Path], text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sparsellm.prune(tiny["opt"], "magnitude", progress=True)
    assert "pruning, layer 0/18" in capsys.readouterr().err
    settings = {"sequence_length": 32, "evaluate_limit": 2}
    sparsellm.evaluate(tiny["opt"], text_file, progress=True, **settings)
    assert "2/2 measuring" in capsys.readouterr().err
    sparsellm.evaluate(tiny["opt"], text_file, **settings)
    assert capsys.readouterr().err == ""


def test_a_model_in_memory_is_expected_too(tiny: dict[str, Path]) -> None:
    events: list[Event] = []
    sparsellm.prune(AutoModelForCausalLM.from_pretrained(tiny["llama"]), "magnitude", observe=events.append)
    expected = next(event for event in events if isinstance(event, Schedule))
    names = [event.name for event in events[events.index(expected) :] if isinstance(event, Stage)]
    assert list(expected.stages) == names == ["loading", "pruning"]


DISPLAYED = {
    "pack": (("pack", "{run}", "{out}"), ["packing", "reading", "packing", "reading back"]),
    "unpack": (("unpack", "{packed}", "{out}"), ["unpacking", "unpacking", "reading back"]),
    "export": (("export", "{run}", "{out}", "--values", "int4"), ["exporting", "reading", "exporting", "reading back"]),
    "verify": (("verify", "{run}"), ["verifying"]),
    "inspect": (("inspect", "{run}"), ["reading"]),
    "bench": (("bench", "{packed}", "--tokens", "1", "--threads", "1"), ["measuring", "loading", "decoding"]),
}
"""Lines that read or write whole models without a run, and what is displayed of them in a pipe."""


@pytest.mark.parametrize("name", DISPLAYED)
def test_commands_without_a_run_are_displayed_in_a_pipe(
    name: str, made: dict[str, Path], tmp_path: Path, command: Command
) -> None:
    words, stages = DISPLAYED[name]
    line = [word.format(**made, out=tmp_path / "out") for word in words]
    ran = command(*line, "--json")
    assert ran.exit_code == 0, ran.stderr
    json.loads(ran.stdout)
    shown = [x for x in ran.stderr.splitlines() if "memory" in x]
    for text, stage in zip(shown, stages, strict=False):
        assert text.startswith(stage), shown
    assert len(shown) >= len(stages)
    if name in ("pack", "unpack", "export"):
        assert command(*line, "--overwrite", "--quiet").stderr == ""


@pytest.mark.parametrize("quiet", [False, True])
def test_packing_after_a_run_is_displayed_as_the_run_is(
    quiet: bool, tiny: dict[str, Path], tmp_path: Path, command: Command
) -> None:
    words = ("--quiet",) if quiet else ()
    ran = command("prune", tiny["llama"], tmp_path / "out", "--method", "magnitude", "--pack", *words)
    assert ran.exit_code == 0, ran.stderr
    assert any(fields["stage"].startswith("packing model") for fields in states(ran.stderr)) != quiet
