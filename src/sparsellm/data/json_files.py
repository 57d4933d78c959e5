"""JSON that others wrote, read so that whatever a file holds, reading it ends in a value or in one message."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from sparsellm.errors import InvalidSetting, SparseLLMError

MAX_BYTES = 256 * 2**20
"""The largest file that is read whole. A safetensors header may have 100 MB; an index or a report is smaller."""

MAX_DEPTH = 64
"""Levels of lists and objects in one another; what walks a value by recursion is safe below it."""

MAX_INTEGER = 2**64
"""Integers are smaller in absolute value: torch and numpy hold no larger ones."""

_SURROGATE = re.compile("[\ud800-\udfff]")


class Unreadable(ValueError):
    """Why a file's content cannot be read, as the end of a sentence."""


def read_json(path: Path, refusal: type[SparseLLMError] = InvalidSetting) -> Any:
    """The value that a file of JSON holds.

    Args:
        path: A regular file in UTF-8 of at most `MAX_BYTES`.
        refusal: What is raised for a file that cannot be read.

    Raises:
        refusal: With the path and the reason, for a file that is missing, is not a regular one, or holds what `parse_json`
            refuses.
    """
    try:
        return _parsed(read_bytes(path))
    except Unreadable as error:
        raise refusal(f"{path} cannot be read: {error}.") from None


def parse_json(text: str | bytes, source: str, refusal: type[SparseLLMError] = InvalidSetting) -> Any:
    """The value of a text of JSON.

    Args:
        text: The text, as characters or in UTF-8.
        source: What messages call it.
        refusal: What is raised for a text that cannot be read.

    Raises:
        refusal: With the source and the reason, for what is not JSON, names a key twice, is nested more than `MAX_DEPTH` levels
            deep, or holds an integer beyond `MAX_INTEGER` or characters that are no text (lone surrogates).
    """
    try:
        return _parsed(text)
    except Unreadable as error:
        raise refusal(f"{source} cannot be read: {error}.") from None


def read_bytes(path: Path, limit: int | None = MAX_BYTES) -> bytes:
    """The content of a regular file of at most `limit` bytes; raises Unreadable for any other, without waiting for a pipe."""
    try:
        # O_NONBLOCK: opening a pipe that nobody writes to would wait for a writer.
        with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as stream:
            status = os.fstat(stream.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise Unreadable("it is not a regular file")
            if limit is not None and status.st_size > limit:
                raise Unreadable(f"it has {status.st_size:,} bytes, more than {limit:,}")
            return stream.read(-1 if limit is None else limit)
    except OSError as error:
        raise Unreadable(error.strerror or "the system refuses") from None
    except ValueError as error:  # a name with a NUL byte
        raise Unreadable(str(error)) from None


def decoded(content: bytes) -> str:
    """UTF-8 as text; raises Unreadable with the first byte that is none."""
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Unreadable(f"byte {error.start:,} is not UTF-8") from None


def integer(digits: str) -> int:
    """An integer smaller than `MAX_INTEGER` in absolute value; raises Unreadable for a larger one."""
    if len(digits) > 21 or abs(int(digits)) >= MAX_INTEGER:
        raise Unreadable(f"the integer {digits[:20]}{'…' if len(digits) > 20 else ''} has {len(digits):,} digits")
    return int(digits)


def is_text(string: str) -> bool:
    """Whether a string can be written as UTF-8: JSON's escapes, and names of files that are not UTF-8, can give others."""
    return not _SURROGATE.search(string)


def is_path(name: str) -> bool:
    """Whether a file can have this name: systems take 255 bytes for a part of a path, and raise on more and on NUL."""
    if "\0" in name or not is_text(name) or len(name) > 1024:
        return False
    return all(len(part.encode()) < 256 for part in name.split("/"))


def check_value(value: Any, limit: int | None = None) -> None:
    """Raise Unreadable for a value that is nested too deeply, holds text that is none, or more than `limit` values."""
    waiting: list[tuple[Any, int]] = [(value, 1)]
    count = 0
    while waiting:
        one, depth = waiting.pop()
        count += 1
        if limit is not None and count > limit:
            raise Unreadable(f"it holds more than {limit:,} values")
        if isinstance(one, str) and not is_text(one):
            raise Unreadable(f"{one[:80]!r} is not UTF-8 text")
        if isinstance(one, (dict, list, tuple)):
            if depth > MAX_DEPTH:
                raise Unreadable(f"it is nested more than {MAX_DEPTH} levels deep")
            inside = [*one.keys(), *one.values()] if isinstance(one, dict) else one
            waiting += [(each, depth + 1) for each in inside]


def repeated(keys: Iterable[Any]) -> Unreadable | None:
    """A complaint about the first key that comes twice, if there is one."""
    seen: set[Any] = set()
    for key in keys:
        if key in seen:
            return Unreadable(f"it names {str(key)[:80]!r} twice")
        seen.add(key)
    return None


def _parsed(text: str | bytes) -> Any:
    """The value of a text of JSON, checked."""
    text = decoded(text) if isinstance(text, bytes) else text
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_int=integer)
    except json.JSONDecodeError as error:
        raise Unreadable(f"it is not JSON at line {error.lineno}, column {error.colno}: {error.msg}") from None
    except RecursionError:
        raise Unreadable(f"it is nested more than {MAX_DEPTH} levels deep") from None
    check_value(value)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose keys are all different."""
    value = dict(pairs)
    if len(value) < len(pairs):
        raise repeated(key for key, _ in pairs) or Unreadable("it names a key twice")
    return value
