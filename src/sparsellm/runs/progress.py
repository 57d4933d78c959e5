"""Time left of a command, from the expected seconds of its stages and from what the finished part took."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sparsellm.methods import BlockResult, EpochResult, LayerResult, TrainingResult
from sparsellm.runs.events import Advanced, Event, ExpectedStage, NextRun, Schedule, Stage

PRIOR_SECONDS, PRIOR_SHARE = 1.0, 0.01
"""Expected seconds for which the estimates stand before anything was measured: so many, and this fraction of the total."""

LARGEST_RATIO = 4.0
"""A kind of stage that takes more than this multiple of its expected seconds is misjudged: others will not be as slow."""

LEAST_LEFT = 0.1
"""Fraction of its expected seconds that a unit counts as left however long it takes. A block's end shows by how much it was
misjudged; until then the time left does not rise, and it does not become zero."""


@dataclass(frozen=True)
class State:
    """What a command does at a moment.

    Attributes:
        run, runs: Number of the run and of all runs; 0 for a command of one run.
        run_name: Name of the run among several.
        stage: Name of the stage.
        number, stages: Number of the stage and of all stages of the run; 0 before the stages are known.
        done, total, unit: Units of the stage; total is 0 for a stage that counts none.
        fraction: Fraction of the command's time that has passed, 0 to 1.
        elapsed: Seconds since the command started.
        seconds_left: Expected seconds to the end of the command, more than 0; None if a stage to come cannot be estimated.
        detail: A result to show, such as a layer's error.
    """

    run: int
    runs: int
    run_name: str
    stage: str
    number: int
    stages: int
    done: float
    total: int
    unit: str
    fraction: float
    elapsed: float
    seconds_left: float | None
    detail: str


class Progress:
    """Observer that estimates the time left of a command.

    The expected seconds of a stage are multiplied by the ratio of measured to expected seconds over the work that this process
    has done: in stages of the same kind, and where there is little of it, in all stages. Results that were restored from a
    journal or a cache do not count, since they take no time. Of several runs, each takes as long besides its expected stages as
    the one before did, for its start and its end. The ratios change only when a unit of work is complete, which is a
    block or, from a stage's second one on, also each result of a block: between two units, the time left falls with the clock.

    Args:
        clock: Returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started = self._stage_started = self._block_started = self._unit_started = clock()
        self._runs: list[Sequence[ExpectedStage] | None] = [()]  # None for a run of which nothing is known
        self._run, self._run_name, self._position = 0, "", -1
        self._expected = ExpectedStage("", 0.0, "")
        self._stage = Stage("")
        self._measured: defaultdict[str, float] = defaultdict(float)  # seconds by kind, and of the work below
        self._work: defaultdict[str, float] = defaultdict(float)  # expected seconds by kind
        self._learned: dict[str, float] = {}  # seconds of stages without an estimate, by kind
        self._total = 0.0
        self._later: dict[str, float | None] = {}
        self._run_started, self._accounted, self._besides = self._started, 0.0, 0.0
        self._fraction, self._unit_share, self._counted = 0.0, 1.0, False
        self._advanced = Advanced(0, 0, "")
        self._blocks = self._layers = self._layers_before = 0
        self._steps: list[float] = []  # seconds from the block's begin to each of its results
        self._profile: list[float] = []  # the same of the previous block, as fractions of its seconds
        self._detail = ""
        self._shown = 0.0

    def __call__(self, event: Event) -> None:
        """Take note of an event."""
        if isinstance(event, Schedule):
            if not self._runs[self._run]:  # a sweep's is sent before those of its runs
                self._runs[self._run : self._run + len(event.runs)] = event.runs
                self._look_ahead()
        elif isinstance(event, NextRun):
            self._leave_run()
            self._runs += [None] * (event.count - len(self._runs))
            self._run, self._run_name, self._position = event.number - 1, event.name, -1
            self._expected, self._stage, self._counted = ExpectedStage("", 0.0, ""), Stage(""), False
            self._look_ahead()
        elif isinstance(event, Stage):
            self._begin_stage(event)
        elif isinstance(event, Advanced):
            self._advanced = event
            if event.total:
                self._complete(event.done / event.total, counted=True)
        elif isinstance(event, LayerResult):
            self._layers += 1
            self._detail = f"{event.name}  error {event.error:.3g}"
            self._finish_step()
        elif isinstance(event, EpochResult):
            self._detail = f"{event.block} {event.step} {event.epoch}  feed-forward error {event.feed_forward_error:.3g}"
            self._finish_step()
        elif isinstance(event, TrainingResult):
            self._detail = f"trained, held-out error {event.before:.3g} to {event.after:.3g}"
        elif isinstance(event, BlockResult):
            self._finish_block(event)

    def state(self) -> State:
        """Return the present state."""
        now = self._clock()
        elapsed, left = now - self._started, self._seconds_left(now)
        if left is not None:
            self._shown = max(self._shown, elapsed / (elapsed + left))
        stages = len(self._runs[self._run] or ())
        done, total, unit = self._advanced.done, self._advanced.total, self._advanced.unit
        if self._stage.layers:
            done, total, unit = self._layers, self._stage.layers, "layer"
        several = len(self._runs) > 1
        return State(
            run=self._run + 1 if several else 0,
            runs=len(self._runs) if several else 0,
            run_name=self._run_name,
            stage=self._stage.name,
            number=self._position + 1,
            stages=stages if self._position >= 0 else 0,
            done=done,
            total=total,
            unit=unit,
            fraction=self._shown,
            elapsed=elapsed,
            seconds_left=left,
            detail=self._detail,
        )

    def _begin_stage(self, stage: Stage) -> None:
        """Leave the previous stage, and look the new one up among those that are to come; others are not estimated."""
        self._leave_stage()
        expected = self._runs[self._run] or ()
        names = [each.name for each in expected]
        if stage.name in names:  # an earlier one is repeated where memory is short
            self._position = names.index(stage.name, self._position + 1 if stage.name in names[self._position + 1 :] else 0)
            self._expected = expected[self._position]
        else:
            self._expected = ExpectedStage(stage.name, 0.0, "")
        self._stage, self._advanced = stage, Advanced(0, 0, "")
        self._stage_started = self._block_started = self._unit_started = self._clock()
        self._fraction, self._blocks, self._layers, self._layers_before, self._detail = 0.0, 0, 0, 0, ""
        self._profile, self._steps = [], []
        self._unit_share = self._expected_at(1) if self._expected.blocks else 1.0
        self._counted = False

    def _leave_stage(self) -> None:
        """Add the rest of a stage after its last unit. One that counted no units was restored."""
        now, kind = self._clock(), self._expected.kind
        taken = now - self._stage_started
        if self._counted:
            self._measured[kind] += now - self._unit_started
        # Without units nothing was measured: what it took longer belongs to the rest of the run.
        self._accounted += taken if self._counted else min(taken, self._duration(self._expected) or 0.0)

    def _leave_run(self) -> None:
        """Find what a run of several took besides its expected stages; one that was not begun says nothing."""
        self._leave_stage()
        now = self._clock()
        if self._run_name and self._position >= 0:
            self._besides = max(0.0, now - self._run_started - self._accounted)
        self._run_started, self._stage_started, self._accounted = now, now, 0.0

    def _finish_block(self, result: BlockResult) -> None:
        """Count a block; a restored one comes without the results of its layers before it."""
        restored = self._layers == self._layers_before
        self._layers = self._layers_before = self._layers_before + len(result.layers)
        errors = [layer.error for layer in result.layers]
        self._detail = f"mean error {statistics.fmean(errors):.3g}" if errors else ""
        seconds = max(self._clock() - self._block_started, 1e-9)
        self._profile, self._steps = [step / seconds for step in self._steps], []
        self._blocks, self._block_started = self._blocks + 1, self._clock()
        self._complete(self._expected_at(0), counted=not restored)
        self._unit_share = self._expected_at(1) - self._expected_at(0)

    def _finish_step(self) -> None:
        """Note that a block has a result; it counts for the fraction of the block at which the previous block had it."""
        self._steps.append(self._clock() - self._block_started)
        step = len(self._steps)
        if step <= len(self._profile):
            self._complete(self._expected_at(step), counted=True)
            self._unit_share = self._expected_at(step + 1) - self._expected_at(step)

    def _expected_at(self, step: int) -> float:
        """The fraction of the stage's expected seconds at a step of the present block, whose begin is 0."""
        blocks, fractions = self._expected.blocks, [0.0, *self._profile, 1.0]
        begin, end = sum(blocks[: self._blocks]), sum(blocks[: self._blocks + 1])
        return (begin + fractions[step] * (end - begin)) / max(sum(blocks), 1e-9)

    def _complete(self, fraction: float, *, counted: bool) -> None:
        """Note that a fraction of the stage is done. counted: whether this process did the work."""
        now, share = self._clock(), fraction - self._fraction
        if counted and self._expected.seconds:
            self._counted, kind = True, self._expected.kind
            self._measured[kind] += now - self._unit_started
            self._work[kind] += share * self._expected.seconds
        elif counted and fraction and self._expected.seconds is None:
            self._learned[self._expected.kind] = (now - self._stage_started) / fraction
        self._unit_started, self._fraction, self._unit_share = now, min(fraction, 1.0), share

    def _look_ahead(self) -> None:
        """Add up the expected seconds of all stages, and of each kind of stage in later runs."""
        self._total = sum(stage.seconds or 0.0 for run in self._runs for stage in run or ())
        self._later.clear()
        for stage in (stage for run in self._runs[self._run + 1 :] for stage in run or ()):
            seconds = self._later.get(stage.kind, 0.0)
            self._later[stage.kind] = None if stage.seconds is None or seconds is None else seconds + stage.seconds

    def _seconds_left(self, now: float) -> float | None:
        """Seconds to the end of the command; None without estimates of all stages to come."""
        later_runs = self._runs[self._run + 1 :]
        if not any(self._runs) or None in self._runs[self._run :]:
            return None
        later = (ExpectedStage("", seconds, kind) for kind, seconds in self._later.items())
        upcoming = (*(self._runs[self._run] or ())[self._position + 1 :], *later)
        parts = [self._besides * sum(map(bool, later_runs)), self._stage_left(now), *map(self._duration, upcoming)]
        return None if None in parts else max(sum(part or 0.0 for part in parts), 1e-3)

    def _stage_left(self, now: float) -> float | None:
        """Seconds to the end of the present stage."""
        duration = self._duration(self._expected)
        if duration is None:
            return None
        since_unit = min(now - self._unit_started, (1 - LEAST_LEFT) * self._unit_share * duration)
        return max(0.0, (1 - self._fraction) * duration - since_unit)

    def _duration(self, stage: ExpectedStage) -> float | None:
        """Seconds that a whole stage takes, corrected by what was measured; None without an estimate."""
        return self._learned.get(stage.kind) if stage.seconds is None else self._ratio(stage.kind) * stage.seconds

    def _ratio(self, kind: str) -> float:
        """Measured over expected seconds of a kind of stage."""
        prior = PRIOR_SECONDS + PRIOR_SHARE * self._total
        limited = (min(self._measured[kind], LARGEST_RATIO * work) for kind, work in self._work.items())
        overall = (sum(limited) + prior) / (sum(self._work.values()) + prior)
        return (self._measured[kind] + prior * overall) / (self._work[kind] + prior)
