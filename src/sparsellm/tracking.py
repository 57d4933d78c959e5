"""Runs in Weights & Biases, TensorBoard, Trackio, or a tracker of one's own. Tracking never changes a result."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from importlib.metadata import PackageNotFoundError, version
from io import StringIO
from pathlib import Path, PurePath
from types import TracebackType
from typing import Any, Protocol, runtime_checkable

from sparsellm import devices
from sparsellm.errors import InvalidSetting, MissingPackage, nearest
from sparsellm.events import Begun, Ended, Event, Measured, Note, Observer, Stage
from sparsellm.files import first_line
from sparsellm.memory import peak_memory
from sparsellm.methods import BlockResult
from sparsellm.preparation import OPENING
from sparsellm.pruning import TRAINING
from sparsellm.refinement import Refined

PROJECT = "sparsellm"
"""What the runs stand under where the tracker's own settings name no project."""

RUNS = Path("runs")
"""Where TensorBoard's files go, in the present folder: what its own writers take too."""

GIB = 1024**3


@runtime_checkable
class Tracker(Protocol):
    """What it takes to be a tracker. It may raise what it likes: the run goes on without it."""

    def begin(self, name: str, settings: Mapping[str, Any]) -> str | None:
        """A run begins. settings: its recipe's fields, and its `environment`. Returns where the run can be seen, or nothing."""
        ...

    def log(self, values: Mapping[str, float | str], step: int) -> None:
        """Figures and notes, by names such as "error/fc1". step: the block's number; it does not fall within a run."""
        ...

    def end(self) -> None:
        """The run is over, or was cut off. Another may begin."""
        ...


class Tracked:
    """An observer that hands a run's figures to trackers; of several runs, one after the other.

    trackers: own ones, or names of `TRACKERS`. say: told where a run can be seen, and once of each tracker that fails, which is
    left out from then on; without it a warning tells of that. As a context manager it ends what an error cut off.
    Raises InvalidSetting for an unknown name and for a tracker that wants a login, MissingPackage for one not installed.
    """

    def __init__(self, *trackers: Tracker | str, say: Observer | None = None) -> None:
        once = [one for number, one in enumerate(trackers) if one not in trackers[:number]]
        self._trackers = [tracker_called(one) if isinstance(one, str) else one for one in once]
        self._say = say
        self._open: list[Tracker] = []
        self._stage, self._step, self._notes = "", 0, 0
        self._early: list[Note] = []

    def __enter__(self) -> Tracked:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and self._open:
            self(Note(f"cut off: {first_line(error)}"))
        self._end()

    def __call__(self, event: Event) -> None:
        """Take in one event."""
        if isinstance(event, Begun):
            self._begin(event)
        elif isinstance(event, Stage):
            self._stage = event.name
            if event.name == OPENING:  # of another run; the last one may have failed
                self._end()
        elif isinstance(event, Note):
            if self._open:
                self._notes += 1
                self._log({f"note/{self._notes}": event.text})
            else:
                self._early.append(event)
        elif isinstance(event, BlockResult):
            self._step = event.index
            self._log(figures(event))
        elif isinstance(event, Refined) and self._stage == TRAINING:
            self._log({"recovered/before": event.before, "recovered/after": event.after})
        elif isinstance(event, Measured):
            name = f"{event.kind}/{PurePath(event.on).name}-{event.when}"
            error = {} if event.standard_error is None else {f"{name}-standard-error": event.standard_error}
            self._log({name: event.value, **error})
        elif isinstance(event, Ended):
            self._log({f"total/{name}": value for name, value in {**event.totals, "seconds": event.seconds}.items()})
            self._end()

    def _begin(self, run: Begun) -> None:
        """Begin the run in every tracker, and say where."""
        self._stage, self._step, self._notes = "", 0, 0
        self._open = list(self._trackers)
        settings = {**run.recipe.model_dump(mode="json"), "environment": dict(run.environment)}

        def begin(tracker: Tracker) -> None:
            where = tracker.begin(run.name, settings)
            if where and self._say:
                self._say(Note(f"tracked by {type(tracker).__name__}: {where}"))

        self._each(begin)
        early, self._early = self._early, []
        for note in early:
            self(note)

    def _log(self, values: Mapping[str, float | str]) -> None:
        self._each(lambda tracker: tracker.log(values, self._step))

    def _end(self) -> None:
        self._each(lambda tracker: tracker.end())
        self._open, self._early = [], []

    def _each(self, what: Callable[[Tracker], object]) -> None:
        """Do something with every tracker of the open run; one that fails is told of and left out."""
        for tracker in self._open:
            try:
                what(tracker)
            except Exception as error:
                self._trackers.remove(tracker)
                self._open = [one for one in self._open if one is not tracker]
                why = f"{type(error).__name__}: {first_line(error)}"
                told = f"{type(tracker).__name__} failed and is left out from here on ({why})"
                if self._say:
                    self._say(Note(told))
                else:
                    warnings.warn(told, RuntimeWarning, stacklevel=2)


