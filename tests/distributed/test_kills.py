"""Runs killed by SIGKILL at random moments: each goes on to the bytes of an unbroken run, and nothing is left beside it."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
import signal
import sys
import time
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

import pytest

from sparsellm.runs.output_lock import EXPORT
from sparsellm.runs.records import LOG, REPORT, WORK
from tests import processes

QUICK = ("--sparsity", "60%", "--samples", "24", "--sequence-length", "64", "--batch-size", "4")
RECIPES: dict[str, tuple[str, ...]] = {
    "sparsegpt": ("--method", "sparsegpt"),
    "wanda, streamed": ("--method", "wanda", "--offload"),
    "alps, streamed": ("--method", "alps", "--offload"),
    "sparsellm": ("--method", "sparsellm"),
    "as published": ("--as-published", "--epochs", "3"),
}
RANDOM_KILLS = 4
"""Of each recipe, at moments of the run; one more comes while the output is exported."""

TIMED = ("seconds", "peak_memory_bytes", "time", "total")
"""Keys of the report whose values no two runs have in common."""


def kill(process: ForkServerProcess, out: Path, moment: float | None) -> bool:
    """Kill a run after so many seconds, or when it has begun to export; whether it was still there to be killed."""
    deadline = time.monotonic() + (moment or 60)
    while process.is_alive() and time.monotonic() < deadline:
        if moment is None and any((out / WORK / EXPORT).glob("*")):
            break
        time.sleep(0.002)
    process.kill()
    process.join()
    return process.exitcode == -signal.SIGKILL


def contents(folder: Path) -> dict[str, str]:
    """A digest of every file, but of times and of the log, which is full of them."""

    def timeless(value: object) -> object:
        if isinstance(value, dict):
            return {key: timeless(x) for key, x in value.items() if key not in TIMED}
        return [timeless(x) for x in value] if isinstance(value, list) else value

    found = {}
    for file in sorted(folder.rglob("*")):
        if file.is_file() and file.name != LOG:
            data = file.read_bytes()
            if file.name == REPORT:
                report = timeless(json.loads(data))
                del report["digests"]["files"][LOG], report["digests"]["report"]  # of what holds times
                data = json.dumps(report).encode()
            found[str(file.relative_to(folder))] = hashlib.sha256(data).hexdigest()
    return found


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="needs processes that are forked from a server, and SIGKILL")
@pytest.mark.parametrize("recipe", RECIPES)
def test_killed_at_random_moments(
    recipe: str, server: ForkServerContext, tiny: dict[str, Path], text_file: Path, tmp_path: Path
) -> None:
    """Five kills of each recipe: four at random moments of the run, one as soon as there is something exported."""
    generator = random.Random(recipe)
    said, outputs = tmp_path / "said.txt", tmp_path / "outputs"
    outputs.mkdir()

    def words(out: Path) -> list[str]:
        return ["prune", str(tiny["llama"]), str(out), "--calibration", str(text_file), *QUICK, *RECIPES[recipe]]

    whole = tmp_path / "whole"
    seconds = processes.finished(server, words(whole), said)
    wanted = contents(whole)
    for number in range(RANDOM_KILLS + 1):
        out = outputs / "out"
        moment = generator.uniform(0.05, 0.95) * seconds if number < RANDOM_KILLS else None
        while not kill(processes.started(server, words(out), said), out, moment):
            shutil.rmtree(out)  # it came to its end before that moment: this machine is not equally fast at all times
            moment = moment / 2 if moment else None
        processes.finished(server, [*words(out), "--resume"], said)
        assert contents(out) == wanted
        assert [file.name for file in outputs.iterdir()] == ["out"]
        out.rename(tmp_path / f"done-{number}")
    assert "Traceback" not in said.read_text()
