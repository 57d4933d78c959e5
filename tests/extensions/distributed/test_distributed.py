"""Several processes that work together: the same weights in all of them, and as from one."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import OPTConfig

from sparsellm.runtime import collectives, process_group
from tests.conftest import ROOT
from tests.several import CASES, CONFIGS

TESTS = ROOT / "tests"


def launched(processes: int, *words: object) -> subprocess.CompletedProcess[str]:
    """A program run by so many processes, one thread each."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [*launcher, *map(str, words)], env=environment, capture_output=True, text=True, timeout=600, check=False
    )


def found(folder: Path, count: int, case: str, rank: int) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The weights and figures that one of `count` processes left."""
    file = folder / str(count) / f"{case}-{rank}"
    return load_file(f"{file}.safetensors"), json.loads(Path(f"{file}.json").read_text())


@pytest.mark.parametrize(
    ("count", "chosen"),
    [(2, "llama sparsellm"), *(pytest.param(*case, marks=pytest.mark.long) for case in ((2, ""), (4, "llama")))],
)
def test_as_one_process(count: int, chosen: str, tmp_path: Path) -> None:
    """Every method, with every stage that goes over windows: all processes have the same weights, and one alone has them too.

    To the bit, since each batch's products are the same wherever they are made, and sums of float64 round to the same float32;
    so masks, errors and perplexities are the same too.
    """
    for processes in (1, count):
        (tmp_path / str(processes)).mkdir()
        ran = launched(processes, TESTS / "several.py", tmp_path / str(processes), chosen)
        assert ran.returncode == 0, ran.stderr[-2000:]
    for case in [name for name in CASES if chosen in name]:
        alone, said = found(tmp_path, 1, case, 0)
        for rank in range(count):
            weights, told = found(tmp_path, count, case, rank)
            assert [name for name, tensor in alone.items() if not torch.equal(weights[name], tensor)] == [], (case, rank)
            assert told["perplexity"] == said["perplexity"]
            layers = [[layer | {"seconds": 0} for layer in data["layers"]] for data in (told, said)]
            assert layers[0] == layers[1], (case, rank)
    if chosen == "":
        assert 0 < found(tmp_path, count, "opt sparsegpt", 0)[1]["sent"] - exchanged(CONFIGS["opt"]) < SMALL


def test_processes_measure_a_plan_together(tmp_path: Path) -> None:
    """The first block, of which each process has its share of the batches; one prints, and nothing stays."""
    words = ("--calibration", "demo", "--samples", 4, "--sequence-length", 64, "--batch-size", 1, "--method", "sparsegpt")
    words = (*words, "--evaluate", "demo", "--evaluate-limit", 9, "--offload", "--measure")
    ran = launched(2, "-m", "sparsellm", "plan", "demo:opt", tmp_path / "out", *words)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.count("Time: about") == ran.stdout.count("Disk space:") == 1
    assert list(tmp_path.iterdir()) == []


SMALL = 60_000
"""Bytes of plain data in such a run, at most: results, losses, counts of tokens."""


def exchanged(config: OPTConfig) -> int:
    """Bytes that SparseGPT exchanges, by the formula of docs/distributed.md: Grams and means in float64, weights as stored."""
    width, hidden = config.hidden_size, config.ffn_dim
    grams = 3 * (upper(width) + width) + upper(hidden) + hidden
    weights = 4 * width * width + 2 * width * hidden
    return config.num_hidden_layers * (8 * grams + 4 * weights)


def upper(width: int) -> int:
    """How many numbers of a symmetric matrix are exchanged: eight panels of rows, of 16 at least, from the diagonal on."""
    height = max(width // 8, 16)
    return sum(min(height, width - start) * (width - start) for start in range(0, width, height))


def test_alone() -> None:
    """Without other processes nothing is exchanged and nothing changes."""
    tensor = torch.ones(3)
    before = collectives.bytes_sent()
    collectives.all_reduce_(tensor)
    assert torch.equal(tensor, torch.ones(3))
    assert collectives.broadcast(0, tensor) is tensor
    assert (collectives.world(), collectives.rank(), collectives.is_main()) == (1, 0, True)
    assert collectives.shard([1, 2, 3]) == collectives.all_gather([1, 2, 3]) == [1, 2, 3]
    assert collectives.all_gather_object((1, 2)) == [(1, 2)]
    assert collectives.balance_costs([3.0, 1.0]) == [0, 0]
    assert collectives.bytes_sent() == before
    with process_group.init_process_group({}) as leads:
        assert leads


def test_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    """The dearest tasks first, each to whoever has the least to do: no load is above the mean by more than a task."""
    monkeypatch.setattr(collectives, "world", lambda: 3)
    costs = [5.0, 1.0, 9.0, 2.0, 2.0, 7.0, 1.0]
    whose = collectives.balance_costs(costs)
    loads = [sum(cost for cost, owner in zip(costs, whose, strict=True) if owner == process) for process in range(3)]
    assert sorted(loads) == [9.0, 9.0, 9.0]


# What becomes of the others when one is lost.


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as some:
        some.bind(("127.0.0.1", 0))
        return int(some.getsockname()[1])


def started(
    rank: int,
    port: int,
    *words: object,
    host: str = "127.0.0.1",
    before: Sequence[str] = (),
    module: str = "sparsellm",
    cwd: Path | None = None,
    **more: str,
) -> subprocess.Popen[str]:
    """One of two processes as a launcher starts them. before: the words that begin its command. module: what it runs."""
    environment = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": host, "MASTER_PORT": str(port)}
    return subprocess.Popen(
        [*before, sys.executable, "-m", module, *map(str, words)],
        env=os.environ | {"OMP_NUM_THREADS": "1"} | environment | more,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=cwd,
    )


def ended(process: subprocess.Popen[str]) -> str:
    """What a process said that had to end by an error, on one line."""
    _, told = process.communicate(timeout=240)
    assert process.returncode == 1, told
    assert "Traceback" not in told
    return " ".join(told.split())


def weights_of(folder: Path) -> bytes:
    """The weights in a finished folder."""
    return (folder / "model.safetensors").read_bytes()


def until(finished: Callable[[], bool], *processes: subprocess.Popen[str]) -> None:
    """Wait for something that running processes are to bring about."""
    end = time.monotonic() + 240
    while not finished():
        assert time.monotonic() < end
        assert all(process.poll() is None for process in processes), [process.communicate() for process in processes]
        time.sleep(0.05)


def blocks_in(output: Path) -> int:
    """How many blocks of a run are finished."""
    journal = output / ".sparsellm" / "journal.jsonl"
    lines = journal.read_text(encoding="utf-8").splitlines() if journal.exists() else []
    return sum(line.startswith('{"block"') for line in lines)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, tiny: dict[str, Path], text_file: Path) -> tuple[tuple[object, ...], bytes]:
    """The words of a run that takes a while, after `prune MODEL OUT`, and the weights that two processes give it unbroken."""
    words = (
        "--calibration",
        text_file,
        "--samples",
        128,
        "--sequence-length",
        64,
        "--sparsity",
        "60%",
        "--device",
        "cpu",
        "--set",
        "rounds=12",
    )
    output, port = tmp_path_factory.mktemp("unbroken") / "out", free_port()
    both = [started(rank, port, "prune", tiny["llama"], output, *words) for rank in (0, 1)]
    told = [process.communicate(timeout=240) for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    assert told[1] == ("", "")  # one speaks
    assert "Wrote" in told[0][0]
    return words, weights_of(output)


@pytest.mark.long
@pytest.mark.parametrize("lost", [0, 1])
def test_a_killed_process(lost: int, run: tuple[tuple[object, ...], bytes], tiny: dict[str, Path], tmp_path: Path) -> None:
    """The other ends within a minute and says which one died and what to do; resumed by two, the bytes of an unbroken run."""
    words, unbroken = run
    output, port = tmp_path / "out", free_port()
    both = [started(rank, port, "prune", tiny["llama"], output, *words) for rank in (0, 1)]
    until(lambda: blocks_in(output) >= 1, *both)
    both[lost].kill()
    since = time.monotonic()
    told = ended(both[1 - lost])
    assert time.monotonic() - since < 60
    assert f"Process {lost} of 2 (pid {both[lost].pid} on " in told
    assert "died or cannot be reached" in told
    assert "--resume" in told
    if lost == 1:
        assert "finished and kept" in told
    port = free_port()
    again = [started(rank, port, "prune", tiny["llama"], output, *words, "--resume") for rank in (0, 1)]
    said = [process.communicate(timeout=240) for process in again]
    assert [process.returncode for process in again] == [0, 0], said
    assert "started with" not in said[0][1]
    assert weights_of(output) == unbroken


def agent(rank: int, port: int, output: Path, *words: object) -> tuple[subprocess.Popen[bytes], Path]:
    """One of two launchers of a process each, as on two machines; and the file of what both print."""
    launcher = ["-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", rank, "--nproc-per-node", 1]
    address = ["--master-addr", "127.0.0.1", "--master-port", port, "-m", "sparsellm", "prune"]
    said = output.with_name(f"said-{rank}.txt")
    with said.open("w") as stream:
        command = [sys.executable, *map(str, (*launcher, *address, *words))]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, env=environment, stdout=stream, stderr=stream, start_new_session=True), said


def child_of(process: subprocess.Popen[bytes]) -> int:
    """The process that a launcher started."""
    return int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text())


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="finds the processes of a launcher in /proc")
@pytest.mark.parametrize(("lost", "how"), [(0, "machine"), (1, "machine"), (1, "SIGTERM"), (1, "launcher")])
def test_two_launchers_one_of_which_ends(
    lost: int, how: str, run: tuple[tuple[object, ...], bytes], tiny: dict[str, Path], tmp_path: Path
) -> None:
    """A machine that is lost ends the run, and so does a launcher that is told to end; one that is killed does not."""
    words, unbroken = run
    output, port = tmp_path / "out", free_port()
    launched = [agent(rank, port, output, tiny["llama"], output, *words) for rank in (0, 1)]
    processes, said = [process for process, _ in launched], launched[1 - lost][1]
    until(lambda: blocks_in(output) >= 1, *processes)  # type: ignore[arg-type]
    child = child_of(processes[lost])
    processes[lost].send_signal(signal.SIGTERM if how == "SIGTERM" else signal.SIGKILL)
    if how == "machine":
        os.kill(child, signal.SIGKILL)
    if how == "launcher":
        until(lambda: "Wrote" in said.read_text(), processes[1 - lost])  # type: ignore[arg-type]
        processes[1 - lost].kill()  # torchrun waits for the other launcher for five minutes
        assert weights_of(output) == unbroken
        return
    for process in processes:
        process.wait(240)
    told = " ".join(said.read_text().split())
    assert told.count("error: ") == 1
    assert f"Process {lost} of 2 (pid {child} on " in told
    reason = "failed: The launcher ended this process" if how == "SIGTERM" else "died or cannot be reached"
    assert reason in told
    assert "Start it again with --resume" in told
    alone = [sys.executable, "-m", "sparsellm", "prune", tiny["llama"], output, *words, "--resume"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    resumed = subprocess.run(list(map(str, alone)), env=environment, capture_output=True, text=True, timeout=240, check=True)
    assert "started with 2 processes of 1 thread, resumed with 1 process of 1 thread" in " ".join(resumed.stderr.split())
    assert weights_of(output) == unbroken  # what is promised is less: the same but for rounding


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "model", "more"),
    [("--sparsity", "llama", ("--sparsity", "60%")), ("file config.json", "opt", ())],
)
def test_processes_that_differ_are_refused(
    name: str, model: str, more: tuple[str, ...], tiny: dict[str, Path], text_file: Path, tmp_path: Path
) -> None:
    """Another recipe in one process, or another model: refused before anything is written, and told which and what."""
    words = ("--calibration", text_file, "--samples", 8, "--sequence-length", 32, "--method", "wanda")
    port, output = free_port(), tmp_path / "out"
    first = started(0, port, "prune", tiny["llama"], output, *words)
    second = started(1, port, "prune", tiny[model], output, *words, *more)
    told = ended(first)
    assert f"Process 1 differs from process 0: {name} is" in told
    assert ended(second) == ""
    assert not output.exists()


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (("recover", "missing", "out", "--against", "demo:opt", "--calibration", "demo"), 1, "error: missing"),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                (("prune", "demo:opt", "out", "--sparsity", "70%"), 1, "needs a calibration text"),
                (("prune", "demo:opt", "--sparsity", "70%", "--calibration", "demo"), 2, "name the folder to write"),
                (("prune", "demo:opt", "out", "--method", "magnitude", "--resume", "--restart"), 1, "pass one of them"),
                (("evaluate", "demo:opt"), 1, "--text or a --task"),
            )
        ),
    ],
)
def test_bad_input_is_told_once(words: tuple[str, ...], status: int, message: str, tmp_path: Path) -> None:
    """By the main process alone, also before there is anything to compute; nothing is written."""
    port = free_port()
    both = [started(rank, port, *words, cwd=tmp_path) for rank in (0, 1)]
    (_, told), (_, other) = (process.communicate(timeout=240) for process in both)
    assert message in " ".join(told.split())
    assert "Traceback" not in told
    assert other == ""
    assert [process.returncode for process in both] == [status, 1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.long
def test_an_existing_output_is_told_once(tmp_path: Path) -> None:
    """Which the main process alone looks for."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").touch()
    port = free_port()
    words = ("prune", "demo:opt", "out", "--method", "magnitude", "--sparsity", "70%")
    both = [started(rank, port, *words, cwd=tmp_path) for rank in (0, 1)]
    (_, told), (_, other) = (process.communicate(timeout=240) for process in both)
    assert told.count("error:") == 1
    assert other == ""
    assert [process.returncode for process in both] == [1, 1]


