"""Tensors that are read by a thread of their own while the caller works on others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from threading import Event, Thread

from torch import Tensor


class Prefetch:
    """Tensors on their way.

    buffers: by name, where each goes; made by the caller, so that whoever counts the caller's memory counts them. read: gives a
    tensor by its name, in the buffer's dtype.
    """

    def __init__(self, buffers: Mapping[str, Tensor], read: Callable[[str], Tensor]) -> None:
        self._buffers, self._read = dict(buffers), read
        self._found: dict[str, Tensor] = {}
        self._error: Exception | None = None
        self._dropped = Event()
        self._thread = Thread(target=self._run, name="reading ahead")
        self._thread.start()

    def take(self) -> dict[str, Tensor]:
        """All of them, as soon as they are there; one that is misshapen as it was read. Raises what the reading raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._found

    def drop(self) -> None:
        """No longer wanted: their memory is free, and nothing is read, when this returns."""
        self._dropped.set()
        self._thread.join()
        self._buffers.clear()
        self._found.clear()

    def _run(self) -> None:
        try:
            for name, buffer in self._buffers.items():
                if self._dropped.is_set():
                    return
                tensor = self._read(name)
                self._found[name] = buffer.copy_(tensor) if tensor.shape == buffer.shape else tensor
        except Exception as error:  # to be raised where it can be told
            self._error = error
