"""What a recovery will take: told by `plan --recover`, and close to what it then takes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from sparsellm import prune
from sparsellm.extensions.planning.measured_plan import plan_recovery
from sparsellm.extensions.planning.run_plan import RunPlan
from sparsellm.extensions.recover.block_recovery import read_recovery
from sparsellm.extensions.recover.run import recover_run
from sparsellm.extensions.recover.training import masked_training
from sparsellm.observers.events import Stage
from sparsellm.outputs import journal
from sparsellm.outputs.journal import work_directory
from tests.conftest import SHARED, report_of
from tests.core.cli.test_bad_input import refused
from tests.meter import Meter

if TYPE_CHECKING:
    from typer.testing import Result

Command = Callable[..., "Result"]
WORDS = ("--samples", 16, "--sequence-length", 32)


@pytest.fixture(scope="module")
def pruned(tiny: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama with half of its weights."""
    return prune(tiny["llama"], "magnitude", "50%").save_pretrained(tmp_path_factory.mktemp("pruned") / "half")


def test_plan_tells_what_a_recovery_takes(
    pruned: Path, tiny: dict[str, Path], text_file: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By stage, without verifying the weights; a model and a block scope, and the settings of `recover`."""
    monkeypatch.setattr(
        "sparsellm.extensions.recover.block_recovery.verify", lambda *_, **__: pytest.fail("the weights were read")
    )
    base = ("plan", tiny["llama"], tmp_path / "out", "--recover", pruned, "--calibration", text_file, *WORDS)
    ran = command(*base, "--steps", 10, "--layers")
    assert ran.exit_code == 0, ran.stderr
    assert "by 10 gradient steps over the whole model" in ran.stdout
    assert "21 layers to recover: 6 of 32 x 32 at 50%, 6 of 16 x 32 at 50%" in ran.stdout
    assert "training the whole model" in ran.stdout
    plans = {
        scope: json.loads(command(*base, "--scope", scope, "--steps", 10, "--json").stdout) for scope in ("model", "block")
    }
    assert plans["model"]["peak"]["stage"] == "training the whole model"
    assert "recovering" in {stage["name"] for stage in plans["block"]["stages"]}
    assert plans["model"]["peak"]["data_bytes"] > plans["block"]["peak"]["data_bytes"]
    assert not (tmp_path / "out").exists()


def test_a_plan_gives_the_range_of_sparsities(tiny: dict[str, Path], text_file: Path, tmp_path: Path, command: Command) -> None:
    """A line for each shape, also where every layer has a sparsity of its own."""
    reads = {"calibration": text_file, "samples": 4, "sequence_length": 32}
    folder = prune(tiny["llama"], "wanda", "60%", allocation="owl", **reads).save_pretrained(tmp_path / "pruned")
    ran = command("plan", tiny["llama"], "--recover", folder, "--calibration", text_file, *WORDS)
    assert ran.exit_code == 0, ran.stderr
    (line,) = (line for line in ran.stdout.splitlines() if "to recover" in line)
    ranges = re.findall(r"(\d+) of (\d+) x (\d+) at ([\d.]+) to ([\d.]+)%", line)
    assert [(int(count), int(out), int(into)) for count, out, into, *_ in ranges] == [
        (6, 32, 32),
        (6, 16, 32),
        (6, 48, 32),
        (3, 32, 48),
    ]
    sparsities = [layer["sparsity"] for block in report_of(folder)["blocks"] for layer in block["layers"]]
    assert min(float(low) for *_, low, _ in ranges) == pytest.approx(100 * min(sparsities), abs=0.06)
    assert max(float(high) for *_, high in ranges) == pytest.approx(100 * max(sparsities), abs=0.06)


def test_what_a_planned_recovery_refuses(
    pruned: Path, tiny: dict[str, Path], text_file: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `recover` does; and settings of the other command."""
    text = ("--calibration", text_file, *WORDS)
    refused(command("plan", tiny["opt"], "--recover", pruned, *text), "was not made from")
    refused(command("plan", tiny["llama"], "--recover", tmp_path / "nowhere", *text), "is not a folder")
    refused(command("plan", tiny["llama"], "--recover", pruned, *text, "--dtype", "float16"), "is that of the pruned run")
    refused(command("plan", "--recover", pruned, *text), "name the dense model: sparsellm plan MODEL --recover", status=2)
    refused(command("plan", tiny["llama"], "--recover", pruned, *text, "--sparsity", "50%"), "Unknown field 'sparsity'")
    refused(command("plan", tiny["llama"], *text, "--steps", 5), "Unknown field 'steps'")
    monkeypatch.setattr("sparsellm.pipeline.planning.free_disk", lambda folder: 10_000)
    words = ("--against", tiny["llama"], *text, "--steps", 2)
    refused(command("recover", pruned, tmp_path / "out", *words), "of disk are needed, and 9.8 KiB are free")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("scope", "train"), [("model", "full"), ("model", "lora"), ("block", "full")])
