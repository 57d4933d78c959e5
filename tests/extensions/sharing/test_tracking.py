"""Trackers: what arrives in each, and that neither they nor their failures change a run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.state import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from typer.testing import Result

import sparsellm
from sparsellm.extensions.sharing.tracking import Tracked
from sparsellm.methods import BlockResult, LayerResult
from sparsellm.observers.events import Begun, Note
from sparsellm.recipes.file import read_recipe
from sparsellm.solvers.patterns import Unstructured
from tests.conftest import report_of


class Recorder(GeneralTracker):
    """A tracker that keeps what it is given, by chart; it prints, and fails in the call named."""

    name = "recorder"
    requires_logging_directory = False
    tracker = None

    def __init__(self, failing: str = "") -> None:
        super().__init__()
        self.failing = failing
        self.calls: list[str] = []
        self.stored: dict[str, Any] = {}
        self.charts: dict[str, list[tuple[int | None, Any]]] = {}

    def start(self) -> None:
        self.note("start")

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.stored = values

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        self.note("log")
        for name, value in values.items():
            self.charts.setdefault(name, []).append((step, value))

    def finish(self) -> None:
        self.note("finish")

    def note(self, call: str) -> None:
        print(call)
        self.calls.append(call)
        if call == self.failing:
            raise ConnectionError("the tracker's server went away\nTraceback: much more")


def test_an_own_tracker_is_told_of_the_run(tiny: dict[str, Path], text_file: Path) -> None:
    """The recipe, charts over the blocks, perplexities and totals; accelerate's state is not left behind."""
    PartialState._reset_state()  # lm-eval leaves it behind in other tests
    own = Recorder()
    settings = {"calibration": text_file, "samples": 1, "sequence_length": 32, "evaluate": (str(text_file),)}
    report = sparsellm.prune(tiny["llama"], observe=Tracked(own), **settings).report
    assert (own.stored["run"], own.stored["samples"]) == (tiny["llama"].name, 1)
    assert own.stored["evaluate"] == str([text_file.name])
    for kind in ("self_attn.q_proj", "mlp.down_proj"):
        layers = [layer for layer in report.layers if layer.name.endswith(kind)]
        assert own.charts[f"error/{kind}"] == [(block, layer.error) for block, layer in enumerate(layers)]
        assert own.charts[f"sparsity/{kind}"] == [(block, layer.sparsity) for block, layer in enumerate(layers)]
    accepted = [(block.index, epoch) for block in report.blocks for epoch in block.epochs if epoch.accepted]
    for index, epoch in accepted:
        assert (index, epoch.feed_forward_error) in own.charts[f"feed_forward_error/{epoch.step}-{epoch.epoch}"]
    assert own.charts["block/seconds"] == [(block.index, block.seconds) for block in report.blocks]
    for step, when in ((0, "dense"), (2, "pruned")):
        assert own.charts[f"perplexity/words.txt-{when}"] == [(step, report.perplexity[str(text_file)][when].value)]
    assert own.charts["total/zeros"] == [(2, report.zeros)]
    assert own.calls.count("start") == own.calls.count("finish") == 1
    assert accepted
    assert not PartialState._shared_state


