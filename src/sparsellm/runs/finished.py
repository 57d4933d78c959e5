"""Finished outputs: their report, and whether their files are unchanged."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from sparsellm.checkpoints.tensor_index import file_digest, report_digest
from sparsellm.data.json_files import is_path
from sparsellm.errors import BadCheckpoint, InvalidSetting
from sparsellm.runs.inspection import REPORT, WORK
from sparsellm.runs.records import saved_report
from sparsellm.solvers.patterns import Pattern, parse_pattern

CARD = "README.md"
"""The model card, which users may edit."""

Layers = Mapping[str, tuple[int, Pattern]]
"""Number of zeros and pattern of each pruned layer, by its full name."""


def finished_report(output: str | Path) -> tuple[Path, Mapping[str, Any]]:
    """Path and report of a finished output.

    Raises:
        InvalidSetting: The folder is not an output, or is unfinished.
        BadCheckpoint: The report is damaged, or files are missing.
    """
    path = Path(output).expanduser()
    if (path / WORK).exists():
        raise InvalidSetting(f"{output} is unfinished. Finish it first: run the same `sparsellm prune` with --resume.")
    report = read_report(path)
    missing = sorted(name for name in report["files"] if not (path / name).is_file())
    if missing:
        raise BadCheckpoint(f"{output} lacks {len(missing)} of the files that the run wrote, {missing[0]} first.")
    return path, report


def read_report(folder: Path) -> Mapping[str, Any]:
    """Read the report in a folder. Raises InvalidSetting if there is none, BadCheckpoint if it is damaged."""
    file = folder / REPORT
    if not file.is_file():
        reason = f"was not written by sparsellm: it has no {REPORT}" if folder.is_dir() else "is not a folder"
        raise InvalidSetting(f"{folder} {reason}. Name a folder that `sparsellm prune` wrote.")
    report = saved_report(file)
    if not report.get("digests") or "files" not in report:
        raise BadCheckpoint(f"{file} holds no digests, so {folder} cannot be verified. Prune the model again.")
    foreign = [name for name in report["files"] if not _is_within(folder, name)]
    if foreign:
        raise BadCheckpoint(f"{file} lists {foreign[0]}, which is not in the folder or is a link out of it.")
    return report


def _is_within(folder: Path, name: str) -> bool:
    """Whether a file is in a folder, or is a link into the `blobs` of the hub's cache."""
    if not is_path(name):
        return False
    file, root = (folder / name).resolve(), folder.resolve()
    return file.is_relative_to(root) or file.is_relative_to(root.parent.parent / "blobs")


def changed_files(folder: Path, report: Mapping[str, Any]) -> list[str]:
    """Files of a finished output, including its report, that exist and differ from what the run wrote."""
    recorded = report["digests"]["files"]
    present = [name for name in report["files"] if name != REPORT and (folder / name).is_file()]
    changed = [name for name in present if file_digest(folder / name) != recorded.get(name)]
    return changed + [REPORT] * (report_digest(report) != report["digests"]["report"])


def foreign_file(folder: Path, kept: Collection[str]) -> str:
    """Name the first of the `kept` files that is not exactly as a run wrote it, with the reason; empty if all are."""
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
    """Pruned layers with their zeros and patterns, as recorded in a report."""
    return {x["name"]: (x["zeros"], parse_pattern(x["pattern"])) for block in report["blocks"] for x in block["layers"]}


def moved_tensors(report: Mapping[str, Any]) -> set[str]:
    """Tensors besides the pruned layers that the run changed, as recorded in a report."""
    return {name for block in report["blocks"] for name in block.get("changed_parameters", ())}
