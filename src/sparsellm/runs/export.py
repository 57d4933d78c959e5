"""A finished checkpoint: written aside, read back and verified, then put in its place at once."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from sparsellm.checkpoints.block_loader import DiskWeights
from sparsellm.checkpoints.configuration import silence_transformers
from sparsellm.data.json_files import is_text
from sparsellm.errors import InvalidSetting, OutputExists
from sparsellm.models.blocks import blocks_of
from sparsellm.runs.finished import CARD, foreign_file
from sparsellm.runs.inspection import REPORT, WORK
from sparsellm.runs.output_lock import aside, replacing
from sparsellm.runs.publication import Paths, clean_settings
from sparsellm.runs.report import Report, strict_json
from sparsellm.runs.verification import check_written, proven

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SHARD_SIZE = "5GB"
"""The largest weight file; what the hub advises."""


def check_output(output: str | Path, overwrite: bool = False, dense: str | Path | None = None) -> Path:
    """The folder to write, found free and writable.

    overwrite: allow a folder that a run wrote, or an empty one; any other that exists raises OutputExists. dense: the model's
    own folder, which is never written over.
    """
    path = Path(output).expanduser().absolute()
    if path.is_symlink() or path.is_mount():
        raise InvalidSetting(f"{output} is a link or a mount point. Name a plain folder that does not exist yet.")
    path = path.resolve()
    if dense is not None and (path == (source := Path(dense).expanduser().resolve()) or path in source.parents):
        raise OutputExists(f"{output} is the model itself or holds it, and it is not written over. Choose another output.")
    if path.exists():
        kept = _files(path) if path.is_dir() else {path.name}
        if (not overwrite and any(not name.startswith(f"{WORK}/") for name in kept)) or (not overwrite and not kept):
            raise OutputExists(f"{output} exists. Choose another name, or pass --overwrite to replace it.")
        if fault := foreign_file(path, {name for name in kept if not name.startswith(f"{WORK}/")}):
            raise OutputExists(f"{output} holds {fault}. Move it away yourself, or choose another output.")
    parent = next(folder for folder in path.parents if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise InvalidSetting(f"{output} cannot be written: {parent} is not a folder that you may write to.")
    for name in (*path.relative_to(parent).parts, aside(path).name):
        _check_name(output, parent / name)
    return path


def _check_name(output: str | Path, path: Path) -> None:
    """Raise InvalidSetting for a name that the file system does not take, or that a report cannot hold."""
    if not is_text(path.name):
        raise InvalidSetting(f"{str(output)!r} is not UTF-8 text. Choose another output.")
    try:
        path.lstat()
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            why = f"the name {path.name[:40]}… has {len(os.fsencode(path.name))} bytes, more than the file system takes"
            raise InvalidSetting(f"{output} cannot be written: {why}. Choose a name shorter by 20.") from None
        raise


def is_finished(output: str | Path) -> bool:
    """Whether a run wrote this folder and came to its end."""
    path = Path(output).expanduser()
    return (path / REPORT).is_file() and not (path / WORK).exists()


def _files(folder: Path) -> set[str]:
    """All that is in a folder but folders, by its path within."""
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if not file.is_dir()}


def save(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    report: Report,
    output: str | Path,
    dense: Path | None = None,
    overwrite: bool = False,
    weights: DiskWeights | None = None,
    along: Sequence[Path] = (),
    texts: Mapping[str, str] | None = None,
) -> Path:
    """Write model, tokenizer, model card and report to a folder, verified; the folder.

    dense: the folder that the model came from; every tensor that was not pruned must equal its tensor there, bit by bit.
    weights: where the model's tensors are, if not in memory; they are copied one file after the other. along: files that
    come along. texts: by name, further files, of lines of JSON. The last component stands for every path of this machine.
    Until all is verified the files stand in the output's work folder, and a failure removes them. Raises CannotResume where
    another process works on the output.
    """
    path = check_output(output, overwrite, dense)
    with _errors_of_system(path), replacing(path) as work:
        with silence_transformers():
            if weights is None:
                model.save_pretrained(work, max_shard_size=SHARD_SIZE)
            else:
                _assemble(model, weights, work)
            if tokenizer is not None:
                tokenizer.save_pretrained(work)
        for file in along:
            shutil.copyfile(file, work / file.name)
        _document(work, report, texts or {})
        check_written(work, report, dense, model, in_memory=weights is None)
        message = proven(work, Paths(report.recipe).without(report).to_dict())
        (work / REPORT).write_text(strict_json(message) + "\n", encoding="utf-8")
        _share(work)
    return path


def _document(work: Path, report: Report, texts: Mapping[str, str]) -> None:
    """Write the card and further texts, and take the paths of this machine out of all that will be published."""
    paths = Paths(report.recipe)
    for name, content in {CARD: paths.without(report).to_markdown(), **texts}.items():
        (work / name).write_text(content if name == CARD else paths.without_in_lines(content), encoding="utf-8")
    clean_settings(work)


@contextmanager
def _errors_of_system(path: Path) -> Iterator[None]:
    """Raise the system's own error, where there is one behind safetensors' (a full disk, for one)."""
    try:
        yield
    except SafetensorError as error:
        code = re.search(r"\(os error (\d+)\)", str(error))
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) if code else error from error


def _assemble(model: PreTrainedModel, weights: DiskWeights, work: Path) -> None:
    """Write a model that is not in memory: a weight file for each block and for each tensor of its ends, and its settings.

    Names and forms are those of the dense model's files, as `save_pretrained` would have it: tensors that are stored as one are
    written together.
    """
    from transformers.core_model_loading import revert_weight_conversion

    blocks = [[name for name in weights.names if name.startswith(f"{block.name}.")] for block in blocks_of(model)]
    pieces = [*blocks, *weights.non_block_names()]
    placed: dict[str, str] = {}
    total = 0
    for number, names in enumerate(pieces, 1):
        file = f"model-{number:05}-of-{len(pieces):05}.safetensors"
        read = {name: weights.read(name).contiguous() for name in names}
        tensors = revert_weight_conversion(model, read)
        total += sum(tensor.nbytes for tensor in tensors.values())
        placed |= dict.fromkeys(tensors, file)
        written = weights.file_of(names) if tensors.keys() == read.keys() else None
        if written is None or written.parent.name != WORK or not _linked(written, work / file):
            if tensors.keys() != read.keys():  # pieces of what was read, which may share its memory
                tensors = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in tensors.items()}
            save_file(tensors, work / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(placed.items()))}
    (work / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    model.config.save_pretrained(work)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(work)


def _linked(file: Path, other: Path) -> bool:
    """Give a file a second name, so that it takes no second place on the disk; False where that cannot be done."""
    try:
        os.link(file, other)
    except OSError:
        return False
    return True


def _share(work: Path) -> None:
    """Give a temporary folder and its files, which are private, the permissions that any new file would have."""
    mask = os.umask(0)
    os.umask(mask)
    for file in [work, *work.rglob("*")]:
        file.chmod((0o777 if file.is_dir() else 0o666) & ~mask)
