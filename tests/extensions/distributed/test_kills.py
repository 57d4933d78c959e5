"""Runs killed at random moments go on to the bytes of an unbroken one; of two commands on one output, one wins."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import sys
import time
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

import pytest

import sparsellm
from sparsellm.checkpoints.files import REPORT, WORK
from sparsellm.outputs.folder import EXPORT, LOG, is_finished
from tests import processes

DRAWN = ("--calibration", "{text}", "--samples", "24", "--sequence-length", "64", "--batch-size", "4")
QUICK = ("prune", "{dense}", "{out}", *DRAWN, "--sparsity")
TRAINED = ("recover", "{pruned}", "{out}", "--against", "{dense}", *DRAWN, "--steps", "6")
TARGET = ("--max-perplexity-increase", "1000%", "--step", "25%")
LINES: dict[str, tuple[str, ...]] = {
    "sparsegpt": (*QUICK, "60%", "--method", "sparsegpt"),
    "wanda, streamed": (*QUICK, "60%", "--method", "wanda", "--offload"),
    "alps, streamed": (*QUICK, "60%", "--method", "alps", "--offload"),
    "sparsellm": (*QUICK, "60%", "--method", "sparsellm"),
    "as published": (*QUICK, "60%", "--method", "algorithm1", "--set", "epochs=3"),
    "bits": ("prune", "{dense}", "{out}", *DRAWN, "--bits", "3.5", "--method", "sparsegpt"),
    "several": (*QUICK, "60%,70%,80%", "--method", "wanda", "--evaluate", "{text}"),
    "recover": TRAINED,
    "recover, streamed": (*TRAINED, "--offload", "--scope", "block"),
    "search": ("search", "{dense}", "{out}", *DRAWN, "--method", "wanda", "--evaluate", "{text}", *TARGET),
    "sweep": ("sweep", "{sweep}", "{out}"),
    "pack": ("pack", "{pruned}", "{out}"),
    "unpack": ("unpack", "{packed}", "{out}"),
    "export": ("export", "{pruned}", "{out}", "--values", "int8"),
}
RESUMED = ("prune", "recover")
"""Commands that go on with --resume; the others go on by themselves."""

RANDOM_KILLS = int(os.environ.get("RANDOM_KILLS", "2"))
"""Of each line, half at moments of the run and half before changes of files; one more comes while an output is exported."""

RESULT = "result.json"
"""The result of a cell of a sweep."""

TIMED = ("seconds", "peak_memory_bytes", "time", "total")
"""Keys of the report whose values no two runs have in common."""


def kill(process: ForkServerProcess, out: Path, moment: float | None) -> bool:
    """Kill a run after so many seconds, or when it has begun to export; whether it was still there to be killed."""
    deadline = time.monotonic() + (moment or 60)
    while process.is_alive() and time.monotonic() < deadline:
        if moment is None and any(out.parent.rglob(f"{WORK}/{EXPORT}/*")):
            break
        time.sleep(0.002)
    process.kill()
    process.join()
    return process.exitcode == -signal.SIGKILL


def contents(folder: Path) -> dict[str, str]:
    """A digest of every file, but of times: logs, tables and the journal of a sweep are full of them."""

    def timeless(value: object) -> object:
        if isinstance(value, dict):
            return {key: timeless(x) for key, x in value.items() if key not in TIMED}
        return [timeless(x) for x in value] if isinstance(value, list) else value

    found = {}
    for file in sorted(folder.rglob("*")):
        if file.is_file() and not file.match("*.jsonl") and not file.match("results.*"):
            data = file.read_bytes()
            if file.name in (REPORT, RESULT):
                report = json.loads(data)
                for digests in (report.get("digests"), report.get("pruned")):  # of what holds times
                    if digests:
                        digests.pop("report" if "files" in digests else "digest", None)
                        digests.get("files", {}).pop(LOG, None)
                data = json.dumps(timeless(report)).encode()
            found[str(file.relative_to(folder))] = hashlib.sha256(data).hexdigest()
    return found


@pytest.fixture(scope="module")
def places(tiny: dict[str, Path], text_file: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What the lines name: a dense model, a pruned one, the same packed, a text, and the file of a sweep."""
    folder = tmp_path_factory.mktemp("places")
    sparsellm.prune(tiny["llama"], "magnitude", "60%").save_pretrained(folder / "pruned")
    sparsellm.pack(folder / "pruned", folder / "packed")
    recipe = {"model": str(tiny["llama"]), "method": "wanda", "calibration": str(text_file), "samples": 8}
    axes = {"sparsity": ["50%", "70%"]}
    sweep = {"recipe": {**recipe, "sequence_length": 64, "evaluate": [str(text_file)]}, "axes": axes, "keep": True}
    (folder / "sweep.yaml").write_text(json.dumps(sweep))
    made = {name: folder / name for name in ("pruned", "packed")}
    return {**made, "dense": tiny["llama"], "text": text_file, "sweep": folder / "sweep.yaml"}


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="needs processes that are forked from a server, and SIGKILL")
@pytest.mark.parametrize("name", LINES)
def test_killed_at_random_moments(name: str, server: ForkServerContext, places: dict[str, Path], tmp_path: Path) -> None:
    """Kills of each line: at random moments, before random changes of files, and as soon as there is something exported.

    Most changes are drawn from the last ones, where the finished output takes the place of what was there and work folders go.
    """
    generator = random.Random(name)
    said = tmp_path / "said.txt"

    def words(out: Path, *further: str) -> list[str]:
        return [*(word.format(out=out, **places) for word in LINES[name]), *further]

    def folder(number: int | str) -> Path:
        made = tmp_path / str(number) / "out"
        made.parent.mkdir()
        return made

    def names(parent: Path) -> list[str]:
        return sorted(str(file.relative_to(parent)) for file in parent.rglob("*"))

    whole = folder("whole")
    began = time.monotonic()
    changes = processes.changes(server, words(whole), said, whole.parent)
    seconds = time.monotonic() - began
    wanted = contents(whole.parent)
    resume = ["--resume"] if LINES[name][0] in RESUMED else []
    for number in range(RANDOM_KILLS + 1):
        out = folder(number)
        moment = generator.uniform(0.05, 0.95) * seconds if number < RANDOM_KILLS else None
        change = 1 + int(changes * (1 - generator.random() ** 3)) if number < RANDOM_KILLS and number % 2 else None
        if change:
            processes.changes(server, words(out), said, out.parent, change)
        else:
            while not kill(processes.started(server, words(out), said), out, moment):
                shutil.rmtree(out.parent)  # it came to its end before: this machine is not equally fast at all times
                out.parent.mkdir()
                moment = moment / 2 if moment else None
        refused = is_finished(out) and not resume  # the output is in its place: only what was there before is left to remove
        again = processes.started(server, words(out, *resume), said)
        again.join(120)
        assert again.exitcode == refused, said.read_text()
        assert contents(out.parent) == wanted, (number, moment, seconds, change, changes)
        assert names(out.parent) == names(whole.parent)
    assert "Traceback" not in said.read_text()


