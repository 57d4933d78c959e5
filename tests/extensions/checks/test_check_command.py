"""`sparsellm check` prints promise by promise, and its exit status says whether all are kept."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from sparsellm.solvers import Magnitude
from sparsellm.testing import checks_of


@pytest.mark.parametrize("name", ["magnitude", "tests.wrong_solvers:Right"])
def test_every_promise_has_a_line(name: str, command: Callable[..., Result]) -> None:
    done = command("check", name)
    assert done.exit_code == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [["passed", f"{check.name}:"] for check in checks_of(Magnitude())]
    assert last == f"{len(lines)} promises of {name}, none broken"


def test_a_pattern_is_checked_by_its_text(command: Callable[..., Result]) -> None:
    done = command("check", "2:4@50%")
    assert done.exit_code == 0, done.stderr
    assert "check_column_span" in done.stdout


def test_a_broken_promise_is_told_and_sets_the_status(command: Callable[..., Result]) -> None:
    done = command("check", "tests.wrong_solvers:FillsDeadInputs")
    assert done.exit_code == 1
    (failed,) = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    assert failed.startswith("FAILED  check_dead_inputs of FillsDeadInputs: ")
    assert done.stdout.splitlines()[-1].endswith(", 1 broken")


def test_a_file_of_this_folder(command: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "from sparsellm import NM\n\nPATTERN = NM(3, 4)\n"
    (tmp_path / "a_pattern.py").write_text(source, encoding="utf-8")
    (tmp_path / "that_exits.py").write_text("raise SystemExit('bye')\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert command("check", "a_pattern:PATTERN").exit_code == 0
    assert "that_exits:Method cannot be used" in command("check", "that_exits:Method").stderr


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wnada", "Did you mean 'wanda'"),
        ("nowhere:Method", "nowhere:Method cannot be used (ModuleNotFoundError"),
        ("json:Method", "json:Method cannot be used (AttributeError"),
        ("sparsellm:LayerWise", "sparsellm:LayerWise cannot be used (TypeError"),
        ("collections:Counter", "A Counter has neither solve nor prune"),
    ],
)
def test_what_cannot_be_checked_is_refused(name: str, message: str, command: Callable[..., Result]) -> None:
    done = command("check", name)
    assert done.exit_code == 1
    assert message in done.stderr
