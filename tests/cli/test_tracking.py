"""Trackers: what arrives in each, and that neither they nor their failures change a run."""

from __future__ import annotations

import json
import os
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.state import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from typer.testing import Result

import sparsellm
from sparsellm.errors import InvalidSetting, MissingPackage
from sparsellm.methods import BlockResult, LayerResult
from sparsellm.pipeline import tracking
from sparsellm.pipeline.events import Begun, Note
from sparsellm.pipeline.journal import Journal
from sparsellm.pipeline.recipe_file import read_recipe
from sparsellm.pipeline.tracking import Tracked
from sparsellm.solvers.patterns import Unstructured
from tests.conftest import report_of

Command = Callable[..., Result]
QUICK = ("--samples", 8, "--sequence-length", 32)


class Recorder(GeneralTracker):
    """A tracker that keeps what it is given; it fails in the calls named."""

    name = "recorder"
    requires_logging_directory = False
    tracker = None

    def __init__(self, *failing: str) -> None:
        super().__init__()
        self.failing = failing
        self.runs: list[tuple[dict[str, Any], list[tuple[int, dict[str, Any]]]]] = []
        self.started = self.finished = 0

    def start(self) -> None:
        self.check("start")
        self.started += 1

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.runs.append((values, []))

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        self.check("log")
        assert len(self.runs) == self.started == self.finished + 1
        assert step is not None
        self.runs[-1][1].append((step, values))

    def finish(self) -> None:
        self.check("finish")
        self.finished += 1

    def check(self, call: str) -> None:
        if call in self.failing:
            raise ConnectionError("the tracker's server went away\nTraceback: much more")


def by_name(rows: list[tuple[int, dict[str, Any]]]) -> dict[str, list[tuple[int, Any]]]:
    """The charts: by name, each step with its value."""
    found: dict[str, list[tuple[int, Any]]] = {}
    for step, values in rows:
        for name, value in values.items():
            found.setdefault(name, []).append((step, value))
    return found


def test_an_own_tracker_is_told_everything(tiny: dict[str, Path], text_file: Path) -> None:
    """The recipe, charts over the blocks, epochs, perplexities, totals and notes, under the steps of the blocks."""
    PartialState._reset_state()  # lm-eval leaves it behind in other tests
    own, said = Recorder(), []
    settings = {"calibration": text_file, "samples": 1, "sequence_length": 32, "evaluate": (str(text_file),)}
    report = sparsellm.prune(tiny["llama"], observe=Tracked(own, observer=said.append), **settings).report
    ((stored, rows),) = own.runs
    assert own.finished == 1
    assert stored["run"] == tiny["llama"].name
    assert (stored["samples"], stored["evaluate"], "sequence_length" in stored) == (1, str([str(text_file)]), True)
    assert {name: stored[f"environment/{name}"] for name in report.environment} == report.environment
    assert all(isinstance(value, (bool, int, float, str)) for value in stored.values())
    charts = by_name(rows)
    for kind in ("self_attn.q_proj", "mlp.down_proj"):
        layers = [layer for layer in report.layers if layer.name.endswith(kind)]
        assert charts[f"error/{kind}"] == [(block, layer.error) for block, layer in enumerate(layers)]
        assert charts[f"sparsity/{kind}"] == [(block, layer.sparsity) for block, layer in enumerate(layers)]
    for epoch in (epoch for block in report.blocks for epoch in block.epochs):
        index = int(epoch.block.rpartition(".")[2])
        assert (index, epoch.feed_forward_error) in charts[f"feed_forward_error/{epoch.step}-{epoch.epoch}"]
    assert charts["block/seconds"] == [(block.index, block.seconds) for block in report.blocks]
    assert all(value > 0 for _, value in charts["block/peak-memory-GiB"])
    figures = report.perplexity[str(text_file)]
    for step, when in ((0, "dense"), (2, "pruned")):
        assert charts[f"perplexity/words.txt-{when}"] == [(step, figures[when].value)]
        assert charts[f"perplexity/words.txt-{when}-standard-error"] == [(step, figures[when].standard_error)]
    assert charts["total/zeros"] == [(2, report.zeros)]
    assert [values[0][1] for name, values in charts.items() if name.startswith("note/")] == report.notes != []
    assert [step for step, _ in rows] == sorted(step for step, _ in rows)
    assert said == [Note("tracked by recorder")]
    assert not PartialState._shared_state  # accelerate's state is not left behind


