"""The result of a run, and its export: write it to a temporary folder, verify it, and move it into place atomically."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from sparsellm.checkpoints.block_loader import DiskWeights
from sparsellm.checkpoints.configuration import silence_transformers
from sparsellm.checkpoints.documents import copy_documents, plain_config, read_config_text, with_dtype, write_config
from sparsellm.checkpoints.files import REPORT, WORK
from sparsellm.checkpoints.headers import file_metadata
from sparsellm.checkpoints.loading import Checkpoint
from sparsellm.checkpoints.side_files import write_side_files
from sparsellm.checkpoints.stamps import Stamps, unchanged
from sparsellm.checkpoints.stored_form import StoredForm, shard_names, write_index, write_shard
from sparsellm.checkpoints.tensor_index import read_stored
from sparsellm.errors import InvalidSetting, OutputExists, dtype_name, written_to
from sparsellm.outputs.folder import (
    ANEW,
    CARD,
    LOG,
    aside,
    check_name,
    check_place,
    files_outside_work,
    first_link,
    free_disk,
    locked,
    not_moved,
    recover_output,
    replacing,
)
from sparsellm.outputs.report import Report
from sparsellm.outputs.verification import check_written, foreign_file, proven
from sparsellm.outputs.views import Plotted
from sparsellm.recipes.path_names import PathNames
from sparsellm.runtime import collectives
from sparsellm.runtime.memory import human_bytes
from sparsellm.texts.json_files import strict_json
from sparsellm.texts.paths import local_path

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

SHARD_SIZE = "5GB"
"""Largest weight file, as the hub recommends."""


@dataclass(repr=False)
class Result(Plotted):
    """A pruned model with its report.

    Attributes:
        model: The pruned model; without weights if these are read block by block.
        report: The results of the run.
        tokenizer: The model's tokenizer, if it has one.
        source: The checkpoint that was pruned; None for a model in memory, which has its tokenizer in `tokenizer`.
        weights: The weights of a model that is too large for memory, read block by block; None otherwise.
        log: Gives the events of the run so far as JSON lines.
        read: The files of each checkpoint that the model was made from, as they were when it was opened.
    """

    model: PreTrainedModel
    report: Report
    tokenizer: PreTrainedTokenizerBase | None = None
    source: Checkpoint | None = None
    weights: DiskWeights | None = None
    log: Callable[[], str] | None = None
    read: tuple[Stamps, ...] = ()

    @property
    def dense(self) -> Path | None:
        """The folder of the dense model; None for a model in memory."""
        return None if self.source is None else self.source.folder

    def summary(self) -> dict[str, str]:
        """The summary of the report."""
        return self.report.summary()

    def save_pretrained(self, folder: str | Path, overwrite: bool = False) -> Path:
        """Write model, tokenizer, model card, report and log to a folder, and read the files back to verify them.

        The files are written to the folder's work folder, verified there, and then moved into place; a failure removes them.
        Paths in the recipe are shortened to their last component, in all files.

        Args:
            folder: The folder to write.
            overwrite: Replace an existing folder that sparsellm wrote.

        Raises:
            OutputExists: The folder exists.
            CannotResume: Another process is working on the folder.
            VerificationFailed: The files differ from the model or the report.
            SourceChanged: A checkpoint that the model was made from was changed since it was opened.
        """
        return collectives.on_main(lambda: self._save(folder, overwrite)) or Path(folder)

    def _save(self, folder: str | Path, overwrite: bool) -> Path:
        """Write the files, and return the folder's absolute path."""
        with (
            claimed(folder, overwrite, self.dense) as path,
            raise_system_errors(path, sum(x.numel() * x.element_size() for x in self.model.parameters())),
            replacing(path) as work,
            unchanged(*self.read, ignored=(*ANEW, LOG)),
        ):
            if self.source is None:
                with silence_transformers():
                    self.model.save_pretrained(work, max_shard_size=SHARD_SIZE)
                    if self.tokenizer is not None:
                        self.tokenizer.save_pretrained(work)
            else:
                write_checkpoint(self.source, self.model, self.weights, work)
            if any(block.scales for block in self.report.blocks):
                self.report.notes += write_side_files(work, self.model, self.report)
            report = self.report.named(PathNames(self.report.recipe))
            (work / CARD).write_text(report.to_markdown(), encoding="utf-8")
            if self.log:
                (work / LOG).write_text(self.log(), encoding="utf-8")
            check_written(work, self.report, self.dense, model=self.model, in_memory=self.weights is None)
            (work / REPORT).write_text(strict_json(proven(work, report.to_dict())) + "\n", encoding="utf-8")
            set_default_permissions(work)
        return path


@contextmanager
def claimed(output: str | Path, overwrite: bool = False, dense: str | Path | None = None) -> Iterator[Path]:
    """Check that an output can be written as `check_output` does, and lock it as `locked` does.

    Yields:
        The absolute path of the folder.
    """
    with locked(check_output(output, overwrite, dense)) as path:
        check_output(output, overwrite, dense)  # another command may have finished it before it was locked
        yield path