def test_experts_share_a_chart_and_a_launcher_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that differ in a number alone have one mean; no process group is joined."""
    own, half, threads = Recorder(), Unstructured(0.5), torch.get_num_threads()
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    layers = tuple(
        LayerResult(f"model.layers.4.mlp.experts.{expert}.up_proj", half, (2, 4), zeros, error, "Gram", None, 9, 1, 0.1)
        for expert, (zeros, error) in enumerate([(8, 0.1), (0, 0.3)])
    )
    tracked = Tracked(own)
    tracked(Begun("one", read_recipe({"model": "demo:opt", "method": "magnitude"}), {}))
    tracked(BlockResult(4, "model.layers.4", layers, (), 1.0))
    mean = pytest.approx(0.2)
    assert own.charts == {
        "error/mlp.experts.up_proj": [(4, mean)], "sparsity/mlp.experts.up_proj": [(4, 0.5)], "block/seconds": [(4, 1.0)]
    }  # fmt: skip
    assert (torch.get_num_threads(), os.environ["WORLD_SIZE"]) == (threads, "2")
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("call", ["start", "log", "finish"])
def test_a_failing_tracker_does_not_lose_the_run(call: str, tiny: dict[str, Path]) -> None:
    """One note, or a warning; another tracker goes on, and the model is that of a run without trackers."""
    good, said = Recorder(), []
    settings = {"method": "magnitude"}
    watched = sparsellm.prune(tiny["opt"], observe=Tracked(Recorder(call), good, observer=said.append), **settings)
    assert watched.report.to_markdown() == sparsellm.prune(tiny["opt"], **settings).report.to_markdown()
    assert said == [Note("The tracker recorder failed and is disabled (ConnectionError: the tracker's server went away)")]
    assert good.calls == ["start", *["log"] * 4, "finish"]
    with pytest.warns(RuntimeWarning, match="tracker recorder failed and is disabled"):
        sparsellm.prune(tiny["opt"], observe=Tracked(Recorder(call)), **settings)


def test_a_run_that_is_cut_off_is_finished(tiny: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    own = Recorder()
    monkeypatch.setattr("sparsellm.pipeline.prune.prune_blocks", interrupt)
    with pytest.raises(KeyboardInterrupt), Tracked(own) as tracked:
        sparsellm.prune(tiny["opt"], method="magnitude", observe=tracked)
    assert own.calls == ["start", "finish"]


def test_each_cell_of_a_sweep_is_a_run(
    tiny: dict[str, Path], tmp_path: Path, command: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its name; of one that fails before it begins there is none. Stdout has the document alone."""
    made: list[Recorder] = []

    class Registered(Recorder):
        def __init__(self, project: str) -> None:
            super().__init__()
            assert project == "sparsellm"
            made.append(self)

    monkeypatch.setattr("sparsellm.extensions.sharing.tracking.get_available_trackers", lambda: ["recorder"])
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "recorder", Registered)
    file = tmp_path / "s.yaml"
    file.write_text(f"recipe: {{model: '{tiny['opt']}', method: magnitude}}\naxes: {{sparsity: [50%, 5:7, 2:4]}}\n")
    ran = command("sweep", file, tmp_path / "out", "--report-to", "recorder", "--report-to", "recorder", "--json")
    assert ran.exit_code == 1  # 5:7 does not divide
    assert json.loads(ran.stdout)
    assert [own.stored["run"] for own in made] == ["out, 50%", "out, 2:4"]
    assert [own.charts["total/sparsity_of_pruned_layers"][0][1] for own in made] == [0.5, 0.5]
    assert all(own.calls.count("finish") == 1 for own in made)


def test_tensorboard(
    tiny: dict[str, Path], text_file: Path, tmp_path: Path, command: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Scalars over the blocks, read back from the event file in a folder of the run's name, and the recipe."""
    pytest.importorskip("tensorboard", reason="tensorboard is not installed: pip install tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.chdir(tmp_path)
    words = ("--calibration", text_file, "--samples", 8, "--sequence-length", 32, "--evaluate", text_file)
    assert command("prune", tiny["opt"], "out", *words, "--report-to", "tensorboard").exit_code == 0
    (folder,) = tmp_path.glob("runs/out-*")
    found = EventAccumulator(str(folder))
    found.Reload()
    layers = [layer for block in report_of(Path("out"))["blocks"] for layer in block["layers"]]
    errors = [layer["error"] for layer in layers if layer["name"].endswith("fc2")]
    scalars = [(event.step, event.value) for event in found.Scalars("error/fc2")]
    assert scalars == [(step, pytest.approx(error)) for step, error in enumerate(errors)]
    assert found.Scalars("perplexity/words.txt-pruned")[0].step == 2
    (settings,) = folder.glob("*/hparams.yml")
    assert yaml.safe_load(settings.read_text())["samples"] == 8
