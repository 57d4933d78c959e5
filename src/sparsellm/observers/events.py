"""Events of a run, helpers that send them to observers and to the report, and the log of events as JSON lines."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import SerializeAsAny, TypeAdapter

from sparsellm.errors import written_to
from sparsellm.methods import Step
from sparsellm.observers.wording import worded
from sparsellm.outputs.report import Report
from sparsellm.recipes.recipe import RunRecipe
from sparsellm.texts.json_files import finite

OPENING, READING_TEXTS, DIGESTING, LOADING = "opening", "reading texts", "reading the model's files", "loading"
SENSITIVITIES, ALLOCATION = "estimating sensitivity", "choosing per-layer sparsity"
MEASURING, ANSWERING = "measuring", "answering questions"
WRITING = "writing and verifying"
"""The stages of a run by their names. In a run, the rule follows `ALLOCATION` in brackets, and "dense" or "pruned"
follows `MEASURING` and `ANSWERING`."""


@dataclass(frozen=True)
class Begun:
    """The run starts; all settings have been checked.

    Attributes:
        tight: Whether freed memory is returned at once: the plan leaves no room for it, or the model is read block by block.
    """

    name: str
    recipe: SerializeAsAny[RunRecipe]
    environment: Mapping[str, str]
    tight: bool = False


@dataclass(frozen=True)
class Schedule:
    """The stages of the run that are to come, by their names and in running order. The log leaves it out."""

    stages: tuple[str, ...]


@dataclass(frozen=True)
class NextRun:
    """A run of several starts: `number` of `count`, from 1. alike: whether all of them take about the same time."""

    number: int
    count: int
    name: str
    alike: bool = False


@dataclass(frozen=True)
class Stage:
    """A stage of the run starts. blocks, layers: numbers that the pruning stage visits, 0 for other stages."""

    name: str
    blocks: int = 0
    layers: int = 0


@dataclass(frozen=True)
class Advanced:
    """`done` of `total` units of the stage are done: sequences, tokens, questions, blocks or steps. The log leaves it out."""

    done: float
    total: int
    unit: str


@dataclass(frozen=True)
class Note:
    """A remark for the user; the report has it too."""

    text: str


@dataclass(frozen=True)
class Measured:
    """A measurement of the model.

    Attributes:
        kind: What was measured: "perplexity", "accuracy", or the name of a task's metric.
        on: Name of the text or task.
        standard_error: Its standard error, if known.
    """

    kind: str
    on: str
    when: Literal["dense", "pruned"]
    value: float
    standard_error: float | None


@dataclass(frozen=True)
class Ended:
    """The run is complete, but the model is not written yet. totals: as in the report. seconds: duration of the run."""

    totals: Mapping[str, Any]
    seconds: float


Event = Begun | Schedule | NextRun | Stage | Advanced | Note | Measured | Step | Ended
Observer = Callable[[Event], None]
"""Called with each event as it happens; the library itself prints nothing."""

_EVENT: TypeAdapter[Event] = TypeAdapter(Event)


def combine_observers(*observers: Observer | None) -> Observer:
    """Combine observers into one that calls each in order; None is skipped."""
    present = [observer for observer in observers if observer is not None]

    def notify(event: Event) -> None:
        for observer in present:
            observer(event)

    return notify


Advance = Callable[[float, int], None]
"""Called with the units that are done, and their total."""


def advance_by(unit: str, observer: Observer) -> Advance:
    """Return the function that sends the progress of a stage, counted in this unit."""
    return lambda done, total: observer(Advanced(done, total, unit))


@contextmanager
def run_stage(
    name: str, report: Report, observer: Observer, *, unit: str = "", blocks: int = 0, layers: int = 0
) -> Iterator[Advance]:
    """Send a `Stage` event, add the stage's duration to the report, and yield the function that sends its progress."""
    observer(Stage(name, blocks, layers))
    started = time.perf_counter()
    try:
        yield advance_by(unit, observer)
    finally:
        report.seconds[name] = report.seconds.get(name, 0.0) + time.perf_counter() - started


def add_note(text: str, report: Report, observer: Observer) -> None:
    """Add a note to the report, in the words of whoever started the run, and send it as an event, unless it is there."""
    text = worded(text)
    if text not in report.notes:
        report.notes.append(text)
        observer(Note(text))


class EventLog:
    """Observer that appends one JSON line per event.

    A line has `time` (UTC), `seconds` since this process started the run, `event` (the class name) and the event's `fields`.
    Infinite and undefined numbers are strings, as in the report.
    """

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._file: Path | None = None
        self._started = time.perf_counter()

    def __call__(self, event: Event) -> None:
        """Log one event; it has been written to the file, if there is one, when this returns."""
        if isinstance(event, (Advanced, Schedule)):
            return
        message = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "seconds": round(time.perf_counter() - self._started, 3),
            "event": type(event).__name__,
            "fields": _EVENT.dump_python(event, mode="json"),
        }
        line = json.dumps(finite(message), allow_nan=False) + "\n"
        self._lines.append(line)
        self._write(line)

    def keep(self, file: Path) -> None:
        """Write the lines so far and all later ones to a file.

        They follow the lines of an earlier process; an incomplete last line is removed.
        """
        content = file.read_bytes() if file.exists() else b""
        complete = content[: content.rfind(b"\n") + 1]
        if complete != content:
            file.write_bytes(complete)
        text = self.text
        self._lines.insert(0, complete.decode(errors="replace"))
        self._file = file
        self._write(text)

    @property
    def text(self) -> str:
        """All lines."""
        return "".join(self._lines)

    def _write(self, text: str) -> None:
        """Append to the file, which is opened and closed each time so that a killed process loses no line."""
        if self._file is not None:
            with written_to(self._file), self._file.open("a", encoding="utf-8") as stream:
                stream.write(text)
