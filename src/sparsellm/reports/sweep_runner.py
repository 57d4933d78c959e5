"""A sweep's cells run one after another, by as many processes as look into its folder; what is finished stays."""

from __future__ import annotations

import errno
import gc
import hashlib
import itertools
import json
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from filelock import FileLock, Timeout

from sparsellm.errors import CannotResume, InvalidSetting, OutputExists
from sparsellm.pruning.journal import durable
from sparsellm.reports.sweep_file import Cell, Sweep
from sparsellm.runs.events import Note, Observer, Stage
from sparsellm.runs.export import check_output
from sparsellm.runs.records import FailedCell, FinishedCell, SavedReport, read_record
from sparsellm.runs.report import strict_json
from sparsellm.runs.run import Result, run
from sparsellm.runs.sharing import DenseCache
from sparsellm.runs.workspace import work_directory

SWEEP = "sweep.json"
"""The file that says that a folder is a sweep's, and how its cells are shown."""

State = Literal["finished", "failed", "at work", "open"]

OF_THE_MACHINE = ("device", "max_memory", "offload", "batch_size")
"""Fields of a recipe that do not make it another cell: processes on several machines may differ in them."""


@dataclass(frozen=True)
class Outcome:
    """What has become of a cell. report: of its run, when finished. error: why it failed."""

    cell: Cell
    state: State
    report: SavedReport | None = None
    error: str = ""


class CellFolder:
    """The folder of one cell.

    name: what the cell's run is called among those of other sweeps. result, failure: files that are there once the cell is
    finished, or failed. model: where the run works, and where its pruned model stands if it is kept.
    """

    def __init__(self, folder: Path, cell: Cell) -> None:
        # Without defaults, so that a field that a later version adds does not make it another cell.
        message = cell.recipe.model_dump(mode="json", exclude=set(OF_THE_MACHINE), exclude_defaults=True)
        digest = hashlib.blake2b(json.dumps(message, sort_keys=True).encode(), digest_size=4).hexdigest()
        self.cell = cell
        self.name = f"{folder.name}, {cell.name}"
        self.folder = folder / "cells" / f"{re.sub(r'[^A-Za-z0-9.]+', '-', cell.name).strip('-')[:80]}-{digest}"
        self.result, self.failure, self.model = (self.folder / name for name in ("result.json", "failed.json", "model"))

    @contextmanager
    def taken(self) -> Iterator[bool]:
        """Whether the cell is this process's within the context; the lock goes with the process, however that ends."""
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.folder / "lock", timeout=0)
        try:
            lock.acquire()
        except Timeout:
            yield False
            return
        try:
            for left in self.folder.glob("*.partial"):
                left.unlink(missing_ok=True)  # of a process that was killed
            yield True
        finally:
            lock.release()

    def outcome(self) -> Outcome:
        """What has become of the cell so far."""
        if self.result.exists():
            return Outcome(self.cell, "finished", read_record(self.result, FinishedCell, "finished cell of a sweep")[0].report)
        if self.failure.exists():
            return Outcome(self.cell, "failed", error=read_record(self.failure, FailedCell, "failed cell of a sweep")[0].error)
        if not self.folder.exists():
            return Outcome(self.cell, "open")
        with self.taken() as free:
            return Outcome(self.cell, "open" if free else "at work")

    def finish(self, result: Result) -> None:
        """Put down what came of the cell; it is finished when this returns."""
        message = {"labels": dict(self.cell.labels), "report": result.report.to_dict()}
        durable(self.result, (strict_json(message) + "\n").encode())
        self.failure.unlink(missing_ok=True)

    def fail(self, error: Exception) -> str:
        """Put down why the cell failed; in one line."""
        text = " ".join([str(error) or type(error).__name__, *getattr(error, "__notes__", ())])
        trace = "".join(traceback.format_exception(error))
        message = {"labels": dict(self.cell.labels), "error": text, "kind": type(error).__name__, "traceback": trace}
        durable(self.failure, (strict_json(message) + "\n").encode())
        return text


