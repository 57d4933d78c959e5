"""Users without a home folder or a name, as in containers, unknown home folders, and a working folder that was removed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from tests.core.cli.test_bad_input import refused

NOBODY = """import os, pwd, sys
for name in ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME", "XDG_CACHE_HOME"):
    os.environ.pop(name, None)
def unknown(*_):
    raise KeyError("getpwuid(): uid not found: 54321")
pwd.getpwuid = unknown
from sparsellm.cli.app import app
app(sys.argv[1:], "sparsellm")
"""


def as_nobody(folder: Path, *words: object) -> str:
    """Run a command as a user without an entry in the list of users and without HOME; what it prints."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", NOBODY, *map(str, words)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long
def test_a_user_without_a_home(tiny: dict[str, Path], text_file: Path, tmp_path: Path) -> None:
    """A bfloat16 model, whose dtype of products is measured, is pruned, verified and reported; no folder is called `~`."""
    words = ("--method", "wanda", "--sparsity", "50%", "--samples", 4, "--sequence-length", 32, "--calibration", text_file)
    as_nobody(tmp_path, "prune", tiny["opt"], "out", *words, "--evaluate", text_file, "--evaluate-limit", 2)
    assert "match its report" in as_nobody(tmp_path, "verify", "out", "--against", tiny["opt"])
    assert "Wrote out.html" in as_nobody(tmp_path, "report", "out")
    assert {file.name for file in tmp_path.iterdir()} == {"out", "out.html"}


@pytest.mark.long
def test_a_home_that_cannot_be_written(tiny: dict[str, Path], text_file: Path, tmp_path: Path) -> None:
    """A folder below a file, since root may write to folders without permission: what is measured is not kept."""
    (tmp_path / "file").touch()
    environment = {**os.environ, "HOME": str(tmp_path / "file" / "home"), "HF_HUB_OFFLINE": "1"}
    del environment["XDG_CACHE_HOME"]
    words = ("--method", "wanda", "--sparsity", "50%", "--samples", "4", "--sequence-length", "32", "--calibration", text_file)
    for command in (("prune", tiny["opt"], "out", *words), ("pack", "out", "packed")):
        given = [sys.executable, "-m", "sparsellm", *map(str, command)]
        done = subprocess.run(given, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert {file.name for file in tmp_path.iterdir()} == {"file", "out", "packed"}


@pytest.mark.parametrize(
    "words",
    [
        ("prune", "~nosuchuser/model", "out", "--method", "magnitude"),
        ("prune", "MODEL", "~nosuchuser/out", "--method", "magnitude"),
        ("prune", "MODEL", "out", "--calibration", "~nosuchuser/text.txt"),
        ("prune", "MODEL", "out", "--method", "magnitude", "--task", "boolq", "--task-data", "~nosuchuser/tasks"),
        ("prune", "--config", "~nosuchuser/recipe.yaml", "out"),
        ("recover", "~nosuchuser/pruned", "out", "--against", "demo:opt", "--calibration", "demo"),
        ("plan", "MODEL", "--method", "magnitude", "--evaluate", "~nosuchuser/text.txt"),
        ("evaluate", "MODEL", "--text", "~nosuchuser/text.txt"),
        ("search", "MODEL", "~nosuchuser/out", "--method", "magnitude", "--max-size", "1MB"),
        ("sweep", "~nosuchuser/sweep.yaml"),
        ("inspect", "MODEL", "--against", "~nosuchuser/model"),
        ("verify", "~nosuchuser/out"),
        ("report", "~nosuchuser/out"),
        ("report", "~nosuchuser/out", "OUT"),
        ("pack", "MODEL", "~nosuchuser/packed"),
        ("unpack", "~nosuchuser/packed", "out"),
        ("export", "~nosuchuser/out", "exported"),
        ("bench", "~nosuchuser/packed"),
        ("push", "~nosuchuser/out", "me/model"),
        ("demo", "--output", "~nosuchuser/out"),
    ],
)
def test_home_folders_that_are_unknown(
    words: tuple[str, ...],
    tiny: dict[str, Path],
    tmp_path: Path,
    command: Callable[..., Result],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Wherever a path is given, and nothing is written, above all no folder by that name."""
    monkeypatch.chdir(tmp_path)
    given = (str(tiny["llama"]) if word == "MODEL" else word for word in words)
    refused(command(*given), "~nosuchuser", "a home folder that this machine does not know")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("words", [("prune", "MODEL", "OUT"), ("pack", "MODEL", "OUT"), ("verify", "OUT"), ("report", "OUT")])
def test_a_working_folder_that_was_removed(
    words: tuple[str, ...],
    tiny: dict[str, Path],
    tmp_path: Path,
    command: Callable[..., Result],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Told before any work, also for absolute paths: what is written there names the folder."""
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    given = [str({"MODEL": tiny["llama"], "OUT": tmp_path / "out"}.get(word, word)) for word in words]
    refused(command(*given, *(["--method", "magnitude"] if words[0] == "prune" else [])), "The working folder was removed")
    assert list(tmp_path.iterdir()) == []


def test_no_folder_for_temporary_files(
    tiny: dict[str, Path], tmp_path: Path, command: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr("tempfile.gettempdir", none)
    refused(command("prune", tiny["llama"], tmp_path / "out", "--method", "magnitude"), "Set TMPDIR")
    assert list(tmp_path.iterdir()) == []
