"""The time left, with a clock that the test sets: against the true time left of runs that are played event by event."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest

from sparsellm.methods import BlockResult, LayerResult
from sparsellm.pipeline.events import (
    ALLOCATION,
    LOADING,
    PREDICTING,
    SENSITIVITIES,
    TRAINING,
    WRITING,
    Advanced,
    Event,
    NextRun,
    Schedule,
    Stage,
)
from sparsellm.pipeline.progress import Progress
from sparsellm.solvers.patterns import Unstructured

STAGES = Schedule(("measuring dense", "pruning", "measuring pruned"))


class Clock:
    """Seconds that pass only where the test says so."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def block(index: int) -> BlockResult:
    """The result of a block of one layer."""
    layer = LayerResult(f"{index}.layer", Unstructured(0.5), (2, 2), 2, 0.25, "Gram", None, 8, 1, 1.0)
    return BlockResult(index, str(index), (layer,), (), 1.0)


Step = tuple[float, Sequence[Event]]
"""Seconds that pass, and the events that follow."""


def sequences(name: str, seconds: float, count: int = 20) -> Iterator[Step]:
    """A stage that measures this many sequences in this many seconds."""
    yield 0.0, [Stage(name)]
    for done in range(1, count + 1):
        yield seconds / count, [Advanced(done, count, "sequence")]


def blocks(name: str, seconds: Sequence[float], restored: int = 0) -> Iterator[Step]:
    """A stage that prunes blocks in these seconds; the first ones are restored, whose layers are not sent one by one."""
    yield 0.0, [Stage(name, len(seconds), len(seconds))]
    for index, taken in enumerate(seconds):
        result = block(index)
        yield taken, [result] if index < restored else [*result.layers, result]


def run(*seconds: float, measuring: float = 20.0, restored: int = 0) -> list[Step]:
    """A run that measures, prunes blocks in these seconds, and measures again."""
    steps: list[Step] = [(0.0, [STAGES]), *sequences("measuring dense", measuring)]
    return [*steps, *blocks("pruning", seconds, restored), *sequences("measuring pruned", measuring)]


def played(progress: Progress, clock: Clock, steps: Sequence[Step]) -> None:
    """Send the events of all steps, each at its time."""
    for seconds, events in steps:
        clock.now += seconds
        for event in events:
            progress(event)


def shown(steps: Sequence[Step], tick: float = 0.5) -> Iterator[tuple[float, float | None, float, bool]]:
    """Play a command; at each tick the time since its start, that left as displayed and as true, and whether a unit ended."""
    clock = Clock()
    progress, start, end = Progress(clock), clock.now, clock.now + sum(seconds for seconds, _ in steps)
    for seconds, events in steps:
        until, fresh = clock.now + seconds, True
        while clock.now < until - 1e-9:
            yield clock.now - start, progress.state().seconds_left, end - clock.now, fresh
            clock.now, fresh = min(clock.now + tick, until), False
        for event in events:
            progress(event)


@pytest.mark.parametrize("restored", [0, 2])
def test_the_time_left_is_true_once_a_block_was_pruned(restored: int) -> None:
    """Before, nothing is said: how long pruning takes is not known. Restored blocks are not taken for fast ones."""
    each = [0.01] * restored + [10.0] * 6
    known = 20.0 + 0.01 * restored + 10.0
    for elapsed, left, true, _ in shown(run(*each, measuring=20.0, restored=restored)):
        assert (left is None) == (elapsed < known - 1e-6)
        assert left is None or left == pytest.approx(true, abs=0.6)


@pytest.mark.parametrize("seed", range(10))
def test_between_two_units_the_time_left_falls_and_is_never_zero(seed: int) -> None:
    generator = random.Random(seed)
    states = [x for x in shown(run(*(10 * 5 ** generator.uniform(-1, 1) for _ in range(6)))) if x[1] is not None]
    assert min(left for _, left, _, _ in states if left is not None) > 0
    for (_, before, _, _), (_, after, _, fresh) in pairwise(states):
        assert fresh or (after or 0) <= (before or 0) + 1e-9