RACES = int(os.environ.get("RACES", "2"))
"""Of each command with a second one, half at random delays and half while the first one stands before a change of files.

By default the second one is drawn; with more than two, each command is the second of each.
"""

TOLD = ("Another process is working on", "exists", "is unfinished", "one that holds no files")
"""What the second command is told, by when it came."""

RACING = ("wanda, streamed", "several", "recover", "search", "pack", "unpack", "export")


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="needs processes that are forked from a server, SIGSTOP and /proc")
@pytest.mark.parametrize("first", RACING)
def test_two_commands_on_one_output(first: str, server: ForkServerContext, places: dict[str, Path], tmp_path: Path) -> None:
    """Whichever locks the output first finishes, and the other one is told; what is there is the winner's, as if it was alone.

    Where the first one stands before one of its changes of files, the second runs from its start to its end.
    """
    generator = random.Random(first)
    alone: dict[str, tuple[float, dict[str, str]]] = {}

    def words(name: str, out: Path) -> list[str]:
        return [word.format(out=out, **places) for word in LINES[name]]

    names = RACING if RACES > 2 else (generator.choice(RACING),)
    for name in dict.fromkeys((first, *names)):
        out = tmp_path / "alone" / name.split(",")[0] / "out"
        out.parent.mkdir(parents=True)
        seconds = processes.finished(server, words(name, out), tmp_path / "said.txt")
        alone[name] = seconds, contents(out.parent)
    counted = tmp_path / "counted" / "out"
    counted.parent.mkdir()
    changes = processes.changes(server, words(first, counted), tmp_path / "said.txt", counted.parent)
    stops = itertools.cycle(generator.sample(range(1, changes + 1), changes))
    for number, second in enumerate(name for _ in range(RACES) for name in names):
        out = tmp_path / f"{number}" / "out"
        out.parent.mkdir()
        said = [tmp_path / f"said-{number}-{place}.txt" for place in (0, 1)]
        if number // len(names) % 2:
            running = [processes.started(server, words(first, out), said[0])]
            time.sleep(generator.uniform(0, 1.05) * alone[first][0])
            running.append(processes.started(server, words(second, out), said[1]))
        else:
            running = [processes.stopped(server, words(first, out), said[0], out.parent, next(stops))]
            running.append(processes.started(server, words(second, out), said[1]))
            running[1].join(120)
            os.kill(running[0].pid or 0, signal.SIGCONT)
        for process in running:
            process.join(120)
        told = [file.read_text() for file in said]
        assert {process.exitcode for process in running} == {0, 1}, told
        winner = 0 if running[0].exitcode == 0 else 1
        assert contents(out.parent) == alone[(first, second)[winner]][1], told
        loser = " ".join(told[1 - winner].split())
        assert loser.count("error:") == 1, loser
        assert any(part in loser for part in TOLD), loser
        assert "Traceback" not in "".join(told), told
        shutil.rmtree(out.parent)
