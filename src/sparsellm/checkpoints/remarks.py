"""Remarks on checkpoints, such as that one has an adapter: made where a checkpoint is opened, received by whoever opened it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Receive = Callable[[str, bool], None]
"""Called with a remark, and whether no context around this one has received it."""

_contexts: ContextVar[tuple[tuple[Receive, set[Hashable]], ...]] = ContextVar("receivers of remarks", default=())
"""The receivers of remarks, the innermost last, each with the subjects that it knows."""


@contextmanager
def remarks_to(receive: Receive) -> Iterator[None]:
    """Send the remarks that are made within the context to a function, each once, however often its checkpoint is opened.

    Contexts may be nested, as that of a run in that of a command: the inner one receives, and the outer ones count a remark as
    received.
    """
    token = _contexts.set((*_contexts.get(), (receive, set())))
    try:
        yield
    finally:
        _contexts.reset(token)


def remark(text: str, subject: Hashable) -> None:
    """Make a remark; outside of the contexts it is a warning of Python.

    Args:
        subject: Of all remarks on the same subject, a context receives the first.
    """
    contexts = _contexts.get()
    if not contexts:
        warnings.warn(text, UserWarning, stacklevel=2)
        return
    receive, known = contexts[-1]
    if subject in known:
        return
    is_new = not any(subject in subjects for _, subjects in contexts)
    for _, subjects in contexts:
        subjects.add(subject)
    receive(text, is_new)