def test_the_time_left_equals_a_direct_calculation() -> None:
    """After two blocks of 4 and 6 seconds and 1.5 of the third: two more units of 5 seconds, and a second measurement."""
    clock = Clock()
    progress = Progress(clock)
    played(progress, clock, run(4.0, 6.0, 9.0, 9.0, measuring=40.0)[: 1 + 21 + 3])
    clock.now += 1.5
    state = progress.state()
    assert state.seconds_left == pytest.approx(2 * 5 - 1.5 + 40)
    assert state.elapsed == pytest.approx(51.5)
    assert state.fraction == pytest.approx(51.5 / (51.5 + 48.5))
    assert (state.number, state.stages, state.done, state.total, state.unit) == (2, 3, 2, 4, "layer")


def test_a_block_without_layers_counts() -> None:
    clock = Clock()
    progress = Progress(clock)
    progress(Schedule(("recovering",)))
    progress(Stage("recovering", 4, 4))
    clock.now += 5.0
    progress(BlockResult(0, "0", (), (), 5.0))
    assert progress.state().seconds_left == pytest.approx(15.0)


def test_results_from_a_cache_say_nothing() -> None:
    """A stage that counts no sequences has measured nothing: how long the pruned model is measured is not known."""
    clock = Clock()
    progress = Progress(clock)
    played(progress, clock, [(0.0, [STAGES]), (0.0, [Stage("measuring dense")]), (0.01, []), *blocks("pruning", [1.0, 1.0])])
    assert progress.state().seconds_left is None
    played(progress, clock, list(sequences("measuring pruned", 10.0))[:6])
    assert progress.state().seconds_left == pytest.approx(7.5)


def test_several_texts_are_told_apart() -> None:
    """The second text of the pruned model takes as long as the second one of the dense model did."""
    clock = Clock()
    progress = Progress(clock)
    progress(Schedule(("measuring dense",) * 2 + ("pruning",) + ("measuring pruned",) * 2))
    played(
        progress, clock, [*sequences("measuring dense", 5.0), *sequences("measuring dense", 50.0), *blocks("pruning", [3.0])]
    )
    assert progress.state().seconds_left == pytest.approx(55.0)
    played(progress, clock, list(sequences("measuring pruned", 5.0)))
    assert (progress.state().number, progress.state().seconds_left) == (4, pytest.approx(50.0))


def test_runs_that_are_alike_are_known_from_the_first_one() -> None:
    """What they share, the measurement of the dense model, takes no time in later ones."""
    clock = Clock()
    progress = Progress(clock)
    progress(NextRun(1, 3, "50%", alike=True))
    played(progress, clock, run(10.0, 10.0)[: 1 + 21 + 2])
    assert progress.state().seconds_left == pytest.approx(10.0 + 20.0 + 2 * 40.0)
    played(progress, clock, [(10.0, [*block(1).layers, block(1)]), *sequences("measuring pruned", 20.0)])
    progress(NextRun(2, 3, "60%", alike=True))
    assert progress.state().seconds_left == pytest.approx(2 * 40.0), "until its stages are known, as long as the one before"
    played(progress, clock, [(0.0, [STAGES]), (0.0, [Stage("measuring dense")]), *list(blocks("pruning", [10.0, 10.0]))[:2]])
    state = progress.state()
    assert (state.run, state.runs, state.run_name, state.seconds_left) == (2, 3, "60%", pytest.approx(10 + 20 + 40))


def test_what_every_run_repeats_counts_for_each() -> None:
    """Later runs load, train and write as the first one did; what it found on the dense model they take."""
    clock = Clock()
    progress = Progress(clock)
    dense, later = ("measuring dense", SENSITIVITIES, f"{ALLOCATION} (fisher)"), (PREDICTING, "pruning", TRAINING)
    progress(NextRun(1, 2, "50%", alike=True))
    progress(Schedule((LOADING, *dense, *later)))
    played(progress, clock, [*sequences(LOADING, 5.0)])
    for name in dense:
        played(progress, clock, [*sequences(name, 100.0)])
    played(progress, clock, sequences(PREDICTING, 7.0))
    played(progress, clock, [*blocks("pruning", [10.0, 10.0]), *list(sequences(TRAINING, 40.0))[:11]])
    assert progress.state().seconds_left == pytest.approx(20.0 + 5.0 + 7.0 + 20.0 + 40.0)
    played(progress, clock, [*sequences(TRAINING, 20.0)][1:])
    played(progress, clock, [(0.0, [Stage(WRITING)]), (3.0, [NextRun(2, 2, "60%", alike=True)])])
    progress(Schedule((LOADING, *dense, *later)))
    played(progress, clock, [*sequences(LOADING, 5.0), *((0.0, [Stage(name)]) for name in dense), *sequences(PREDICTING, 7.0)])
    played(progress, clock, list(blocks("pruning", [10.0, 10.0]))[:2])
    assert progress.state().seconds_left == pytest.approx(10.0 + 40.0 + 3.0)


