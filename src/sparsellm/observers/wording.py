"""The words in which results name settings: Python's, or the options of the command line that a run was started from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_edit: ContextVar[Callable[[str], str]] = ContextVar("words of settings", default=str)


@contextmanager
def wording(edit: Callable[[str], str]) -> Iterator[None]:
    """Write the settings that results name, as `samples`, in other words within the context, as `edit` does."""
    token = _edit.set(edit)
    try:
        yield
    finally:
        _edit.reset(token)


def worded(text: str) -> str:
    """A text with its settings in the words of whoever started the run."""
    return _edit.get()(text)
