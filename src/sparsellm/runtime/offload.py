"""Lists of tensors that are kept in memory while a budget lasts, a GPU's in the processor's memory, and in files after that."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import torch
from safetensors.torch import load, save
from torch import Tensor

from sparsellm.runtime import devices

HELD, HOSTED, WRITTEN = "held", "hosted", "written"
"""Where tensors are: where they were made, in the processor's memory, in files."""

ACTIVATIONS = "activations-"
"""How the names of folders with such files begin; a process that is killed leaves them."""


class Tensors(Protocol):
    """Tensors that are read one at a time, by number, wherever they are."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Tensor: ...
    def __iter__(self) -> Iterator[Tensor]: ...


class TensorList(Tensors, Protocol):
    """A list of tensors that grows at its end and is read and written one at a time, wherever they are."""

    def __setitem__(self, index: int, value: Tensor, /) -> None: ...
    def append(self, value: Tensor, /) -> None: ...


class OffloadManager:
    """Where lists of tensors are kept.

    budget: bytes of memory for all lists together, where their tensors are; None for any number. host: bytes of the processor's
    memory for what a GPU's budget has no room for. folder: where files may be made, in a folder of their own that is removed
    with the last list; None for the system's own place for temporary files. most_written, most_kept: the most bytes that were
    in files at once, and in memory and files together.
    """

    def __init__(self, budget: int | None = None, folder: Path | None = None, host: int = 0) -> None:
        self.budget, self.host, self._folder = budget, host, folder
        self._taken = dict.fromkeys((HELD, HOSTED, WRITTEN), 0)  # bytes by place, as far as they were announced
        self.most_written = self.most_kept = 0

    @contextmanager
    def new_lists(self, count: int, size: int) -> Iterator[list[TensorList]]:
        """Empty lists, within the context. size: bytes that each will hold; those that do not fit elsewhere are files."""
        with self._room(count * size) as (place, folder):
            files = (DiskList(folder / str(number)) for number in range(count))
            yield list(files) if place == WRITTEN else [[] if place == HELD else HostList() for _ in range(count)]

    def fits_on_device(self, size: int) -> bool:
        """Whether there is room for so many bytes more where tensors are made."""
        return self.budget is None or self._taken[HELD] + size <= self.budget

    @contextmanager
    def _room(self, size: int) -> Iterator[tuple[str, Path]]:
        """Where there is room, which is taken within the context; and a folder, which is there if that is in files."""
        limits = {HELD: self.budget, HOSTED: self.host, WRITTEN: None}
        place = next(where for where, limit in limits.items() if limit is None or self._taken[where] + size <= limit)
        self._count(size, place)
        folder = Path()
        try:
            if place == WRITTEN:
                if self._folder is not None:
                    self._folder.mkdir(parents=True, exist_ok=True)
                folder = Path(tempfile.mkdtemp(prefix=ACTIVATIONS, dir=self._folder))
            yield place, folder
        finally:
            self._count(-size, place)
            if folder != Path():
                shutil.rmtree(folder, ignore_errors=True)

    def _count(self, size: int, place: str) -> None:
        """Bytes that are taken, or given back if negative."""
        self._taken[place] += size
        self.most_written = max(self.most_written, self._taken[WRITTEN])
        self.most_kept = max(self.most_kept, sum(self._taken.values()))


class RowSubset:
    """Some rows of the tensors of a list, cut out when they are asked for; tensors of which no row is wanted are left out.

    wanted: rows by number, with a start, a stop and maybe a step. starts: the number of each tensor's first row, if they are
    not counted over this list alone; afterwards, counted over the rows that are wanted.
    """

    def __init__(self, source: Tensors, wanted: slice, starts: Sequence[int] | None = None) -> None:
        self._source, step, sizes = source, wanted.step or 1, lengths(source)
        self._cuts: list[tuple[int, slice]] = []
        self.lengths: list[int] = []
        self.starts: list[int] = []
        for number, (length, before) in enumerate(zip(sizes, starts or accumulate(sizes[:-1], initial=0), strict=True)):
            first = max(wanted.start - before, (wanted.start - before) % step)
            cut = slice(first, max(wanted.stop - before, 0), step)
            if rows := len(range(length)[cut]):
                self._cuts.append((number, cut))
                self.lengths.append(rows)
                self.starts.append(max(0, -((wanted.start - before) // step)))

    def __len__(self) -> int:
        return len(self._cuts)

    def __getitem__(self, index: int) -> Tensor:
        number, cut = self._cuts[index]
        return self._source[number][cut]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[index] for index in range(len(self)))


def lengths(source: Tensors) -> list[int]:
    """How many rows each tensor of a list has; nothing is read for it."""
    if isinstance(source, (DiskList, HostList, RowSubset)):
        return source.lengths
    return [len(some) for some in source]


class HostList:
    """A list of tensors in the processor's memory; a read gives a tensor of its own, on the device it came from.

    A GPU's are in pinned memory, and have a stream of their own for copies: while one is worked on, the next is on its way and
    the one before goes back. Whoever reads is at most a batch of work ahead of the device, so that what was read can be freed.
    """

    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self._devices: list[torch.device] = []
        self._streams: dict[torch.device, torch.Stream] = {}
        self._coming: tuple[int, Tensor, torch.Event | None] | None = None
        self._read_before: torch.Event | None = None

    @property
    def lengths(self) -> list[int]:
        """How many rows each tensor has."""
        return [len(kept) for kept in self._kept]

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[Tensor]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, index: int) -> Tensor:
        number = range(len(self))[index]
        coming = self._coming if self._coming is not None and self._coming[0] == number else self._fetch(number)
        _, tensor, arrived = coming
        if arrived is not None:
            present = devices.work_stream(tensor.device)
            present.wait_event(arrived)
            tensor.record_stream(present)
            if self._read_before is not None:
                self._read_before.synchronize()
            self._read_before = present.record_event()
        self._coming = self._fetch(number + 1) if number + 1 < len(self) else None
        return tensor

    def __setitem__(self, index: int, value: Tensor) -> None:
        number = range(len(self))[index]
        if self._coming is not None and self._coming[0] == number:
            self._coming = None
        kept = self._kept[number]
        self._devices[number] = value.device
        self._kept[number] = self._stored(value, kept if kept.shape == value.shape and kept.dtype == value.dtype else None)

    def append(self, value: Tensor) -> None:
        """Add a tensor at the end."""
        self._kept.append(self._stored(value))
        self._devices.append(value.device)

    def _fetch(self, number: int) -> tuple[int, Tensor, torch.Event | None]:
        """A tensor on its way to its device, and what tells that it has arrived."""
        kept, device = self._kept[number], self._devices[number]
        if not devices.has_own_memory(device):
            return number, kept.to(device, copy=True), None
        stream = self._stream(device)
        with devices.working_in(stream):
            return number, kept.to(device, non_blocking=True), stream.record_event()

    def _stored(self, value: Tensor, room: Tensor | None = None) -> Tensor:
        """A tensor on its way to the processor's memory, to `room` if there is any: reads follow in the same stream."""
        value = value.detach()
        pinned = devices.has_own_memory(value.device)
        room = torch.empty(value.shape, dtype=value.dtype, pin_memory=pinned) if room is None else room
        if not pinned:
            return room.copy_(value)
        stream = self._stream(value.device)
        stream.wait_stream(devices.work_stream(value.device))
        with devices.working_in(stream):
            room.copy_(value, non_blocking=True)
        value.record_stream(stream)
        return room

    def _stream(self, device: torch.device) -> torch.Stream:
        """The stream for copies from and to a device."""
        if device not in self._streams:
            self._streams[device] = devices.copy_stream(device)
        return self._streams[device]


class DiskList:
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

    def __iter__(self) -> Iterator[Tensor]:
        return (self[number] for number in range(len(self)))

    def __getitem__(self, index: int) -> Tensor:
        number = range(len(self))[index]
        return load(self._file(number).read_bytes())["x"].to(self._devices[number])

    def __setitem__(self, index: int, value: Tensor) -> None:
        number = range(len(self))[index]
        self._devices[number], self.lengths[number] = value.device, len(value)
        self._write(number, value)

    def append(self, value: Tensor) -> None:
        """Add a tensor at the end."""
        self._write(len(self), value)
        self._devices.append(value.device)
        self.lengths.append(len(value))

    def _file(self, number: int) -> Path:
        return self._folder / f"{number}.safetensors"

    def _write(self, number: int, value: Tensor) -> None:
        self._file(number).write_bytes(save({"x": value.detach().contiguous()}))  # save_file hides what the system said
