"""What can be known without torch, which takes seconds to import, is said without it. Each command is a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import sparsellm
from tests.conftest import long_unless
from tests.integration.test_families import tiny as tiny_of

HEAVY = {"torch", "transformers", "datasets"}

CODE = """import atexit, sys
atexit.register(lambda: print("loaded", *sorted({names!r} & set(sys.modules)), file=sys.stderr))
from sparsellm.cli.app import app
app({words!r}, "sparsellm")
"""

PRUNE = ("prune", "demo:opt", "out", "--method", "wanda", "--calibration", "text.txt")


def run(folder: Path, *words: str) -> tuple[int, str, set[str]]:
    """The exit status of a command in a process of its own, what it says on stderr, and the heavy libraries it loaded."""
    code = CODE.format(names=HEAVY, words=[*words])
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    message, _, loaded = done.stderr.rpartition("loaded")
    return done.returncode, " ".join(message.split()), set(loaded.split())


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
    ((*PRUNE, "--epochs", "2"), "--epochs belongs to"),
    ((*PRUNE, "--allocation", "no.yaml"), "The allocation no.yaml cannot be read: No such file"),
    ((*PRUNE, "--evaluate", "no.txt"), "There is no file"),
    ((*PRUNE, "--task", "boolq", "--task-data", "nowhere"), "There is no folder nowhere"),
    (("prune", "./nowhere", "out", "--method", "magnitude"), "There is no folder ./nowhere"),
    (("prune", "no-such-model", "out", "--method", "magnitude"), "There is no folder no-such-model"),
    (("prune", "demo:bert", "out", "--method", "magnitude"), "demo:bert"),
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
    (("export", "demo:opt", "exists"), "exists exists"),
    (("bench", "./nowhere"), "There is no folder ./nowhere"),
    (("demo", "--output", "exists"), "exists exists"),
]
"""Words of a command, and a part of what it says."""


@pytest.mark.parametrize(("words", "part"), [long_unless(number % 3 == 0, *case) for number, case in enumerate(CASES)])
def test_a_wrong_input_is_told_without_torch(
    words: tuple[str, ...], part: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A value, a path that is missing or cannot be read, and an output that exists; by every command."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    before = sorted(folder.iterdir())
    status, message, loaded = run(folder, *words)
    assert status == 1
    assert part in message
    assert message.count("error:") == 1
    assert not loaded
    assert sorted(folder.iterdir()) == before


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
def test_a_package_that_is_not_installed_is_one_message(folder: Path) -> None:
    code = NOT_INSTALLED + CODE.format(names=HEAVY, words=["info"])
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: torch is not installed. Install sparsellm again")
    assert "Traceback" not in done.stderr


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
    assert run(tmp_path, "inspect", "packed")[0::2] == (0, {"torch"})
    file = tmp_path / "other" / "generation_config.json"
    file.write_text(file.read_text() + " ")
    status, message, loaded = run(tmp_path, "verify", "other")
    assert (status, loaded) == (1, {"torch"})
    assert "generation_config.json was changed" in message


@pytest.mark.parametrize("family", [pytest.param("opt", marks=pytest.mark.long), "llama"])
def test_inspect_needs_no_transformers(family: str, tiny: dict[str, Path], tmp_path: Path) -> None:
    """Of an output whose layers are tensors of their own, some of them left dense."""
    sparsellm.prune(tiny[family], "magnitude", "2:4", exclude="*k_proj").save_pretrained(tmp_path / "run")
    assert run(tmp_path, "inspect", "run", "--expect", "2:4")[0::2] == (0, {"torch"})


@pytest.mark.long
@pytest.mark.parametrize("family", ["opt", "llama"])
def test_inspect_of_a_bundled_model_that_was_pruned_needs_no_transformers(family: str, tmp_path: Path) -> None:
    sparsellm.prune(f"demo:{family}", "magnitude", "60%").save_pretrained(tmp_path / "run")
    assert run(tmp_path, "inspect", "run", "--expect", "60%")[0::2] == (0, {"torch"})


@pytest.mark.long
@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_the_class_of_a_model_tells_where_layers_are(family: str, tmp_path: Path) -> None:
    """GPT-2 stores layers transposed, and experts are parts of a tensor: they are verified as well."""
    tiny_of(family).save_pretrained(tmp_path / "dense")
    sparsellm.prune(tmp_path / "dense", "magnitude", "2:4").save_pretrained(tmp_path / "run")
    assert sparsellm.verify(tmp_path / "run").layers > 0
    status, _, loaded = run(tmp_path, "verify", "run")
    assert (status, "transformers" in loaded) == (0, True)
