"""Models and texts that are changed under their name: no finished result of the earlier ones goes with those of the later."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file, save_file
from typer.testing import Result

import sparsellm
from sparsellm.checkpoints.loading import open_checkpoint
from sparsellm.errors import CannotResume, InvalidSetting, VerificationFailed
from sparsellm.evaluation.results import Accuracy
from sparsellm.extensions.studies.search import run_search
from sparsellm.extensions.studies.searched import searched_setting
from sparsellm.extensions.studies.target import Target
from sparsellm.observers.events import Event, NextRun, Note
from sparsellm.outputs.fingerprint import run_inputs, text_contents
from sparsellm.pipeline import measuring
from sparsellm.recipes.file import read_recipe
from tests.conftest import report_of
from tests.core.cli.test_bad_input import refused

Command = Callable[..., Result]
SMALL: dict[str, Any] = {"samples": 2, "sequence_length": 32, "evaluate_limit": 2, "method": "wanda"}
WORDS = ("--samples", 2, "--sequence-length", 32, "--evaluate-limit", 2, "--method", "wanda")


@pytest.fixture
def files(tiny: dict[str, Path], text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a model and two texts of its own."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tiny["llama"], "m")
    shutil.copy(text_file, "calibration.txt")
    shutil.copy(text_file, "test.txt")
    return tmp_path


def change(name: str) -> None:
    """Change a model's matrices of the feed-forward parts, or a text, in place."""
    if name.endswith(".txt"):
        text = Path(name).read_text(encoding="utf-8")
        Path(name).write_text(text.replace("sum", "rest"), encoding="utf-8")
        return
    tensors = load_file(f"{name}/model.safetensors")
    changed = {key: x * 1.5 if "mlp" in key and "down" in key else x for key, x in tensors.items()}
    save_file(changed, f"{name}/model.safetensors", metadata={"format": "pt"})


def sweep(seeds: list[int], **fields: Any) -> dict[str, Any]:
    """A sweep over seeds."""
    shared = {"model": "m", "calibration": "calibration.txt", "evaluate": ["test.txt"], "sparsity": "60%", **SMALL}
    return {"recipe": shared | fields, "axes": {"seed": seeds}}


@pytest.mark.parametrize("name", ["m", "calibration.txt", "test.txt"])
def test_a_sweep_whose_files_changed(name: str, files: Path, command: Command) -> None:
    """The cell and the file are named before anything is pruned; with the file put back the sweep goes on."""
    Path("s.yaml").write_text(yaml.safe_dump(sweep([0])), encoding="utf-8")
    assert command("sweep", "s.yaml", "out").exit_code == 0
    saved = Path(shutil.copytree(name, "saved") if name == "m" else shutil.copy(name, "saved"))
    change(name)
    Path("s.yaml").write_text(yaml.safe_dump(sweep([0, 1])), encoding="utf-8")
    before = Path("out/results.json").read_bytes()
    refused(
        command("sweep", "s.yaml", "out"),
        f"{name} was changed",
        "cell 'seed 0'",
        "Put the files back",
        "remove out/cells/seed-0",
    )
    assert Path("out/results.json").read_bytes() == before
    assert len(list(Path("out/cells").glob("*/result.json"))) == 1
    shutil.rmtree(name) if name == "m" else Path(name).unlink()
    saved.rename(name)
    assert command("sweep", "s.yaml", "out").exit_code == 0
    assert len(list(Path("out/cells").glob("*/result.json"))) == 2


def test_a_sweep_whose_model_changes_between_two_cells(files: Path) -> None:
    def observe(event: Event) -> None:
        if isinstance(event, NextRun) and event.number == 2:
            change("m")

    with pytest.raises(CannotResume, match=r"m was changed: model\.safetensors .*'seed 0'"):
        sparsellm.sweep(sweep([0, 1, 2]), "out", observe=observe)
    assert len(list(Path("out/cells").glob("*/result.json"))) == 1


def test_a_finished_cell_of_an_earlier_version(files: Path) -> None:
    """It says nothing of its files, which a note tells."""
    sparsellm.sweep(sweep([0]), "out")
    (file,) = Path("out/cells").glob("*/result.json")
    content = json.loads(file.read_text(encoding="utf-8"))
    del content["report"]["inputs"]
    file.write_text(json.dumps(content), encoding="utf-8")
    told: list[Event] = []
    sparsellm.sweep(sweep([0, 1]), "out", observe=told.append)
    assert len([x for x in told if isinstance(x, Note) and "1 finished cell of an earlier version" in x.text]) == 1


def test_the_cache_of_accuracies_knows_the_questions(files: Path, questions: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the dense model, in the folder of a sweep: found again for the same questions, and only for these."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed (the extra `eval`)")
    file = questions / "boolq_validation.jsonl"
    measured: list[float] = []

    def evaluate(*_: object, **__: object) -> dict[str, Accuracy]:
        measured.append(float(len(file.read_text().splitlines())))
        return {"boolq": Accuracy(measured[-1], None, None, 6)}

    monkeypatch.setattr(measuring, "evaluate_tasks", evaluate)
    content = sweep([0], task=["boolq"], task_data=str(questions))
    for count in (6, 3):
        lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
        file.write_text("".join(lines[:count]), encoding="utf-8")
        shutil.rmtree("out/cells", ignore_errors=True)
        (outcome,) = sparsellm.sweep(content, "out")
        assert outcome.report is not None
        assert outcome.report.tasks["boolq"]["dense"].value == count
    assert measured == [6, 6, 3, 3]


