"""Every error that this package raises on purpose, as one tree.

    SparseLLMError
    ├── InvalidSetting      (ValueError)       a setting that cannot be: sparsity 70, N:M with N >= M, an unknown name
    ├── UnsupportedModel    (ValueError)       a checkpoint that is sound but that this package cannot prune
    ├── BadCheckpoint       (OSError)          a model folder that is missing, half-written, or holds NaN
    ├── BadText             (ValueError)       a text that is missing, empty, too short, or without the field asked for
    ├── OutputExists        (FileExistsError)  a folder that would be overwritten
    ├── Unreachable         (ConnectionError)  a hub name that needs a network, and there is none
    ├── AccessDenied        (PermissionError)  the hub wants a login, or one that may do more
    ├── MissingPackage      (ImportError)      an optional package that a command needs and that is not installed
    ├── CannotResume        (RuntimeError)     an unfinished output, begun otherwise or in use by another process
    ├── LostProcess         (RuntimeError)     one of several processes that work together failed or cannot be reached
    ├── TooLarge            (MemoryError)      a stage that needs more memory than there is, found before it starts
    ├── SingularGram        (ArithmeticError)  a Gram matrix that no damping in reach makes positive definite
    ├── NonFinite           (ArithmeticError)  NaN or infinity in activations or in a solution
    └── VerificationFailed  (RuntimeError)     what was written is not what was meant

A message says what is wrong, what was got against which limit, and what to do. Where it happened is added with ``add_note`` by
whoever knows, as the error passes.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

MAX_MESSAGE = 1000
"""Characters of a message; what a file holds can be quoted at any length."""


class SparseLLMError(Exception):
    """The root: catch this to catch everything that this package raises on purpose."""

    def __str__(self) -> str:
        return printable(super().__str__())


class InvalidSetting(SparseLLMError, ValueError):
    """A setting that cannot be, found before any heavy work."""


class UnsupportedModel(SparseLLMError, ValueError):
    """A sound checkpoint of a kind that this package cannot prune."""


class BadCheckpoint(SparseLLMError, OSError):
    """A model folder that is missing, incomplete, unreadable, or that holds non-finite weights."""


class BadText(SparseLLMError, ValueError):
    """A text that is missing, empty, shorter than one window, or without the field asked for."""


class OutputExists(SparseLLMError, FileExistsError):
    """An output folder that is already there; nothing is overwritten unless asked for by name."""


class Unreachable(SparseLLMError, ConnectionError):
    """A hub name that is neither cached nor reachable."""


class AccessDenied(SparseLLMError, PermissionError):
    """Something that the hub allows only with a login, or with another one."""


class MissingPackage(SparseLLMError, ImportError):
    """An optional package that is not installed; the message names the extra that brings it."""


class CannotResume(SparseLLMError, RuntimeError):
    """An unfinished run that cannot go on as asked: it was begun otherwise, or another process works on it."""


class LostProcess(SparseLLMError, RuntimeError):
    """One of the processes that work together failed or cannot be reached; the message says which, and why if it is known."""


class TooLarge(SparseLLMError, MemoryError):
    """A stage that needs more memory than there is, refused before it starts."""


class SingularGram(SparseLLMError, ArithmeticError):
    """A matrix that should be positive definite and, at the damping given, is not."""


class NonFinite(SparseLLMError, ArithmeticError):
    """NaN or infinity where a finite number is needed."""


class VerificationFailed(SparseLLMError, RuntimeError):
    """A written checkpoint that does not hold what was meant. differences: a sentence for each."""

    def __init__(self, message: str, differences: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.differences = differences


def nearest(word: str, known: Iterable[str]) -> str:
    """A sentence that names the known word closest to `word`, or all of them when none is close."""
    words = sorted(known)
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.6)
    return f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(words)}."


def printable(text: str, limit: int = MAX_MESSAGE) -> str:
    """A text that any terminal can show: characters that are no text are escaped, and a long one lacks its middle."""
    if len(text) > limit:
        text = f"{text[: limit * 2 // 3]} … {text[-limit // 3 :]}"
    return re.sub("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", lambda found: repr(found[0])[1:-1], text)
