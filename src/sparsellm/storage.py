"""Lists of tensors that are kept in memory while a budget lasts, and in files after that."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, MutableSequence, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import overload

import torch
from safetensors.torch import load, save
from torch import Tensor

Kept = MutableSequence[Tensor]
"""A list of tensors, wherever they are."""


class Storage:
    """Where lists of tensors are kept.

    budget: bytes of memory for all lists together; None for any number. folder: where files may be made, in a folder of their
    own that is removed with the last list; None for the system's own place for temporary files. most_written, most_kept: the
    most bytes that were in files at once, and in memory and files together.
    """

    def __init__(self, budget: int | None = None, folder: Path | None = None) -> None:
        self.budget, self._folder = budget, folder
        self._held = self._written = 0  # bytes in memory and in files, as far as they were announced
        self.most_written = self.most_kept = 0

    @contextmanager
    def lists(self, count: int, size: int) -> Iterator[list[Kept]]:
        """Empty lists, within the context. size: bytes that each will hold; those that do not fit the budget are files."""
        with self._room(count * size) as folder:
            yield [[] if folder is None else OnFile(folder / str(number)) for number in range(count)]

    @contextmanager
    def _room(self, size: int) -> Iterator[Path | None]:
        """A folder for files, or None where there is memory, which is taken from the budget within the context."""
        fits = self.budget is None or self._held + size <= self.budget
        self._count(size, fits)
        folder = None
        try:
            if not fits:
                if self._folder is not None:
                    self._folder.mkdir(parents=True, exist_ok=True)
                folder = Path(tempfile.mkdtemp(prefix="activations-", dir=self._folder))
            yield folder
        finally:
            self._count(-size, fits)
            if folder is not None:
                shutil.rmtree(folder, ignore_errors=True)

    def _count(self, size: int, fits: bool) -> None:
        """Bytes that are taken, or given back if negative."""
        if fits:
            self._held += size
        else:
            self._written += size
        self.most_written = max(self.most_written, self._written)
        self.most_kept = max(self.most_kept, self._held + self._written)


class Rows(Sequence[Tensor]):
    """Some rows of the tensors of a list, cut out when they are asked for; tensors of which no row is wanted are left out.

    wanted: rows by number, counted over the whole list, with a start, a stop and maybe a step.
    """

    def __init__(self, source: Sequence[Tensor], wanted: slice) -> None:
        self._source, before, step = source, 0, wanted.step or 1
        self._cuts: list[tuple[int, slice]] = []
        self.lengths: list[int] = []
        for number, length in enumerate(lengths(source)):
            first = max(wanted.start - before, (wanted.start - before) % step)
            cut = slice(first, max(wanted.stop - before, 0), step)
            if rows := len(range(length)[cut]):
                self._cuts.append((number, cut))
                self.lengths.append(rows)
            before += length

    def __len__(self) -> int:
        return len(self._cuts)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | Sequence[Tensor]:
        if isinstance(index, slice):
            raise TypeError("Cut rows are read one tensor at a time.")
        number, cut = self._cuts[index]
        return self._source[number][cut]


def lengths(source: Sequence[Tensor]) -> list[int]:
    """How many rows each tensor of a list has; nothing is read for it."""
    if isinstance(source, (OnFile, Rows)):
        return source.lengths
    return [len(some) for some in source]


class OnFile(MutableSequence[Tensor]):
    """A list of tensors with a safetensors file for each; a read gives a tensor of its own, on the device it came from.

    Files are read and written as a whole, not mapped: what a mapping touches counts as the process's memory.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._devices: list[torch.device] = []
        self.lengths: list[int] = []
        folder.mkdir(parents=True, exist_ok=True)

    def __len__(self) -> int:
        return len(self._devices)

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> MutableSequence[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | MutableSequence[Tensor]:
        if isinstance(index, slice):
            raise TypeError("A list on files is read one by one.")
        number = range(len(self))[index]
        return load(self._file(number).read_bytes())["x"].to(self._devices[number])

    @overload
    def __setitem__(self, index: int, value: Tensor) -> None: ...
    @overload
    def __setitem__(self, index: slice, value: object) -> None: ...
    def __setitem__(self, index: int | slice, value: object) -> None:
        if isinstance(index, slice) or not isinstance(value, Tensor):
            raise TypeError("A list on files is written one by one.")
        number = range(len(self))[index]
        self._devices[number], self.lengths[number] = value.device, len(value)
        self._write(number, value)

    def insert(self, index: int, value: Tensor) -> None:
        """Only at the end."""
        if index != len(self):
            raise TypeError("A list on files grows at its end only.")
        self._write(index, value)
        self._devices.append(value.device)
        self.lengths.append(len(value))

    def __delitem__(self, index: int | slice) -> None:
        raise TypeError("A list on files does not shrink.")

    def _file(self, number: int) -> Path:
        return self._folder / f"{number}.safetensors"

    def _write(self, number: int, value: Tensor) -> None:
        self._file(number).write_bytes(save({"x": value.detach().contiguous()}))  # save_file hides what the system said