@pytest.mark.parametrize("name", ["m", "calibration.txt", "test.txt", "settings"])
def test_resumed_outputs_whose_files_changed(name: str, files: Path, command: Command) -> None:
    """An output that is kept is of the same files and settings as those that are added to it."""
    words = ["prune", "m", "out", "--calibration", "calibration.txt", "--evaluate", "test.txt", *WORDS]
    assert command(*words, "--sparsity", "50%,60%").exit_code == 0
    if name == "settings":
        words += ["--seed", 1]
    else:
        change(name)
    parts = ["its --seed was 0, and is now 1"] if name == "settings" else [f"{name} was changed"]
    done = command(*words, "--sparsity", "50%,60%,70%", "--resume")
    refused(done, "out/50 is finished, but not of this run", "--restart and --overwrite", *parts)
    assert not Path("out/70").exists()
    assert command(*words, "--sparsity", "50%,60%,70%", "--restart", "--overwrite").exit_code == 0
    assert command(*words, "--sparsity", "50%,60%,70%", "--resume").exit_code == 0


def test_a_finished_output_is_not_measured_on_another_text(files: Path, command: Command) -> None:
    """It need not be pruned again for that, so that the message names the command that measures."""
    words = ["prune", "m", "out", "--calibration", "calibration.txt", *WORDS, "--sparsity", "50%"]
    assert command(*words).exit_code == 0
    done = command(*words, "--evaluate", "test.txt", "--resume")
    parts = ("its --evaluate was [], and is now ['test.txt']", "measure out with sparsellm evaluate")
    refused(done, "out is finished, but not of this run", *parts)
    assert "--restart" not in done.stderr


def test_outputs_of_one_command_are_of_one_model(files: Path) -> None:
    def observe(event: Event) -> None:
        if isinstance(event, NextRun) and event.number == 2:
            change("m")

    with pytest.raises(CannotResume, match=r"m was changed: model\.safetensors .* between two runs of this command"):
        sparsellm.prune("m", "magnitude", ["50%", "60%"], observe=observe)


def test_a_search_in_a_model_that_changes(files: Path) -> None:
    """Between two trials; repeated, it begins anew with the model of now."""
    recipe = read_recipe({"model": "m", "evaluate": ["test.txt"], **SMALL, "method": "magnitude"})

    def observe(event: Event) -> None:
        if isinstance(event, NextRun) and event.number == 2 and not changed:
            changed.append(change("m"))

    changed: list[None] = []
    settings = {"step": 0.2, "overwrite": False, "observe": observe}
    with pytest.raises(CannotResume, match=r"m was changed: model\.safetensors"):
        run_search(recipe, "out", Target.read("500%", None, None), searched_setting("sparsity"), **settings)
    found = run_search(recipe, "out", Target.read("500%", None, None), searched_setting("sparsity"), **settings)
    assert found.report.inputs == run_inputs(recipe, open_checkpoint("m"))


def test_a_comparison_of_models_of_one_name(files: Path) -> None:
    """Of one size and with other weights they are refused; of one model with another text the text is told."""
    settings = {"evaluate": "test.txt", "evaluate_limit": 2, "sequence_length": 32}
    sparsellm.prune("m", "magnitude", "50%", **settings).save_pretrained("first")
    change("test.txt")
    sparsellm.prune("m", "magnitude", "60%", **settings).save_pretrained("second")
    notes = sparsellm.report(["first", "second"]).notes
    assert "The perplexity on test.txt is on different texts of that name: the file was changed between the runs." in notes
    change("m")
    sparsellm.prune("m", "magnitude", "60%", **settings).save_pretrained("third")
    with pytest.raises(InvalidSetting, match=r"first and third .* model\.safetensors"):
        sparsellm.report(["first", "third"])


def test_a_recovery_with_a_dense_model_that_changed(files: Path, command: Command) -> None:
    """Only in layers that were pruned, so that the other tensors are those of before."""
    assert command("prune", "m", "pruned", "--sparsity", "50%", "--calibration", "calibration.txt", *WORDS).exit_code == 0
    change("m")
    with pytest.raises(
        VerificationFailed, match=r"pruned was made from another dense model: m was changed: model\.safetensors"
    ):
        sparsellm.recover("pruned", "m", "calibration.txt", steps=2, samples=2, sequence_length=32)


def test_a_packed_model_of_another_run_is_not_kept(files: Path, command: Command) -> None:
    words = ["prune", "m", "out", "--method", "magnitude", "--sparsity", "70%"]
    assert command(*words, "--pack").exit_code == 0
    assert command(*words, "--pack", "--resume").exit_code == 0
    change("m")
    assert command(*words, "--overwrite").exit_code == 0
    refused(command(*words, "--pack", "--resume"), "out-packed exists", "--overwrite")
    assert command(*words, "--pack", "--resume", "--overwrite").exit_code == 0
    assert report_of(Path("out-packed"))["inputs"] == report_of(Path("out"))["inputs"]


def test_contents_of_texts(tmp_path: Path) -> None:
    """Files and saved data sets by all their bytes."""
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": ["a", "b"]}).save_to_disk(tmp_path / "set")
    names = {file.name for file in (tmp_path / "set").iterdir()}
    assert {Path(name).name for name in text_contents(str(tmp_path / "set"))} == names
    assert (
        text_contents("demo")
        == text_contents("no such text")
        == text_contents("x" * 5000)
        == text_contents(str(tmp_path))
        == {}
    )
