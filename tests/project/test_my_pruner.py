"""`examples/my-pruner`: its own tests, the commands of its README, a run that is killed and resumed, and two processes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from sparsellm.checkpoints.files import WORK
from sparsellm.outputs.journal import JOURNAL
from tests.conftest import ROOT
from tests.outputs import same_bits, tensors_of
from tests.warm_programs import Start

Run = Callable[..., subprocess.CompletedProcess[str]]
FOLDER = ROOT / "examples" / "my-pruner"


@pytest.fixture
def run(tmp_path: Path, start: Start) -> Run:
    """Runs a program of Python in a copy of the package, as it is once `pip install` was there."""
    shutil.copytree(FOLDER, tmp_path / "my-pruner", ignore=shutil.ignore_patterns("__pycache__"))
    project = tomllib.loads((FOLDER / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    metadata = tmp_path / "my-pruner" / "my_pruner-1.0.dist-info"
    metadata.mkdir()
    named = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (metadata / "METADATA").write_text(named, encoding="utf-8")
    points = "".join(f"{name} = {place}\n" for name, place in project["entry-points"]["sparsellm.extensions"].items())
    (metadata / "entry_points.txt").write_text(f"[sparsellm.extensions]\n{points}", encoding="utf-8")
    path = os.pathsep.join([str(tmp_path / "my-pruner"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}

    def in_folder(*words: str, status: int = 0) -> subprocess.CompletedProcess[str]:
        done = start(*words, folder=tmp_path / "my-pruner", environment=environment)
        assert done.returncode in (status, -9), done.stderr + done.stdout
        return done

    return in_folder


@pytest.mark.long
def test_its_readme(run: Run, tmp_path: Path) -> None:
    """All commands after the installation, as they stand there; two processes write the weights of one."""
    text = (FOLDER / "README.md").read_text(encoding="utf-8")
    lines = [line for code in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) for line in code.splitlines()]
    assert lines[:3] == ["cp -r examples/my-pruner my-pruner", "cd my-pruner", "pip install --editable ."]
    assert len(lines) > 7
    printed = {}
    for line in lines[3:]:
        program, *words = line.split()
        program, words = ("torch.distributed.run", ["--standalone", *words]) if program == "torchrun" else (program, words)
        printed[line] = run(program, *words).stdout
    assert "15 promises of ria, none broken" in printed["sparsellm check ria"]
    assert "ria(power=1.0)" in printed["sparsellm sweep sweep.yaml compared"]
    run("sparsellm", "prune", "demo:opt", "one", "--method", "ria", "--calibration", "demo", "--samples", "16")
    one, two = (tensors_of(tmp_path / "my-pruner" / name) for name in ("one", "two"))
    assert same_bits(one, two)
    for name, pattern in (("shared", "2:4x8"), ("ria-50", "50%")):
        run("sparsellm", "inspect", name, "--expect", pattern)


def test_a_killed_run_goes_on(run: Run, tmp_path: Path) -> None:
    """To the bytes of one that was not killed; a class that was edited between is refused."""
    words = [
        "prune",
        "demo:opt",
        "out",
        "--method",
        "in-order",
        "--set",
        "solver=ria",
        "--calibration",
        "demo",
        "--samples",
        "8",
    ]
    journal = tmp_path / "my-pruner" / "out" / WORK / JOURNAL
    (tmp_path / "my-pruner" / "dying.py").write_text(
        "import sys\nfrom sparsellm.cli.app import app\nfrom tests.processes import die_once_written\n"
        f"die_once_written({str(journal)!r}, b'\"block\"')\napp(sys.argv[1:])\n",
        encoding="utf-8",
    )
    assert run("dying", *words).returncode == -9
    assert journal.is_file()
    run("sparsellm", *words, "--resume")
    run("sparsellm", *[x.replace("out", "whole") for x in words])
    assert same_bits(*(tensors_of(tmp_path / "my-pruner" / name) for name in ("out", "whole")))
    shutil.rmtree(tmp_path / "my-pruner" / "out")
    assert run("dying", *words).returncode == -9
    with (tmp_path / "my-pruner" / "my_pruner" / "ria.py").open("a", encoding="utf-8") as file:
        file.write("\nCHANGED = True\n")
    refused = run("sparsellm", *words, "--resume", status=1)
    assert "my_pruner.ria" in refused.stderr