def figures(block: BlockResult) -> dict[str, float]:
    """A block's figures by name: error and sparsity of each kind of layer (experts together), epochs, seconds, memory."""
    kinds: dict[str, list[tuple[float, int, int]]] = {}
    for layer in block.layers:
        kind = re.sub(r"\.\d+(?=\.)", "", layer.name.removeprefix(f"{block.name}."))
        kinds.setdefault(kind, []).append((layer.error, layer.zeros, layer.shape[0] * layer.shape[1]))
    found: dict[str, float] = {}
    for kind, layers in kinds.items():
        found[f"error/{kind}"] = sum(error for error, _, _ in layers) / len(layers)
        found[f"sparsity/{kind}"] = sum(zeros for _, zeros, _ in layers) / sum(count for _, _, count in layers)
    for epoch in block.epochs:
        found[f"feed_forward_error/{epoch.step}-{epoch.epoch}"] = epoch.feed_forward_error
        if epoch.accepted:
            found["feed_forward_error/kept"] = epoch.feed_forward_error
    if block.refined:
        found |= {"refined/before": block.refined.before, "refined/after": block.refined.after}
    found |= {"block/seconds": block.seconds, "block/peak-memory-GiB": peak_memory() / GIB}
    peak = devices.peak_bytes()
    if peak is not None:
        found["block/peak-GPU-memory-GiB"] = peak / GIB
    return found


def tracker_called(name: str) -> Tracker:
    """The tracker of that name, ready to begin a run.

    Raises InvalidSetting for an unknown name and for one that wants a login, MissingPackage for one that is not installed.
    """
    if name not in TRACKERS:
        raise InvalidSetting(f"`track` got {name!r}. {nearest(name, TRACKERS)}")
    try:
        version(name)
    except PackageNotFoundError:
        raise MissingPackage(f'The tracker {name} is not installed: pip install "sparsellm[{name}]".') from None
    return TRACKERS[name]()


class WandB:
    """Weights & Biases, by its own settings: WANDB_PROJECT, WANDB_MODE=offline, and the rest."""

    def __init__(self) -> None:
        import wandb

        try:
            mode = wandb.setup(settings=wandb.Settings(silent=True)).settings.mode
            known = mode != "online" or wandb.login(prompt=False)
        except Exception as error:  # of many kinds, from its own service process
            raise InvalidSetting(f"wandb cannot be used: {first_line(error)}. Set WANDB_MODE=offline to do without.") from error
        if not known:
            raise InvalidSetting("wandb has no login. Run `wandb login`, or set WANDB_MODE=offline.")

    def begin(self, name: str, settings: Mapping[str, Any]) -> str | None:
        """A run of its own beside any that the program has already."""
        import wandb

        quiet = wandb.Settings(silent=True, console="off")
        project = None if wandb.setup().settings.project else PROJECT
        self._run = wandb.init(project=project, name=name, config=dict(settings), reinit="create_new", settings=quiet)
        folder = Path(self._run.dir).parent
        return None if self._run.disabled else self._run.url or f"{folder} (wandb sync {folder})"

    def log(self, values: Mapping[str, float | str], step: int) -> None:
        """Add to the step's row."""
        self._run.log(dict(values), step=step)

    def end(self) -> None:
        """Wait until all is sent, or written where it is offline."""
        self._run.finish()


class TensorBoard:
    """An event file in `runs/NAME` of the present folder, or `runs/NAME-2` and so on where that is taken."""

    def begin(self, name: str, settings: Mapping[str, Any]) -> str:
        """Make the folder, and write the settings as text."""
        from torch.utils.tensorboard import SummaryWriter

        plain = re.sub(r"[^\w.]+", "-", name).strip("-.")[:80] or PROJECT
        for number in range(1, 10_000):
            folder = RUNS / (plain if number == 1 else f"{plain}-{number}")
            try:
                folder.mkdir(parents=True)
                break
            except FileExistsError:  # of an earlier run, or another process
                continue
        self._writer = SummaryWriter(folder)
        rows = [f"| {field} | {value} |" for field, value in settings.items()]
        self._writer.add_text("settings", "\n".join(["| field | value |", "|---|---|", *rows]), 0)
        return f"{folder} (tensorboard --logdir {RUNS})"

    def log(self, values: Mapping[str, float | str], step: int) -> None:
        """Write figures as scalars and notes as text, on the disk when this returns."""
        for name, value in values.items():
            (self._writer.add_text if isinstance(value, str) else self._writer.add_scalar)(name, value, step)
        self._writer.flush()

    def end(self) -> None:
        """Close the file."""
        self._writer.close()


class Trackio:
    """Trackio's database on this machine, by its own settings: TRACKIO_DIR and the rest."""

    def begin(self, name: str, settings: Mapping[str, Any]) -> str:
        """A new run of the project."""
        import trackio

        with redirect_stdout(StringIO()):  # stdout is for data
            self._run = trackio.init(project=PROJECT, name=name, config=dict(settings))
        return f"trackio show --project {PROJECT}"

    def log(self, values: Mapping[str, float | str], step: int) -> None:
        """Add to the step's figures."""
        self._run.log(dict(values), step=step)

    def end(self) -> None:
        """Wait until all is written."""
        import trackio

        with redirect_stdout(StringIO()):
            trackio.finish()


TRACKERS: dict[str, Callable[[], Tracker]] = {"wandb": WandB, "tensorboard": TensorBoard, "trackio": Trackio}
"""By the name that --track takes, which is the package's and the extra's."""
