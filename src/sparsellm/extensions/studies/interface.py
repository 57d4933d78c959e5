"""`sweep`, `search`, `report` and `bench` in Python, and the pages that they write beside outputs."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal, TypeVar, Unpack, overload

import torch

from sparsellm.checkpoints.files import REPORT, WORK, checkpoint_name
from sparsellm.errors import InvalidSetting, OutputExists, plural
from sparsellm.evaluation.results import Summarized
from sparsellm.extensions.packed.card import record_speed, recordable
from sparsellm.extensions.packed.record import Bench
from sparsellm.extensions.packed.speed import measure_bench
from sparsellm.extensions.studies.compare import Comparison, read_comparison
from sparsellm.extensions.studies.figures import style
from sparsellm.extensions.studies.page import comparison_page, figure_files, page_name, report_page, speed_page
from sparsellm.extensions.studies.run_again import bench_command
from sparsellm.extensions.studies.search import Search, run_search
from sparsellm.extensions.studies.searched import searched_setting
from sparsellm.extensions.studies.sweep_file import read_sweep
from sparsellm.extensions.studies.sweep_runner import Outcome, run_sweep
from sparsellm.extensions.studies.tables import write_tables
from sparsellm.extensions.studies.target import Target
from sparsellm.extensions.studies.views import framed
from sparsellm.observers.display import Display
from sparsellm.observers.events import Observer, combine_observers
from sparsellm.outputs.folder import check_place, check_results
from sparsellm.outputs.saving import Result
from sparsellm.outputs.verification import Output
from sparsellm.recipes.fields import MethodName
from sparsellm.recipes.file import read_search
from sparsellm.recipes.keyword_types import PruneKeywords
from sparsellm.recipes.keywords import recipe_keywords
from sparsellm.recipes.plugins import load_plugins
from sparsellm.texts.json_files import durable
from sparsellm.texts.paths import local_path


class WrittenPage(type(Path())):  # type: ignore[misc]
    """The path of a page that was written, which notebooks show."""

    def _repr_html_(self) -> str:
        return framed(self.read_text(encoding="utf-8"))


class Outcomes(Summarized, list[Outcome]):
    """The outcomes of all cells of a sweep.

    Attributes:
        title: Title of the sweep.
        folder: Its folder, with the tables.
    """

    def __init__(self, outcomes: Sequence[Outcome], title: str, folder: Path) -> None:
        super().__init__(outcomes)
        self.title, self.folder = title, folder

    def summary(self) -> dict[str, str]:
        """The sweep, the states of its cells, and the first error, each in one line."""
        failed = next((outcome for outcome in self if outcome.error), None)
        return {
            "sweep": f"{self.title}, {plural(len(self), 'cell')} in {self.folder}",
            "cells": ", ".join(f"{count} {state}" for state, count in Counter(outcome.state for outcome in self).items()),
            "errors": f"{failed.cell.name}: {failed.error}" if failed else "none",
        }


def sweep(
    file: str | Path | Mapping[str, Any],
    output: str | Path | None = None,
    *,
    smoke: bool = False,
    only: Mapping[str, str | Sequence[str]] | None = None,
    changes: Mapping[str, Any] | None = None,
    retry: bool = False,
    device: str | None = None,
    plugin: str | Sequence[str] = (),
    progress: bool = False,
    observe: Observer | None = None,
) -> Outcomes:
    """Prune with every combination of settings in a file, and write tables that compare the results.

    Each combination is a cell. A cell that fails is skipped. Called again, an interrupted sweep continues.

    Args:
        file: YAML file with `recipe:` and `axes:`, or its content as a mapping; docs/sweeps.md describes it.
        output: Folder of the sweep. Default: the file's name without .yaml, in the current folder.
        smoke: Run the small version that the file describes under `smoke:`.
        only: Labels by axis, as `{"method": ["alps", "wanda"]}`: only cells with them are run.
        changes: Values by recipe field, for all cells; or by "axis.label", for the field that the axis is named after.
        retry: Run failed cells again.
        device: Device that replaces the recipes'.
        plugin: Modules that bring methods, steps or patterns that the file names.
        progress: Whether to display progress and the time left on stderr, or as a bar in a notebook.
        observe: Callback that receives the events of all runs (see `sparsellm.observers.events`).

    Returns:
        The state of every cell: "finished" with a `report`, "failed" with an `error`, "at work" in another process, or "open".

    Raises:
        InvalidSetting: The file, a selection or a change is invalid.
        OutputExists: The folder exists and is not the folder of a sweep.
    """
    if not isinstance(file, (str, Path, Mapping)):
        raise InvalidSetting(f"A sweep is a YAML file or its content as a mapping, got {type(file).__name__}.")
    labels = {axis: [value] if isinstance(value, str) else value for axis, value in (only or {}).items()}
    plugins = load_plugins({"plugin": plugin}).get("plugin", ())
    texts = [f"{name}={json.dumps(value)}" for name, value in (changes or {}).items()]
    cells = read_sweep(file, smoke=smoke, changes=texts, plugins=plugins)
    if output is None and isinstance(file, Mapping):
        raise InvalidSetting("A sweep without a file needs a folder: pass `output`.")
    folder = local_path(output or Path(str(file)).stem)
    with Display("auto" if progress else "off") as display:
        outcomes = run_sweep(
            cells,
            folder,
            combine_observers(display, observe),
            retry=retry,
            device=device,
            only=[f"{axis}={label}" for axis, values in labels.items() for label in values],
        )
    write_tables(cells, outcomes, folder)
    return Outcomes(outcomes, cells.title, folder)


Run = TypeVar("Run", bound=str | Path | Result | Output | Outcomes)


@recipe_keywords(PruneKeywords)
def search(
    model: str | Path,
    output: str | Path,
    *,
    max_perplexity_increase: str | float | None = None,
    min_accuracy: Mapping[str, float] | str | None = None,
    max_size: str | int | None = None,
    over: Literal["sparsity", "bits"] = "sparsity",
    step: str | float | None = None,
    method: MethodName | str = "sparsellm",
    calibration: str | Path | None = None,
    overwrite: bool = False,
    progress: bool = False,
    observe: Observer | None = None,
    **settings: Unpack[PruneKeywords],
) -> Search:
    """Find the largest sparsity or the fewest bits that meet a target, and write the model pruned to them.

    The value is found by bisection with the effort "fast"; the output is pruned with the effort given. If the output then
    misses the target, the value before is pruned. Called again after an interruption, the search continues.

    Args:
        model: A folder, a hub name, "demo:opt" or "demo:llama".
        output: Folder to write.
        max_perplexity_increase: Largest relative increase of the perplexity on every text in `evaluate`, as "5%" or 0.05.
        min_accuracy: Smallest accuracy by zero-shot task, as {"boolq": 0.6}.
        max_size: Size of the weights, as "500MB", once `pack` has packed them, by an estimate. The smallest sparsity, or the
            most bits, that meet it are computed, not searched.
        over: The setting to search over: sparsity, or bits a weight as `bits` of `prune`.
        step: Distance between the values to choose from. Default: "1%" up to 95 %, or 0.1 bits from 8 down.
        method: As for `prune`; methods other than sparsellm have no efforts.
        calibration: A text file, or the name of a text (c4, wikitext2, ptb, demo).
        overwrite: Replace an existing folder that sparsellm wrote.
        progress: Whether to display progress and the time left on stderr, or as a bar in a notebook.
        observe: Callback that receives the events of all runs (see `sparsellm.observers.events`).
        **settings: Any other field of `Recipe`.

    Returns:
        The value, all points that were measured, and the report of the output.

    Raises:
        TargetNotReached: No value meets the target. Nothing is written.
        SparseLLMError: As `prune`.
    """
    target = Target.read(max_perplexity_increase, min_accuracy, max_size)
    text = None if calibration is None else str(calibration)
    fields = {"model": checkpoint_name(model), **settings, "method": method, "calibration": text}
    setting = searched_setting(over)
    recipe, distance = read_search(fields, None, setting.fields(setting.start)), setting.read_step(step)
    with Display("auto" if progress else "off") as display:
        observer = combine_observers(display, observe)
        return run_search(recipe, output, target, setting, step=distance, overwrite=overwrite, observe=observer)


@overload
def report(
    runs: str | Path | Result | Output | Outcomes,
    output: str | Path | None = None,
    *,
    figures: str | Path | None = None,
    overwrite: bool = False,
) -> Path: ...


@overload
def report(
    runs: list[Run] | tuple[Run, ...],
    output: str | Path | None = None,
    *,
    figures: str | Path | None = None,
    overwrite: bool = False,
) -> Comparison: ...


def report(
    runs: str | Path | Result | Output | Outcomes | list[Run] | tuple[Run, ...],
    output: str | Path | None = None,
    *,
    figures: str | Path | None = None,
    overwrite: bool = False,
) -> Path | Comparison:
    """Write the page of a run or a sweep, or compare several of one model.

    The page is one HTML file with text, tables and plots, readable without network. A comparison has perplexity, accuracy,
    zeros, size, and errors by layer.

    Args:
        runs: Folder of a pruned model or of a sweep, or what `prune`, `recover` or `sweep` returned; or a list of these.
        output: HTML file to write. Default for one folder: its name with .html, beside it; for the result of a run, the model's
            name with -pruned.html, in the current folder; for a list of folders none.
        figures: Folder to write each plot of one run or sweep to as well, as SVG and PNG.
        overwrite: Replace files that sparsellm did not write. Its own pages and plots are always replaced.

    Returns:
        The HTML file; of several runs the comparison, whose `tables()` has the tables by title, and `to_dict()` all values.
        Notebooks show either as the page.

    Raises:
        InvalidSetting: A folder is the output of neither a run nor a sweep, runs that are compared are of different models or
            fewer than two, or a file to write is a folder or inside an output.
        OutputExists: A file exists that sparsellm did not write.
        MissingPackage: matplotlib is not installed.
    """
    if output is not None:
        check_pages([local_path(output)], overwrite=overwrite, otherwise="; `runs` takes all folders to compare")
    if isinstance(runs, (list, tuple)) and not isinstance(runs, Outcomes):
        if figures:
            raise InvalidSetting("A comparison has no plots for `figures`. Leave it out, or report one run at a time.")
        comparison = read_comparison([_place(run) for run in runs])
        if output:
            write_pages({local_path(output): comparison_page(comparison).encode()}, overwrite=overwrite)
        return comparison
    run = _place(runs)
    if not isinstance(run, Result):
        check_results(run)
    # Beside the run's folder: inside it, `overwrite` would find a foreign file.
    file = local_path(output or f"{page_name(run)}.html")
    check_pages([file], overwrite=overwrite)
    page, plots = report_page(run)
    write_pages({file: page.encode()} | (figure_files(plots, figures) if figures else {}), overwrite=overwrite)
    return WrittenPage(file)


def _place(run: str | Path | Result | Output | Outcomes) -> str | Path | Result:
    """The folder of a run or a sweep, or the result of a run in memory."""
    return run.folder if isinstance(run, (Output, Outcomes)) else run


def bench(
    packed: str | Path,
    against: str | Path | None = None,
    *,
    batch: int | Sequence[int] = (1, 4),
    threads: int | Sequence[int] | None = None,
    tokens: int = 32,
    output: str | Path | None = None,
    record: bool = False,
    overwrite: bool = False,
    observe: Callable[[str], object] = lambda _: None,
) -> Bench:
    """Measure how fast a packed model decodes on the CPU: beside the dense model, and beside what memory allows.

    Each form of the model reads the same random prompts and decodes greedily, in turns. The dense model and the packed one are
    in memory together.

    Args:
        packed: Folder that `pack` wrote.
        against: Dense model of the same shapes. Default: the packed model, decoded, which is as fast.
        batch: Numbers of sequences to decode together.
        threads: Numbers of threads. Default: as many as torch uses.
        tokens: Tokens of each sequence to decode in a measurement.
        output: HTML file to write, with the tables and a chart.
        record: Write the speeds into the packed model's report, which `report` shows, and its model card, in place of
            earlier ones.
        overwrite: Replace a file that sparsellm did not write.
        observe: Called with what is measured next.

    Returns:
        Speeds, memory's among them, and sizes; `describe()` has the packed model's in sentences, `to_dict()` all values.

    Raises:
        InvalidSetting: A number is out of range, the dense model has other shapes, `output` is a folder or inside an output, or
            `record` is given and `pack` did not write the folder.
        OutputExists: `output` exists, and sparsellm did not write it.
        BadCheckpoint: The folder is not packed, or damaged.
        VerificationFailed: The report to write into was changed since it was written.
        TooLarge: Both models do not fit in memory.
        MissingPackage: A page is asked for, and matplotlib is not installed.
    """
    if output is not None:
        check_pages([local_path(output)], overwrite=overwrite)
    if record:
        recordable(packed)  # before the measurement
    batches, counts = ((x,) if isinstance(x, int) else x for x in (batch, threads or torch.get_num_threads()))
    with style() if output else nullcontext():  # before the measurement, so that a missing package is reported at once
        measured = measure_bench(packed, against, batches=batches, threads=counts, tokens=tokens, observe=observe)
    if output:
        command = bench_command(packed, against, batches=batches, threads=counts, tokens=tokens)
        write_pages({local_path(output): speed_page(measured, command).encode()}, overwrite=overwrite)
    if record:
        record_speed(packed, measured)
    return measured


OWN_MARKS = (
    b'<meta name="generator" content="sparsellm">',
    b"<dc:title>sparsellm</dc:title>",
    b"Software\0sparsellm",
)
"""The marks near the start of HTML, SVG and PNG files that this package wrote."""

HEAD_BYTES = 4096
"""Bytes at the start of a file in which a mark stands."""


def check_pages(files: Iterable[Path], *, overwrite: bool, otherwise: str = "") -> None:
    """Check that pages or plots can be written.

    Args:
        overwrite: Whether to replace files that sparsellm did not write.
        otherwise: What a folder in place of a file may be meant for, as the end of a sentence.

    Raises:
        InvalidSetting: A path is a folder, is inside the output of a run, or cannot be written.
        OutputExists: A file exists that sparsellm did not write.
    """
    for file in files:
        if file.is_dir():
            raise InvalidSetting(f"{file} is a folder. Name a file to write{otherwise}.")
        place = file.absolute()
        check_place(file, place)
        for folder in {*place.parents, *place.resolve().parents}:
            if (folder / REPORT).is_file() or (folder / WORK).exists():
                raise InvalidSetting(f"{file} is inside {folder.name}, the output of a run. Choose a place outside of it.")
        if not overwrite and (file.is_symlink() or file.exists()) and not _is_ours(file):
            raise OutputExists(
                f"{file} exists, and sparsellm did not write it. Choose another name, or pass `overwrite=True` to replace it."
            )


def write_pages(contents: Mapping[Path, bytes], *, overwrite: bool) -> None:
    """Write pages or plots once all of them are checked as `check_pages` does, in new folders if need be."""
    check_pages(contents, overwrite=overwrite)
    for file, content in contents.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        durable(file, content)


def _is_ours(file: Path) -> bool:
    """Whether a file is a page or plot that this package wrote."""
    if file.is_symlink() or not file.is_file():
        return False
    with file.open("rb") as stream:
        head = stream.read(HEAD_BYTES)
    return any(mark in head for mark in OWN_MARKS)