def check_output(output: str | Path, overwrite: bool = False, dense: str | Path | None = None) -> Path:
    """Check that an output folder can be written, after cleaning up what a killed process left of it.

    Args:
        overwrite: Allow a folder that a run wrote. An empty one is always allowed.
        dense: Folder of the dense model, which is never overwritten.

    Returns:
        The absolute path of the folder.

    Raises:
        OutputExists: The folder exists and may not be overwritten.
        InvalidSetting: The path is a link or mount point, not writable, or not a valid name.
        CannotResume: Another process is writing it.
    """
    path = local_path(output).absolute()
    if path.is_symlink() or path.is_mount():
        raise InvalidSetting(f"{output} is a link or a mount point. Name a plain folder that does not exist yet.")
    path = path.resolve()
    if dense is not None and (path == (source := local_path(dense).resolve()) or path in source.parents):
        raise OutputExists(
            f"{output} is the folder of a model that is read, or contains it, and is never overwritten. Choose another output."
        )
    recover_output(path)
    with not_moved(path):
        is_empty = path.is_dir() and not any(path.iterdir())  # as a process leaves it that is killed as soon as it made it
        is_free = not path.exists() or is_empty or ((path / WORK).is_dir() and not files_outside_work(path))
    if not overwrite and not is_free:
        raise OutputExists(f"{output} exists. Choose another name, or pass `overwrite=True` to replace it.")
    parent = check_place(output, path)
    for name in (*path.relative_to(parent).parts, aside(path).name):
        check_name(output, parent / name)
    if not path.exists():
        return path
    with not_moved(path):
        link = first_link(path)
        reason = f"{link.relative_to(path)}, which is a link" if link else foreign_file(path, files_outside_work(path))
    if reason:
        raise OutputExists(f"{output} holds {reason}. Move it away yourself, or choose another output.")
    return path


@contextmanager
def raise_system_errors(path: Path, needed: int) -> Iterator[None]:
    """Raise errors of the system with the path of the output, also where they are SafetensorErrors, as of a full disk.

    Args:
        path: The output.
        needed: About how many bytes are written, for the message about a full disk; 0 if it is not known.
    """
    try:
        with _named_in(path):
            yield
    except OSError as error:
        if error.errno == errno.ENOSPC and needed:
            free = f"{human_bytes(free_disk(path))} are free: make room, or write to another disk"
            error.add_note(f"about {human_bytes(needed)} are needed there, and {free}")
        raise


@contextmanager
def _named_in(path: Path) -> Iterator[None]:
    """Name an output in errors of the system that name nothing, or a file in it."""
    try:
        yield
    except SafetensorError as error:
        code = re.search(r"\(os error (\d+)\)", str(error))
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) if code else error from error
    except OSError as error:
        if isinstance(error.filename, int) or not error.filename or Path(os.fsdecode(error.filename)).is_relative_to(path):
            with written_to(path):
                raise
        raise


def write_checkpoint(source: Checkpoint, model: PreTrainedModel, weights: DiskWeights | None, work: Path) -> None:
    """Write a pruned model in the form of the checkpoint that it was: the same tensors under the same names, and its documents.

    Args:
        source: The checkpoint.
        model: The pruned model, or a skeleton of one whose weights are on disk.
        weights: The weights on disk. Each block and each group of tensors outside the blocks then becomes one weight file.
        work: The folder to write.
    """
    files, dtype = source.files(), model.config.dtype
    form = StoredForm.of(files, source.skeleton(dtype_name(dtype)))
    groups = form.by_file(files) if weights is None else form.by_block()
    carried = [[key for key, location in form.carried.items() if location.file == file] for file in files]
    if weights is not None:  # in files of their own, so that those of the blocks can be linked
        carried, groups = [*([] for _ in groups), *carried], [*groups, *([] for _ in files)]
    shards = [shard for shard in zip(groups, carried, strict=True) if any(shard)]
    state = model.state_dict() if weights is None else {}
    names = shard_names(len(shards))
    for target, (group, keys) in zip(names, shards, strict=True):
        parameters = {name: state[name] if weights is None else weights.read(name) for name in group}
        tensors = form.tensors(parameters) | {key: read_stored(form.carried[key], dtype) for key in keys}
        places = [*(form.locations[name] for name in group), *(form.carried[key] for key in keys)]
        found = file_metadata(() if source.quantization else dict.fromkeys(place.file for place in places))
        is_stored = all(tensors.get(name) is tensor for name, tensor in parameters.items()) and not keys
        finished = weights.file_of(group) if weights and is_stored and found == file_metadata(()) else None
        if finished is None or finished.parent.name != WORK or not _hard_link(finished, work / target):
            write_shard(work / target, tensors, found)
    write_index(work, names)
    copy_documents(source.folder, source.documents((*ANEW, LOG)), work)
    text = plain_config(read_config_text(source.folder)) if source.quantization else read_config_text(source.folder)
    write_config(work, text if dtype is source.dtype() else with_dtype(text, dtype))


def _hard_link(source: Path, target: Path) -> bool:
    """Create a hard link, which takes no disk space; False if the file system refuses."""
    try:
        os.link(source, target)
    except OSError:
        return False
    return True


def set_default_permissions(work: Path) -> None:
    """Give a private temporary folder and its files the default permissions of new files (the umask)."""
    umask = os.umask(0)
    os.umask(umask)
    for path in [work, *work.rglob("*")]:
        path.chmod((0o777 if path.is_dir() else 0o666) & ~umask)
