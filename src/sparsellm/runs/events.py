"""What a run says while it happens, and what it leaves in the report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from sparsellm.pruning.sequential import Step
from sparsellm.runs.recipe import RunRecipe
from sparsellm.runs.report import Report

OPENING, READING_TEXTS, DIGESTING, LOADING = "opening", "reading texts", "reading the model's files", "loading"
SENSITIVITIES, SHARING = "finding what errors cost", "sharing out the sparsity by"
PRUNING, RECOVERING = "pruning", "recovering"
WRITING_WINDOWS, READING_PREDICTIONS, TRAINING = (
    "letting the dense model write",
    "reading the dense model's predictions",
    "training the whole model",
)
MEASURING, WRITING_SAMPLES = "measuring", "writing samples"
"""The stages of a run by their names: `SHARING` is followed by the rule, `MEASURING` by "dense" or "pruned"."""


@dataclass(frozen=True)
class Begun:
    """The run begins: what can be refused has been. name: what it is called. environment: versions and machine.

    tight: whether the plan leaves no room for freed memory that the process keeps.
    """

    name: str
    recipe: RunRecipe
    environment: Mapping[str, str]
    tight: bool = False


@dataclass(frozen=True)
class Stage:
    """A phase of the run begins. blocks: how many will be visited, in the phase that prunes."""

    name: str
    blocks: int = 0


@dataclass(frozen=True)
class Note:
    """Something that a reader should know; it also stands in the report."""

    text: str


@dataclass(frozen=True)
class Measured:
    """A figure of the model. on: the text or the task. standard_error: None where there is none."""

    kind: Literal["perplexity", "accuracy"]
    on: str
    when: Literal["dense", "pruned"]
    value: float
    standard_error: float | None


@dataclass(frozen=True)
class Ended:
    """The run came to its end; its model is not written yet. totals: as in the report. seconds: of the whole run."""

    totals: Mapping[str, Any]
    seconds: float


Event = Begun | Stage | Note | Measured | Step | Ended
Observer = Callable[[Event], None]
"""Told what happens while it happens; the library itself prints nothing."""


def combine_observers(*observers: Observer | None) -> Observer:
    """An observer that tells each of these, but for those that are None, one after the other."""
    present = [observer for observer in observers if observer is not None]

    def tell(event: Event) -> None:
        for observer in present:
            observer(event)

    return tell


@contextmanager
def phase(name: str, report: Report, observer: Observer, blocks: int = 0) -> Iterator[None]:
    """Say that a phase begins, and add its seconds to the report."""
    observer(Stage(name, blocks))
    started = time.perf_counter()
    try:
        yield
    finally:
        report.seconds[name] = report.seconds.get(name, 0.0) + time.perf_counter() - started


def add_note(text: str, report: Report, observer: Observer) -> None:
    """Put a note into the report, and say it."""
    report.notes.append(text)
    observer(Note(text))
