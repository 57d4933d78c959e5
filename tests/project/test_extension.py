"""Extensions: what a stranger's package brings, and what happens where it is broken."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from sparsellm import load_report
from sparsellm.checkpoints.loading import open_checkpoint
from sparsellm.outputs.folder import SCALES_FILE
from tests.conftest import ROOT
from tests.warm_programs import Start

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
def program(tmp_path: Path, start: Start) -> Program:
    """Runs the command line in a process that finds the packages in `tmp_path`."""
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path}
    return lambda *words: start("sparsellm", *map(str, words), folder=tmp_path, environment=environment)


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
        (("import typer", "import sparsellm.recipes.recipe"), "cannot be loaded: its module imports much of sparsellm"),
        (("import typer", "import nowhere"), "the package broken cannot be loaded: No module named 'nowhere'"),
        (("EXTENSION =", "EXTENSION = 3 or"), "cannot be loaded: broken:EXTENSION is no sparsellm.Extension"),
        (("broken:hello", "broken:goodbye"), "broken:goodbye of the package broken cannot be imported (AttributeError: "),
        (('"hello":', '"inspect":'), "'inspect' (commands) of the package broken 1.5 is not used"),
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
    assert "first-one 1.5 and second-one 1.5 both bring 'hello'" in done.stderr
    assert program("verify", "--help").returncode == 0


SECTION = (
    PRUNER
    + """
from sparsellm.outputs.sections import Section

class Notes(Section):
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


def test_facts_beside_those_of_the_machine(tmp_path: Path, program: Program) -> None:
    """Those whose names are taken, or that cannot be imported, are left out with a note."""
    facts = 'EXTENSION = Extension(facts={"my_count": "my_facts", "memory": "my_facts", "missing": "nowhere"})'
    install(tmp_path, "my-pruner", f"from sparsellm.extension import Extension\n{facts}\n")
    source = "def examine():\n    return 3\n\ndef rows(entry):\n    return {'mine': [['count', str(entry)]]}\n"
    (tmp_path / "my_facts.py").write_text(source, encoding="utf-8")
    for done in (program("info", "--json"), program("info")):
        assert done.returncode == 0, done.stderr
        assert "'memory' (facts) of the package my-pruner 1.5 is not used" in done.stderr
        assert "nowhere of the package my-pruner cannot be imported" in done.stderr
    assert re.search(r"^count +3$", done.stdout, re.MULTILINE)
    found = json.loads(program("info", "--json").stdout)
    assert found["my_count"] == 3
    assert found["memory"]["total"] > 0


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
    install(tmp_path, "third", SECTION.replace("my_pruner:Notes", "third:Count").replace("notes_of_mine", "a_count"))
    file.write_text(json.dumps(written | {"a_count": 1}), encoding="utf-8")
    done = program("report", out)
    assert done.returncode == 0
    assert "no subclass of sparsellm.outputs.sections.Section" in done.stderr


PARTS = """
from __future__ import annotations
from typing import ClassVar
from sparsellm.methods import Memory
from sparsellm.pipeline.cached_allocation import Allocated
from sparsellm.solvers.patterns import Unstructured

class Shrinking:
    def project(self, block, name, weight, problem):
        block.scales[name] = weight.new_full((1, 1), 0.5)
        return 0.5 * weight

    def broadcast(self, block, name, owner):
        pass

    def fields_of(self, full_name, weight):
        return {}

class Halves:
    @staticmethod
    def write(folder, model, report):
        names = [name for block in report.blocks for name in block.scales]
        (folder / "halves.txt").write_text("\\n".join(names))
        return f"{len(names)} layers are listed"

    @staticmethod
    def formats(folder):
        return {}

class FirstLess:
    def __init__(self, recipe):
        pass

    def check(self, blocks, plan):
        pass

    def memory(self, shapes, model):
        return Memory(model, [])

    def allocate(self, loaded, batches, plan, cache):
        return Allocated({name: Unstructured(0.25 if ".layers.0." in name else 0.5) for name in plan})

class Negate:
    on_dense: ClassVar[tuple[str, ...]] = ()
    stage: ClassVar[str] = "negating"

    @classmethod
    def of(cls, recipe):
        return cls()

    def check_memory(self, opened, windows):
        return "negating takes nothing"

    def memory(self, ready, placement, shapes):
        yield self.stage, Memory(0, [])

    def begin(self, run, loaded, batches, cache):
        def finish():
            for name in run.ready.plan:
                loaded.model.get_parameter(f"{name}.weight").data.neg_()
        return finish

"""

