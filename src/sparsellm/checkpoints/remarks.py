"""Remarks on checkpoints, such as that one has an adapter: made where a checkpoint is opened, received by whoever opened it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

Receive = Callable[[str, bool], None]
"""Called with a remark, and whether no context around this one has received it."""


@dataclass(frozen=True)
class _Receiver:
    """Receives each remark once."""

    receive: Receive
    around: _Receiver | None
    subjects: set[Hashable] = field(default_factory=set)


_receiver: ContextVar[_Receiver | None] = ContextVar("receiver of remarks", default=None)


@contextmanager
def remarks_to(receive: Receive) -> Iterator[None]:
    """Send the remarks that are made within the context to a function, each once, however often its checkpoint is opened.

    Contexts may be nested, as that of a run in that of a command: the inner one receives, and the outer ones count a remark as
    received.
    """
    token = _receiver.set(_Receiver(receive, _receiver.get()))
    try:
        yield
    finally:
        _receiver.reset(token)


def remark(text: str, subject: Hashable) -> None:
    """Make a remark; outside of the contexts it is a warning of Python.

    Args:
        subject: Of all remarks on the same subject, a context receives the first.
    """
    inner = _receiver.get()
    if inner is None:
        warnings.warn(text, UserWarning, stacklevel=2)
        return
    if subject in inner.subjects:
        return
    contexts, context = [inner], inner.around
    while context is not None:
        contexts.append(context)
        context = context.around
    is_new = not any(subject in context.subjects for context in contexts)
    for each in contexts:
        each.subjects.add(subject)
    inner.receive(text, is_new)
