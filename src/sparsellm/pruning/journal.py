"""What of a run is finished, so that a killed run can go on: a block is durable before the journal says so."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from safetensors.torch import load, save
from torch import Tensor

from sparsellm.errors import BadCheckpoint, CannotResume
from sparsellm.methods import BlockResult
from sparsellm.models.blocks import Block
from sparsellm.runtime import collectives

FORMAT = 2
"""Of the journal; another number is not read."""


JOURNAL = "journal.jsonl"
"""The file with the lines."""

block_result = TypeAdapter(BlockResult).validate_python
"""A block's result from plain data."""


class Journal:
    """A work folder: a line of JSON for everything that is finished, and the tensors that belong to it.

    A line stands once what it tells of is on the disk, whole (written aside, flushed, renamed). The first line is the run's
    fingerprint. Each line ends with a digest of itself and of all lines before it, and names a digest of its file if it has
    one: what is finished is all before the first line, or file, that is not as it was written.

    Of several processes that work together the first one keeps the files. All of them call every method but `begin` and
    `resume`, and get the same from it.

    lost: why what stood in an earlier journal counts no longer, in a sentence; empty where all counts.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.lost = ""
        self._chain = ""
        self._blocks: dict[int, dict[str, Any]] = {}
        self._facts: dict[str, Any] = {}

    @property
    def file(self) -> Path:
        """The lines."""
        return self.folder / JOURNAL

    @classmethod
    def begin(cls, folder: Path, fingerprint: Mapping[str, Any]) -> Journal:
        """An empty journal in a folder that is made for it, in place of one that is there."""
        folder.mkdir(parents=True, exist_ok=True)
        _clear(folder)
        journal = cls(folder)
        durable(journal.file, journal._linked({"format": FORMAT, "fingerprint": dict(fingerprint)}).encode())
        return journal

    @classmethod
    def resume(cls, folder: Path, fingerprint: Mapping[str, Any]) -> Journal:
        """The journal of an earlier run of the same work, as far as it and its files are as they were written.

        What is not stays out, and `lost` says so; where that is the first line, the journal begins anew.
        Raises CannotResume, naming what differs, where the fingerprint is another, and where there is no journal to read.
        """
        journal = cls(folder)
        lines, whole = _lines(journal.file)
        if not lines:
            journal = cls.begin(folder, fingerprint)
            journal.lost = "the first line of the journal is not as it was written: no block counts as finished"
            return journal
        _check_same(fingerprint, lines[0]["fingerprint"])
        journal._chain = lines[0]["chain"]
        kept = lines[:1]
        for line in lines[1:]:
            if damaged := _damage(folder, line):
                break
            journal._take(line)
            kept.append(line)
        else:
            damaged = "" if whole else f"line {len(lines) + 1} of the journal is not as it was written"
        if damaged:
            count = len(journal._blocks)
            journal.lost = f"{damaged}: {count} blocks count as finished, what came after them is done again"
            text = "".join(json.dumps(line) + "\n" for line in kept)
            durable(journal.file, text.encode())  # the next line is written after these
        _clear(folder)
        return journal

    def share(self) -> Journal:
        """Give all processes what the first one's journal holds."""
        self.lost, blocks, self._facts = collectives.broadcast_object([self.lost, list(self._blocks.values()), self._facts])
        self._blocks = {line["block"]: line for line in blocks}
        return self

    def fact(self, name: str) -> Any:
        """Something noted before, or None."""
        return self._facts.get(name)

    def note(self, name: str, value: Any) -> None:
        """Note something that the run has found out; plain data."""
        self._append({"fact": name, "value": value})

    def keep_tensors(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Keep tensors under a name."""
        self._append({"tensors": name, **self._store(name, tensors)})

    def tensors(self, name: str) -> dict[str, Tensor] | None:
        """Tensors that were kept, or None. Raises BadCheckpoint for a file that is not as it was written."""
        found = self.fact(name)
        return None if found is None else self._load(found)

    def finished(self, index: int) -> BlockResult | None:
        """What became of a block, if it is finished."""
        line = self._blocks.get(index)
        return None if line is None else block_result(line["result"])

    def keep(self, block: Block, result: BlockResult) -> Path:
        """Keep a block's tensors, in the dtypes that they are stored in, and its result; the file that holds them."""
        tensors = {}
        for name, tensor in block.module.state_dict(keep_vars=True).items() if collectives.is_main() else ():
            dtype = block.dtypes.get(name, tensor.dtype)
            tensors[block.full_name(name)] = tensor.detach().to("cpu", dtype).contiguous()
        self._append({"block": block.index, **self._store(f"block-{block.index:05}", tensors), "result": asdict(result)})
        return self.folder / str(self._blocks[block.index]["file"])

    def restore(self, block: Block) -> Path:
        """Put a finished block's tensors into it; the file that holds them. Raises BadCheckpoint as `tensors` does."""
        line = self._blocks[block.index]
        kept = self._load(line)
        with torch.no_grad():
            for name, tensor in block.module.state_dict(keep_vars=True).items():
                tensor.copy_(kept[block.full_name(name)])
        return self.folder / str(line["file"])

    def block_files(self) -> dict[int, Path]:
        """By block, the file that holds it."""
        return {index: self.folder / str(line["file"]) for index, line in sorted(self._blocks.items())}

    def _store(self, name: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """Write tensors to a file of their own; where they are, and how to know them again; only in the first process."""
        if not collectives.is_main():
            return {}
        data = save(dict(tensors), metadata={"format": "pt"})
        durable(self.folder / f"{name}.safetensors", data)
        return {"file": f"{name}.safetensors", "digest": hashlib.sha256(data).hexdigest()}

    def _load(self, stored: Mapping[str, Any]) -> dict[str, Tensor]:
        """Tensors that `_store` wrote: the first process reads them and sends them to the others."""
        data = collectives.broadcast_bytes(self._read(stored) if collectives.is_main() else b"")
        loaded: dict[str, Tensor] = load(data)
        return loaded

    def _read(self, stored: Mapping[str, Any]) -> bytes:
        """The bytes of a file that `_store` wrote. Raises BadCheckpoint where they are not what was written."""
        file = self.folder / str(stored["file"])
        try:
            data = file.read_bytes()
        except OSError as error:
            raise BadCheckpoint(f"{file} cannot be read ({error.strerror}). Check the disk.") from error
        if hashlib.sha256(data).hexdigest() != stored["digest"]:
            raise BadCheckpoint(f"{file} is not as it was written a moment ago. Check the disk.")
        return data

    def _append(self, entry: Mapping[str, Any]) -> None:
        """Add a line, on the disk when this returns; in all processes the first one's."""
        line = ""
        if collectives.is_main():
            line = self._linked(entry)
            with self.file.open("a", encoding="utf-8") as stream:
                stream.write(line)
                stream.flush()
                os.fsync(stream.fileno())
            _flush_folder(self.folder)
            self._take(json.loads(line))  # it counts even if the others are lost before they hear of it
        line = collectives.broadcast_object(line)
        if not collectives.is_main():
            self._take(json.loads(line))

    def _linked(self, entry: Mapping[str, Any]) -> str:
        """A line that follows those so far."""
        self._chain = _chained(self._chain, entry)
        return json.dumps({**entry, "chain": self._chain}) + "\n"

    def _take(self, line: dict[str, Any]) -> None:
        """Count what a line tells of as finished."""
        self._chain = line["chain"]
        if "block" in line:
            self._blocks[line["block"]] = line
        elif "tensors" in line:
            self._facts[line["tensors"]] = line
        else:
            self._facts[line["fact"]] = line["value"]


def _lines(file: Path) -> tuple[list[dict[str, Any]], bool]:
    """The lines of a journal up to the first that is not as it was written, and whether these are all.

    Raises CannotResume for a file that cannot be read, and for another format.
    """
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise CannotResume(f"There is no journal to read at {file} ({error.strerror}). Pass --restart to begin anew.") from None
    found: list[dict[str, Any]] = []
    *lines, rest = text.split("\n")
    for line in lines:
        try:
            entry = json.loads(line)
            if not found and type(entry.get("format")) is int and entry["format"] != FORMAT:
                raise CannotResume(f"{file} was begun by another version of sparsellm. Pass --restart to begin anew.")
            chain = entry.pop("chain")
            if chain != _chained(found[-1]["chain"] if found else "", entry):
                return found, False
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):  # no JSON, or not of this form
            return found, False
        found.append({**entry, "chain": chain})
    return found, not rest


def _chained(before: str, entry: Mapping[str, Any]) -> str:
    """The digest of a line that follows one with the digest `before`."""
    return hashlib.sha256((before + json.dumps(entry)).encode()).hexdigest()[:32]


def _check_same(fingerprint: Mapping[str, Any], begun: Mapping[str, Any]) -> None:
    """Raise CannotResume, naming what differs, unless a fingerprint is the one that a journal was begun with."""
    now = json.loads(json.dumps(dict(fingerprint)))
    other = sorted(name for name in now.keys() | begun.keys() if now.get(name) != begun.get(name))
    if other:
        differences = "; ".join(f"{name} was {begun.get(name)!r}, now {now.get(name)!r}" for name in other[:3])
        raise CannotResume(f"This is not the run that was begun: {differences}. Pass what it was begun with, or --restart.")


def _damage(folder: Path, line: Mapping[str, Any]) -> str:
    """What is wrong with the file that a line names; empty where nothing is, or where it names none."""
    if "file" not in line:
        return ""
    try:
        with (folder / line["file"]).open("rb") as stream:
            whole = hashlib.file_digest(stream, "sha256").hexdigest() == line["digest"]
    except OSError as error:
        return f"{line['file']} cannot be read ({error.strerror})"
    return "" if whole else f"{line['file']} is not as it was written"


def _clear(folder: Path) -> None:
    """Remove files that a killed process left half-written."""
    for left in folder.glob("*.partial"):
        left.unlink(missing_ok=True)


def durable(file: Path, data: bytes) -> None:
    """Write a file so that it is there whole, also after a crash, or as it was before."""
    aside = file.with_name(f"{file.name}.{os.getpid()}.partial")  # another process may be writing the same
    try:
        with aside.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        aside.replace(file)
    except BaseException:
        with suppress(OSError):
            aside.unlink(missing_ok=True)
        raise
    _flush_folder(file.parent)


def _flush_folder(folder: Path) -> None:
    """Put a folder's entries on the disk, where the system can."""
    with suppress(OSError):
        opened = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