@pytest.mark.long
def test_the_settings_are_printed_once() -> None:
    port = free_port()
    words = ("prune", "demo:opt", "--sparsity", "3:4", "--calibration", "demo", "--print-config")
    both = [started(rank, port, *words) for rank in (0, 1)]
    (printed, told), (other, _) = (process.communicate(timeout=240) for process in both)
    assert "sparsity: '3:4'" in printed, told
    assert other == ""


def test_an_error_in_one(tiny: dict[str, Path], text_file: Path, tmp_path: Path) -> None:
    """What goes wrong in a process that does not lead is told by the one that does, with its number and place."""
    port, output = free_port(), tmp_path / "out"
    words = ("--samples", 8, "--sequence-length", 32, "--method", "wanda")
    first = started(0, port, "prune", tiny["llama"], output, *words, "--calibration", text_file)
    second = started(1, port, "prune", tiny["llama"], output, *words, "--calibration", tmp_path / "missing.txt")
    told = ended(first)
    assert f"Process 1 of 2 (pid {second.pid} on " in told
    assert "failed: BadText" in told
    assert "missing.txt" in told
    assert ended(second) == ""
    assert not output.exists()


@pytest.mark.long
def test_too_few_windows(tiny: dict[str, Path], text_file: Path, tmp_path: Path) -> None:
    port = free_port()
    words = ("prune", tiny["llama"], tmp_path / "out", "--calibration", text_file, "--samples", 1, "--sequence-length", 32)
    both = [started(rank, port, *words) for rank in (0, 1)]
    assert "There are 1 calibration sequences for 2 processes. Pass more --samples." in ended(both[0])
    assert ended(both[1]) == ""


