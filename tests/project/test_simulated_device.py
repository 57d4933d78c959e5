"""Every method on a device that is not the CPU: the same weights as on the CPU, no tensors of two devices together."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.utils import backend_registration

from sparsellm import prune
from tests.conftest import ROOT, report_of

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no NVIDIA GPU")
SIMULATION = ROOT / "tests" / "simulated_device.py"
pytestmark = pytest.mark.skipif(
    not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"),
    reason="this torch cannot register a backend from Python",
)


def surroundings() -> dict[str, str]:
    """The environment of a program that is run with one thread, from the repository."""
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}


def ran(*words: object, processes: int = 1) -> str:
    """The output of a Python program; it must succeed."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if processes > 1 else []
    command = [sys.executable, *launcher, *map(str, words)]
    done = subprocess.run(command, env=surroundings(), cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def assert_same(one: Path, other: Path) -> None:
    """The same tensors, bit for bit, in two files."""
    first, second = load_file(one), load_file(other)
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a written checkpoint, which has one file or several."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


PROGRAM = """
import torch
from tests.simulated_device import DEVICE, waits

x = torch.arange(6.0, device=DEVICE)
assert x.device.type == "simulated" and not x.is_cpu
for mixed in (lambda: x + torch.ones(6), lambda: torch.ones(6) + x[0], lambda: torch.stack([x[0], torch.tensor(1.0)])):
    try:
        mixed()
    except RuntimeError as error:
        assert "same device" in str(error), error
    else:
        raise AssertionError("tensors of two devices were mixed")
assert (x + torch.tensor(1.0)).device == DEVICE
assert not +waits, waits
x[x > 4] = 0.0
assert not +waits, waits
for read in (lambda: x[0].item(), x.tolist, lambda: bool(x[0] == 0), x.cpu, x.nonzero, lambda: x[x > 1]):
    waits.clear()
    read()
    assert waits.total() == 1, waits
layer = torch.nn.Linear(3, 2).to(DEVICE)
layer(x.view(2, 3)).square().sum().backward()
assert layer.weight.grad.device == DEVICE
"""


def test_the_simulation_refuses_and_counts(tmp_path: Path) -> None:
    """It raises where devices are mixed, counts each read once, and has gradients."""
    file = tmp_path / "program.py"
    file.write_text(PROGRAM, encoding="utf-8")
    ran(SIMULATION, file)


@pytest.mark.long
@pytest.mark.parametrize("case", ["llama", "mixtral sparsegpt", "opt published"])
def test_the_same_weights_as_on_the_cpu(case: str, tmp_path: Path) -> None:
    """The cases of several.py whose name has these words: against the CPU with the paths that GPUs take."""
    for device in ("queued", "simulated"):
        (tmp_path / device).mkdir()
    ran(ROOT / "tests" / "several.py", tmp_path / "queued", case, "queued")
    ran(SIMULATION, ROOT / "tests" / "several.py", tmp_path / "simulated", case, "simulated")
    files = sorted((tmp_path / "queued").glob("*.safetensors"))
    assert files
    for file in files:
        assert_same(file, tmp_path / "simulated" / file.name)


@pytest.mark.long
def test_two_processes(tmp_path: Path) -> None:
    """Both have the weights that one process has."""
    for count in (1, 2):
        (tmp_path / str(count)).mkdir()
        ran(SIMULATION, ROOT / "tests" / "several.py", tmp_path / str(count), "llama sparsegpt", "simulated", processes=count)
    for rank in (0, 1):
        assert_same(tmp_path / "1" / "llama sparsegpt-0.safetensors", tmp_path / "2" / f"llama sparsegpt-{rank}.safetensors")


@pytest.mark.long
@pytest.mark.parametrize("streamed", ["--offload", "--no-offload"])
def test_the_command(streamed: str, tiny: dict[str, Path], text_file: Path, tmp_path: Path) -> None:
    """With evaluation, in memory and block by block: the masks of the CPU. Perplexities are not compared."""
    words = [
        "--method",
        "wanda",
        "--calibration",
        text_file,
        "--samples",
        4,
        "--sequence-length",
        32,
        "--evaluate",
        text_file,
        streamed,
    ]
    reports = []
    for device in ("cpu", "simulated"):
        program = ["-m", "sparsellm"] if device == "cpu" else [SIMULATION, "-m", "sparsellm"]
        ran(*program, "prune", tiny["llama"], tmp_path / device, "--device", device, *words)
        reports.append(report_of(tmp_path / device))
    one, other = (tensors_of(tmp_path / device) for device in ("cpu", "simulated"))
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name] == 0, other[name] == 0)] == []
    assert reports[1]["environment"]["device"] == "simulated (simulated accelerator)"


