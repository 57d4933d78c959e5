"""Plugins: methods of a module without a package, by import path or by name, and files, which import no code."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from typer.testing import Result

import sparsellm
from sparsellm import extension
from sparsellm.checkpoints.loading import open_checkpoint
from sparsellm.errors import InvalidSetting
from tests.conftest import report_of
from tests.project.test_extension import PATTERN

Command = Callable[..., Result]

PRUNER = """
from dataclasses import dataclass
from typing import Any, Callable, ClassVar
import torch
import sparsellm

@dataclass(frozen=True)
class RIA:
    \"\"\"Relative importance and activations.\"\"\"

    power: float = 0.5
    needs: ClassVar[type] = sparsellm.InputRMS

    def solve(self, problem, pattern):
        size = problem.weight.abs()
        score = size / size.sum(0) + size / size.sum(1, keepdim=True)
        return problem.weight * problem.keep(pattern, score * problem.rms**self.power)

@dataclass(frozen=True)
class Inside(sparsellm.LayerWise):
    \"\"\"A method of blocks.\"\"\"

    solver: sparsellm.LayerSolver = RIA(power=0.25)
"""

STEP = """
from dataclasses import dataclass
from typing import ClassVar
from sparsellm.methods import Memory

@dataclass(frozen=True)
class Scale:
    factor: float = 1.0
    on_dense: ClassVar[tuple[str, ...]] = ()
    stage: ClassVar[str] = "scaling"

    def check_memory(self, opened, windows):
        return "scaling takes nothing"

    def memory(self, ready, placement, shapes):
        yield self.stage, Memory(0, [])

    def begin(self, run, loaded, batches, cache):
        def finish():
            for name in run.ready.plan:
                loaded.model.get_parameter(f"{name}.weight").data.mul_(self.factor)
        return finish
"""

STRANGE = """
from dataclasses import dataclass
from typing import Any, Callable, ClassVar
import torch
import sparsellm

print("printed at its import")

@dataclass(frozen=True)
class Base:
    needs: ClassVar[Any] = sparsellm.InputRMS

    def solve(self, problem, pattern):
        return problem.weight * problem.keep(pattern, problem.weight.abs())

class Plain:
    needs = sparsellm.InputRMS
    solve = Base.solve

@dataclass(frozen=True)
class NoSolve:
    power: float = 1.0

@dataclass(frozen=True)
class Required(Base):
    power: float

@dataclass(frozen=True)
class Function(Base):
    of: Callable[[Any], Any] = torch.abs

@dataclass(frozen=True)
class Nothing(Base):
    needs: ClassVar[Any] = None

@dataclass(frozen=True)
class Wanda(Base):
    pass

@dataclass(frozen=True)
class Stated(Base):
    name: ClassVar[str] = "as-stated"

