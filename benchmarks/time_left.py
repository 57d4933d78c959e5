"""The time left that commands display, against the time that they then take: docs/large-models.md.

    python benchmarks/time_left.py measure    # a quarter of an hour
    python benchmarks/time_left.py table

Each command runs on one thread and measures the processor's time, so that other programs on the machine hardly change the
figures. Time starts after the libraries are imported.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

from measuring import MEASURED, ROOT, llama_config, markdown_table, measure_or_show, read_figures, record, write_random_model

FILE = MEASURED / "time-left.json"

PROGRAM = """\
import json, time
from dataclasses import asdict
time.perf_counter = time.monotonic = time.process_time
from sparsellm.cli.app import main
from sparsellm.observers import display
display.PLAIN_SHARE, display.PLAIN_LEAST, display.PLAIN_SECONDS = 0.01, 0.0, 5.0
display.line = lambda state, *_: json.dumps(asdict(state))
display.Plain.close = lambda self, state: state and self.print(display.line(state))
main()
"""
"""The command line with the processor's time for the clocks', which prints its states as JSON lines, and the last one again."""

START, TOLERANCE, SHORTEST = 0.25, 0.3, 1.0
"""From this fraction of a command on, the time left is compared; it holds within this fraction, or these seconds."""

PRUNE = "--sparsity 80% --calibration demo --samples 32"
WIDER = f"--sequence-length 512 {PRUNE}"
COMMANDS: dict[str, str] = {
    "prune, wanda": f"prune demo:opt OUT --method wanda --evaluate demo {PRUNE}",
    "prune, sparsegpt, read block by block": f"prune demo:llama OUT --method sparsegpt --offload --evaluate demo {PRUNE}",
    "prune, alps": f"prune demo:opt OUT --method alps {PRUNE}",
    "prune, sparsellm": f"prune demo:opt OUT --evaluate demo {PRUNE}",
    "prune, as published": f"prune demo:llama OUT --method algorithm1 {PRUNE}",
    "prune, sparsegpt, wider": f"prune RANDOM OUT --method sparsegpt {WIDER}",
    "prune, sparsegpt, wider, resumed": f"prune RANDOM OUT --method sparsegpt --resume {WIDER}",
    "recover, whole model": "recover PRUNED OUT --against demo:opt --calibration demo --samples 32 --steps 40",
    "recover, block by block": "recover PRUNED OUT --against demo:opt --calibration demo --samples 32 --scope block --steps 40",
    "evaluate": "evaluate demo:llama --text demo",
    "prune, three sparsities": f"prune demo:opt OUT --method alps --evaluate demo {PRUNE.replace('80%', '50%,60%,70%')}",
    "sweep of 9 runs": "sweep SWEEP OUT",
    "demo": "demo",
}
"""By name, the arguments of `sparsellm`. RANDOM is a Llama of six blocks of width 512. The resumed run was killed after two
blocks."""

SWEEP = """\
title: three methods at three sparsities
recipe: {model: demo:opt, calibration: demo, samples: 32, evaluate: [demo], evaluate_limit: 64}
axes:
  method: [wanda, sparsegpt, alps]
  sparsity: [50%, 70%, 2:4]
"""


def measure() -> None:
    """Measure every command that the file of figures lacks."""
    os.environ["OMP_NUM_THREADS"] = "1"
    for name, command in COMMANDS.items():
        if name in read_figures(FILE):
            continue
        with tempfile.TemporaryDirectory() as folder:
            words = [f"{folder}/{word}" if word.isupper() else word for word in command.split()]
            Path(folder, "SWEEP").write_text(SWEEP, encoding="utf-8")
            if "RANDOM" in command:
                write_random_model(Path(folder, "RANDOM"), llama_config(6, 512))
            if "PRUNED" in command:
                run(f"prune demo:opt {folder}/PRUNED --method wanda {PRUNE}".split())
            if "--resume" in words:
                run([word for word in words if word != "--resume"], stop=lambda state: state["done"] >= 14)
            record(FILE, name, figures(run(words)))


def run(words: list[str], stop: Callable[[dict[str, Any]], bool] = lambda _: False) -> list[dict[str, Any]]:
    """The states that a command displays. The command is killed at the first one of which `stop` is true."""
    command = [sys.executable, "-c", PROGRAM, *words]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    states: list[dict[str, Any]] = []
    for line in process.stderr or ():
        if not line.startswith("{"):  # a note or a measurement
            continue
        states.append(json.loads(line))
        if stop(states[-1]):
            process.send_signal(signal.SIGKILL)
            process.wait()
            return states
    if process.wait():
        raise SystemExit(f"failed: {' '.join(words)}")
    return states


def figures(states: list[dict[str, Any]]) -> dict[str, float]:
    """What the states say, against the end of the command."""
    end = states[-1]["elapsed"]
    shown = [(state["elapsed"], state["seconds_left"]) for state in states[:-1] if state["seconds_left"] is not None]
    compared = [(left, end - elapsed, length) for elapsed, left, length in spans(shown, end) if elapsed >= START * end]
    held = sum(length for left, true, length in compared if abs(left - true) <= max(TOLERANCE * true, SHORTEST))
    ratios = [left / true for left, true, _ in compared if true >= max(SHORTEST, 0.05 * end)]
    lowest = accumulate((left for _, left in shown), min)
    rises = [left / least - 1 for (_, left), least in zip(shown, lowest, strict=True) if left - least > SHORTEST]
    first, left = shown[0]
    result = {"seconds": end, "known": first / end, "first": left / (end - first), "held": held / sum(x for *_, x in compared)}
    return {
        name: round(x, 3)
        for name, x in (result | {"low": min(ratios), "high": max(ratios), "rise": max(rises, default=0)}).items()
    }


def spans(shown: list[tuple[float, float]], end: float) -> Iterator[tuple[float, float, float]]:
    """Each time left with the moment that it is displayed at and the seconds until the next one."""
    moments = [elapsed for elapsed, _ in shown]
    for (elapsed, left), following in zip(shown, [*moments[1:], end], strict=True):
        yield elapsed, left, following - elapsed


def table() -> list[str]:
    """Every command in a row."""
    cells = read_figures(FILE)
    machine, rows = cells.pop("machine"), []
    for name, cell in cells.items():
        ratios = f"{cell['low']:.2f} to {cell['high']:.2f}"
        rows.append(
            [
                name,
                f"{cell['seconds']:.0f} s",
                f"{100 * cell['known']:.0f}%",
                f"{cell['first']:.2f}",
                ratios,
                f"{100 * cell['held']:.0f}%",
                f"{100 * cell['rise']:.0f}%",
            ]
        )
    head = ["command", "time", "known from", "at first", "from a quarter on", "within 30%", "largest rise"]
    return [f"{machine}, processor time of one thread:", "", *markdown_table(head, rows)]


def main() -> None:
    measure_or_show(__doc__, measure, table)


if __name__ == "__main__":
    main()