def test_experts_share_a_chart() -> None:
    """Layers that differ in a number alone are one kind: their mean error, their share of zeros."""
    half = Unstructured(0.5)
    layers = tuple(
        LayerResult(f"model.layers.4.mlp.experts.{expert}.up_proj", half, shape, zeros, error, "Gram", None, 9, 1, 0.1)
        for expert, (shape, zeros, error) in enumerate([((2, 4), 8, 0.1), ((2, 4), 0, 0.3), ((4, 4), 8, 0.2)])
    )  # fmt: skip
    found = tracking.figures(BlockResult(4, "model.layers.4", layers, (), 1.0))
    assert found["error/mlp.experts.up_proj"] == pytest.approx(0.2)
    assert found["sparsity/mlp.experts.up_proj"] == 0.5
    assert not any(".4." in name or ".0." in name for name in found)


@pytest.mark.parametrize("call", ["start", "log", "finish"])
def test_a_failing_tracker_does_not_lose_the_run(call: str, tiny: dict[str, Path]) -> None:
    """It is told of once and left out; another one goes on, and the model is that of a run that nobody watches."""
    bad, good, said = Recorder(call), Recorder(), []
    watched = sparsellm.prune(tiny["opt"], method="magnitude", observe=Tracked(bad, good, observer=said.append))
    plain = sparsellm.prune(tiny["opt"], method="magnitude")
    assert watched.report.to_markdown() == plain.report.to_markdown()
    told = [event.text for event in said if "failed" in event.text]
    assert told[0] == "The tracker recorder failed and is disabled (ConnectionError: the tracker's server went away)"
    assert good.finished == 1
    assert len(good.runs[0][1]) == 4
    with pytest.warns(RuntimeWarning, match="tracker recorder failed and is disabled"):
        sparsellm.prune(tiny["opt"], method="magnitude", observe=Tracked(Recorder(call)))


def test_a_run_that_is_cut_off_is_ended(tiny: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """As a context manager; and one that is refused before its work begins never begins in a tracker."""
    own = Recorder()

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(InvalidSetting), Tracked(own) as tracked:
        sparsellm.prune(tiny["opt"], method="magnitude", include="fc9", observe=tracked)
    assert (own.runs, own.started) == ([], 0)
    monkeypatch.setattr("sparsellm.pipeline.prune.prune_blocks", interrupt)
    with pytest.raises(KeyboardInterrupt), Tracked(own) as tracked:
        sparsellm.prune(tiny["opt"], method="magnitude", observe=tracked)
    assert own.finished == 1
    assert list(by_name(own.runs[0][1]).values())[-1] == [(0, "interrupted: KeyboardInterrupt")]


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    """What the command line takes for the tracker "own"."""
    recorder = Recorder()

    class Registered:
        requires_logging_directory = False

        def __new__(cls, project: str) -> Recorder:  # type: ignore[misc]
            assert project == "sparsellm"
            return recorder

    monkeypatch.setattr("sparsellm.pipeline.tracking.get_available_trackers", lambda: ["own"])
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "own", Registered)
    return recorder


