"""The progress display of a command: one live line on a terminal, a bar in a notebook, plain lines elsewhere."""

from __future__ import annotations

import html
import sys
import threading
from collections.abc import Callable
from math import ceil
from types import TracebackType
from typing import Any, Literal

from rich.console import Console
from rich.live import Live
from rich.text import Text

from sparsellm.errors import printable
from sparsellm.evaluation.results import is_fraction
from sparsellm.observers.events import Event, Measured, NextRun, Note, Stage
from sparsellm.observers.progress import Progress, State, human_seconds
from sparsellm.runtime.memory import memory_in_use

Mode = Literal["auto", "quiet", "off"]
"""auto: a live line, a bar or plain lines, by what stderr is; quiet: notes only; off: nothing."""

REFRESH_SECONDS = 0.5
"""Time between two looks at the clock."""

PLAIN_SHARE, PLAIN_LEAST, PLAIN_SECONDS = 0.1, 1.0, 30.0
"""A plain line follows another one after this fraction of the stage's units and one second, or after half a minute."""

SHORTEST_NAME = 10
"""Characters to which the name of a stage is cut at most, for the rest of the line to fit."""


class Display:
    """Observer that displays a command's progress on stderr. Use as a context manager.

    A note, and a measurement of the dense model, that several runs of the command send alike are displayed once.

    Args:
        mode: What is displayed.
        edit: Changes the text of notes.
    """

    def __init__(self, mode: Mode = "auto", edit: Callable[[str], str] = str) -> None:
        self._progress, self._edit = Progress(), edit
        self._told: set[Event] = set()
        self._renderer = _renderer(mode)
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="progress", daemon=True)

    def __enter__(self) -> Display:
        if isinstance(self._renderer, Plain):
            self._ticker.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stopped.set()
        if self._ticker.is_alive():
            self._ticker.join()
        self._renderer.close(self._progress.state() if error is None else None)

    def __call__(self, event: Event) -> None:
        """Display one event."""
        with self._lock:
            if isinstance(self._renderer, Plain):
                self._progress(event)
            repeats = isinstance(event, Note) or (isinstance(event, Measured) and event.when == "dense")
            if repeats and event in self._told:  # by another run of the command
                return
            if repeats:
                self._told.add(event)
            if isinstance(event, Note):
                self._renderer.note(self._edit(event.text))
            elif isinstance(event, Measured):
                self._renderer.result(event)
            self._renderer.show(self._progress.state(), begins=isinstance(event, (Stage, NextRun)))

    def _tick(self) -> None:
        """Display the passing of time while a stage computes."""
        while not self._stopped.wait(REFRESH_SECONDS):
            with self._lock:
                self._renderer.show(self._progress.state(), begins=False)


class Quiet:
    """Displays only notes, or nothing. Base class of the forms of the display."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def show(self, state: State, *, begins: bool) -> None:
        """Display a state. begins: whether a stage or a run starts."""

    def note(self, text: str) -> None:
        """Display a note."""
        self.console.print(Text(f"note: {printable(text, len(text))}", style="yellow"), soft_wrap=True)

    def result(self, event: Measured) -> None:
        """Display a measurement."""

    def close(self, state: State | None) -> None:
        """End the display. state: the last state; None after an error."""


class Plain(Quiet):
    """A line where a stage begins, and about every tenth of the stage or 30 seconds."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._last: State | None = None

    def show(self, state: State, *, begins: bool) -> None:
        last = self._last
        passed = state.elapsed - last.elapsed if last else 0.0
        advanced = last and state.total and state.done >= last.done + PLAIN_SHARE * state.total
        due = (advanced and passed >= PLAIN_LEAST) or passed >= PLAIN_SECONDS
        # A run that starts is displayed with its first stage.
        if state.stage and (begins or due):
            self._last = state
            self.print(line(state, memory_in_use(), self.console.width))

    def result(self, event: Measured) -> None:
        fraction = is_fraction(event.kind)
        value = (percent if fraction else with_standard_error)(event.value, event.standard_error)
        unit = " %" if fraction else ""
        self.print(f"{event.kind} on {event.on}, {event.when}: {value}{unit}")

    def print(self, text: str) -> None:
        """Print text without highlighting or wrapping."""
        self.console.print(printable(text, len(text)), highlight=False, soft_wrap=True, markup=False, emoji=False)