def test_of_runs_that_differ_each_has_a_share_and_a_time_left() -> None:
    """Those to come last as long as those so far in the mean, without one that announces no stages."""
    clock = Clock()
    progress = Progress(clock)
    progress(NextRun(1, 4, "dense"))
    played(progress, clock, [(0.0, [Stage("measuring")]), (1.0, [])])
    assert (progress.state().fraction, progress.state().seconds_left) == (0.0, None)
    progress(NextRun(2, 4, "wanda"))
    assert (progress.state().fraction, progress.state().seconds_left) == (0.25, None)
    played(progress, clock, run(10.0, 10.0)[: 1 + 21 + 2])
    assert progress.state().seconds_left == pytest.approx(30.0 + 2 * 60.0)
    played(progress, clock, [(10.0, [*block(1).layers, block(1)]), *sequences("measuring pruned", 20.0)])
    progress(NextRun(3, 4, "alps"))
    clock.now += 15.0
    assert progress.state().seconds_left == pytest.approx(45.0 + 60.0), "its stages are not known yet"
    played(progress, clock, run(10.0, 10.0)[: 1 + 21 + 2])
    state = progress.state()
    assert state.seconds_left == pytest.approx(30.0 + (60.0 + 75.0) / 2)
    assert state.fraction == pytest.approx(state.elapsed / (state.elapsed + state.seconds_left))


def test_a_block_that_takes_long_tells_its_passes() -> None:
    """They are no units of the stage: blocks are."""
    clock = Clock()
    progress = Progress(clock)
    played(progress, clock, [(0.0, [Schedule(("pruning",)), Stage("pruning", 2, 4), Advanced(3, 16, "batch")])])
    state = progress.state()
    assert (state.done, state.total, state.unit, state.detail) == (0, 4, "layer", "block 1, batch 3/16")
    played(progress, clock, [(10.0, [*block(0).layers, block(0)]), (1.0, [Advanced(1, 16, "batch")])])
    state = progress.state()
    assert (state.detail, state.seconds_left) == ("block 2, batch 1/16", pytest.approx(9.0))


def test_writing_counts_once_it_was_measured() -> None:
    clock = Clock()
    progress = Progress(clock)
    for number, left in ((1, 10.0), (2, 17.0)):
        progress(NextRun(number, 2, "", alike=True))
        progress(Schedule(("pruning",)))
        played(progress, clock, list(blocks("pruning", [10.0, 10.0]))[:2])
        seconds = progress.state().seconds_left
        assert number == 1 or seconds == pytest.approx(left)
        played(progress, clock, [(10.0, [*block(1).layers, block(1)]), (0.0, [Stage(WRITING)]), (7.0, [])])


def test_a_stage_that_is_repeated_counts_again() -> None:
    """As where memory runs out, and pruning starts again with smaller batches."""
    clock = Clock()
    progress = Progress(clock)
    played(progress, clock, [*run(10.0, 10.0, 10.0, 10.0)[: 1 + 21 + 2], (0.0, [Stage("pruning", 4, 4)])])
    state = progress.state()
    assert (state.number, state.done) == (2, 0)


def test_a_stage_that_was_not_announced_has_no_number_of_its_own() -> None:
    progress = Progress(Clock())
    progress(Stage("opening"))
    state = progress.state()
    assert (state.number, state.stages, state.seconds_left, state.fraction) == (0, 0, None, None)
