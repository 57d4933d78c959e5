"""The time left, with a clock that the test sets: against the true time left of runs that are played event by event."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import pytest

from sparsellm.methods import BlockResult, LayerResult
from sparsellm.runs.events import Advanced, Event, ExpectedStage, NextRun, Schedule, Stage
from sparsellm.runs.progress import LEAST_LEFT, PRIOR_SECONDS, PRIOR_SHARE, Progress
from sparsellm.solvers.patterns import Unstructured

PRUNING = ExpectedStage("pruning", 40.0, "pruning", (10.0,) * 4)
MEASURING = ExpectedStage("measuring dense", 20.0, "measuring")


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


def play(schedule: Schedule, steps: Sequence[Step], tick: float = 0.5) -> list[tuple[float, float, float, bool]]:
    """Play a run; at each tick the time since its start, that left as displayed and as true, and whether a unit just ended."""
    clock = Clock()
    progress, start, end = Progress(clock), clock.now, clock.now + sum(seconds for seconds, _ in steps)
    progress(schedule)
    shown: list[tuple[float, float, float, bool]] = []
    for seconds, events in steps:
        until, fresh = clock.now + seconds, True
        while clock.now < until - 1e-9:
            state = progress.state()
            assert state.seconds_left is not None
            shown.append((clock.now - start, state.seconds_left, end - clock.now, fresh))
            clock.now, fresh = min(clock.now + tick, until), False
        for event in events:
            progress(event)
    return shown


def steps(ratio: Callable[[], float], restored: int = 0) -> list[Step]:
    """A run that measures, prunes four blocks and measures again, at this multiple of the expected seconds."""
    taken = [0.3 if index < restored else 10 * ratio() for index in range(4)]
    return [
        *sequences("measuring dense", 20 * ratio()),
        *blocks("pruning", taken, restored),
        *sequences("measuring pruned", 20 * ratio()),
    ]


def schedule(restored: int = 0) -> Schedule:
    """The expected stages of `steps`."""
    each = (*(0.3,) * restored, *(10.0,) * (4 - restored))
    pruning = ExpectedStage("pruning", sum(each), "pruning", each)
    return Schedule(lambda: ((MEASURING, pruning, ExpectedStage("measuring pruned", 20.0, "measuring")),))


@pytest.mark.parametrize("restored", [0, 2])
@pytest.mark.parametrize("ratio", [1 / 3, 1.0, 3.0])
def test_wrong_rates_are_corrected_by_the_first_stage(ratio: float, restored: int) -> None:
    """Where all stages take the same multiple, the time left is right from a quarter on, and never rises from there."""
    shown = play(schedule(restored), steps(lambda: ratio, restored))
    end = shown[0][2]
    late = [(left, true) for elapsed, left, true, _ in shown if elapsed > end / 4]
    for left, true in late:
        assert left == pytest.approx(true, rel=0.2, abs=0.6)
    assert max(later / before for (before, _), (later, _) in pairwise(late)) < 1.05


@pytest.mark.parametrize("seed", range(20))
def test_between_two_units_the_time_left_falls_and_is_never_zero(seed: int) -> None:
    """Also where each block takes from a fifth to five times the expected seconds."""
    generator = random.Random(seed)
    shown = play(schedule(), steps(lambda: 5 ** generator.uniform(-1, 1)))
    assert min(left for _, left, _, _ in shown) > 0
    for (_, before, _, _), (_, after, _, fresh) in pairwise(shown):
        assert fresh or after <= before + 1e-9


def test_the_time_left_equals_a_direct_calculation() -> None:
    """After the first stage at twice, and one of four blocks at half the expected seconds, by hand."""
    clock = Clock()
    progress = Progress(clock)
    progress(schedule())
    for seconds, events in [*sequences("measuring dense", 40.0), *list(blocks("pruning", [5.0, 5.0, 5.0, 5.0]))[:2]]:
        clock.now += seconds
        for event in events:
            progress(event)
    clock.now += 1.5
    prior = PRIOR_SECONDS + PRIOR_SHARE * 80
    overall = (40 + 5 + prior) / (20 + 10 + prior)
    pruning, measuring = (5 + prior * overall) / (10 + prior), (40 + prior * overall) / (20 + prior)
    state = progress.state()
    assert state.seconds_left == pytest.approx(30 * pruning - 1.5 + 20 * measuring)
    assert state.elapsed == pytest.approx(46.5)
    assert (state.number, state.stages, state.done, state.total, state.unit) == (2, 3, 1, 4, "layer")


def test_restored_blocks_do_not_count_as_fast() -> None:
    """After two blocks that took no time, the two others are expected at the rate of the stage before."""
    shown = play(
        schedule(2), [*sequences("measuring dense", 20.0), *blocks("pruning", [0.01, 0.01, 10.0, 10.0], 2)], tick=0.005
    )
    after = next(left for elapsed, left, _, _ in shown if elapsed > 20.02)
    assert after == pytest.approx(40.0, rel=0.05)  # two blocks and the second measurement


def test_results_from_a_cache_do_not_count_as_fast() -> None:
    """A stage that counts no sequences has measured nothing."""
    clock = Clock()
    progress = Progress(clock)
    progress(schedule())
    progress(Stage("measuring dense"))
    clock.now += 0.01
    progress(Stage("pruning", 4, 4))
    assert progress.state().seconds_left == pytest.approx(60.0)


def test_a_stage_without_an_estimate_makes_the_time_left_unknown_until_it_is_measured() -> None:
    tasks = [ExpectedStage(f"tasks {when}", None, "tasks") for when in ("dense", "pruned")]
    clock = Clock()
    progress = Progress(clock)
    progress(Schedule(lambda: ((tasks[0], PRUNING, tasks[1]),)))
    assert progress.state().seconds_left is None
    progress(Stage("tasks dense"))
    assert progress.state().seconds_left is None
    for done in range(1, 11):
        clock.now += 3.0
        progress(Advanced(done, 10, "answer"))
    progress(Stage("pruning", 4, 4))
    assert progress.state().seconds_left == pytest.approx(40.0 + 30.0)
    progress(Stage("tasks pruned"))
    assert progress.state().seconds_left == pytest.approx(30.0)
    clock.now += 5.0
    progress(Advanced(1, 10, "answer"))
    assert progress.state().seconds_left == pytest.approx(45.0)


def test_runs_of_a_sweep_are_added_up_and_those_left_out_are_not() -> None:
    """A run that another process takes is no longer counted when the next one starts."""
    clock = Clock()
    progress = Progress(clock)
    progress(Schedule(lambda: ((PRUNING,), (), (PRUNING,), (PRUNING, MEASURING))))
    progress(NextRun(1, 4, "first"))
    assert progress.state().seconds_left == pytest.approx(140.0)
    progress(Schedule(lambda: ((MEASURING,),)))  # the run's own, which the sweep has already
    assert progress.state().seconds_left == pytest.approx(140.0)
    progress(NextRun(4, 4, "last"))
    state = progress.state()
    assert (state.run, state.runs, state.run_name, state.seconds_left) == (4, 4, "last", pytest.approx(60.0))


def test_a_run_that_a_sweep_could_not_estimate_brings_its_own_stages() -> None:
    progress = Progress(Clock())
    progress(Schedule(lambda: ((PRUNING,), (), (PRUNING,))))
    progress(NextRun(2, 3, "second"))
    assert progress.state().seconds_left == pytest.approx(40.0)
    progress(Schedule(lambda: ((MEASURING,),)))
    assert progress.state().seconds_left == pytest.approx(60.0)


def test_a_run_of_which_nothing_is_known_leaves_the_time_left_unknown() -> None:
    """Announced without a schedule of all, or refused when all were estimated: the runs that are known are not the whole."""
    for whole in (None, Schedule(lambda: ((PRUNING,), None, (PRUNING,)))):
        progress = Progress(Clock())
        if whole:
            progress(whole)
        for number, left in ((1, None), (2, None), (3, 40.0)):
            progress(NextRun(number, 3, str(number)))
            if not whole:
                progress(Schedule(lambda: ((PRUNING,),)))
            assert progress.state().seconds_left == (left if left is None else pytest.approx(left))
        assert progress.state().fraction == 0.0 or whole


def test_what_runs_take_besides_their_stages_is_expected_of_the_later_ones() -> None:
    """Opening, reading and whatever counts no units: as long as in the run before."""
    clock = Clock()
    progress = Progress(clock)
    writing = ExpectedStage("writing", 1.0, "writing")
    progress(Schedule(lambda: ((PRUNING, writing),) * 4))
    for number in range(1, 5):
        progress(NextRun(number, 4, str(number)))
        expected = (5 - number) * 41.0 + (4 - number) * (30.0 if number > 1 else 0.0)
        assert progress.state().seconds_left == pytest.approx(expected)
        progress(Stage("opening"))
        clock.now += 10.0
        for seconds, events in blocks("pruning", [10.0] * 4):
            clock.now += seconds
            for event in events:
                progress(event)
        progress(Stage("writing"))
        clock.now += 21.0


def test_a_stage_that_is_repeated_counts_again() -> None:
    """As where memory runs out, and pruning starts again with smaller batches."""
    clock = Clock()
    progress = Progress(clock)
    progress(schedule())
    for _, events in [*sequences("measuring dense", 0.0), (0.0, [Stage("pruning", 4, 4), *block(0).layers, block(0)])]:
        for event in events:
            progress(event)
    progress(Stage("pruning", 4, 4))
    state = progress.state()
    assert (state.number, state.done) == (2, 0)


def test_one_misjudged_stage_does_not_mislead_the_others() -> None:
    """A second expected, a hundred taken: other stages are not expected to take a hundred times as long."""
    clock = Clock()
    progress = Progress(clock)
    progress(Schedule(lambda: ((ExpectedStage("short", 1.0, "short"), ExpectedStage("long", 100.0, "long")),)))
    progress(Stage("short"))
    clock.now += 100.0
    progress(Advanced(1, 1, "step"))
    assert progress.state().seconds_left < 250.0


def test_a_long_block_counts_as_almost_done() -> None:
    clock = Clock()
    progress = Progress(clock)
    progress(Schedule(lambda: ((PRUNING,),)))
    progress(Stage("pruning", 4, 4))
    clock.now += 1000.0
    assert progress.state().seconds_left == pytest.approx(30 + LEAST_LEFT * 10)


def test_within_a_block_its_results_count_as_in_the_block_before() -> None:
    """The first block has its layer's result after a quarter; the second one's comes late, and the time left rises with it."""
    clock = Clock()
    progress = Progress(clock)
    progress(Schedule(lambda: ((PRUNING,),)))
    progress(Stage("pruning", 4, 4))
    for seconds, event in [(2.5, block(0).layers[0]), (7.5, block(0)), (5.0, block(1).layers[0])]:
        clock.now += seconds
        progress(event)
    prior = PRIOR_SECONDS + PRIOR_SHARE * 40
    ratio = (15.0 + prior * (15.0 + prior) / (12.5 + prior)) / (12.5 + prior)
    assert progress.state().seconds_left == pytest.approx(27.5 * ratio)
    clock.now += 4.0
    assert progress.state().seconds_left == pytest.approx(27.5 * ratio - 4.0)


def test_the_fraction_rises_to_one() -> None:
    generator = random.Random(3)
    clock = Clock()
    progress = Progress(clock)
    progress(schedule())
    fractions = [0.0]
    for seconds, events in steps(lambda: 3 ** generator.uniform(-1, 1)):
        clock.now += seconds
        for event in events:
            progress(event)
        fractions.append(progress.state().fraction)
    assert fractions == sorted(fractions)
    assert fractions[-1] == pytest.approx(1.0, abs=1e-3)


def test_a_stage_without_an_estimate_is_learned_from_its_first_unit() -> None:
    """Then the time left includes the later stages of its kind, before the first one ends."""
    now = [0.0]
    progress = Progress(clock=lambda: now[0])
    progress(Schedule(lambda: (tuple(ExpectedStage(f"answering {when}", None, "answering") for when in ("dense", "pruned")),)))
    progress(Stage("answering dense"))
    assert progress.state().seconds_left is None
    now[0] = 2.0
    progress(Advanced(1, 10, "answer"))
    assert progress.state().seconds_left == pytest.approx(18 + 20)