class Terminal(Plain):
    """One line that is rewritten in place."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._live = Live(console=console, auto_refresh=False, transient=True)
        self._live.start()

    def show(self, state: State, *, begins: bool) -> None:
        text = line(state, memory_in_use(), self.console.width) if state.stage else ""
        self._live.update(Text(text, no_wrap=True, overflow="ellipsis"), refresh=True)

    def close(self, state: State | None) -> None:
        self._live.stop()


class Notebook(Plain):
    """A bar in the output of a notebook's cell."""

    def __init__(self, console: Console) -> None:
        super().__init__(console)
        from IPython.display import HTML, display  # type: ignore[import-not-found]

        self._html: Callable[[str], Any] = HTML
        self._handle = display(HTML(""), display_id=True)

    def show(self, state: State, *, begins: bool) -> None:
        text = html.escape(line(state, memory_in_use(), 120))
        value = "" if state.fraction is None else f'value="{state.fraction:.3f}"'
        self._handle.update(self._html(f'<progress {value} max="1"></progress> {text}'))

    def close(self, state: State | None) -> None:
        if state:
            text = f"finished in {human_seconds(state.elapsed)}"
            self._handle.update(self._html(f'<progress value="1" max="1"></progress> {text}'))


def _renderer(mode: Mode) -> Quiet:
    """The form of the display for a mode. It writes to the stream that is stderr now, also while that is redirected."""
    console = Console(file=sys.stderr, emoji=False, markup=False, quiet=mode == "off", force_jupyter=False)
    if mode in ("quiet", "off"):
        return Quiet(console)
    if Console().is_jupyter:
        return Notebook(console)
    return Terminal(console) if console.is_terminal and not console.is_dumb_terminal else Plain(console)


def line(state: State, memory: tuple[int, int], width: int) -> str:
    """A state in at most `width` columns: the stage's name is cut where it is too long, and a result is left out.

    Args:
        memory: Bytes that the process holds, and those of the machine.
        width: Columns.
    """
    number = f"{state.number}/{state.stages} " if state.stages else ""
    run = f"[{state.run}/{state.runs}] " if state.runs else ""
    units = f", {state.unit} {int(state.done):,}/{state.total:,}" if state.unit and state.total else ""
    memory_share = f"  memory {100 * memory[0] / memory[1]:.0f}%"
    if state.fraction is None or state.seconds_left is None:
        percentage = "" if state.fraction is None else f"  {int(100 * state.fraction)}%"
        tail = f"{percentage}  {human_seconds(state.elapsed)}{memory_share}"
    else:
        percentage, left = f"{int(100 * state.fraction)}%", time_left(state.seconds_left)
        tail = f"  {percentage}  {human_seconds(state.elapsed)}, {left}{memory_share}"
        if len(f"{run}{number}{units}{tail}") > width - SHORTEST_NAME:  # without the time that has passed
            tail = f"  {percentage}  {left}{memory_share}"
    room = max(width - 1 - len(f"{run}{number}{units}{tail}"), SHORTEST_NAME)
    of_run = f"{state.run_name}: " if state.run_name and len(f"{state.run_name}: {state.stage}") <= room else ""
    name = state.stage if len(f"{of_run}{state.stage}") <= room else f"{state.stage[: room - 1]}…"
    text = f"{run}{of_run}{number}{name}{units}{tail}"
    return f"{text}  {state.detail}" if state.detail and len(text) + 2 + len(state.detail) < width else text[: width - 1]


def time_left(seconds: float) -> str:
    """Format a time left, never as 0 s."""
    return f"{human_seconds(ceil(seconds))} left" if seconds >= 1 else "<1s left"


def with_standard_error(value: float, error: float | None) -> str:
    """Format a value with its standard error, to two digits after the point, or one if the error is 1 or more."""
    if error is None or not error > 0:
        return f"{value:,.2f}"
    digits = 1 if error >= 1 else 2
    return f"{value:,.{digits}f} ± {error:,.{digits}f}"


def percent(value: float, error: float | None) -> str:
    """Format a fraction in percent, with its standard error."""
    return f"{100 * value:.2f}" + (f" ± {100 * error:.2f}" if error else "")
