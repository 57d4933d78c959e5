"""An observer that logs runs to the trackers of `accelerate.tracking`. Trackers do not change results."""

from __future__ import annotations

import re
import sys
import time
import warnings
from collections import defaultdict
from contextlib import AbstractContextManager, redirect_stdout
from pathlib import PurePath
from statistics import fmean

from accelerate.state import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers
from accelerate.utils import clear_environment

from sparsellm.errors import InvalidSetting, MissingPackage, first_line, nearest
from sparsellm.methods import BlockResult
from sparsellm.observers.events import Begun, Ended, Event, Measured, Note, Observer

RUN_NAME = {"wandb": "name", "trackio": "name", "mlflow": "run_name", "swanlab": "experiment_name", "clearml": "task_name"}


class Tracked(AbstractContextManager["Tracked"]):
    """An observer that logs runs to trackers, one after the other; leaving its context finishes a run that an error ended.

    Args:
        trackers: Names that `accelerate.tracking` knows, such as "wandb", or instances of its `GeneralTracker`.
        observer: Receives a note, instead of a warning, about a tracker that fails. The run continues without it.
    """

    def __init__(self, *trackers: GeneralTracker | str, observer: Observer | None = None) -> None:
        for name in [tracker for tracker in trackers if isinstance(tracker, str)]:
            if name not in LOGGER_TYPE_TO_CLASS:
                raise InvalidSetting(f"`report_to` got {name!r}. {nearest(name, LOGGER_TYPE_TO_CLASS)}")
            if name not in map(str, get_available_trackers()):
                raise MissingPackage(f"The tracker {name} is not installed: pip install {name}")
        self._trackers = dict.fromkeys(trackers)
        self._observer = observer
        self._running: list[GeneralTracker] = []
        self._step = 0

    def __exit__(self, *error: object) -> None:
        self._tell("finish")
        self._running.clear()

    def __call__(self, event: Event) -> None:
        """Log one event."""
        if isinstance(event, Begun):
            self.__exit__()  # the run before may have failed
            self._running = [_new_tracker(x, event.name) if isinstance(x, str) else x for x in self._trackers]
            self._step = 0
            recipe = event.recipe.model_dump(mode="json", exclude_none=True)
            plain = {name: value if isinstance(value, int | float) else str(value) for name, value in recipe.items()}
            self._tell("start")
            self._tell("store_init_configuration", {"run": event.name, **plain})
        elif isinstance(event, BlockResult):
            self._step = event.index
            values = {f"feed_forward_error/{x.step}-{x.epoch}": x.feed_forward_error for x in event.epochs if x.accepted}
            alike = defaultdict(list)  # by kind, of which a block has one layer, or one in each expert
            for layer in event.layers:
                alike[re.sub(r"\.\d+(?=\.)", "", layer.name.removeprefix(f"{event.name}."))].append(layer)
            for kind, layers in alike.items():
                values[f"error/{kind}"] = fmean(layer.error for layer in layers)
                values[f"sparsity/{kind}"] = fmean(layer.sparsity for layer in layers)
            self._tell("log", values | {"block/seconds": event.seconds}, self._step)
        elif isinstance(event, Measured):
            self._tell("log", {f"{event.kind}/{PurePath(event.on).name}-{event.when}": event.value}, self._step)
        elif isinstance(event, Ended):
            totals = {f"total/{name}": value for name, value in event.totals.items()}
            self._tell("log", totals | {"total/seconds": event.seconds}, self._step)
            self.__exit__()

    def _tell(self, method: str, *values: object) -> None:
        """Call a method of each tracker, in a process state that ignores a launcher; what they print goes to stderr."""
        for tracker in list(self._running):
            fresh = not PartialState._shared_state
            try:
                with clear_environment():
                    PartialState(cpu=True)
                with redirect_stdout(sys.stderr):
                    getattr(tracker, method)(*values)
            except Exception as error:
                self._running.remove(tracker)
                text = f"The tracker {tracker.name} failed and is disabled ({type(error).__name__}: {first_line(error)})"
                if self._observer:
                    self._observer(Note(text))
                else:
                    warnings.warn(text, RuntimeWarning, stacklevel=3)
            finally:
                if fresh:
                    PartialState._reset_state()


def _new_tracker(name: str, run: str) -> GeneralTracker:
    """A tracker for a run of this name."""
    if LOGGER_TYPE_TO_CLASS[name].requires_logging_directory:
        return LOGGER_TYPE_TO_CLASS[name](f"{run}-{time.strftime('%Y%m%d-%H%M%S')}", "runs")
    return LOGGER_TYPE_TO_CLASS[name]("sparsellm", **({RUN_NAME[name]: run} if name in RUN_NAME else {}))
