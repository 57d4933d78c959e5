"""Folders that runs wrote: their reports, whether they are finished, and which of their files were changed since."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparsellm.checkpoints.files import REPORT
from sparsellm.checkpoints.tensor_index import file_digest, report_digest
from sparsellm.errors import BadCheckpoint, InvalidSetting
from sparsellm.methods import Totals
from sparsellm.outputs.folder import check_finished, check_report, folder_path
from sparsellm.outputs.report import Digests, Report, read_report
from sparsellm.texts.json_files import is_path


@dataclass(frozen=True)
class Output:
    """A folder that a run wrote.

    Attributes:
        digests: The digests in the report.
        content: The report as plain data, unchanged, as its own digest requires.
    """

    folder: Path
    report: Report
    digests: Digests
    content: Mapping[str, Any]

    def repeats(self, other: Output) -> bool:
        """Whether `pack` or `export` made this output from another one: its report has all of the other's but digests."""
        own = ("files", "digests", "packing")
        return all(self.content.get(name) == value for name, value in other.content.items() if name not in own)

    def changed_files(self) -> list[str]:
        """Return the files, including the report, that exist and differ from what the run wrote."""
        present = [name for name in self.report.files if name != REPORT and (self.folder / name).is_file()]
        changed = [name for name in present if file_digest(self.folder / name) != self.digests.files.get(name)]
        return changed + [REPORT] * (report_digest(self.content) != self.digests.report)


def read_output(folder: Path) -> Output:
    """Read the report in a folder. Raises InvalidSetting if there is none, BadCheckpoint if it is damaged."""
    file = folder / REPORT
    check_report(folder)
    report, content = read_report(file)
    if report.digests is None or "files" not in content:
        raise BadCheckpoint(f"{file} holds no digests, so {folder} cannot be verified. Prune the model again.")
    if foreign := [name for name in report.files if not _is_within(folder, name)]:
        raise BadCheckpoint(f"{file} lists {foreign[0]}, which is not in the folder or is a link out of it.")
    return Output(folder, report, report.digests, content)


def read_finished(output: str | Path) -> Output:
    """Read the report of a finished output.

    Raises:
        InvalidSetting: The folder is not an output, or is unfinished.
        BadCheckpoint: The report is damaged, or files are missing.
    """
    folder_path(output)  # refuses anything but a path
    folder = check_finished(output)
    finished = read_output(folder)
    if missing := sorted(name for name in finished.report.files if not (folder / name).is_file()):
        raise BadCheckpoint(f"{output} lacks {len(missing)} of the files that the run wrote, {missing[0]} first.")
    return finished


def changed_before(folder: Path | None) -> set[str]:
    """The parameters besides pruned layers that the runs changed which wrote a model, as its report says; usually none.

    A model that is made from such an output differs in them from the dense model too.
    """
    if folder is None or not (folder / REPORT).is_file():
        return set()
    return read_output(folder).report.changed_parameters


def dtype_changed_before(folder: Path | None) -> bool:
    """Whether a model was written by a run that changed the dtype of its tensors, as its report says."""
    return folder is not None and (folder / REPORT).is_file() and read_output(folder).report.dtype_changed


def totals_before(folder: Path | None) -> Totals | None:
    """The totals of the run that wrote a model, as its report says; None for other models."""
    return None if folder is None or not (folder / REPORT).is_file() else read_output(folder).report.totals


def foreign_file(folder: Path, kept: Collection[str]) -> str:
    """Name the first of the `kept` files that is not exactly as a run wrote it, with the reason; empty if all are."""
    if not kept:
        return ""
    try:
        output = read_output(folder)
    except InvalidSetting:
        return f"{min(kept)}, which sparsellm did not write"
    except BadCheckpoint:
        return f"{REPORT}, which is damaged"
    if foreign := sorted(set(kept) - set(output.report.files)):
        return f"{foreign[0]}, which sparsellm did not write"
    changed = output.changed_files()
    return f"{changed[0]}, which was changed since" if changed else ""


def _is_within(folder: Path, name: str) -> bool:
    """Whether a file is in a folder, or is a link into the `blobs` of the hub's cache."""
    if not is_path(name):
        return False
    file, root = (Path(os.path.realpath(path)) for path in (folder / name, folder))  # a link to itself is no error
    return file.is_relative_to(root) or file.is_relative_to(root.parent.parent / "blobs")
