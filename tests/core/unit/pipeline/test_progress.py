"""The time left of runs that are played event by event: what finished units took, times those that are left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from sparsellm.methods import BlockResult, LayerResult
from sparsellm.observers.events import Advanced, Event, NextRun, Schedule, Stage
from sparsellm.observers.progress import Progress
from sparsellm.solvers.patterns import Unstructured

Step = tuple[float, Sequence[Event]]
"""Seconds that pass, and the events that follow."""


def block(index: int) -> BlockResult:
    """The result of a block of one layer."""
    layer = LayerResult(f"{index}.layer", Unstructured(0.5), (2, 2), 2, 0.25, "Gram", None, 8, 1, 1.0)
    return BlockResult(index, str(index), (layer,), (), 1.0)


def run(*seconds: float) -> Iterator[Step]:
    """A run that measures 20 sequences in as many seconds, prunes blocks in these, and measures again."""
    yield 0.0, [Schedule(("measuring dense", "pruning", "measuring pruned")), Stage("measuring dense")]
    yield from ((1.0, [Advanced(done, 20, "sequence")]) for done in range(1, 21))
    yield 0.0, [Stage("pruning", len(seconds), len(seconds))]
    yield from ((taken, [*block(index).layers, block(index)]) for index, taken in enumerate(seconds))
    yield 0.0, [Stage("measuring pruned")]
    yield from ((1.0, [Advanced(done, 20, "sequence")]) for done in range(1, 21))


def played(progress: Progress, now: list[float], steps: Sequence[Step]) -> None:
    """Send the events of all steps, each at its time."""
    for seconds, events in steps:
        now[0] += seconds
        for event in events:
            progress(event)


def test_the_time_left_equals_a_direct_calculation() -> None:
    """After two blocks of 4 and 6 seconds and 1.5 of the third: two more units of 5 seconds, and a second measurement."""
    now = [100.0]
    progress = Progress(lambda: now[0])
    steps = [*run(4.0, 6.0, 9.0, 9.0)]
    played(progress, now, steps[: 1 + 20 + 1])
    assert progress.state().seconds_left is None, "how long pruning takes is not known"
    played(progress, now, steps[1 + 20 + 1 : 1 + 20 + 3])
    now[0] += 1.5
    state = progress.state()
    assert state.seconds_left == pytest.approx(2 * 5 - 1.5 + 20)
    assert state.elapsed == pytest.approx(31.5)
    assert state.fraction == pytest.approx(31.5 / (31.5 + 28.5))
    assert (state.number, state.stages, state.done, state.total, state.unit) == (2, 3, 2, 4, "layer")
    now[0] += 1000
    assert (progress.state().seconds_left or 0) > 20, "never zero"


@pytest.mark.parametrize(("alike", "other"), [(True, 20.0 + 20.0), (False, 20.0 + 20.0 + 20.0)])
def test_runs_to_come_take_as_long_as_the_first(alike: bool, other: float) -> None:
    """Without the measurement of the dense model, where they are announced to be alike and share it."""
    now = [100.0]
    progress = Progress(lambda: now[0])
    progress(NextRun(1, 3, "50%", alike=alike))
    played(progress, now, [*run(10.0, 10.0)][: 1 + 20 + 2])
    assert progress.state().seconds_left == pytest.approx(10.0 + 20.0 + 2 * other)
    played(progress, now, [*run(10.0, 10.0)][1 + 20 + 2 :])
    progress(NextRun(2, 3, "60%", alike=alike))
    assert progress.state().seconds_left == pytest.approx(2 * other), "until its stages are known, as long as the one before"
