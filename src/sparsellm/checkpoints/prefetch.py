"""Reads tensors in a background thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from threading import Event, Thread

from torch import Tensor


class Prefetch:
    """Reads tensors in a thread that starts at once.

    Args:
        buffers: By name, the tensor into which each is copied. The caller allocates them, so that they are counted as memory
            of the caller's thread.
        read: Returns a tensor by its name, in the buffer's dtype.
    """

    def __init__(self, buffers: Mapping[str, Tensor], read: Callable[[str], Tensor]) -> None:
        self._buffers, self._read = dict(buffers), read
        self._tensors: dict[str, Tensor] = {}
        self._error: Exception | None = None
        self._dropped = Event()
        self._thread = Thread(target=self._run, name="reading ahead")
        self._thread.start()

    def take(self) -> dict[str, Tensor]:
        """Wait for the thread, and return the tensors by name.

        A tensor whose shape differs from that of its buffer is returned as it was read. Errors of the thread are raised here.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._tensors

    def drop(self) -> None:
        """Stop the thread and free the tensors."""
        self._dropped.set()
        self._thread.join()
        self._buffers.clear()
        self._tensors.clear()

    def _run(self) -> None:
        try:
            for name, buffer in self._buffers.items():
                if self._dropped.is_set():
                    return
                tensor = self._read(name)
                self._tensors[name] = buffer.copy_(tensor) if tensor.shape == buffer.shape else tensor
        except Exception as error:  # raised in the caller's thread by `take`
            self._error = error
