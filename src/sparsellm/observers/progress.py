"""Time left of a command, from what its finished part took."""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from sparsellm.methods import BlockResult, EpochResult, LayerResult, TrainingResult
from sparsellm.observers.events import (
    ALLOCATION,
    SENSITIVITIES,
    WRITING,
    Advanced,
    Event,
    NextRun,
    Schedule,
    Stage,
)

OF_DENSE, PRUNED = " dense", " pruned"
"""Ends of the names of stages that are the same work on two models, and take the same time."""

ON_DENSE = (OF_DENSE, " with the dense model")
"""Ends of the names of stages whose results later runs take, besides sensitivities and each layer's sparsity."""

LEAST_LEFT = 0.1
"""Fraction of a unit's time that counts as left however long the unit takes, so that the time left does not become zero."""


@dataclass(frozen=True)
class State:
    """The state of a command at a moment.

    Attributes:
        run, runs: Number of the run and of all runs; 0 for a command of one run.
        run_name: Name of the run among several.
        stage: Name of the stage.
        number, stages: Number of the stage and of all stages of the run; 0 for a stage that is not among those announced.
        done, total, unit: Units of the stage; total is 0 for a stage that counts none.
        elapsed: Seconds since the command started.
        seconds_left: Seconds to the end of the command, more than 0; None where nothing was measured yet that tells it.
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
    elapsed: float
    seconds_left: float | None
    detail: str

    @property
    def fraction(self) -> float | None:
        """Fraction of the time that has passed, or of the runs where the time left is not known; None for one such run."""
        if self.seconds_left is None:
            return (self.run - 1) / self.runs if self.runs else None
        return self.elapsed / (self.elapsed + self.seconds_left)


class Progress:
    """Observer that measures the time left of a command.

    The rest of a stage takes as long for each unit as its finished units took: blocks, or sequences, answers and steps. A stage
    to come is known if the same was measured before: the pruned model is measured as long as the dense one was. A run to come
    takes as long as the present one without the results on the dense model, if it is announced to be like it, and otherwise as
    long as the runs so far in the mean. Blocks that a journal restores and results from a cache take no time and tell nothing.
    Where one stage to come is not known, the present run takes as long as those before it; of the first one the time left is
    not known then.

    Args:
        clock: Returns seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started = self._stage_started = self._unit_started = clock()
        self._run, self._run_started, self._shared = NextRun(0, 0, ""), self._started, 0.0
        self._runs, self._runs_seconds = 0, 0.0  # those before the present one that announced their stages
        self._stages: tuple[str, ...] = ()
        self._position = -1
        self._stage, self._advanced, self._detail = Stage(""), Advanced(0, 0, ""), ""
        self._blocks = self._layers = self._layers_before = 0
        self._units: list[float] = []  # seconds of each finished unit that this process computed
        self._seen: Counter[str] = Counter()  # stages of the run, by name
        self._measured: dict[tuple[str, int], float] = {}  # seconds of a kind of stage, by its number in a run

    def __call__(self, event: Event) -> None:
        """Take note of an event."""
        if isinstance(event, Schedule):
            self._stages, self._position = event.stages, -1
        elif isinstance(event, NextRun):
            self._leave_stage()
            now = self._clock()
            if self._stages:
                self._runs += 1
                self._runs_seconds += now - self._run_started - (self._shared if event.alike else 0.0)
            self._run, self._shared = event, 0.0
            self._run_started = self._stage_started = now
            self._stages, self._position, self._stage = (), -1, Stage("")
            self._seen.clear()
        elif isinstance(event, Stage):
            self._begin_stage(event)
        elif isinstance(event, Advanced) and self._stage.blocks:  # a pass through a block
            self._detail = f"block {self._blocks + 1}, {event.unit} {event.done:g}/{event.total}"
        elif isinstance(event, Advanced):
            if event.done > self._advanced.done:
                self._finish_units(event.done - self._advanced.done)
            self._advanced = event
        elif isinstance(event, LayerResult):
            self._layers += 1
            self._detail = f"{event.name}  error {event.error:.3g}"
        elif isinstance(event, EpochResult):
            self._detail = f"{event.block} {event.step} {event.epoch}  feed-forward error {event.feed_forward_error:.3g}"
        elif isinstance(event, TrainingResult):
            self._detail = f"trained, held-out error {event.before:.3g} to {event.after:.3g}"
        elif isinstance(event, BlockResult):
            self._finish_block(event)

    def state(self) -> State:
        """Return the present state."""
        now = self._clock()
        is_announced = self._stage.name in self._stages
        done, total, unit = self._advanced.done, self._advanced.total, self._advanced.unit
        if self._stage.layers:
            done, total, unit = self._layers, self._stage.layers, "layer"
        return State(
            run=self._run.number,
            runs=self._run.count,
            run_name=self._run.name,
            stage=self._stage.name,
            number=self._position + 1 if is_announced else 0,
            stages=len(self._stages) if is_announced else 0,
            done=done,
            total=total,
            unit=unit,
            elapsed=now - self._started,
            seconds_left=self._seconds_left(now),
            detail=self._detail,
        )

    def _begin_stage(self, stage: Stage) -> None:
        """Leave the previous stage, and look the new one up among those that are to come."""
        self._leave_stage()
        later = self._stages[self._position + 1 :]
        if stage.name in later:
            self._position += 1 + later.index(stage.name)
        elif stage.name in self._stages:  # repeated, as where memory runs out and pruning starts again
            self._position = self._stages.index(stage.name)
        self._stage, self._advanced, self._detail = stage, Advanced(0, 0, ""), ""
        self._stage_started = self._unit_started = self._clock()
        self._blocks = self._layers = self._layers_before = 0
        self._units = []

    def _leave_stage(self) -> None:
        """Note what the stage took, unless its units were restored."""
        name, taken = self._stage.name, self._clock() - self._stage_started
        if self._units or name == WRITING:  # which is short beside pruning, and is not announced: the caller decides to write
            self._measured[_kind(name), self._seen[name]] = taken
        self._seen[name] += 1
        if name.endswith(ON_DENSE) or name.startswith((SENSITIVITIES, ALLOCATION)):
            self._shared += taken

    def _finish_units(self, count: float) -> None:
        """Note that some units are done, which took the time since the one before."""
        now = self._clock()
        self._units += [(now - self._unit_started) / count] * max(1, round(count))
        self._unit_started = now

    def _finish_block(self, result: BlockResult) -> None:
        """Count a block; a restored one comes without the results of its layers before it."""
        if self._layers > self._layers_before or not result.layers:
            self._finish_units(1)
        self._unit_started = self._clock()
        self._blocks += 1
        self._layers = self._layers_before = self._layers_before + len(result.layers)
        errors = [layer.error for layer in result.layers]
        self._detail = f"mean error {statistics.fmean(errors):.3g}" if errors else ""

    def _seconds_left(self, now: float) -> float | None:
        """Seconds to the end of the command; None if that is not known."""
        left, since = self._run_left(now), now - self._run_started
        if left is None and not self._runs:
            return None
        if left is None:
            mean = self._runs_seconds / self._runs
            left = max(mean - since, LEAST_LEFT * mean)
        whole = since + left
        other = whole - self._shared if self._run.alike else (self._runs_seconds + whole) / (self._runs + 1)
        return max(left + (self._run.count - self._run.number) * other, 1e-3)

    def _run_left(self, now: float) -> float | None:
        """Seconds to the end of the present run; None if a stage to come is not known."""
        seen = self._seen.copy()
        seen[self._stage.name] += 1
        parts = [self._stage_left(now)]
        for name in self._stages[self._position + 1 :]:
            parts.append(self._whole(name, seen[name]))
            seen[name] += 1
        if self._position < 0 or None in parts:
            return None
        left = sum(part or 0.0 for part in parts)
        return left + (self._measured.get((WRITING, 0), 0.0) if self._stage.name != WRITING else 0.0)

    def _stage_left(self, now: float) -> float | None:
        """Seconds to the end of the present stage; None if nothing of it was measured."""
        since = now - self._unit_started
        total, done = (self._stage.blocks, self._blocks) if self._stage.blocks else (self._advanced.total, self._advanced.done)
        whole = self._whole(self._stage.name, self._seen[self._stage.name])
        if not (self._units and total):
            return None if whole is None else max(whole - since, LEAST_LEFT * whole)
        unit = statistics.fmean(self._units)
        if whole is not None:  # the first units may be slow: what the whole took before counts as much as is left
            unit += (1 - done / total) * (whole / total - unit)
        return max((total - done) * unit - min(since, (1 - LEAST_LEFT) * unit), 0.0)

    def _whole(self, name: str, number: int) -> float | None:
        """Seconds of a stage, the `number`-th of its name in a run, from those of an earlier one; None if there was none."""
        return self._measured.get((_kind(name), number), 0.0 if name == WRITING else None)


def _kind(name: str) -> str:
    """The name that stages have in common which take the same time."""
    return name.removesuffix(OF_DENSE).removesuffix(PRUNED)


def human_seconds(seconds: float) -> str:
    """Format seconds as hours and minutes, minutes and seconds, or seconds."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours else f"{minutes}m{seconds:02d}s" if minutes else f"{seconds}s"