def test_each_cell_of_a_sweep_is_a_run(tiny: dict[str, Path], tmp_path: Path, command: Command, own: Recorder) -> None:
    """By its name; a cell that fails is ended, with why as a note, and what the next is told is not put down to it."""
    file = tmp_path / "s.yaml"
    file.write_text(f"recipe: {{model: '{tiny['opt']}', method: magnitude}}\naxes: {{sparsity: [50%, 5:7, 2:4]}}\n")
    ran = command("sweep", file, tmp_path / "out", "--report-to", "own", "--report-to", "own")
    assert ran.exit_code == 1  # 5:7 does not divide
    assert [stored["run"] for stored, _ in own.runs] == ["out, 50%", "out, 2:4"]
    assert own.finished == 2
    assert [rows[-1][1]["total/sparsity_of_pruned_layers"] for _, rows in own.runs] == [0.5, 0.5]
    assert not any("note/1" in values for _, rows in own.runs for _, values in rows)


def test_a_resumed_run_has_whole_charts(
    tiny: dict[str, Path], tmp_path: Path, command: Command, own: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks that were finished before are told too."""
    plain = Journal.store_block

    def keep(self: Any, block: Any, result: Any) -> Path:
        if block.index == 2:
            raise KeyboardInterrupt
        return plain(self, block, result)

    words = ("prune", tiny["opt"], tmp_path / "out", "--method", "magnitude", "--report-to", "own")
    monkeypatch.setattr("sparsellm.pipeline.journal.Journal.store_block", keep)
    assert command(*words).exit_code == 130
    monkeypatch.setattr("sparsellm.pipeline.journal.Journal.store_block", plain)
    assert command(*words, "--resume").exit_code == 0
    charts = [by_name(rows)["error/fc1"] for _, rows in own.runs]
    assert [len(chart) for chart in charts] == [2, 3]
    assert charts[1][:2] == charts[0]
    assert own.finished == 2


def test_what_cannot_track_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown name with the nearest known one; a missing package with how to install it."""
    with pytest.raises(InvalidSetting, match=r"`report_to` got 'tensorbord'.*'tensorboard'"):
        Tracked("tensorbord")
    monkeypatch.setattr("sparsellm.pipeline.tracking.get_available_trackers", list)
    with pytest.raises(MissingPackage, match=r"The tracker trackio is not installed: pip install trackio"):
        Tracked("trackio")


def test_a_launcher_s_environment_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process group, no other number of threads: accelerate is told that this process is alone."""
    own, threads = Recorder(), torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    recipe = read_recipe({"model": "demo:opt", "method": "magnitude"})
    Tracked(own)(Begun("one", recipe, {"torch": "2"}))
    assert own.started == 1
    assert os.environ["LOCAL_RANK"] == "0"
    assert not torch.distributed.is_initialized()
    assert torch.get_num_threads() == threads


needs = {
    name: pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed: pip install {name}")
    for name in ("tensorboard", "wandb", "trackio", "mlflow")
}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A present folder and a home of its own, where trackers leave what they write."""
    monkeypatch.chdir(tmp_path)
    for name, value in {"HOME": tmp_path, "TRACKIO_DIR": tmp_path / "trackio", "WANDB_MODE": "offline"}.items():
        monkeypatch.setenv(name, str(value))
    return tmp_path


def pruned(tracker: str, model: Path, text: Path) -> tuple[dict[str, Any], str]:
    """A run with a real tracker, in a process of its own; its report and what it said."""
    words = ["prune", model, "out", "--calibration", text, *QUICK, "--evaluate", text, "--report-to", tracker, "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "sparsellm", *map(str, words)], capture_output=True, text=True, check=False, env=os.environ
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["recipe"]["samples"] == 8  # nothing but the document on stdout
    return report_of(Path("out")), " ".join(done.stderr.split())


def errors(report: dict[str, Any], kind: str) -> list[float]:
    """A kind's errors by block."""
    return [layer["error"] for block in report["blocks"] for layer in block["layers"] if layer["name"].endswith(kind)]


@needs["tensorboard"]
@pytest.mark.long
def test_tensorboard(place: Path, tiny: dict[str, Path], text_file: Path) -> None:
    """Scalars over the blocks and texts, read back from the event file; a second run gets a folder of its own."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    report, told = pruned("tensorboard", tiny["opt"], text_file)
    assert "tracked by tensorboard: runs/out" in told
    found = EventAccumulator(str(place / "runs" / "out"))
    found.Reload()
    scalars = [(event.step, event.value) for event in found.Scalars("error/fc2")]
    assert scalars == [(step, pytest.approx(error)) for step, error in enumerate(errors(report, "fc2"))]
    assert found.Scalars("perplexity/words.txt-pruned")[0].step == 2
    assert found.Tensors("note/1/text_summary")
    (settings,) = place.glob("runs/out/*/hparams.yml")
    assert yaml.safe_load(settings.read_text())["samples"] == 8
    assert tracking._free_name("out") == "out-2"


def records(file: Path) -> Iterator[Any]:
    """The records of a .wandb file: pieces with a header of 7 bytes, none astride two stretches of 32 KiB."""
    from wandb.proto import wandb_internal_pb2

    data, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        length, kind = struct.unpack("<HB", data[at + 4 : at + 7])
        if left < 7 or not kind:
            at += left
            continue
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a record in one piece, or its last
            yield wandb_internal_pb2.Record.FromString(whole)
            whole = b""


@needs["wandb"]
@pytest.mark.long
def test_wandb_offline(place: Path, tiny: dict[str, Path], text_file: Path) -> None:
    """Without a login: configuration and history, read back from the file."""
    report, told = pruned("wandb", tiny["opt"], text_file)
    assert "tracked by wandb" in told
    (file,) = place.glob("wandb/offline-run-*/run-*.wandb")
    config: dict[str, Any] = {}
    history: dict[str, list[Any]] = {}
    for record in records(file):
        if record.WhichOneof("record_type") == "run":
            assert (record.run.display_name, record.run.project) == ("out", "sparsellm")
            config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        for item in record.history.item:
            history.setdefault(item.key or "/".join(item.nested_key), []).append(json.loads(item.value_json))
    assert config["samples"] == 8
    assert config["environment/torch"] == report["environment"]["torch"]
    assert history["error/fc2"] == pytest.approx(errors(report, "fc2"))
    assert len(history["perplexity/words.txt-pruned"]) == 1


@needs["wandb"]
@pytest.mark.long
def test_wandb_without_a_login_is_refused(place: Path) -> None:
    """Before any work, with what to do."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB")}
    line = "from sparsellm.pipeline.tracking import Tracked; Tracked('wandb')"
    done = subprocess.run(
        [sys.executable, "-c", line], capture_output=True, text=True, check=False, env=environment, stdin=subprocess.DEVNULL
    )
    assert "InvalidSetting: wandb has no login. Run `wandb login`, or set WANDB_MODE=offline." in done.stderr


