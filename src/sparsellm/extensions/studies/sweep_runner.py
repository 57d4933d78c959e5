"""Runs the cells of a sweep, by any number of processes that share its folder. Finished cells are durable."""

from __future__ import annotations

import errno
import gc
import hashlib
import itertools
import json
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from filelock import FileLock, Timeout
from pydantic import TypeAdapter

from sparsellm.errors import CannotResume, InvalidSetting, OutputExists, plural
from sparsellm.extensions.studies.sweep_file import Cell, Sweep
from sparsellm.observers.events import NextRun, Note, Observer
from sparsellm.observers.wording import worded
from sparsellm.outputs.fingerprint import OF_THE_MACHINE, Inputs, OtherContents, SameInputs, changed_input
from sparsellm.outputs.folder import SWEEP, is_sweep, refuse_links
from sparsellm.outputs.report import Report
from sparsellm.outputs.saving import Result, check_output
from sparsellm.pipeline.several import RunSet
from sparsellm.recipes.fields import SAVED
from sparsellm.texts.json_files import FORMAT, durable, read_record, strict_json

CELLS = "cells"
"""Subfolder of a sweep with a folder for each cell."""


@dataclass(frozen=True)
class FinishedCell:
    """The file of a finished cell."""

    labels: dict[str, str]
    report: Report


@dataclass(frozen=True)
class FailedCell:
    """The file of a failed cell: the error in one line, its class, and where it was raised."""

    labels: dict[str, str]
    error: str
    kind: str
    traceback: str


READ_FINISHED, READ_FAILED = TypeAdapter(FinishedCell).validate_python, TypeAdapter(FailedCell).validate_python

CellState = Literal["finished", "failed", "at work", "open"]


@dataclass(frozen=True)
class Outcome:
    """The state of a cell.

    Attributes:
        state: "at work" while another process runs it, "open" if no process has finished it.
        report: Report of its run, if it is finished.
    """

    cell: Cell
    state: CellState
    report: Report | None = None
    error: str = ""


class CellFolder:
    """The folder of one cell.

    Attributes:
        name: Name of the run, with the name of the sweep.
        result: File that exists once the cell is finished.
        failure: File that exists if the last run of the cell failed.
        model: Output folder of the run, which keeps the pruned model if the sweep does.
    """

    def __init__(self, folder: Path, cell: Cell) -> None:
        # Without defaults, so that fields added by later versions do not change the digest.
        fields = cell.recipe.model_dump(mode="json", exclude=set(OF_THE_MACHINE), exclude_defaults=True)
        digest = hashlib.blake2b(json.dumps(fields, sort_keys=True).encode(), digest_size=4).hexdigest()
        self.cell = cell
        self.name = f"{folder.name}, {cell.name}"
        self.folder = folder / CELLS / f"{re.sub(r'[^A-Za-z0-9.]+', '-', cell.name).strip('-')[:80]}-{digest}"
        self.result, self.failure, self.model = (self.folder / name for name in ("result.json", "failed.json", "model"))

    @contextmanager
    def taken(self) -> Iterator[bool]:
        """Lock the cell within the context; False if another process holds the lock. The lock ends with the process."""
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.folder / "lock", timeout=0)
        try:
            lock.acquire()
        except Timeout:
            yield False
            return
        try:
            for partial in self.folder.glob("*.partial"):
                partial.unlink(missing_ok=True)  # left by a process that was killed
            yield True
        finally:
            lock.release()

    def outcome(self) -> Outcome:
        """The current state of the cell."""
        if self.result.exists():
            return Outcome(self.cell, "finished", read_record(self.result, READ_FINISHED, "finished cell of a sweep")[0].report)
        if self.failure.exists():
            return Outcome(self.cell, "failed", error=read_record(self.failure, READ_FAILED, "failed cell of a sweep")[0].error)
        if not self.folder.exists():
            return Outcome(self.cell, "open")
        with self.taken() as acquired:
            return Outcome(self.cell, "open" if acquired else "at work")

    def finish(self, result: Result) -> None:
        """Write the result of the cell, which marks it as finished."""
        record = {"labels": dict(self.cell.labels), "report": result.report.to_dict()}
        durable(self.result, (strict_json(record) + "\n").encode())
        self.failure.unlink(missing_ok=True)

    def fail(self, error: Exception) -> str:
        """Write the error of the cell, which marks it as failed; returns the message in one line."""
        text = worded(" ".join([str(error) or type(error).__name__, *getattr(error, "__notes__", ())]))
        trace = "".join(traceback.format_exception(error))
        record = FailedCell(dict(self.cell.labels), text, type(error).__name__, trace)
        durable(self.failure, (strict_json(asdict(record)) + "\n").encode())
        return text


class FinishedInputs(SameInputs):
    """The files that the finished cells of a sweep have read. Results of other contents make no table with them.

    Attributes:
        unknown: Number of finished cells that do not say what they read, since an earlier version ran them.
    """

    def __init__(self, sweep: Sweep, folder: Path) -> None:
        super().__init__()
        self.unknown = 0
        self._open = [CellFolder(folder, cell) for cell in sweep.cells]
        self._cells: dict[str, tuple[CellFolder, Mapping[str, str]]] = {}

    def check(self, inputs: Inputs) -> None:
        """Raise OtherContents if two finished cells, or one and a run with these inputs, have read other files of one name."""
        for folder in [folder for folder in self._open if folder.result.exists()]:
            self._open.remove(folder)
            report = folder.outcome().report
            self.unknown += not (report and report.inputs)
            self._compare(report.inputs if report else {}, folder)
        self._compare(inputs)

    def _compare(self, inputs: Inputs, folder: CellFolder | None = None) -> None:
        for name, files in inputs.items():
            first, recorded = self._cells.get(name, (folder, files))
            if first and (difference := changed_input({name: recorded}, {name: files})):
                raise OtherContents(
                    f"{difference}. The finished cell {first.cell.name!r} has read the earlier one, and new results "
                    "cannot be compared with its own. Put the files back, name another folder, or remove "
                    f"{first.folder} to run that cell again."
                )
            if folder:
                self._cells.setdefault(name, (folder, files))