def test_the_state_of_a_training_is_counted(
    scope: Any,
    train: Any,
    pruned: Path,
    tiny: dict[str, Path],
    text_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The most bytes that the work folder holds while states replace each other, and then with the output."""
    monkeypatch.setattr(masked_training, "STORING_SHARE", float("inf"))  # a state at every validation
    settings = {"calibration": str(text_file), "samples": 16, "sequence_length": 32, "steps": 10}
    recipe = read_recovery({"model": str(tiny["llama"]), "pruned": str(pruned), "scope": scope, "train": train, **settings})
    out, sizes, write = tmp_path / "out", [0], journal.durable

    def durable(file: Path, data: bytes) -> None:
        write(file, data)
        sizes.append(sum(path.stat().st_size for path in out.rglob("*.safetensors")))

    monkeypatch.setattr(journal, "durable", durable)
    with work_directory(out) as work:
        result = recover_run(recipe, work=work)
        held = sum(path.stat().st_size for path in out.rglob("*.safetensors"))
        output = sum(x.numel() * x.element_size() for x in result.model.parameters())
    planned = plan_recovery(recipe, out).peak.disk_bytes
    assert planned == pytest.approx(max(*sizes, held + output), rel=0.15)


def peak_of(recipe: Any, folder: Path) -> int:
    """The most bytes of tensors that a recovery holds."""
    with Meter() as meter, work_directory(folder / "metered") as work:
        recover_run(recipe, work=work)
    return meter.peak["cpu"]


CASES: dict[str, dict[str, Any]] = {
    "model": {"steps": 22},
    "model, lora": {"steps": 6, "train": "lora"},
    "block": {"steps": 6, "scope": "block"},
}


@pytest.mark.long
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("model", ["demo:opt", "wt2-llama"])
def test_a_plan_of_a_recovery_holds(model: str, case: str, tmp_path: Path) -> None:
    """Memory at the peak within 0.8 to 1.3 of what is held."""
    text = "demo"
    if model == "wt2-llama":
        model, text = str(SHARED / "models" / model), str(SHARED / "data" / "wikitext-2" / "valid.txt")
        if not Path(model).is_dir():
            pytest.skip("the model wt2-llama is not here")
    folder = prune(model, "magnitude", "50%").save_pretrained(tmp_path / "pruned")
    settings = {"calibration": text, "samples": 16, "sequence_length": 128, **CASES[case]}
    recipe = read_recovery({"model": model, "pruned": str(folder), **settings})
    planned: RunPlan = plan_recovery(recipe, tmp_path)
    assert 0.8 <= planned.peak.data_bytes / peak_of(recipe, tmp_path) <= 1.3


def test_stages_of_the_plan_are_those_of_the_run(pruned: Path, tiny: dict[str, Path], text_file: Path) -> None:
    settings = {"calibration": str(text_file), "samples": 16, "sequence_length": 32, "steps": 2, "evaluate": (str(text_file),)}
    names: dict[str, list[str]] = {}
    for scope in ("model", "block"):
        recipe = read_recovery({"model": str(tiny["llama"]), "pruned": str(pruned), "scope": scope, **settings})
        stages: list[str] = []
        recover_run(recipe, lambda event, stages=stages: stages.append(event.name) if isinstance(event, Stage) else None)
        names[scope] = [name.removesuffix(" dense").removesuffix(" pruned") for name in stages]
        assert {stage.name for stage in plan_recovery(recipe).stages} <= set(names[scope])
