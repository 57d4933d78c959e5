"""A finished output: its report, and whether its files are as a run wrote them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from sparsellm.checkpoints.digests import file_digest, report_digest
from sparsellm.data.json_files import is_path
from sparsellm.errors import BadCheckpoint, InvalidSetting
from sparsellm.runs.inspection import REPORT, WORK
from sparsellm.runs.records import saved_report
from sparsellm.solvers.patterns import Pattern, parse_pattern

CARD = "README.md"
"""The model card, which its owner may edit: a changed one is no fault of the model."""

Layers = Mapping[str, tuple[int, Pattern]]
"""Pruned layers by their full names: how many zeros each has, and its pattern."""


def finished_report(output: str | Path) -> tuple[Path, Mapping[str, Any]]:
    """The folder of a finished output, all of whose files are there, and its report.

    Raises InvalidSetting for a folder that is none, BadCheckpoint for a damaged one.
    """
    path = Path(output).expanduser()
    if (path / WORK).exists():
        raise InvalidSetting(f"{output} is unfinished. Go on with it first: the same `sparsellm prune` with --resume.")
    report = read_report(path)
    missing = sorted(name for name in report["files"] if not (path / name).is_file())
    if missing:
        raise BadCheckpoint(f"{output} lacks {len(missing)} of the files that it was written with, {missing[0]} first.")
    return path, report


def read_report(folder: Path) -> Mapping[str, Any]:
    """The report in a folder. Raises InvalidSetting where there is none, BadCheckpoint where it is damaged."""
    file = folder / REPORT
    if not file.is_file():
        what = "was not written by sparsellm" if folder.is_dir() else "is no folder"
        raise InvalidSetting(f"{folder} {what}: there is no {REPORT} in it. Name a folder that `sparsellm prune` wrote.")
    report = saved_report(file)
    if not report.get("digests") or "files" not in report:
        raise BadCheckpoint(f"{file} holds no digests, so that nothing proves {folder}. Prune the model again.")
    foreign = [name for name in report["files"] if not _is_within(folder, name)]
    if foreign:
        raise BadCheckpoint(f"{file} lists {foreign[0]}, which is not in the folder or is a link out of it.")
    return report


def _is_within(folder: Path, name: str) -> bool:
    """Whether a file is in a folder, or is what a link of the hub's cache leads to."""
    if not is_path(name):
        return False
    file, place = (folder / name).resolve(), folder.resolve()
    return file.is_relative_to(place) or file.is_relative_to(place.parent.parent / "blobs")


def changed_files(folder: Path, report: Mapping[str, Any]) -> list[str]:
    """The files of a finished output, its report among them, that are there and not as a run wrote them."""
    recorded = report["digests"]["files"]
    there = [name for name in report["files"] if name != REPORT and (folder / name).is_file()]
    changed = [name for name in there if file_digest(folder / name) != recorded.get(name)]
    return changed + [REPORT] * (report_digest(report) != report["digests"]["report"])


def foreign_file(folder: Path, kept: Collection[str]) -> str:
    """The first of a folder's files that is not as a run wrote it, and what is known of it; nothing where all are."""
    if not kept:
        return ""
    try:
        report = read_report(folder)
    except InvalidSetting:
        return f"{min(kept)}, which sparsellm did not write"
    except BadCheckpoint:
        return f"{REPORT}, which is damaged"
    if foreign := sorted(set(kept) - set(report["files"])):
        return f"{foreign[0]}, which sparsellm did not write"
    changed = changed_files(folder, report)
    return f"{changed[0]}, which was changed since" if changed else ""


def pruned_layers(report: Mapping[str, Any]) -> Layers:
    """By layer, its zeros and its pattern as a report has them."""
    return {x["name"]: (x["zeros"], parse_pattern(x["pattern"])) for block in report["blocks"] for x in block["layers"]}


def moved_tensors(report: Mapping[str, Any]) -> set[str]:
    """The tensors that a report says were changed besides the pruned layers."""
    return {name for block in report["blocks"] for name in block.get("changed_parameters", ())}
