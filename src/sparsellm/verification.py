"""A written checkpoint held against what its report says, and against the dense model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparsellm.architecture_file import read_architecture
from sparsellm.blocks import Block, blocks_of
from sparsellm.checkpoint import open_checkpoint
from sparsellm.errors import BadCheckpoint, InvalidSetting, VerificationFailed
from sparsellm.inspection import REPORT, WORK, Tensors, compare, follows
from sparsellm.linalg import zeros_in
from sparsellm.methods import LayerResult
from sparsellm.patterns import Pattern, parse_pattern
from sparsellm.report import Report

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def verify(folder: Path, report: Report, dense: Path | None, model: PreTrainedModel) -> None:
    """Read a written checkpoint back; raise VerificationFailed unless it holds what the report says.

    Every pruned layer has the zeros reported and its pattern; every tensor that the report does not call
    moved is bit-identical to the one in `dense`, after conversion where the model was loaded in another dtype than its file's.
    Of a parameter that holds several layers, so are those that were not pruned. model: of that form, for its names.
    """
    here = Tensors(folder, model)
    there = None if dense is None else Tensors(dense, model)
    results = {layer.name: layer for layer in report.layers}
    pruned = {name for block in report.blocks for name in block.moved}
    for block in blocks_of(model):
        for parameter, names in _by_parameter(block).items():
            mine = [name for name in names if block.full_name(name) in results]
            if not mine:
                continue
            pruned.add(parameter)
            whole = here[parameter]
            other = None if there is None or len(mine) == len(names) else there[parameter].to(whole.dtype)
            for name in names:
                weight = block.part(name, whole)
                if name in mine:
                    _check_zeros(weight, results[block.full_name(name)])
                elif other is not None and not torch.equal(weight, block.part(name, other)):
                    raise VerificationFailed(f"{block.full_name(name)} was not pruned and differs from the dense model's.")
    if there is None:
        return
    found = compare(here, there, as_stored=False)
    changed = [key for key in (*found["changed"], *found["only_here"]) if key not in pruned]
    if changed:
        raise VerificationFailed(
            f"{len(changed)} tensors that were not pruned differ from the dense model's, {changed[0]} first."
        )


def finished_report(output: str | Path) -> tuple[Path, Mapping[str, Any]]:
    """The folder of a finished output, all of whose files are there, and its report.

    Raises InvalidSetting for a folder that is none, BadCheckpoint for a damaged one.
    """
    path = Path(output).expanduser()
    if (path / WORK).exists():
        raise InvalidSetting(f"{output} is unfinished. Go on with it first: the same `sparsellm prune` with --resume.")
    if not (path / REPORT).is_file():
        what = "was not written by sparsellm" if path.is_dir() else "is no folder"
        raise InvalidSetting(f"{output} {what}: there is no {REPORT} in it. Name a folder that `sparsellm prune` wrote.")
    try:
        report: dict[str, Any] = json.loads((path / REPORT).read_text(encoding="utf-8"))
        foreign = [name for name in report["files"] if Path(name).is_absolute() or ".." in Path(name).parts]
        missing = sorted(name for name in report["files"] if not (path / name).is_file())
        _told_zeros(report)
    except (ValueError, KeyError, TypeError):
        raise BadCheckpoint(f"{path / REPORT} is damaged: it is not the report of a run.") from None
    if foreign:
        raise BadCheckpoint(f"{path / REPORT} is damaged: it lists {foreign[0]}, which is not in the folder.")
    if missing:
        raise BadCheckpoint(f"{output} lacks {len(missing)} of the files that it was written with, {missing[0]} first.")
    return path, report


def _told_zeros(report: Mapping[str, Any]) -> dict[str, tuple[int, Pattern]]:
    """By layer, its zeros and its pattern as a report has them."""
    return {x["name"]: (x["zeros"], parse_pattern(x["pattern"])) for block in report["blocks"] for x in block["layers"]}


def check_again(output: str | Path, trusted: bool = False, architecture: str | Path | None = None) -> None:
    """Raise VerificationFailed unless every pruned layer of a finished output has the zeros and the pattern of its report.

    trusted: run code that it brings. architecture: a file that describes its form. Raises what `finished_report` does.
    """
    path, report = finished_report(output)
    told = _told_zeros(report)
    described = None if architecture is None else read_architecture(architecture)
    model = open_checkpoint(str(path), None, trusted, described).skeleton()
    here = Tensors(path, model)
    for block in blocks_of(model):
        for parameter, names in _by_parameter(block).items():
            mine = [name for name in names if block.full_name(name) in told]
            whole = here[parameter] if mine and parameter in here.files else None
            for name in mine:
                zeros, pattern = told.pop(block.full_name(name))
                found = None if whole is None else block.part(name, whole)
                if found is None or zeros_in(found) != zeros or not follows(found, pattern):
                    was = "is not there" if found is None else f"has {zeros_in(found)} zeros"
                    raise VerificationFailed(
                        f"{block.full_name(name)} {was} where the report says {zeros} ({pattern}): {output} was changed since."
                    )
    if told:
        raise VerificationFailed(f"{output} has no {next(iter(told))}, which its report says was pruned: it was changed since.")


def _by_parameter(block: Block) -> dict[str, list[str]]:
    """The names of a block's layers, by the full name of the parameter that holds them."""
    found: dict[str, list[str]] = {}
    for name in block.layers:
        found.setdefault(block.full_name(block.parameter(name)), []).append(name)
    return found


def _check_zeros(weight: Tensor, layer: LayerResult) -> None:
    """Raise VerificationFailed unless a written layer has its zeros."""
    zeros = zeros_in(weight)
    if zeros != layer.zeros or not follows(weight, parse_pattern(layer.pattern)):
        raise VerificationFailed(
            f"{layer.name} was written with {zeros} zeros, {layer.zeros} were meant ({layer.pattern}). "
            "The disk or the file system is at fault."
        )
