"""Lists of tensors within a memory budget: on their device first, then (for a GPU) in CPU memory, then in files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

import torch
from safetensors.torch import load, save
from torch import Tensor

from sparsellm.errors import written_to
from sparsellm.runtime import devices

DEVICE, HOST, DISK = "device", "host", "disk"
"""Where tensors are stored: on the device that computed them, in CPU memory, in files."""

ACTIVATIONS = "activations-"
"""Name prefix of the folders that hold such files; a killed process leaves them behind."""


class Tensors(Protocol):
    """A sequence of tensors that are read one at a time by index, wherever they are stored."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Tensor: ...

    def __iter__(self) -> Iterator[Tensor]:
        return (self[index] for index in range(len(self)))


class TensorList(Tensors, Protocol):
    """A list of tensors that are appended, read and replaced one at a time, wherever they are stored."""

    def __setitem__(self, index: int, value: Tensor, /) -> None: ...
    def append(self, value: Tensor, /) -> None: ...


class OffloadManager:
    """Chooses where lists of tensors are stored, within a memory budget.

    Args:
        budget: Bytes on the device for all lists together; None for no limit.
        folder: Folder in which files are written, each set in a subfolder that is removed with its lists; None for the
            system's temporary folder.
        host: Bytes of CPU memory for lists that exceed a GPU's budget.

    Attributes:
        reserved: Bytes of all lists by location.
    """

    def __init__(self, budget: int | None = None, folder: Path | None = None, host: int = 0) -> None:
        self.budget, self.host, self._folder = budget, host, folder
        self.reserved = dict.fromkeys((DEVICE, HOST, DISK), 0)

    @contextmanager
    def new_lists(self, count: int, size: int) -> Iterator[list[TensorList]]:
        """Create empty lists, whose memory or files are reserved within the context.

        Args:
            count: Number of lists, all stored in the same location.
            size: Bytes that each will hold.
        """
        limits = {DEVICE: self.budget, HOST: self.host, DISK: None}
        total = count * size
        location = next(name for name, limit in limits.items() if limit is None or self.reserved[name] + total <= limit)
        self.reserved[location] += total
        try:
            if location != DISK:
                yield [[] if location == DEVICE else HostList() for _ in range(count)]
                return
            if self._folder is not None:
                self._folder.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(prefix=ACTIVATIONS, dir=self._folder, ignore_cleanup_errors=True) as folder:
                yield [DiskList(Path(folder, str(number))) for number in range(count)]
        finally:
            self.reserved[location] -= total

    def fits_on_device(self, size: int) -> bool:
        """Return whether `size` more bytes fit into the budget of the device."""
        return self.budget is None or self.reserved[DEVICE] + size <= self.budget


