"""The forms of the progress display: at most 80 columns, plain lines, a live line, a bar, nothing."""

from __future__ import annotations

import re
import sys
import types
from typing import Any

import pytest

from sparsellm.observers.display import Display, human_seconds, line, time_left
from sparsellm.observers.events import Advanced, Event, Measured, NextRun, Note, Schedule, Stage
from sparsellm.observers.progress import State
from tests.core.unit.pipeline.test_progress import block

GIB = 2**30
STATE = State(3, 128, "llama-2-7b, sparsellm, 2:4", "choosing per-layer sparsity (fisher)", 12, 14, 12345, 67890, "sequence",
              359_000.0, 360_000.0, "model.layers.31.mlp.down_proj  error 0.00123")  # fmt: skip

RUN: list[Event] = [
    Stage("opening"),
    Schedule(("measuring dense", "pruning")),
    Stage("measuring dense"),
    *(Advanced(done, 20, "sequence") for done in range(1, 21)),
    Measured("perplexity", "demo", "dense", float("inf"), None),
    Stage("pruning", 2, 2),
    Note("pass `samples`"),
    *(event for index in range(2) for event in (*block(index).layers, block(index))),
]


def play(mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Display `RUN`."""
    monkeypatch.setattr("sparsellm.observers.display.memory_in_use", lambda: (GIB, 16 * GIB))
    with Display(mode, lambda text: text.replace("`samples`", "--samples")) as display:
        for event in RUN:
            display(event)


@pytest.mark.parametrize("width", [80, 100, 200])
def test_a_line_fits_and_keeps_what_matters(width: int) -> None:
    """The longest stage of a large sweep: numbers, time left and memory stay, names are cut."""
    text = line(STATE, (15 * GIB, 16 * GIB), width)
    assert len(text) < width
    for part in ("[3/128] ", "12/14 choosing", ", sequence 12,345/67,890", "49%", "100h00m left", "memory 94%"):
        assert part in text


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (
            State(0, 0, "", "pruning", 2, 3, 4, 24, "layer", 61.0, 100.2, "mean error 0.012"),
            "2/3 pruning, layer 4/24  37%  1m01s, 1m41s left  memory 6%  mean error 0.012",
        ),
        (State(0, 0, "", "opening", 0, 0, 0, 0, "", 2.0, None, ""), "opening  2s  memory 6%"),
        (
            State(1, 8, "trying 48%", "pruning", 1, 8, 0, 0, "", 10.0, 10.0, ""),
            "[1/8] trying 48%: 1/8 pruning  50%  10s, 10s left  memory 6%",
        ),
    ],
)
def test_a_line_has_what_is_known(state: State, text: str) -> None:
    """The numbers of runs and of stages stand apart; a time left that is not known is left out."""
    assert line(state, (GIB, 16 * GIB), 80) == text


@pytest.mark.parametrize(("seconds", "text"), [(1e-3, "<1s left"), (0.99, "<1s left"), (1.2, "2s left"), (3601, "1h00m left")])
def test_time_left_is_never_zero(seconds: float, text: str) -> None:
    assert time_left(seconds) == text
    assert not time_left(seconds).startswith(human_seconds(0) + " ")


def test_a_pipe_gets_plain_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """At the beginning of stages and at every tenth, without control characters; the note is in the words of the command."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr("sparsellm.observers.display.PLAIN_LEAST", 0.0)
    play("auto", monkeypatch)
    printed = capsys.readouterr()
    lines = printed.err.splitlines()
    assert not printed.out
    assert "\x1b" not in printed.err
    assert max(map(len, lines)) <= 80
    assert re.fullmatch(r"opening  \ds  memory 6%", lines[0])
    assert "perplexity on demo, dense: inf" in lines
    assert "note: pass --samples" in lines
    assert [text for text in lines if text.startswith("2/2 pruning, layer 0/2")]
    assert 6 <= len(lines) <= 18


@pytest.mark.parametrize(("mode", "expected"), [("quiet", "note: pass --samples\n"), ("off", "")])
def test_quiet_shows_only_notes_and_off_nothing(
    mode: str, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    play(mode, monkeypatch)
    assert capsys.readouterr().err == expected


def test_a_terminal_gets_one_line_that_is_rewritten(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is wider than the terminal, and only results and notes stay."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    play("auto", monkeypatch)
    printed = capsys.readouterr().err
    assert "\x1b[2K" in printed
    drawn = [part.split("m", 1)[-1] if part.startswith("[") else part for part in printed.replace("\r", "\n").split("\n")]
    assert any("2/2 pruning, layer 1/2" in text for text in drawn)
    assert printed.count("\n") <= 6  # live lines overwrite each other


def test_a_notebook_gets_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """IPython's display is replaced, since it is not installed for the tests."""
    shown: list[str] = []
    handle = types.SimpleNamespace(update=shown.append)
    module: Any = types.ModuleType("IPython.display")
    module.HTML, module.display = str, lambda first, display_id: handle
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    play("auto", monkeypatch)
    assert all(text.startswith("<progress ") for text in shown)
    assert any("sequence 10/20" in text for text in shown)
    assert "&lt;" not in shown[0]
    assert 'value="1"' in shown[-1]
    assert "note: pass --samples" in capsys.readouterr().err


def test_an_error_ends_the_display() -> None:
    display = Display()
    display.__enter__()
    display(Stage("opening"))
    display.__exit__(ValueError, ValueError("wrong"), None)
    assert not display._ticker.is_alive()


@pytest.mark.parametrize("mode", ["auto", "quiet"])
def test_what_several_runs_tell_alike_is_displayed_once(mode: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Notes and the dense model's results; those of the pruned models are of each run, and so is a note with other figures."""
    with Display(mode) as display:
        for number, value in ((1, 3.0), (2, 4.0), (3, 4.0)):
            display(NextRun(number, 3, f"{value}"))
            display(Note("the texts are short"))
            display(Note(f"damping was raised to {value}"))
            display(Stage("measuring"))
            display(Measured("perplexity", "demo", "dense", 2.0, 0.1))
            display(Measured("perplexity", "demo", "pruned", value, 0.1))
    shown = capsys.readouterr().err
    assert shown.count("the texts are short") == 1
    assert shown.count("damping was raised") == 2
    assert [shown.count(f"demo{x}") for x in (", dense", ", pruned")] == [0 if mode == "quiet" else n for n in (1, 3)]


def test_a_run_is_named_where_there_is_room(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with Display() as display:
        display(NextRun(2, 2, "alps"))
        display(Schedule(("pruning",)))
        display(Stage("pruning"))
    assert capsys.readouterr().err.startswith("[2/2] alps: 1/1 pruning  ")