AN_OBJECT = Stated()
"""

SOURCES = {"own_pruner": PRUNER, "own_step": STEP, "own_pattern": PATTERN, "strange": STRANGE}
SOURCES |= {"leaves": "raise SystemExit(0)", "empty": ""}

SIZE = ("--calibration", "demo", "--samples", 2, "--sequence-length", 64)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with modules of a stranger, none of which is imported; no plugin is loaded."""
    for name, source in SOURCES.items():
        (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(extension, "PLUGINS", [])
    before = [*extension.PROBLEMS]
    yield tmp_path
    extension.PROBLEMS[:] = before


def fresh() -> None:
    """Forget the plugins, as a new process has it."""
    extension.PLUGINS.clear()
    for name in SOURCES:
        sys.modules.pop(name, None)


def test_a_method_by_its_import_path(folder: Path, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its run is repeated by the words of the page; without the module, its output is read all the same."""
    done = command("prune", "demo:opt", "out", "--method", "own_pruner:RIA", "--set", "power=1", *SIZE, "--quiet")
    assert done.exit_code == 0, done.stderr
    assert "ria(power=1.0)" in done.stdout
    recipe = report_of(folder / "out")["recipe"]
    assert (recipe["method"], recipe["settings"], recipe["packages"]) == ("ria", {"power": 1.0}, {"method": "own_pruner"})
    assert "ria(power=1.0)" in (folder / "out" / "README.md").read_text(encoding="utf-8")
    fresh()
    (folder / "own_pruner.py").rename(folder / "away.py")
    for words in (("verify", "out", "--against", "demo:opt"), ("inspect", "out"), ("report", "out")):
        assert command(*words).exit_code == 0
    assert "--plugin own_pruner:RIA" in (folder / "out.html").read_text(encoding="utf-8")
    assert sparsellm.load_report("out").recipe.to_dict()["settings"] == {"power": 1.0}
    refused = command("plan", "--config", "out")
    assert refused.exit_code == 1
    assert "--plugin own_pruner:RIA" in refused.stderr
    (folder / "away.py").rename(folder / "own_pruner.py")
    assert "own_pruner" not in sys.modules
    again = command("prune", "--config", "out", "again", "--plugin", "own_pruner", "--print-config")
    assert yaml.safe_load(again.stdout)["method"] == {"name": "ria", "power": 1.0}, again.stderr


@pytest.mark.parametrize(
    ("words", "label"),
    [
        (("--method", "own_pruner:Inside"), "inside(solver=ria(power=0.25))"),
        (("--set", "solver=own_pruner:RIA"), "sparsellm(solver=ria(power=0.5))"),
        (("--plugin", "own_pruner", "--method", "ria"), "ria(power=0.5)"),
        (("--plugin", "own_pruner:RIA", "--plugin", "strange:Stated", "--method", "as-stated"), "as-stated"),
        (("--plugin", "own_pruner", "--set", "solver={name: ria, power: 2}"), "sparsellm(solver=ria(power=2.0))"),
    ],
)
def test_names_of_plugins(words: tuple[str, ...], label: str, command: Command) -> None:
    done = command("plan", "demo:opt", *SIZE, *words)
    assert f"demo:opt: {label}, " in done.stdout, done.stderr
    assert "printed" not in done.stdout


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("strange:Plain", "no frozen dataclass"),
        ("strange:NoSolve", "no frozen dataclass with `solve`"),
        ("strange:Required", "'power'"),
        ("strange:Function", "Function.of"),
        ("strange:Nothing", "Nothing.needs"),
        ("strange:Wanda", "strange:Wanda has the name of the method wanda"),
        ("strange:Missing", "Missing"),
        ("leaves:RIA", "ends the process"),
        ("nowhere:RIA", "nowhere"),
        ("subprocess:Popen", "no frozen dataclass"),
        ("strange:AN_OBJECT", "no frozen dataclass"),
    ],
)
def test_classes_that_cannot_be_used(path: str, message: str, command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    """One message each, with nothing on stdout, before the model is opened."""
    monkeypatch.setattr("sparsellm.pipeline.loading.open_checkpoint", lambda *_, **__: pytest.fail("opened"))
    done = command("plan", "demo:opt", "--json", *SIZE, "--method", path)
    assert (done.exit_code, done.stdout) == (1, "")
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert message in error


@pytest.mark.parametrize("module", ["leaves", "nowhere", "empty", "subprocess"])
def test_modules_that_are_no_plugin(module: str, command: Command) -> None:
    done = command("plan", "demo:opt", *SIZE, "--method", "wanda", "--plugin", module)
    assert done.exit_code == 1
    assert f"--plugin {module}" in done.stderr


def test_a_name_of_sparsellm_stays_its_own(command: Command) -> None:
    done = command("plan", "demo:opt", *SIZE, "--plugin", "strange", "--method", "wanda")
    assert done.exit_code == 0
    assert "note: 'wanda' (methods) of the package strange is not used" in done.stderr


BAD_FIELDS = (
    {"method": "own_pruner:RIA"},
    {"method": {"name": "own_pruner:RIA", "power": 1}},
    {"method": {"name": "sparsellm", "solver": {"name": "own_pruner:RIA"}}},
    {"plugin": "own_pruner", "method": "ria"},
    {"plugin": ["own_pruner:RIA"], "method": "ria"},
    {"method": "ria"},
    {"method": "magnitude", "then": "own_pruner:RIA"},
    {"method": "magnitude", "then": [{"name": "own_pruner:RIA", "power": 1}]},
)


@pytest.mark.parametrize("fields", BAD_FIELDS, ids=str)
def test_a_file_imports_no_code(fields: dict[str, Any], folder: Path, command: Command) -> None:
    """A recipe, the fields of a sweep, its axes, and a report."""
    shared = {"model": "demo:opt", "calibration": "demo", "sparsity": "50%"}
    Path("recipe.yaml").write_text(yaml.safe_dump(shared | fields), encoding="utf-8")
    Path("sweep.yaml").write_text(yaml.safe_dump({"recipe": shared | fields, "axes": {"seed": [0]}}), encoding="utf-8")
    axes = {name: x if isinstance(x, list) else [x] for name, x in fields.items()}
    Path("axes.yaml").write_text(yaml.safe_dump({"recipe": shared, "axes": axes}), encoding="utf-8")
    recipe = {"command": "prune", "settings": {}} | shared | fields
    Path("sparsellm.json").write_text(json.dumps({"format": 1, "recipe": recipe}), encoding="utf-8")
    runs = [("plan", "--config", "recipe.yaml"), ("plan", "--config", "sparsellm.json")]
    runs += [("sweep", file, "out", "--list") for file in ("sweep.yaml", "axes.yaml")]
    for words in runs:
        done = command(*words)
        assert done.exit_code == 1, words
        assert "own_pruner" in done.stderr or "ria" in done.stderr
    assert "own_pruner" not in sys.modules


@pytest.mark.parametrize(
    ("words", "is_found"),
    [
        (("plan", "demo:opt", "--calibration", "demo"), False),
        (("info", "wanda"), False),
        (("check", "2:4"), False),
        (("plan", "demo:opt", "--calibration", "demo", "--method", "own_pruner:RIA"), True),
        (("plan", "demo:opt", "--calibration", "demo", "--plugin", "own_pruner"), True),
        (("info", "own_pruner:RIA"), True),
        (("check", "own_pruner:RIA"), True),
    ],
)
def test_the_current_folder_is_searched_for_named_modules_only(
    words: tuple[str, ...], is_found: bool, folder: Path, command: Command
) -> None:
    """A folder of others may hold a triton.py, which would else be imported where triton is missing."""
    assert command(*words).exit_code == 0
    assert (str(folder) in sys.path) == is_found


def test_a_sweep_over_the_settings_of_a_plugin(folder: Path, command: Command) -> None:
    methods = [
        "magnitude",
        {"name": "ria", "power": [0.5, 1.0]},
        {"name": "sparsellm", "solver": {"name": "ria", "power": 2.0}},
    ]
    shared = {"model": "demo:opt", "calibration": "demo", "samples": 2, "sequence_length": 64}
    Path("sweep.yaml").write_text(yaml.safe_dump(shared | {"axes": {"method": methods}}), encoding="utf-8")
    listed = command("sweep", "sweep.yaml", "out", "--list", "--plugin", "own_pruner")
    assert listed.exit_code == 0, listed.stderr
    labels = ["magnitude", "ria(power=0.5)", "ria(power=1.0)", "sparsellm(solver=ria(power=2.0))"]
    assert [line.split("  ")[0] for line in listed.stdout.splitlines() if line[:1].islower()][1:] == labels
    only = ("--only", "method=ria(power=1.0)")
    assert command("sweep", "sweep.yaml", "out", "--quiet", "--plugin", "own_pruner", *only).exit_code == 0
    fresh()
    (folder / "own_pruner.py").unlink()
    assert command("report", "out").exit_code == 0
    assert "sparsellm sweep sweep.yaml out-again --plugin own_pruner" in (folder / "out.html").read_text(encoding="utf-8")


def test_a_step_has_a_name_and_settings(folder: Path, command: Command) -> None:
    words = ("demo:opt", "--method", "magnitude", "--quiet")
    assert command("prune", "demo:opt", "plain", *words[1:]).exit_code == 0
    done = command("prune", "demo:opt", "out", *words[1:], "--plugin", "own_step", "--then", "{name: scale, factor: 2}")
    assert done.exit_code == 0, done.stderr
    assert "magnitude, then scale(factor=2.0), 50 % removed" in done.stdout
    weights = [open_checkpoint(name).load().state_dict()["model.decoder.layers.0.fc1.weight"] for name in ("plain", "out")]
    assert torch.equal(2 * weights[0], weights[1])
    assert report_of(folder / "out")["recipe"]["packages"] == {"then": "own_step"}
    fresh()
    assert command("verify", "out").exit_code == 0
    refused = command("plan", "--config", "out")
    assert "--plugin own_step" in refused.stderr
    again = command("plan", "--config", "out", "--plugin", "own_step")
    assert "then scale(factor=2.0)" in again.stdout, again.stderr
    by_path = command("plan", *words[:-1], "--then", "own_step:Scale")
    assert "then scale(factor=1.0)" in by_path.stdout, by_path.stderr
    axis = {"model": "demo:opt", "method": "magnitude", "axes": {"then": [None, {"name": "scale", "factor": [0.5, 2.0]}]}}
    Path("sweep.yaml").write_text(yaml.safe_dump(axis), encoding="utf-8")
    assert "scale(factor=0.5)" in command("sweep", "sweep.yaml", "swept", "--list", "--plugin", "own_step").stdout


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("scalee", "--then is unknown: got 'scalee'. Did you mean 'scale'"),
        ("{name: scale, fctor: 2}", "The step scale has no setting 'fctor'. Settings of scale: factor (float)"),
        ("{name: scale, factor: much}", "factor of the step scale: "),
        ("{factor: 2}", "no name"),
        ("training", "The step training of the package sparsellm"),
        ("own_pruner:RIA", "own_pruner:RIA cannot stand here"),
    ],
)
def test_a_step_that_cannot_be_used(value: str, message: str, command: Command) -> None:
    done = command("plan", "demo:opt", "--method", "magnitude", "--plugin", "own_step", "--then", value)
    assert done.exit_code == 1
    assert message in done.stderr


def test_a_pattern_of_a_plugin(folder: Path, command: Command) -> None:
    """Without it, its output is read: zeros are counted, and a note says that their places are not checked."""
    words = ("--method", "magnitude", "--sparsity", "first 3", "--quiet", "--plugin", "own_pattern")
    done = command("prune", "demo:opt", "out", *words)
    assert "first 3 removed" in done.stdout, done.stderr
    assert report_of(folder / "out")["recipe"]["packages"] == {"sparsity": "own_pattern"}
    fresh()
    for read in (("verify", "out", "--against", "demo:opt"), ("inspect", "out"), ("report", "out")):
        done = command(*read)
        assert done.exit_code == 0, done.stderr
        assert "the pattern first 3" in done.stderr
    assert "--plugin own_pattern" in command("plan", "--config", "out").stderr
    assert command("plan", "demo:opt", "--method", "magnitude", "--sparsity", "first 3").exit_code == 1


def test_objects_have_the_labels_of_names(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.syspath_prepend(folder)
    with pytest.raises(InvalidSetting, match=r"plugin.*own_pruner"):
        sparsellm.plan("demo:opt", "own_pruner:RIA", calibration="demo")
    named = sparsellm.plan("demo:opt", "ria", calibration="demo", plugin="own_pruner", settings={"power": 1})
    kinds: Any = sys.modules["own_pruner"]
    for given in (kinds.RIA(1.0), kinds.RIA(1)):
        own = sparsellm.plan("demo:opt", given, calibration="demo").recipe
        assert own.describe() == named.recipe.describe() == "ria(power=1.0), 50 % removed, unstructured"
    inside = sparsellm.plan("demo:opt", sparsellm.SparseLLM(solver=kinds.RIA(2.0)), calibration="demo").recipe
    assert inside.describe().startswith("sparsellm(solver=ria(power=2.0)), ")
    monkeypatch.syspath_prepend(folder)
    extension.load_plugin("strange")
    with pytest.raises(InvalidSetting, match=r"Function\.of"):
        sparsellm.plan("demo:opt", sys.modules["strange"].Function(), calibration="demo")


def test_an_unknown_method_s_message_names_the_page(command: Command) -> None:
    assert "docs/build-on-sparsellm.md" in command("plan", "demo:opt", *SIZE, "--method", "ria").stderr
