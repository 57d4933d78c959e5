"""Packages that cannot be imported, and those that a command does without. Each command is a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import sparsellm
from tests.conftest import extensions, long_unless
from tests.core.integration.test_families import tiny as tiny_of

HEAVY = {"torch", "transformers", "datasets"}

CODE = """import atexit, sys
atexit.register(lambda: print("loaded", *sorted({names!r} & set(sys.modules)), file=sys.stderr))
from sparsellm.cli.app import app
app({words!r}, "sparsellm")
"""


def run(folder: Path, *words: str) -> tuple[int, str, set[str]]:
    """The exit status of a command in a process of its own, what it says on stderr, and the heavy libraries it loaded."""
    code = CODE.format(names=HEAVY, words=[*words])
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    message, _, loaded = done.stderr.rpartition("loaded")
    return done.returncode, " ".join(message.split()), set(loaded.split())


FAULTY = {
    "library": 'import ctypes; ctypes.CDLL("libgomp-of-nobody.so.1")',  # as torch loads its libraries
    "symbol": 'raise ImportError("libtorch_cpu.so: undefined symbol: of_another_version")',
    "missing": "raise ModuleNotFoundError(\"No module named 'sympy'\", name='sympy')",
}
"""A torch that cannot be imported: without libgomp, with a library of another version, without a package that it needs."""


@pytest.mark.parametrize("fault", [long_unless(fault == "library", fault) for fault in FAULTY])
def test_a_torch_that_cannot_be_imported_is_one_message(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(FAULTY[fault], encoding="ascii")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{Path(sparsellm.__file__).parents[1]}")
    status, message, _ = run(tmp_path, "info")
    assert status == 1
    parts = {"library": "of-nobody.so.1: cannot open", "symbol": "undefined symbol", "missing": "No module named 'sympy'"}
    assert message.startswith("error: torch cannot be imported: ")
    assert parts[fault] in message
    assert message.endswith("Install what is missing, or torch again.")


@pytest.mark.long
def test_two_versions_of_torch_are_one_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers goes by the metadata, here of a version that was not removed, and Python by the folder."""
    (tmp_path / "torch-1.13.dist-info").mkdir()
    (tmp_path / "torch-1.13.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 1.13\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{Path(sparsellm.__file__).parents[1]}")
    status, message, _ = run(tmp_path, "prune", "demo:opt", "out", "--method", "magnitude")
    assert status == 1
    assert message.count("error:") == 1
    assert f"transformers takes torch {version('torch')} for torch 1.13" in message
    assert not (tmp_path / "out").exists()


NOT_INSTALLED = """import sys
class Finder:
    def find_spec(self, name, *_):
        if name == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name=name)
sys.meta_path.insert(0, Finder())
"""


@pytest.mark.long
def test_a_package_that_is_not_installed_is_one_message(tmp_path: Path) -> None:
    code = NOT_INSTALLED + CODE.format(names=HEAVY, words=["info"])
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: torch is not installed. Install sparsellm again")
    assert "Traceback" not in done.stderr


@extensions
@pytest.mark.long
def test_commands_that_read_reports_need_no_transformers(tiny: dict[str, Path], tmp_path: Path) -> None:
    """A report has all figures; digests and layers that are tensors of their own are in the files, packed or not."""
    for name in ("run", "other"):
        sparsellm.prune(tiny["llama"], "magnitude", "60%", values="int8").save_pretrained(tmp_path / name)
    sparsellm.pack(tmp_path / "run", tmp_path / "packed")
    assert run(tmp_path, "report", "run")[0::2] == (0, {"torch"})
    assert run(tmp_path, "report", "run", "other", "--output", "page.html")[0::2] == (0, {"torch"})
    assert run(tmp_path, "verify", "run")[0::2] == (0, {"torch"})
    assert run(tmp_path, "verify", "packed")[0::2] == (0, {"torch"})
    file = tmp_path / "other" / "generation_config.json"
    file.write_text(file.read_text() + " ")
    status, message, loaded = run(tmp_path, "verify", "other")
    assert (status, loaded) == (1, {"torch"})
    assert "generation_config.json was changed" in message


@pytest.mark.long
@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_the_class_of_a_model_tells_where_layers_are(family: str, tmp_path: Path) -> None:
    """GPT-2 stores layers transposed, and experts are parts of a tensor: they are verified as well."""
    tiny_of(family).save_pretrained(tmp_path / "dense")
    sparsellm.prune(tmp_path / "dense", "magnitude", "2:4").save_pretrained(tmp_path / "run")
    assert sparsellm.verify(tmp_path / "run").layers > 0
    status, _, loaded = run(tmp_path, "verify", "run")
    assert (status, "transformers" in loaded) == (0, True)