def run_sweep(
    sweep: Sweep,
    folder: str | Path,
    observe: Observer,
    *,
    retry: bool = False,
    device: str | None = None,
    only: Sequence[str] = (),
    after: Callable[[list[Outcome]], object] = lambda _: None,
) -> list[Outcome]:
    """Run every cell that is neither finished nor locked by another process.

    Processes on other devices or machines may run cells of the same folder at the same time. A cell that fails is skipped. A
    process that is killed loses its work since the last finished block of its cell.

    Args:
        retry: Whether to run cells again that failed.
        device: Overrides the device of the recipes.
        only: Cells to run, see `Sweep.at`.
        after: Called with the outcomes of all cells after each run.

    Raises:
        OutputExists: If the folder exists and is not the folder of a sweep.
        OtherContents: If a model or a text was changed since a cell that read it was finished.
        OSError: If the disk is full.
    """
    path, selected, place = Path(folder), sweep.at(only), {"device": device} if device else {}
    _open(path, sweep)
    recipes = (cell.recipe.model_copy(update=place) for cell in selected)
    cell_folders = [
        CellFolder(path, Cell(labels=cell.labels, recipe=recipe)) for cell, recipe in zip(selected, recipes, strict=True)
    ]
    inputs = FinishedInputs(sweep, path)
    inputs.check({})
    runs = RunSet(observe, path / "dense", inputs)
    done = [folder.result.exists() or (folder.failure.exists() and not retry) for folder in cell_folders]
    if inputs.unknown and not all(done):
        observe(Note(f"{plural(inputs.unknown, 'finished cell')} of an earlier version may have read other files"))
    passes = itertools.product((False, True), enumerate(cell_folders, 1))
    for second_pass, (number, cell_folder) in passes:  # two passes: a process that reads the state of a cell locks it briefly
        if cell_folder.result.exists() or (cell_folder.failure.exists() and (second_pass or not retry)):
            continue
        with cell_folder.taken() as acquired:
            if not acquired or cell_folder.result.exists():
                continue
            observe(NextRun(number, len(cell_folders), cell_folder.cell.name))
            try:
                cell_folder.finish(_run_sweep_cell(cell_folder, runs, keep=sweep.keep))
            except Exception as error:
                if isinstance(error, OtherContents) or (isinstance(error, OSError) and error.errno == errno.ENOSPC):
                    raise
                observe(Note(f"the cell {cell_folder.cell.name} failed and is skipped: {cell_folder.fail(error)}"))
        gc.collect()  # frees the model of the cell
        after(read_outcomes(sweep, path))
    return read_outcomes(sweep, path)


def read_outcomes(sweep: Sweep, folder: str | Path, only: Sequence[str] = ()) -> list[Outcome]:
    """The current state of each cell, or of those that `only` selects, see `Sweep.at`."""
    return [CellFolder(Path(folder), cell).outcome() for cell in sweep.at(only)]


def saved_sweep(folder: str | Path) -> Sweep:
    """The sweep that was last run in a folder."""
    return read_record(Path(folder) / SWEEP, partial(Sweep.model_validate, context=SAVED), "sweep")[0]


def _run_sweep_cell(cell_folder: CellFolder, runs: RunSet, *, keep: bool) -> Result:
    """Run a cell of a sweep, and save its model if the sweep keeps models. What it read is checked at its start and its end."""
    if keep:
        check_output(cell_folder.model, dense=cell_folder.cell.recipe.model, overwrite=True)

    def save(result: Result) -> None:
        runs.inputs.check(result.report.inputs)
        if keep:
            runs.save(result, cell_folder.model, overwrite=True)

    return run_cell(cell_folder, runs, finish=save)


def run_cell(cell_folder: CellFolder, runs: RunSet, *, finish: Callable[[Result], object] = lambda _: None) -> Result:
    """Run a cell, resuming the work of an earlier process if there is any.

    Args:
        cell_folder: The cell, locked by this process.
        runs: The runs that the cell belongs to.
        finish: Called with the result while the files of the run exist.
    """
    run = partial(runs.run_in, cell_folder.model, cell_folder.cell.recipe, name=cell_folder.name, finish=finish)
    try:
        result = run(resume=True)
    except OtherContents:
        raise
    except CannotResume:  # the earlier work is of another machine or of other versions
        result = run(restart=True)
    with suppress(OSError):
        cell_folder.model.rmdir()  # fails if the model was saved there
    return result


def _open(folder: Path, sweep: Sweep) -> None:
    """Create the folder of a sweep, or check that it is one, and write the sweep to it."""
    # Partial copies of SWEEP are left by a process that is creating the folder or was killed while it did.
    foreign = folder.exists() and (not folder.is_dir() or any(not x.name.startswith(f"{SWEEP}.") for x in folder.iterdir()))
    if foreign and not is_sweep(folder):
        raise OutputExists(f"{folder} exists and is not a sweep's folder. Choose another name.")
    refuse_links(folder, folder / CELLS)
    if sweep.smoke != (saved_sweep(folder).smoke if is_sweep(folder) else sweep.smoke):
        raise InvalidSetting(f"{folder} holds the {'full' if sweep.smoke else 'small'} form of a sweep. Choose another folder.")
    folder.mkdir(parents=True, exist_ok=True)
    durable(folder / SWEEP, (strict_json({"format": FORMAT} | sweep.model_dump(mode="json")) + "\n").encode())