@needs["trackio"]
@pytest.mark.long
def test_trackio(place: Path, tiny: dict[str, Path], text_file: Path) -> None:
    """Metrics and configuration, read back from its database."""
    report, told = pruned("trackio", tiny["opt"], text_file)
    assert "tracked by trackio" in told
    with sqlite3.connect(place / "trackio" / "sparsellm.db") as database:
        rows = [
            (step, json.loads(values)) for step, values in database.execute("select step, metrics from metrics order by id")
        ]
        (config,) = database.execute("select config from configs")
    assert by_name(rows)["error/fc2"] == list(enumerate(errors(report, "fc2")))
    assert json.loads(config[0])["samples"] == 8


@needs["mlflow"]
@pytest.mark.long
def test_mlflow(place: Path, tiny: dict[str, Path], text_file: Path) -> None:
    """Metrics and parameters, read back from its store on this machine."""
    from mlflow import MlflowClient

    report, told = pruned("mlflow", tiny["opt"], text_file)
    assert "tracked by mlflow" in told
    client = MlflowClient(f"sqlite:///{place / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("sparsellm")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status, run.data.params["samples"]) == ("out", "FINISHED", "8")
    history = sorted(client.get_metric_history(run.info.run_id, "error/fc2"), key=lambda metric: metric.step)
    assert [(metric.step, metric.value) for metric in history] == list(enumerate(errors(report, "fc2")))