PATTERN = """
import re
from dataclasses import dataclass
from sparsellm.solvers.patterns import Pattern

@dataclass(frozen=True)
class First(Pattern):
    removed: int

    @classmethod
    def parse(cls, text):
        match = re.fullmatch(r"first ([1-7])", text)
        return cls(int(match[1])) if match else None

    def __str__(self):
        return f"first {self.removed}"

    @property
    def sparsity(self):
        return self.removed / 8

    @property
    def column_span(self):
        return 8

    def count_removed(self, shape):
        return shape[0] * shape[1] * self.removed // 8

    def holds(self, weight):
        return not weight.unflatten(1, (-1, 8))[..., : self.removed].any()

    def keep(self, score, *, per_row=False):
        import torch
        return (torch.arange(score.shape[1]) % 8 >= self.removed).expand_as(score)
"""

FIELDS = """
from sparsellm.recipes.fields import FurtherFields, method_option

class Fields(FurtherFields):
    shrink: bool = method_option(False, "Halve the kept weights.")
    negate: bool = method_option(False, "Negate them when all blocks are pruned.")

    def after_solve(self, pattern):
        from my_parts import Shrinking
        return Shrinking() if self.shrink else super().after_solve(pattern)

    def further_steps(self):
        return (*super().further_steps(), *(["negate"] if self.negate else []))
"""

IN_RUNS = """
from sparsellm.extension import Extension

EXTENSION = Extension(
    fields={"prune": ["my_fields:Fields"]},
    patterns={"first": "my_pattern:First", "missing": "nowhere:Missing"},
    allocations={"first-less": "my_parts:FirstLess"},
    steps={"negate": "my_parts:Negate"},
    side_files={"halves.txt": "my_parts:Halves", "missing.txt": "nowhere:Missing"},
)
"""


OBSERVING = """
from pathlib import Path
from sparsellm.extension import Extension

EXTENSION = Extension(observers={"stages": "my_pruner:stages"}, products={"cpu": "my_pruner:product"})

def note(text):
    with Path(__file__).with_name("seen.txt").open("a") as file:
        file.write(f"{text}\\n")

def stages(recipe):
    note(recipe.method)
    return lambda event: note(type(event).__name__)

def product(left, right):
    note("product")
    return left @ right
"""


def test_a_package_sees_the_events_and_computes_the_products_of_every_run(tmp_path: Path, program: Program) -> None:
    install(tmp_path, "my-pruner", OBSERVING)
    words = ("--calibration", "demo", "--samples", 2, "--sequence-length", 32, "--quiet")
    done = program("prune", "demo:opt", tmp_path / "out", "--method", "alps", *words)
    assert done.returncode == 0, done.stderr
    seen = (tmp_path / "seen.txt").read_text(encoding="utf-8").split()
    assert seen[0] == "alps"
    assert {"Stage", "LayerResult", "BlockResult", "product"} <= {*seen}


def test_a_package_takes_part_in_a_run(tmp_path: Path, program: Program) -> None:
    """By fields, which are options; by a rule that allocates, a projection of weights, a step, a pattern, a file.

    What cannot be imported stops no run that does without it.
    """
    words = ("--method", "magnitude", "--calibration", "demo", "--samples", 2, "--quiet")
    assert program("prune", "demo:opt", tmp_path / "plain", *words, "--shrink").returncode == 2
    install(tmp_path, "my-pruner", IN_RUNS)
    for module, source in {"my_parts": PARTS, "my_fields": FIELDS, "my_pattern": PATTERN}.items():
        (tmp_path / f"{module}.py").write_text(source, encoding="utf-8")
    assert "Halve the kept weights." in program("prune", "--help-all").stdout
    own = ("--allocation", "first-less", "--shrink", "--negate")
    done = program("prune", "demo:opt", tmp_path / "out", *words, *own)
    assert done.returncode == 0, done.stderr
    with pytest.warns(UserWarning, match="fields of my-pruner 1.5, which is not installed, .*: shrink, negate"):
        report = load_report(tmp_path / "out")  # this process does not find the package
    assert {round(layer.sparsity, 2) for layer in report.layers if ".layers.0." in layer.name} == {0.25}
    assert {round(layer.sparsity, 2) for layer in report.layers if ".layers.1." in layer.name} == {0.5}
    models = [open_checkpoint(name).load() for name in (str(tmp_path / "out"), "demo:opt")]
    assert (tmp_path / "out" / "halves.txt").read_text(encoding="utf-8").splitlines() == [layer.name for layer in report.layers]
    assert not (tmp_path / "out" / SCALES_FILE).exists()  # these scales are not those of rounding
    assert f"{len(report.layers)} layers are listed" in report.notes
    assert any(note.startswith("missing.txt is not written: nowhere:Missing of the package my-pruner") for note in report.notes)
    weight, dense = (model.get_parameter(f"{report.layers[0].name}.weight") for model in models)
    assert torch.equal(weight, torch.where(weight == 0, 0.0, -0.5 * dense))
    assert program("verify", tmp_path / "out", "--against", "demo:opt").returncode == 0
    few = ("--calibration", "demo", "--samples", 1, "--sequence-length", 32, "--shrink", "--quiet")
    assert program("prune", "demo:opt", tmp_path / "few", *few).returncode == 0  # magnitude would leave the projection out
    assert (tmp_path / "few" / "halves.txt").read_text(encoding="utf-8").count("layers") == len(report.layers)
    plan = program("plan", "demo:opt", *words[:-1], *own)
    assert "negating" in plan.stdout, plan.stderr
    (tmp_path / "my_pruner-1.5.dist-info").rename(tmp_path / "away")
    assert program("verify", tmp_path / "out", "--against", "demo:opt").returncode == 0
    again = program("plan", "--config", tmp_path / "out")
    assert again.returncode == 1
    assert "needs the package my-pruner 1.5, which brings 'shrink'" in again.stderr
    (tmp_path / "away").rename(tmp_path / "my_pruner-1.5.dist-info")
    of_pattern = ("--sparsity", "first 3", "--method", "sparsegpt", *words[2:])
    assert program("prune", "demo:opt", tmp_path / "first", *of_pattern).returncode == 0
    assert program("inspect", tmp_path / "first", "--expect", "first 3").returncode == 0
    assert program("inspect", tmp_path / "first", "--expect", "first 4").returncode == 1


