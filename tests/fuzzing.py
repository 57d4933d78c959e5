"""Files that are nearly sound: valid ones with a few changes each, and what must come of reading them."""

from __future__ import annotations

import copy
import json
import os
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

from sparsellm.errors import MAX_MESSAGE, SparseLLMError

INPUTS = 1000
"""Changed files that each reader is shown."""

SECONDS = 10.0
"""What reading one may take; valid ones take milliseconds."""

DEEP = 100_000

FRAGMENTS = [
    b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\x1b[2J", b"\r\n", b"\t", b"\xe2\x80\xa8", b"\x80" * 9,
    b"]", b"}", b'"', b"'", b",", b":", b": ", b"- ", b"\n", b"#", b"|", b">", b"%",
    b"1" * 5000, b"-1", b"1e999", b"NaN", b"-Infinity", b"null", b"true", b"0x1F", b"1:30", b"2026-13-45", b"x" * 70_000,
    b"!!int x", b"!!float x", b"!!bool x", b"!!binary x", b"!!timestamp x", b"!!set {a}", b"!!omap [a: 1]", b"!!python/none x",
    b"!!python/object/apply:os.getcwd []", b"&a [*a]", b"*b", b"<<: {a: 1}", b"? [a, b]\n: 1", b'"\\ud800"', b"{a: 1, a: 2}",
]  # fmt: skip
"""What is put into a file's bytes."""

BOTTOMLESS = [b"[" * DEEP, b"{" * DEEP, b'{"a":' * DEEP, b"- " * DEEP]
"""The same, rarely: to refuse one takes YAML's reader a second."""

RAW = [
    "1" * 5000, "-1", "0", "1", "2", "3.5", "1e999", "1e308", "-1e-320", "9223372036854775808", "18446744073709551615",
    "NaN", "Infinity", "null", "true", "false", '""', '"x"', '"0"', '" "', r'"\ud800"', r'"\u0000"', r'"\u001b[2J"', '"a$b_{"',
    '"../../x"', '"/etc/hostname"', '"' + "n" * 300 + '"', '"' + "x" * 70_000 + '"', "[]", "{}", "[[]]", "[null]", '["x"]',
    '{"x": 5}', '{"": {}}', '[1, "a", {}]', "[" * 80 + "]" * 80, '{"a": 1, "a": 2}', "", "x", "1e5", "-0.0",
]  # fmt: skip
"""What is put in place of a value, as it stands in a file of JSON."""

ALSO_YAML = ["!!int x", "!!float 1_0", "!!bool x", "!!str 3", "!!python/name:os.system", "&a [*a]", "*b", "2026-01-01", "2:4"]


Changed = Callable[[Random], bytes]
"""A file that is nearly sound, by chance."""


def mutated(valid: Sequence[bytes]) -> Changed:
    """Valid files with one to three changes of their bytes."""

    def changed(random: Random) -> bytes:
        content = random.choice(valid)
        for _ in range(random.randint(1, 3)):
            at = random.randint(0, len(content))
            end = at + random.randint(1, 64)
            kind = random.random()
            fragment = (
                random.choice(FRAGMENTS if kind < 0.7 else BOTTOMLESS)
                if kind < 0.705
                else random.randbytes(random.randint(1, 8))
            )
            flipped = bytes(byte ^ (1 << random.randrange(8)) for byte in content[at : at + 1])
            kinds = [b"", flipped + content[at + 1 :], fragment + content[at:], fragment + content[end:], content[end:]]
            kinds.append(content[at:end] + content[at:])
            content = content[:at] + random.choices(kinds, (1, 3, 4, 2, 2, 1))[0]
        return content

    return changed


def damage(content: bytes, random: Random) -> bytes:
    """A weight file with one to three changes of its header or its data."""
    length = 8 + int.from_bytes(content[:8], "little")
    for _ in range(random.randint(1, 3)):
        at = random.randrange(length) if random.random() < 0.5 else random.randrange(len(content))
        kind = random.randrange(6)
        if kind <= 2:
            content = content[:at] + bytes([random.randrange(256)]) + content[at + 1 :]
        elif kind == 3:
            content = content[:at]
        elif kind == 4:
            digits = [index for index, byte in enumerate(content[:length]) if 48 <= byte < 58] or [0]
            at = random.choice(digits)
            content = content[:at] + str(random.randrange(10)).encode() + content[at + 1 :]
        else:
            size = random.randint(1, 64)
            content = content[:at] + random.randbytes(size) + content[at + size :]
        length = min(length, len(content)) or 1
    return content or b"x"


def replaced(valid: Sequence[Any], yaml: bool = False) -> Changed:
    """JSON (which is YAML too) of valid values, of which one or two are replaced, removed, renamed or joined by another."""
    places = [list(_places(value)) for value in valid]
    texts = RAW + ALSO_YAML * yaml

    def changed(random: Random) -> bytes:
        number = random.randrange(len(valid))
        value = copy.deepcopy(valid[number])
        raw: dict[str, str] = {}
        for _ in range(random.randint(1, 2)):
            mark = f"@@{len(raw)}@@"
            kind = random.choices(("replace", "remove", "rename", "add"), (6, 1, 1, 1))[0]
            value = _change(value, random.choice(places[number]), kind, mark)
            raw[mark] = random.choice(texts) if random.random() < 0.995 else "[" * DEEP
        written = json.dumps(value)
        for mark, text in raw.items():
            written = written.replace(f'"{mark}"', text)
        return written.encode()

    return changed


def every(valid: Any) -> Iterator[bytes]:
    """JSON of a valid value, each value within it replaced by each of `RAW` in turn."""
    for at in _places(valid):
        changed = json.dumps(_change(copy.deepcopy(valid), at, "replace", "@@"))
        for text in RAW:
            yield changed.replace('"@@"', text).encode()


def either(*changes: Changed) -> Changed:
    """One of several kinds of change."""
    return lambda random: random.choice(changes)(random)


def _places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to each value within a value, itself included."""
    yield at
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inside:
        yield from _places(each, (*at, key))


def _change(value: Any, at: Sequence[Any], kind: str, mark: str) -> Any:
    """The value with one change at a place; a place that an earlier change removed is left alone."""
    if not at:
        return mark if kind == "replace" else value
    inside = value
    try:
        for key in at[:-1]:
            inside = inside[key]
        inside[at[-1]]
    except (LookupError, TypeError):
        return value
    if isinstance(inside, dict):
        if kind == "remove":
            del inside[at[-1]]
        else:
            inside[{"replace": at[-1], "add": "added", "rename": f"{at[-1]}x"}[kind]] = mark
            if kind == "rename":
                del inside[at[-1]]
    elif isinstance(inside, list):
        inside[at[-1] : at[-1] + (kind != "add")] = [] if kind == "remove" else [mark]
    return value


@dataclass
class Tally:
    """How many inputs were tried, and what came of them."""

    tried: int = 0
    accepted: int = 0
    message: int = 0


class TooSlow(BaseException):
    """Reading took too long. No Exception: readers turn those of transformers, of whatever kind, into messages."""


@contextmanager
def limited(seconds: float = SECONDS) -> Iterator[None]:
    """Within the context whatever takes longer is an error."""

    def rung(_: int, __: FrameType | None) -> None:
        raise TooSlow(f"it took longer than {seconds} s")

    before = signal.signal(signal.SIGALRM, rung)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def attempt(tally: Tally, read: Callable[[], object]) -> None:
    """Read once: a value or one short message is right, anything else raises."""
    tally.tried += 1
    try:
        with limited():
            read()
        tally.accepted += 1
    except SparseLLMError as error:
        text = str(error)
        assert 0 < len(text) <= MAX_MESSAGE + 100, text
        assert text.count("\n") < 8, text
        text.encode()
        tally.message += 1


def fuzz(
    file: Path,
    contents: Changed | Iterable[bytes],
    read: Callable[[], object],
    inputs: int = INPUTS,
    refuses: bool = True,
) -> Tally:
    """Show a reader changed contents of a file, the same ones in every run; nothing may be left beside the file.

    refuses: whether some must be refused, or none may be.
    """
    tally = Tally()
    failures: dict[str, str] = {}
    file.touch()
    there = sorted(os.listdir(file.parent))

    def show(content: bytes) -> None:
        file.unlink()  # an ext4 file system writes a file that is cut to the disk at once
        file.write_bytes(content)
        try:
            attempt(tally, read)
        except (Exception, TooSlow) as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{type(error).__name__} at {Path(frame.filename).name}:{frame.lineno}: {str(error)[:200]}"
            failures.setdefault(place, repr(content[:600]))

    random = Random(file.name)
    for content in (contents(random) for _ in range(inputs)) if callable(contents) else contents:
        show(content)
    left = sorted(set(os.listdir(file.parent)) - set(there))
    counts = f"tried {tally.tried}, accepted {tally.accepted}, message {tally.message}"
    print(f"{file.name}: {counts}, traceback {tally.tried - tally.accepted - tally.message}")
    assert not failures, "\n".join(f"{place}\n    {content}" for place, content in failures.items())
    assert not left, f"{left} were left behind"
    assert bool(tally.message) == refuses
    return tally
