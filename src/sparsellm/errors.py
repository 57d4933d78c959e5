"""The exceptions that this package raises.

    SparseLLMError
    ├── InvalidSetting      (ValueError)       an invalid setting: sparsity 70, N:M with N >= M, an unknown name
    ├── UnsupportedModel    (ValueError)       a valid checkpoint that this package cannot prune
    ├── BadCheckpoint       (OSError)          a model folder that is missing, incomplete, or contains NaN
    ├── BadText             (ValueError)       a text that is missing, empty, too short, or lacks the selected field
    ├── OutputExists        (FileExistsError)  an output folder that already exists
    ├── Unreachable         (ConnectionError)  a hub name that is not cached, without a network connection
    ├── AccessDenied        (PermissionError)  a hub resource that needs a login, or more permissions
    ├── MissingPackage      (ImportError)      an optional package that is required but not installed
    ├── CannotResume        (RuntimeError)     an unfinished output with other settings, or in use by another process
    ├── LostProcess         (RuntimeError)     another process of a distributed run failed or is unreachable
    ├── TooLarge            (MemoryError)      a stage that needs more memory than available, detected before it starts
    ├── SingularGram        (ArithmeticError)  a Gram matrix that is not positive definite even after damping
    ├── NonFinite           (ArithmeticError)  NaN or infinity in activations or in a solution
    ├── BrokenContract      (RuntimeError)     a solver or method that breaks a rule of results, such as the pattern
    ├── TargetNotReached    (RuntimeError)     a search in which no value meets the target
    └── VerificationFailed  (RuntimeError)     a written checkpoint that differs from the pruned model

A message states what is wrong, the value and the limit, and what to do. Callers add the location with ``add_note``.
Settings are named as in Python, between backticks, as `samples` or `offload=False`; the command line writes its options there.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

MAX_MESSAGE = 1000
"""Most characters of a message, which may quote arbitrarily long file contents."""


class SparseLLMError(Exception):
    """Base class of all exceptions that this package raises."""

    def __str__(self) -> str:
        return printable(super().__str__())


class InvalidSetting(SparseLLMError, ValueError):
    """An invalid setting, detected before any expensive computation."""


class UnsupportedModel(SparseLLMError, ValueError):
    """A valid checkpoint of an architecture that this package cannot prune."""


class BadCheckpoint(SparseLLMError, OSError):
    """A model folder that is missing, incomplete or unreadable, or contains non-finite weights."""


class BadText(SparseLLMError, ValueError):
    """A text that is missing, empty, shorter than one sequence, or lacks the selected field."""


class OutputExists(SparseLLMError, FileExistsError):
    """An output folder that already exists; it is overwritten only on explicit request."""


class Unreachable(SparseLLMError, ConnectionError):
    """A hub model or data set that is neither cached nor reachable."""


class AccessDenied(SparseLLMError, PermissionError):
    """A hub resource that needs a login, or an account with more permissions."""


class MissingPackage(SparseLLMError, ImportError):
    """An optional package that is not installed; the message names the extra that installs it."""


class CannotResume(SparseLLMError, RuntimeError):
    """An unfinished run that cannot be resumed: its settings differ, or another process uses its folder."""


class LostProcess(SparseLLMError, RuntimeError):
    """Another process of a distributed run failed or is unreachable; the message names it, and the reason if known."""


class TooLarge(SparseLLMError, MemoryError):
    """A stage that needs more memory than available, refused before it starts."""


class SingularGram(SparseLLMError, ArithmeticError):
    """A Gram matrix that is not positive definite with the given damping."""


class NonFinite(SparseLLMError, ArithmeticError):
    """NaN or infinity where finite values are required."""


class BrokenContract(SparseLLMError, RuntimeError):
    """A solver or method that breaks a rule; the message names it, the layer and the rule (docs/build-on-sparsellm.md)."""


class VerificationFailed(SparseLLMError, RuntimeError):
    """A written checkpoint that differs from what it should contain.

    Attributes:
        differences: One sentence per difference.
    """

    def __init__(self, message: str, differences: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.differences = differences


class TargetNotReached(SparseLLMError, RuntimeError):
    """A search in which no sparsity, or no number of bits, meets the target.

    Attributes:
        points: The values that were tried, as `sparsellm.extensions.studies.search_result.Point`.
    """

    def __init__(self, message: str, points: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.points = tuple(points)


@contextmanager
def written_to(path: str | os.PathLike[str]) -> Iterator[None]:
    """Name what is written in errors of the system: of a full disk they name no file, else a temporary one or a part of it."""
    try:
        yield
    except OSError as error:
        if not isinstance(error, SparseLLMError):
            error.filename, error.filename2 = str(path), None
        raise


@contextmanager
def checkpoint_errors(name: str) -> Iterator[None]:
    """Put a checkpoint's name in front of what is wrong with its files."""
    try:
        yield
    except BadCheckpoint as error:
        raise BadCheckpoint(f"{name}: {error}") from None


def nearest(word: str, known: Iterable[str]) -> str:
    """Return a sentence that suggests the known name closest to `word`, or lists all names if none is close."""
    names = sorted(known)
    matches = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    return f"Did you mean {matches[0]!r}?" if matches else f"Known: {', '.join(names)}."


def first_line(error: BaseException) -> str:
    """Return the first line of an error's text, without a trailing full stop; the error's class if there is no text."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".")


def capitalized(text: str) -> str:
    """The text with a capital letter at its start."""
    return text[:1].upper() + text[1:]


def plural(count: int, noun: str) -> str:
    """A count with its noun, as "1 layer" or "1,024 layers"."""
    return f"{count:,} {noun}{'' if count == 1 else 'es' if noun.endswith('s') else 's'}"


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in torch, such as "float32"."""
    return str(dtype).removeprefix("torch.")


def printable(text: str, limit: int = MAX_MESSAGE) -> str:
    """Make a text safe to print: escape control characters and surrogates, and elide the middle beyond `limit` characters."""
    if len(text) > limit:
        text = f"{text[: limit * 2 // 3]} … {text[-limit // 3 :]}"
    return re.sub("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]", lambda match: repr(match[0])[1:-1], text)
