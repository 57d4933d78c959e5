"""The time that `plan --measure` tells: from which events it comes, and that nothing is left of the block that was pruned."""

from __future__ import annotations

import itertools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import sparsellm
from sparsellm.errors import InvalidSetting
from sparsellm.extensions.planning import measured_plan as plan_command
from sparsellm.extensions.planning.measured_plan import plan_pruning
from sparsellm.extensions.planning.run_plan import MeasuredTime, RunPlan
from sparsellm.extensions.recover.model_training import GENERATING, TRAINING
from sparsellm.methods import BlockResult, LayerResult
from sparsellm.observers.events import WRITING, Advanced, Measured, Note, Stage
from sparsellm.recipes.file import read_recipe
from tests.core.cli.test_bad_input import refused

if TYPE_CHECKING:
    from typer.testing import Result

Command = Callable[..., "Result"]
DEMO = {"model": "demo:opt", "calibration": "demo", "samples": 6, "sequence_length": 64, "batch_size": 2}
BLOCKS, BATCHES = 4, 3
"""Of the model demo:opt, and of its calibration sequences."""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the system's temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def measured(output: Path | None, **settings: Any) -> tuple[RunPlan, MeasuredTime, list[Any]]:
    """A plan, its time, and the events of the run from which it comes."""
    events: list[Any] = []
    plan = plan_pruning(read_recipe({**DEMO, **settings}), output, measure=True, observe=events.append)
    assert plan.time is not None
    return plan, plan.time, events


def files(folder: Path) -> list[Path]:
    """All files in a folder and below."""
    return [path for path in folder.rglob("*") if path.is_file()]


def test_every_part_comes_from_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a clock that moves on by a second whenever it is read, and the seconds of the block's own event."""
    ticks = itertools.count()
    clock = SimpleNamespace(perf_counter=lambda: float(next(ticks)))
    monkeypatch.setattr(plan_command, "time", clock)
    _, time, events = measured(tmp_path / "out", method="sparsegpt", evaluate="demo", evaluate_limit=20)
    (result,) = [event for event in events if isinstance(event, BlockResult)]
    place = events.index(result)
    passes = [event for event in events[place:] if isinstance(event, Advanced)]
    assert [(event.done, event.total) for event in passes] == [(done + 1, BATCHES) for done in range(BATCHES)]
    assert time.block == pytest.approx(result.seconds + BATCHES)
    assert time.preparation == pytest.approx(2 - result.seconds)  # read when it starts, for the text, and once it is pruned
    sequences = {event.total for event in events[:place] if isinstance(event, Advanced) and event.unit == "sequence"}
    assert sequences == {8}
    assert time.evaluation == pytest.approx(2 * 20 / 8)
    assert time.blocks == next(event.blocks for event in events if isinstance(event, Stage) and event.blocks) == BLOCKS
    assert time.seconds == time.preparation + BLOCKS * time.block + time.evaluation
    assert time.left_out == (WRITING,)


@pytest.mark.parametrize(
    ("settings", "first", "blocks"),
    [
        ({}, 0, BLOCKS),
        ({"method": "magnitude", "calibration": None}, 0, BLOCKS),
        ({"method": "wanda", "offload": True, "max_memory": "30MB"}, 0, BLOCKS),
        ({"method": "sparsegpt", "settings": {"true_sequential": True}, "blocks": "1:3"}, 1, 2),
        ({"method": "algorithm1", "settings": {"epochs": 2}, "blocks": "3"}, 3, 1),
    ],
    ids=["default", "without inputs", "block by block", "true-sequential", "the last block alone"],
)
def test_one_block_is_pruned_and_nothing_stays(
    settings: dict[str, Any], first: int, blocks: int, tmp_path: Path, temporary: Path
) -> None:
    """Whatever the method: the first planned block, and the plan is the same as without measuring."""
    recipe = {name: value for name, value in {**DEMO, **settings}.items() if value is not None}
    plan, time, events = measured(tmp_path / "there" / "out", **recipe)
    assert [event.index for event in events if isinstance(event, BlockResult)] == [first]
    assert time.blocks == blocks
    assert time.block > 0
    assert files(tmp_path) == []
    assert list(tmp_path.iterdir()) == [temporary]
    assert repr(plan).splitlines()[-1] == f"time: {time.describe()}"
    unmeasured = plan_pruning(read_recipe(recipe), tmp_path / "there" / "out")
    assert unmeasured.time is None
    assert (unmeasured.stages, unmeasured.peak.data_bytes) == (plan.stages, plan.peak.data_bytes)
    assert (unmeasured.notes, unmeasured.peak.disk_bytes) == (plan.notes, plan.peak.disk_bytes)