def run_sweep(
    sweep: Sweep,
    folder: str | Path,
    observe: Observer,
    retry: bool = False,
    device: str | None = None,
    only: Sequence[str] = (),
    after: Callable[[list[Outcome]], object] = lambda _: None,
) -> list[Outcome]:
    """Run every cell that is neither finished nor taken by another process; what has become of all of them.

    A cell that fails is noted and passed over; `retry` tries such cells again. A process that is killed loses what it did since
    the last finished block of its cell. Processes on other devices or machines take cells from the same folder.
    device: in place of the recipes'. only: the cells to run, as for `Sweep.at`. after: told the outcomes after each cell.
    Raises OutputExists for a folder that is there and no sweep's, OSError for a full disk.
    """
    loaded, local = Path(folder), sweep.at(only)
    _open(loaded, sweep)
    shared = DenseCache(loaded / "dense", observe)
    places = [CellFolder(loaded, cell) for cell in local]
    passes = itertools.product((False, True), enumerate(places, 1))
    for again, (number, place) in passes:  # twice: a cell that another process only looked at seemed taken
        if place.result.exists() or (place.failure.exists() and (again or not retry)):
            continue
        with place.taken() as free:
            if not free or place.result.exists():
                continue
            observe(Stage(f"cell {number} of {len(places)}: {place.cell.name}"))
            try:
                place.finish(_run_cell(place, observe, shared, device, sweep.keep))
            except Exception as error:
                if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                    raise
                observe(Note(f"the cell {place.cell.name} failed and is passed over: {place.fail(error)}"))
        gc.collect()  # the cell's model
        after(read_outcomes(sweep, loaded))
    return read_outcomes(sweep, loaded)


def read_outcomes(sweep: Sweep, folder: str | Path) -> list[Outcome]:
    """What has become of each cell so far."""
    return [CellFolder(Path(folder), cell).outcome() for cell in sweep.cells]


def is_sweep(folder: str | Path) -> bool:
    """Whether a folder is a sweep's."""
    return (Path(folder) / SWEEP).is_file()


def saved_sweep(folder: str | Path) -> Sweep:
    """The sweep that was run into a folder, as it was last run there."""
    return read_record(Path(folder) / SWEEP, Sweep, "sweep")[0]


def _run_cell(place: CellFolder, observe: Observer, shared: DenseCache, device: str | None, keep: bool) -> Result:
    """The cell's run, from where an earlier process left it."""
    recipe = place.cell.recipe.model_copy(update={"device": device} if device else {})
    if keep:
        check_output(place.model, dense=recipe.model, overwrite=True)

    def prune(restart: bool) -> Result:
        with work_directory(place.model, resume=not restart, restart=restart) as work:
            result = run(recipe, observe, work=work, shared=shared, name=place.name)
            if keep:
                result.save_pretrained(place.model, overwrite=True)
        if not keep:
            place.model.rmdir()
        return result

    try:
        return prune(restart=False)
    except CannotResume:  # begun on another machine, or with other versions
        return prune(restart=True)


def _open(loaded: Path, sweep: Sweep) -> None:
    """Make the folder the sweep's, or find that it is a sweep's already."""
    # What a process that opens it at the same moment, or that was killed doing so, has half written of SWEEP is not foreign.
    foreign = loaded.exists() and (not loaded.is_dir() or any(not x.name.startswith(f"{SWEEP}.") for x in loaded.iterdir()))
    if foreign and not is_sweep(loaded):
        raise OutputExists(f"{loaded} exists and is not a sweep's folder. Choose another name.")
    if sweep.smoke != (saved_sweep(loaded).smoke if is_sweep(loaded) else sweep.smoke):
        raise InvalidSetting(f"{loaded} holds the {'full' if sweep.smoke else 'small'} form of a sweep. Choose another folder.")
    loaded.mkdir(parents=True, exist_ok=True)
    durable(loaded / SWEEP, (strict_json({"format": 1} | sweep.model_dump(mode="json")) + "\n").encode())
