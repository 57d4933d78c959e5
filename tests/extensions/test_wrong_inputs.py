"""A value, a path that is missing or cannot be read, and an output that exists, given to every command that takes one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from tests.core.cli.test_bad_input import refused

PRUNE = ("prune", "demo:opt", "out", "--method", "wanda", "--calibration", "text.txt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text, files that cannot be read as texts, and a folder that exists."""
    made = tmp_path_factory.mktemp("inputs")
    (made / "text.txt").write_text("some words " * 100)
    (made / "empty.txt").touch()
    (made / "words.doc").write_text("words")
    (made / "exists").mkdir()
    (made / "exists" / "file").touch()
    (made / "faulty.yaml").write_text("model: demo:opt\nsparsty: 50%\n")
    return made


CASES = [
    ((*PRUNE, "--sparsity", "70"), "--sparsity must be in [0, 1), got 70"),
    ((*PRUNE, "--samples", "0"), "--samples"),
    ((*PRUNE, "--effort", "fsat"), "'fast'"),
    ((*PRUNE, "--values", "int4", "--group-size", "100"), "multiple of 64"),
    ((*PRUNE, "--set", "epochs=2"), "epochs"),
    ((*PRUNE, "--allocation", "no.yaml"), "The allocation no.yaml cannot be read: No such file"),
    ((*PRUNE, "--evaluate", "no.txt"), "There is no file"),
    ((*PRUNE, "--task", "boolq", "--task-data", "nowhere"), "There is no folder nowhere"),
    (("prune", "./nowhere", "out", "--method", "magnitude"), "There is no folder ./nowhere"),
    (("prune", "no-such-model", "out", "--method", "magnitude"), "There is no folder no-such-model"),
    (("prune", "demo:bert", "out", "--method", "magnitude"), "demo:bert"),
    (("prune", "./text.txt", "out", "--method", "magnitude"), "There is no folder ./text.txt"),
    (("prune", "demo:opt", "exists", "--method", "magnitude"), "exists exists. Choose another name"),
    (("prune", "demo:opt", "out", "--calibration", "empty.txt"), "empty.txt is empty"),
    (("prune", "demo:opt", "out", "--calibration", "words.doc"), "'.doc'"),
    (("prune", "--config", "faulty.yaml", "out"), "'sparsity'"),
    (("plan", "demo:opt", "--calibration", "no.txt"), "There is no file"),
    (("plan", "demo:opt", "--recover", "nowhere", "--calibration", "text.txt"), "nowhere is not a folder"),
    (("recover", "exists", "out", "--against", "demo:opt", "--calibration", "text.txt"), "was not written by sparsellm"),
    (("search", "demo:opt", "exists", "--max-size", "1MB", "--method", "magnitude"), "exists exists"),
    (("search", "demo:opt", "out", "--max-size", "1MB", "--step", "x", "--method", "magnitude"), "--step must be"),
    (("sweep", "no.yaml"), "The sweep no.yaml cannot be read"),
    (("evaluate", "demo:opt", "--text", "no.txt"), "There is no file"),
    (("evaluate", "./nowhere", "--text", "text.txt"), "There is no folder ./nowhere"),
    (("evaluate", "demo:opt", "--against", "./nowhere", "--text", "text.txt"), "There is no folder ./nowhere"),
    (("inspect", "demo:opt", "--against", "./nowhere"), "There is no folder ./nowhere"),
    (("inspect", "./nowhere"), "There is no folder ./nowhere"),
    (("inspect", "demo:opt", "--expect", "70"), "[0, 1)"),
    (("verify", "nowhere"), "nowhere is not a folder"),
    (("verify", "exists"), "was not written by sparsellm"),
    (("push", "exists", "me/model"), "was not written by sparsellm"),
    (("report", "nowhere"), "nowhere does not exist"),
    (("report", "nowhere", "exists"), "nowhere does not exist"),
    (("pack", "./nowhere", "out"), "There is no folder ./nowhere"),
    (("pack", "demo:opt", "exists"), "exists exists"),
    (("unpack", "./nowhere", "out"), "There is no folder ./nowhere"),
    (("export", "demo:opt", "exists", "--values", "int4"), "exists exists"),
    (("bench", "./nowhere"), "There is no folder ./nowhere"),
    (("bench", "demo:opt", "--against", "./nowhere"), "There is no folder ./nowhere"),
    (("demo", "--output", "exists"), "exists exists"),
]
"""Words of a command, and a part of what it says."""


@pytest.mark.parametrize(("words", "part"), CASES)
def test_a_wrong_input_is_told_before_weights_are_read(
    words: tuple[str, ...], part: str, folder: Path, command: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sparsellm.checkpoints.loading.Checkpoint.load", lambda *_, **__: pytest.fail("weights are read"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.chdir(folder)
    before = sorted(folder.iterdir())
    refused(command(*words), part)
    assert sorted(folder.iterdir()) == before
