"""What a run says while it happens, and what it leaves in the report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sparsellm.report import Report
from sparsellm.sequential import Step


@dataclass(frozen=True)
class Stage:
    """A phase of the run begins. blocks: how many will be visited, in the phase that prunes."""

    name: str
    blocks: int = 0


@dataclass(frozen=True)
class Note:
    """Something that a reader should know; it also stands in the report."""

    text: str


Event = Stage | Note | Step
Observer = Callable[[Event], None]
"""Told what happens while it happens; the library itself prints nothing."""


@contextmanager
def phase(name: str, report: Report, say: Observer, blocks: int = 0) -> Iterator[None]:
    """Say that a phase begins, and add its seconds to the report."""
    say(Stage(name, blocks))
    started = time.perf_counter()
    try:
        yield
    finally:
        report.seconds[name] = report.seconds.get(name, 0.0) + time.perf_counter() - started


def note(text: str, report: Report, say: Observer) -> None:
    """Put a note into the report, and say it."""
    report.notes.append(text)
    say(Note(text))
