"""JSON files of others: a value, or an error with one message. Durable writing."""

from __future__ import annotations

import glob
import json
import math
import os
import platform
import re
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from pydantic_core import ValidationError

from sparsellm.errors import InvalidSetting, SparseLLMError, first_line, printable, written_to

Value = TypeVar("Value")

FORMAT = 1
"""The number that stands as `format` in reports and other records of runs."""

LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""First bytes of the file that stands for another where a repository was cloned without Git LFS."""

BOM = b"\xef\xbb\xbf"
"""The byte-order mark of UTF-8, with which some programs begin a text."""

IS_POINTER = "is a Git LFS pointer, not the file: run git lfs pull"

MAX_DEPTH = 64
"""Maximum nesting of lists and objects, so that values can be traversed by recursion."""

MAX_INTEGER = 2**64
"""Exclusive limit on the absolute value of integers; torch and numpy have no larger ones, and floats overflow."""

_SURROGATE = re.compile("[\ud800-\udfff]")


class Unreadable(ValueError):
    """A file cannot be read; the message is the reason, as a clause that callers put into a sentence."""


def read_json(path: Path, refusal: type[SparseLLMError] = InvalidSetting) -> Any:
    """Read a JSON file.

    Args:
        refusal: Exception class to raise.

    Raises:
        refusal: If the file cannot be read, is not JSON, has an object with equal keys, is nested more than `MAX_DEPTH` levels
            deep, or contains lone surrogates or integers beyond `MAX_INTEGER`; the message names the file.
    """
    try:
        value = json.loads(read_utf8(path), object_pairs_hook=build_mapping, parse_int=parse_integer)
        check_value(value)
    except (ValueError, RecursionError) as error:
        raise refusal(f"{path} cannot be read: {first_line(error)}.") from None
    return value


def read_record(
    path: Path, validate: Callable[[Any], Value], what: str, *, refusal: type[SparseLLMError] = InvalidSetting
) -> tuple[Value, Any]:
    """Read a JSON file that a run wrote and a user may have edited.

    Args:
        validate: Function that makes the record from the file's content, and raises pydantic's ValidationError for any other.
        what: Name of the record in error messages.
        refusal: Exception class for a file that cannot be read.

    Returns:
        The record, and the content of the file as plain data.

    Raises:
        refusal: The file is unreadable, of another format, or invalid; the message has the first invalid field.
    """
    content = read_json(path, refusal)
    if isinstance(content, dict) and content.get("format", FORMAT) != FORMAT:
        raise refusal(f"{path} has the format {printable(repr(content['format']), 80)}; this version reads {FORMAT}.")
    try:
        return validate(content), content
    except ValueError as error:  # also pydantic's
        raise refusal(f"{path} is damaged: it is not a {what} ({first_fault(error)}).") from None


def first_fault(error: Exception) -> str:
    """The first line of an error's text; of pydantic's errors the first field that is wrong, and its value."""
    if not isinstance(error, ValidationError):
        return first_line(error)
    first = error.errors(include_url=False)[0]
    where = ".".join(map(str, first["loc"])) or "top level"
    return f"{where}: {first['msg']}, got {printable(repr(first['input']), 80)}"


def read_utf8(path: Path) -> str:
    """Read a file without a byte-order mark.

    Raises:
        Unreadable: If the file is missing, not UTF-8, or not a regular file. Never blocks on a pipe.
    """
    try:
        if path.exists() and not path.is_file():
            raise Unreadable("it is not a regular file")
        content = path.read_bytes()
        if content.startswith(LFS_POINTER):
            raise Unreadable(f"it {IS_POINTER}")
        return content.decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise Unreadable(getattr(error, "strerror", None) or first_line(error)) from None


def parse_integer(digits: str) -> int:
    """Parse an integer; raise Unreadable if its absolute value is `MAX_INTEGER` or more."""
    if abs(number := int(digits)) >= MAX_INTEGER:
        raise Unreadable(f"the integer {digits[:20]}… is too large")
    return number


def is_text(string: str) -> bool:
    """Whether a string can be encoded as UTF-8; JSON escapes and file names that are not UTF-8 can yield lone surrogates."""
    return not _SURROGATE.search(string)


def is_path(name: str) -> bool:
    """Whether a string is a valid path: without NUL, each component at most 255 bytes; others raise errors when opened."""
    if "\0" in name or not is_text(name) or len(name) > 1024:
        return False
    return all(len(part.encode()) < 256 for part in name.split("/"))


def check_value(value: Any, limit: int | None = None) -> None:
    """Raise Unreadable if a value is nested too deeply, has lone surrogates, or consists of more than `limit` values."""
    stack: list[tuple[Any, int]] = [(value, 1)]
    count = 0
    while stack:
        item, depth = stack.pop()
        count += 1
        if limit is not None and count > limit:
            raise Unreadable(f"it holds more than {limit:,} values")
        if isinstance(item, str) and not is_text(item):
            raise Unreadable(f"{item[:80]!r} is not UTF-8 text")
        if isinstance(item, (dict, list, tuple)):
            if depth > MAX_DEPTH:
                raise Unreadable(f"it is nested more than {MAX_DEPTH} levels deep")
            children = [*item.keys(), *item.values()] if isinstance(item, dict) else item
            stack += [(child, depth + 1) for child in children]


def build_mapping(pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """Build a mapping from its key-value pairs; raise Unreadable for duplicate keys."""
    mapping: dict[Any, Any] = {}
    for key, value in pairs:
        if key in mapping:
            raise Unreadable(f"it names {str(key)[:80]!r} twice")
        mapping[key] = value
    return mapping


def durable(file: Path, data: bytes) -> None:
    """Write a file atomically and flush it to disk: after a crash it has either its old or its new content.

    What a process of this machine left of the same file when it was killed is removed.
    """
    machine = f"{zlib.crc32(platform.node().encode()):08x}"  # unique with the process, as another one may write the same file
    temporary = file.with_name(f"{file.name}.{machine}.{os.getpid()}.partial")
    try:
        with written_to(file):
            with temporary.open("wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            temporary.replace(file)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    for left in file.parent.glob(f"{glob.escape(file.name)}.{machine}.*.partial"):
        if not _is_running(left.name.split(".")[-2]):
            with suppress(OSError):
                left.unlink(missing_ok=True)
    flush_folder(file.parent)


def _is_running(process: str) -> bool:
    """Whether a process of that number runs on this machine, as far as the system tells."""
    if not process.isdecimal() or os.name != "posix":
        return True
    try:
        os.kill(int(process), 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):  # it is another user's
        return True
    return True


def flush_folder(folder: Path) -> None:
    """Flush the entries of a folder to disk, where the system supports it."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def strict_json(data: Any) -> str:
    """JSON that every parser reads: infinite numbers become the string "inf"."""
    return json.dumps(finite(data), indent=1, allow_nan=False)


def finite(data: Any) -> Any:
    """Copy data with strings in place of infinite numbers and NaN."""
    if isinstance(data, float) and not math.isfinite(data):
        return str(data)
    if isinstance(data, dict):
        return {key: finite(value) for key, value in data.items()}
    return [finite(value) for value in data] if isinstance(data, (list, tuple)) else data
