"""Extensions: what a stranger's package brings, and what happens where it is broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sparsellm import load_report

Program = Callable[..., subprocess.CompletedProcess[str]]

PRUNER = """
from __future__ import annotations
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated
import typer
from sparsellm.cli.run_options import RunOptions
from sparsellm.extension import Extension

def hello(name: str) -> None:
    "Greet."
    print(f"hello {name}")

@dataclass(frozen=True)
class Count(RunOptions):
    count: Annotated[bool, typer.Option("--count", help="Count the events.")] = False

    @contextmanager
    def observing(self, display):
        found = []
        yield found.append if self.count else None
        if self.count:
            print(f"{type(found[0]).__name__} to {type(found[-1]).__name__}")

EXTENSION = Extension(commands={"hello": "my_pruner:hello"}, options={"prune": ("my_pruner:Count",)})
"""


def install(folder: Path, name: str, source: str) -> None:
    """Put a package of one module into a folder, with the entry point of an extension."""
    module = name.replace("-", "_")
    (folder / f"{module}.py").write_text(source, encoding="utf-8")
    metadata = folder / f"{module}-1.5.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.5\n", encoding="utf-8")
    (metadata / "entry_points.txt").write_text(f"[sparsellm.extensions]\n{name} = {module}:EXTENSION\n", encoding="utf-8")


@pytest.fixture
def program(tmp_path: Path) -> Program:
    """Runs the command line in a process that finds the packages in `tmp_path`."""

    def run(*words: object) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [sys.executable, "-m", "sparsellm", *map(str, words)]
        return subprocess.run(command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False)

    return run


def test_a_package_brings_a_command_and_an_option(tmp_path: Path, program: Program) -> None:
    install(tmp_path, "my-pruner", PRUNER)
    assert "Greet." in program("--help").stdout
    assert program("hello", "you").stdout == "hello you\n"
    assert "--count" in program("prune", "--help").stdout
    done = program("prune", "demo:opt", tmp_path / "out", "--method", "magnitude", "--count", "--quiet")
    assert "Stage to Stage" in done.stdout, done.stderr
    found = json.loads(program("info", "--json").stdout)["extensions"]["my-pruner"]
    brings = {"commands": ["hello"], "options": ["prune"]}
    assert found == {"package": "my-pruner", "version": "1.5", "brings": brings, "error": ""}


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (("import typer", "import nowhere"), "the package broken cannot be loaded: No module named 'nowhere'"),
        (("EXTENSION =", "EXTENSION = 3 or"), "cannot be loaded: broken:EXTENSION is no sparsellm.Extension"),
        (("broken:hello", "broken:goodbye"), "broken:goodbye of the package broken cannot be imported (AttributeError: "),
        (('"hello":', '"inspect":'), "'inspect' (commands) of the package broken is not used"),
        (("broken:Count", "broken:typer"), "the options broken:typer of the package broken are left out"),
        (("count", "resume"), "the options broken:Count of the package broken are left out: 'resume' is an option already"),
    ],
)  # fmt: skip
def test_a_broken_package_is_named_and_stops_nothing(
    change: tuple[str, str], line: str, tmp_path: Path, program: Program
) -> None:
    install(tmp_path, "broken", PRUNER.replace("my_pruner", "broken").replace(*change))
    done = program("inspect", "demo:opt")
    assert done.returncode == 0
    assert "stored parameters are zero" in done.stdout
    (note,) = [note for note in done.stderr.splitlines() if note.startswith("note: ")]
    assert line in note


def test_two_packages_that_bring_one_name(tmp_path: Path, program: Program) -> None:
    """The name is refused, with both packages; everything else works."""
    for name in ("first-one", "second-one"):
        install(tmp_path, name, PRUNER.replace("my_pruner", name.replace("-", "_")))
    done = program("hello", "you")
    assert done.returncode == 1
    assert "first-one and second-one both bring 'hello'" in done.stderr
    assert program("verify", "--help").returncode == 0


SECTION = (
    PRUNER
    + """
class Notes:
    def __init__(self, text):
        self.text = text

    @classmethod
    def from_dict(cls, data):
        return cls(data["text"])

    def to_dict(self):
        return {"text": self.text}

    def describe(self):
        return f"Noted: {self.text}."

EXTENSION = Extension(sections={"notes_of_mine": "my_pruner:Notes"})
"""
)


def test_a_section_of_a_report(tmp_path: Path, program: Program) -> None:
    """The page says what a package's section says; without the package it is kept as it is."""
    out = tmp_path / "out"
    program("prune", "demo:opt", out, "--method", "magnitude", "--quiet")
    file = out / "sparsellm.json"
    written = json.loads(file.read_text(encoding="utf-8")) | {"notes_of_mine": {"text": "all is well"}}
    file.write_text(json.dumps(written), encoding="utf-8")
    assert load_report(out).to_dict()["notes_of_mine"] == {"text": "all is well"}
    assert program("report", out).returncode == 0
    assert "all is well" not in (tmp_path / "out.html").read_text(encoding="utf-8")
    install(tmp_path, "my-pruner", SECTION)
    assert program("report", out).returncode == 0
    assert "Noted: all is well." in (tmp_path / "out.html").read_text(encoding="utf-8")
    for broken in ({}, []):
        file.write_text(json.dumps(written | {"notes_of_mine": broken}), encoding="utf-8")
        done = program("report", out)
        assert done.returncode == 1
        assert "notes_of_mine" in done.stderr
    install(tmp_path, "other", SECTION.replace("my_pruner:Notes", "other:Missing").replace("notes_of_mine", "notes_too"))
    file.write_text(json.dumps(written | {"notes_too": 1}), encoding="utf-8")
    done = program("report", out)
    assert done.returncode == 0
    assert "other:Missing of the package other cannot be imported" in done.stderr
