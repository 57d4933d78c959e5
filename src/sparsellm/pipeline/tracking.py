"""Logging of runs to the trackers of `accelerate.tracking`, or to custom ones. Trackers do not change results."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stdout
from io import StringIO
from itertools import count
from pathlib import Path, PurePath
from types import TracebackType
from typing import Any

from accelerate.state import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers
from accelerate.utils import clear_environment

from sparsellm.errors import InvalidSetting, MissingPackage, first_line, nearest
from sparsellm.methods import BlockResult, TrainingResult
from sparsellm.pipeline.events import OPENING, TRAINING, Begun, Ended, Event, Measured, Note, Observer, Stage
from sparsellm.runtime import devices
from sparsellm.runtime.memory import peak_memory

PROJECT = "sparsellm"
"""Default name of the project or experiment."""

RUNS = Path("runs")
"""Folder for the files of trackers that write some (TensorBoard), relative to the current folder."""

RUN_NAME = {"wandb": "name", "trackio": "name", "mlflow": "run_name", "swanlab": "experiment_name", "clearml": "task_name"}
"""Argument of each tracker's class that names the run within its project; other classes have none."""

TAKES_TEXT = ("tensorboard", "wandb", "trackio", "comet_ml")
"""Trackers that log text as well as numbers."""

GIB = 1024**3


class Tracked:
    """An observer that logs runs to trackers, one run after the other.

    As a context manager it finishes a run that an error ended. A tracker that raises an error is reported once and disabled.

    Args:
        trackers: Names that `accelerate.tracking` knows, such as "wandb", or instances of its `GeneralTracker`. An instance is
            started and finished once for each run.
        observer: Receives a note with the location of each run, and a note for each tracker that fails, instead of a warning.

    Raises:
        InvalidSetting: For an unknown name, and for wandb without a login.
        MissingPackage: For a tracker that is not installed.
    """

    def __init__(self, *trackers: GeneralTracker | str, observer: Observer | None = None) -> None:
        self._trackers = list(dict.fromkeys(trackers))
        for tracker in self._trackers:
            if isinstance(tracker, str):
                check_tracker(tracker)
        self._observer = observer
        self._open: dict[GeneralTracker | str, GeneralTracker] = {}
        self._notes: list[str] = []
        self._stage, self._step = "", 0

    def __enter__(self) -> Tracked:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self._notes.append(f"interrupted: {first_line(error)}")
        self._finish()

    def __call__(self, event: Event) -> None:
        """Log one event; notes are logged at the end of the run."""
        if isinstance(event, Begun):
            self._start(event)
        elif isinstance(event, Stage):
            self._stage = event.name
            if event.name == OPENING:  # of the next run; the previous run may have failed
                self._finish()
        elif isinstance(event, Note):
            self._notes.append(event.text)
        elif isinstance(event, BlockResult):
            self._step = event.index
            self._log(figures(event))
        elif isinstance(event, TrainingResult) and self._stage == TRAINING:
            self._log({"recovered/before": event.before, "recovered/after": event.after})
        elif isinstance(event, Measured):
            name = f"{event.kind}/{PurePath(event.on).name}-{event.when}"
            error = {} if event.standard_error is None else {f"{name}-standard-error": event.standard_error}
            self._log({name: event.value, **error})
        elif isinstance(event, Ended):
            self._log({f"total/{name}": value for name, value in {**event.totals, "seconds": event.seconds}.items()})
            self._finish()

    def _start(self, run: Begun) -> None:
        """Start the run in every tracker."""
        settings = {"run": run.name, **run.recipe.model_dump(mode="json", exclude_none=True)}
        settings |= {f"environment/{name}": value for name, value in run.environment.items()}
        logged = {name: value if isinstance(value, (bool, int, float)) else str(value) for name, value in settings.items()}

        def start(tracker: GeneralTracker | str) -> None:
            started = self._open[tracker] = start_tracker(tracker, run.name, logged)
            location = getattr(started, "logging_dir", None) or getattr(started.tracker, "url", None)
            if self._observer:
                self._observer(Note(f"tracked by {started.name}" + (f": {location}" if location else "")))

        self._step = 0
        self._each(self._trackers, start)

    def _log(self, values: Mapping[str, float]) -> None:
        """Log values at the current step."""
        self._each(self._open, lambda tracker: self._open[tracker].log(dict(values), step=self._step))

    def _finish(self) -> None:
        """Log the notes and finish the run in every tracker."""
        notes = {f"note/{number}": text for number, text in enumerate(self._notes, 1)}

        def finish(tracker: GeneralTracker | str) -> None:
            if notes and (tracker in TAKES_TEXT or not isinstance(tracker, str)):
                self._open[tracker].log(notes, step=self._step)
            self._open[tracker].finish()
            if tracker == "trackio":  # otherwise it finishes the run again when Python exits, and prints to stdout
                import trackio

                trackio.finish()

        self._each(self._open, finish)
        self._open, self._notes = {}, []

    def _each(self, trackers: Iterable[GeneralTracker | str], action: Callable[[GeneralTracker | str], object]) -> None:
        """Call `action` with every tracker; one that fails is reported and disabled."""
        for tracker in list(trackers):
            try:
                with _process_state(), redirect_stdout(StringIO()) if isinstance(tracker, str) else nullcontext():
                    action(tracker)
            except Exception as error:
                self._trackers.remove(tracker)
                self._open.pop(tracker, None)
                name = tracker if isinstance(tracker, str) else tracker.name
                text = f"The tracker {name} failed and is disabled ({type(error).__name__}: {first_line(error)})"
                if self._observer:
                    self._observer(Note(text))
                else:
                    warnings.warn(text, RuntimeWarning, stacklevel=2)