METHODS = """
from __future__ import annotations
from dataclasses import dataclass
from typing import ClassVar
from sparsellm.extension import Extension
from sparsellm.methods.layerwise import LayerWise
from sparsellm.solvers import LayerSolver
from sparsellm.solvers.sparsegpt import SparseGPT
from sparsellm.solvers.statistics import InputRMS, TokenCount

@dataclass(frozen=True)
class RIA:
    \"\"\"Relative importance and activations (Zhang et al., ICLR 2024).

    Attributes:
        power: Exponent of the inputs' norms.
    \"\"\"

    power: float = 0.5
    needs: ClassVar[type[TokenCount]] = InputRMS

    def __post_init__(self):
        if self.power < 0:
            raise ValueError("power is negative")

    def solve(self, problem, pattern):
        size = problem.weight.abs()
        score = (size / size.sum(0) + size / size.sum(1, keepdim=True)) * problem.rms**self.power
        return problem.weight * problem.keep(pattern, score)

@dataclass(frozen=True)
class Twice(LayerWise):
    \"\"\"A method of blocks.\"\"\"

    solver: LayerSolver = SparseGPT()

class NoMethod:
    needs = InputRMS

NAMES = {"ria": "RIA", "twice": "Twice", "none": "NoMethod", "wanda": "RIA"}
EXTENSION = Extension(methods={name: f"my_pruner:{kind}" for name, kind in NAMES.items()})
"""


@pytest.fixture
def methods(tmp_path: Path) -> None:
    """A package that brings methods, in `tmp_path`."""
    install(tmp_path, "my-pruner", METHODS)


@pytest.mark.usefixtures("methods")
def test_a_method_of_a_package_has_a_name(tmp_path: Path, program: Program) -> None:
    """On the command line, in recipes, sweeps and reports, with settings; without its package only outputs are read."""
    words = ("--calibration", "demo", "--samples", 2, "--sequence-length", 64, "--quiet")
    by_name = program("prune", "demo:opt", tmp_path / "out", "--method", "ria", "--set", "power=1", *words)
    assert by_name.returncode == 0, by_name.stderr
    assert "ria(power=1" in by_name.stdout
    program("prune", "demo:opt", tmp_path / "other", "--method", "twice", "--set", "solver=ria", *words)
    program("prune", "demo:opt", tmp_path / "wanda", "--method", "wanda", *words)
    weights = [open_checkpoint(str(tmp_path / name)).load().state_dict() for name in ("out", "other", "wanda")]
    name = "model.decoder.layers.0.fc1.weight"
    assert len({torch.count_nonzero(x[name] * weights[0][name]).item() for x in weights}) == 3  # three masks
    fields = "model: demo:opt\ncalibration: demo\nsamples: 2\nsequence_length: 64\n"
    (tmp_path / "recipe.yaml").write_text(f"{fields}method: {{name: ria, power: 1}}\n", encoding="utf-8")
    same = program("prune", "--config", tmp_path / "recipe.yaml", tmp_path / "same", "--quiet")
    assert same.returncode == 0, same.stderr
    assert torch.equal(open_checkpoint(str(tmp_path / "same")).load().state_dict()[name], weights[0][name])
    sweep = f"{fields}evaluate: demo\nevaluate_limit: 1\naxes: {{method: [wanda, {{name: ria, power: 0}}]}}\n"
    (tmp_path / "sweep.yaml").write_text(sweep, encoding="utf-8")
    swept = program("sweep", tmp_path / "sweep.yaml", tmp_path / "swept", "--quiet")
    assert "ria(power=0)" in swept.stdout, swept.stderr
    shown = program("info", "ria").stdout
    assert "Relative importance and activations" in shown
    assert re.search(r"^power +float +0\.5 +Exponent of the inputs' norms", shown, re.MULTILINE)
    assert load_report(tmp_path / "other").inputs.keys() == {"demo:opt", "my_pruner:RIA", "my_pruner:Twice"}
    (tmp_path / "my_pruner.py").write_text(METHODS.replace("size / size.sum(0) +", ""), encoding="utf-8")
    edited = program("prune", "demo:opt", tmp_path / "out", "--method", "ria", "--set", "power=1", *words, "--resume")
    assert "not of this run: my_pruner:RIA was changed: module my_pruner had" in edited.stderr
    (tmp_path / "my_pruner-1.5.dist-info").rename(tmp_path / "away")
    assert program("verify", tmp_path / "out", "--against", "demo:opt").returncode == 0
    again = program("plan", "--config", tmp_path / "out")
    assert "needs the package my-pruner 1.5, which brings 'ria'" in again.stderr
    assert load_report(tmp_path / "out").recipe.to_dict()["settings"] == {"power": 1}