@pytest.fixture
def machines() -> Iterator[Callable[[], None]]:
    """Two network namespaces that reach each other by one cable, 10.77.0.1 and 10.77.0.2; the call that cuts it."""
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("needs root and the program ip, to make namespaces")

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    try:
        for name in ("spone", "sptwo"):
            ip("netns", "add", name)
        ip("link", "add", "spcable", "netns", "spone", "type", "veth", "peer", "name", "spcable", "netns", "sptwo")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces cannot be made here: {error.stderr.decode().strip()}")
    try:
        for number, name in enumerate(("spone", "sptwo"), 1):
            ip("-n", name, "addr", "add", f"10.77.0.{number}/24", "dev", "spcable")
            ip("-n", name, "link", "set", "spcable", "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield lambda: ip("-n", "sptwo", "link", "set", "spcable", "down")
    finally:
        for name in ("spone", "sptwo"):
            subprocess.run(["ip", "netns", "del", name], check=False)


@pytest.mark.long
def test_a_machine_that_is_cut_off(
    machines: Callable[[], None], run: tuple[tuple[object, ...], bytes], tiny: dict[str, Path], tmp_path: Path
) -> None:
    """Two machines without a common folder prune together; with the cable between them cut, both end by the time limit."""
    words, _ = run
    port, outputs = free_port(), [tmp_path / "one" / "out", tmp_path / "two" / "out"]
    more = {"host": "10.77.0.1", "GLOO_SOCKET_IFNAME": "spcable"}
    spaces = [["ip", "netns", "exec", name] for name in ("spone", "sptwo")]

    def both(*further: str) -> list[subprocess.Popen[str]]:
        return [
            started(
                rank,
                port,
                "prune",
                tiny["llama"],
                outputs[rank],
                *words,
                *further,
                before=spaces[rank],
                module="tests.short_timeout",
                **more,
            )
            for rank in (0, 1)
        ]

    processes = both()
    until(lambda: blocks_in(outputs[0]) == 1, *processes)
    machines()
    since = time.monotonic()
    first, second = (ended(process) for process in processes)
    assert time.monotonic() - since < 60
    assert "Process 1 of 2" in first
    assert "died or cannot be reached" in first
    assert "finished and kept" in first
    assert "Process 0 of 2" in second
    assert not outputs[1].exists()


@pytest.mark.long
def test_a_sweep_and_a_measurement(tiny: dict[str, Path], text_file: Path, tmp_path: Path) -> None:
    """Processes of a launcher share a sweep's cells out, and the first one tells; a perplexity is the same by two as by one."""
    sweep, port = tmp_path / "sweep.yaml", free_port()
    sweep.write_text(
        f"recipe: {{model: {tiny['llama']}, method: magnitude}}\naxes: {{sparsity: [50%, 60%, 70%, 80%, 2:4, 3:4]}}\n"
    )
    both = [started(rank, port, "sweep", sweep, tmp_path / "out", "--json") for rank in (0, 1)]
    told = [process.communicate(timeout=240) for process in both]
    assert [process.returncode for process in both] == [0, 0], told
    assert told[1] == ("", "")
    assert len(list((tmp_path / "out" / "cells").glob("*/result.json"))) == 6
    assert len(json.loads(told[0][0])["cells"]) == 6
    port, words = free_port(), ("evaluate", tiny["llama"], "--text", text_file, "--sequence-length", 32, "--json")
    both = [started(rank, port, *words) for rank in (0, 1)]
    alone = subprocess.run([sys.executable, "-m", "sparsellm", *map(str, words)], capture_output=True, text=True, check=True)
    said = [process.communicate(timeout=240)[0] for process in both]
    assert said[1] == ""
    values = [json.loads(text)["perplexity"][str(text_file)]["value"] for text in (said[0], alone.stdout)]
    assert values[0] == pytest.approx(values[1], rel=1e-6)
