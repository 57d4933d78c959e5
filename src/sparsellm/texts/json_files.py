"""Strict JSON parsing of untrusted files: the result is a checked value, or an error with one message. Durable writing."""

from __future__ import annotations

import glob
import json
import math
import os
import platform
import re
import stat
import zlib
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from pydantic_core import ValidationError

from sparsellm.errors import InvalidSetting, SparseLLMError, printable, written_to

Value = TypeVar("Value")

FORMAT = 1
"""The number that stands as `format` in reports and other records of runs."""

MAX_JSON_BYTES = 256 * 2**20
"""Largest file that is read. A safetensors header has up to 100 MB; indices and reports are smaller."""

LFS_POINTER = b"version https://git-lfs.github.com/spec/"
"""First bytes of the file that stands for another where a repository was cloned without Git LFS."""

BOM = b"\xef\xbb\xbf"
"""The byte-order mark of UTF-8, with which some programs begin a text."""

IS_POINTER = "is a Git LFS pointer, not the file: run git lfs pull"

MAX_DEPTH = 64
"""Maximum nesting of lists and objects, so that values can be traversed by recursion."""

MAX_INTEGER = 2**64
"""Exclusive limit on the absolute value of integers; torch and numpy have no larger ones."""

TOO_DEEP = f"it is nested more than {MAX_DEPTH} levels deep"
"""Reason for refusing a file."""

_SURROGATE = re.compile("[\ud800-\udfff]")


class Unreadable(ValueError):
    """A file cannot be read; the message is the reason, as a clause that callers put into a sentence."""


def read_json(path: Path, refusal: type[SparseLLMError] = InvalidSetting) -> Any:
    """Read a JSON file.

    Args:
        path: A regular file of at most `MAX_JSON_BYTES`, in UTF-8.
        refusal: Exception class to raise.

    Raises:
        refusal: If the file is missing, not a regular file or not JSON, has duplicate keys, is nested more than `MAX_DEPTH`
            levels deep, or contains integers beyond `MAX_INTEGER` or lone surrogates; the message names the file.
    """
    try:
        value = json.loads(decode_utf8(read_bytes(path)), object_pairs_hook=build_mapping, parse_int=parse_integer)
        check_value(value)
    except json.JSONDecodeError as error:
        reason = f"it is not JSON at line {error.lineno}, column {error.colno}: {error.msg}"
    except RecursionError:
        reason = TOO_DEEP
    except Unreadable as error:
        reason = str(error)
    else:
        return value
    raise refusal(f"{path} cannot be read: {reason}.")


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
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "top level"
        reason = f"{where}: {first['msg']}, got {printable(repr(first['input']), 80)}"
    raise refusal(f"{path} is damaged: it is not a {what} ({reason}).")


def read_bytes(path: Path, limit: int | None = MAX_JSON_BYTES) -> bytes:
    """Read a regular file.

    Args:
        limit: Maximum size in bytes; None for no limit.

    Raises:
        Unreadable: If the file is missing, larger, or not a regular file. Never blocks on a pipe.
    """
    try:
        # O_NONBLOCK: opening a pipe without a writer would block.
        with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb") as stream:
            status = os.fstat(stream.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise Unreadable("it is not a regular file")
            if limit is not None and status.st_size > limit:
                raise Unreadable(f"it has {status.st_size:,} bytes, more than {limit:,}")
            most = -1 if limit is None else min(limit, status.st_size + 1)  # Python takes as much memory before it reads
            content: bytes = stream.read(most)
            if content.startswith(LFS_POINTER):
                raise Unreadable(f"it {IS_POINTER}")
            return content
    except OSError as error:
        raise Unreadable(error.strerror or "the system refuses") from None
    except ValueError as error:  # a name with a NUL byte
        raise Unreadable(str(error)) from None


def decode_utf8(content: bytes) -> str:
    """Decode UTF-8 without a byte-order mark; raise Unreadable with the position of the first invalid byte."""
    try:
        return content.removeprefix(BOM).decode("utf-8")
    except UnicodeDecodeError as error:
        raise Unreadable(f"byte {error.start:,} is not UTF-8") from None


def parse_integer(digits: str) -> int:
    """Parse an integer; raise Unreadable if its absolute value is `MAX_INTEGER` or more."""
    if len(digits) > 21 or abs(int(digits)) >= MAX_INTEGER:
        raise Unreadable(f"the integer {digits[:20]}{'…' if len(digits) > 20 else ''} has {len(digits):,} digits")
    return int(digits)


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
                raise Unreadable(TOO_DEEP)
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
