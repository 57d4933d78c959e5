"""The work directory of a run with its journal: finished blocks and intermediate results, from which it is resumed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from sparsellm.checkpoints.files import REPORT, WORK
from sparsellm.checkpoints.stamps import SourceChanged
from sparsellm.errors import BadCheckpoint, CannotResume, SparseLLMError, plural
from sparsellm.methods import BLOCK_RESULT, WHOLE_MODEL, BlockResult
from sparsellm.models.blocks import Block
from sparsellm.outputs.folder import LOCK, locked, refuse_links, remove
from sparsellm.runtime import collectives
from sparsellm.texts.json_files import durable, flush_folder
from sparsellm.texts.paths import local_path

JOURNAL_FORMAT = 2
"""Version of the journal's format; other versions are not read."""

SCALES_SUFFIX = ".weight_scale"
"""Suffix of the name of a quantized layer's scales in the file of its block."""

JOURNAL = "journal.jsonl"
"""File name of the journal."""

OF_RECIPE = "recipe."
"""The prefix of the names of a recipe's fields in a fingerprint."""


TRAINING_STATE = "training"
"""Name under which the journal of a run has the state of its training."""


class Journal:
    """A work directory with one line of JSON, and possibly a tensor file, for each finished step of a run.

    The first line is the run's fingerprint. A line is written after its tensor file is durable (temporary file, flush, rename).
    Each line holds a digest of itself and all lines before it, and the digest of its tensor file. Everything before the first
    damaged line or file counts as finished.

    In a distributed run only the main process reads and writes files. All processes call every method except `begin` and
    `resume`, and get the same results.

    Attributes:
        damage: Why some lines of an earlier journal do not count, as a sentence; empty if all do.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.damage = ""
        self._chain = ""
        self._blocks: dict[int, dict[str, Any]] = {}
        self._facts: dict[str, Any] = {}

    @property
    def file(self) -> Path:
        """The file of the lines."""
        return self.folder / JOURNAL

    @classmethod
    def begin(cls, folder: Path, fingerprint: Mapping[str, Any]) -> Journal:
        """Start an empty journal, replacing any that is in the folder.

        Args:
            fingerprint: Everything that determines the results of the run, as JSON-serializable data.
        """
        folder.mkdir(parents=True, exist_ok=True)
        for file in folder.glob("*.partial"):  # of a killed process
            file.unlink(missing_ok=True)
        journal = cls(folder)
        durable(journal.file, journal._chained_line({"format": JOURNAL_FORMAT, "fingerprint": dict(fingerprint)}).encode())
        return journal

    @classmethod
    def resume(cls, folder: Path, fingerprint: Mapping[str, Any]) -> Journal:
        """Open the journal of an interrupted run.

        Lines from the first damaged line or file on are dropped, and `damage` says so. If the first line is damaged, the
        journal starts empty.

        Args:
            fingerprint: As for `begin`; it must be that of the interrupted run.

        Raises:
            CannotResume: The fingerprints differ, the journal cannot be read, or it has another format.
        """
        journal = cls(folder)
        lines, complete = _read_lines(journal.file)
        if not lines:
            journal = cls.begin(folder, fingerprint)
            journal.damage = "the first line of the journal is damaged: no block counts as finished"
            return journal
        _check_fingerprint(fingerprint, lines[0]["fingerprint"])
        journal._chain = lines[0]["chain"]
        valid = lines[:1]
        for line in lines[1:]:
            if damage := _file_damage(folder, line):
                break
            journal._add(line)
            valid.append(line)
        else:
            damage = "" if complete else f"line {len(lines) + 1} of the journal is damaged"
        if damage:
            count = len(journal._blocks)
            journal.damage = f"{damage}: {plural(count, 'finished block')} left, later ones are pruned again"
            text = "".join(json.dumps(line) + "\n" for line in valid)
            durable(journal.file, text.encode())  # new lines are appended to these
        for file in folder.glob("*.partial"):  # of a killed process
            file.unlink(missing_ok=True)
        return journal

    def share(self) -> Journal:
        """Copy the content of the main process's journal to all processes, and return this journal."""
        self.damage, blocks, self._facts = collectives.broadcast_object([self.damage, list(self._blocks.values()), self._facts])
        self._blocks = {line["block"]: line for line in blocks}
        return self

    def fact(self, name: str) -> Any:
        """Return the value stored by `store_fact`, or None."""
        return self._facts.get(name)

    def store_fact(self, name: str, value: Any) -> None:
        """Store an intermediate result, as JSON-serializable data."""
        self._append({"fact": name, "value": value})

    def store_tensors(self, name: str, tensors: Mapping[str, Tensor]) -> Path:
        """Store tensors under a name; return their file."""
        self._append({"tensors": name, **self._store(name, tensors)})
        return self.folder / str(self.fact(name)["file"])

    def tensors(self, name: str) -> dict[str, Tensor] | None:
        """Return the tensors stored by `store_tensors`, or None.

        Raises:
            BadCheckpoint: Their file is damaged.
        """
        stored = self.fact(name)
        return None if stored is None else self._load(stored)

    def store_latest(self, name: str, tensors: Mapping[str, Tensor], value: Any) -> None:
        """Store tensors and JSON-serializable data under a name, in place of what was stored there before."""
        previous = self.fact(name)
        number = 1 + (previous["number"] if previous else 0)  # the file before stays until the new line is durable
        self.store_fact(name, {"number": number, "value": value, **self._store(f"{name}-{number}", tensors)})
        if previous and collectives.is_main():
            (self.folder / str(previous["file"])).unlink(missing_ok=True)

    def latest(self, name: str) -> tuple[dict[str, Tensor], Any] | None:
        """Return the tensors and data stored by `store_latest`; None if there are none, or if their file is damaged."""
        stored, data = self.fact(name), b""
        if stored is not None and collectives.is_main():
            with suppress(BadCheckpoint):
                data = self._read(stored)
        data = collectives.broadcast_bytes(data)
        return (load(data), stored["value"]) if data else None

    def finished(self, index: int) -> BlockResult | None:
        """Return the result of a finished block, or None."""
        line = self._blocks.get(index)
        return None if line is None else BLOCK_RESULT.validate_python(line["result"])

    def store_block(self, block: Block, result: BlockResult) -> Path:
        """Store a block's tensors, in their storage dtypes, and its result; return the file of the tensors."""
        tensors = {}
        for name, tensor in block.module.state_dict(keep_vars=True).items() if collectives.is_main() else ():
            dtype = block.dtypes.get(name, tensor.dtype)
            tensors[block.full_name(name)] = tensor.detach().to("cpu", dtype).contiguous()
        for name, scales in block.scales.items() if collectives.is_main() else ():
            tensors[block.full_name(name) + SCALES_SUFFIX] = scales.detach().cpu().contiguous()
        stored = self._store(f"block-{block.index:05}", tensors)
        self._append({"block": block.index, **stored, "result": BLOCK_RESULT.dump_python(result, mode="json")})
        return self.folder / str(self._blocks[block.index]["file"])

    def restore_block(self, block: Block) -> Path:
        """Copy the stored tensors of a finished block into it, and return their file.

        Raises:
            BadCheckpoint: The file is damaged.
        """
        line = self._blocks[block.index]
        tensors = self._load(line)
        with torch.no_grad():
            for name, tensor in block.module.state_dict(keep_vars=True).items():
                tensor.copy_(tensors[block.full_name(name)])
        stored = {name: tensors.get(block.full_name(name) + SCALES_SUFFIX) for name in block.layers}
        block.scales.update({name: scales for name, scales in stored.items() if scales is not None})
        return self.folder / str(line["file"])

    def block_files(self) -> dict[int, Path]:
        """Return the tensor files of the finished blocks, by block index."""
        return {index: self.folder / str(line["file"]) for index, line in sorted(self._blocks.items())}

    def _store(self, name: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Write tensors to a file and return its name and digest; empty in all but the main process."""
        if not collectives.is_main():
            return {}
        data = save(dict(tensors), metadata={"format": "pt"})
        durable(self.folder / f"{name}.safetensors", data)
        return {"file": f"{name}.safetensors", "digest": hashlib.sha256(data).hexdigest()}

    def _load(self, stored: Mapping[str, Any]) -> dict[str, Tensor]:
        """Load tensors written by `_store`; the main process reads the file and sends it to the others."""
        data = collectives.broadcast_bytes(self._read(stored) if collectives.is_main() else b"")
        tensors: dict[str, Tensor] = load(data)
        return tensors

    def _read(self, stored: Mapping[str, Any]) -> bytes:
        """Read a file written by `_store`; raise BadCheckpoint where its digest differs."""
        file = self.folder / str(stored["file"])
        with suppress(OSError):
            data = file.read_bytes()
            if hashlib.sha256(data).hexdigest() == stored["digest"]:
                return data
        raise BadCheckpoint(f"{file} cannot be read, or differs from what this run wrote. Check the disk.")

    def _append(self, entry: Mapping[str, Any]) -> None:
        """Append a durable line in the main process, and add it in all processes."""
        line = ""
        if collectives.is_main():
            line = self._chained_line(entry)
            with self.file.open("a", encoding="utf-8") as stream:
                stream.write(line)
                stream.flush()
                os.fsync(stream.fileno())
            flush_folder(self.folder)
            self._add(json.loads(line))  # before the broadcast, which fails if another process is lost
        line = collectives.broadcast_object(line)
        if not collectives.is_main():
            self._add(json.loads(line))

    def _chained_line(self, entry: Mapping[str, Any]) -> str:
        """Serialize the next line, with its digest."""
        self._chain = _chain_digest(self._chain, entry)
        return json.dumps({**entry, "chain": self._chain}) + "\n"

    def _add(self, line: dict[str, Any]) -> None:
        """Record the content of a line."""
        self._chain = line["chain"]
        if "block" in line:
            self._blocks[line["block"]] = line
        elif "tensors" in line:
            self._facts[line["tensors"]] = line
        else:
            self._facts[line["fact"]] = line["value"]


def _read_lines(file: Path) -> tuple[list[dict[str, Any]], bool]:
    """Read a journal up to the first damaged line; return the lines, and whether they are all.

    Raises CannotResume where the file cannot be read or has another format.
    """
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise CannotResume(
            f"There is no journal to read at {file} ({error.strerror}). Pass `restart=True` to start over."
        ) from None
    entries: list[dict[str, Any]] = []
    *lines, unfinished = text.split("\n")
    for line in lines:
        try:
            entry = json.loads(line)
            if not entries and type(entry.get("format")) is int and entry["format"] != JOURNAL_FORMAT:
                raise CannotResume(f"{file} was written by another version of sparsellm. Pass `restart=True` to start over.")
            chain = entry.pop("chain")
            if chain != _chain_digest(entries[-1]["chain"] if entries else "", entry):
                return entries, False
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):  # not JSON, or not a journal's line
            return entries, False
        entries.append({**entry, "chain": chain})
    return entries, not unfinished


def _chain_digest(previous: str, entry: Mapping[str, Any]) -> str:
    """Digest of a line, from the digest of the previous line and its own content."""
    return hashlib.sha256((previous + json.dumps(entry)).encode()).hexdigest()[:32]


def entry_in_words(name: str) -> str:
    """The name of an entry of a fingerprint for a message: of a recipe's field the setting, between backticks."""
    return f"`{name.removeprefix(OF_RECIPE)}`" if name.startswith(OF_RECIPE) else name


def _check_fingerprint(fingerprint: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
    """Raise CannotResume where the fingerprint differs from that of the interrupted run."""
    current = json.loads(json.dumps(dict(fingerprint)))
    changed = sorted(name for name in current.keys() | stored.keys() if current.get(name) != stored.get(name))
    if changed:
        named = {entry_in_words(name): (stored.get(name), current.get(name)) for name in changed[:3]}
        differences = "; ".join(f"{name} was {before!r}, now {now!r}" for name, (before, now) in named.items())
        raise CannotResume(
            f"This is not the run that was started: {differences}. Pass the original settings, or `restart=True`."
        )


def _file_damage(folder: Path, line: Mapping[str, Any]) -> str:
    """Describe the damage to the tensor file of a line; empty for an intact file or a line without one."""
    if "file" not in line:
        return ""
    try:
        with (folder / line["file"]).open("rb") as stream:
            intact = hashlib.file_digest(stream, "sha256").hexdigest() == line["digest"]
    except OSError as error:
        return f"{line['file']} cannot be read ({error.strerror})"
    return "" if intact else f"{line['file']} is damaged"


class WorkDirectory:
    """Work directory of an unfinished output. `journal` is None until `begin`."""

    def __init__(self, output: Path, resume: bool) -> None:
        self.output, self._resume = output, resume
        self.journal: Journal | None = None

    @property
    def folder(self) -> Path:
        """Folder of the run's files."""
        return self.output / WORK

    def begin(self, fingerprint: Mapping[str, Any]) -> Journal:
        """Open the journal: a new one, or that of the run to resume.

        In a distributed run every process calls this, and the main process writes the journal.

        Raises:
            CannotResume: The journal has another fingerprint.
        """
        journal = Journal(self.folder)
        if collectives.is_main():
            resumes = self._resume and journal.file.exists()
            journal = (Journal.resume if resumes else Journal.begin)(self.folder, fingerprint)
        self.journal = journal.share()
        return self.journal


@contextmanager
def work_directory(output: str | Path, resume: bool = False, restart: bool = False) -> Iterator[WorkDirectory]:
    """Open the work directory of an output, locked against other runs.

    On success the work directory is removed. On an error it is kept if any block is finished, with a note on the error that
    says how to resume, and removed otherwise. In a distributed run every process enters, and the main process does the work.

    Args:
        resume: Resume an unfinished run, or start a new one if there is none.
        restart: Discard an unfinished run first.

    Raises:
        CannotResume: The output is unfinished and neither is set, or another process works on it.
    """
    path = local_path(output).absolute()
    if not collectives.is_main():
        with _secondary_directory(path) as work:
            yield work
        return
    work = WorkDirectory(path, resume)
    with locked(path):
        unfinished = (work.folder / JOURNAL).exists()
        if unfinished and not resume and not restart:
            raise CannotResume(f"{output} is unfinished. Pass `resume=True` to continue it, or `restart=True` to start over.")
        try:
            if restart:
                _clear(work.folder)
            collectives.broadcast_object(None)
            yield work
        except BaseException as error:
            _clean_up(work, error, resumable=unfinished and not restart)
            raise
        shutil.rmtree(work.folder, ignore_errors=True)


def _clean_up(work: WorkDirectory, error: BaseException, resumable: bool) -> None:
    """After an error, keep the work directory if it holds results or is `resumable`, else clear it; note which on the error.

    Results are finished blocks and the state of a training.

    `resumable` tells whether there was a journal before; it counts until the journal is read.
    """
    finished = len(work.journal.block_files()) if work.journal else 0
    trained = work.journal.fact(TRAINING_STATE) if work.journal else None
    is_kept = finished or trained or (resumable and work.journal is None)
    if is_kept and not isinstance(error, SourceChanged):  # whose blocks belong to no model
        count = "1 block is" if finished == 1 else f"{finished} blocks are"
        state = f"{count} finished and kept" if finished else "blocks that were finished before are kept"
        if trained and (not finished or trained["value"]["training"] == WHOLE_MODEL):
            state = "the state of the training is kept"
        if not isinstance(error, CannotResume):  # its message names the options
            replacing = " and `overwrite=True`" if (work.output / REPORT).exists() else ""
            error.add_note(f"{state}: pass `resume=True`{replacing} to continue, or `restart=True`{replacing} to start over.")
        return
    _clear(work.folder)
    if isinstance(error, (KeyboardInterrupt, OSError)) and not isinstance(error, SparseLLMError):
        error.add_note("nothing was written")


def _clear(folder: Path) -> None:
    """Remove everything from a work folder except its lock."""
    for path in list(folder.iterdir()) if folder.is_dir() else ():
        if path.name != LOCK:
            remove(path)


@contextmanager
def _secondary_directory(path: Path) -> Iterator[WorkDirectory]:
    """The work directory of a process other than the main one, possibly on another machine."""
    collectives.broadcast_object(None)  # the main process holds the lock
    work = WorkDirectory(path, resume=False)
    refuse_links(path, work.folder)
    work.folder.mkdir(parents=True, exist_ok=True)
    try:
        yield work
    finally:
        for folder in (work.folder, path):  # a folder shared with the main process is not empty and stays
            with suppress(OSError):
                folder.rmdir()