def test_the_package_of_the_page_on_methods(tmp_path: Path, program: Program) -> None:
    """Its two files, as they stand there, and the commands that it shows."""
    page = (ROOT / "docs" / "build-on-sparsellm.md").read_text(encoding="utf-8")
    modules, metadata, commands = (re.findall(rf"```{x}\n(.*?)```", page, re.DOTALL) for x in ("python", "toml", "console"))
    install(tmp_path, "my-pruner", modules[0])
    points = tomllib.loads(metadata[0])["project"]["entry-points"]["sparsellm.extensions"]
    written = (tmp_path / "my_pruner-1.5.dist-info" / "entry_points.txt").read_text(encoding="utf-8")
    assert written == f"[sparsellm.extensions]\nmy-pruner = {points['my-pruner']}\n"
    assert len(commands) == 3
    for line in (line for block in commands for line in block.splitlines()):
        for name in ("out", "default"):
            if f" {name} " in line:
                shutil.rmtree(tmp_path / name, ignore_errors=True)
        words = [str(tmp_path / x) if x in ("out", "default") else x for x in line.split()[1:]]
        small = ("--samples", 2, "--sequence-length", 64, "--quiet") if words[0] == "prune" else ()
        done = program(*words, *small)
        assert done.returncode == 0, done.stderr
    assert load_report(tmp_path / "default").recipe.to_dict()["settings"] == {"solver": {"name": "ria", "power": 0.5}}
    (tmp_path / "my_pruner-1.5.dist-info").rename(tmp_path / "away")
    again = program("plan", "--config", tmp_path / "default")
    assert "needs the package my-pruner 1.5, which brings 'ria'" in again.stderr


@pytest.mark.usefixtures("methods")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--method", "rai"), "--method is unknown: got 'rai'. Did you mean 'ria'"),
        (("--method", "ria", "--set", "pwer=1"), "The method ria has no setting 'pwer'. Settings of ria: power (float)"),
        (("--method", "ria", "--set", "power=much"), "power of the method ria: "),
        (
            ("--method", "ria", "--set", "power=-1"),
            "The method ria refuses {'power': -1.0}: power is negative. Settings of ria: power (float)",
        ),
        (("--method", "none"), "The method none of the package my-pruner 1.5 cannot be used (TypeError: "),
        (("--set", "solver=twice"), "The solver is unknown: got 'twice'."),
    ],
)
def test_a_method_that_cannot_be_used_is_refused(words: tuple[str, ...], message: str, program: Program) -> None:
    done = program("plan", "demo:opt", "--calibration", "demo", *words)
    assert done.returncode != 0
    assert message in done.stderr
    assert "'wanda' (methods) of the package my-pruner 1.5 is not used: sparsellm has one" in done.stderr


def test_a_run_loads_of_extensions_what_declares_commands(tmp_path: Path) -> None:
    """And fields of recipes, with the format names that these have: SparseGPT needs no other code of an extension."""
    words = ["prune", "demo:opt", str(tmp_path / "out"), "--method", "sparsegpt", "--calibration", "demo", "--samples", "2"]
    script = f"""
import sys
from sparsellm.cli.app import app
try:
    app({words!r})
except SystemExit:
    pass
print(*(name for name in sys.modules if name.startswith("sparsellm.")), sep="\\n")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = [name for name in done.stdout.splitlines() if name.startswith("sparsellm.")]
    assert "sparsellm.solvers.sparsegpt" in loaded
    owned = [name.removeprefix("sparsellm.extensions.") for name in loaded if name.startswith("sparsellm.extensions.")]
    parts = {name.partition(".")[2] for name in owned}
    assert parts == {"", "commands", "recipe_fields", "formats"}
