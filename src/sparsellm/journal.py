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
from safetensors.torch import load, save
from torch import Tensor

from sparsellm.blocks import Block
from sparsellm.errors import BadCheckpoint, CannotResume
from sparsellm.methods import BlockResult, EpochResult, LayerResult
from sparsellm.refinement import Refined

FORMAT = 1
"""Of the journal; another number is not read."""


JOURNAL = "journal.jsonl"
"""The file with the lines."""


class Journal:
    """A work folder: a line of JSON for everything that is finished, and the tensors that belong to it.

    A line stands once what it tells of is on the disk, whole (written aside, flushed, renamed); a last line that was cut off by
    a crash does not count. The first line is the run's fingerprint.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._blocks: dict[int, dict[str, Any]] = {}
        self._facts: dict[str, Any] = {}

    @property
    def file(self) -> Path:
        """The lines."""
        return self.folder / JOURNAL

    @classmethod
    def begin(cls, folder: Path, fingerprint: Mapping[str, Any]) -> Journal:
        """An empty journal in a folder that is made for it."""
        folder.mkdir(parents=True, exist_ok=True)
        journal = cls(folder)
        journal._append({"format": FORMAT, "fingerprint": dict(fingerprint)})
        return journal

    @classmethod
    def resume(cls, folder: Path, fingerprint: Mapping[str, Any]) -> Journal:
        """The journal of an earlier run of the same work.

        Raises CannotResume, naming what differs, where the fingerprint is another, and where there is no journal to read.
        """
        journal = cls(folder)
        lines = _whole_lines(journal.file)
        if not lines or lines[0].get("format") != FORMAT:
            raise CannotResume(f"{folder} holds no journal that this version can read. Pass --restart to begin anew.")
        wanted, found = json.loads(json.dumps(dict(fingerprint))), lines[0]["fingerprint"]
        other = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
        if other:
            told = "; ".join(f"{name} was {found.get(name)!r}, now {wanted.get(name)!r}" for name in other[:3])
            raise CannotResume(f"This is not the run that was begun: {told}. Pass what it was begun with, or --restart.")
        for line in lines[1:]:
            if "block" in line:
                journal._blocks[line["block"]] = line
            else:
                journal._facts[line["fact"]] = line["value"]
        kept = "".join(json.dumps(line) + "\n" for line in lines)
        if journal.file.read_text(encoding="utf-8") != kept:
            durable(journal.file, kept.encode())  # without the line that was cut off: the next is written after it
        return journal

    def fact(self, name: str) -> Any:
        """Something noted before, or None."""
        return self._facts.get(name)

    def note(self, name: str, value: Any) -> None:
        """Note something that the run has found out; plain data."""
        self._facts[name] = value
        self._append({"fact": name, "value": value})

    def keep_tensors(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """Keep tensors under a name."""
        self.note(name, self._store(name, tensors))

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
        for name, tensor in block.module.state_dict(keep_vars=True).items():
            dtype = block.dtypes.get(name, tensor.dtype)
            tensors[block.full_name(name)] = tensor.detach().to("cpu", dtype).contiguous()
        stored = self._store(f"block-{block.index:05}", tensors)
        line = {"block": block.index, **stored, "result": asdict(result)}
        self._blocks[block.index] = line
        self._append(line)
        return self.folder / str(stored["file"])

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
        """Write tensors to a file of their own; where they are, and how to know them again."""
        data = save(dict(tensors), metadata={"format": "pt"})
        durable(self.folder / f"{name}.safetensors", data)
        return {"file": f"{name}.safetensors", "digest": hashlib.blake2b(data, digest_size=16).hexdigest()}

    def _load(self, stored: Mapping[str, Any]) -> dict[str, Tensor]:
        """Read tensors back that `_store` wrote."""
        file = self.folder / str(stored["file"])
        try:
            data = file.read_bytes()
        except OSError as error:
            raise BadCheckpoint(f"{file} cannot be read ({error.strerror}). Pass --restart to begin anew.") from error
        if hashlib.blake2b(data, digest_size=16).hexdigest() != stored["digest"]:
            raise BadCheckpoint(f"{file} is not as it was written: the disk is at fault. Pass --restart to begin anew.")
        found: dict[str, Tensor] = load(data)
        return found

    def _append(self, line: Mapping[str, Any]) -> None:
        """Add a line, on the disk when this returns."""
        with self.file.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(line) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        _flush_folder(self.folder)


def _whole_lines(file: Path) -> list[dict[str, Any]]:
    """The lines of a journal, as far as they are whole."""
    found: list[dict[str, Any]] = []
    try:
        text = file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return found
    for line in text.splitlines(keepends=True):
        try:
            if not line.endswith("\n"):
                break
            found.append(json.loads(line))
        except ValueError:
            break
    return found


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


def block_result(data: Mapping[str, Any]) -> BlockResult:
    """A block's result from plain data."""
    layers = tuple(LayerResult(**{**layer, "shape": tuple(layer["shape"])}) for layer in data["layers"])
    epochs = tuple(EpochResult(**epoch) for epoch in data["epochs"])
    refined = None if data["refined"] is None else Refined(**data["refined"])
    rest = {"layers": layers, "epochs": epochs, "refined": refined, "moved": tuple(data["moved"])}
    return BlockResult(**{**data, **rest})