def check_tracker(name: str) -> None:
    """Raise InvalidSetting for an unknown tracker or wandb without a login, MissingPackage for one that is not installed."""
    if name not in LOGGER_TYPE_TO_CLASS:
        raise InvalidSetting(f"`report_to` got {name!r}. {nearest(name, LOGGER_TYPE_TO_CLASS)}")
    if name not in map(str, get_available_trackers()):
        raise MissingPackage(f"The tracker {name} is not installed: pip install {name}")
    if name == "wandb":
        import wandb

        try:
            mode = wandb.setup(settings=wandb.Settings(silent=True)).settings.mode
            usable = mode != "online" or wandb.login(prompt=False)
        except Exception as error:  # of many types, from wandb's service process
            raise InvalidSetting(
                f"wandb cannot be used: {first_line(error)}. Set WANDB_MODE=offline to log locally."
            ) from error
        if not usable:
            raise InvalidSetting("wandb has no login. Run `wandb login`, or set WANDB_MODE=offline.")


def start_tracker(tracker: GeneralTracker | str, run: str, settings: dict[str, Any]) -> GeneralTracker:
    """Start a run in a tracker and store its settings.

    Args:
        tracker: Name or instance of the tracker.
        settings: Values to store with the run.
    """
    options: dict[str, Any] = {}
    if isinstance(tracker, str):
        tracker_class = LOGGER_TYPE_TO_CLASS[tracker]
        project, options = PROJECT, {RUN_NAME[tracker]: run} if tracker in RUN_NAME else {}
        if tracker in ("wandb", "trackio"):  # accelerate would store it later, in the run started last
            options["config"] = settings
        if tracker == "wandb":
            import wandb

            project = wandb.setup().settings.project or PROJECT
            options |= {"reinit": "create_new", "settings": {"silent": True, "console": "off"}}
        if tracker_class.requires_logging_directory:
            tracker = tracker_class(_free_name(run), RUNS)
        else:
            tracker = tracker_class(project, **options)
    tracker.start()
    if "config" not in options:
        tracker.store_init_configuration(settings)
    return tracker


def figures(block: BlockResult) -> dict[str, float]:
    """A block's values to log: error and sparsity of each kind of layer (experts together), epochs, seconds, memory."""
    kinds: dict[str, list[tuple[float, int, int]]] = {}
    for layer in block.layers:
        kind = re.sub(r"\.\d+(?=\.)", "", layer.name.removeprefix(f"{block.name}."))
        kinds.setdefault(kind, []).append((layer.error, layer.zeros, layer.shape[0] * layer.shape[1]))
    values: dict[str, float] = {}
    for kind, layers in kinds.items():
        values[f"error/{kind}"] = sum(error for error, _, _ in layers) / len(layers)
        values[f"sparsity/{kind}"] = sum(zeros for _, zeros, _ in layers) / sum(count for _, _, count in layers)
    for epoch in block.epochs:
        values[f"feed_forward_error/{epoch.step}-{epoch.epoch}"] = epoch.feed_forward_error
        if epoch.accepted:
            values["feed_forward_error/kept"] = epoch.feed_forward_error
    if block.refined:
        values |= {"refined/before": block.refined.before, "refined/after": block.refined.after}
    values |= {"block/seconds": block.seconds, "block/peak-memory-GiB": peak_memory() / GIB}
    peak = devices.peak_bytes()
    if peak is not None:
        values["block/peak-GPU-memory-GiB"] = peak / GIB
    return values


def _free_name(run: str) -> str:
    """An unused name for a run's folder in `RUNS`: NAME, NAME-2, and so on."""
    plain = re.sub(r"[^\w.]+", "-", run).strip("-.")[:80] or PROJECT
    names = (plain if number == 1 else f"{plain}-{number}" for number in count(1))
    return next(name for name in names if not (RUNS / name).exists())


@contextmanager
def _process_state() -> Iterator[None]:
    """Give accelerate's trackers the process state that they require, that of a single process.

    Created from the environment of a launcher, the state would start a process group and set torch's threads. It is reset
    afterwards, so that an `Accelerator` created later in this process makes its own.
    """
    initialized = bool(PartialState._shared_state)
    if not initialized:
        with clear_environment():
            PartialState(cpu=True)
    try:
        yield
    finally:
        if not initialized:
            PartialState._reset_state()