RUNS: dict[str, tuple[str, ...]] = {
    "default": ("prune", "--sparsity", "80%"),
    "fast": ("prune", "--sparsity", "80%", "--effort", "fast", "--offload"),
    "bits": ("prune", "--bits", "2.3", "--effort", "fast", "--include", "*.layers.0.*"),
    "blocks": ("recover", "--scope", "block", "--steps", "2"),
    "model": ("recover", "--steps", "24"),
    "lora": ("recover", "--steps", "2", "--train", "lora"),
}
"""Commands whose intermediate results are kept on the CPU, such as a journal's."""


@pytest.fixture(scope="module")
def half(tiny: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pruned checkpoint."""
    folder = tmp_path_factory.mktemp("half") / "half"
    prune(str(tiny["llama"]), "magnitude", "50%").save_pretrained(folder)
    return folder


@pytest.mark.long
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("accelerator", ["simulated", pytest.param("cuda", marks=needs_gpu)])
def test_every_kind_of_run(
    name: str, accelerator: str, half: Path, tiny: dict[str, Path], text_file: Path, tmp_path: Path
) -> None:
    """Runs of the command end well, with the number of zeros that they have on the CPU."""
    command, *words = RUNS[name]
    words += ["--calibration", str(text_file), "--samples", "16", "--sequence-length", "32"]
    named = [tiny["llama"]] if command == "prune" else [half]
    words += ["--against", str(tiny["llama"])] if command == "recover" else []
    zeros = []
    for device in ("cpu", accelerator):
        program = [SIMULATION, "-m", "sparsellm"] if device == "simulated" else ["-m", "sparsellm"]
        ran(*program, command, *named, tmp_path / device, "--device", device, *words)
        zeros.append(sum(int((x == 0).sum()) for x in tensors_of(tmp_path / device).values()))
    assert zeros[0] == pytest.approx(zeros[1], rel=0.01)


@pytest.mark.long
def test_a_killed_run_goes_on(tiny: dict[str, Path], text_file: Path, tmp_path: Path) -> None:
    """Killed once its first block is finished, and resumed: the bytes of an unbroken run."""
    words = [
        "--method",
        "sparsegpt",
        "--calibration",
        text_file,
        "--samples",
        4,
        "--sequence-length",
        32,
        "--device",
        "simulated",
    ]
    program = [SIMULATION, "-m", "sparsellm", "prune", tiny["llama"]]
    ran(*program, tmp_path / "whole", *words)
    killed = [sys.executable, *map(str, [*program, tmp_path / "killed", *words])]
    status = 0
    while status >= 0:  # a short run may end before the signal comes
        shutil.rmtree(tmp_path / "killed", ignore_errors=True)
        process = subprocess.Popen(killed, env=surroundings(), cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while process.poll() is None and not list((tmp_path / "killed").glob(".sparsellm/block-*.safetensors")):
            time.sleep(0.002)
        process.kill()
        status = process.wait()
        assert status <= 0, "the run failed"
    ran(*program, tmp_path / "killed", *words, "--resume")
    one, other = tensors_of(tmp_path / "whole"), tensors_of(tmp_path / "killed")
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


@pytest.mark.long
def test_the_waits_in_the_documentation() -> None:
    """The table of docs/decisions.md is what the simulation counts."""
    ran(SIMULATION, ROOT / "docs" / "make_waits.py", "--check")