class RowSubset(Tensors):
    """A view of selected rows of a list's tensors, sliced on access; tensors without a selected row are left out.

    Args:
        rows: Row indices over all tensors, as a slice with a start, a stop and an optional step.
        starts: Index of each tensor's first row; by default, rows are counted over this list.

    Attributes:
        lengths: Number of selected rows of each tensor.
        starts: Index of each tensor's first row among all selected rows.
    """

    def __init__(self, source: Tensors, rows: slice, starts: Sequence[int] | None = None) -> None:
        self._source, step, sizes = source, rows.step or 1, lengths(source)
        self._slices: list[tuple[int, slice]] = []
        self.lengths: list[int] = []
        self.starts: list[int] = []
        for number, (length, offset) in enumerate(zip(sizes, starts or accumulate(sizes[:-1], initial=0), strict=True)):
            first = max(rows.start - offset, (rows.start - offset) % step)
            within = slice(first, max(rows.stop - offset, 0), step)
            if count := len(range(length)[within]):
                self._slices.append((number, within))
                self.lengths.append(count)
                self.starts.append(max(0, -((rows.start - offset) // step)))

    def __len__(self) -> int:
        return len(self._slices)

    def __getitem__(self, index: int) -> Tensor:
        number, rows = self._slices[index]
        return self._source[number][rows]


def lengths(source: Tensors) -> list[int]:
    """Return the number of rows of each tensor of a list, without reading offloaded tensors."""
    if isinstance(source, (DiskList, HostList, RowSubset)):
        return source.lengths
    return [len(tensor) for tensor in source]


class HostList(TensorList):
    """A list of tensors in CPU memory; reading one returns a copy on the device it came from.

    Tensors of a GPU are stored in pinned memory and copied in a separate stream: while one is processed, the next is fetched
    and the previous one is written back. A read waits until the device has reached the previous read, so that at most one batch
    of work is queued and earlier tensors can be freed.
    """

    def __init__(self) -> None:
        self._kept: list[Tensor] = []
        self._devices: list[torch.device] = []
        self._streams: dict[torch.device, torch.Stream] = {}
        self._prefetched: tuple[int, Tensor, torch.Event | None] | None = None
        self._previous_read: torch.Event | None = None

    @property
    def lengths(self) -> list[int]:
        """Number of rows of each tensor."""
        return [len(tensor) for tensor in self._kept]

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: int) -> Tensor:
        number = range(len(self))[index]
        prefetched = self._prefetched if self._prefetched is not None and self._prefetched[0] == number else None
        _, tensor, copied = prefetched or self._fetch(number)
        if copied is not None:
            stream = devices.work_stream(tensor.device)
            stream.wait_event(copied)
            tensor.record_stream(stream)
            if self._previous_read is not None:
                self._previous_read.synchronize()
            self._previous_read = stream.record_event()
        self._prefetched = self._fetch(number + 1) if number + 1 < len(self) else None
        return tensor

    def __setitem__(self, index: int, value: Tensor) -> None:
        number = range(len(self))[index]
        if self._prefetched is not None and self._prefetched[0] == number:
            self._prefetched = None
        old = self._kept[number]
        self._devices[number] = value.device
        self._kept[number] = self._store(value, old if old.shape == value.shape and old.dtype == value.dtype else None)

    def append(self, value: Tensor) -> None:
        """Add a tensor at the end."""
        self._kept.append(self._store(value))
        self._devices.append(value.device)

    def _fetch(self, number: int) -> tuple[int, Tensor, torch.Event | None]:
        """Start to copy a tensor to its device; returns its index, the copy, and the event that completes it, if any."""
        stored, device = self._kept[number], self._devices[number]
        if not devices.has_own_memory(device):
            return number, stored.to(device, copy=True), None
        stream = self._stream(device)
        with devices.working_in(stream):
            return number, stored.to(device, non_blocking=True), stream.record_event()

    def _store(self, value: Tensor, out: Tensor | None = None) -> Tensor:
        """Start to copy a tensor to CPU memory, into `out` if given; later reads are queued in the same stream."""
        value = value.detach()
        pinned = devices.has_own_memory(value.device)
        out = torch.empty(value.shape, dtype=value.dtype, pin_memory=pinned) if out is None else out
        if not pinned:
            return out.copy_(value)
        stream = self._stream(value.device)
        stream.wait_stream(devices.work_stream(value.device))
        with devices.working_in(stream):
            out.copy_(value, non_blocking=True)
        value.record_stream(stream)
        return out

    def _stream(self, device: torch.device) -> torch.Stream:
        """The stream for copies to and from a device."""
        if device not in self._streams:
            self._streams[device] = devices.copy_stream(device)
        return self._streams[device]


class DiskList(TensorList):
    """A list of tensors with one safetensors file each; reading one returns a copy on the device it came from.

    Files are read and written whole instead of memory-mapped, because mapped pages count as memory of the process.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._devices: list[torch.device] = []
        self.lengths: list[int] = []
        folder.mkdir(parents=True, exist_ok=True)

    def __len__(self) -> int:
        return len(self._devices)

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
        """Return the file of a tensor."""
        return self._folder / f"{number}.safetensors"

    def _write(self, number: int, value: Tensor) -> None:
        """Write the file of a tensor."""
        with written_to(self._file(number)):
            self._file(number).write_bytes(save({"x": value.detach().contiguous()}))  # save_file hides the OS error