def test_what_is_not_measured_is_said() -> None:
    """The training of `effort="best"`, for which no text is generated."""
    _, time, events = measured(None, effort="best", settings={"scope": "none", "solver": "magnitude"})
    assert time.left_out == (TRAINING, WRITING)
    assert not {*time.left_out, GENERATING} & {event.name for event in events if isinstance(event, Stage)}
    assert time.describe().endswith(f"; without {', '.join(time.left_out)}")
    assert MeasuredTime(60.0, 61.0, 10, 0.0, (WRITING,)).describe().startswith("about 11m10s: ")


def test_files_are_on_the_disk_of_the_output(tmp_path: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the block is pruned; without an output they are among the temporary files. Notes come with the plan alone."""
    places: list[Path] = []

    def look(event: Any) -> None:
        assert not isinstance(event, (Note, Measured))
        if isinstance(event, BlockResult):
            places.extend(files(tmp_path))

    recipe = read_recipe({**DEMO, "method": "wanda", "offload": True})
    for output in (tmp_path / "disk" / "out", None):
        (tmp_path / "disk").mkdir(exist_ok=True)
        plan_pruning(recipe, output, measure=True, observe=look)
        where = temporary if output is None else tmp_path / "disk"
        assert places
        assert all(where in place.parents and "out" not in place.parts for place in places)
        assert files(tmp_path) == []
        places.clear()


def test_an_interrupted_measurement_leaves_nothing(tmp_path: Path) -> None:
    def interrupt(event: object) -> None:
        if isinstance(event, LayerResult):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as error:
        plan_pruning(read_recipe({**DEMO, "method": "sparsegpt"}), tmp_path / "out", measure=True, observe=interrupt)
    assert not getattr(error.value, "__notes__", [])  # of blocks to resume from
    assert files(tmp_path) == []


def test_the_command_tells_the_time(tmp_path: Path, command: Command) -> None:
    """In a line, and in JSON with its parts; stages are displayed while they are measured."""
    words = ("plan", "demo:opt", tmp_path / "out", "--method", "magnitude", "--measure")
    ran = command(*words)
    assert ran.exit_code == 0, ran.stderr
    (line,) = [line for line in ran.stdout.splitlines() if line.startswith("Time: about ")]
    assert f"{BLOCKS} times the " in line
    assert "pruning" in ran.stderr
    told = json.loads(command(*words, "--json").stdout)["time"]
    assert told["blocks"] == BLOCKS
    assert told["seconds"] == pytest.approx(told["preparation"] + BLOCKS * told["block"] + told["evaluation"])
    assert not (tmp_path / "out").exists()


def test_what_cannot_be_measured_is_refused(tmp_path: Path, command: Command) -> None:
    """A recovery, a model in memory, which stays as it is, and a run that does not fit."""
    refused(command("plan", "demo:opt", "--recover", tmp_path, "--calibration", "demo", "--measure"), "--recover", status=2)
    ran = command("plan", "demo:opt", "--calibration", "demo", "--max-memory", "1MB", "--measure")
    assert "--max-memory" in refused(ran, "memory")
    assert "Time" not in ran.stdout
    model = AutoModelForCausalLM.from_pretrained(sparsellm.prune("demo:opt", "magnitude").save_pretrained(tmp_path / "model"))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(InvalidSetting, match="`measure`"):
        sparsellm.plan(model, "magnitude", measure=True)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
